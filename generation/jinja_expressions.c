/* Parser of expressions: Jinja's grammar, from weak to strong: if, or, and, not, comparisons, + -,
 * ~, * / // %, **, signs, then attributes, items, calls, filters and tests. */
#include <string.h>

#include "generation/jinja_ast.h"

/* ---- operators ---- */

static Expr *parse_unary(Parser *p, bool with_filters) {
  bool minus = parse_at(p, T_OPERATOR, "-");
  Expr *e;
  if (minus || parse_at(p, T_OPERATOR, "+")) {
    p->at++;
    if (parse_deeper(p)) return NULL;
    Expr *a = parse_unary(p, false);
    p->depth--;
    if (!a) return NULL;
    e = expr_new(p, E_UNARY, a, NULL);
    e->op = minus ? OP_NEG : OP_POS;
    e = expr_done(p, e);
  } else {
    e = parse_primary(p);
  }
  e = parse_postfix(p, e);
  return with_filters ? parse_filters_and_tests(p, e) : e;
}

/* The binary operators, each level binding stronger than the one before. */
static const struct {
  const char *spelled;
  Op op;
} levels[][4] = {{{"+", OP_ADD}, {"-", OP_SUB}},
                 {{"~", OP_CONCAT}},
                 {{"*", OP_MUL}, {"/", OP_DIV}, {"//", OP_FLOORDIV}, {"%", OP_MOD}},
                 {{"**", OP_POW}}};
enum { LEVELS = sizeof levels / sizeof *levels };

static bool skip_operator(Parser *p, int level, Op *op) {
  for (int i = 0; i < 4 && levels[level][i].spelled; i++) {
    *op = levels[level][i].op;
    if (parse_skip(p, T_OPERATOR, levels[level][i].spelled)) return true;
  }
  return false;
}

static Expr *parse_level(Parser *p, int level) {
  Op op;
  if (level == LEVELS) return parse_unary(p, true);
  Expr *left = parse_level(p, level + 1);
  while (left && skip_operator(p, level, &op)) {
    Expr *e = expr_new(p, E_BINARY, left, parse_level(p, level + 1));
    e->op = op;
    left = e->b ? expr_done(p, e) : NULL;
  }
  return left;
}

static bool skip_comparison(Parser *p, Op *op) {
  static const struct {
    const char *spelled;
    Op op;
  } all[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<=", OP_LE},
             {"<", OP_LT},  {">=", OP_GE}, {">", OP_GT}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    *op = all[i].op;
    if (parse_skip(p, T_OPERATOR, all[i].spelled)) return true;
  }
  *op = OP_IN;
  if (parse_skip(p, T_NAME, "in")) return true;
  *op = OP_NOT_IN;
  bool yes = parse_at(p, T_NAME, "not") && p->at[1].kind == T_NAME && str_is(&p->at[1].text, "in");
  p->at += yes ? 2 : 0;
  return yes;
}

static Expr *parse_comparison(Parser *p) {
  Expr *first = parse_level(p, 0), *e = NULL;
  Op op;
  while (first && skip_comparison(p, &op)) {
    if (!e) {
      e = expr_new(p, E_COMPARE, NULL, NULL);
      list_push(p->slab, &e->list, first);
    }
    Expr *next = parse_level(p, 0);
    if (!next) return NULL;
    Op *ops = slab_take(p->slab, (size_t)e->list.n * sizeof *ops);
    if (e->list.n > 1) memcpy(ops, e->ops, (size_t)(e->list.n - 1) * sizeof *ops);
    ops[e->list.n - 1] = op;
    e->ops = ops;
    list_push(p->slab, &e->list, next);
  }
  return e ? expr_done(p, e) : first;
}

static Expr *parse_not(Parser *p) {
  if (!parse_skip(p, T_NAME, "not")) return parse_comparison(p);
  if (parse_deeper(p)) return NULL;
  Expr *a = parse_not(p);
  p->depth--;
  return a ? expr_done(p, expr_new(p, E_NOT, a, NULL)) : NULL;
}

static Expr *parse_and(Parser *p) {
  Expr *left = parse_not(p);
  while (left && parse_skip(p, T_NAME, "and")) {
    Expr *right = parse_not(p);
    left = right ? expr_done(p, expr_new(p, E_AND, left, right)) : NULL;
  }
  return left;
}

static Expr *parse_or(Parser *p) {
  Expr *left = parse_and(p);
  while (left && parse_skip(p, T_NAME, "or")) {
    Expr *right = parse_and(p);
    left = right ? expr_done(p, expr_new(p, E_OR, left, right)) : NULL;
  }
  return left;
}

Expr *parse_expression(Parser *p, bool with_if) {
  Expr *e = parse_or(p);
  while (with_if && e && parse_skip(p, T_NAME, "if")) {
    Expr *choice = expr_new(p, E_IF, e, parse_or(p));
    if (!choice->b) return NULL;
    if (parse_skip(p, T_NAME, "else")) {
      if (parse_deeper(p)) return NULL;
      choice->c = parse_expression(p, true);
      p->depth--;
      if (!choice->c) return NULL;
    }
    e = expr_done(p, choice);
  }
  return e;
}

static bool tuple_ends(const Parser *p, const char *end) {
  return parse_at(p, T_PRINT_END, NULL) || parse_at(p, T_TAG_END, NULL) ||
         parse_at(p, T_OPERATOR, ")") || (end && parse_at(p, T_NAME, end));
}

/* One item, or a tuple of them. */
static Expr *parse_commas(Parser *p, Expr *(*item)(Parser *p, bool flag), bool flag,
                          const char *end) {
  Expr *first = item(p, flag), *e = NULL;
  while (first && parse_skip(p, T_OPERATOR, ",")) {
    if (!e) {
      e = expr_new(p, E_TUPLE, NULL, NULL);
      list_push(p->slab, &e->list, first);
    }
    if (tuple_ends(p, end)) break;
    Expr *next = item(p, flag);
    if (!next) return NULL;
    list_push(p->slab, &e->list, next);
  }
  return e ? expr_done(p, e) : first;
}

Expr *parse_tuple(Parser *p, bool with_if, const char *end) {
  return parse_commas(p, parse_expression, with_if, end);
}

/* ---- targets ---- */

static Expr *parse_one_target(Parser *p, bool spaces) {
  if (parse_skip(p, T_OPERATOR, "(")) {
    if (parse_deeper(p)) return NULL;
    Expr *e = parse_target(p, spaces, NULL);
    p->depth--;
    return !e || parse_expect(p, T_OPERATOR, ")") ? NULL : e;
  }
  if (!parse_at(p, T_NAME, NULL)) {
    char found[80];
    parse_fail(p, "found %s; expected a name to assign to", token_name(p->at, found));
    return NULL;
  }
  Expr *e = parse_word(p);
  if (e && e->kind != E_NAME) {
    parse_fail(p, "cannot assign to \"%s\"", e->name);
    return NULL;
  }
  if (!e || !spaces || !parse_skip(p, T_OPERATOR, ".")) return e;
  if (parse_at(p, T_NAME, NULL)) return parse_attribute(p, e);
  parse_expect(p, T_NAME, NULL);
  return NULL;
}

Expr *parse_target(Parser *p, bool spaces, const char *end) {
  return parse_commas(p, parse_one_target, spaces, end);
}
