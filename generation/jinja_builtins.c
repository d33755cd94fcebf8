/* How arguments find the parameters of a builtin, and the functions that templates may call. */
#include <string.h>

#include "generation/jinja_value.h"

const Builtin *builtin_find(const Builtin *rows, int n, const char *name) {
  for (int i = 0; i < n; i++)
    if (strcmp(rows[i].name, name) == 0) return &rows[i];
  return NULL;
}

/* ---- arguments ---- */

static int n_params(const Builtin *b) {
  int n = 0;
  while (n < MAX_PARAMS && b->params[n]) n++;
  return n;
}

static int bind_named(Render *r, const NamedArg *arg, BuiltinCall *c) {
  const Builtin *b = c->row;
  for (int i = 0; i < n_params(b); i++) {
    if (strcmp(b->params[i], arg->name) != 0) continue;
    if (c->v[i + 1].kind != V_ABSENT)
      return render_fail(r, "%s: %s is given twice", b->name, arg->name);
    c->v[i + 1] = arg->value;
    return 0;
  }
  return render_fail(r, "%s: the argument %s is not supported", b->name, arg->name);
}

static int bind_all(Render *r, BuiltinCall *c) {
  const Builtin *b = c->row;
  const CallArgs *args = c->args;
  if (args->n > n_params(b))
    return render_fail(r, "%s: %d arguments; expected at most %d", b->name, args->n, n_params(b));
  for (int i = 0; i < args->n; i++) c->v[i + 1] = args->v[i];
  for (int i = 0; i < args->n_named; i++)
    if (bind_named(r, &args->named[i], c)) return -1;
  for (int i = 0; i < b->needed; i++)
    if (c->v[i + 1].kind == V_ABSENT)
      return render_fail(r, "%s: the argument %s is missing", b->name, b->params[i]);
  return 0;
}

int builtin_call(Render *r, const Builtin *b, const Value *self, const CallArgs *args, Value *out) {
  BuiltinCall c = {.row = b, .v = {*self}, .args = args};
  if (render_work(r, 1) || (!b->takes_any && bind_all(r, &c))) return -1;
  return b->call(r, &c, out);
}

int need_str(Render *r, const BuiltinCall *c, int i, const Str **s) {
  *s = c->v[i].kind == V_STR ? &c->v[i].s : NULL;
  if (*s) return 0;
  return render_fail(r, "%s: found %s; expected a string", c->row->name, value_kind_name(&c->v[i]));
}

int maybe_str(Render *r, const BuiltinCall *c, int i, const Str **s) {
  *s = NULL;
  return c->v[i].kind == V_ABSENT || c->v[i].kind == V_NONE ? 0 : need_str(r, c, i, s);
}

int maybe_int(Render *r, const BuiltinCall *c, int i, int64_t dflt, int64_t *out) {
  const Value *v = &c->v[i];
  *out = v->kind == V_INT ? v->i : dflt;
  if (v->kind == V_INT || v->kind == V_ABSENT || v->kind == V_NONE) return 0;
  return render_fail(r, "%s: found %s; expected a whole number", c->row->name, value_kind_name(v));
}

/* ---- functions ---- */

static int call_raise(Render *r, const BuiltinCall *c, Value *out) {
  (void)out;
  Str message;
  if (value_print(r, &c->v[1], &message)) return -1;
  int len = message.len < 500 ? (int)message.len : 500;
  return render_fail(r, "the template refuses the conversation: %.*s", len, message.text);
}

static int call_range(Render *r, const BuiltinCall *c, Value *out) {
  int64_t from, to, step, n = 0;
  const int64_t most = INT64_MAX / 4;
  if (maybe_int(r, c, 1, 0, &from) || maybe_int(r, c, 2, 0, &to) || maybe_int(r, c, 3, 1, &step))
    return -1;
  if (c->v[2].kind == V_ABSENT) {
    to = from;
    from = 0;
  }
  if (step == 0) return render_fail(r, "range: step 0");
  if (from < -most || from > most || to < -most || to > most || step < -most)
    return render_fail(r, "range: numbers of more than 60 bits");
  if (step > 0 && to > from) n = (to - from - 1) / step + 1;
  if (step < 0 && to < from) n = (from - to - 1) / -step + 1;
  if (n > RENDER_RANGE)
    return render_fail(r, "range: %lld numbers; at most %d are supported", (long long)n,
                       RENDER_RANGE);
  List *l = list_new(r, LIST_RANGE, n);
  if (!l) return -1;
  for (int64_t i = 0; i < n; i++) l->v[i] = value_of_int(from + i * step);
  *out = value_of_list(l);
  return 0;
}

/* namespace(a=1) and dict(a=1); how: the kind of value. */
static int call_pairs(Render *r, const BuiltinCall *c, Value *out) {
  const CallArgs *args = c->args;
  *out = (Value){.kind = (ValueKind)c->row->how, .dict = dict_new(r)};
  if (args->n > 0)
    return render_fail(r, "%s: only arguments with names are supported", c->row->name);
  for (int i = 0; i < args->n_named; i++)
    if (dict_put(r, out->dict, value_of_str(str_of(args->named[i].name)), args->named[i].value))
      return -1;
  return 0;
}

const Builtin *function_find(const char *name) {
  static const Builtin rows[] = {
      {"raise_exception", call_raise, .params = {"message"}, .needed = 1},
      {"range", call_range, .params = {"start", "stop", "step"}, .needed = 1},
      {"namespace", call_pairs, .how = V_SPACE, .takes_any = true},
      {"dict", call_pairs, .how = V_DICT, .takes_any = true},
  };
  return builtin_find(rows, sizeof rows / sizeof *rows, name);
}
