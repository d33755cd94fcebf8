/* core/safetensors.h, writing and sets: what is written reads back, pieces may come from several
 * writers, and an index is not trusted. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>

#include "core/fs.h"
#include "core/rng.h"
#include "core/safetensors.h"
#include "tests/test.h"

enum { N = 70001 }; /* more than one conversion chunk, and odd */

static float *random_floats(uint64_t stream) {
  float *x = mem_alloc(N, sizeof *x);
  for (int i = 0; i < N; i++) x[i] = rng_normal(1, stream, (uint64_t)i);
  return x;
}

static StWriter *same_layout(const char *path, int *at) {
  StWriter *w = stw_begin(path);
  at[0] = stw_add(w, "half", DT_F16, 1, (const int64_t[]){N});
  at[1] = stw_add(w, "full", DT_F32, 2, (const int64_t[]){N, 1});
  at[2] = stw_add(w, "brain \"\xC3\xA9\"", DT_BF16, 1, (const int64_t[]){N});
  at[3] = stw_add(w, "ids", DT_I32, 1, (const int64_t[]){3});
  at[4] = stw_add(w, "long", DT_I64, 1, (const int64_t[]){3});
  at[5] = stw_add(w, "scalar", DT_F32, 0, NULL);
  at[6] = stw_add(w, "nothing", DT_F32, 2, (const int64_t[]){0, 5});
  stw_metadata(w, "format", "pt");
  return w;
}

static void ok(int result, const Error *err) {
  if (result) fail_msg("%s", err->msg);
}

static void round_trip(void **state) {
  (void)state;
  Error err = {""};
  const char *path = test_file("w.safetensors"), *names[] = {"half", "full", "brain \"\xC3\xA9\""};
  int at[7];
  float *x = random_floats(1), *y = mem_alloc(N, sizeof *y), *want = mem_alloc(N, sizeof *want);
  const int32_t ids[] = {INT32_MIN, 0, 7};
  StWriter *w = same_layout(path, at);
  ok(stw_create(w, &err), &err);
  ok(stw_open(w, &err), &err);
  for (int i = 0; i < 3; i++) ok(stw_write_f32(w, at[i], 0, N, x, &err), &err);
  for (int i = 3; i < 5; i++) ok(stw_write_i32(w, at[i], 0, 3, ids, &err), &err);
  ok(stw_write_f32(w, at[5], 0, 1, x, &err), &err);
  uint64_t bytes = stw_bytes(w);
  ok(stw_close(w, &err), &err);

  StFile *f = st_open(path, &err);
  if (!f) fail_msg("%s", err.msg);
  assert_int_equal(st_count(f), 7);
  assert_int_equal(st_entry(f, 0)->offset % 64, 0);
  for (int i = 0; i < 7; i++) {
    const StEntry *e = st_entry(f, i);
    assert_int_equal(e->offset % dtype_size(e->dtype), 0);
    bytes -= (uint64_t)e->numel * dtype_size(e->dtype);
  }
  assert_true(bytes == st_entry(f, 0)->offset);
  for (int i = 0; i < 3; i++) {
    const StEntry *e = st_find(f, names[i]);
    ok(st_read_f32(f, e, 0, N, y, &err), &err);
    uint16_t *half = mem_alloc(N, 4); /* what a conversion there and back gives */
    convert_from_f32(x, half, e->dtype, N);
    convert_to_f32(half, e->dtype, want, N);
    free(half);
    assert_memory_equal(y, want, N * sizeof *y);
  }
  int32_t v[3];
  ok(st_read_i32(f, st_find(f, "ids"), 0, 3, v, &err), &err);
  assert_memory_equal(v, ids, sizeof ids);
  ok(st_read_i32(f, st_find(f, "long"), 0, 3, v, &err), &err);
  assert_memory_equal(v, ids, sizeof ids);
  assert_int_equal(st_find(f, "scalar")->ndim, 0);
  assert_int_equal(st_find(f, "nothing")->dim[1], 5);
  st_close(f);
  free(x);
  free(y);
  free(want);
}

