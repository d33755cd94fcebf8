/* Changes to the tree before it is bound: bare texts that stand for maps, and --set. */
#include <string.h>

#include "core/recipe_read.h"

/* ---- `actor: DIR` for `actor: {path: DIR}` ---- */

static void normalize_at(Reading *rd, Node *map, const char *path) {
  Pool *pool = &rd->box->pool;
  for (size_t i = 0; i < map->n; i++) {
    Node *value = map->items[i];
    const char *below =
        *path ? pool_printf(pool, "%s.%.200s", path, map->keys[i]->text) : map->keys[i]->text;
    const RecipeGroup *g = key_group(below);
    if (g && g->short_key && value->kind == NODE_SCALAR && !node_is_null(value)) {
      Node *whole = node_new(pool, NODE_MAP, value->origin), *key = node_copy(pool, value);
      key->text = pool_text(pool, g->short_key, strlen(g->short_key));
      key->len = strlen(g->short_key);
      whole->line = value->line;
      whole->column = value->column;
      node_push(pool, whole, key, value);
      map->items[i] = whole;
    } else if (value->kind == NODE_MAP && key_is_section(below)) {
      map->items[i] = node_copy(pool, value);
      normalize_at(rd, map->items[i], below);
    }
  }
}

static void normalize_terms(Reading *rd, Node *root) {
  Pool *pool = &rd->box->pool;
  const char *kind = recipe_term_group()->short_key;
  for (size_t i = 0; i < root->n; i++) {
    if (strcmp(root->keys[i]->text, "rewards") != 0 || root->items[i]->kind != NODE_LIST) continue;
    Node *list = root->items[i] = node_copy(pool, root->items[i]);
    for (size_t k = 0; k < list->n; k++) {
      Node *term = list->items[k];
      if (term->kind != NODE_SCALAR || node_is_null(term)) continue;
      Node *whole = node_new(pool, NODE_MAP, term->origin), *key = node_copy(pool, term);
      key->text = pool_text(pool, kind, strlen(kind));
      key->len = strlen(kind);
      whole->line = term->line;
      whole->column = term->column;
      node_push(pool, whole, key, term);
      list->items[k] = whole;
    }
  }
}

void tree_normalize(Reading *rd, Node *root) {
  if (root->kind != NODE_MAP) return;
  normalize_at(rd, root, "");
  normalize_terms(rd, root);
}

/* ---- --set ---- */

/* The slot of `name` in a map, added when it is not there. */
static Node **map_slot(Reading *rd, Node *map, const Node *place, const char *name, size_t len) {
  Pool *pool = &rd->box->pool;
  for (size_t i = 0; i < map->n; i++)
    if (map->keys[i]->len == len && !memcmp(map->keys[i]->text, name, len)) {
      map->keys[i] = node_copy(pool, map->keys[i]);
      map->keys[i]->origin = place->origin;
      return &map->items[i];
    }
  Node *key = node_new(pool, NODE_SCALAR, place->origin);
  key->text = pool_text(pool, name, len);
  key->len = len;
  node_push(pool, map, key, node_new(pool, NODE_SCALAR, place->origin));
  return &map->items[map->n - 1];
}

/* The slot of element `name` of a list; the one behind the last is added. NULL: a problem. */
static Node **list_slot(Reading *rd, Node *list, const Node *place, const char *name, size_t len) {
  size_t index = 0;
  bool number = len > 0 && len < 6;
  for (size_t i = 0; i < len && number; i++) {
    number = name[i] >= '0' && name[i] <= '9';
    index = index * 10 + (size_t)(name[i] - '0');
  }
  if (!number || index > list->n) {
    problem_add(&rd->problems, place, "found element %s of a list of %zu; expected 0 to %zu",
                text_quote(name, len).s, list->n, list->n);
    return NULL;
  }
  if (index == list->n)
    node_push(&rd->box->pool, list, NULL, node_new(&rd->box->pool, NODE_SCALAR, place->origin));
  return &list->items[index];
}

/* Nodes on the way are copied, since aliases share them: a change at one place stays there. */
static void assign(Reading *rd, Node **slot, const Node *place, const char *path, size_t len,
                   Node *value) {
  Pool *pool = &rd->box->pool;
  for (const char *end = path + len; path < end;) {
    const char *dot = memchr(path, '.', (size_t)(end - path));
    size_t n = (size_t)((dot ? dot : end) - path);
    if ((*slot)->kind == NODE_SCALAR)
      *slot = node_new(pool, NODE_MAP, place->origin);
    else
      *slot = node_copy(pool, *slot);
    slot = (*slot)->kind == NODE_LIST ? list_slot(rd, *slot, place, path, n)
                                      : map_slot(rd, *slot, place, path, n);
    if (!slot) return;
    path += n + (dot != NULL);
  }
  *slot = value;
}

void tree_set(Reading *rd, Node **root, const char *assignment) {
  Pool *pool = &rd->box->pool;
  Quoted q = text_quote(assignment, strlen(assignment));
  size_t quoted = strlen(q.s);
  bool cut = quoted > 3 && q.s[quoted - 1] == '.';
  /* Without the quotes: `--set ppo.epochs=2`. */
  const char *origin =
      pool_printf(pool, "--set %.*s%s", (int)(quoted - (cut ? 5 : 2)), q.s + 1, cut ? "..." : "");
  Node place = {.origin = origin};
  const char *equals = strchr(assignment, '=');
  bool named = equals && equals > assignment && assignment[0] != '.' && equals[-1] != '.' &&
               !memmem(assignment, (size_t)(equals - assignment), "..", 2);
  if (!named) {
    problem_add(&rd->problems, &place, "expected KEY=VALUE, as in ppo.epochs=2");
    return;
  }
  Node *value = yaml_read(pool, &rd->problems, origin, equals + 1, strlen(equals + 1));
  if (!value) return;
  assign(rd, root, &place, assignment, (size_t)(equals - assignment), value);
  tree_normalize(rd, *root);
}
