/* Every row of the table: its default, values at and beyond both bounds, values of another type. */
#include <math.h>
#include <stdio.h>

#include "core/recipe_read.h"
#include "tests/test.h"

/* A whole recipe; terms of every kind, so that every key of a term has a place. */
static const char base[] =
    "stages: [sft, reward, ppo]\n"
    "models: {actor: base}\n"
    "data: {sft: a.jsonl, preference: b.jsonl, prompts: {path: c.jsonl, answer_field: answer}}\n"
    "rewards:\n"
    "- kind: model\n"
    "- {kind: length, target: 20}\n"
    "- {kind: words, words: [yes, no]}\n"
    "- {kind: regex, pattern: a+}\n"
    "- {kind: exact}\n"
    "- {kind: command, command: cat}\n";

static Recipe *load(const char *set, Error *err) {
  err->msg[0] = 0;
  return recipe_parse(base, sizeof base - 1, "x.yaml", &set, set != NULL, err);
}

/* Calls f for every key of the table with its full path. */
static void each_key(void (*f)(const char *path, const RecipeGroup *g, const RecipeRow *row)) {
  char path[128];
  for (int i = 0; i < recipe_group_count(); i++) {
    const RecipeGroup *g = recipe_group(i);
    for (int k = 0; k < g->n_rows; k++) {
      if (!row_applies(&g->rows[k], g->name)) continue;
      snprintf(path, sizeof path, "%s%s%s", g->path, *g->path ? "." : "", g->rows[k].key);
      f(path, g, &g->rows[k]);
    }
  }
  static const char *const kinds[] = {"model", "length", "words", "regex", "exact", "command"};
  const RecipeGroup *term = recipe_term_group();
  for (int i = 0; i < 6; i++)
    for (int k = 0; k < term->n_rows; k++) {
      if (!row_applies(&term->rows[k], kinds[i])) continue;
      snprintf(path, sizeof path, "rewards.%d.%s", i, term->rows[k].key);
      f(path, term, &term->rows[k]);
    }
}

/* ---- the table itself ---- */

static void row_is_sound(const char *path, const RecipeGroup *g, const RecipeRow *row) {
  KeyRef ref = key_find(path);
  assert_ptr_equal(ref.row, row);
  assert_ptr_equal(ref.group, g);
  assert_true(row->help && *row->help);
  const char *dflt = row_default(g, row);
  if (row->type == ROW_INT || row->type == ROW_FLOAT) {
    assert_true(row->bounds.lo <= row->bounds.hi);
    /* A term's target has no default within its bounds: it must be given. */
    if (strcmp(row->key, "target") != 0 && !bounds_hold(row->bounds, strtod(dflt, NULL)))
      fail_msg("%s: the default %s is out of bounds", path, dflt);
  }
  if (row->type == ROW_CHOICE && *dflt && !choice_holds(row->choices, dflt))
    fail_msg("%s: the default %s is no choice", path, dflt);
}

static void rows_are_sound(void **state) {
  (void)state;
  each_key(row_is_sound);
  assert_null(key_find("ppo.clp_low").row);
  assert_null(key_find("rewards.16.kind").row);
  assert_null(key_find("ppo").row);
}

static int offset_order(const void *a, const void *b) {
  size_t x = *(const size_t *)a, y = *(const size_t *)b;
  return x < y ? -1 : x > y;
}

/* Two rows that write the same field would be a slip of the pen in the table. */
static size_t offsets[512];
static int n_offsets;
static void note_offset(const char *path, const RecipeGroup *g, const RecipeRow *row) {
  (void)g;
  (void)row;
  offsets[n_offsets++] = key_find(path).offset;
}

static void fields_have_one_row(void **state) {
  (void)state;
  n_offsets = 0;
  each_key(note_offset);
  qsort(offsets, (size_t)n_offsets, sizeof *offsets, offset_order);
  for (int i = 1; i < n_offsets; i++) assert_true(offsets[i] != offsets[i - 1]);
}

/* ---- defaults ---- */

static const Recipe *plain;

static void has_default(const char *path, const RecipeGroup *g, const RecipeRow *row) {
  if (given_find((const RecipeBox *)plain, path)) return; /* the base recipe gives it */
  const char *at = (const char *)plain + key_find(path).offset, *dflt = row_default(g, row);
  bool same = true;
  switch (row->type) {
    case ROW_INT:
      same = *(const int64_t *)(const void *)at == strtoll(dflt, NULL, 10);
      break;
    case ROW_FLOAT:
      same = *(const double *)(const void *)at == strtod(dflt, NULL);
      break;
    case ROW_BOOL:
      same = *(const bool *)at == !strcmp(dflt, "true");
      break;
    case ROW_CHOICE:
    case ROW_TEXT:
    case ROW_PATH:
      same = !strcmp(*(const char *const *)(const void *)at, dflt);
      break;
    case ROW_WORDS:
    case ROW_STAGES:
      break;
  }
  /* Those that follow from other keys; test_core_recipe.c looks at them. */
  bool resolved = !strcmp(path, "run.directory") || !strncmp(path, "models.", 7);
  if (!same && !resolved) fail_msg("%s: the default is not %s", path, dflt);
}

