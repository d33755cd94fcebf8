/* What the parser's files share: the tokens and the nodes of expressions. */
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

Expr *expr_new(Parser *p, ExprKind kind, Expr *a, Expr *b) {
  Expr *e = slab_take(p->slab, sizeof *e);
  *e = (Expr){.kind = kind, .line = p->at->line, .height = 1, .a = a, .b = b};
  return e;
}

static void raise_to(Expr *e, const Expr *child) {
  if (child && e->height <= child->height) e->height = child->height + 1;
}

Expr *expr_done(Parser *p, Expr *e) {
  const Expr *const parts[] = {e->a, e->b, e->c, e->d};
  for (int i = 0; i < 4; i++) raise_to(e, parts[i]);
  for (int i = 0; i < e->list.n; i++) raise_to(e, e->list.v[i]);
  for (int i = 0; i < e->args.n; i++) raise_to(e, e->args.v[i].value);
  if (e->height <= PARSE_HEIGHT) return e;
  parse_fail(p, "an expression is too long or nested too deeply");
  return NULL;
}

void arg_push(Parser *p, ArgList *l, Arg arg) {
  if (l->n == l->cap) {
    l->cap = l->cap ? 2 * l->cap : 4;
    Arg *v = slab_take(p->slab, (size_t)l->cap * sizeof *v);
    if (l->n) memcpy(v, l->v, (size_t)l->n * sizeof *v);
    l->v = v;
  }
  l->v[l->n++] = arg;
}
