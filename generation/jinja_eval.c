/* Evaluation of expressions. */
#include "generation/jinja_eval.h"

#include <string.h>

/* ---- names ---- */

Scope *scope_new(Render *r, Scope *parent) {
  Scope *s = slab_take(&r->slab, sizeof *s);
  *s = (Scope){.parent = parent};
  return s;
}

static Binding *scope_own(Scope *s, const char *name) {
  for (Binding *b = s->first; b; b = b->next)
    if (strcmp(b->name, name) == 0) return b;
  return NULL;
}

void scope_set(Render *r, Scope *s, const char *name, Value v) {
  Binding *b = scope_own(s, name);
  if (!b) {
    b = slab_take(&r->slab, sizeof *b);
    *b = (Binding){.name = name, .next = s->first};
    s->first = b;
  }
  b->value = v;
}

static Value scope_get(Render *r, Scope *s, const char *name) {
  for (; s; s = s->parent) {
    Binding *b = scope_own(s, name);
    if (b) return b->value;
  }
  const Builtin *row = function_find(name);
  if (!row) return value_undefined(name);
  Method *m = slab_take(&r->slab, sizeof *m);
  *m = (Method){.row = row};
  return (Value){.kind = V_BUILTIN, .method = m};
}

static int assign_attribute(Render *r, Scope *s, const Expr *target, const Value *v) {
  Value space = scope_get(r, s, target->a->name);
  if (space.kind != V_SPACE)
    return render_fail(r, "cannot set %s.%s: %s is no namespace", target->a->name, target->name,
                       target->a->name);
  if (target->name[0] == '_')
    return render_fail(r, "cannot set %s.%s: names that begin with _", target->a->name,
                       target->name);
  return dict_put(r, space.dict, value_of_str(str_of(target->name)), *v);
}

int assign(Render *r, Scope *s, const Expr *target, const Value *v) {
  List *l;
  if (render_work(r, 1)) return -1;
  if (target->kind == E_ATTRIBUTE) return assign_attribute(r, s, target, v);
  if (target->kind == E_NAME) {
    scope_set(r, s, target->name, *v);
    return 0;
  }
  if (value_walk(r, v, &l)) return -1;
  if (l->n != target->list.n) return render_fail(r, "%d values for %d names", l->n, target->list.n);
  for (int i = 0; i < l->n; i++)
    if (assign(r, s, target->list.v[i], &l->v[i])) return -1;
  return 0;
}

/* ---- lists, mappings, slices ---- */

static int eval_list(Render *r, Scope *s, const Expr *e, Value *out) {
  List *l = list_new(r, e->kind == E_TUPLE ? LIST_TUPLE : LIST_PLAIN, e->list.n);
  if (!l) return -1;
  for (int i = 0; i < l->n; i++)
    if (eval(r, s, e->list.v[i], &l->v[i])) return -1;
  *out = value_of_list(l);
  return 0;
}

static int eval_dict(Render *r, Scope *s, const Expr *e, Value *out) {
  Dict *d = dict_new(r);
  for (int i = 0; i < e->list.n; i += 2) {
    Value key, value;
    if (eval(r, s, e->list.v[i], &key) || eval(r, s, e->list.v[i + 1], &value) ||
        dict_put(r, d, key, value))
      return -1;
  }
  *out = (Value){.kind = V_DICT, .dict = d};
  return 0;
}

static int eval_slice(Render *r, Scope *s, const Expr *e, Value *out) {
  const Expr *const parts[] = {e->b, e->c, e->d};
  Value a, bounds[3] = {{.kind = V_ABSENT}, {.kind = V_ABSENT}, {.kind = V_ABSENT}};
  if (eval(r, s, e->a, &a)) return -1;
  for (int i = 0; i < 3; i++)
    if (parts[i] && eval(r, s, parts[i], &bounds[i])) return -1;
  return value_slice(r, &a, bounds, out);
}

/* ---- calls ---- */

static int eval_args(Render *r, Scope *s, const ArgList *l, CallArgs *out) {
  *out = (CallArgs){0};
  if (l->n == 0) return 0;
  out->v = slab_take(&r->slab, (size_t)l->n * sizeof *out->v);
  out->named = slab_take(&r->slab, (size_t)l->n * sizeof *out->named);
  for (int i = 0; i < l->n; i++) {
    Value v;
    if (eval(r, s, l->v[i].value, &v)) return -1;
    if (l->v[i].name)
      out->named[out->n_named++] = (NamedArg){l->v[i].name, v};
    else
      out->v[out->n++] = v;
  }
  return 0;
}

static int call_refused(Render *r, const Value *callee) {
  if (callee->kind != V_UNDEFINED)
    return render_fail(r, "%s cannot be called", value_kind_name(callee));
  if (strcmp(callee->name, "strftime_now") == 0)
    return render_fail(r, "strftime_now is not supported: the text would depend on the day");
  return render_fail(r, "the function or method \"%s\" is undefined or not supported",
                     callee->name);
}

