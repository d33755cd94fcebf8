/* Parser of what stands between operators: names, literals and brackets, with the attributes,
 * items, calls, filters and tests behind them. */
#include <string.h>

#include "generation/jinja_ast.h"

/* ---- arguments, filters, tests ---- */

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

Expr *parse_attribute(Parser *p, Expr *a) {
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

Expr *parse_postfix(Parser *p, Expr *e) {
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

Expr *parse_filters_and_tests(Parser *p, Expr *e) {
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

Expr *parse_word(Parser *p) {
  static const struct {
    const char *word;
    Value value;
  } words[] = {{"true", {.kind = V_BOOL, .b = true}},
               {"True", {.kind = V_BOOL, .b = true}},
               {"false", {.kind = V_BOOL, .b = false}},
               {"False", {.kind = V_BOOL, .b = false}},
               {"none", {.kind = V_NONE}},
               {"None", {.kind = V_NONE}}};
  static const char *const refused[] = {"varargs", "kwargs", "self", "super"};
  Expr *e = expr_new(p, E_NAME, NULL, NULL);
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    if (str_is(&p->at->text, refused[i])) {
      parse_fail(p, "the name %s is not supported", refused[i]);
      return NULL;
    }
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if (!str_is(&p->at->text, words[i].word)) continue;
    e->kind = E_CONST;
    e->value = words[i].value;
  }
  e->name = parse_name(p);
  return e;
}

Expr *parse_primary(Parser *p) {
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
