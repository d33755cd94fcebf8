/* core/safetensors.h, reading: the layout is checked whole before anything is read. */
#include "core/safetensors.h"

#include <stdio.h>
#include <unistd.h>

#include "core/fs.h"
#include "tests/test.h"

/* A file of that header (its length written truly) and `n_data` bytes 0, 1, 2, ... of data. */
static const char *write_st(const char *header, size_t n_data) {
  uint64_t len = strlen(header);
  size_t n = 8 + len + n_data;
  unsigned char *file = mem_alloc(n, 1);
  memcpy(file, &len, 8);
  for (size_t i = 0; i < len; i++) file[8 + i] = (unsigned char)header[i];
  for (size_t i = 0; i < n_data; i++) file[8 + len + i] = (unsigned char)i;
  const char *path = test_write("x.safetensors", file, n);
  free(file);
  return path;
}

static void refuse(const char *header, size_t n_data, const char *why) {
  Error err = {""};
  StFile *f = st_open(write_st(header, n_data), &err);
  if (f) fail_msg("accepted: %s", header);
  if (!strstr(err.msg, why) || !strstr(err.msg, "x.safetensors"))
    fail_msg("%s\n  gave: %s\n  expected: %s", header, err.msg, why);
}

static StFile *accept(const char *header, size_t n_data) {
  Error err = {""};
  StFile *f = st_open(write_st(header, n_data), &err);
  if (!f) fail_msg("%s", err.msg);
  return f;
}

#define T(name, dtype, shape, from, to)                                                        \
  "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #from "," #to \
  "]"                                                                                          \
  "}"

static void layout_is_sorted_by_offset(void **state) {
  (void)state;
  Error err = {""};
  StFile *f = accept("{" T("b", "I16", "[2,1]", 4, 8) "," T("a", "U8", "[4]", 0, 4) "," T(
                         "none", "F32", "[0,3]", 4, 4) "," T("one", "I8", "[]", 8, 9) "}  ",
                     9);
  assert_int_equal(st_count(f), 4);
  static const char *const order[] = {"a", "none", "b", "one"};
  for (int i = 0; i < 4; i++) {
    assert_string_equal(st_entry(f, i)->name, order[i]);
    assert_ptr_equal(st_find(f, order[i]), st_entry(f, i));
  }
  assert_null(st_find(f, "c"));
  const StEntry *b = st_find(f, "b");
  assert_true(b->dtype == DT_I16 && b->ndim == 2 && b->dim[0] == 2 && b->numel == 2);
  int32_t v[4];
  assert_int_equal(st_read_i32(f, b, 0, 2, v, &err), 0);
  assert_true(v[0] == 0x0504 && v[1] == 0x0706);
  assert_int_equal(st_read_i32(f, st_find(f, "a"), 1, 2, v, &err), 0);
  assert_true(v[0] == 1 && v[1] == 2);
  assert_int_equal(st_read_i32(f, st_find(f, "one"), 0, 1, v, &err), 0);
  assert_int_equal(v[0], 8);
  float none;
  assert_int_equal(st_read_f32(f, st_find(f, "none"), 0, 0, &none, &err), 0);
  assert_int_equal(st_read_f32(f, b, 0, 1, &none, &err), -1);
  assert_non_null(strstr(err.msg, "\"b\" is I16; expected F32, F16, BF16 or F64"));
  st_close(f);
  st_close(accept("{}", 0));
  st_close(accept("{\"__metadata__\":{\"format\":\"pt\"}," T("a", "U8", "[1]", 0, 1) "}", 1));
}

