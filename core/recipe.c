/* Loading a recipe: the order of the steps, and what is kept of them. See recipe.h. */
#include "core/recipe.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/fs.h"
#include "core/recipe_read.h"

enum { MAX_RECIPE_BYTES = 64 << 20 };

static char *working_directory(Pool *pool) {
  char *s = getcwd(NULL, 0);
  char *kept = pool_printf(pool, "%s", s ? s : "");
  free(s);
  return kept;
}

static const char *absolute_dir(Pool *pool, const char *file, const char *cwd) {
  char *dir = fs_dirname(file);
  const char *full = dir[0] == '/'      ? pool_printf(pool, "%s", dir)
                     : strcmp(dir, ".") ? pool_printf(pool, "%s/%s", cwd, dir)
                                        : cwd;
  free(dir);
  return full;
}

static void read_all(Reading *rd, const char *text, size_t len, const char *const *sets,
                     int n_sets) {
  Pool *pool = &rd->box->pool;
  if (len > MAX_RECIPE_BYTES) {
    problem_add(&rd->problems, NULL, "found %zu bytes; expected a recipe of at most 64 MiB", len);
    return;
  }
  Node *root = yaml_read(pool, &rd->problems, NULL, text, len);
  if (!root) return;
  tree_normalize(rd, root);
  for (int i = 0; i < n_sets; i++) tree_set(rd, &root, sets[i]);
  recipe_bind(rd, root);
  if (root->kind != NODE_MAP) return;
  recipe_resolve(rd);
  recipe_check(rd);
}

Recipe *recipe_parse(const char *text, size_t len, const char *name, const char *const *sets,
                     int n_sets, Error *err) {
  RecipeBox *box = mem_zalloc(1, sizeof *box);
  Reading rd = {.box = box, .problems = {.file = name}};
  box->r.file = pool_text(&box->pool, name, strlen(name));
  rd.cwd = working_directory(&box->pool);
  rd.file_dir = absolute_dir(&box->pool, name, rd.cwd);
  read_all(&rd, text, len, sets, n_sets);
  bool failed = rd.problems.n > 0;
  if (failed) problems_report(&rd.problems, err);
  problems_free(&rd.problems);
  if (!failed) return &box->r;
  recipe_free(&box->r);
  return NULL;
}

Recipe *recipe_load(const char *path, const char *const *sets, int n_sets, Error *err) {
  size_t len;
  char *text = fs_read(path, &len, err);
  if (!text) return NULL;
  Recipe *r = recipe_parse(text, len, strcmp(path, "-") ? path : "stdin", sets, n_sets, err);
  free(text);
  return r;
}

void recipe_free(Recipe *r) {
  if (!r) return;
  RecipeBox *box = (RecipeBox *)r;
  pool_free(&box->pool);
  free(box->given);
  free(box);
}

int recipe_filters(const Recipe *r, const char *keys[RECIPE_FILTERS]) {
  int n = 0;
  if (r->rollout.top_k > 0) keys[n++] = "rollout.top_k";
  if (r->rollout.top_p < 1) keys[n++] = "rollout.top_p";
  if (r->rollout.min_p > 0) keys[n++] = "rollout.min_p";
  if (r->rollout.repetition_penalty < 1 || r->rollout.repetition_penalty > 1)
    keys[n++] = "rollout.repetition_penalty";
  return n;
}

bool recipe_renormalizes(const Recipe *r) {
  const char *keys[RECIPE_FILTERS];
  bool any = recipe_filters(r, keys) > 0 || r->rollout.min_new_tokens > 0; /* which bans the end */
  return any && strcmp(r->rollout.filters, "renormalize") == 0;
}

bool recipe_rollout_rounds(const Recipe *r) {
  const char *format = r->rollout.format;
  if (strcmp(format, "int8") != 0 && strcmp(format, "fp8") != 0) return false;
  bool trained = r->zeropp.stage == 3 && strcmp(r->zeropp.hpz, "on") != 0;
  return !trained || strcmp(r->zeropp.qwz, format) != 0;
}

bool recipe_corrects_importance(const Recipe *r) {
  const char *keys[RECIPE_FILTERS];
  if (strcmp(r->ppo.importance, "auto") != 0) return strcmp(r->ppo.importance, "on") == 0;
  bool filtered = recipe_filters(r, keys) > 0 && strcmp(r->rollout.filters, "allow") == 0;
  bool banned = r->rollout.min_new_tokens > 0 && !recipe_renormalizes(r);
  return filtered || banned || recipe_rollout_rounds(r);
}

const char *recipe_place(const Recipe *r, const char *key) {
  RecipeBox *box = (RecipeBox *)r; /* the buffer is not part of what is const */
  const Node *where = given_find(box, key);
  if (where && where->origin)
    snprintf(box->place, sizeof box->place, "%s", where->origin);
  else if (where)
    snprintf(box->place, sizeof box->place, "%s:%d:%d", r->file, where->line, where->column);
  else
    snprintf(box->place, sizeof box->place, "%s (default)", r->file);
  return box->place;
}
