/* The YAML reader: libyaml's events to a tree of nodes. See recipe_yaml.h. */
#include "core/recipe_yaml.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

enum { MAX_DEPTH = 64, MAX_KEYS = 1024, MAX_KEYS_IN_ALL = 1000000, MAX_MERGED = 64 };

typedef struct Anchor {
  char *name;
  Node *node;
} Anchor;

typedef struct Reader {
  yaml_parser_t parser;
  yaml_event_t event; /* the current one, owned */
  bool has_event, failed;
  Pool *pool;
  Problems *problems;
  const char *origin, *text;
  Anchor *anchors;
  size_t n_anchors, cap_anchors;
  int depth;
  int64_t keys;
} Reader;

Node *node_new(Pool *pool, NodeKind kind, const char *origin) {
  Node *n = pool_alloc(pool, sizeof *n);
  n->kind = kind;
  n->origin = origin;
  if (kind == NODE_SCALAR) {
    n->text = pool_text(pool, "", 0);
    n->plain = true;
  }
  return n;
}

static void *grow_copy(Pool *pool, const void *old, size_t n, size_t cap, size_t size) {
  void *v = pool_alloc(pool, cap * size);
  if (n) memcpy(v, old, n * size);
  return v;
}

void node_push(Pool *pool, Node *n, Node *key, Node *value) {
  if (n->n == n->cap) {
    size_t cap = n->cap ? n->cap * 2 : 8;
    if (n->kind == NODE_MAP)
      n->keys = (Node **)grow_copy(pool, (const void *)n->keys, n->n, cap, sizeof(Node *));
    n->items = (Node **)grow_copy(pool, (const void *)n->items, n->n, cap, sizeof(Node *));
    n->cap = cap;
  }
  if (n->kind == NODE_MAP) n->keys[n->n] = key;
  n->items[n->n++] = value;
}

Node *node_copy(Pool *pool, const Node *n) {
  Node *c = pool_alloc(pool, sizeof *c);
  *c = *n;
  c->cap = c->n;
  if (c->n && c->keys)
    c->keys = (Node **)grow_copy(pool, (const void *)n->keys, n->n, n->n, sizeof(Node *));
  if (c->n) c->items = (Node **)grow_copy(pool, (const void *)n->items, n->n, n->n, sizeof(Node *));
  return c;
}

static bool same_text(const Node *a, const Node *b) {
  return a->len == b->len && !memcmp(a->text, b->text, a->len);
}

static Node *get(const Node *map, const Node *key) {
  for (size_t i = 0; i < map->n; i++)
    if (same_text(map->keys[i], key)) return map->items[i];
  return NULL;
}

Node *node_get(const Node *map, const char *key) {
  size_t len = strlen(key);
  if (map->kind != NODE_MAP) return NULL;
  for (size_t i = 0; i < map->n; i++)
    if (map->keys[i]->len == len && !memcmp(map->keys[i]->text, key, len)) return map->items[i];
  return NULL;
}

bool node_is_null(const Node *n) {
  static const char *const words[] = {"", "~", "null", "Null", "NULL"};
  if (n->kind != NODE_SCALAR || !n->plain || n->len != strlen(n->text)) return false;
  for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
    if (!strcmp(n->text, words[i])) return true;
  return false;
}

/* ---- events ---- */

static Node mark_node(const Reader *r, yaml_mark_t m) {
  return (Node){.origin = r->origin, .line = (int)m.line + 1, .column = (int)m.column + 1};
}

/* The reader's own errors (bad UTF-8, control characters) come with a byte offset only. */
static yaml_mark_t mark_of_offset(const char *text, size_t offset) {
  yaml_mark_t m = {0};
  for (size_t i = 0; i < offset; i++) {
    if (text[i] == '\n') {
      m.line++;
      m.column = 0;
    } else if (((unsigned char)text[i] & 0xC0) != 0x80) {
      m.column++;
    }
  }
  return m;
}

static void fail_syntax(Reader *r) {
  const yaml_parser_t *p = &r->parser;
  const char *what = p->problem ? p->problem : "out of memory";
  r->failed = true;
  if (p->error == YAML_READER_ERROR) {
    Node at = mark_node(r, mark_of_offset(r->text, p->problem_offset));
    if (p->problem_value >= 0)
      problem_add(r->problems, &at, "not YAML: %s: found 0x%02X", what, (unsigned)p->problem_value);
    else
      problem_add(r->problems, &at, "not YAML: %s", what);
    return;
  }
  Node at = mark_node(r, p->problem_mark);
  if (p->context)
    problem_add(r->problems, &at, "not YAML: %s, %s at line %zu", what, p->context,
                p->context_mark.line + 1);
  else
    problem_add(r->problems, &at, "not YAML: %s", what);
}

