/* core/fs.h: paths, whole files, atomic files and folders, and what a full disk leaves behind. */
#include "core/fs.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/test.h"

static void write_file(const char *path, const char *text) {
  Error err = {""};
  if (fs_write_atomic(path, text, strlen(text), &err)) fail_msg("%s", err.msg);
}

static void assert_text(const char *path, const char *want) {
  Error err = {""};
  size_t len;
  char *text = fs_read(path, &len, &err);
  if (!text) fail_msg("%s", err.msg);
  assert_int_equal(len, strlen(want));
  assert_string_equal(text, want);
  free(text);
}

static void paths(void **state) {
  (void)state;
  static const struct {
    const char *dir, *name, *want;
  } joins[] = {
      {"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"a", "/b", "/b"}, {"/", "b", "/b"}, {"", "b", "b"}};
  for (size_t i = 0; i < sizeof joins / sizeof *joins; i++) {
    char *p = fs_join(joins[i].dir, joins[i].name);
    assert_string_equal(p, joins[i].want);
    free(p);
  }
  static const char *const dirs[][2] = {{"a/b", "a"},  {"a", "."},        {"/a", "/"},
                                        {"/", "/"},    {"", "."},         {"a/b/", "a"},
                                        {"a//b", "a"}, {"/a/b/c", "/a/b"}};
  for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
    char *p = fs_dirname(dirs[i][0]);
    assert_string_equal(p, dirs[i][1]);
    free(p);
  }
}

static void folders(void **state) {
  (void)state;
  Error err = {""};
  const char *deep = test_file("folders/a/b"), *file = test_file("folders/a/file");
  assert_int_equal(fs_make_dirs(deep, &err), 0);
  assert_int_equal(fs_make_dirs(deep, &err), 0);
  assert_true(fs_is_dir(deep) && fs_exists(deep));
  write_file(file, "x");
  assert_true(fs_exists(file) && !fs_is_dir(file));
  assert_int_equal(fs_make_dirs(test_file("folders/a/file/c"), &err), -1);
  assert_non_null(strstr(err.msg, "file is not a folder"));
  /* A link to a folder goes, what it points to stays. */
  assert_int_equal(symlink(deep, test_file("folders/link")), 0);
  write_file(test_file("folders/a/b/kept"), "k");
  assert_int_equal(fs_remove_tree(test_file("folders/link"), &err), 0);
  assert_text(test_file("folders/a/b/kept"), "k");
  assert_int_equal(fs_remove_tree(test_file("folders"), &err), 0);
  assert_false(fs_exists(test_file("folders")));
  assert_int_equal(fs_remove_tree(test_file("folders"), &err), 0); /* fine when absent */
}

static void reading_says_what_is_wrong(void **state) {
  (void)state;
  Error err = {""};
  size_t len;
  assert_null(fs_read(test_file("absent"), &len, &err));
  assert_non_null(strstr(err.msg, "absent: cannot open: No such file"));
  assert_null(fs_read(test_tmp(), &len, &err));
  assert_non_null(strstr(err.msg, "is a folder; expected a file"));
  write_file(test_file("empty"), "");
  assert_text(test_file("empty"), "");
}

static void copies(void **state) {
  (void)state;
  Error err = {""};
  size_t n = 300001, len;
  char *big = mem_alloc(n, 1);
  for (size_t i = 0; i < n; i++) big[i] = (char)(i * 7 % 251);
  assert_int_equal(fs_write_atomic(test_file("big"), big, n, &err), 0);
  assert_int_equal(fs_copy(test_file("big"), test_file("copy"), &err), 0);
  char *back = fs_read(test_file("copy"), &len, &err);
  assert_true(back && len == n && !memcmp(back, big, n));
  assert_int_equal(fs_copy(test_file("nothing"), test_file("copy2"), &err), -1);
  assert_int_equal(fs_copy(test_tmp(), test_file("copy2"), &err), -1); /* a folder */
  assert_false(fs_exists(test_file("copy2")));
  free(big);
  free(back);
}

static void atomic_file_replaces(void **state) {
  (void)state;
  Error err = {""};
  write_file(test_file("f"), "old");
  write_file(test_file("f"), "new text");
  assert_text(test_file("f"), "new text");
  assert_false(fs_exists(test_file("f.tmp")));
  assert_int_equal(fs_write_atomic(test_file("no/such/f"), "x", 1, &err), -1);
  assert_non_null(strstr(err.msg, "no/such/f.tmp: cannot create"));
  assert_int_equal(fs_make_dirs(test_file("taken"), &err), 0);
  assert_int_equal(fs_write_atomic(test_file("taken"), "x", 1, &err), -1);
  assert_false(fs_exists(test_file("taken.tmp")));
}

static void atomic_folder_appears_whole(void **state) {
  (void)state;
  Error err = {""};
  const char *dir = test_file("out/deep/ckpt");
  char *tmp =
      fs_dir_begin(test_file("out/deep/ckpt/"), &err); /* a slash at the end does not hurt */
  assert_non_null(tmp);
  assert_int_equal(fs_make_dirs(test_file("out/deep/ckpt.tmp/sub"), &err), 0);
  write_file(test_file("out/deep/ckpt.tmp/sub/a"), "one");
  assert_false(fs_exists(dir));
  assert_int_equal(fs_dir_commit(tmp, dir, &err), 0);
  assert_text(test_file("out/deep/ckpt/sub/a"), "one");
  assert_false(fs_exists(tmp));
  free(tmp);

  /* A second one replaces it; files of the first do not linger. */
  tmp = fs_dir_begin(dir, &err);
  write_file(test_file("out/deep/ckpt.tmp/b"), "two");
  assert_text(test_file("out/deep/ckpt/sub/a"), "one");
  assert_int_equal(fs_dir_commit(tmp, dir, &err), 0);
  assert_text(test_file("out/deep/ckpt/b"), "two");
  assert_false(fs_exists(test_file("out/deep/ckpt/sub")));
  assert_false(fs_exists(tmp) || fs_exists(test_file("out/deep/ckpt.old")));
  free(tmp);
}

static void interrupted_folder_leaves_the_old(void **state) {
  (void)state;
  Error err = {""};
  const char *dir = test_file("int");
  free(fs_dir_begin(dir, &err)); /* begun and forgotten, like a killed process */
  write_file(test_file("int.tmp/stale"), "s");
  assert_false(fs_exists(dir));
  char *tmp = fs_dir_begin(dir, &err);
  assert_false(fs_exists(test_file("int.tmp/stale")));
  write_file(test_file("int.tmp/a"), "1");
  assert_int_equal(fs_dir_commit(tmp, dir, &err), 0);
  free(tmp);
  tmp = fs_dir_begin(dir, &err);
  write_file(test_file("int.tmp/a"), "2");
  fs_dir_abandon(tmp);
  assert_false(fs_exists(tmp));
  assert_text(test_file("int/a"), "1");
  free(tmp);
}

static void folder_over_a_file_is_refused(void **state) {
  (void)state;
  Error err = {""};
  write_file(test_file("plain"), "x");
  char *tmp = fs_dir_begin(test_file("plain"), &err);
  assert_int_equal(fs_dir_commit(tmp, test_file("plain"), &err), -1);
  assert_non_null(strstr(err.msg, "is there and is not a folder"));
  assert_text(test_file("plain"), "x");
  fs_dir_abandon(tmp);
  free(tmp);
}

/* A file-size limit fails writes as a full disk does: in the middle, with an errno. */
static void full_disk_leaves_no_half_file(void **state) {
  (void)state;
  Error err = {""};
  write_file(test_file("kept"), "old");
  size_t n = 1 << 20;
  char *big = mem_zalloc(n, 1);
  assert_int_equal(fs_write_atomic(test_file("source"), big, n, &err), 0);
  struct rlimit old, small;
  getrlimit(RLIMIT_FSIZE, &old);
  small = old;
  small.rlim_cur = 100000;
  void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  int write = fs_write_atomic(test_file("kept"), big, n, &err);
  Error copy_err = {""};
  int copy = fs_copy(test_file("source"), test_file("target"), &copy_err);
  setrlimit(RLIMIT_FSIZE, &old);
  signal(SIGXFSZ, handler);
  assert_int_equal(write, -1);
  assert_non_null(strstr(err.msg, "kept.tmp: cannot write: File too large"));
  assert_text(test_file("kept"), "old");
  assert_false(fs_exists(test_file("kept.tmp")));
  assert_int_equal(copy, -1);
  assert_non_null(strstr(copy_err.msg, "target: cannot write"));
  assert_false(fs_exists(test_file("target")));
  free(big);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(paths),
    cmocka_unit_test(folders),
    cmocka_unit_test(reading_says_what_is_wrong),
    cmocka_unit_test(copies),
    cmocka_unit_test(atomic_file_replaces),
    cmocka_unit_test(atomic_folder_appears_whole),
    cmocka_unit_test(interrupted_folder_leaves_the_old),
    cmocka_unit_test(folder_over_a_file_is_refused),
    cmocka_unit_test(full_disk_leaves_no_half_file),
};
TEST_MAIN(tests)
