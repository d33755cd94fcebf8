/* Values: memory, construction, truth and equality, as Python has them. */
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generation/jinja_value.h"

/* ---- memory ---- */

struct SlabBlock {
  SlabBlock *before;
  _Alignas(16) char bytes[];
};

enum { BLOCK = 1 << 14, BLOCK_MOST = 1 << 20, ALIGN = 16 };

void *slab_take(Slab *s, size_t bytes) {
  bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
  if (bytes > s->size - s->used) {
    size_t size = s->size ? 2 * s->size : BLOCK;
    if (size > BLOCK_MOST) size = BLOCK_MOST;
    if (size < bytes) size = bytes;
    SlabBlock *b = mem_alloc(1, sizeof *b + size);
    *b = (SlabBlock){.before = s->last};
    s->last = b;
    s->used = 0;
    s->size = size;
    s->total += size;
  }
  void *p = s->last->bytes + s->used;
  s->used += bytes;
  return p;
}

void slab_free(Slab *s) {
  for (SlabBlock *b = s->last, *before; b; b = before) {
    before = b->before;
    free(b);
  }
  *s = (Slab){0};
}

/* ---- the render's limits ---- */

int render_fail(Render *r, const char *fmt, ...) {
  char msg[1024];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(msg, sizeof msg, fmt, ap);
  va_end(ap);
  return error_set(r->err, "%s: line %d: %s", r->name, r->line, msg);
}

int render_work(Render *r, size_t n) {
  if (n <= (size_t)(RENDER_WORK - r->work)) {
    r->work += (int64_t)n;
    return 0;
  }
  r->work = RENDER_WORK;
  return render_fail(r, "the template does not come to an end: more than %d steps", RENDER_WORK);
}

int render_room(Render *r, size_t bytes) {
  if (bytes <= RENDER_BYTES && r->slab.total <= RENDER_BYTES - bytes) return 0;
  return render_fail(r, "the template needs more than %d MiB of memory", RENDER_BYTES >> 20);
}

/* ---- making values ---- */

Value value_undefined(const char *name) { return (Value){.kind = V_UNDEFINED, .name = name}; }
Value value_none(void) { return (Value){.kind = V_NONE}; }
Value value_of_bool(bool b) { return (Value){.kind = V_BOOL, .b = b}; }
Value value_of_int(int64_t i) { return (Value){.kind = V_INT, .i = i}; }
Value value_of_float(double f) { return (Value){.kind = V_FLOAT, .f = f}; }
Value value_of_str(Str s) { return (Value){.kind = V_STR, .s = s}; }
Value value_of_list(List *l) { return (Value){.kind = V_LIST, .list = l}; }
Str str_of(const char *text) { return (Str){.text = text, .len = strlen(text)}; }

List *list_new(Render *r, ListKind kind, int64_t n) {
  if (n > INT_MAX / (int64_t)sizeof(Value)) n = INT_MAX / (int64_t)sizeof(Value);
  size_t bytes = (size_t)n * sizeof(Value);
  if (render_room(r, bytes) || render_work(r, (size_t)n)) return NULL;
  List *l = slab_take(&r->slab, sizeof *l);
  *l = (List){kind, (int)n, slab_take(&r->slab, bytes)};
  return l;
}

Dict *dict_new(Render *r) {
  Dict *d = slab_take(&r->slab, sizeof *d);
  *d = (Dict){0};
  return d;
}

static Pair *find_pair(Render *r, const Dict *d, const Value *key) {
  for (int i = 0; i < d->n; i++)
    if (value_equal(r, &d->pair[i].key, key)) return &d->pair[i];
  return NULL;
}

const Value *dict_find(Render *r, const Dict *d, const Value *key) {
  const Pair *p = find_pair(r, d, key);
  return p ? &p->value : NULL;
}

const Value *dict_get(const Dict *d, const char *key) {
  for (int i = 0; i < d->n; i++)
    if (d->pair[i].key.kind == V_STR && str_is(&d->pair[i].key.s, key)) return &d->pair[i].value;
  return NULL;
}

int dict_put(Render *r, Dict *d, Value key, Value value) {
  if (key.kind == V_UNDEFINED || key.kind >= V_LIST)
    return render_fail(r, "%s cannot be a key", value_kind_name(&key));
  if (render_work(r, (size_t)d->n)) return -1;
  Pair *p = find_pair(r, d, &key);
  if (p) {
    p->value = value;
    return 0;
  }
  if (d->n == d->cap) {
    int cap = d->cap ? 2 * d->cap : 4;
    if (render_room(r, (size_t)cap * sizeof *p)) return -1;
    p = slab_take(&r->slab, (size_t)cap * sizeof *p);
    if (d->n) memcpy(p, d->pair, (size_t)d->n * sizeof *p);
    d->pair = p;
    d->cap = cap;
  }
  d->pair[d->n++] = (Pair){key, value};
  return 0;
}

/* ---- asking values ---- */