static void fail_at(Reader *r, yaml_mark_t m, const char *what) {
  Node at = mark_node(r, m);
  problem_add(r->problems, &at, "%s", what);
  r->failed = true;
}

static void drop_event(Reader *r) {
  if (r->has_event) yaml_event_delete(&r->event);
  r->has_event = false;
}

static bool next_event(Reader *r) {
  drop_event(r);
  if (r->failed) return false;
  if (!yaml_parser_parse(&r->parser, &r->event)) {
    fail_syntax(r);
    return false;
  }
  r->has_event = true;
  return true;
}

/* ---- nodes ---- */

static void anchor_set(Reader *r, const yaml_char_t *name, Node *n) {
  if (!name) return;
  if (r->n_anchors == MAX_KEYS) {
    fail_at(r, r->event.start_mark, "more than 1024 anchors");
    return;
  }
  if (r->n_anchors == r->cap_anchors) {
    r->cap_anchors = r->cap_anchors ? r->cap_anchors * 2 : 16;
    r->anchors = mem_grow(r->anchors, r->cap_anchors, sizeof *r->anchors);
  }
  r->anchors[r->n_anchors++] =
      (Anchor){pool_text(r->pool, (const char *)name, strlen((const char *)name)), n};
}

static Node *node_at(Reader *r, NodeKind kind) {
  Node *n = node_new(r->pool, kind, r->origin);
  n->line = (int)r->event.start_mark.line + 1;
  n->column = (int)r->event.start_mark.column + 1;
  return n;
}

/* A later anchor of the same name replaces the earlier one. */
static Node *read_alias(Reader *r) {
  const char *name = (const char *)r->event.data.alias.anchor;
  Node *here = node_at(r, NODE_SCALAR);
  for (size_t i = r->n_anchors; i-- > 0;) {
    if (strcmp(r->anchors[i].name, name) != 0) continue;
    if (!r->anchors[i].node->open) return r->anchors[i].node;
    problem_add(r->problems, here, "found alias *%.40s inside its own anchor", name);
    return here;
  }
  problem_add(r->problems, here, "found alias *%.40s; expected an anchor &%.40s before it", name,
              name);
  return here;
}

/* Tags that only repeat what the place means are fine; any other would be passed over in silence.
 */
static bool tag_is(const yaml_char_t *tag, const char *type) {
  static const char prefix[] = "tag:yaml.org,2002:";
  const char *t = (const char *)tag;
  return !strncmp(t, prefix, sizeof prefix - 1) && !strcmp(t + sizeof prefix - 1, type);
}

static void refuse_tag(Reader *r, const Node *n, const yaml_char_t *tag) {
  const char *t = (const char *)tag;
  problem_add(r->problems, n, "found the tag %s; expected none", text_quote(t, strlen(t)).s);
}

static Node *read_scalar(Reader *r) {
  Node *n = node_at(r, NODE_SCALAR);
  const yaml_char_t *tag = r->event.data.scalar.tag;
  n->text =
      pool_text(r->pool, (const char *)r->event.data.scalar.value, r->event.data.scalar.length);
  n->len = r->event.data.scalar.length;
  if (!tag) {
    n->plain = r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
  } else {
    n->plain =
        tag_is(tag, "int") || tag_is(tag, "float") || tag_is(tag, "bool") || tag_is(tag, "null");
    if (!n->plain && !tag_is(tag, "str") && strcmp((const char *)tag, "!") != 0)
      refuse_tag(r, n, tag);
  }
  anchor_set(r, r->event.data.scalar.anchor, n);
  return n;
}

static Node *read_node(Reader *r);

static Node *read_list(Reader *r) {
  Node *list = node_at(r, NODE_LIST);
  const yaml_char_t *tag = r->event.data.sequence_start.tag;
  if (tag && !tag_is(tag, "seq")) refuse_tag(r, list, tag);
  anchor_set(r, r->event.data.sequence_start.anchor, list);
  list->open = true;
  while (next_event(r) && r->event.type != YAML_SEQUENCE_END_EVENT) {
    Node *item = read_node(r);
    if (item) node_push(r->pool, list, NULL, item);
  }
  list->open = false;
  return list;
}

static bool count_key(Reader *r) {
  if (++r->keys <= MAX_KEYS_IN_ALL) return true;
  fail_at(r, r->parser.mark, "more than 1000000 keys");
  return false;
}

static void merge_from(Reader *r, Node *map, const Node *key, const Node *from) {
  if (from->kind != NODE_MAP) {
    problem_add(r->problems, key, "found \"<<\" without a map; expected a map, or a list of maps");
    return;
  }
  for (size_t i = 0; i < from->n; i++) {
    if (!count_key(r)) return;
    if (!get(map, from->keys[i])) node_push(r->pool, map, from->keys[i], from->items[i]);
  }
}

