/* Filters, as Jinja has them (tojson as transformers has it). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "generation/jinja_value.h"

/* The subject as text. */
static int subject_str(Render *r, const BuiltinCall *c, Str *s) {
  return value_print(r, &c->v[0], s);
}

/* ---- text ---- */

static int filter_trim(Render *r, const BuiltinCall *c, Value *out) {
  const Str *chars;
  Str s;
  if (subject_str(r, c, &s) || maybe_str(r, c, 1, &chars) || render_work(r, s.len / 16)) return -1;
  *out = value_of_str(str_strip(&s, chars, true, true));
  return 0;
}

static int filter_case(Render *r, const BuiltinCall *c, Value *out) {
  Str s;
  return subject_str(r, c, &s) ? -1 : str_case(r, &s, (StrCase)c->row->how, out);
}

static int filter_string(Render *r, const BuiltinCall *c, Value *out) {
  Str s;
  if (subject_str(r, c, &s)) return -1;
  *out = value_of_str(s);
  return 0;
}

static int filter_safe(Render *r, const BuiltinCall *c, Value *out) {
  if (filter_string(r, c, out)) return -1;
  out->s.markup = true;
  return 0;
}

static int filter_replace(Render *r, const BuiltinCall *c, Value *out) {
  Str s, old, by;
  int64_t most;
  if (subject_str(r, c, &s) || value_print(r, &c->v[1], &old) || value_print(r, &c->v[2], &by) ||
      maybe_int(r, c, 3, -1, &most))
    return -1;
  if (str_replace(r, &s, &old, &by, most, out)) return -1;
  out->s.markup = false;
  return 0;
}

static int filter_tojson(Render *r, const BuiltinCall *c, Value *out) {
  int64_t indent;
  if (maybe_int(r, c, 1, -1, &indent)) return -1;
  if (c->v[2].kind != V_ABSENT && (c->v[2].kind != V_BOOL || c->v[2].b))
    return render_fail(r, "tojson: only ensure_ascii=false is supported");
  if (indent > 16) return render_fail(r, "tojson: an indent of more than 16 is not supported");
  return value_to_json(r, &c->v[0], indent < 0 ? (c->v[1].kind == V_INT ? 0 : -1) : (int)indent,
                       out);
}

/* ---- numbers ---- */

/* A whole number, or the whole part of a number, as int() reads it. */
static int parse_int(Render *r, const Str *s, bool *ok, int64_t *out) {
  char text[64], *end;
  Str trimmed = str_strip(s, NULL, true, true);
  *ok = trimmed.len > 0 && trimmed.len < sizeof text;
  if (!*ok) return 0;
  memcpy(text, trimmed.text, trimmed.len);
  text[trimmed.len] = 0;
  if (memchr(text, '_', trimmed.len) || strspn(text, "0123456789+-.eE") != trimmed.len) {
    *ok = false;
    return 0;
  }
  double f = strtod(text, &end);
  *ok = *end == 0 && isfinite(f);
  if (*ok && fabs(f) >= 9007199254740992.0)
    return render_fail(r, "int: numbers of more than 53 bits are not supported");
  *out = *ok ? (int64_t)f : 0;
  return 0;
}

static int filter_int(Render *r, const BuiltinCall *c, Value *out) {
  const Value *v = &c->v[0];
  bool ok = value_is_number(v);
  int64_t i = 0;
  if (v->kind == V_UNDEFINED) return render_fail(r, "\"%s\" is undefined", v->name);
  if (v->kind == V_INT) i = v->i;
  if (v->kind == V_BOOL) i = v->b;
  if (v->kind == V_FLOAT) {
    ok = isfinite(v->f);
    if (ok && fabs(v->f) >= 9e18) return render_fail(r, "int: the result has more than 64 bits");
    if (ok) i = (int64_t)v->f;
  }
  if (v->kind == V_STR && parse_int(r, &v->s, &ok, &i)) return -1;
  *out = ok ? value_of_int(i) : c->v[1].kind == V_ABSENT ? value_of_int(0) : c->v[1];
  return 0;
}

static int filter_abs(Render *r, const BuiltinCall *c, Value *out) {
  Value zero = value_of_int(0);
  bool negative;
  if (value_compare(r, OP_LT, &c->v[0], &zero, &negative)) return -1;
  return value_unary(r, negative ? OP_NEG : OP_POS, &c->v[0], out);
}

/* ---- lists ---- */

static int filter_length(Render *r, const BuiltinCall *c, Value *out) {
  const Value *v = &c->v[0];
  int64_t n = -1;
  if (v->kind == V_UNDEFINED) n = 0;
  if (v->kind == V_STR) n = (int64_t)str_count(&v->s);
  if (v->kind == V_DICT) n = v->dict->n;
  if (v->kind == V_LOOP) n = v->loop->length;
  if (v->kind == V_LIST && v->list->kind != LIST_LAZY) n = v->list->n;
  if (n < 0)
    return render_fail(r, "%s: %s has no length", c->row->name,
                       v->kind == V_LIST ? "an iterator" : value_kind_name(v));
  *out = value_of_int(n);
  return v->kind == V_STR ? render_work(r, v->s.len / 16) : 0;
}

