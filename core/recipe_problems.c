/* The pool that owns a recipe's memory, and the list of problems found while reading it. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/recipe_yaml.h"

static void pool_keep(Pool *p, void *v) {
  if (p->n == p->cap) {
    p->cap = p->cap ? p->cap * 2 : 64;
    p->v = mem_grow(p->v, p->cap, sizeof *p->v);
  }
  p->v[p->n++] = v;
}

void *pool_alloc(Pool *p, size_t bytes) {
  void *v = mem_zalloc(bytes ? bytes : 1, 1);
  pool_keep(p, v);
  return v;
}

char *pool_text(Pool *p, const char *s, size_t len) {
  char *v = pool_alloc(p, len + 1);
  if (len) memcpy(v, s, len);
  return v;
}

static char *format(const char *fmt, va_list ap) {
  va_list again;
  va_copy(again, ap);
  int n = vsnprintf(NULL, 0, fmt, again);
  va_end(again);
  require(n >= 0);
  char *s = mem_alloc((size_t)n + 1, 1);
  vsnprintf(s, (size_t)n + 1, fmt, ap);
  return s;
}

char *pool_printf(Pool *p, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  char *s = format(fmt, ap);
  va_end(ap);
  pool_keep(p, s);
  return s;
}

void pool_free(Pool *p) {
  for (size_t i = 0; i < p->n; i++) free(p->v[i]);
  free(p->v);
  *p = (Pool){0};
}

void problem_add(Problems *p, const Node *where, const char *fmt, ...) {
  enum { MOST = 1000 };
  if (p->n == MOST) {
    p->uncounted++;
    return;
  }
  if (p->n == p->cap) {
    p->cap = p->cap ? p->cap * 2 : 16;
    p->v = mem_grow(p->v, (size_t)p->cap, sizeof *p->v);
  }
  va_list ap;
  va_start(ap, fmt);
  Problem *q = &p->v[p->n];
  *q = (Problem){.order = p->n, .text = format(fmt, ap)};
  va_end(ap);
  if (where) {
    q->origin = where->origin;
    q->line = where->line;
    q->column = where->column;
  }
  p->n++;
}

static int problem_compare(const void *a, const void *b) {
  const Problem *x = a, *y = b;
  int set_x = x->origin != NULL, set_y = y->origin != NULL;
  if (set_x != set_y) return set_x - set_y;
  if (!set_x && x->line != y->line) return x->line < y->line ? -1 : 1;
  if (!set_x && x->column != y->column) return x->column < y->column ? -1 : 1;
  return x->order < y->order ? -1 : x->order > y->order;
}

static char *problem_line(const Problems *p, const Problem *q) {
  if (q->origin) return mem_printf("%s: %s", q->origin, q->text);
  if (q->line) return mem_printf("%s:%d:%d: %s", p->file, q->line, q->column, q->text);
  return mem_printf("%s: %s", p->file, q->text);
}

int problems_report(Problems *p, Error *err) {
  enum { TAIL = 48 }; /* room for the count of those that did not fit */
  if (!err) return -1;
  qsort(p->v, (size_t)p->n, sizeof *p->v, problem_compare);
  size_t used = 0, room = sizeof err->msg - TAIL;
  char *last = NULL;
  int left_out = p->uncounted;
  err->msg[0] = 0;
  for (int i = 0; i < p->n; i++) {
    char *line = problem_line(p, &p->v[i]);
    size_t len = strlen(line);
    if (last && !strcmp(last, line)) {
      free(line);
      continue;
    }
    if (left_out > p->uncounted || used + len + 1 >= room) {
      /* A first message that is too long alone is cut; later ones are counted. */
      if (used == 0)
        used += (size_t)snprintf(err->msg, room, "%.*s", (int)room - 1, line);
      else
        left_out++;
    } else {
      used += (size_t)snprintf(err->msg + used, room - used, "%s%s", used ? "\n" : "", line);
    }
    free(last);
    last = line;
  }
  free(last);
  if (left_out)
    snprintf(err->msg + used, sizeof err->msg - used, "\nand %d more problems", left_out);
  return -1;
}

/* Bytes of the UTF-8 character that starts at s; 0 for what is none. */
static size_t utf8_len(const char *s, size_t left) {
  unsigned char c = (unsigned char)s[0];
  size_t n = c < 0x80 ? 1 : c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 0;
  if (n > left) return 0;
  for (size_t i = 1; i < n; i++)
    if (((unsigned char)s[i] & 0xC0) != 0x80) return 0;
  return n;
}

Quoted text_quote(const char *s, size_t len) {
  enum { MOST = 60 };
  Quoted q = {"\""};
  size_t used = 1, i = 0;
  while (i < len && i < MOST) {
    unsigned char c = (unsigned char)s[i];
    size_t n = utf8_len(s + i, len - i);
    if (!n || c < 0x20 || c == 0x7F) {
      used += (size_t)snprintf(q.s + used, sizeof q.s - used, "\\x%02X", c);
    } else {
      memcpy(q.s + used, s + i, n);
      used += n;
    }
    i += n ? n : 1;
  }
  snprintf(q.s + used, sizeof q.s - used, "\"%s", i < len ? "..." : "");
  return q;
}

void problems_free(Problems *p) {
  for (int i = 0; i < p->n; i++) free(p->v[i].text);
  free(p->v);
  *p = (Problems){0};
}
