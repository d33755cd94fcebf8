/* Methods of strings and mappings, as Python has them. */
#include <string.h>

#include "generation/jinja_value.h"

/* ---- strings ---- */

enum { LEFT = 1, RIGHT = 2 };

static int str_strips(Render *r, const BuiltinCall *c, Value *out) {
  const Str *chars;
  if (maybe_str(r, c, 1, &chars) || render_work(r, c->v[0].s.len / 16)) return -1;
  *out = value_of_str(str_strip(&c->v[0].s, chars, c->row->how & LEFT, c->row->how & RIGHT));
  return 0;
}

static bool has_affix(const Str *s, const Str *affix, int end) {
  if (affix->len > s->len) return false;
  Str part = str_cut(s, end == RIGHT ? s->len - affix->len : 0, affix->len);
  return str_equal(&part, affix);
}

/* startswith and endswith; the argument is a string or a tuple of them. */
static int str_has_affix(Render *r, const BuiltinCall *c, Value *out) {
  const Value *v = &c->v[1];
  bool tuple = v->kind == V_LIST && v->list->kind == LIST_TUPLE, yes = false;
  for (int i = 0; i < (tuple ? v->list->n : 1); i++) {
    const Value *one = tuple ? &v->list->v[i] : v;
    if (one->kind != V_STR)
      return render_fail(r, "%s: found %s; expected a string", c->row->name, value_kind_name(one));
    yes |= has_affix(&c->v[0].s, &one->s, c->row->how);
  }
  *out = value_of_bool(yes);
  return 0;
}

static int str_without_affix(Render *r, const BuiltinCall *c, Value *out) {
  const Str *affix, *s = &c->v[0].s;
  if (need_str(r, c, 1, &affix)) return -1;
  *out = c->v[0];
  if (has_affix(s, affix, c->row->how))
    out->s = str_cut(s, c->row->how == RIGHT ? 0 : affix->len, s->len - affix->len);
  return 0;
}

static int str_splits(Render *r, const BuiltinCall *c, Value *out) {
  const Str *by;
  int64_t most;
  if (maybe_str(r, c, 1, &by) || maybe_int(r, c, 2, -1, &most)) return -1;
  return str_split(r, &c->v[0].s, by, most, c->row->how == RIGHT, out);
}

static int str_cases(Render *r, const BuiltinCall *c, Value *out) {
  return str_case(r, &c->v[0].s, (StrCase)c->row->how, out);
}

static int str_replaces(Render *r, const BuiltinCall *c, Value *out) {
  const Str *old, *by;
  int64_t most;
  if (need_str(r, c, 1, &old) || need_str(r, c, 2, &by) || maybe_int(r, c, 3, -1, &most)) return -1;
  return str_replace(r, &c->v[0].s, old, by, most, out);
}

/* Characters before the first place where it stands; -1: nowhere. */
static int str_finds(Render *r, const BuiltinCall *c, Value *out) {
  const Str *needle, *s = &c->v[0].s;
  if (need_str(r, c, 1, &needle) || render_work(r, s->len / 16)) return -1;
  size_t at = str_find(s, needle, 0);
  Str before = str_cut(s, 0, at <= s->len ? at : 0);
  *out = value_of_int(at <= s->len ? (int64_t)str_count(&before) : -1);
  return 0;
}

static int str_counts(Render *r, const BuiltinCall *c, Value *out) {
  const Str *needle, *s = &c->v[0].s;
  int64_t n = 0;
  if (need_str(r, c, 1, &needle) || render_work(r, s->len / 16)) return -1;
  if (needle->len == 0) n = (int64_t)str_count(s) + 1;
  for (size_t at = 0; needle->len && (at = str_find(s, needle, at)) <= s->len; n++)
    at += needle->len;
  *out = value_of_int(n);
  return 0;
}

static int str_joins(Render *r, const BuiltinCall *c, Value *out) {
  List *l;
  if (value_walk(r, &c->v[1], &l)) return -1;
  for (int i = 0; i < l->n; i++)
    if (l->v[i].kind != V_STR)
      return render_fail(r, "join: found %s; expected strings", value_kind_name(&l->v[i]));
  Value all = value_of_list(l), by = c->v[0];
  return filter_call(r, "join", &all, &(CallArgs){.v = &by, .n = 1}, out);
}

/* ---- mappings ---- */

