/* core/json.h: strict parsing, typed access, and numbers that read back to the same bits. */
#include "core/json.h"

#include <dirent.h>
#include <math.h>

#include "core/rng.h"
#include "tests/test.h"

/* ---- parsing ---- */

static json_t *parse(const char *text, Error *err) {
  return json_parse(text, strlen(text), "x.json", err);
}

static void any_value_at_the_top(void **state) {
  (void)state;
  Error err = {""};
  static const char *const good[] = {"1",  "\"a\"",   "null",           "[ ]",
                                     "{}", " true\n", "\xEF\xBB\xBF[1]"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    json_t *v = parse(good[i], &err);
    if (!v) fail_msg("%s", err.msg);
    json_decref(v);
  }
}

static void errors_name_the_place(void **state) {
  (void)state;
  static const struct {
    const char *text, *place, *found;
  } bad[] = {{"", "x.json:1:1: not valid JSON", "end of file"},
             {"{\n  \"a\": 1,\n  \"b\": oops\n}", "x.json:3:11: not valid JSON", "oops"},
             {"[1, 2", "x.json:1:", "end of file"},
             {"{} {}", "x.json:1:", "'{'"},
             {"\"\xff\"", "x.json:1:", "0xff"},
             {"[1e999]", "x.json:1:", "overflow"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    Error err = {""};
    assert_null(parse(bad[i].text, &err));
    if (strncmp(err.msg, bad[i].place, strlen(bad[i].place)) != 0 || !strstr(err.msg, bad[i].found))
      fail_msg("\"%s\" gave: %s", bad[i].text, err.msg);
  }
  Error err = {""};
  assert_null(json_parse_at("[", 1, "y.jsonl", 41, &err));
  assert_memory_equal(err.msg, "y.jsonl:41:1: ", 14);
  assert_null(json_read(test_file("absent.json"), &err));
  assert_non_null(strstr(err.msg, "absent.json: cannot open"));
}

static void nul_characters(void **state) {
  (void)state;
  Error err = {""};
  json_t *v = parse("{\"a\\u0000b\":\"c\\u0000d\", \"e\\\\u0000\" :\n1}", &err);
  if (!v) fail_msg("%s", err.msg);
  json_t *in_name = json_object_get(v,
                                    "a\xEF\xBF\xBD"
                                    "b");
  assert_int_equal(json_string_length(in_name), 3);
  assert_memory_equal(json_string_value(in_name), "c\0d", 3);
  assert_int_equal(json_integer_value(json_object_get(v, "e\\u0000")), 1); /* no escape at all */
  json_decref(v);
  assert_null(json_parse("[1\n,23\0]", 8, "n.json", &err));
  assert_string_equal(err.msg, "n.json:2:4: not valid JSON: a NUL byte");
  assert_null(json_parse("{\"a\\u0000", 9, "n.json", &err)); /* cut short */
  assert_null(json_parse("{\"a\\u0000\":\"\\", 13, "n.json", &err));
}

static void names_may_be_asked_to_be_unique(void **state) {
  (void)state;
  Error err = {""};
  const char *text = "{\"a\":1,\n\"a\":2}";
  json_t *v = parse(text, &err);
  assert_int_equal(json_integer_value(json_object_get(v, "a")), 2);
  json_decref(v);
  assert_null(json_parse_unique(text, strlen(text), "d.json", &err));
  assert_memory_equal(err.msg, "d.json:2:", 9);
  assert_non_null(strstr(err.msg, "duplicate"));
}

static void json_test_suite(void **state) {
  (void)state;
  const char *folder = test_path("data/malformed/JSONTestSuite/test_parsing");
  DIR *d = opendir(folder);
  if (!d) {
    skip();
    return;
  }
  int count[3] = {0, 0, 0}, wrong = 0;
  for (struct dirent *e; (e = readdir(d));) {
    const char *kind = strchr("yni", e->d_name[0]);
    if (e->d_name[1] != '_' || !kind) continue;
    Error err = {""};
    char *path = mem_printf("%s/%s", folder, e->d_name);
    json_t *v = json_read(path, &err);
    if ((*kind == 'y' && !v) || (*kind == 'n' && v)) {
      print_message("# wrong: %s %s\n", e->d_name, err.msg);
      wrong++;
    }
    if (!v) assert_non_null(strstr(err.msg, e->d_name));
    count[kind - strchr("yni", 'y')]++;
    json_decref(v);
    free(path);
  }
  closedir(d);
  assert_int_equal(wrong, 0);
  assert_true(count[0] > 90 && count[1] > 180 && count[2] > 30); /* the suite was really there */
}

/* ---- typed access ---- */

static void typed_access(void **state) {
  (void)state;
  Error err = {""};
  json_t *o =
      parse("{\"i\":7,\"f\":2.5,\"s\":\"t\",\"b\":true,\"n\":null,\"big\":99999999999}", &err);
  int64_t i;
  double f;
  bool b;
  const char *s;
  assert_int_equal(json_get_i64(o, "i", "c.json", 0, 10, &i, &err), 0);
  assert_int_equal(i, 7);
  assert_int_equal(json_get_i64_or(o, "n", "c.json", 0, 10, 3, &i, &err), 0);
  assert_int_equal(i, 3);
  assert_int_equal(json_get_i64_or(o, "absent", "c.json", 0, 10, 4, &i, &err), 0);
  assert_int_equal(i, 4);
  assert_int_equal(json_get_i64_or(o, "big", "c.json", 0, INT64_MAX, 4, &i, &err), 0);
  assert_true(i == 99999999999);
  assert_int_equal(json_get_f64_or(o, "f", "c.json", 1, &f, &err), 0);
  assert_true(f == 2.5);
  assert_int_equal(json_get_f64_or(o, "i", "c.json", 1, &f, &err), 0);
  assert_true(f == 7);
  assert_int_equal(json_get_bool_or(o, "b", "c.json", false, &b, &err), 0);
  assert_true(b);
  assert_int_equal(json_get_str_or(o, "s", "c.json", NULL, &s, &err), 0);
  assert_string_equal(s, "t");
  assert_int_equal(json_get_str_or(o, "n", "c.json", "d", &s, &err), 0);
  assert_string_equal(s, "d");
  json_decref(o);
}

#define EXPECT_ERROR(call, ...)                                                        \
  do {                                                                                 \
    Error err = {""};                                                                  \
    assert_int_equal((call), -1);                                                      \
    const char *const parts[] = {__VA_ARGS__};                                         \
    for (size_t k = 0; k < sizeof parts / sizeof *parts; k++)                          \
      if (!strstr(err.msg, parts[k])) fail_msg("no \"%s\" in: %s", parts[k], err.msg); \
  } while (0)

static void typed_access_refuses(void **state) {
  (void)state;
  Error ignored;
  json_t *o = parse("{\"i\":7,\"f\":2.5,\"s\":\"t\",\"a\":[1],\"z\":false}", &ignored);
  int64_t i;
  double f;
  bool b;
  const char *s;
  EXPECT_ERROR(json_get_i64(o, "k", "c.json", 0, 9, &i, &err), "c.json", "\"k\" is missing");
  EXPECT_ERROR(json_get_i64(o, "i", "c.json", 8, 9, &i, &err), "\"i\" is 7; expected 8 to 9");
  EXPECT_ERROR(json_get_i64_or(o, "i", "c.json", 1, 6, 2, &i, &err), "expected 1 to 6");
  EXPECT_ERROR(json_get_i64_or(o, "f", "c.json", 1, 6, 2, &i, &err), "\"f\" is a number with",
               "expected an integer");
  EXPECT_ERROR(json_get_f64_or(o, "s", "c.json", 1, &f, &err), "\"s\" is a string", "a number");
  EXPECT_ERROR(json_get_bool_or(o, "i", "c.json", 1, &b, &err), "is an integer", "true or false");
  EXPECT_ERROR(json_get_str_or(o, "a", "c.json", "", &s, &err), "is an array", "a string");
  EXPECT_ERROR(json_get_str_or(o, "z", "c.json", "", &s, &err), "is a boolean");
  EXPECT_ERROR(json_get_i64_or(json_object_get(o, "a"), "q", "c.json", 0, 1, 0, &i, &err),
               "found an array", "an object with \"q\"");
  EXPECT_ERROR(json_get_i64_or(NULL, "q", "c.json", 0, 1, 0, &i, &err), "found nothing");
  json_decref(o);
}

/* ---- writing ---- */

typedef struct Text {
  char *s;
  size_t n;
} Text;

static const char *f32_text(Text *t, float x) {
  FILE *f = open_memstream(&t->s, &t->n);
  json_put_f32(f, x);
  fclose(f);
  return t->s;
}

static const char *f64_text(Text *t, double x) {
  FILE *f = open_memstream(&t->s, &t->n);
  json_put_f64(f, x);
  fclose(f);
  return t->s;
}

static int digits_of(const char *s) {
  int n = 0;
  bool leading = true;
  for (; *s && *s != 'e'; s++) {
    if (*s >= '1' && *s <= '9') leading = false;
    n += *s >= '0' && *s <= '9' && !leading;
  }
  return n;
}

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static void check_f32(float x) {
  Text t;
  Error err = {""};
  const char *s = f32_text(&t, x);
  json_t *v = parse(s, &err);
  if (!v) fail_msg("%s: %s", s, err.msg);
  float back = (float)json_number_value(v);
  if (bits_of(back) != bits_of(x) || strtof(s, NULL) != x) fail_msg("%a became %s", (double)x, s);
  assert_true(digits_of(s) <= 9);
  json_decref(v);
  free(t.s);
}

static void check_f64(double x) {
  Text t;
  Error err = {""};
  const char *s = f64_text(&t, x);
  json_t *v = parse(s, &err);
  if (!v) fail_msg("%s: %s", s, err.msg);
  double back = json_number_value(v);
  uint64_t a, b;
  memcpy(&a, &x, sizeof a);
  memcpy(&b, &back, sizeof b);
  if (a != b) fail_msg("%a became %s", x, s);
  json_decref(v);
  free(t.s);
}

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Every exponent with the mantissas at both ends and some between, denormals among them (exponent
 * 0), both signs; then random bits. */
static void floats_read_back(void **state) {
  (void)state;
  for (uint32_t e = 0; e < 255; e++)
    for (uint32_t m = 0; m < 40; m++) {
      uint32_t mantissa = m < 8 ? m : m < 16 ? 0x7fffffu - (m - 8) : rng_block(1, e, m).v[0] >> 9;
      check_f32(float_of(e << 23 | mantissa));
      check_f32(float_of(0x80000000u | e << 23 | mantissa));
    }
  for (uint64_t i = 0; i < 20000; i++) {
    float x = float_of(rng_block(2, 0, i).v[0]);
    if (isfinite(x)) check_f32(x);
  }
}

static void doubles_read_back(void **state) {
  (void)state;
  for (int e = -1074; e < 1024; e++) check_f64(ldexp(1, e));
  for (uint64_t i = 0; i < 20000; i++) {
    RngBlock b = rng_block(3, 0, i);
    uint64_t bits = (uint64_t)b.v[0] << 32 | b.v[1];
    double x;
    memcpy(&x, &bits, sizeof x);
    if (isfinite(x)) check_f64(x);
  }
  check_f64(-0.0);
  check_f64(1.7976931348623157e308);
}

static void short_numbers_stay_short(void **state) {
  (void)state;
  static const struct {
    float x;
    const char *want;
  } f[] = {{0, "0"},          {-0.0f, "-0.0"},    {1, "1"},
           {0.1f, "0.1"},     {-2.5f, "-2.5"},    {1e30f, "1e+30"},
           {1e-45f, "1e-45"}, {0.3f, "0.3"},      {16777216, "16777216"},
           {NAN, "null"},     {INFINITY, "null"}, {-INFINITY, "null"}};
  for (size_t i = 0; i < sizeof f / sizeof *f; i++) {
    Text t;
    assert_string_equal(f32_text(&t, f[i].x), f[i].want);
    free(t.s);
  }
  Text t;
  assert_string_equal(f64_text(&t, 0.1), "0.1");
  free(t.s);
  assert_string_equal(f64_text(&t, 5e-324), "5e-324");
  free(t.s);
  assert_string_equal(f64_text(&t, (double)NAN), "null");
  free(t.s);
}

static void check_string(const char *s, size_t len, const char *want, size_t want_len) {
  Text t;
  Error err = {""};
  FILE *f = open_memstream(&t.s, &t.n);
  json_put_str(f, s, len);
  fclose(f);
  json_t *v = json_parse(t.s, t.n, "s", &err);
  if (!v) fail_msg("%s: %s", t.s, err.msg);
  assert_int_equal(json_string_length(v), want_len);
  assert_memory_equal(json_string_value(v), want, want_len);
  json_decref(v);
  free(t.s);
}

static void strings_are_escaped(void **state) {
  (void)state;
  char all[128];
  for (int i = 0; i < 128; i++) all[i] = (char)i;
  check_string(all, 128, all, 128);
  check_string("", 0, "", 0);
  const char *utf8 = "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80 \xEF\xBF\xBF \xF4\x8F\xBF\xBF";
  check_string(utf8, strlen(utf8), utf8, strlen(utf8));
}

#define FFFD "\xEF\xBF\xBD"
static void broken_utf8_is_replaced(void **state) {
  (void)state;
  static const char *const bad[][2] = {
      {"a\xFFz", "a" FFFD "z"},
      {"\x80", FFFD},
      {"\xC3", FFFD}, /* cut short */
      {"\xE2\x82", FFFD FFFD},
      {"\xF0\x9F\x98", FFFD FFFD FFFD},
      {"\xC0\x80", FFFD FFFD}, /* overlong */
      {"\xE0\x80\x80", FFFD FFFD FFFD},
      {"\xF0\x80\x80\x80", FFFD FFFD FFFD FFFD},
      {"\xED\xA0\x80", FFFD FFFD FFFD},          /* a surrogate */
      {"\xF4\x90\x80\x80", FFFD FFFD FFFD FFFD}, /* beyond U+10FFFF */
      {"\xC3(", FFFD "("},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    check_string(bad[i][0], strlen(bad[i][0]), bad[i][1], strlen(bad[i][1]));
}

static void arrays(void **state) {
  (void)state;
  Text t;
  FILE *f = open_memstream(&t.s, &t.n);
  json_put_i32_array(f, (const int32_t[]){1, -2, INT32_MAX}, 3);
  json_put_i32_array(f, NULL, 0);
  json_put_f32_array(f, (const float[]){0.5f, NAN, -3}, 3);
  json_put_f32_array(f, NULL, 0);
  fclose(f);
  assert_string_equal(t.s, "[1,-2,2147483647][][0.5,null,-3][]");
  free(t.s);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(any_value_at_the_top),
    cmocka_unit_test(errors_name_the_place),
    cmocka_unit_test(json_test_suite),
    cmocka_unit_test(nul_characters),
    cmocka_unit_test(names_may_be_asked_to_be_unique),
    cmocka_unit_test(typed_access),
    cmocka_unit_test(typed_access_refuses),
    cmocka_unit_test(floats_read_back),
    cmocka_unit_test(doubles_read_back),
    cmocka_unit_test(short_numbers_stay_short),
    cmocka_unit_test(strings_are_escaped),
    cmocka_unit_test(broken_utf8_is_replaced),
    cmocka_unit_test(arrays),
};
TEST_MAIN(tests)