static int eval_call(Render *r, Scope *s, const Expr *e, Value *out) {
  Value callee;
  CallArgs args;
  if (eval(r, s, e->a, &callee) || eval_args(r, s, &e->args, &args)) return -1;
  if (callee.kind == V_MACRO) return macro_call(r, callee.macro, &args, out);
  if (callee.kind != V_BUILTIN) return call_refused(r, &callee);
  return builtin_call(r, callee.method->row, &callee.method->self, &args, out);
}

int eval_block_filters(Render *r, Scope *s, const Expr *e, const Value *block, Value *out) {
  Value subject = *block;
  CallArgs args;
  if (e->a && eval_block_filters(r, s, e->a, block, &subject)) return -1;
  if (eval_args(r, s, &e->args, &args)) return -1;
  return filter_call(r, e->name, &subject, &args, out);
}

static int eval_filter(Render *r, Scope *s, const Expr *e, Value *out) {
  Value subject;
  CallArgs args;
  if (eval(r, s, e->a, &subject) || eval_args(r, s, &e->args, &args)) return -1;
  return filter_call(r, e->name, &subject, &args, out);
}

static int eval_test(Render *r, Scope *s, const Expr *e, Value *out) {
  Value subject;
  CallArgs args;
  bool yes;
  if (eval(r, s, e->a, &subject) || eval_args(r, s, &e->args, &args) ||
      test_call(r, e->name, &subject, &args, &yes))
    return -1;
  *out = value_of_bool(yes);
  return 0;
}

/* ---- operators ---- */

/* and, or: the last operand looked at is the value. */
static int eval_logic(Render *r, Scope *s, const Expr *e, Value *out) {
  if (eval(r, s, e->a, out)) return -1;
  return value_truth(out) == (e->kind == E_AND) ? eval(r, s, e->b, out) : 0;
}

static int eval_choice(Render *r, Scope *s, const Expr *e, Value *out) {
  Value test;
  if (eval(r, s, e->b, &test)) return -1;
  if (value_truth(&test)) return eval(r, s, e->a, out);
  if (e->c) return eval(r, s, e->c, out);
  *out = value_undefined("the else of an if");
  return 0;
}

static int eval_binary(Render *r, Scope *s, const Expr *e, Value *out) {
  Value a, b;
  if (eval(r, s, e->a, &a) || eval(r, s, e->b, &b)) return -1;
  return value_binary(r, e->op, &a, &b, out);
}

static int eval_comparison(Render *r, Scope *s, const Expr *e, Value *out) {
  Value left, right;
  bool yes = true;
  if (eval(r, s, e->list.v[0], &left)) return -1;
  for (int i = 1; i < e->list.n && yes; i++, left = right)
    if (eval(r, s, e->list.v[i], &right) || value_compare(r, e->ops[i - 1], &left, &right, &yes))
      return -1;
  *out = value_of_bool(yes);
  return 0;
}

static int eval_item(Render *r, Scope *s, const Expr *e, Value *out) {
  Value a, key;
  if (eval(r, s, e->a, &a) || eval(r, s, e->b, &key)) return -1;
  return value_item(r, &a, &key, out);
}

/* Of one operand. */
static int eval_on(Render *r, Scope *s, const Expr *e, Value *out) {
  Value a;
  if (eval(r, s, e->a, &a)) return -1;
  if (e->kind == E_ATTRIBUTE) return value_attribute(r, &a, e->name, out);
  if (e->kind == E_UNARY) return value_unary(r, e->op, &a, out);
  *out = value_of_bool(!value_truth(&a));
  return 0;
}

static int eval_kind(Render *r, Scope *s, const Expr *e, Value *out) {
  switch (e->kind) {
    case E_CONST:
      *out = e->value;
      return 0;
    case E_NAME:
      *out = scope_get(r, s, e->name);
      return 0;
    case E_LIST:
    case E_TUPLE:
      return eval_list(r, s, e, out);
    case E_DICT:
      return eval_dict(r, s, e, out);
    case E_ATTRIBUTE:
    case E_UNARY:
    case E_NOT:
      return eval_on(r, s, e, out);
    case E_ITEM:
      return eval_item(r, s, e, out);
    case E_SLICE:
      return eval_slice(r, s, e, out);
    case E_CALL:
      return eval_call(r, s, e, out);
    case E_FILTER:
      return eval_filter(r, s, e, out);
    case E_TEST:
      return eval_test(r, s, e, out);
    case E_AND:
    case E_OR:
      return eval_logic(r, s, e, out);
    case E_IF:
      return eval_choice(r, s, e, out);
    case E_BINARY:
      return eval_binary(r, s, e, out);
    case E_COMPARE:
      return eval_comparison(r, s, e, out);
  }
  die("expression kind %d", (int)e->kind);
}

int eval(Render *r, Scope *s, const Expr *e, Value *out) {
  int line = r->line;
  if (render_work(r, 1) || render_room(r, 0)) return -1;
  if (r->depth >= RENDER_DEPTH)
    return render_fail(r, "nested too deeply: more than %d", RENDER_DEPTH);
  r->line = e->line;
  r->depth++;
  int rc = eval_kind(r, s, e, out);
  r->depth--;
  r->line = line;
  return rc;
}
