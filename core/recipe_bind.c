/* Binding: defaults, then the values of the tree, into the struct by the table's offsets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/recipe_read.h"

const Node *given_find(const RecipeBox *box, const char *path) {
  for (int i = 0; i < box->n_given; i++)
    if (!strcmp(box->given[i].path, path)) return box->given[i].value;
  return NULL;
}

static void give(RecipeBox *box, const char *path, const Node *value) {
  if (box->n_given == box->cap_given) {
    box->cap_given = box->cap_given ? box->cap_given * 2 : 64;
    box->given = mem_grow(box->given, (size_t)box->cap_given, sizeof *box->given);
  }
  box->given[box->n_given++] = (Given){path, value, false};
}

/* ---- one value ---- */

/* What the spelling of a number suggests was meant. */
static const char *spelling_hint(const Node *v) {
  const char *digits = v->text + (v->text[0] == '-' || v->text[0] == '+');
  if (!v->plain || !digits[0] || digits[strspn(digits, "0123456789_")]) return NULL;
  if (strchr(digits, '_')) return "digits without underscores";
  return digits[0] == '0' && digits[1] ? "a leading zero is octal to some readers" : NULL;
}

static void fail_value(Reading *rd, const RecipeRow *row, const char *path, const Node *v) {
  Pool *pool = &rd->box->pool;
  const char *hint = row->hint;
  bool text = row->type == ROW_TEXT || row->type == ROW_PATH;
  bool number = row->type == ROW_INT || row->type == ROW_FLOAT;
  if (text && v->kind == NODE_SCALAR)
    hint = "in quotes it is a text";
  else if (number && v->kind == NODE_SCALAR && !hint)
    hint = spelling_hint(v);
  problem_add(&rd->problems, v, "%s: found %s; expected %s%s%s%s", path, value_found(pool, v),
              value_expected(pool, row), hint ? " (" : "", hint ? hint : "", hint ? ")" : "");
}

static const char *absolute(Reading *rd, const Node *v) {
  const char *s = v->text;
  if (s[0] == '/' || !s[0]) return pool_text(&rd->box->pool, s, v->len);
  while (s[0] == '.' && s[1] == '/') s += 2;
  return pool_printf(&rd->box->pool, "%s/%s", v->origin ? rd->cwd : rd->file_dir, s);
}

static bool text_holds(Reading *rd, const RecipeRow *row, const char *path, const Node *v) {
  if (v->kind == NODE_SCALAR && strlen(v->text) != v->len)
    problem_add(&rd->problems, v, "%s: found a NUL byte in the text; expected none", path);
  else if (!value_text(v))
    fail_value(rd, row, path, v);
  else if ((double)v->len > row->bounds.hi)
    problem_add(&rd->problems, v, "%s: found a text of %zu bytes; expected at most %.0f", path,
                v->len, row->bounds.hi);
  else
    return true;
  return false;
}

static void bind_number(Reading *rd, const RecipeRow *row, const char *path, const Node *v,
                        void *at) {
  int64_t i = 0;
  double x = 0;
  bool right = row->type == ROW_INT ? value_int(v, &i) : value_float(v, &x);
  if (row->type == ROW_INT) x = (double)i;
  if (!right || !bounds_hold(row->bounds, x))
    fail_value(rd, row, path, v);
  else if (row->type == ROW_INT)
    memcpy(at, &i, sizeof i);
  else
    memcpy(at, &x, sizeof x);
}

static void bind_words(Reading *rd, const RecipeRow *row, const char *path, const Node *v,
                       RewardTerm *term) {
  enum { MOST = 65536 };
  if (v->kind != NODE_LIST || !v->n) {
    fail_value(rd, row, path, v);
    return;
  }
  if (v->n > MOST) {
    problem_add(&rd->problems, v, "%s: found %zu texts; expected at most %d", path, v->n, MOST);
    return;
  }
  const char **words = (const char **)pool_alloc(&rd->box->pool, v->n * sizeof *words);
  for (size_t i = 0; i < v->n; i++) {
    const Node *word = v->items[i];
    if (word->kind == NODE_SCALAR && !word->len)
      problem_add(&rd->problems, word, "%s.%zu: found an empty text; expected a word", path, i);
    else if (text_holds(rd, row, path, word))
      words[i] = word->text;
  }
  term->words = words;
  term->n_words = (int)v->n;
}