static int filter_first(Render *r, const BuiltinCall *c, Value *out) {
  List *l;
  if (value_walk(r, &c->v[0], &l)) return -1;
  *out = l->n ? l->v[0] : value_undefined("the first of an empty list");
  return 0;
}

static int filter_last(Render *r, const BuiltinCall *c, Value *out) {
  List *l;
  if (c->v[0].kind == V_LIST && c->v[0].list->kind == LIST_LAZY)
    return render_fail(r, "last: an iterator has no last item that Jinja could find");
  if (value_walk(r, &c->v[0], &l)) return -1;
  *out = l->n ? l->v[l->n - 1] : value_undefined("the last of an empty list");
  return 0;
}

static int filter_list(Render *r, const BuiltinCall *c, Value *out) {
  List *l;
  if (value_walk(r, &c->v[0], &l)) return -1;
  List *copy = slab_take(&r->slab, sizeof *copy);
  *copy = (List){LIST_PLAIN, l->n, l->v};
  *out = value_of_list(copy);
  return 0;
}

static int filter_reverse(Render *r, const BuiltinCall *c, Value *out) {
  const Value backwards[3] = {{.kind = V_ABSENT}, {.kind = V_ABSENT}, value_of_int(-1)};
  List *l;
  if (c->v[0].kind == V_STR) return value_slice(r, &c->v[0], backwards, out);
  if (value_walk(r, &c->v[0], &l)) return -1;
  List *turned = list_new(r, LIST_LAZY, l->n);
  if (!turned) return -1;
  for (int i = 0; i < l->n; i++) turned->v[i] = l->v[l->n - 1 - i];
  *out = value_of_list(turned);
  return 0;
}

static int filter_items(Render *r, const BuiltinCall *c, Value *out) {
  const Value *v = &c->v[0];
  if (v->kind != V_DICT && v->kind != V_UNDEFINED)
    return render_fail(r, "items: found %s; expected a mapping", value_kind_name(v));
  List *none = list_new(r, LIST_LAZY, 0);
  if (!none) return -1;
  *out = value_of_list(none);
  if (v->kind == V_UNDEFINED) return 0;
  if (builtin_call(r, method_find(v, "items"), v, &(CallArgs){0}, out)) return -1;
  out->list->kind = LIST_LAZY;
  return 0;
}

static int filter_default(Render *r, const BuiltinCall *c, Value *out) {
  (void)r;
  bool boolean = c->v[2].kind != V_ABSENT && value_truth(&c->v[2]);
  bool missing = c->v[0].kind == V_UNDEFINED || (boolean && !value_truth(&c->v[0]));
  *out = !missing ? c->v[0] : c->v[1].kind == V_ABSENT ? value_of_str(str_of("")) : c->v[1];
  return 0;
}

/* ---- attributes of items ---- */

/* item.a.b of the path "a.b"; parts of digits are indices. */
static int follow_path(Render *r, const Value *item, const Value *path, Value *out) {
  *out = *item;
  if (path->kind == V_INT) return value_item(r, item, path, out);
  if (path->kind != V_STR)
    return render_fail(r, "an attribute is named by %s; expected a string", value_kind_name(path));
  Str dot = str_of("."), rest = path->s;
  for (;;) {
    size_t end = str_find(&rest, &dot, 0);
    Value key = value_of_str(str_cut(&rest, 0, end < rest.len ? end : rest.len)), from = *out;
    bool ok = true;
    int64_t i = 0;
    for (size_t k = 0; k < key.s.len; k++) ok &= key.s.text[k] >= '0' && key.s.text[k] <= '9';
    if (ok && key.s.len && parse_int(r, &key.s, &ok, &i)) return -1;
    if (ok && key.s.len) key = value_of_int(i);
    if (value_item(r, &from, &key, out)) return -1;
    if (end >= rest.len) return 0;
    rest = str_cut(&rest, end + 1, rest.len - end - 1);
  }
}

static int filter_join(Render *r, const BuiltinCall *c, Value *out) {
  List *l;
  StrBuf b = {0};
  Str by = str_of("");
  if (c->v[1].kind != V_ABSENT && value_print(r, &c->v[1], &by)) return -1;
  if (value_walk(r, &c->v[0], &l)) return -1;
  for (int i = 0; i < l->n; i++) {
    Value item = l->v[i];
    Str s;
    if (c->v[2].kind != V_ABSENT && follow_path(r, &l->v[i], &c->v[2], &item)) return -1;
    if (value_print(r, &item, &s) || (i && buf_put(r, &b, &by)) || buf_put(r, &b, &s)) return -1;
  }
  *out = value_of_str(buf_str(&b));
  return 0;
}

static int need_name(Render *r, const BuiltinCall *c, int i, const char **name) {
  const Value *v = i < c->args->n ? &c->args->v[i] : NULL;
  if (!v || v->kind != V_STR)
    return render_fail(r, "%s: expected a name as argument %d", c->row->name, i + 1);
  char *copy = slab_take(&r->slab, v->s.len + 1);
  if (v->s.len) memcpy(copy, v->s.text, v->s.len);
  copy[v->s.len] = 0;
  *name = copy;
  return 0;
}

