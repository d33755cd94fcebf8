/* Operators, as Python and Jinja have them. Whole numbers have 64 bits; beyond is an error. */
#include <math.h>
#include <string.h>

#include "generation/jinja_value.h"

static const char *const spelled[] = {"+",  "-",  "*",  "/",      "//",      "%",
                                      "**", "~",  "==", "!=",     "<",       "<=",
                                      ">",  ">=", "in", "not in", "unary -", "unary +"};

int undefined_used(Render *r, const Value *v) {
  return render_fail(r, "\"%s\" is undefined", v->name);
}

static int wrong_kinds(Render *r, Op op, const Value *a, const Value *b) {
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  if (b->kind == V_UNDEFINED) return undefined_used(r, b);
  return render_fail(r, "%s between %s and %s is not supported", spelled[op], value_kind_name(a),
                     value_kind_name(b));
}

/* ---- arithmetic ---- */

int64_t value_whole(const Value *v) { return v->kind == V_BOOL ? v->b : v->i; }
static double real(const Value *v) { return v->kind == V_FLOAT ? v->f : (double)value_whole(v); }

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
  return of_whole(r, op, value_whole(a), value_whole(b), out);
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

bool value_is_whole(const Value *v) { return v->kind == V_INT || v->kind == V_BOOL; }
static bool is_plain_list(const Value *v) {
  return v->kind == V_LIST && v->list->kind <= LIST_TUPLE;
}

static int concat(Render *r, const Value *a, const Value *b, Value *out) {
  Str x = {0}, y = {0};
  if (value_print(r, a, &x) || value_print(r, b, &y)) return -1;
  x.markup = y.markup = false; /* the one way of joining that never escapes */
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
  if (op == OP_MUL && value_is_whole(b) && a->kind == V_STR)
    return repeat_str(r, &a->s, value_whole(b), out);
  if (op == OP_MUL && value_is_whole(a) && b->kind == V_STR)
    return repeat_str(r, &b->s, value_whole(a), out);
  if (op == OP_MUL && value_is_whole(b) && is_plain_list(a))
    return repeat_list(r, a->list, value_whole(b), out);
  if (op == OP_MUL && value_is_whole(a) && is_plain_list(b))
    return repeat_list(r, b->list, value_whole(a), out);
  return wrong_kinds(r, op, a, b);
}

int value_unary(Render *r, Op op, const Value *a, Value *out) {
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  if (!value_is_number(a))
    return render_fail(r, "%s of %s is not supported", spelled[op], value_kind_name(a));
  *out = a->kind == V_FLOAT ? *a : value_of_int(value_whole(a));
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
    less = reals ? real(a) < real(b) : value_whole(a) < value_whole(b);
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
    if (item->kind >= V_LIST) return wrong_kinds(r, OP_IN, item, all);
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
  *out = false;
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
