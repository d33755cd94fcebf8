/* run.overwrite removes what an earlier run wrote, and nothing else: no other folder's models, and
 * nothing that this run reads. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "orchestrator/train_session.h"

/* What a run writes. samples/ and recipe.yaml are made first and go last: a run is where both are,
 * and what is left of a removal that was interrupted is still one. */
static const char *const PARTS[] = {"metrics.jsonl", "report.json", "checkpoints",
                                    "sft",           "reward",      "critic",
                                    "actor",         "samples",     "recipe.yaml"};
enum { N_PARTS = sizeof PARTS / sizeof *PARTS };

static bool has(const char *dir, const char *part) {
  char *path = fs_join(dir, part);
  bool there = fs_exists(path);
  free(path);
  return there;
}

static int holds_a_run(const char *dir, Error *err) {
  if (has(dir, "recipe.yaml") && has(dir, "samples")) return 0;
  for (int i = 0; i < N_PARTS; i++)
    if (has(dir, PARTS[i]))
      return error_set(err,
                       "%s: found %s, but no run (recipe.yaml and samples): run.overwrite removes "
                       "only what a run wrote",
                       dir, PARTS[i]);
  return 0;
}

/* Whether path is what `part` of dir names, or lies in it. */
static bool lies_in(const char *path, const char *dir, const char *part) {
  char *whole = fs_join(dir, part), *at = realpath(path, NULL), *of = realpath(whole, NULL);
  size_t n = of ? strlen(of) : 0;
  bool in = at && of && strncmp(at, of, n) == 0 && (at[n] == '\0' || at[n] == '/');
  free(whole);
  free(at);
  free(of);
  return in;
}

static int reads_none_of_it(const Recipe *r, Error *err) {
  const struct {
    const char *key, *path;
  } inputs[] = {
      {"models.actor.path", r->models.actor.path},
      {"models.critic.path", r->models.critic.path},
      {"models.reward.path", r->models.reward.path},
      {"models.reference.path", r->models.reference.path},
      {"tokenizer.path", r->tokenizer.path},
      {"data.sft.path", r->data.sft.path},
      {"data.preference.path", r->data.preference.path},
      {"data.prompts.path", r->data.prompts.path},
  };
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    for (int p = 0; p < N_PARTS; p++)
      if (inputs[i].path[0] && lies_in(inputs[i].path, r->run.directory, PARTS[p]))
        return error_set(err,
                         "%s: %s: found %s, which run.overwrite would remove with the run in %s; "
                         "expected another run.directory",
                         recipe_place(r, inputs[i].key), inputs[i].key, inputs[i].path,
                         r->run.directory);
  return 0;
}

int rundir_may_overwrite(const Recipe *r, Error *err) {
  if (!r->run.overwrite) return 0;
  return holds_a_run(r->run.directory, err) || reads_none_of_it(r, err) ? -1 : 0;
}

int rundir_remove(const char *dir, Error *err) {
  int rc = 0;
  for (int i = 0; i < N_PARTS && rc == 0; i++) {
    char *path = fs_join(dir, PARTS[i]), *tmp = mem_printf("%s.tmp", path);
    rc = fs_remove_tree(tmp, err); /* of a run that was killed while it saved */
    if (rc == 0) rc = fs_remove_tree(path, err);
    free(path);
    free(tmp);
  }
  return rc;
}
