/* The resolved recipe as YAML, and the reference of keys as Markdown: both walk the table. */
#include <stdio.h>
#include <string.h>

#include "core/recipe_read.h"

/* Characters that YAML wants escaped although they are no controls in ASCII: U+0080 to U+009F, the
 * line and paragraph separators, the byte order mark, U+FFFE and U+FFFF. Their code point and
 * length in bytes, or 0. */
static unsigned unprintable(const unsigned char *s, size_t *len) {
  *len = 2;
  if (s[0] == 0xC2 && s[1] < 0xA0) return s[1];
  *len = 3;
  if (s[0] != 0xE2 && s[0] != 0xEF) return 0;
  if (!s[1] || !s[2]) return 0;
  unsigned c = (s[0] & 0xFu) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu);
  bool escape = c == 0x2028 || c == 0x2029 || c == 0xFEFF || c == 0xFFFE || c == 0xFFFF;
  return escape ? c : 0;
}

/* Double-quoted YAML: every text that a recipe can hold reads back to itself. */
static void print_text(FILE *out, const char *text) {
  const unsigned char *s = (const unsigned char *)text;
  size_t len;
  unsigned code;
  fputc('"', out);
  for (; *s; s++) {
    if (*s == '"' || *s == '\\') {
      fprintf(out, "\\%c", *s);
    } else if (*s == '\n') {
      fputs("\\n", out);
    } else if (*s < 0x20 || *s == 0x7F) {
      fprintf(out, "\\x%02X", *s);
    } else if ((code = unprintable(s, &len)) != 0) {
      fprintf(out, "\\u%04X", code);
      s += len - 1;
    } else {
      fputc(*s, out);
    }
  }
  fputc('"', out);
}

static void print_words(FILE *out, const RewardTerm *t) {
  fputc('[', out);
  for (int i = 0; i < t->n_words; i++) {
    if (i) fputs(", ", out);
    print_text(out, t->words[i]);
  }
  fputc(']', out);
}

static void print_stages(FILE *out, const Recipe *r) {
  static const char *const names[] = {"sft", "reward", "ppo"};
  fputc('[', out);
  for (int i = 0; i < r->n_stages; i++) fprintf(out, "%s%s", i ? ", " : "", names[r->stages[i]]);
  fputc(']', out);
}

static void print_value(FILE *out, const Recipe *r, const RecipeRow *row, const char *base) {
  const void *at = base + row->offset;
  char number[40];
  switch (row->type) {
    case ROW_INT:
      fprintf(out, "%lld", (long long)*(const int64_t *)at);
      break;
    case ROW_FLOAT:
      number_text(*(const double *)at, number, sizeof number);
      fputs(number, out);
      break;
    case ROW_BOOL:
      fputs(*(const bool *)at ? "true" : "false", out);
      break;
    case ROW_CHOICE:
    case ROW_TEXT:
    case ROW_PATH: {
      const char *s = *(const char *const *)at;
      if (row->type != ROW_CHOICE)
        print_text(out, s);
      else
        fputs(*s ? s : "null", out);
      break;
    }
    case ROW_WORDS:
      print_words(out, (const RewardTerm *)(const void *)base);
      break;
    case ROW_STAGES:
      print_stages(out, r);
      break;
  }
}

static int depth_of(const char *path) {
  int depth = *path != 0;
  for (const char *p = path; *p; p++) depth += *p == '.';
  return depth;
}

/* The headers of the sections that a group lies in and that are not open yet. */
static void open_sections(FILE *out, const char *path, const char *before) {
  int level = 0;
  for (const char *p = path; *p; level++) {
    size_t len = strcspn(p, "."), upto = (size_t)(p - path) + len;
    bool open = !strncmp(path, before, upto) && (before[upto] == '.' || !before[upto]);
    if (!open) fprintf(out, "%*s%.*s:\n", 2 * level, "", (int)len, p);
    p += len + (p[len] == '.');
  }
}

static void print_group(FILE *out, const Recipe *r, const RecipeGroup *g) {
  int indent = 2 * depth_of(g->path);
  for (int i = 0; i < g->n_rows; i++) {
    const RecipeRow *row = &g->rows[i];
    if (!row_applies(row, g->name)) continue;
    fprintf(out, "%*s%s: ", indent, "", row->key);
    print_value(out, r, row, (const char *)r + g->base);
    fputc('\n', out);
  }
}

