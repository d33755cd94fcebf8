/* Parser of expressions: Jinja's grammar, from weak to strong: if, or, and, not, comparisons, + -,
 * ~, * / // %, **, signs, then attributes, items, calls, filters and tests. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "generation/jinja_ast.h"

/* ---- tokens ---- */

int parse_fail(Parser *p, const char *fmt, ...) {
  char msg[512];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(msg, sizeof msg, fmt, ap);
  va_end(ap);
  return error_set(p->err, "%s: line %d: %s", p->name, p->at->line, msg);
}

const char *token_name(const Token *t, char out[80]) {
  static const char *const names[] = {[T_END] = "the end of the template",
                                      [T_DATA] = "text",
                                      [T_PRINT_BEGIN] = "{{",
                                      [T_PRINT_END] = "}}",
                                      [T_TAG_BEGIN] = "{%",
                                      [T_TAG_END] = "%}",
                                      [T_STR] = "a string",
                                      [T_NUMBER] = "a number"};
  int n = t->text.len < 60 ? (int)t->text.len : 60;
  if (t->kind == T_NAME || t->kind == T_OPERATOR)
    snprintf(out, 80, "\"%.*s\"", n, t->text.text);
  else
    snprintf(out, 80, "%s", names[t->kind]);
  return out;
}

bool parse_at(const Parser *p, TokenKind kind, const char *text) {
  return p->at->kind == kind && (!text || str_is(&p->at->text, text));
}

bool parse_skip(Parser *p, TokenKind kind, const char *text) {
  bool yes = parse_at(p, kind, text);
  p->at += yes && kind != T_END;
  return yes;
}

int parse_expect(Parser *p, TokenKind kind, const char *text) {
  char found[80];
  if (parse_skip(p, kind, text)) return 0;
  if (!text) text = kind == T_TAG_END ? "%}" : kind == T_PRINT_END ? "}}" : "a name";
  return parse_fail(p, "found %s; expected %s", token_name(p->at, found), text);
}

static const char *keep_name(Parser *p, const Str *s) {
  char *copy = slab_take(p->slab, s->len + 1);
  memcpy(copy, s->text, s->len);
  copy[s->len] = 0;
  return copy;
}

const char *parse_name(Parser *p) {
  const Token *t = p->at;
  return parse_expect(p, T_NAME, NULL) ? NULL : keep_name(p, &t->text);
}

int parse_deeper(Parser *p) {
  return p->depth++ < PARSE_DEPTH ? 0 : parse_fail(p, "nested too deeply");
}

/* ---- nodes ---- */

void list_push(Slab *s, ExprList *l, Expr *e) {
  if (l->n == l->cap) {
    l->cap = l->cap ? 2 * l->cap : 4;
    Expr **v = slab_take(s, (size_t)l->cap * sizeof(Expr *));
    if (l->n) memcpy((void *)v, (void *)l->v, (size_t)l->n * sizeof(Expr *));
    l->v = v;
  }
  l->v[l->n++] = e;
}

static Expr *expr_new(Parser *p, ExprKind kind, Expr *a, Expr *b) {
  Expr *e = slab_take(p->slab, sizeof *e);
  *e = (Expr){.kind = kind, .line = p->at->line, .height = 1, .a = a, .b = b};
  return e;
}

static void raise_to(Expr *e, const Expr *child) {
  if (child && e->height <= child->height) e->height = child->height + 1;
}

/* Knows how high the tree is, so that walking it cannot use up the stack. */
static Expr *expr_done(Parser *p, Expr *e) {
  const Expr *const parts[] = {e->a, e->b, e->c, e->d};
  for (int i = 0; i < 4; i++) raise_to(e, parts[i]);
  for (int i = 0; i < e->list.n; i++) raise_to(e, e->list.v[i]);
  for (int i = 0; i < e->args.n; i++) raise_to(e, e->args.v[i].value);
  if (e->height <= PARSE_HEIGHT) return e;
  parse_fail(p, "an expression is too long or nested too deeply");
  return NULL;
}

/* ---- arguments, filters, tests ---- */

static void arg_push(Parser *p, ArgList *l, Arg arg) {
  if (l->n == l->cap) {
    l->cap = l->cap ? 2 * l->cap : 4;
    Arg *v = slab_take(p->slab, (size_t)l->cap * sizeof *v);
    if (l->n) memcpy(v, l->v, (size_t)l->n * sizeof *v);
    l->v = v;
  }
  l->v[l->n++] = arg;
}

