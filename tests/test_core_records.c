/* core/json.h: records of JSON Lines and of arrays, and the places that errors name. */
#include <stdio.h>
#include <zlib.h>

#include "core/json.h"
#include "tests/test.h"

static const char *write_text(const char *name, const char *text) {
  return test_write(name, text, strlen(text));
}

/* Reads all; the sum of the "v" fields and the last place. Returns the last result. */
static int read_all(const char *path, int *sum, char *place, Error *err) {
  *sum = 0;
  place[0] = '\0';
  RecordReader *r = records_open(path, err);
  if (!r) return -1;
  json_t *rec;
  int got;
  while ((got = records_next(r, &rec, err)) == 1) {
    *sum += (int)json_integer_value(json_object_get(rec, "v"));
    snprintf(place, 512, "%s", records_place(r));
  }
  records_close(r);
  return got;
}

static void expect_sum(const char *path, int want, const char *place_end) {
  Error err = {""};
  char place[512];
  int sum;
  if (read_all(path, &sum, place, &err)) fail_msg("%s", err.msg);
  assert_int_equal(sum, want);
  assert_true(strlen(place) >= strlen(place_end));
  assert_string_equal(place + strlen(place) - strlen(place_end), place_end);
}

static void both_shapes(void **state) {
  (void)state;
  expect_sum(write_text("a.jsonl", "{\"v\":1}\n\n  \r\n{\"v\":2}\r\n{\"v\":4}"), 7, "a.jsonl:5");
  expect_sum(write_text("a.json", " \n[ {\"v\":1},\n\n{\"v\":2}]\n"), 3, "a.json: record 2");
  expect_sum(write_text("b.jsonl", "\xEF\xBB\xBF{\"v\":1}\n"), 1, "b.jsonl:1");
  expect_sum(write_text("b.json", "\xEF\xBB\xBF[{\"v\":1}]"), 1, "b.json: record 1");
  expect_sum(write_text("none.jsonl", " \n\n"), 0, "");
  expect_sum(write_text("none.json", "[]"), 0, "");
  expect_sum(write_text("empty", ""), 0, "");
}

static void gzip_too(void **state) {
  (void)state;
  const char *lines = test_file("g.jsonl.gz"), *array = test_file("g.json.gz");
  gzFile f = gzopen(lines, "wb");
  gzputs(f, "{\"v\":10}\n{\"v\":20}\n");
  gzclose(f);
  expect_sum(lines, 30, "g.jsonl.gz:2");
  f = gzopen(array, "wb");
  gzputs(f, "[{\"v\":10},{\"v\":20},{\"v\":5}]");
  gzclose(f);
  expect_sum(array, 35, "g.json.gz: record 3");
}

static void errors_name_the_line(void **state) {
  (void)state;
  static const struct {
    const char *name, *text, *want;
  } bad[] = {
      {"e.jsonl", "{\"v\":1}\n\n{\"v\":}\n", "e.jsonl:3:6: not valid JSON"},
      {"e.jsonl", "{\"v\":1}\n{\"v\":2} x\n", "e.jsonl:2:9: not valid JSON"},
      {"e.jsonl", "{\"v\":1}\n{\"v\":\"\xff\"}\n", "e.jsonl:2:"},
      {"e.jsonl", "{\"v\":1}\n7\n", "e.jsonl:2: found 7; expected an object"},
      {"e.jsonl", "{\"v\":1}\nnull\n", "e.jsonl:2: found null; expected an object"},
      {"e.jsonl", "text\n", "e.jsonl:1:"},
      {"e.json", "[{\"v\":1},\n {\"v\":2},\n {\"v\" 3}]", "e.json:3:7: not valid JSON"},
      {"e.json", "[{\"v\":1}, [2]]", "e.json: record 2: found [2]; expected an object"},
      {"e.json", "[{\"v\":1}", "e.json:1:"},
      {"e.json", "[{\"v\":1}]\n{\"v\":2}\n", "e.json:2:"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    Error err = {""};
    char place[512];
    int sum;
    assert_int_equal(read_all(write_text(bad[i].name, bad[i].text), &sum, place, &err), -1);
    if (!strstr(err.msg, bad[i].want)) fail_msg("\"%s\" gave: %s", bad[i].text, err.msg);
  }
  Error err = {""};
  assert_null(records_open(test_file("absent"), &err));
}

static void long_wrong_records_are_quoted_short(void **state) {
  (void)state;
  Error err = {""};
  char place[512], text[4000];
  int sum;
  memset(text, 'a', sizeof text);
  text[0] = '"';
  memcpy(text + sizeof text - 2, "\"", 2);
  assert_int_equal(read_all(write_text("l.jsonl", text), &sum, place, &err), -1);
  assert_non_null(strstr(err.msg, "aaa...; expected an object"));
  assert_true(strlen(err.msg) < 600);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(both_shapes),
    cmocka_unit_test(gzip_too),
    cmocka_unit_test(errors_name_the_line),
    cmocka_unit_test(long_wrong_records_are_quoted_short),
};
TEST_MAIN(tests)
