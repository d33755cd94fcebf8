/* A run from recipe to report. */
#include "orchestrator/train.h"

#include <stdlib.h>
#include <string.h>

#include "orchestrator/checkpoint_files.h"
#include "orchestrator/train_session.h"

/* ---- the session ---- */

static void *arena_take(void *ctx, size_t bytes) { return device_alloc(ctx, bytes); }
static void arena_give(void *ctx, void *p) { device_free(ctx, p); }

/* An error that starts with its key gets the key's place. */
static int place_key(const Recipe *r, Error *err) {
  char key[64];
  snprintf(key, sizeof key, "%.*s", (int)strcspn(err->msg, ":"), err->msg);
  return error_prefix(err, "%s", recipe_place(r, key));
}

int session_open(Session *s, const Recipe *r, Error *err) {
  *s = (Session){.recipe = r, .lock = -1, .state = {.kl_coef = r->ppo.kl_coef}};
  s->grid = grid_create((int)r->zeropp.ranks_per_node, err);
  if (!s->grid && r->zeropp.ranks_per_node > 0)
    return error_prefix(err, "%s: zeropp.ranks_per_node", recipe_place(r, "zeropp.ranks_per_node"));
  if (!s->grid) return -1;
  comm_set_timeout(r->zeropp.timeout_seconds);
  s->device = device_choose(s->grid, r->run.device, (int)r->run.threads, true, err);
  if (!s->device) return -1;
  if (precision_choose(r->run.precision, s->device, &s->compute, err))
    return error_prefix(err, "%s: run.precision", recipe_place(r, "run.precision"));
  ZeroPPConfig zero = session_zeropp(s);
  if (zeropp_check(&zero, device_kind(s->device), s->grid->world, err)) return place_key(r, err);
  if (r->zeropp.prefetch > 0) comm_queue_start();
  s->arena = arena_create(s->device, arena_take, arena_give);
  return 0;
}

void session_close(Session *s) {
  comm_queue_stop();
  report_close(s->report);
  rundir_close(s);
  sft_set_free(&s->data.sft);
  sft_set_free(&s->data.sft_held);
  pair_set_free(&s->data.pairs);
  pair_set_free(&s->data.pairs_held);
  prompt_set_free(&s->data.prompts);
  prompt_set_free(&s->data.prompts_held);
  tokenizer_free(s->tokenizer);
  free(s->resume_from);
  if (s->arena) arena_free(s->arena);
  if (s->grid) grid_free(s->grid); /* may hold communicators of the device */
  if (s->device) device_close(s->device);
}

/* ---- where to start ---- */

/* Rank 0 chooses, so that all ranks go on from the same checkpoint. */
static int find_checkpoint(Session *s, Error *err) {
  const char *dir = s->recipe->run.directory;
  TrainState found = s->state;
  char *path = NULL;
  bool root = s->grid->rank == 0;
  if (comm_agree(s->grid->all, root ? checkpoint_newest(dir, &path, &found, err) : 0, err))
    return -1;
  uint8_t any = path != NULL;
  free(path);
  comm_broadcast(s->grid->all, &any, sizeof any, 0);
  if (!any) {
    log_info("%s: no checkpoint yet: starting from the beginning", dir);
    return 0;
  }
  comm_broadcast(s->grid->all, &found, sizeof found, 0);
  s->state = found;
  path = checkpoint_dir(dir, found.run_step);
  log_info("resuming from %s: stage %s, step %lld", path, found.stage, (long long)found.step);
  if (found.step > 0)
    s->resume_from = path;
  else
    free(path);
  return 0;
}

/* Index of the stage that goes on; the number of stages when all are done. */
static int first_stage(const Session *s, Error *err) {
  const Recipe *r = s->recipe;
  if (!s->state.stage[0]) return 0;
  if (strcmp(s->state.stage, STAGE_DONE) == 0) return r->n_stages;
  for (int i = 0; i < r->n_stages; i++)
    if (strcmp(s->state.stage, stage_name(r->stages[i])) == 0) return i;
  return error_set(err, "%s: the run is in stage \"%s\", which the recipe does not have",
                   r->run.directory, s->state.stage);
}

