/* Which keys two recipes differ in, from their printed forms (recipe_print): a key a line, two
 * spaces a level, items of lists behind "- ". */
#include <stdlib.h>
#include <string.h>

#include "core/error.h"
#include "orchestrator/train_session.h"

enum { DEPTH = 8, NAMED = 4, KEY = 128 };

typedef struct Line {
  char key[KEY]; /* "rewards.0.weight" */
  const char *value;
  size_t len;
} Line;

typedef struct Lines {
  Line *v;
  size_t n;
} Lines;

/* Where the walk over the lines is: the name at each level, and the items that its list has had. */
typedef struct Place {
  char name[DEPTH][KEY / DEPTH + 16];
  int items[DEPTH];
} Place;

static void name_key(const Place *at, int level, char *key) {
  size_t used = 0;
  key[0] = '\0';
  for (int i = 0; i <= level && used < KEY; i++)
    used += (size_t)snprintf(key + used, KEY - used, "%s%s", i ? "." : "", at->name[i]);
}

static void add_line(Lines *all, Place *at, const char *text, size_t len) {
  size_t indent = 0;
  while (indent < len && text[indent] == ' ') indent++;
  int level = (int)(indent / 2) < DEPTH - 2 ? (int)(indent / 2) : DEPTH - 2;
  if (len - indent >= 2 && !memcmp(text + indent, "- ", 2)) {
    snprintf(at->name[level], sizeof at->name[level], "%d", level > 0 ? at->items[level - 1]++ : 0);
    indent += 2;
    level++;
  }
  const char *colon = memchr(text + indent, ':', len - indent);
  size_t name = colon ? (size_t)(colon - text) - indent : len - indent;
  snprintf(at->name[level], sizeof at->name[level], "%.*s", (int)(name < KEY ? name : KEY),
           text + indent);
  at->items[level] = 0;
  if ((all->n & (all->n - 1)) == 0)
    all->v = mem_grow(all->v, all->n ? 2 * all->n : 1, sizeof *all->v);
  Line *line = &all->v[all->n++];
  name_key(at, level, line->key);
  line->value = colon ? colon : text + len;
  line->len = (size_t)(text + len - line->value);
}

static Lines read_lines(const char *text, size_t len) {
  Lines all = {0};
  Place at = {0};
  for (size_t from = 0; from < len;) {
    const char *end = memchr(text + from, '\n', len - from);
    size_t n = end ? (size_t)(end - text) - from : len - from;
    if (n > 0) add_line(&all, &at, text + from, n);
    from += n + 1;
  }
  return all;
}

static bool has(const Lines *all, const Line *x, bool value_too) {
  for (size_t i = 0; i < all->n; i++) {
    const Line *y = &all->v[i];
    if (!strcmp(x->key, y->key))
      return !value_too || (x->len == y->len && !memcmp(x->value, y->value, x->len));
  }
  return false;
}

/* But for where the run is, and whether it replaced another: these say nothing of what it is. */
static void note(const char *key, int *n, char *out, size_t size) {
  if (!strcmp(key, "run.directory") || !strcmp(key, "run.overwrite")) return;
  size_t used = strlen(out);
  if ((*n)++ < NAMED) snprintf(out + used, size - used, "%s%s", used ? ", " : "", key);
}

void recipe_changes(const char *old, size_t old_len, const char *new, size_t new_len, char *out,
                    size_t size) {
  Lines a = read_lines(old, old_len), b = read_lines(new, new_len);
  int n = 0;
  out[0] = '\0';
  for (size_t i = 0; i < b.n; i++)
    if (!has(&a, &b.v[i], true)) note(b.v[i].key, &n, out, size);
  for (size_t i = 0; i < a.n; i++)
    if (!has(&b, &a.v[i], false)) note(a.v[i].key, &n, out, size);
  size_t used = strlen(out);
  if (n > NAMED) snprintf(out + used, size - used, " and %d more", n - NAMED);
  free(a.v);
  free(b.v);
}