static void bad_layouts(void **state) {
  (void)state;
  static const struct {
    const char *header;
    size_t n_data;
    const char *why;
  } bad[] = {
      {"{" T("a", "U8", "[4]", 0, 4) "," T("b", "U8", "[4]", 2, 6) "}", 6, "inside another tensor"},
      {"{" T("a", "U8", "[4]", 0, 4) "," T("b", "U8", "[4]", 0, 4) "}", 4, "inside another tensor"},
      {"{" T("a", "U8", "[4]", 0, 4) "," T("b", "U8", "[2]", 5, 7) "}", 7,
       "hole that starts at byte 4"},
      {"{" T("a", "U8", "[4]", 1, 5) "}", 5, "hole that starts at byte 0"},
      {"{" T("a", "U8", "[4]", 0, 4) "}", 5, "1 bytes follow the last tensor"},
      {"{}", 3, "3 bytes follow"},
      {"{" T("a", "U8", "[4]", 0, 4) "}", 3, "leave the file's 3 bytes"},
      {"{" T("a", "F32", "[4]", 0, 4) "}", 4, "4 elements of F32 do not take that many"},
      {"{" T("a", "U8", "[3]", 0, 4) "}", 4, "do not take"},
      {"{" T("a", "U8", "[]", 0, 0) "}", 0, "do not take"},
      {"{" T("a", "U8", "[4]", 4, 0) "}", 4, "leave"},
      {"{" T("a", "U8", "[4]", -4, 0) "}", 4, "leave"},
      {"{" T("a", "U8", "[4]", 0, 99999999999999999999) "}", 4, "not valid JSON"},
      {"{" T("a", "U9", "[4]", 0, 4) "}", 4, "unknown dtype \"U9\""},
      {"{" T("a", "", "[4]", 0, 4) "}", 4, "unknown dtype \"\""},
      {"{" T("a\\n", "U8", "[4]", 0, 4) "}", 4, "the name of tensor 0 holds control characters"},
      {"{" T("a", "U8", "[-4]", 0, 4) "}", 4, "dimension 0"},
      {"{" T("a", "U8", "[1.5]", 0, 4) "}", 4, "dimension 0"},
      {"{" T("a", "U8", "4", 0, 4) "}", 4, "no \"shape\""},
      {"{" T("a", "U8", "[1,1,1,1,1,1,1,1,4]", 0, 4) "}", 4, "9 dimensions"},
      {"{" T("a", "U8", "[4294967296,4294967296]", 0, 4) "}", 4, "overflows"},
      {"{" T("a", "F64", "[4611686018427387904]", 0, 4) "}", 4, "do not take"},
      {"{" T("a", "U8", "[4]", 0, 4) "," T("a", "U8", "[4]", 4, 8) "}", 8, "duplicate"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, "no \"data_offsets\""},
      {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, "no \"shape\""},
      {"{\"a\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "expected an object with \"dtype\""},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,8]}}", 4, "data_offsets"},
      {"{\"a\":[1]}", 4, "expected an object with \"dtype\""},
      {"{\"a\":null}", 4, "expected an object with \"dtype\""},
      {"{\"__metadata__\":3}", 0, "__metadata__ is not an object"},
      {"{\"__metadata__\":{\"a\":3}}", 0, "__metadata__ \"a\" is not a string"},
      {"[]", 0, "not a JSON object"},
      {"{", 0, "not valid JSON"},
      {"", 0, "not valid JSON"},
      {"{} x", 0, "not valid JSON"},
      {"{\"a\\u0000b\":1}", 0, "expected an object"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    refuse(bad[i].header, bad[i].n_data, bad[i].why);
}

/* A file with room for it (one large hole) does not make a header of more than 100 MB one. */
static void header_beyond_the_limit(void **state) {
  (void)state;
  const uint64_t len = 100000001;
  Error err = {""};
  const char *path = test_write("large", &len, sizeof len);
  assert_int_equal(truncate(path, (off_t)len + 100), 0);
  assert_null(st_open(path, &err));
  assert_non_null(strstr(err.msg, "large: header length 100000001; expected at most 100000000"));
}

static void bad_lengths(void **state) {
  (void)state;
  static const uint64_t lengths[] = {3, 1000, 100000001, UINT64_MAX, UINT64_MAX - 7, 1ull << 63};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
    Error err = {""};
    char file[10] = "        {}";
    memcpy(file, &lengths[i], 8);
    test_write("len", file, 10);
    assert_null(st_open(test_file("len"), &err));
    assert_non_null(strstr(err.msg, "len: header length"));
    assert_non_null(strstr(err.msg, "expected at most 2"));
  }
  Error err = {""};
  assert_null(st_open(test_file("absent"), &err));
  assert_non_null(strstr(err.msg, "absent: cannot open"));
  assert_null(st_open(test_tmp(), &err));
  assert_non_null(strstr(err.msg, "not a regular file"));
}