/* ---- the stages ---- */

static int open_report(Session *s, Error *err) {
  const Recipe *r = s->recipe;
  ReportOptions o = {.grid = s->grid,
                     .device = s->device,
                     .arena = s->arena,
                     .dir = r->run.directory,
                     .progress = r->report.progress,
                     .measure_peak = r->report.measure_peak,
                     .metrics_bytes = s->state.metrics_bytes};
  s->report = report_open(&o, err);
  if (!s->report) return -1;
  report_set_totals(s->report, &s->state.totals);
  return 0;
}

/* The arena in one piece, as planned: grown bit by bit it would keep up to twice what it needs. */
static void reserve_arena(Session *s, StageKind kind) {
  arena_trim(s->arena);
  ArenaMark mark = arena_mark(s->arena);
  arena_push(s->arena, s->arena_bytes[kind]);
  arena_pop(s->arena, mark);
  arena_reset_peak(s->arena); /* reserved is not used */
}

static int run_stage(Session *s, int index, Error *err) {
  const Recipe *r = s->recipe;
  snprintf(s->state.stage, sizeof s->state.stage, "%s", stage_name(r->stages[index]));
  reserve_arena(s, r->stages[index]);
  int rc;
  switch (r->stages[index]) {
    case STAGE_SFT:
      rc = stage_sft(s, index, err);
      break;
    case STAGE_REWARD:
      rc = stage_reward(s, index, err);
      break;
    default:
      rc = stage_ppo(s, index, err);
  }
  free(s->resume_from);
  s->resume_from = NULL;
  if (rc) return error_prefix(err, "stage %s", stage_name(r->stages[index]));
  return stage_end(s, index + 1 < r->n_stages ? stage_name(r->stages[index + 1]) : STAGE_DONE, err);
}

static int print_results(Session *s, Error *err) {
  const Recipe *r = s->recipe;
  if (stage_in_recipe(r, STAGE_PPO) && report_samples(r->run.directory, r->ppo.steps, stdout, err))
    return -1;
  report_table(report_totals(s->report), stdout);
  return fflush(stdout) == 0 ? 0 : error_set(err, "the report could not be printed");
}

static int run_stages(Session *s, int first, Error *err) {
  if (open_report(s, err)) return -1;
  for (int i = first; i < s->recipe->n_stages; i++)
    if (run_stage(s, i, err)) return -1;
  if (report_finish(s->report, err)) return -1;
  int rc = s->grid->rank == 0 ? print_results(s, err) : 0;
  return comm_agree(s->grid->all, rc, err);
}

/* Nothing is left of a run that has ended but its results: with another recipe it would not do what
 * was asked. */
static int already_ended(Session *s, Error *err) {
  const char *dir = s->recipe->run.directory;
  int rc = 0;
  if (s->changes[0])
    rc = error_set(err,
                   "%s: the run has ended already, and not with this recipe (another %s); a new "
                   "run, in a directory of its own, can start from its models",
                   dir, s->changes);
  else
    log_info("%s: the run has ended already: nothing left to do", dir);
  return comm_agree(s->grid->all, rc, err);
}

static int run(Session *s, bool resume, Error *err) {
  if (check_all(s, err) || rundir_open(s, resume, err)) return -1;
  s->resumes = resume;
  if (resume && find_checkpoint(s, err)) return -1;
  int first = first_stage(s, err);
  if (first < 0) return -1;
  if (first == s->recipe->n_stages) return already_ended(s, err);
  if (s->changes[0])
    log_warn(
        "the recipe is not the one this run began with (%s/recipe.yaml): going on with another %s",
        s->recipe->run.directory, s->changes);
  return run_stages(s, first, err);
}

int train_run(const Recipe *r, bool resume, Error *err) {
  Session s;
  int rc = session_open(&s, r, err);
  if (rc == 0) rc = run(&s, resume, err);
  session_close(&s);
  return rc;
}