static int parse_arg(Parser *p, ArgList *l) {
  Arg arg = {0};
  if (parse_at(p, T_OPERATOR, "*") || parse_at(p, T_OPERATOR, "**"))
    return parse_fail(p, "arguments from a list (*, **) are not supported");
  if (parse_at(p, T_NAME, NULL) && p->at[1].kind == T_OPERATOR && str_is(&p->at[1].text, "=")) {
    arg.name = parse_name(p);
    p->at++;
  } else if (l->n && l->v[l->n - 1].name) {
    return parse_fail(p, "an argument without a name behind one with a name");
  }
  arg.value = parse_expression(p, true);
  if (!arg.value) return -1;
  arg_push(p, l, arg);
  return 0;
}

/* ( a, b, name=c ) */
static int parse_args(Parser *p, ArgList *l) {
  if (parse_expect(p, T_OPERATOR, "(")) return -1;
  while (!parse_at(p, T_OPERATOR, ")")) {
    if (l->n && parse_expect(p, T_OPERATOR, ",")) return -1;
    if (parse_at(p, T_OPERATOR, ")")) break;
    if (parse_arg(p, l)) return -1;
  }
  p->at++;
  return 0;
}

Expr *parse_filters(Parser *p, Expr *subject, bool first) {
  while (first || parse_skip(p, T_OPERATOR, "|")) {
    Expr *e = expr_new(p, E_FILTER, subject, NULL);
    first = false;
    if (!(e->name = parse_name(p))) return NULL;
    if (parse_at(p, T_OPERATOR, "(") && parse_args(p, &e->args)) return NULL;
    subject = expr_done(p, e);
    if (!subject) return NULL;
  }
  return subject;
}

static Expr *parse_primary(Parser *p);
static Expr *parse_postfix(Parser *p, Expr *e);

static bool opens_test_argument(const Parser *p) {
  static const char *const brackets[] = {"(", "[", "{"};
  TokenKind kind = p->at->kind;
  for (int i = 0; i < 3; i++)
    if (parse_at(p, T_OPERATOR, brackets[i])) return true;
  if (kind != T_NAME) return kind == T_STR || kind == T_NUMBER;
  return !parse_at(p, T_NAME, "else") && !parse_at(p, T_NAME, "or") && !parse_at(p, T_NAME, "and");
}

/* Behind "is". */
static Expr *parse_test(Parser *p, Expr *subject) {
  bool negated = parse_skip(p, T_NAME, "not");
  Expr *e = expr_new(p, E_TEST, subject, NULL);
  if (!(e->name = parse_name(p))) return NULL;
  if (parse_at(p, T_OPERATOR, "(")) {
    if (parse_args(p, &e->args)) return NULL;
  } else if (opens_test_argument(p)) {
    if (parse_at(p, T_NAME, "is")) {
      parse_fail(p, "tests cannot be chained");
      return NULL;
    }
    Expr *arg = parse_primary(p);
    if (arg) arg = parse_postfix(p, arg);
    if (!arg) return NULL;
    arg_push(p, &e->args, (Arg){NULL, arg});
  }
  e = expr_done(p, e);
  return e && negated ? expr_done(p, expr_new(p, E_NOT, e, NULL)) : e;
}

/* ---- attributes, items, calls ---- */

static bool at_slice_end(const Parser *p) {
  return parse_at(p, T_OPERATOR, ":") || parse_at(p, T_OPERATOR, "]");
}

/* Behind "[". */
static Expr *parse_item(Parser *p, Expr *a) {
  Expr *e = expr_new(p, E_ITEM, a, NULL);
  Expr **const parts[] = {&e->b, &e->c, &e->d};
  int n = 0;
  do {
    if (n) e->kind = E_SLICE;
    if (n == 3) {
      parse_fail(p, "a slice has more than three parts");
      return NULL;
    }
    if (!at_slice_end(p) && !(*parts[n] = parse_expression(p, true))) return NULL;
    n++;
  } while (parse_skip(p, T_OPERATOR, ":"));
  if (parse_expect(p, T_OPERATOR, "]")) return NULL;
  if (e->kind == E_ITEM && !e->b) {
    parse_fail(p, "found []; expected an index");
    return NULL;
  }
  return expr_done(p, e);
}

/* Behind ".". */
static Expr *parse_attribute(Parser *p, Expr *a) {
  if (parse_at(p, T_NUMBER, NULL) && p->at->value.kind == V_INT) {
    Expr *index = expr_new(p, E_CONST, NULL, NULL);
    index->value = p->at++->value;
    return expr_done(p, expr_new(p, E_ITEM, a, index));
  }
  Expr *e = expr_new(p, E_ATTRIBUTE, a, NULL);
  e->name = parse_name(p);
  return e->name ? expr_done(p, e) : NULL;
}

static Expr *parse_call(Parser *p, Expr *a) {
  Expr *e = expr_new(p, E_CALL, a, NULL);
  return parse_args(p, &e->args) ? NULL : expr_done(p, e);
}

