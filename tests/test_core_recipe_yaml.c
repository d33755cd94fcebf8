/* The YAML reader: anchors, merge keys, duplicates, limits, odd bytes, and the yaml-test-suite. */
#include "core/recipe_yaml.h"

#include <dirent.h>
#include <stdio.h>

#include "core/fs.h"
#include "core/recipe.h"
#include "tests/test.h"

typedef struct Doc {
  Pool pool;
  Problems problems;
  Node *root;
  Error err;
} Doc;

static Doc *doc_read(const char *text, size_t len) {
  Doc *d = calloc(1, sizeof *d);
  d->problems.file = "x.yaml";
  d->root = yaml_read(&d->pool, &d->problems, NULL, text, len);
  if (d->problems.n) problems_report(&d->problems, &d->err);
  return d;
}

static Doc *doc(const char *text) { return doc_read(text, strlen(text)); }

static void doc_free(Doc *d) {
  pool_free(&d->pool);
  problems_free(&d->problems);
  free(d);
}

static void expect_text(const Node *map, const char *key, const char *text) {
  const Node *n = node_get(map, key);
  assert_string_equal(n ? n->text : "(no such key)", text);
}

static void refuses(const char *text, const char *message) {
  Doc *d = doc(text);
  if (!d->problems.n) fail_msg("accepted: %s", text);
  if (strcmp(d->err.msg, message) != 0)
    fail_msg("%s\n gave: %s\n  not: %s", text, d->err.msg, message);
  doc_free(d);
}

/* ---- structure ---- */

static void places(void **state) {
  (void)state;
  Doc *d = doc("a: 1\nbb:\n  - x\n  - {c: 'd'}\n");
  const Node *list = node_get(d->root, "bb"), *d_node = node_get(list->items[1], "c");
  assert_int_equal(list->items[0]->line, 3);
  assert_int_equal(list->items[0]->column, 5);
  assert_int_equal(d_node->line, 4);
  assert_int_equal(d_node->column, 9);
  assert_false(d_node->plain);
  assert_true(list->items[0]->plain);
  doc_free(d);
}

static void nulls(void **state) {
  (void)state;
  Doc *d = doc("a:\nb: ~\nc: null\nd: ''\ne: nil\n");
  assert_true(node_is_null(node_get(d->root, "a")));
  assert_true(node_is_null(node_get(d->root, "b")));
  assert_true(node_is_null(node_get(d->root, "c")));
  assert_false(node_is_null(node_get(d->root, "d")));
  assert_false(node_is_null(node_get(d->root, "e")));
  doc_free(d);
  static const char *const empty[] = {"", "\n", "# only a comment\n", "---\n", "--- ~\n...\n"};
  for (size_t i = 0; i < sizeof empty / sizeof *empty; i++) {
    d = doc(empty[i]);
    if (!d->root) fail_msg("%s", d->err.msg);
    assert_true(node_is_null(d->root));
    doc_free(d);
  }
}

static void aliases(void **state) {
  (void)state;
  Doc *d = doc("a: &x {k: 1}\nb: *x\nc: &x 5\nd: *x\n");
  assert_ptr_equal(node_get(d->root, "a"), node_get(d->root, "b"));
  expect_text(d->root, "d", "5"); /* the later anchor of the same name */
  doc_free(d);
  refuses("a: *nowhere\n",
          "x.yaml:1:4: found alias *nowhere; expected an anchor &nowhere before it");
  refuses("a: &x [1, *x]\n", "x.yaml:1:11: found alias *x inside its own anchor");
  refuses("&r {a: {b: *r}}\n", "x.yaml:1:12: found alias *r inside its own anchor");
  refuses("&r {<<: *r}\n",
          "x.yaml:1:5: found \"<<\" without a map; expected a map, or a list of maps\n"
          "x.yaml:1:9: found alias *r inside its own anchor");
}