/* Cut at every byte, and with bytes behind its end, a whole file is none. */
static void truncated_everywhere(void **state) {
  (void)state;
  Error err = {""};
  size_t len;
  char *file = fs_read(test_path("data/malformed/runai-safetensors/test.safetensors"), &len, &err);
  if (!file) skip();
  for (size_t n = 0; n < len; n++) {
    test_write("cut", file, n);
    err.msg[0] = '\0';
    assert_null(st_open(test_file("cut"), &err));
    assert_non_null(strstr(err.msg, "cut: "));
  }
  file = mem_grow(file, len + 1, 1);
  file[len] = 0;
  assert_int_equal(fs_write_atomic(test_file("cut"), file, len + 1, &err), 0);
  assert_null(st_open(test_file("cut"), &err));
  free(file);
}

static void ten_dtypes(void **state) {
  (void)state;
  Error err = {""};
  StFile *f = st_open(test_path("data/malformed/runai-safetensors/test.safetensors"), &err);
  if (!f) fail_msg("%s", err.msg);
  assert_int_equal(st_count(f), 10);
  int floats = 0, integers = 0;
  for (int i = 0; i < 10; i++) {
    const StEntry *e = st_entry(f, i);
    assert_true(e->ndim == 2 && e->dim[0] == 3 && e->dim[1] == 2);
    float x[6];
    int32_t v[6];
    bool is_float = st_read_f32(f, e, 0, 6, x, &err) == 0,
         is_int = st_read_i32(f, e, 0, 6, v, &err) == 0;
    assert_true(is_float != is_int);
    floats += is_float;
    integers += is_int;
    for (int k = 0; k < 6; k++) { /* a piece is the same as that part of the whole */
      float y;
      int32_t w;
      if (is_float) assert_true(st_read_f32(f, e, k, 1, &y, &err) == 0 && y == x[k]);
      if (is_int) assert_true(st_read_i32(f, e, k, 1, &w, &err) == 0 && w == v[k]);
    }
  }
  assert_true(floats == 4 && integers == 6);
  st_close(f);
  f = st_open(test_path("data/malformed/runai-safetensors/test_empty.safetensors"), &err);
  assert_int_equal(st_count(f), 0);
  st_close(f);
}

static void big_integers_are_refused(void **state) {
  (void)state;
  Error err = {""};
  StFile *f = accept("{" T("a", "I64", "[1]", 0, 8) "}", 8); /* 0x0706050403020100 */
  int32_t v;
  assert_int_equal(st_read_i32(f, st_find(f, "a"), 0, 1, &v, &err), -1);
  assert_non_null(strstr(err.msg, "\"a\": element 0 is 506097522914230528; expected a 32-bit"));
  st_close(f);
}

static void file_that_shrinks_is_an_error(void **state) {
  (void)state;
  Error err = {""};
  StFile *f = accept("{" T("a", "F32", "[2]", 0, 8) "}", 8);
  FILE *w = fopen(test_file("x.safetensors"), "wb"); /* the same file, emptied */
  fclose(w);
  float x[2];
  assert_int_equal(st_read_f32(f, st_find(f, "a"), 0, 2, x, &err), -1);
  assert_non_null(strstr(err.msg, "ends at byte"));
  st_close(f);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(layout_is_sorted_by_offset), cmocka_unit_test(bad_layouts),
    cmocka_unit_test(header_beyond_the_limit),    cmocka_unit_test(bad_lengths),
    cmocka_unit_test(truncated_everywhere),       cmocka_unit_test(ten_dtypes),
    cmocka_unit_test(big_integers_are_refused),   cmocka_unit_test(file_that_shrinks_is_an_error),
};
TEST_MAIN(tests)
