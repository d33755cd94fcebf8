/* core/fs.h: lines of plain and gzip files, whole and damaged. */
#include <stdio.h>
#include <zlib.h>

#include "core/fs.h"
#include "tests/test.h"

/* A gzip member of the text. */
static size_t pack(const char *text, size_t len, unsigned char *out, size_t cap) {
  z_stream z = {.next_in = (unsigned char *)text,
                .avail_in = (unsigned)len,
                .next_out = out,
                .avail_out = (unsigned)cap};
  assert_int_equal(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
  size_t n = z.total_out;
  deflateEnd(&z);
  return n;
}

static void expect_lines(const char *path, const char *const *want, int n) {
  Error err = {""};
  LineReader *r = lines_open(path, &err);
  if (!r) fail_msg("%s", err.msg);
  const char *line;
  size_t len;
  for (int i = 0; i < n; i++) {
    if (lines_next(r, &line, &len, &err) != 1) fail_msg("line %d: %s", i + 1, err.msg);
    assert_string_equal(line, want[i]);
    assert_int_equal(len, strlen(want[i]));
    assert_int_equal(lines_number(r), i + 1);
  }
  assert_int_equal(lines_next(r, &line, &len, &err), 0);
  assert_int_equal(lines_next(r, &line, &len, &err), 0);
  lines_close(r);
}

static void endings(void **state) {
  (void)state;
  const char *text = "one\r\n\ntwo\rx\n  three";
  const char *want[] = {"one", "", "two\rx", "  three"};
  expect_lines(test_write("e", text, strlen(text)), want, 4);
  unsigned char gz[200];
  size_t n = pack(text, strlen(text), gz, sizeof gz);
  expect_lines(test_write("e.gz", gz, n), want, 4);
  expect_lines(test_write("e", "", 0), NULL, 0);
  expect_lines(test_write("e", "\n", 1), (const char *[]){""}, 1);
  expect_lines(test_write("e",
                          "\xEF\xBB\xBF"
                          "a\nb\n",
                          7),
               (const char *[]){"a", "b"}, 2);
  /* Two members one after the other are one file, as gzip says. */
  n = pack("a\nb", 3, gz, sizeof gz);
  n += pack("c\nd", 3, gz + n, sizeof gz - n);
  expect_lines(test_write("e.gz", gz, n), (const char *[]){"a", "bc", "d"}, 3);
}

static void nul_bytes_are_kept(void **state) {
  (void)state;
  Error err = {""};
  LineReader *r = lines_open(test_write("nul", "a\0b\nc\n", 6), &err);
  const char *line;
  size_t len;
  assert_int_equal(lines_next(r, &line, &len, &err), 1);
  assert_int_equal(len, 3);
  assert_memory_equal(line, "a\0b", 4);
  lines_close(r);
}

static void long_lines(void **state) {
  (void)state;
  Error err = {""};
  size_t n = ((size_t)64 << 20) + 100000; /* over the limit of a line */
  char *text = mem_alloc(n, 1);
  memset(text, 'x', n);
  text[5] = '\n';
  text[6 + 1000000] = '\n'; /* a line of a million characters, over many chunks */
  const char *path = test_write("long", text, n), *line;
  size_t len;
  LineReader *r = lines_open(path, &err);
  assert_int_equal(lines_next(r, &line, &len, &err), 1);
  assert_string_equal(line, "xxxxx");
  assert_int_equal(lines_next(r, &line, &len, &err), 1);
  assert_int_equal(len, 1000000);
  assert_true(line[0] == 'x' && line[999999] == 'x' && line[1000000] == '\0');
  text[6 + 1000000] = 'x';
  lines_close(r);
  path = test_write("long", text, n);
  r = lines_open(path, &err);
  assert_int_equal(lines_next(r, &line, &len, &err), 1);
  assert_int_equal(lines_next(r, &line, &len, &err), -1);
  assert_non_null(strstr(err.msg, "long:2: the line is longer than 64 MiB"));
  lines_close(r);
  remove(path);
  free(text);
}

static void peek_and_rest(void **state) {
  (void)state;
  Error err = {""};
  const char *text = "first\n \r\n\t [1,\n2]\n", *line;
  size_t len;
  LineReader *r = lines_open(test_write("p", text, strlen(text)), &err);
  assert_int_equal(lines_peek(r), 'f');
  assert_int_equal(lines_next(r, &line, &len, &err), 1);
  assert_string_equal(line, "first"); /* a peek takes nothing */
  assert_int_equal(lines_peek(r), '[');
  char *rest = lines_rest(r, &len, &err);
  assert_string_equal(rest, " \r\n\t [1,\n2]\n");
  assert_int_equal(len, strlen(rest));
  assert_int_equal(lines_peek(r), -1);
  assert_int_equal(lines_next(r, &line, &len, &err), 0);
  free(rest);
  lines_close(r);
}

/* All lines until the end or an error; the error's text is left in err. */
static int read_through(const char *path, int *lines, Error *err) {
  *lines = 0;
  LineReader *r = lines_open(path, err);
  if (!r) return -1;
  const char *line;
  size_t len;
  int got;
  while ((got = lines_next(r, &line, &len, err)) == 1) ++*lines;
  lines_close(r);
  return got;
}

/* Cut at every byte, a gzip file never passes for a whole one; nor does it with any byte of the
 * packed data or of the checksum changed. */
static void damaged_gzip(void **state) {
  (void)state;
  char text[400];
  int at = 0;
  for (int i = 0; i < 20; i++) at += sprintf(text + at, "line %d of %d\n", i, i * i);
  unsigned char gz[600];
  size_t n = pack(text, (size_t)at, gz, sizeof gz);
  int lines;
  for (size_t cut = 3; cut < n; cut++) { /* shorter is no gzip but plain text */
    Error err = {""};
    const char *path = test_write("cut.gz", gz, cut);
    assert_int_equal(read_through(path, &lines, &err), -1);
    assert_non_null(strstr(err.msg, "cut.gz"));
    size_t len;
    assert_null(fs_read(path, &len, &err));
    assert_true(strstr(err.msg, "ends early") || strstr(err.msg, "corrupt"));
  }
  for (size_t i = 10; i < n; i++) {
    Error err = {""};
    gz[i] ^= 0x55;
    assert_int_equal(read_through(test_write("bad.gz", gz, n), &lines, &err), -1);
    assert_true(strstr(err.msg, "corrupt gzip") || strstr(err.msg, "ends early"));
    gz[i] ^= 0x55;
  }
  Error err = {""};
  assert_int_equal(read_through(test_write("good.gz", gz, n), &lines, &err), 0);
  assert_int_equal(lines, 20);
}

static void missing(void **state) {
  (void)state;
  Error err = {""};
  assert_null(lines_open(test_file("absent.jsonl"), &err));
  assert_non_null(strstr(err.msg, "absent.jsonl: cannot open: No such file"));
  assert_null(lines_open(test_tmp(), &err));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(endings),      cmocka_unit_test(nul_bytes_are_kept),
    cmocka_unit_test(long_lines),   cmocka_unit_test(peek_and_rest),
    cmocka_unit_test(damaged_gzip), cmocka_unit_test(missing),
};
TEST_MAIN(tests)
