/* Operators, items, attributes and slices, as Python and Jinja have them. Whole numbers have 64
 * bits; beyond is an error. */
#include <math.h>
#include <string.h>

#include "generation/jinja_value.h"

static const char *const spelled[] = {"+",  "-",  "*",  "/",      "//",      "%",
                                      "**", "~",  "==", "!=",     "<",       "<=",
                                      ">",  ">=", "in", "not in", "unary -", "unary +"};

/* -1, naming what is undefined. */
static int undefined_used(Render *r, const Value *v) {
  return render_fail(r, "\"%s\" is undefined", v->name);
}

static int wrong_kinds(Render *r, Op op, const Value *a, const Value *b) {
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  if (b->kind == V_UNDEFINED) return undefined_used(r, b);
  return render_fail(r, "%s between %s and %s is not supported", spelled[op], value_kind_name(a),
                     value_kind_name(b));
}

/* ---- arithmetic ---- */

static int64_t whole(const Value *v) { return v->kind == V_BOOL ? v->b : v->i; }
static double real(const Value *v) { return v->kind == V_FLOAT ? v->f : (double)whole(v); }

static int too_large(Render *r, Op op) {
  return render_fail(r, "%s: the result does not fit into 64 bits", spelled[op]);
}

static int power(Render *r, int64_t a, int64_t b, Value *out) {
  int64_t product = 1;
  if (b < 0 && a == 0) return render_fail(r, "**: 0 to a negative power");
  if (b < 0) {
    *out = value_of_float(pow((double)a, (double)b));
    return 0;
  }
  if (a == 0 || a == 1 || a == -1) b = b == 0 ? 0 : 2 - b % 2;
  for (int64_t i = 0; i < b; i++)
    if (__builtin_mul_overflow(product, a, &product)) return too_large(r, OP_POW);
  *out = value_of_int(product);
  return 0;
}

/* Rounds towards minus infinity; the remainder has the sign of b. */
static int divide(Render *r, Op op, int64_t a, int64_t b, Value *out) {
  if (b == -1) { /* the one division that can overflow */
    if (op == OP_FLOORDIV && a == INT64_MIN) return too_large(r, op);
    *out = value_of_int(op == OP_MOD ? 0 : -a);
    return 0;
  }
  int64_t quotient = a / b, rest = a % b;
  if (rest != 0 && (rest < 0) != (b < 0)) {
    quotient--;
    rest += b;
  }
  *out = value_of_int(op == OP_MOD ? rest : quotient);
  return 0;
}

static int of_whole(Render *r, Op op, int64_t a, int64_t b, Value *out) {
  int64_t x = 0;
  bool over = false;
  if (op == OP_POW) return power(r, a, b, out);
  if (op == OP_MOD || op == OP_FLOORDIV) return divide(r, op, a, b, out);
  if (op == OP_ADD) over = __builtin_add_overflow(a, b, &x);
  if (op == OP_SUB) over = __builtin_sub_overflow(a, b, &x);
  if (op == OP_MUL) over = __builtin_mul_overflow(a, b, &x);
  if (over) return too_large(r, op);
  *out = value_of_int(x);
  return 0;
}

/* The remainder has the sign of b. */
static double modulo(double a, double b) {
  double rest = fmod(a, b);
  if (rest != 0) return (rest < 0) != (b < 0) ? rest + b : rest;
  return copysign(0.0, b);
}

static double floor_divide(double a, double b) {
  double rest = fmod(a, b), quotient = (a - rest) / b;
  if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
  if (quotient == 0) return copysign(0.0, a / b);
  double floored = floor(quotient);
  return quotient - floored > 0.5 ? floored + 1 : floored;
}

static int of_real(Render *r, Op op, double a, double b, Value *out) {
  double x = 0;
  if (op == OP_ADD) x = a + b;
  if (op == OP_SUB) x = a - b;
  if (op == OP_MUL) x = a * b;
  if (op == OP_DIV) x = a / b;
  if (op == OP_MOD) x = modulo(a, b);
  if (op == OP_FLOORDIV) x = floor_divide(a, b);
  if (op == OP_POW) {
    x = pow(a, b);
    if (!isfinite(x) && isfinite(a) && isfinite(b)) return render_fail(r, "**: no finite result");
  }
  *out = value_of_float(x);
  return 0;
}