static void merge_keys(void **state) {
  (void)state;
  Doc *d =
      doc("one: &one {a: 1, b: 1}\n"
          "two: &two {b: 2, c: 2}\n"
          "x: {<<: *one, a: 9}\n"
          "y: {c: 9, <<: [*one, *two]}\n"
          "z: &z {<<: [*two, *one], d: 4}\n"
          "w: {<<: *z, d: 5}\n"
          "q: {'<<': 1}\n"
          "i: {<<: {a: 3}}\n");
  if (d->problems.n) fail_msg("%s", d->err.msg);
  const Node *x = node_get(d->root, "x"), *y = node_get(d->root, "y"), *z = node_get(d->root, "z"),
             *w = node_get(d->root, "w");
  expect_text(x, "a", "9"); /* explicit wins, before or behind "<<" */
  expect_text(x, "b", "1");
  expect_text(y, "a", "1");
  expect_text(y, "b", "1"); /* the earlier map of a list wins */
  expect_text(y, "c", "9");
  expect_text(z, "b", "2");
  expect_text(w, "d", "5"); /* through two levels */
  expect_text(w, "a", "1");
  expect_text(node_get(d->root, "q"), "<<", "1"); /* quoted: a plain name */
  expect_text(node_get(d->root, "i"), "a", "3");
  assert_null(node_get(x, "<<"));
  doc_free(d);
  refuses("a: {<<: 5}\n",
          "x.yaml:1:5: found \"<<\" without a map; expected a map, or a list of maps");
  refuses("a: {<<: [{b: 1}, 5]}\n",
          "x.yaml:1:5: found \"<<\" without a map; expected a map, or a list of maps");
  refuses("a: {<<: {b: 1}, <<: {c: 1}}\n",
          "x.yaml:1:17: found \"<<\" twice in one map; expected one with a list");
}

static void keys_occur_once(void **state) {
  (void)state;
  refuses("a: 1\nb: 2\na: 3\n",
          "x.yaml:3:1: found the key \"a\" twice in one map; expected it once");
  refuses("{a: 1, 'a': 3}", "x.yaml:1:8: found the key \"a\" twice in one map; expected it once");
  refuses("? [a]\n: 1\n", "x.yaml:1:3: found a list as a key; expected a name");
  refuses("{a: 1}: 1\n", "x.yaml:1:1: found a map as a key; expected a name");
  refuses("\"a\\0b\": 1\n", "x.yaml:1:1: found a text with a NUL byte as a key; expected a name");
  refuses("'': 1\n", "x.yaml:1:1: found an empty text as a key; expected a name");
  refuses("a: 1\n---\nb: 2\n", "x.yaml:2:1: found a second document; expected one");
}

static void tags(void **state) {
  (void)state;
  Doc *d = doc("a: !!str 5\nb: !!int \"5\"\nc: ! 5\nd: !!map {a: !!seq [1]}\n");
  if (d->problems.n) fail_msg("%s", d->err.msg);
  assert_false(node_get(d->root, "a")->plain);
  assert_true(node_get(d->root, "b")->plain);
  assert_false(node_get(d->root, "c")->plain);
  doc_free(d);
  refuses("a: !env HOME\nb: !!set {a: }\n",
          "x.yaml:1:4: found the tag \"!env\"; expected none\n"
          "x.yaml:2:4: found the tag \"tag:yaml.org,2002:set\"; expected none");
}

/* ---- limits ---- */

static char *repeat(const char *s, size_t n, const char *before, const char *behind) {
  size_t len = strlen(before) + n * strlen(s) + strlen(behind);
  char *t = malloc(len + 1), *p = stpcpy(t, before);
  for (size_t i = 0; i < n; i++) p = stpcpy(p, s);
  stpcpy(p, behind);
  return t;
}

static void refuses_owned(char *text, const char *part) {
  Doc *d = doc(text);
  assert_null(d->root);
  if (!strstr(d->err.msg, part)) fail_msg("gave: %s", d->err.msg);
  doc_free(d);
  free(text);
}

static void nesting(void **state) {
  (void)state;
  char *fine = repeat("[", 60, "a: ", "");
  char *closed = repeat("]", 60, fine, "");
  Doc *d = doc(closed);
  assert_non_null(d->root);
  doc_free(d);
  free(fine);
  free(closed);
  refuses_owned(repeat("[", 100000, "a: ", ""), "nested deeper than 64 levels");
  refuses_owned(repeat("{a: ", 100000, "", ""), "nested deeper than 64 levels");
  refuses_owned(repeat("- ", 100000, "", ""), "nested deeper than 64 levels");
}