static void bind_stages(Reading *rd, const RecipeRow *row, const char *path, const Node *v) {
  static const char *const names[] = {"sft", "reward", "ppo"};
  Recipe *r = &rd->box->r;
  if (v->kind != NODE_LIST || !v->n) {
    fail_value(rd, row, path, v);
    return;
  }
  for (size_t i = 0; i < v->n; i++) {
    const Node *item = v->items[i];
    int stage = -1;
    for (int k = 0; k < 3; k++)
      if (value_text(item) && !strcmp(item->text, names[k])) stage = k;
    bool twice = false;
    for (int k = 0; k < r->n_stages; k++) twice |= (int)r->stages[k] == stage;
    if (stage < 0)
      problem_add(&rd->problems, item, "%s: found %s; expected sft, reward or ppo", path,
                  value_found(&rd->box->pool, item));
    else if (twice)
      problem_add(&rd->problems, item, "%s: found \"%s\" twice; expected each stage once", path,
                  names[stage]);
    else
      r->stages[r->n_stages++] = (StageKind)stage;
  }
}

static void bind_choice(Reading *rd, const RecipeRow *row, const char *path, const Node *v,
                        void *at) {
  bool b; /* "true" and "false" may be choices too */
  if ((value_text(v) || value_bool(v, &b)) && choice_holds(row->choices, v->text)) {
    const char *word = v->text;
    memcpy(at, &word, sizeof word);
    return;
  }
  fail_value(rd, row, path, v);
}

static void bind_row(Reading *rd, KeyRef key, const char *path, const Node *v) {
  const RecipeRow *row = key.row;
  void *at = (char *)&rd->box->r + key.offset;
  switch (row->type) {
    case ROW_INT:
    case ROW_FLOAT:
      bind_number(rd, row, path, v, at);
      return;
    case ROW_BOOL: {
      bool b;
      if (value_bool(v, &b))
        memcpy(at, &b, sizeof b);
      else
        fail_value(rd, row, path, v);
      return;
    }
    case ROW_CHOICE:
      bind_choice(rd, row, path, v, at);
      return;
    case ROW_TEXT:
    case ROW_PATH:
      if (text_holds(rd, row, path, v)) {
        const char *s = row->type == ROW_PATH ? absolute(rd, v) : v->text;
        memcpy(at, &s, sizeof s);
      }
      return;
    case ROW_STAGES:
      bind_stages(rd, row, path, v);
      return;
    case ROW_WORDS:
      bind_words(rd, row, path, v, (RewardTerm *)((char *)at - offsetof(RewardTerm, words)));
      return;
  }
}

static int problems_now(const Reading *rd) { return rd->problems.n + rd->problems.uncounted; }

static void bind_value(Reading *rd, KeyRef key, const char *path, const Node *v) {
  int before = problems_now(rd);
  give(rd->box, path, v);
  bind_row(rd, key, path, v);
  rd->box->given[rd->box->n_given - 1].bad = problems_now(rd) > before;
}

/* A section that is no map. */
static void fail_section(Reading *rd, const char *path, const Node *v) {
  rd->box->given[rd->box->n_given - 1].bad = true;
  problem_add(&rd->problems, v, "%s: found %s; expected a map of keys", path,
              value_found(&rd->box->pool, v));
}

/* ---- the tree ---- */

static void fail_unknown(Reading *rd, const char *section, const char *path, const Node *key) {
  char near[512], known[1024];
  Quoted q = text_quote(path, strlen(path));
  key_nearest(path, near, sizeof near);
  if (near[0]) {
    problem_add(&rd->problems, key, "unknown key %s; did you mean %s?", q.s, near);
    return;
  }
  key_list(section, known, sizeof known);
  problem_add(&rd->problems, key, "unknown key %s; expected one of %s", q.s, known);
}