static int of_numbers(Render *r, Op op, const Value *a, const Value *b, Value *out) {
  bool divides = op == OP_DIV || op == OP_MOD || op == OP_FLOORDIV;
  if (divides && real(b) == 0) return render_fail(r, "division by zero");
  if (op == OP_DIV || a->kind == V_FLOAT || b->kind == V_FLOAT)
    return of_real(r, op, real(a), real(b), out);
  return of_whole(r, op, whole(a), whole(b), out);
}

/* ---- strings and lists ---- */

static int join_lists(Render *r, const List *a, const List *b, Value *out) {
  List *l = list_new(r, a->kind, (int64_t)a->n + b->n);
  if (!l) return -1;
  memcpy(l->v, a->v, (size_t)a->n * sizeof *a->v);
  memcpy(l->v + a->n, b->v, (size_t)b->n * sizeof *b->v);
  *out = value_of_list(l);
  return 0;
}

static int repeat_str(Render *r, const Str *s, int64_t times, Value *out) {
  StrBuf b = {0};
  for (int64_t i = 0; i < times && s->len > 0; i++)
    if (buf_put(r, &b, s)) return -1;
  *out = value_of_str(buf_str(&b));
  return 0;
}

static int repeat_list(Render *r, const List *l, int64_t times, Value *out) {
  int64_t n = 0;
  if (times < 0) times = 0;
  if (__builtin_mul_overflow(times, (int64_t)l->n, &n)) n = INT64_MAX;
  List *all = list_new(r, l->kind, n);
  if (!all) return -1;
  for (int64_t i = 0; i < n; i++) all->v[i] = l->v[i % l->n];
  *out = value_of_list(all);
  return 0;
}

static bool is_whole(const Value *v) { return v->kind == V_INT || v->kind == V_BOOL; }
static bool is_plain_list(const Value *v) {
  return v->kind == V_LIST && v->list->kind <= LIST_TUPLE;
}

static int concat(Render *r, const Value *a, const Value *b, Value *out) {
  Str x, y;
  if (value_print(r, a, &x) || value_print(r, b, &y)) return -1;
  return str_join(r, &x, &y, out);
}

int value_binary(Render *r, Op op, const Value *a, const Value *b, Value *out) {
  bool yes;
  if (op == OP_CONCAT) return concat(r, a, b, out);
  if (op >= OP_EQ) {
    if (value_compare(r, op, a, b, &yes)) return -1;
    *out = value_of_bool(yes);
    return 0;
  }
  if (value_is_number(a) && value_is_number(b)) return of_numbers(r, op, a, b, out);
  if (op == OP_ADD && a->kind == V_STR && b->kind == V_STR) return str_join(r, &a->s, &b->s, out);
  if (op == OP_ADD && is_plain_list(a) && is_plain_list(b) && a->list->kind == b->list->kind)
    return join_lists(r, a->list, b->list, out);
  if (op == OP_MUL && is_whole(b) && a->kind == V_STR) return repeat_str(r, &a->s, whole(b), out);
  if (op == OP_MUL && is_whole(a) && b->kind == V_STR) return repeat_str(r, &b->s, whole(a), out);
  if (op == OP_MUL && is_whole(b) && is_plain_list(a))
    return repeat_list(r, a->list, whole(b), out);
  if (op == OP_MUL && is_whole(a) && is_plain_list(b))
    return repeat_list(r, b->list, whole(a), out);
  return wrong_kinds(r, op, a, b);
}

int value_unary(Render *r, Op op, const Value *a, Value *out) {
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  if (!value_is_number(a))
    return render_fail(r, "%s of %s is not supported", spelled[op], value_kind_name(a));
  *out = a->kind == V_FLOAT ? *a : value_of_int(whole(a));
  if (op == OP_POS) return 0;
  if (out->kind == V_INT && out->i == INT64_MIN) return too_large(r, op);
  if (out->kind == V_FLOAT)
    out->f = -out->f;
  else
    out->i = -out->i;
  return 0;
}

/* ---- comparisons ---- */

static int compare_str(const Str *a, const Str *b) {
  size_t n = a->len < b->len ? a->len : b->len;
  int order = n ? memcmp(a->text, b->text, n) : 0;
  return order ? order : (a->len > b->len) - (a->len < b->len);
}

