/* Reading a recipe: what its steps share. Private to the recipe.
 *
 *   text -> yaml_read -> tree_normalize -> tree_set for each --set -> recipe_bind -> recipe_check
 *
 * Problems are collected through all steps; only text that is not YAML ends them early. */
#ifndef CORE_RECIPE_READ_H
#define CORE_RECIPE_READ_H

#include "core/recipe.h"
#include "core/recipe_table.h"
#include "core/recipe_yaml.h"

/* A key or section that the file or a --set gave. */
typedef struct Given {
  const char *path;
  const Node *value;
  bool bad; /* has a problem: what is in the struct is not what was given */
} Given;

/* A recipe with what owns its memory; Recipe is its first member. */
typedef struct RecipeBox {
  Recipe r;
  Pool pool;
  Given *given;
  int n_given, cap_given;
  char place[8192];
} RecipeBox;

typedef struct Reading {
  RecipeBox *box;
  Problems problems;
  const char *file_dir, *cwd; /* absolute; bases of paths in the file and in --set */
} Reading;

const Node *given_find(const RecipeBox *box, const char *path); /* NULL: not given */

/* core/recipe_set.c: a bare text where a map stands (`actor: DIR`) becomes that map; one "a.b=c"
 * replaces or adds a value. The root may be replaced. */
void tree_normalize(Reading *rd, Node *root);
void tree_set(Reading *rd, Node **root, const char *assignment);

/* core/recipe_bind.c: defaults, then the tree's values into the struct. */
void recipe_bind(Reading *rd, const Node *root);

/* core/recipe_resolve.c: defaults that depend on other keys. */
void recipe_resolve(Reading *rd);
bool has_stage(const Recipe *r, StageKind stage);
bool has_source(const ModelSource *m);
bool has_model_term(const Recipe *r);

/* core/recipe_check*.c: sections against each other. Keys with a problem of their own are left out:
 * one mistake gives one message. */
void recipe_check(Reading *rd);
void check_models(Reading *rd);
void check_rewards(Reading *rd);
void check_zeropp(Reading *rd);
/* Adds "KEY: ..." at the place of the key, or of the nearest section above it that was given. */
void check_fail(Reading *rd, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* No problem at, above or below any of the keys (parted by spaces). */
bool check_sound(const Reading *rd, const char *keys);

/* core/recipe_value.c: scalars by YAML 1.2's core schema, and how messages speak of them. */
bool value_int(const Node *n, int64_t *out);
bool value_float(const Node *n, double *out); /* finite */
bool value_bool(const Node *n, bool *out);    /* true or false, no other spelling */
bool value_text(const Node *n); /* quoted, or plain and neither null, number nor boolean */
bool choice_holds(const char *choices, const char *word);
bool bounds_hold(Bounds b, double x);
const char *value_found(Pool *pool, const Node *n);           /* `"abc"`, `1.5`, `a list` */
const char *value_expected(Pool *pool, const RecipeRow *row); /* `a number above 0, ...` */
const char *bounds_text(Pool *pool, Bounds b);                /* `above 0, at most 1` */
const char *choices_text(Pool *pool, const char *choices);    /* `sft, reward, ppo` */
/* The shortest of up to 17 digits that reads back to the same number. */
void number_text(double x, char *out, size_t size);

#endif
