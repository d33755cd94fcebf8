/* The table of keys: one row per key with its YAML path, type, default, bounds, choices, unit and
 * help. Everything that knows about keys walks this table. Private to the recipe.
 *
 * Rows belong to groups: a group is a map in the YAML ("ppo"), with the place of its fields in
 * Recipe. Repeated structs (model sources, data sources, optimizers) have one list of rows and
 * several groups; a row whose `only` names some groups (or kinds of reward term) exists there
 * alone. */
#ifndef CORE_RECIPE_TABLE_H
#define CORE_RECIPE_TABLE_H

#include "core/recipe.h"

typedef enum RowType {
  ROW_INT,    /* int64_t */
  ROW_FLOAT,  /* double */
  ROW_BOOL,   /* bool */
  ROW_TEXT,   /* const char * */
  ROW_CHOICE, /* const char *, one of choices */
  ROW_PATH,   /* const char *, an input file or folder, stored absolute */
  ROW_WORDS,  /* RewardTerm.words and n_words */
  ROW_STAGES  /* Recipe.stages and n_stages */
} RowType;

typedef struct Bounds {
  double lo, hi;           /* -INFINITY, INFINITY: none */
  bool above_lo, below_hi; /* the bound itself is out */
} Bounds;

typedef struct RecipeRow {
  const char *key;
  RowType type;
  size_t offset;       /* from the group's base */
  const char *dflt;    /* as YAML spells it; "" for texts: not given */
  Bounds bounds;       /* numbers; for texts hi is the most bytes */
  const char *choices; /* "a|b|c" */
  const char *only;    /* "a|b": names of groups or kinds; NULL: all */
  const char *unit;
  const char *help;
  const char *hint; /* what to do instead, behind a message about a bad value */
} RecipeRow;

typedef struct RowDefault {
  const char *key, *dflt;
} RowDefault;

typedef struct RecipeGroup {
  const char *path; /* "optimizer.actor"; "" for the top; "rewards" for one term of the list */
  const char *name; /* what `only` means by it */
  size_t base;      /* in Recipe; of a term: in RewardTerm */
  const RecipeRow *rows;
  int n_rows;
  const char *short_key;      /* the key that a bare text stands for: `actor: DIR`; or NULL */
  const RowDefault *defaults; /* where they differ from the rows'; ends with a NULL key */
  const char *help;
} RecipeGroup;

int recipe_group_count(void);
const RecipeGroup *recipe_group(int i);
/* The group of a reward term; its path is "rewards". */
const RecipeGroup *recipe_term_group(void);
bool row_applies(const RecipeRow *row, const char *name);
const char *row_default(const RecipeGroup *g, const RecipeRow *row);

/* A key of one recipe: its row, its group and where its value lies. "rewards.2.weight" is found in
 * the third term. NULL row when there is no such key. */
typedef struct KeyRef {
  const RecipeGroup *group;
  const RecipeRow *row;
  size_t offset; /* in Recipe */
} KeyRef;
KeyRef key_find(const char *path);
bool key_is_section(const char *path);          /* a map that holds keys or other sections */
const RecipeGroup *key_group(const char *path); /* the group at this path, or NULL */

/* The nearest known key to an unknown path, in quotes: a key of the same map ("clip_low"), or the
 * full paths of other sections that have it, with "or" between; "" when nothing is near. */
void key_nearest(const char *path, char *out, size_t size);
/* The known keys of the section, comma-separated. */
void key_list(const char *section, char *out, size_t size);

#endif