static int compare_order(Render *r, Op op, const Value *a, const Value *b, bool *out) {
  bool less, equal;
  if (value_is_number(a) && value_is_number(b)) {
    bool reals = a->kind == V_FLOAT || b->kind == V_FLOAT;
    less = reals ? real(a) < real(b) : whole(a) < whole(b);
    equal = value_equal(r, a, b);
    if (reals && (isnan(real(a)) || isnan(real(b)))) {
      *out = false;
      return 0;
    }
  } else if (a->kind == V_STR && b->kind == V_STR) {
    int order = compare_str(&a->s, &b->s);
    less = order < 0;
    equal = order == 0;
  } else {
    return wrong_kinds(r, op, a, b);
  }
  *out = op == OP_LT ? less : op == OP_LE ? less || equal : op == OP_GT ? !less && !equal : !less;
  return 0;
}

static int contains(Render *r, const Value *item, const Value *all, bool *out) {
  List *l;
  if (all->kind == V_STR) {
    if (item->kind != V_STR) return wrong_kinds(r, OP_IN, item, all);
    *out = str_find(&all->s, &item->s, 0) <= all->s.len;
    return render_work(r, all->s.len / 16);
  }
  if (all->kind == V_DICT) {
    *out = dict_find(r, all->dict, item) != NULL;
    return 0;
  }
  if (all->kind != V_LIST && all->kind != V_UNDEFINED) return wrong_kinds(r, OP_IN, item, all);
  if (value_walk(r, all, &l)) return -1;
  *out = false;
  for (int i = 0; i < l->n && !*out; i++) *out = value_equal(r, item, &l->v[i]);
  return 0;
}

int value_compare(Render *r, Op op, const Value *a, const Value *b, bool *out) {
  switch (op) {
    case OP_EQ:
    case OP_NE:
      *out = value_equal(r, a, b) == (op == OP_EQ);
      return 0;
    case OP_IN:
    case OP_NOT_IN:
      if (contains(r, a, b, out)) return -1;
      *out = *out == (op == OP_IN);
      return 0;
    default:
      return compare_order(r, op, a, b, out);
  }
}

/* ---- items and attributes ---- */

/* Byte where character i begins. */
static size_t char_at(const Str *s, int64_t i) {
  size_t at = 0;
  for (; i > 0; i--) at += utf8_step(s->text + at, s->len - at);
  return at;
}

static Value str_item(const Str *s, int64_t i) {
  int64_t n = (int64_t)str_count(s);
  if (i < 0) i += n;
  if (i < 0 || i >= n) return value_undefined("a character beyond the end");
  size_t at = char_at(s, i);
  return value_of_str(str_cut(s, at, utf8_step(s->text + at, s->len - at)));
}

static Value list_item(const List *l, int64_t i) {
  if (i < 0) i += l->n;
  bool there = i >= 0 && i < l->n && l->kind <= LIST_RANGE;
  return there ? l->v[i] : value_undefined("an item beyond the end");
}

/* A name that stays, for messages. */
static const char *kept_name(Render *r, const Str *s) {
  size_t n = s->len < 80 ? s->len : 80;
  char *copy = slab_take(&r->slab, n + 1);
  if (n) memcpy(copy, s->text, n);
  copy[n] = 0;
  return copy;
}

int value_item(Render *r, const Value *a, const Value *key, Value *out) {
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  if (a->kind == V_DICT) {
    const Value *found = dict_find(r, a->dict, key);
    if (found) {
      *out = *found;
      return 0;
    }
  }
  if (a->kind == V_STR && is_whole(key)) {
    *out = str_item(&a->s, whole(key));
    return render_work(r, a->s.len / 16);
  }
  if (a->kind == V_LIST && is_whole(key)) {
    *out = list_item(a->list, whole(key));
    return 0;
  }
  if (key->kind == V_STR) return value_attribute(r, a, kept_name(r, &key->s), out);
  *out = value_undefined("an item");
  return 0;
}

static Value loop_neighbour(const Loop *l, int i) {
  return i >= 0 && i < l->length ? l->list->v[i] : value_undefined("the loop's neighbour");
}