static int dict_gets(Render *r, const BuiltinCall *c, Value *out) {
  if (c->v[1].kind >= V_LIST)
    return render_fail(r, "get: %s cannot be a key", value_kind_name(&c->v[1]));
  const Value *found = dict_find(r, c->v[0].dict, &c->v[1]);
  *out = found ? *found : c->v[2].kind == V_ABSENT ? value_none() : c->v[2];
  return 0;
}

enum { KEYS, VALUES, ITEMS };

static int dict_lists(Render *r, const BuiltinCall *c, Value *out) {
  const Dict *d = c->v[0].dict;
  List *l = list_new(r, LIST_VIEW, d->n);
  if (!l) return -1;
  for (int i = 0; i < d->n; i++) {
    l->v[i] = c->row->how == KEYS ? d->pair[i].key : d->pair[i].value;
    if (c->row->how != ITEMS) continue;
    List *pair = list_new(r, LIST_TUPLE, 2);
    if (!pair) return -1;
    pair->v[0] = d->pair[i].key;
    pair->v[1] = d->pair[i].value;
    l->v[i] = value_of_list(pair);
  }
  *out = value_of_list(l);
  return 0;
}

const Builtin *method_find(const Value *self, const char *name) {
  static const Builtin of_str[] = {
      {"strip", str_strips, .params = {"chars"}, .how = LEFT | RIGHT},
      {"lstrip", str_strips, .params = {"chars"}, .how = LEFT},
      {"rstrip", str_strips, .params = {"chars"}, .how = RIGHT},
      {"startswith", str_has_affix, .params = {"prefix"}, .needed = 1, .how = LEFT},
      {"endswith", str_has_affix, .params = {"suffix"}, .needed = 1, .how = RIGHT},
      {"removeprefix", str_without_affix, .params = {"prefix"}, .needed = 1, .how = LEFT},
      {"removesuffix", str_without_affix, .params = {"suffix"}, .needed = 1, .how = RIGHT},
      {"split", str_splits, .params = {"sep", "maxsplit"}, .how = LEFT},
      {"rsplit", str_splits, .params = {"sep", "maxsplit"}, .how = RIGHT},
      {"upper", str_cases, .how = CASE_UPPER},
      {"lower", str_cases, .how = CASE_LOWER},
      {"title", str_cases, .how = CASE_TITLE},
      {"capitalize", str_cases, .how = CASE_CAPITAL},
      {"replace", str_replaces, .params = {"old", "new", "count"}, .needed = 2},
      {"find", str_finds, .params = {"sub"}, .needed = 1},
      {"count", str_counts, .params = {"sub"}, .needed = 1},
      {"join", str_joins, .params = {"iterable"}, .needed = 1},
  };
  static const Builtin of_dict[] = {
      {"get", dict_gets, .params = {"key", "default"}, .needed = 1},
      {"keys", dict_lists, .how = KEYS},
      {"values", dict_lists, .how = VALUES},
      {"items", dict_lists, .how = ITEMS},
  };
  if (self->kind == V_STR) return builtin_find(of_str, sizeof of_str / sizeof *of_str, name);
  if (self->kind == V_DICT) return builtin_find(of_dict, sizeof of_dict / sizeof *of_dict, name);
  return NULL;
}

static bool is_one_of(const char *name, const char *const *all) {
  while (*all && strcmp(*all, name) != 0) all++;
  return *all != NULL;
}

bool method_refused(const Value *self, const char *name) {
  static const char *const of_str[] = {"casefold",     "center",     "encode",     "expandtabs",
                                       "format",       "format_map", "index",      "isalnum",
                                       "isalpha",      "isascii",    "isdecimal",  "isdigit",
                                       "isidentifier", "islower",    "isnumeric",  "isprintable",
                                       "isspace",      "istitle",    "isupper",    "ljust",
                                       "maketrans",    "partition",  "rfind",      "rindex",
                                       "rjust",        "rpartition", "splitlines", "swapcase",
                                       "translate",    "zfill",      NULL};
  static const char *const of_list[] = {"append", "clear", "copy",   "count",   "extend", "index",
                                        "insert", "pop",   "remove", "reverse", "sort",   NULL};
  static const char *const of_dict[] = {"clear",   "copy",       "fromkeys", "pop",
                                        "popitem", "setdefault", "update",   NULL};
  if (self->kind == V_STR) return is_one_of(name, of_str);
  if (self->kind == V_LIST) return is_one_of(name, of_list);
  return self->kind == V_DICT && is_one_of(name, of_dict);
}
