/* Statements: text goes to the render's buffer, or, in a macro or a block, to one of its own. */
#include <string.h>

#include "generation/jinja_eval.h"

/* ---- catching text ---- */

/* What the body prints. */
static int catch_text(Render *r, Scope *s, const Stmt *body, Value *out) {
  StrBuf own = {0}, *outer = r->out;
  r->out = &own;
  Flow flow = exec(r, scope_new(r, s), body);
  r->out = outer;
  *out = value_of_str(buf_str(&own));
  return flow == FLOW_FAIL ? -1 : 0;
}

/* ---- macros ---- */

static int bind_parameter(Render *r, Scope *s, const Arg *parameter, int i, const CallArgs *args) {
  Value v = value_undefined(parameter->name);
  bool given = i < args->n;
  if (given) v = args->v[i];
  for (int k = 0; k < args->n_named; k++) {
    if (strcmp(args->named[k].name, parameter->name) != 0) continue;
    if (given) return render_fail(r, "the argument %s is given twice", parameter->name);
    given = true;
    v = args->named[k].value;
  }
  if (!given && parameter->value && eval(r, s, parameter->value, &v)) return -1;
  scope_set(r, s, parameter->name, v);
  return 0;
}

static bool has_parameter(const ArgList *l, const char *name) {
  for (int i = 0; i < l->n; i++)
    if (strcmp(l->v[i].name, name) == 0) return true;
  return false;
}

int macro_call(Render *r, const MacroValue *m, const CallArgs *args, Value *out) {
  const Stmt *stmt = m->stmt;
  Scope *s = scope_new(r, m->scope);
  if (args->n > stmt->args.n)
    return render_fail(r, "the macro %s takes %d arguments; found %d", stmt->name, stmt->args.n,
                       args->n);
  for (int i = 0; i < args->n_named; i++)
    if (!has_parameter(&stmt->args, args->named[i].name))
      return render_fail(r, "the macro %s has no parameter %s", stmt->name, args->named[i].name);
  for (int i = 0; i < stmt->args.n; i++)
    if (bind_parameter(r, s, &stmt->args.v[i], i, args)) return -1;
  return catch_text(r, s, stmt->body, out);
}

static void exec_macro(Render *r, Scope *s, const Stmt *st) {
  MacroValue *m = slab_take(&r->slab, sizeof *m);
  *m = (MacroValue){st, s};
  scope_set(r, s, st->name, (Value){.kind = V_MACRO, .macro = m});
}

/* ---- loops ---- */

/* The items of the loop that its test lets through. */
static List *loop_items(Render *r, Scope *s, const Stmt *st) {
  Value all;
  List *l;
  if (eval(r, s, st->expr, &all) || value_walk(r, &all, &l)) return NULL;
  if (!st->test) return l;
  List *kept = list_new(r, LIST_PLAIN, l->n);
  if (!kept) return NULL;
  kept->n = 0;
  for (int i = 0; i < l->n; i++) {
    Scope *own = scope_new(r, s);
    Value yes;
    if (assign(r, own, st->target, &l->v[i]) || eval(r, own, st->test, &yes)) return NULL;
    if (value_truth(&yes)) kept->v[kept->n++] = l->v[i];
  }
  return kept;
}

/* The else runs unless some round came to the end of the body: in Jinja break and continue do not
 * count as that. */
static Flow exec_for(Render *r, Scope *s, const Stmt *st) {
  List *l = loop_items(r, s, st);
  Flow flow = FLOW_ON;
  bool finished = false;
  if (!l) return FLOW_FAIL;
  for (int i = 0; i < l->n && flow != FLOW_BREAK && flow != FLOW_FAIL; i++) {
    Scope *own = scope_new(r, s);
    Loop *loop = slab_take(&r->slab, sizeof *loop);
    *loop = (Loop){.index0 = i, .length = l->n, .list = l};
    scope_set(r, own, "loop", (Value){.kind = V_LOOP, .loop = loop});
    flow = assign(r, own, st->target, &l->v[i]) ? FLOW_FAIL : exec(r, own, st->body);
    finished |= flow == FLOW_ON;
  }
  if (flow == FLOW_FAIL) return FLOW_FAIL;
  return finished ? FLOW_ON : exec(r, scope_new(r, s), st->otherwise);
}