static Value loop_attribute(const Loop *l, const char *name) {
  const struct {
    const char *name;
    int value;
  } counts[] = {{"index", l->index0 + 1},
                {"index0", l->index0},
                {"revindex", l->length - l->index0},
                {"revindex0", l->length - l->index0 - 1},
                {"length", l->length},
                {"depth", l->depth},
                {"depth0", l->depth - 1}};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    if (strcmp(name, counts[i].name) == 0) return value_of_int(counts[i].value);
  if (strcmp(name, "first") == 0) return value_of_bool(l->index0 == 0);
  if (strcmp(name, "last") == 0) return value_of_bool(l->index0 == l->length - 1);
  if (strcmp(name, "previtem") == 0) return loop_neighbour(l, l->index0 - 1);
  if (strcmp(name, "nextitem") == 0) return loop_neighbour(l, l->index0 + 1);
  return value_undefined(name);
}

int value_attribute(Render *r, const Value *a, const char *name, Value *out) {
  const Builtin *row;
  const Value *found = NULL;
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  *out = value_undefined(name);
  if (name[0] == '_') return 0; /* the sandbox of transformers */
  if (a->kind == V_LOOP) {
    *out = loop_attribute(a->loop, name);
  } else if ((row = method_find(a, name))) {
    Method *m = slab_take(&r->slab, sizeof *m);
    *m = (Method){row, *a};
    *out = (Value){.kind = V_BUILTIN, .method = m};
  } else if (a->kind == V_DICT || a->kind == V_SPACE) {
    found = dict_get(a->dict, name);
  }
  if (found) *out = *found;
  return 0;
}

/* ---- slices ---- */

/* Where a[from:to:step] over n items begins and how many it takes: Python's rules. */
static int64_t slice_plan(int64_t n, const int64_t *from, const int64_t *to, int64_t step,
                          int64_t *first) {
  int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n, a = step < 0 ? high : low,
          b = step < 0 ? low : high;
  if (from) {
    a = *from < 0 ? *from + n : *from;
    a = a < low ? low : a > high ? high : a;
  }
  if (to) {
    b = *to < 0 ? *to + n : *to;
    b = b < low ? low : b > high ? high : b;
  }
  *first = a;
  if (step > 0) return b > a ? (b - a - 1) / step + 1 : 0;
  return a > b ? (a - b - 1) / -step + 1 : 0;
}

static int slice_bound(Render *r, const Value *v, int64_t *i, bool *given) {
  *given = v->kind != V_ABSENT && v->kind != V_NONE;
  if (!*given) return 0;
  if (v->kind == V_UNDEFINED) return undefined_used(r, v);
  if (!is_whole(v)) return render_fail(r, "a slice by %s is not supported", value_kind_name(v));
  *i = whole(v);
  /* As far as any list goes; keeps sums within 64 bits. */
  const int64_t most = (int64_t)1 << 40;
  *i = *i > most ? most : *i < -most ? -most : *i;
  return 0;
}

static int slice_str(Render *r, const Str *s, int64_t first, int64_t n, int64_t step, Value *out) {
  Value all = value_of_str(*s);
  List *chars;
  StrBuf b = {0};
  if (step == 1) {
    size_t from = n ? char_at(s, first) : 0;
    Str rest = str_cut(s, from, s->len - from);
    *out = value_of_str(str_cut(&rest, 0, char_at(&rest, n)));
    return render_work(r, s->len / 16);
  }
  if (value_walk(r, &all, &chars)) return -1;
  for (int64_t i = 0; i < n; i++)
    if (buf_put(r, &b, &chars->v[first + i * step].s)) return -1;
  *out = value_of_str(buf_str(&b));
  out->s.markup = s->markup;
  return 0;
}

int value_slice(Render *r, const Value *a, const Value bounds[3], Value *out) {
  int64_t at[3] = {0, 0, 1}, first;
  bool given[3];
  for (int i = 0; i < 3; i++)
    if (slice_bound(r, &bounds[i], &at[i], &given[i])) return -1;
  if (at[2] == 0) return render_fail(r, "a slice with step 0");
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  bool list = a->kind == V_LIST && a->list->kind <= LIST_RANGE;
  if (!list && a->kind != V_STR) {
    *out = value_undefined("a slice");
    return 0;
  }
  int64_t all = list ? a->list->n : (int64_t)str_count(&a->s);
  int64_t n = slice_plan(all, given[0] ? &at[0] : NULL, given[1] ? &at[1] : NULL, at[2], &first);
  if (!list) return slice_str(r, &a->s, first, n, at[2], out);
  List *l = list_new(r, a->list->kind, n);
  if (!l) return -1;
  for (int64_t i = 0; i < n; i++) l->v[i] = a->list->v[first + i * at[2]];
  *out = value_of_list(l);
  return 0;
}