static Expr *parse_postfix(Parser *p, Expr *e) {
  while (e) {
    if (parse_skip(p, T_OPERATOR, "."))
      e = parse_attribute(p, e);
    else if (parse_skip(p, T_OPERATOR, "["))
      e = parse_item(p, e);
    else if (parse_at(p, T_OPERATOR, "("))
      e = parse_call(p, e);
    else
      break;
  }
  return e;
}

static Expr *parse_filters_and_tests(Parser *p, Expr *e) {
  while (e) {
    if (parse_at(p, T_OPERATOR, "|"))
      e = parse_filters(p, e, false);
    else if (parse_skip(p, T_NAME, "is"))
      e = parse_test(p, e);
    else if (parse_at(p, T_OPERATOR, "("))
      e = parse_call(p, e);
    else
      break;
  }
  return e;
}

/* ---- what stands alone ---- */

/* Behind the opening bracket, up to the closing one. */
static Expr *parse_items(Parser *p, ExprKind kind, const char *close) {
  Expr *e = expr_new(p, kind, NULL, NULL), *item;
  while (!parse_at(p, T_OPERATOR, close)) {
    if (e->list.n && parse_expect(p, T_OPERATOR, ",")) return NULL;
    if (parse_at(p, T_OPERATOR, close)) break;
    if (!(item = parse_expression(p, true))) return NULL;
    list_push(p->slab, &e->list, item);
    if (kind != E_DICT) continue;
    if (parse_expect(p, T_OPERATOR, ":") || !(item = parse_expression(p, true))) return NULL;
    list_push(p->slab, &e->list, item);
  }
  p->at++;
  return expr_done(p, e);
}

static Expr *parse_parentheses(Parser *p) {
  if (parse_skip(p, T_OPERATOR, ")")) return expr_new(p, E_TUPLE, NULL, NULL);
  Expr *e = parse_tuple(p, true, NULL);
  return !e || parse_expect(p, T_OPERATOR, ")") ? NULL : e;
}

/* Strings beside each other are one. */
static Value parse_strings(Parser *p) {
  size_t len = 0;
  int n = 0;
  for (; p->at[n].kind == T_STR; n++) len += p->at[n].text.len;
  char *text = slab_take(p->slab, len), *end = text;
  for (; n > 0; n--, p->at++) {
    memcpy(end, p->at->text.text, p->at->text.len);
    end += p->at->text.len;
  }
  return value_of_str((Str){.text = text, .len = len});
}

static Expr *parse_word(Parser *p) {
  static const struct {
    const char *word;
    Value value;
  } words[] = {{"true", {.kind = V_BOOL, .b = true}},
               {"True", {.kind = V_BOOL, .b = true}},
               {"false", {.kind = V_BOOL, .b = false}},
               {"False", {.kind = V_BOOL, .b = false}},
               {"none", {.kind = V_NONE}},
               {"None", {.kind = V_NONE}}};
  Expr *e = expr_new(p, E_NAME, NULL, NULL);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if (!str_is(&p->at->text, words[i].word)) continue;
    e->kind = E_CONST;
    e->value = words[i].value;
  }
  e->name = parse_name(p);
  return e;
}

static Expr *parse_primary(Parser *p) {
  char found[80];
  Expr *e = NULL;
  if (parse_deeper(p)) return NULL;
  if (parse_at(p, T_NAME, NULL)) {
    e = parse_word(p);
  } else if (parse_at(p, T_STR, NULL) || parse_at(p, T_NUMBER, NULL)) {
    e = expr_new(p, E_CONST, NULL, NULL);
    e->value = p->at->kind == T_STR ? parse_strings(p) : p->at++->value;
  } else if (parse_skip(p, T_OPERATOR, "(")) {
    e = parse_parentheses(p);
  } else if (parse_skip(p, T_OPERATOR, "[")) {
    e = parse_items(p, E_LIST, "]");
  } else if (parse_skip(p, T_OPERATOR, "{")) {
    e = parse_items(p, E_DICT, "}");
  } else {
    parse_fail(p, "found %s; expected an expression", token_name(p->at, found));
  }
  p->depth--;
  return e;
}

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
  if (e->kind != E_NAME) {
    parse_fail(p, "cannot assign to \"%s\"", e->name);
    return NULL;
  }
  if (!spaces || !parse_skip(p, T_OPERATOR, ".")) return e;
  if (parse_at(p, T_NAME, NULL)) return parse_attribute(p, e);
  parse_expect(p, T_NAME, NULL);
  return NULL;
}

Expr *parse_target(Parser *p, bool spaces, const char *end) {
  return parse_commas(p, parse_one_target, spaces, end);
}