static void bind_map(Reading *rd, const Node *map, const char *section);

static void bind_rewards(Reading *rd, const Node *list) {
  Recipe *r = &rd->box->r;
  give(rd->box, "rewards", list);
  if (list->kind != NODE_LIST || !list->n || list->n > RECIPE_MAX_REWARDS) {
    rd->box->given[rd->box->n_given - 1].bad = true;
    problem_add(&rd->problems, list, "rewards: found %s; expected a list of 1 to %d terms",
                value_found(&rd->box->pool, list), RECIPE_MAX_REWARDS);
    return;
  }
  r->n_rewards = (int)list->n;
  for (size_t i = 0; i < list->n; i++) {
    const char *path = pool_printf(&rd->box->pool, "rewards.%zu", i);
    const Node *term = list->items[i];
    give(rd->box, path, term);
    if (term->kind == NODE_MAP)
      bind_map(rd, term, path);
    else
      fail_section(rd, path, term);
  }
}

/* Keys at the top that begin with x- hold anchors and mean nothing by themselves. */
static bool holds_anchors(const char *section, const char *key) {
  return !*section && key[0] == 'x' && key[1] == '-';
}

static void bind_map(Reading *rd, const Node *map, const char *section) {
  for (size_t i = 0; i < map->n; i++) {
    const Node *key = map->keys[i], *value = map->items[i];
    if (holds_anchors(section, key->text)) continue;
    if (strchr(key->text, '.')) {
      problem_add(&rd->problems, key, "found the key %s; expected a name without dots",
                  text_quote(key->text, key->len).s);
      continue;
    }
    const char *path =
        pool_printf(&rd->box->pool, "%s%s%.200s", section, *section ? "." : "", key->text);
    KeyRef ref = key_find(path);
    bool rewards = !strcmp(path, "rewards");
    if (!ref.row && !rewards && !key_is_section(path)) {
      fail_unknown(rd, section, path, key);
    } else if (node_is_null(value)) {
      continue;
    } else if (ref.row) {
      bind_value(rd, ref, path, value);
    } else if (rewards) {
      bind_rewards(rd, value);
    } else {
      give(rd->box, path, value);
      if (value->kind == NODE_MAP)
        bind_map(rd, value, path);
      else
        fail_section(rd, path, value);
    }
  }
}

/* ---- defaults ---- */

static void set_default(const RecipeGroup *g, const RecipeRow *row, void *at) {
  const char *s = row_default(g, row);
  switch (row->type) {
    case ROW_INT:
      *(int64_t *)at = strtoll(s, NULL, 10);
      return;
    case ROW_FLOAT:
      *(double *)at = strtod(s, NULL);
      return;
    case ROW_BOOL:
      *(bool *)at = !strcmp(s, "true");
      return;
    case ROW_CHOICE:
    case ROW_TEXT:
    case ROW_PATH:
      *(const char **)at = s;
      return;
    case ROW_WORDS:
    case ROW_STAGES:
      return;
  }
}

static void set_defaults(Recipe *r) {
  for (int i = 0; i < recipe_group_count(); i++) {
    const RecipeGroup *g = recipe_group(i);
    for (int k = 0; k < g->n_rows; k++)
      set_default(g, &g->rows[k], (char *)r + g->base + g->rows[k].offset);
  }
  const RecipeGroup *term = recipe_term_group();
  for (int i = 0; i < RECIPE_MAX_REWARDS; i++)
    for (int k = 0; k < term->n_rows; k++)
      set_default(term, &term->rows[k], (char *)&r->rewards[i] + term->rows[k].offset);
}

void recipe_bind(Reading *rd, const Node *root) {
  set_defaults(&rd->box->r);
  if (root->kind == NODE_MAP) {
    bind_map(rd, root, "");
  } else if (!node_is_null(root)) {
    problem_add(&rd->problems, root,
                "found %s; expected a map of sections: stages, models, data...",
                value_found(&rd->box->pool, root));
    return;
  }
  if (!given_find(rd->box, "stages"))
    problem_add(&rd->problems, NULL, "stages: not given; expected a list of sft, reward, ppo");
}
