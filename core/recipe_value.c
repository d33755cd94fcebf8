/* Scalars: YAML 1.2's core schema, read strictly, and how messages speak of them. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/recipe_read.h"

static bool whole(const Node *n) { return n->kind == NODE_SCALAR && strlen(n->text) == n->len; }

static bool all_of(const char *s, const char *set) { return *s && s[strspn(s, set)] == 0; }

/* [-+]?[0-9]+, 0o[0-7]+ or 0x[0-9a-fA-F]+. A leading zero is octal to YAML 1.1 and decimal to 1.2:
 * refused as ambiguous. "1_000" is a number to YAML 1.1 only: a text here. */
bool value_int(const Node *n, int64_t *out) {
  if (!whole(n) || !n->plain) return false;
  const char *s = n->text, *digits = s + (*s == '-' || *s == '+');
  int base = 10;
  if (!strncmp(s, "0o", 2) && all_of(s + 2, "01234567")) {
    digits = s + 2;
    base = 8;
  } else if (!strncmp(s, "0x", 2) && all_of(s + 2, "0123456789abcdefABCDEF")) {
    digits = s + 2;
    base = 16;
  } else if (!all_of(digits, "0123456789") || (digits[0] == '0' && digits[1])) {
    return false;
  }
  errno = 0;
  long long v = strtoll(base == 10 ? s : digits, NULL, base);
  *out = v;
  return errno == 0;
}

/* [-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)? */
static bool float_spelling(const char *s) {
  s += *s == '-' || *s == '+';
  size_t before = strspn(s, "0123456789");
  s += before;
  if (*s == '.') {
    s++;
    size_t after = strspn(s, "0123456789");
    s += after;
    if (before + after == 0) return false;
  } else if (before == 0) {
    return false;
  }
  if (*s == 'e' || *s == 'E') {
    s++;
    s += *s == '-' || *s == '+';
    if (!isdigit((unsigned char)*s)) return false;
    s += strspn(s, "0123456789");
  }
  return *s == 0;
}

bool value_float(const Node *n, double *out) {
  int64_t i;
  if (value_int(n, &i)) {
    *out = (double)i;
    return true;
  }
  if (!whole(n) || !n->plain || !float_spelling(n->text) || all_of(n->text, "+-0123456789"))
    return false;
  errno = 0;
  *out = strtod(n->text, NULL);
  return errno == 0 && isfinite(*out); /* neither too large nor too small to be told from 0 */
}

bool value_bool(const Node *n, bool *out) {
  if (!whole(n) || !n->plain) return false;
  *out = !strcmp(n->text, "true");
  return *out || !strcmp(n->text, "false");
}

static bool special_float(const char *s) {
  s += *s == '-' || *s == '+';
  return !strcasecmp(s, ".inf") || !strcasecmp(s, ".nan");
}

/* What the core schema would take for something else than a text. */
static bool resolves(const Node *n) {
  static const char *const words[] = {"true", "True", "TRUE", "false", "False", "FALSE"};
  int64_t i;
  for (size_t k = 0; k < sizeof words / sizeof words[0]; k++)
    if (!strcmp(n->text, words[k])) return true;
  return value_int(n, &i) || float_spelling(n->text) || special_float(n->text) || node_is_null(n);
}

bool value_text(const Node *n) { return whole(n) && (!n->plain || !resolves(n)); }

bool choice_holds(const char *choices, const char *word) {
  RecipeRow row = {.only = choices};
  return *word && row_applies(&row, word);
}

bool bounds_hold(Bounds b, double x) {
  return (b.above_lo ? x > b.lo : x >= b.lo) && (b.below_hi ? x < b.hi : x <= b.hi);
}

void number_text(double x, char *out, size_t size) {
  if (fabs(x) < 1e15 && x == floor(x)) {
    snprintf(out, size, "%.0f", x);
    return;
  }
  for (int digits = 1; digits <= 17; digits++) {
    snprintf(out, size, "%.*g", digits, x);
    if (strtod(out, NULL) == x) return;
  }
}

const char *bounds_text(Pool *pool, Bounds b) {
  char lo[40], hi[40];
  number_text(b.lo, lo, sizeof lo);
  number_text(b.hi, hi, sizeof hi);
  if (b.lo == b.hi) return pool_printf(pool, "%s", lo);
  if (b.above_lo && b.below_hi) return pool_printf(pool, "above %s and below %s", lo, hi);
  if (b.above_lo) return pool_printf(pool, "above %s, at most %s", lo, hi);
  if (b.below_hi) return pool_printf(pool, "from %s, below %s", lo, hi);
  return pool_printf(pool, "from %s to %s", lo, hi);
}

const char *choices_text(Pool *pool, const char *choices) {
  const char *s = "";
  for (const char *p = choices; *p;) {
    size_t len = strcspn(p, "|");
    s = pool_printf(pool, "%s%s%.*s", s, *s ? ", " : "", (int)len, p);
    p += len + (p[len] == '|');
  }
  return s;
}

const char *value_found(Pool *pool, const Node *n) {
  if (n->kind == NODE_LIST) return n->n ? "a list" : "an empty list";
  if (n->kind == NODE_MAP) return "a map";
  if (n->plain && whole(n) && node_is_null(n)) return "null";
  Quoted q = text_quote(n->text, n->len);
  if (!n->plain) return pool_printf(pool, "the text %s", q.s);
  if (n->len < 40 && resolves(n)) return pool_printf(pool, "%s", n->text);
  return pool_printf(pool, "%s", q.s);
}

const char *value_expected(Pool *pool, const RecipeRow *row) {
  switch (row->type) {
    case ROW_INT:
      return pool_printf(pool, row->bounds.lo == row->bounds.hi ? "%s" : "a whole number %s",
                         bounds_text(pool, row->bounds));
    case ROW_FLOAT:
      return pool_printf(pool, "a number %s", bounds_text(pool, row->bounds));
    case ROW_BOOL:
      return "true or false";
    case ROW_CHOICE:
      return pool_printf(pool, "one of %s", choices_text(pool, row->choices));
    case ROW_TEXT:
      return "a text";
    case ROW_PATH:
      return "the name of a file or folder";
    case ROW_WORDS:
      return "a list of texts";
    case ROW_STAGES:
      return pool_printf(pool, "a list of %s", choices_text(pool, row->choices));
  }
  die("row type %d", (int)row->type);
}