/* The items of the subject; none of one that is false. */
static int walk_if_true(Render *r, const Value *v, List **l) {
  Value nothing = value_undefined("nothing");
  return value_walk(r, value_truth(v) ? v : &nothing, l);
}

static CallArgs args_from(const CallArgs *a, int first) {
  return (CallArgs){a->v + first, a->n - first, a->named, a->n_named};
}

enum { SELECT, REJECT, SELECT_ATTR, REJECT_ATTR };

/* select and reject, by a test or by truth, of the items or of an attribute of theirs. */
static int filter_select(Render *r, const BuiltinCall *c, Value *out) {
  int how = c->row->how, first = how >= SELECT_ATTR;
  const char *test = NULL;
  List *l;
  if (c->args->n < first) return render_fail(r, "%s: no attribute is named", c->row->name);
  if (c->args->n > first && need_name(r, c, first, &test)) return -1;
  if (walk_if_true(r, &c->v[0], &l)) return -1;
  List *kept = list_new(r, LIST_LAZY, l->n);
  if (!kept) return -1;
  CallArgs rest = args_from(c->args, test ? first + 1 : first);
  kept->n = 0;
  for (int i = 0; i < l->n; i++) {
    Value v = l->v[i];
    if (first && follow_path(r, &l->v[i], &c->args->v[0], &v)) return -1;
    bool yes = value_truth(&v);
    if (test && test_call(r, test, &v, &rest, &yes)) return -1;
    if (yes == (how == SELECT || how == SELECT_ATTR)) kept->v[kept->n++] = l->v[i];
  }
  *out = value_of_list(kept);
  return 0;
}

static int map_attribute(Render *r, const BuiltinCall *c, const List *l, List *made) {
  const Value *path = NULL, *dflt = NULL;
  for (int i = 0; i < c->args->n_named; i++) {
    const NamedArg *arg = &c->args->named[i];
    if (strcmp(arg->name, "attribute") == 0) path = &arg->value;
    if (strcmp(arg->name, "default") == 0) dflt = &arg->value;
  }
  if (!path || c->args->n_named > 1 + (dflt != NULL))
    return render_fail(r, "map: expected a filter's name, or attribute");
  for (int i = 0; i < l->n; i++) {
    if (follow_path(r, &l->v[i], path, &made->v[i])) return -1;
    if (made->v[i].kind == V_UNDEFINED && dflt) made->v[i] = *dflt;
  }
  return 0;
}

static int filter_map(Render *r, const BuiltinCall *c, Value *out) {
  const char *name = NULL;
  List *l;
  if (c->args->n > 0 && need_name(r, c, 0, &name)) return -1;
  if (walk_if_true(r, &c->v[0], &l)) return -1;
  List *made = list_new(r, LIST_LAZY, l->n);
  if (!made || (!name && map_attribute(r, c, l, made))) return -1;
  CallArgs rest = args_from(c->args, c->args->n > 0);
  for (int i = 0; name && i < l->n; i++)
    if (filter_call(r, name, &l->v[i], &rest, &made->v[i])) return -1;
  *out = value_of_list(made);
  return 0;
}

int filter_call(Render *r, const char *name, const Value *v, const CallArgs *args, Value *out) {
  static const Builtin rows[] = {
      {"trim", filter_trim, .params = {"chars"}},
      {"upper", filter_case, .how = CASE_UPPER},
      {"lower", filter_case, .how = CASE_LOWER},
      {"title", filter_case, .how = CASE_WORDS},
      {"capitalize", filter_case, .how = CASE_CAPITAL},
      {"string", .call = filter_string},
      {"safe", .call = filter_safe},
      {"replace", filter_replace, .params = {"old", "new", "count"}, .needed = 2},
      {"tojson", filter_tojson, .params = {"indent", "ensure_ascii"}},
      {"int", filter_int, .params = {"default"}},
      {"abs", .call = filter_abs},
      {"length", .call = filter_length},
      {"count", .call = filter_length},
      {"first", .call = filter_first},
      {"last", .call = filter_last},
      {"list", .call = filter_list},
      {"reverse", .call = filter_reverse},
      {"items", .call = filter_items},
      {"default", filter_default, .params = {"default_value", "boolean"}},
      {"d", filter_default, .params = {"default_value", "boolean"}},
      {"join", filter_join, .params = {"d", "attribute"}},
      {"select", filter_select, .how = SELECT, .takes_any = true},
      {"reject", filter_select, .how = REJECT, .takes_any = true},
      {"selectattr", filter_select, .how = SELECT_ATTR, .takes_any = true},
      {"rejectattr", filter_select, .how = REJECT_ATTR, .takes_any = true},
      {"map", filter_map, .takes_any = true},
  };
  const Builtin *row = builtin_find(rows, sizeof rows / sizeof *rows, name);
  if (!row) return render_fail(r, "the filter \"%s\" is not supported", name);
  return builtin_call(r, row, v, args, out);
}