/* ---- the rest ---- */

static Flow exec_if(Render *r, Scope *s, const Stmt *st) {
  for (int i = 0; i < st->branches.n; i++) {
    const Branch *b = &st->branches.v[i];
    Value test = value_of_bool(true);
    if (b->test && eval(r, s, b->test, &test)) return FLOW_FAIL;
    if (value_truth(&test)) return exec(r, s, b->body);
  }
  return FLOW_ON;
}

static Flow exec_with(Render *r, Scope *s, const Stmt *st) {
  Scope *own = scope_new(r, s);
  for (int i = 0; i < st->branches.n; i++) {
    Value v;
    if (eval(r, s, st->branches.v[i].test, &v) || assign(r, own, st->branches.v[i].target, &v))
      return FLOW_FAIL;
  }
  return exec(r, own, st->body);
}

static int exec_print(Render *r, Scope *s, const Stmt *st) {
  Value v;
  Str text;
  if (eval(r, s, st->expr, &v) || value_print(r, &v, &text)) return -1;
  return buf_put(r, r->out, &text);
}

static int exec_set(Render *r, Scope *s, const Stmt *st) {
  Value v, text;
  if (st->kind == S_SET) {
    if (eval(r, s, st->expr, &v)) return -1;
  } else {
    if (catch_text(r, s, st->body, &text)) return -1;
    v = text;
    if (st->expr && eval_block_filters(r, s, st->expr, &text, &v)) return -1;
  }
  return assign(r, s, st->target, &v);
}

static int exec_filter(Render *r, Scope *s, const Stmt *st) {
  Value text, v;
  Str printed;
  if (catch_text(r, s, st->body, &text) || eval_block_filters(r, s, st->expr, &text, &v) ||
      value_print(r, &v, &printed))
    return -1;
  return buf_put(r, r->out, &printed);
}

static int exec_generation(Render *r, Scope *s, const Stmt *st) {
  size_t from = r->out->len;
  if (exec(r, scope_new(r, s), st->body) == FLOW_FAIL) return -1;
  for (size_t i = from; i < r->out->len; i++) r->out->marks[i] |= MARK_GENERATION;
  return 0;
}

static Flow exec_one(Render *r, Scope *s, const Stmt *st) {
  int rc = 0;
  switch (st->kind) {
    case S_TEXT:
      rc = buf_put(r, r->out, &st->text);
      break;
    case S_PRINT:
      rc = exec_print(r, s, st);
      break;
    case S_IF:
      return exec_if(r, s, st);
    case S_FOR:
      return exec_for(r, s, st);
    case S_WITH:
      return exec_with(r, s, st);
    case S_SET:
    case S_SET_BLOCK:
      rc = exec_set(r, s, st);
      break;
    case S_MACRO:
      exec_macro(r, s, st);
      break;
    case S_FILTER:
      rc = exec_filter(r, s, st);
      break;
    case S_GENERATION:
      rc = exec_generation(r, s, st);
      break;
    case S_BREAK:
      return FLOW_BREAK;
    case S_CONTINUE:
      return FLOW_CONTINUE;
  }
  return rc ? FLOW_FAIL : FLOW_ON;
}

Flow exec(Render *r, Scope *s, const Stmt *list) {
  int line = r->line;
  Flow flow = FLOW_ON;
  if (r->depth >= RENDER_DEPTH) {
    render_fail(r, "nested too deeply: more than %d", RENDER_DEPTH);
    return FLOW_FAIL;
  }
  r->depth++;
  for (const Stmt *st = list; st && flow == FLOW_ON; st = st->next) {
    r->line = st->line;
    flow = render_work(r, 1) || render_room(r, 0) ? FLOW_FAIL : exec_one(r, s, st);
  }
  r->depth--;
  r->line = line;
  return flow;
}