const char *value_kind_name(const Value *v) {
  static const char *const names[] = {"nothing",  "undefined", "none",      "a boolean", "a number",
                                      "a number", "a string",  "a list",    "a mapping", "a space",
                                      "a loop",   "a macro",   "a function"};
  return v->kind == V_SPACE ? "a namespace" : names[v->kind];
}

bool value_is_number(const Value *v) {
  return v->kind == V_BOOL || v->kind == V_INT || v->kind == V_FLOAT;
}

bool value_truth(const Value *v) {
  switch (v->kind) {
    case V_ABSENT:
    case V_UNDEFINED:
    case V_NONE:
      return false;
    case V_BOOL:
      return v->b;
    case V_INT:
      return v->i != 0;
    case V_FLOAT:
      return v->f != 0;
    case V_STR:
      return v->s.len > 0;
    case V_LIST:
      return v->list->n > 0 || v->list->kind == LIST_LAZY;
    case V_DICT:
      return v->dict->n > 0;
    default:
      return true;
  }
}

bool str_equal(const Str *a, const Str *b) {
  return a->len == b->len && (a->len == 0 || memcmp(a->text, b->text, a->len) == 0);
}

bool str_is(const Str *s, const char *text) {
  Str other = str_of(text);
  return str_equal(s, &other);
}

static double as_float(const Value *v) {
  return v->kind == V_FLOAT ? v->f : v->kind == V_INT ? (double)v->i : (double)v->b;
}

static bool numbers_equal(const Value *a, const Value *b) {
  if (a->kind == V_FLOAT || b->kind == V_FLOAT) return as_float(a) == as_float(b);
  return (a->kind == V_INT ? a->i : a->b) == (b->kind == V_INT ? b->i : b->b);
}

static bool lists_equal(Render *r, const List *a, const List *b) {
  if (a == b) return true;
  if (a->kind != b->kind || a->n != b->n || a->kind == LIST_LAZY || a->kind == LIST_VIEW)
    return false;
  for (int i = 0; i < a->n; i++)
    if (!value_equal(r, &a->v[i], &b->v[i])) return false;
  return true;
}

static bool dicts_equal(Render *r, const Dict *a, const Dict *b) {
  if (a->n != b->n) return false;
  for (int i = 0; i < a->n; i++) {
    const Value *other = dict_find(r, b, &a->pair[i].key);
    if (!other || !value_equal(r, &a->pair[i].value, other)) return false;
  }
  return true;
}

static bool kinds_equal(Render *r, const Value *a, const Value *b) {
  switch (a->kind) {
    case V_STR:
      return str_equal(&a->s, &b->s);
    case V_LIST:
      return lists_equal(r, a->list, b->list);
    case V_DICT:
      return dicts_equal(r, a->dict, b->dict);
    case V_SPACE:
      return a->dict == b->dict;
    case V_LOOP:
      return a->loop == b->loop;
    case V_MACRO:
      return a->macro == b->macro;
    case V_BUILTIN:
      return a->method->row == b->method->row && value_equal(r, &a->method->self, &b->method->self);
    default: /* absent, undefined, none */
      return true;
  }
}

/* Too deep or too much work reads as different here, and the render fails at its next step. */
bool value_equal(Render *r, const Value *a, const Value *b) {
  if (value_is_number(a) && value_is_number(b)) return numbers_equal(a, b);
  size_t work = a->kind == V_STR ? a->s.len / 16 + 1 : 1;
  if (r->depth >= RENDER_DEPTH) work = RENDER_WORK;
  if (a->kind != b->kind || render_work(r, work)) return false;
  r->depth++;
  bool equal = kinds_equal(r, a, b);
  r->depth--;
  return equal;
}

/* ---- walking ---- */

static List *walk_str(Render *r, const Str *s) {
  List *l = list_new(r, LIST_PLAIN, (int64_t)str_count(s));
  if (!l) return NULL;
  for (size_t at = 0, step, i = 0; at < s->len; at += step, i++) {
    step = utf8_step(s->text + at, s->len - at);
    l->v[i] = value_of_str(str_cut(s, at, step));
  }
  return l;
}

static List *walk_dict(Render *r, const Dict *d) {
  List *l = list_new(r, LIST_PLAIN, d->n);
  for (int i = 0; l && i < d->n; i++) l->v[i] = d->pair[i].key;
  return l;
}

static List *walk_list(Render *r, List *l) {
  if (l->kind != LIST_LAZY) return l;
  List *all = slab_take(&r->slab, sizeof *all);
  *all = (List){LIST_PLAIN, l->n, l->v};
  l->n = 0;
  return all;
}

int value_walk(Render *r, const Value *v, List **out) {
  *out = NULL;
  if (v->kind == V_LIST) *out = walk_list(r, v->list);
  if (v->kind == V_STR) *out = walk_str(r, &v->s);
  if (v->kind == V_DICT) *out = walk_dict(r, v->dict);
  if (v->kind == V_UNDEFINED) *out = list_new(r, LIST_PLAIN, 0);
  if (*out) return 0;
  if (v->kind == V_STR || v->kind == V_DICT || v->kind == V_UNDEFINED) return -1;
  return render_fail(r, "%s cannot be walked through; expected a list", value_kind_name(v));
}