/* Three writers with the same layout, each with a third of every tensor, in any order: the same
 * bytes as one writer. */
static void pieces_of_several_writers(void **state) {
  (void)state;
  Error err = {""};
  const char *paths[] = {test_file("one"), test_file("three")};
  float *x = random_floats(2);
  for (int k = 0; k < 2; k++) {
    int parts = k ? 3 : 1, at[7];
    StWriter *w[3];
    for (int p = 0; p < parts; p++) w[p] = same_layout(paths[k], at);
    ok(stw_create(w[parts - 1], &err), &err);
    for (int p = 0; p < parts; p++) ok(stw_open(w[p], &err), &err);
    for (int p = parts - 1; p >= 0; p--) {
      int64_t from = (int64_t)N * p / parts, to = (int64_t)N * (p + 1) / parts;
      for (int i = 0; i < 3; i++)
        ok(stw_write_f32(w[p], at[i], from, to - from, x + from, &err), &err);
    }
    for (int p = 0; p < parts; p++) ok(stw_close(w[p], &err), &err);
  }
  size_t n, m;
  char *one = fs_read(paths[0], &n, &err), *three = fs_read(paths[1], &m, &err);
  assert_int_equal(n, m);
  assert_memory_equal(one, three, n);
  free(one);
  free(three);
  free(x);
}

static void add_twice(void *w) { stw_add(w, "a", DT_F32, 0, NULL); }

static void misuse_and_missing(void **state) {
  (void)state;
  Error err = {""};
  StWriter *w = stw_begin(test_file("no/such/folder"));
  stw_add(w, "a", DT_F32, 0, NULL);
  assert_non_null(strstr(test_death(add_twice, w), "\"a\" is added twice"));
  assert_int_equal(stw_create(w, &err), -1);
  assert_non_null(strstr(err.msg, "no/such/folder: cannot create"));
  assert_int_equal(stw_open(w, &err), -1);
  assert_int_equal(stw_close(w, &err), 0);
}

/* A file-size limit stands for a full disk: the space is asked for before any data is written. */
static void full_disk_shows_at_create(void **state) {
  (void)state;
  Error err = {""};
  struct rlimit old, small;
  getrlimit(RLIMIT_FSIZE, &old);
  small = old;
  small.rlim_cur = 50000;
  void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
  StWriter *w = stw_begin(test_file("full"));
  stw_add(w, "a", DT_F32, 1, (const int64_t[]){N});
  setrlimit(RLIMIT_FSIZE, &small);
  int created = stw_create(w, &err);
  setrlimit(RLIMIT_FSIZE, &old);
  signal(SIGXFSZ, handler);
  assert_int_equal(created, -1);
  assert_non_null(strstr(err.msg, "full: cannot take 280"));
  assert_false(fs_exists(test_file("full")));
  stw_close(w, NULL);
}

/* ---- sets ---- */

static void write_shard(const char *path, const char *name, float value) {
  Error err = {""};
  StWriter *w = stw_begin(path);
  int at = stw_add(w, name, DT_F32, 1, (const int64_t[]){1});
  ok(stw_create(w, &err), &err);
  ok(stw_open(w, &err), &err);
  ok(stw_write_f32(w, at, 0, 1, &value, &err), &err);
  ok(stw_close(w, &err), &err);
}

static const char *set_folder(const char *index) {
  Error err = {""};
  ok(fs_remove_tree(test_file("set"), &err), &err);
  ok(fs_make_dirs(test_file("set/sub"), &err), &err);
  write_shard(test_file("set/1.safetensors"), "a", 1);
  write_shard(test_file("set/2.safetensors"), "b", 2);
  write_shard(test_file("set/sub/3.safetensors"), "c", 3);
  write_shard(test_file("outside.safetensors"), "a", 9);
  if (index)
    ok(fs_write_atomic(test_file("set/model.safetensors.index.json"), index, strlen(index), &err),
       &err);
  return test_file("set");
}