static void billion_laughs(void **state) {
  (void)state;
  char text[8192];
  size_t used = (size_t)sprintf(text, "a0: &a0 [lol]\n");
  for (int i = 1; i < 60; i++)
    used += (size_t)sprintf(text + used, "a%d: &a%d [*a%d, *a%d, *a%d, *a%d, *a%d]\n", i, i, i - 1,
                            i - 1, i - 1, i - 1, i - 1);
  Doc *d = doc(text); /* 5^59 leaves, shared */
  assert_non_null(d->root);
  doc_free(d);
  Error err;
  assert_null(recipe_parse(text, used, "x.yaml", NULL, 0, &err));
  /* The same with merge keys: bounded by the number of different keys. */
  used = (size_t)sprintf(text, "a0: &a0 {k: 1}\n");
  for (int i = 1; i < 60; i++)
    used += (size_t)sprintf(text + used, "a%d: &a%d {<<: [*a%d, *a%d, *a%d], k%d: 1}\n", i, i,
                            i - 1, i - 1, i - 1, i);
  d = doc(text);
  assert_non_null(d->root);
  assert_int_equal(node_get(d->root, "a59")->n, 60);
  doc_free(d);
}

static void many_keys(void **state) {
  (void)state;
  char *text = malloc(64 * 20000), *p = text;
  for (int i = 0; i < 2000; i++) p += sprintf(p, "key%d: 1\n", i);
  refuses_owned(text, "more than 1024 keys in one map");
  text = malloc(64 * 20000);
  p = text + sprintf(text, "a: &a\n");
  for (int i = 0; i < 1000; i++) p += sprintf(p, "  key%d: 1\n", i);
  p += sprintf(p, "b:\n");
  for (int i = 0; i < 1100; i++) p += sprintf(p, "- {<<: *a}\n");
  refuses_owned(text, "more than 1000000 keys");
  text = malloc(64 * 20000);
  p = text;
  for (int i = 0; i < 2000; i++) p += sprintf(p, "- &a%d 1\n", i);
  refuses_owned(text, "more than 1024 anchors");
}

static void large_scalar(void **state) {
  (void)state;
  size_t n = 10 << 20;
  char *text = repeat("a", n, "run: {seed: ", "}\n");
  Error err;
  assert_null(recipe_parse(text, strlen(text), "x.yaml", NULL, 0, &err));
  assert_non_null(strstr(err.msg, "x.yaml:1:13: run.seed: found \"aaaa"));
  assert_true(strlen(err.msg) < 1000);
  free(text);
  text = repeat("a", n, "run: {directory: ", "}\n");
  assert_null(recipe_parse(text, strlen(text), "x.yaml", NULL, 0, &err));
  assert_non_null(strstr(err.msg, "found a text of 10485760 bytes; expected at most 4095"));
  free(text);
}

/* ---- bytes ---- */

static void refuses_bytes(const char *text, size_t len, const char *message) {
  Doc *d = doc_read(text, len);
  assert_null(d->root);
  if (strncmp(d->err.msg, message, strlen(message)) != 0) fail_msg("gave: %s", d->err.msg);
  doc_free(d);
}

static void odd_bytes(void **state) {
  (void)state;
  refuses_bytes("a: 1\nb: \0x\n", 11, "x.yaml:2:4: not YAML: control characters are not allowed");
  refuses_bytes("a: 1\n\0", 6, "x.yaml:2:1: not YAML: control characters are not allowed");
  refuses_bytes("a: \xff\n", 5, "x.yaml:1:4: not YAML: invalid leading UTF-8 octet");
  refuses_bytes("\xc3\xa9\xc3\xa9: \xed\xa0\x80\n", 9, "x.yaml:1:5: not YAML: invalid Unicode");
  refuses_bytes("a: \xe2\x82", 5, "x.yaml:1:4: not YAML: incomplete UTF-8 octet sequence");
  refuses_bytes("a: \"\\ud800\"\n", 12, "x.yaml:1:7: not YAML: found invalid Unicode");
  refuses_bytes("a:\n\t- b\n", 8, "x.yaml:2:1: not YAML: found character that cannot start");
  refuses_bytes("a: [1, 2\nb: 3\n", 14, "x.yaml:2:2: not YAML: did not find expected ',' or ']'");
  refuses_bytes("a: 'b\n", 6, "x.yaml:2:1: not YAML: found unexpected end of stream");
  Doc *d =
      doc("\xEF\xBB\xBF"
          "a: 1\r\nb: \"x\\0y\"\r\nc: |\r\n  two\r\n  lines\r\nd: a\tb\r\n");
  if (!d->root) fail_msg("%s", d->err.msg);
  expect_text(d->root, "a", "1"); /* behind a byte order mark */
  assert_int_equal(node_get(d->root, "b")->len, 3);
  assert_memory_equal(node_get(d->root, "b")->text, "x\0y", 3);
  expect_text(d->root, "c", "two\nlines\n");
  expect_text(d->root, "d", "a\tb");
  doc_free(d);
}