static void print_rewards(FILE *out, const Recipe *r) {
  const RecipeGroup *g = recipe_term_group();
  fputs("rewards:\n", out);
  for (int i = 0; i < r->n_rewards; i++) {
    for (int k = 0; k < g->n_rows; k++) {
      if (!row_applies(&g->rows[k], r->rewards[i].kind)) continue;
      fprintf(out, "  %s %s: ", k ? " " : "-", g->rows[k].key);
      print_value(out, r, &g->rows[k], (const char *)&r->rewards[i]);
      fputc('\n', out);
    }
  }
}

/* Sizes of a model that is not made from random weights say nothing. */
static bool unused_init(const Recipe *r, const RecipeGroup *g) {
  size_t len = strlen(g->path);
  if (len < 5 || strcmp(g->path + len - 5, ".init") != 0) return false;
  return ((const InitConfig *)(const void *)((const char *)r + g->base))->hidden_size == 0;
}

int recipe_print(const Recipe *r, FILE *out) {
  const char *before = "";
  for (int i = 0; i < recipe_group_count(); i++) {
    const RecipeGroup *g = recipe_group(i);
    if (unused_init(r, g)) continue;
    if (!strcmp(g->path, "rollout")) print_rewards(out, r);
    open_sections(out, g->path, before);
    print_group(out, r, g);
    before = g->path;
  }
  return ferror(out) ? -1 : 0;
}

/* ---- the reference ---- */

static const char *type_name(RowType t) {
  static const char *const names[] = {"whole number", "number", "boolean",       "text",
                                      "choice",       "path",   "list of texts", "list"};
  return names[t];
}

static void help_row(FILE *out, const RecipeGroup *g, const RecipeRow *row) {
  Pool pool = {0};
  const char *dflt = row_default(g, row);
  fprintf(out, "| `%s` | %s | ", row->key, type_name(row->type));
  if (*dflt) fprintf(out, "`%s`", dflt);
  fputs(" | ", out);
  if (row->choices) fputs(choices_text(&pool, row->choices), out);
  if (row->type == ROW_INT || row->type == ROW_FLOAT) fputs(bounds_text(&pool, row->bounds), out);
  fprintf(out, "%s%s | ", row->unit ? " " : "", row->unit ? row->unit : "");
  if (g == recipe_term_group() && row->only)
    fprintf(out, "kind %s: ", choices_text(&pool, row->only));
  fprintf(out, "%s |\n", row->help);
  pool_free(&pool);
}

/* The first group with the same rows, when every row applies to both: it is described once. */
static const RecipeGroup *twin(const RecipeGroup *g) {
  for (int k = 0; k < g->n_rows; k++)
    if (g->rows[k].only) return NULL;
  for (int i = 0; recipe_group(i) != g; i++)
    if (recipe_group(i)->rows == g->rows) return recipe_group(i);
  return NULL;
}

static void help_twin(FILE *out, const RecipeGroup *g, const RecipeGroup *first) {
  fprintf(out, "The keys of `%s`", first->path);
  const char *but = "; defaults:";
  for (int k = 0; k < g->n_rows; k++) {
    const char *dflt = row_default(g, &g->rows[k]);
    if (!strcmp(dflt, row_default(first, &g->rows[k]))) continue;
    fprintf(out, "%s `%s` %s", but, g->rows[k].key, dflt);
    but = ",";
  }
  fputs(".\n", out);
}

static void help_group(FILE *out, const RecipeGroup *g) {
  const RecipeGroup *term = recipe_term_group(), *first = g == term ? NULL : twin(g);
  if (*g->path) fprintf(out, "\n### %s%s\n\n%s", g->path, g == term ? "[]" : "", g->help);
  if (g->short_key) fprintf(out, " A text in place of the map is its `%s`.", g->short_key);
  if (*g->path) fputs("\n", out);
  if (first) {
    help_twin(out, g, first);
    return;
  }
  fputs("\n| key | type | default | bounds | meaning |\n|---|---|---|---|---|\n", out);
  for (int i = 0; i < g->n_rows; i++)
    if (g == term || row_applies(&g->rows[i], g->name)) help_row(out, g, &g->rows[i]);
}

void recipe_help(FILE *out) {
  fputs(
      "## Recipe keys\n\n"
      "A recipe is YAML 1.2: one map of sections. Anchors, aliases and merge keys (`<<`) work; "
      "keys at the\ntop that begin with `x-` only hold anchors. `null` means the default. Paths "
      "are relative to the\nrecipe's folder (in `--set`: to the working directory). `--set "
      "a.b=VALUE` replaces a value, `--set\nrewards.0.weight=2` one of a list.\n",
      out);
  for (int i = 0; i < recipe_group_count(); i++) {
    if (!strcmp(recipe_group(i)->path, "rollout")) help_group(out, recipe_term_group());
    help_group(out, recipe_group(i));
  }
}
