/* Finding keys by path in the table, and the nearest one to a path that is not there. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/nearest.h"
#include "core/recipe_table.h"

/* N of "rewards.N" or "rewards.N.rest" (rest set behind the dot, or to ""), else -1. */
static int key_term(const char *path, const char **rest) {
  static const char prefix[] = "rewards.";
  if (strncmp(path, prefix, sizeof prefix - 1) != 0) return -1;
  const char *p = path + sizeof prefix - 1;
  size_t digits = strspn(p, "0123456789");
  if (digits == 0 || digits > 4 || (p[digits] && p[digits] != '.')) return -1;
  *rest = p[digits] ? p + digits + 1 : p + digits;
  return atoi(p);
}

/* A key may have several rows, each for other sections. */
static const RecipeRow *row_in(const RecipeGroup *g, const char *key) {
  for (int i = 0; i < g->n_rows; i++)
    if (!strcmp(g->rows[i].key, key) &&
        (g == recipe_term_group() || row_applies(&g->rows[i], g->name)))
      return &g->rows[i];
  return NULL;
}

/* The part of a path behind a group's own path, or NULL when it lies elsewhere. */
static const char *below(const RecipeGroup *g, const char *path) {
  size_t len = strlen(g->path);
  if (len == 0) return path;
  return !strncmp(path, g->path, len) && path[len] == '.' ? path + len + 1 : NULL;
}

KeyRef key_find(const char *path) {
  const char *rest;
  int term = key_term(path, &rest);
  if (term >= 0 && term < RECIPE_MAX_REWARDS) {
    const RecipeRow *row = row_in(recipe_term_group(), rest);
    if (!row) return (KeyRef){0};
    size_t base = offsetof(Recipe, rewards) + (size_t)term * sizeof(RewardTerm);
    return (KeyRef){recipe_term_group(), row, base + row->offset};
  }
  for (int i = 0; i < recipe_group_count(); i++) {
    const RecipeGroup *g = recipe_group(i);
    const char *key = below(g, path);
    const RecipeRow *row = key ? row_in(g, key) : NULL;
    if (row) return (KeyRef){g, row, g->base + row->offset};
  }
  return (KeyRef){0};
}

bool key_is_section(const char *path) {
  size_t len = strlen(path);
  for (int i = 0; i < recipe_group_count(); i++) {
    const char *p = recipe_group(i)->path;
    if (!strncmp(p, path, len) && (!p[len] || p[len] == '.')) return true;
  }
  return false;
}

const RecipeGroup *key_group(const char *path) {
  const char *rest;
  if (key_term(path, &rest) >= 0 && !*rest) return recipe_term_group();
  for (int i = 0; i < recipe_group_count(); i++)
    if (!strcmp(recipe_group(i)->path, path)) return recipe_group(i);
  return NULL;
}

/* ---- names of one section: its keys and its sections ---- */

typedef struct Names {
  const char *v[128];
  char text[128][96];
  int n;
} Names;

static void names_add(Names *names, const char *s, size_t len) {
  char *t = names->text[names->n];
  snprintf(t, sizeof names->text[0], "%.*s", (int)len, s);
  for (int i = 0; i < names->n; i++)
    if (!strcmp(names->v[i], t)) return;
  require(names->n < 127);
  names->v[names->n++] = t;
}

static void names_of_group(Names *names, const RecipeGroup *g) {
  for (int i = 0; i < g->n_rows; i++)
    if (g == recipe_term_group() || row_applies(&g->rows[i], g->name))
      names_add(names, g->rows[i].key, strlen(g->rows[i].key));
}

static void names_of(Names *names, const char *section) {
  const char *rest;
  names->n = 0;
  if (key_term(section, &rest) >= 0 && !*rest) {
    names_of_group(names, recipe_term_group());
    return;
  }
  size_t len = strlen(section);
  for (int i = 0; i < recipe_group_count(); i++) {
    const RecipeGroup *g = recipe_group(i);
    if (!strcmp(g->path, section)) names_of_group(names, g);
    const char *p = g->path;
    if (len && (strncmp(p, section, len) != 0 || p[len] != '.')) continue;
    p += len ? len + 1 : 0;
    if (*p) names_add(names, p, strcspn(p, "."));
  }
  if (!len) names_add(names, "rewards", 7);
}

void key_list(const char *section, char *out, size_t size) {
  Names names;
  names_of(&names, section);
  size_t used = 0;
  out[0] = 0;
  for (int i = 0; i < names.n && used < size; i++)
    used += (size_t)snprintf(out + used, size - used, "%s%s", i ? ", " : "", names.v[i]);
}

/* The same last name in other sections: the key is right, its place is wrong. */
static void elsewhere(const char *key, char *out, size_t size) {
  size_t used = 0;
  for (int i = 0; i < recipe_group_count() && used < size; i++) {
    const RecipeGroup *g = recipe_group(i);
    const RecipeRow *row = row_in(g, key);
    if (!row) continue;
    used += (size_t)snprintf(out + used, size - used, "%s\"%s%s%s\"", used ? " or " : "", g->path,
                             *g->path ? "." : "", row->key);
  }
}

void key_nearest(const char *path, char *out, size_t size) {
  const char *dot = strrchr(path, '.');
  const char *key = dot ? dot + 1 : path;
  char section[256];
  snprintf(section, sizeof section, "%.*s", dot ? (int)(dot - path) : 0, path);
  Names names;
  names_of(&names, section);
  const char *near = nearest_name(key, names.v, names.n);
  out[0] = 0;
  if (near)
    snprintf(out, size, "\"%s\"", near);
  else
    elsewhere(key, out, size);
}
