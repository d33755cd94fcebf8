/* The rewards section: what each kind of term needs, and keys of other kinds. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

#include "core/recipe_read.h"

static void check_pattern(Reading *rd, const char *key, const RewardTerm *t) {
  int code;
  PCRE2_SIZE at;
  uint32_t flags = PCRE2_UTF | (t->ignore_case ? PCRE2_CASELESS : 0);
  pcre2_code *re =
      pcre2_compile((PCRE2_SPTR)t->pattern, PCRE2_ZERO_TERMINATED, flags, &code, &at, NULL);
  if (re) {
    pcre2_code_free(re);
    return;
  }
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  check_fail(rd, key, "found %s; expected a PCRE2 pattern (%s at byte %zu)",
             text_quote(t->pattern, strlen(t->pattern)).s, (const char *)text, (size_t)at);
}

static bool blank(const char *s) { return s[strspn(s, " \t\r\n")] == 0; }

static void check_kind(Reading *rd, const char *path, const RewardTerm *t) {
  Pool *pool = &rd->box->pool;
  const char *key;
  if (!strcmp(t->kind, "length")) {
    key = pool_printf(pool, "%s.target", path);
    if (t->target == 0 && check_sound(rd, key))
      check_fail(rd, key, "not given; expected a length in tokens");
  } else if (!strcmp(t->kind, "words")) {
    key = pool_printf(pool, "%s.words", path);
    if (t->n_words == 0 && check_sound(rd, key))
      check_fail(rd, key, "not given; expected a list of texts");
  } else if (!strcmp(t->kind, "regex")) {
    key = pool_printf(pool, "%s.pattern", path);
    if (!check_sound(rd, key)) return;
    if (!*t->pattern)
      check_fail(rd, key, "not given; expected a PCRE2 pattern");
    else
      check_pattern(rd, key, t);
  } else if (!strcmp(t->kind, "command")) {
    key = pool_printf(pool, "%s.command", path);
    if (blank(t->command) && check_sound(rd, key))
      check_fail(rd, key, "not given; expected a shell command");
  } else if (!strcmp(t->kind, "exact")) {
    if (!*rd->box->r.data.prompts.answer_field && check_sound(rd, "data.prompts.answer_field"))
      check_fail(rd, path, "found kind exact; expected data.prompts.answer_field to be given");
  }
}

/* A key of another kind would be passed over in silence. */
static void check_strays(Reading *rd, const char *path, const RewardTerm *t) {
  const RecipeGroup *g = recipe_term_group();
  for (int i = 0; i < g->n_rows; i++) {
    const RecipeRow *row = &g->rows[i];
    const char *key = pool_printf(&rd->box->pool, "%s.%s", path, row->key);
    if (row_applies(row, t->kind) || !given_find(rd->box, key)) continue;
    check_fail(rd, key, "found in a term of kind %s; expected only in kind %s", t->kind,
               choices_text(&rd->box->pool, row->only));
  }
}

void check_rewards(Reading *rd) {
  const Recipe *r = &rd->box->r;
  int models = 0;
  for (int i = 0; i < r->n_rewards; i++) {
    const RewardTerm *t = &r->rewards[i];
    const char *path = pool_printf(&rd->box->pool, "rewards.%d", i);
    const char *kind = pool_printf(&rd->box->pool, "%s.kind", path);
    if (!check_sound(rd, kind)) continue;
    if (!*t->kind) {
      check_fail(rd, kind, "not given; expected one of %s",
                 choices_text(&rd->box->pool, recipe_term_group()->rows[0].choices));
      continue;
    }
    if (!strcmp(t->kind, "model") && models++)
      check_fail(rd, path, "found kind model twice; expected once");
    check_kind(rd, path, t);
    check_strays(rd, path, t);
  }
}