/* Merged keys come last, so that explicit ones win wherever "<<" stands. */
static void merge_into(Reader *r, Node *map, const Node *key, const Node *value) {
  if (value->kind != NODE_LIST) {
    merge_from(r, map, key, value);
    return;
  }
  if (value->n > MAX_MERGED) {
    problem_add(r->problems, key, "found %zu maps to merge; expected at most 64", value->n);
    return;
  }
  for (size_t i = 0; i < value->n && !r->failed; i++) merge_from(r, map, key, value->items[i]);
}

static void put_key(Reader *r, Node *map, Node *key, Node *value) {
  if (key->kind != NODE_SCALAR) {
    problem_add(r->problems, key, "found a %s as a key; expected a name",
                key->kind == NODE_LIST ? "list" : "map");
  } else if (!key->len || strlen(key->text) != key->len) {
    problem_add(r->problems, key, "found %s as a key; expected a name",
                key->len ? "a text with a NUL byte" : "an empty text");
  } else if (get(map, key)) {
    problem_add(r->problems, key, "found the key %s twice in one map; expected it once",
                text_quote(key->text, key->len).s);
  } else if (map->n == MAX_KEYS) {
    problem_add(r->problems, map, "more than 1024 keys in one map");
    r->failed = true;
  } else if (count_key(r)) {
    node_push(r->pool, map, key, value);
  }
}

static Node *read_map(Reader *r) {
  Node *map = node_at(r, NODE_MAP), *merge_key = NULL, *merge_value = NULL;
  const yaml_char_t *tag = r->event.data.mapping_start.tag;
  if (tag && !tag_is(tag, "map")) refuse_tag(r, map, tag);
  anchor_set(r, r->event.data.mapping_start.anchor, map);
  map->open = true;
  while (next_event(r) && r->event.type != YAML_MAPPING_END_EVENT) {
    Node *key = read_node(r);
    if (!next_event(r)) break;
    Node *value = read_node(r);
    if (!key || !value) break;
    bool merge = key->kind == NODE_SCALAR && key->plain && !strcmp(key->text, "<<");
    if (merge && merge_key) {
      problem_add(r->problems, key, "found \"<<\" twice in one map; expected one with a list");
    } else if (merge) {
      merge_key = key;
      merge_value = value;
    } else {
      put_key(r, map, key, value);
    }
  }
  if (merge_key && !r->failed) merge_into(r, map, merge_key, merge_value);
  map->open = false;
  return map;
}

/* The node that the current event starts; NULL after a failure. */
static Node *read_node(Reader *r) {
  Node *n = NULL;
  if (r->depth == MAX_DEPTH) {
    fail_at(r, r->event.start_mark, "nested deeper than 64 levels");
    return NULL;
  }
  r->depth++;
  switch (r->event.type) {
    case YAML_ALIAS_EVENT:
      n = read_alias(r);
      break;
    case YAML_SCALAR_EVENT:
      n = read_scalar(r);
      break;
    case YAML_SEQUENCE_START_EVENT:
      n = read_list(r);
      break;
    case YAML_MAPPING_START_EVENT:
      n = read_map(r);
      break;
    default:
      die("libyaml gave event %d inside a document", (int)r->event.type);
  }
  r->depth--;
  return r->failed ? NULL : n;
}

static bool skip_events(Reader *r, int n) {
  for (int i = 0; i < n; i++)
    if (!next_event(r)) return false;
  return true;
}

static Node *read_stream(Reader *r) {
  if (!skip_events(r, 2)) return NULL; /* the stream's start, the document's start or no document */
  if (r->event.type == YAML_STREAM_END_EVENT) return node_new(r->pool, NODE_SCALAR, r->origin);
  if (!next_event(r)) return NULL;
  Node *root = read_node(r);
  if (!root || !skip_events(r, 2)) return NULL; /* the document's end, the stream's end */
  if (r->event.type == YAML_STREAM_END_EVENT) return root;
  fail_at(r, r->event.start_mark, "found a second document; expected one");
  return NULL;
}

Node *yaml_read(Pool *pool, Problems *problems, const char *origin, const char *text, size_t len) {
  Reader r = {.pool = pool, .problems = problems, .origin = origin, .text = text};
  if (!yaml_parser_initialize(&r.parser)) die("out of memory in libyaml");
  yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, len);
  Node *root = read_stream(&r);
  drop_event(&r);
  yaml_parser_delete(&r.parser);
  free(r.anchors);
  return root;
}