static void defaults(void **state) {
  (void)state;
  Error err;
  plain = load(NULL, &err);
  if (!plain) fail_msg("%s", err.msg);
  each_key(has_default);
  recipe_free((Recipe *)plain);
}

/* ---- values that are refused ---- */

static void refused(const char *path, const char *value) {
  char set[256], want[300];
  Error err;
  snprintf(set, sizeof set, "%s=%s", path, value);
  snprintf(want, sizeof want, "--set %s: %s: found ", set, path);
  Recipe *r = load(set, &err);
  if (r) fail_msg("%s was accepted", set);
  if (!strstr(err.msg, want) || !strstr(err.msg, "; expected "))
    fail_msg("%s gave: %s", set, err.msg);
}

/* Accepted, or refused by a check between sections only. */
static void in_bounds(const char *path, const char *value) {
  char set[256];
  Error err;
  snprintf(set, sizeof set, "%s=%s", path, value);
  Recipe *r = load(set, &err);
  if (!r && strstr(err.msg, "expected a whole number")) fail_msg("%s gave: %s", set, err.msg);
  if (!r && strstr(err.msg, "expected a number")) fail_msg("%s gave: %s", set, err.msg);
  if (!r && strstr(err.msg, "expected true or false")) fail_msg("%s gave: %s", set, err.msg);
  recipe_free(r);
}

static void number_bounds(const char *path, const RecipeRow *row) {
  Bounds b = row->bounds;
  char value[64];
  bool whole = row->type == ROW_INT;
  double step_lo = whole ? 1 : 1e-3 * (fabs(b.lo) + 1), step_hi = whole ? 1 : 1e-3 * (b.hi + 1);
  snprintf(value, sizeof value, "%.17g", b.above_lo ? b.lo : b.lo - step_lo);
  refused(path, value);
  snprintf(value, sizeof value, "%.17g", b.below_hi ? b.hi : b.hi + step_hi);
  refused(path, value);
  if (!b.above_lo) {
    snprintf(value, sizeof value, "%.17g", b.lo);
    in_bounds(path, value);
  }
  if (!b.below_hi) {
    snprintf(value, sizeof value, whole ? "%.0f" : "%.17g", b.hi);
    in_bounds(path, value);
  }
}

static void values(const char *path, const RecipeGroup *g, const RecipeRow *row) {
  (void)g;
  static const char *const no_number[] = {
      "abc",  "true", "\"1\"", "[1]", "{a: 1}", ".nan", ".inf", "1_0",
      "1,5",  "0b1",  "1e",    "+",   ".",      "- 1",  "- 1.", "99999999999999999999999",
      "1e999"};
  static const char *const no_int[] = {"1.5", "1e2", "010", "2."};
  static const char *const no_bool[] = {"yes", "on", "1", "True", "\"true\"", "[true]"};
  static const char *const no_text[] = {"5", "1.5", "true", "[a]", "{a: b}", ".inf", "\"a\\0b\""};
  refused(path, "[[]]");
  switch (row->type) {
    case ROW_INT:
      for (size_t i = 0; i < sizeof no_int / sizeof *no_int; i++) refused(path, no_int[i]);
      /* fall through */
    case ROW_FLOAT:
      for (size_t i = 0; i < sizeof no_number / sizeof *no_number; i++) refused(path, no_number[i]);
      number_bounds(path, row);
      break;
    case ROW_BOOL:
      for (size_t i = 0; i < sizeof no_bool / sizeof *no_bool; i++) refused(path, no_bool[i]);
      in_bounds(path, "true");
      in_bounds(path, "false");
      break;
    case ROW_CHOICE:
      for (size_t i = 0; i < sizeof no_text / sizeof *no_text; i++)
        if (!choice_holds(row->choices, no_text[i])) refused(path, no_text[i]);
      refused(path, "nothing_like_it");
      break;
    case ROW_TEXT:
    case ROW_PATH:
      for (size_t i = 0; i < sizeof no_text / sizeof *no_text; i++) refused(path, no_text[i]);
      break;
    case ROW_WORDS:
      refused(path, "abc");
      refused(path, "[]");
      break;
    case ROW_STAGES:
      refused(path, "sft");
      refused(path, "[]");
      break;
  }
}

static void bad_values(void **state) {
  (void)state;
  each_key(values);
}

static void overlong_texts(void **state) {
  (void)state;
  char *set = malloc(70000);
  memset(set, 'a', 70000);
  set[69999] = 0;
  memcpy(set, "data.chat.user=", 15);
  Error err;
  assert_null(load(set, &err));
  assert_non_null(strstr(err.msg, "found a text of 69984 bytes; expected at most 65536"));
  free(set);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(rows_are_sound), cmocka_unit_test(fields_have_one_row),
    cmocka_unit_test(defaults),       cmocka_unit_test(bad_values),
    cmocka_unit_test(overlong_texts),
};
TEST_MAIN(tests)
