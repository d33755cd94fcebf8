/* Writing and loading checkpoints: the collective half. checkpoint_files.c knows the files. */
#include "orchestrator/checkpoint.h"

#include <stdlib.h>

#include "core/fs.h"
#include "orchestrator/checkpoint_files.h"

static char *state_path(const char *dir, const char *name) {
  return mem_printf("%s/%s.safetensors", dir, name);
}

enum { MOST_MODELS = 8 };

/* Rank 0: an empty folder that is not yet the checkpoint. */
static int begin(const char *dir, Error *err) {
  char *parent = fs_dirname(dir);
  int rc = fs_make_dirs(parent, err);
  free(parent);
  if (rc) return -1;
  char *tmp = fs_dir_begin(dir, err);
  free(tmp);
  return tmp ? 0 : -1;
}

/* Rank 0, when every model is written: the checkpoint appears, and old ones go. */
static int commit(const char *tmp, const char *dir, const char *run_dir, const TrainState *state,
                  const TrainedModel *models, const uint32_t *sums, int n_models, int64_t keep,
                  Error *err) {
  const char *names[MOST_MODELS];
  for (int i = 0; i < n_models; i++) names[i] = models[i].name;
  if (checkpoint_write_state(tmp, state, names, sums, n_models, err) ||
      fs_dir_commit(tmp, dir, err))
    return -1;
  return checkpoint_prune(run_dir, state->run_step, keep, err);
}

int checkpoint_save(Grid *g, const char *run_dir, const TrainState *state,
                    const TrainedModel *models, int n_models, int64_t keep, Error *err) {
  uint32_t sums[MOST_MODELS];
  require(n_models <= MOST_MODELS);
  char *dir = checkpoint_dir(run_dir, state->run_step);
  char *tmp = mem_printf("%s.tmp", dir);
  int rc = comm_agree(g->all, g->rank == 0 ? begin(dir, err) : 0, err);
  for (int i = 0; i < n_models && rc == 0; i++) {
    char *path = state_path(tmp, models[i].name);
    rc = zeropp_save_state(model_zero(models[i].model), path, err);
    if (rc == 0) rc = checkpoint_sum(g->all, path, &sums[i], err);
    free(path);
  }
  if (rc == 0 && g->rank == 0)
    rc = commit(tmp, dir, run_dir, state, models, sums, n_models, keep, err);
  rc = comm_agree(g->all, rc, err);
  if (rc && g->rank == 0) fs_dir_abandon(tmp);
  free(dir);
  free(tmp);
  return rc;
}

/* The same on every rank, since each reads the same state.json. */
static int check_sum(Grid *g, const char *dir, const char *name, const char *path, Error *err) {
  uint32_t noted, found;
  if (comm_agree(g->all, checkpoint_noted_sum(dir, name, &noted, err), err) ||
      checkpoint_sum(g->all, path, &found, err))
    return -1;
  if (found == noted) return 0;
  return error_set(
      err,
      "%s: damaged: its checksum is %08x, when written it was %08x; remove %s to go on "
      "from the checkpoint before it",
      path, found, noted, dir);
}

int checkpoint_load_models(Grid *g, const char *dir, const TrainedModel *models, int n_models,
                           Error *err) {
  int rc = 0;
  for (int i = 0; i < n_models && rc == 0; i++) {
    char *path = state_path(dir, models[i].name);
    rc = check_sum(g, dir, models[i].name, path, err);
    if (rc == 0) rc = zeropp_load_state(model_zero(models[i].model), path, err);
    free(path);
  }
  return rc;
}