/* ---- yaml-test-suite ---- */

/* The suite writes invisible characters as visible ones. */
static char *visible(const char *s) {
  static const struct {
    const char *mark, *meant;
  } map[] = {{"\xE2\x90\xA3", " "},
             {"\xC2\xBB", "\t"},
             {"\xE2\x80\x94", ""},
             {"\xE2\x86\x90", "\r"},
             {"\xE2\x87\x94", "\xEF\xBB\xBF"},
             {"\xE2\x86\xB5", ""},
             {"\xE2\x88\x8E", ""}};
  char *out = malloc(strlen(s) + 1), *o = out;
  while (*s) {
    size_t k = 0, n = sizeof map / sizeof *map;
    while (k < n && strncmp(s, map[k].mark, strlen(map[k].mark)) != 0) k++;
    if (k == n) {
      *o++ = *s++;
    } else {
      s += strlen(map[k].mark);
      o = stpcpy(o, map[k].meant);
    }
  }
  *o = 0;
  return out;
}

/* No text may crash the loader; what is no recipe gives a message that begins with the name. */
static void survives(const char *text, size_t len) {
  Error err = {""};
  Recipe *r = recipe_parse(text, len, "suite.yaml", NULL, 0, &err);
  if (!r && strncmp(err.msg, "suite.yaml", 10) != 0) fail_msg("gave: %s", err.msg);
  assert_true(r || err.msg[0]);
  recipe_free(r);
}

typedef struct Tally {
  int cases, accepted, wrong;
} Tally;

static void run_case(const Node *test, Tally *t) {
  const Node *yaml = node_get(test, "yaml"), *fail = node_get(test, "fail");
  if (!yaml || yaml->kind != NODE_SCALAR) return;
  char *text = visible(yaml->text);
  survives(text, strlen(text));
  Doc *d = doc(text);
  t->cases++;
  t->accepted += d->root != NULL;
  t->wrong += d->root && d->problems.n == 0 && fail;
  doc_free(d);
  free(text);
}

static void yaml_test_suite(void **state) {
  (void)state;
  char dir[2048];
  snprintf(dir, sizeof dir, "%s", test_path("data/malformed/yaml-test-suite/src"));
  DIR *list = opendir(dir);
  if (!list) skip();
  Tally t = {0};
  for (struct dirent *e; list && (e = readdir(list));) {
    if (e->d_name[0] == '.') continue;
    char *path = fs_join(dir, e->d_name);
    size_t len;
    Error err;
    char *text = fs_read(path, &len, &err);
    assert_non_null(text);
    survives(text ? text : "", len);
    Doc *d = doc_read(text ? text : "", len);
    if (!d->root) fail_msg("%s: %s", path, d->err.msg); /* the files themselves are YAML */
    for (size_t i = 0; i < d->root->n; i++) run_case(d->root->items[i], &t);
    doc_free(d);
    free(text);
    free(path);
  }
  if (list) closedir(list);
  print_message("%d cases, %d read, %d of the invalid ones\n", t.cases, t.accepted, t.wrong);
  assert_true(t.cases > 300);
  /* libyaml reads YAML 1.1 and is laxer than 1.2 in places; this guards against losing many. */
  assert_true(t.accepted > t.cases / 2);
  assert_true(t.wrong < 15);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(places),    cmocka_unit_test(nulls),
    cmocka_unit_test(aliases),   cmocka_unit_test(merge_keys),
    cmocka_unit_test(tags),      cmocka_unit_test(keys_occur_once),
    cmocka_unit_test(nesting),   cmocka_unit_test(billion_laughs),
    cmocka_unit_test(many_keys), cmocka_unit_test(large_scalar),
    cmocka_unit_test(odd_bytes), cmocka_unit_test(yaml_test_suite),
};
TEST_MAIN(tests)