static float value_of(const StSet *s, const char *name) {
  Error err = {""};
  const StFile *f;
  const StEntry *e = stset_find(s, name, &f);
  assert_non_null(e);
  float x;
  ok(st_read_f32(f, e, 0, 1, &x, &err), &err);
  return x;
}

static void sharded_checkpoint(void **state) {
  (void)state;
  Error err = {""};
  StSet *s = stset_open(set_folder("{\"metadata\":{\"total_size\":12},\"weight_map\":{"
                                   "\"b\":\"2.safetensors\",\"c\":\"sub/3.safetensors\","
                                   "\"a\":\"1.safetensors\"}}"),
                        &err);
  if (!s) fail_msg("%s", err.msg);
  assert_int_equal(stset_count(s), 3);
  assert_true(value_of(s, "a") == 1 && value_of(s, "b") == 2 && value_of(s, "c") == 3);
  assert_null(stset_find(s, "d", NULL));
  const StFile *f;
  for (int i = 0; i < 3; i++)
    assert_ptr_equal(st_find(((void)stset_entry(s, i, &f), f), stset_entry(s, i, NULL)->name),
                     stset_entry(s, i, NULL));
  stset_close(s);
}

static void single_file_checkpoint(void **state) {
  (void)state;
  Error err = {""};
  const char *dir = set_folder("not even JSON"); /* the single file comes first */
  write_shard(test_file("set/model.safetensors"), "m", 5);
  StSet *s = stset_open(dir, &err);
  assert_true(s && stset_count(s) == 1 && value_of(s, "m") == 5);
  stset_close(s);
  s = stset_open_file(test_file("set/2.safetensors"), &err);
  assert_true(s && value_of(s, "b") == 2);
  stset_close(s);
  assert_null(stset_open_file(test_file("set/9.safetensors"), &err));
}

static void bad_sets(void **state) {
  (void)state;
  static const struct {
    const char *index, *why;
  } bad[] = {
      {NULL, "neither model.safetensors nor model.safetensors.index.json"},
      {"{", "not valid JSON"},
      {"[]", "no \"weight_map\""},
      {"{\"weight_map\":{}}", "no \"weight_map\""},
      {"{\"weight_map\":{\"a\":3}}", "tensor \"a\": no shard name"},
      {"{\"weight_map\":{\"a\":\"1.safetensors\",\"a\":\"2.safetensors\"}}", "duplicate"},
      {"{\"weight_map\":{\"a\":\"2.safetensors\"}}", "tensor \"a\" is not in "},
      {"{\"weight_map\":{\"a\":\"9.safetensors\"}}", "9.safetensors: cannot open"},
      {"{\"weight_map\":{\"a\":\"../outside.safetensors\"}}", "expected a file of the same folder"},
      {"{\"weight_map\":{\"a\":\"sub/../../outside.safetensors\"}}", "of the same folder"},
      {"{\"weight_map\":{\"a\":\"..\"}}", "of the same folder"},
      {"{\"weight_map\":{\"a\":\"/outside.safetensors\"}}", "of the same folder"},
      {"{\"weight_map\":{\"a\":\"\"}}", "of the same folder"},
      {"{\"weight_map\":{\"a\":\"model.safetensors.index.json\"}}", "header length"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    Error err = {""};
    assert_null(stset_open(set_folder(bad[i].index), &err));
    if (!strstr(err.msg, bad[i].why) || !strstr(err.msg, "set"))
      fail_msg("%s gave: %s", bad[i].index ? bad[i].index : "nothing", err.msg);
  }
  Error err = {""};
  assert_null(stset_open(test_file("absent"), &err));
  assert_non_null(strstr(err.msg, "absent: is not a folder"));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(round_trip),         cmocka_unit_test(pieces_of_several_writers),
    cmocka_unit_test(misuse_and_missing), cmocka_unit_test(full_disk_shows_at_create),
    cmocka_unit_test(sharded_checkpoint), cmocka_unit_test(single_file_checkpoint),
    cmocka_unit_test(bad_sets),
};
TEST_MAIN(tests)
