/* YAML text to a tree of nodes that know their place. Private to the recipe.
 *
 * Aliases share nodes (a tree may be a graph without cycles, so a "billion laughs" file stays
 * small), merge keys are resolved (explicit keys win over merged ones, earlier maps of a list over
 * later ones), and a key that occurs twice in one map is a problem. Depth, keys per map and keys
 * in all are limited, so time and memory stay linear in the text. */
#ifndef CORE_RECIPE_YAML_H
#define CORE_RECIPE_YAML_H

#include <stddef.h>

#include "core/error.h"

/* Owner of everything that lives as long as one recipe. */
typedef struct Pool {
  void **v;
  size_t n, cap;
} Pool;
void *pool_alloc(Pool *p, size_t bytes); /* zeroed */
char *pool_text(Pool *p, const char *s, size_t len);
char *pool_printf(Pool *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void pool_free(Pool *p);

typedef enum NodeKind { NODE_SCALAR, NODE_LIST, NODE_MAP } NodeKind;
typedef struct Node Node;
struct Node {
  NodeKind kind;
  const char *origin; /* NULL: the file; else "--set a.b=c" */
  int line, column;   /* 1-based; 0: no place (made by --set) */
  char *text;         /* scalars: NUL-terminated, len bytes (which may hold a NUL) */
  size_t len;
  bool plain; /* neither quoted nor tagged as text: may be null, a number, a boolean */
  bool open;  /* being read: an alias to it would be a cycle */
  size_t n;   /* children */
  size_t cap;
  Node **keys;  /* maps: scalars */
  Node **items; /* values of maps, elements of lists */
};

/* Problems found, each with its place; printed sorted by place, all at once. */
typedef struct Problem {
  const char *origin;
  int line, column, order;
  char *text;
} Problem;
typedef struct Problems {
  const char *file;
  Problem *v;
  int n, cap, uncounted; /* uncounted: beyond the most that are kept */
} Problems;
/* where: NULL when there is no place, only the file. */
void problem_add(Problems *p, const Node *where, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* One per line, the file's by line and column first, then those of --set in order; equal ones once,
 * and what does not fit in an Error counted at the end. Returns -1. */
int problems_report(Problems *p, Error *err);
void problems_free(Problems *p);
/* A text in quotes for a message: control characters escaped, cut behind about 60 bytes. */
typedef struct Quoted {
  char s[320];
} Quoted;
Quoted text_quote(const char *s, size_t len);

/* The root node, or NULL when the text is not YAML (a problem was added). An empty document is a
 * null scalar. origin as in Node. */
Node *yaml_read(Pool *pool, Problems *problems, const char *origin, const char *text, size_t len);

/* The value of a key in a map, or NULL. */
Node *node_get(const Node *map, const char *key);
void node_push(Pool *pool, Node *n, Node *key, Node *value); /* key NULL for lists */
Node *node_new(Pool *pool, NodeKind kind, const char *origin);
Node *node_copy(Pool *pool, const Node *n); /* its children are shared */
bool node_is_null(const Node *n);

#endif
