/* Items, attributes and slices, as Python and Jinja have them. */
#include <string.h>

#include "generation/jinja_value.h"

/* ---- items and attributes ---- */

/* Byte where character i begins. */
static size_t char_at(const Str *s, int64_t i) {
  size_t at = 0;
  for (; i > 0; i--) at += utf8_step(s->text + at, s->len - at);
  return at;
}

static Value str_item(const Str *s, int64_t i) {
  int64_t n = (int64_t)str_count(s);
  if (i < 0) i += n;
  if (i < 0 || i >= n) return value_undefined("a character beyond the end");
  size_t at = char_at(s, i);
  return value_of_str(str_cut(s, at, utf8_step(s->text + at, s->len - at)));
}

static Value list_item(const List *l, int64_t i) {
  if (i < 0) i += l->n;
  bool there = i >= 0 && i < l->n && l->kind <= LIST_RANGE;
  return there ? l->v[i] : value_undefined("an item beyond the end");
}

/* The attribute that a string names. */
static int named_attribute(Render *r, const Value *a, const Str *name, Value *out) {
  char *copy = slab_take(&r->slab, name->len + 1);
  if (name->len) memcpy(copy, name->text, name->len);
  copy[name->len] = 0;
  *out = value_undefined("an item");
  return strlen(copy) == name->len ? value_attribute(r, a, copy, out) : 0;
}

int value_item(Render *r, const Value *a, const Value *key, Value *out) {
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  if (a->kind == V_DICT) {
    const Value *found = dict_find(r, a->dict, key);
    if (found) {
      *out = *found;
      return 0;
    }
  }
  if (a->kind == V_STR && value_is_whole(key)) {
    *out = str_item(&a->s, value_whole(key));
    return render_work(r, a->s.len / 16);
  }
  if (a->kind == V_LIST && value_is_whole(key)) {
    *out = list_item(a->list, value_whole(key));
    return 0;
  }
  if (key->kind == V_STR) return named_attribute(r, a, &key->s, out);
  *out = value_undefined("an item");
  return 0;
}

static Value loop_neighbour(const Loop *l, int i) {
  return i >= 0 && i < l->length ? l->list->v[i] : value_undefined("the loop's neighbour");
}

static Value loop_attribute(const Loop *l, const char *name) {
  const struct {
    const char *name;
    int value;
  } counts[] = {{"index", l->index0 + 1},
                {"index0", l->index0},
                {"revindex", l->length - l->index0},
                {"revindex0", l->length - l->index0 - 1},
                {"length", l->length},
                {"depth", 1}, /* of recursion */
                {"depth0", 0}};
  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
    if (strcmp(name, counts[i].name) == 0) return value_of_int(counts[i].value);
  if (strcmp(name, "first") == 0) return value_of_bool(l->index0 == 0);
  if (strcmp(name, "last") == 0) return value_of_bool(l->index0 == l->length - 1);
  if (strcmp(name, "previtem") == 0) return loop_neighbour(l, l->index0 - 1);
  if (strcmp(name, "nextitem") == 0) return loop_neighbour(l, l->index0 + 1);
  return value_undefined(name);
}

int value_attribute(Render *r, const Value *a, const char *name, Value *out) {
  const Builtin *row;
  const Value *found = NULL;
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  *out = value_undefined(name);
  if (name[0] == '_') return 0; /* the sandbox of transformers */
  if (a->kind == V_LOOP) {
    *out = loop_attribute(a->loop, name);
  } else if ((row = method_find(a, name))) {
    Method *m = slab_take(&r->slab, sizeof *m);
    *m = (Method){row, *a};
    *out = (Value){.kind = V_BUILTIN, .method = m};
  } else if (a->kind == V_DICT || a->kind == V_SPACE) {
    found = dict_get(a->dict, name);
  }
  if (found) *out = *found;
  if (!found && method_refused(a, name))
    return render_fail(r, "the method \"%s\" of %s is not supported", name, value_kind_name(a));
  return 0;
}

/* ---- slices ---- */

/* Where a[from:to:step] over n items begins and how many it takes: Python's rules. */
static int64_t slice_plan(int64_t n, const int64_t *from, const int64_t *to, int64_t step,
                          int64_t *first) {
  int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n, a = step < 0 ? high : low,
          b = step < 0 ? low : high;
  if (from) {
    a = *from < 0 ? *from + n : *from;
    a = a < low ? low : a > high ? high : a;
  }
  if (to) {
    b = *to < 0 ? *to + n : *to;
    b = b < low ? low : b > high ? high : b;
  }
  *first = a;
  if (step > 0) return b > a ? (b - a - 1) / step + 1 : 0;
  return a > b ? (a - b - 1) / -step + 1 : 0;
}

static int slice_bound(Render *r, const Value *v, int64_t *i, bool *given) {
  *given = v->kind != V_ABSENT && v->kind != V_NONE;
  if (!*given) return 0;
  if (v->kind == V_UNDEFINED) return undefined_used(r, v);
  if (!value_is_whole(v))
    return render_fail(r, "a slice by %s is not supported", value_kind_name(v));
  *i = value_whole(v);
  /* As far as any list goes; keeps sums within 64 bits. */
  const int64_t most = (int64_t)1 << 40;
  *i = *i > most ? most : *i < -most ? -most : *i;
  return 0;
}

static int slice_str(Render *r, const Str *s, int64_t first, int64_t n, int64_t step, Value *out) {
  Value all = value_of_str(*s);
  List *chars;
  StrBuf b = {0};
  if (step == 1) {
    size_t from = n ? char_at(s, first) : 0;
    Str rest = str_cut(s, from, s->len - from);
    *out = value_of_str(str_cut(&rest, 0, char_at(&rest, n)));
    return render_work(r, s->len / 16);
  }
  if (value_walk(r, &all, &chars)) return -1;
  for (int64_t i = 0; i < n; i++)
    if (buf_put(r, &b, &chars->v[first + i * step].s)) return -1;
  *out = value_of_str(buf_str(&b));
  out->s.markup = s->markup;
  return 0;
}

int value_slice(Render *r, const Value *a, const Value bounds[3], Value *out) {
  int64_t at[3] = {0, 0, 1}, first;
  bool given[3];
  for (int i = 0; i < 3; i++)
    if (slice_bound(r, &bounds[i], &at[i], &given[i])) return -1;
  if (at[2] == 0) return render_fail(r, "a slice with step 0");
  if (a->kind == V_UNDEFINED) return undefined_used(r, a);
  bool list = a->kind == V_LIST && a->list->kind <= LIST_RANGE;
  if (!list && a->kind != V_STR)
    return render_fail(r, "a slice of %s is not supported", value_kind_name(a));
  int64_t all = list ? a->list->n : (int64_t)str_count(&a->s);
  int64_t n = slice_plan(all, given[0] ? &at[0] : NULL, given[1] ? &at[1] : NULL, at[2], &first);
  if (!list) return slice_str(r, &a->s, first, n, at[2], out);
  List *l = list_new(r, a->list->kind, n);
  if (!l) return -1;
  for (int64_t i = 0; i < n; i++) l->v[i] = a->list->v[first + i * at[2]];
  *out = value_of_list(l);
  return 0;
}
