/* The driver of every stage: steps, evaluations, step lines and checkpoints.
 *
 * The line of a step is written before its checkpoint, whose state notes the length of
 * metrics.jsonl; so a resumed run cuts off the lines of steps that it is going to repeat. The
 * checkpoint's seconds belong to the next step. */
#include <string.h>

#include "orchestrator/train_session.h"

/* So many steps in a row that changed no model, and as many as a stage has, end the run: no data
 * that follows would give weights that hold NaN another gradient. */
enum { STUCK = 20 };

int64_t stage_steps(int64_t steps, int64_t epochs, int n, int64_t batch) {
  return steps > 0 ? steps : (epochs * n + batch - 1) / batch;
}

static bool evaluation_due(const Stage *stage, int64_t step) {
  if (!stage->evaluate || stage->eval_every == 0) return false;
  return step % stage->eval_every == 0 || step == stage->steps;
}

static int evaluate(Session *s, Stage *stage, int64_t step, Error *err) {
  if (!evaluation_due(stage, step)) return 0;
  report_phase(s->report, PH_EVAL);
  int rc = stage->evaluate(stage->ctx, step, err);
  report_phase(s->report, PH_OTHER);
  return rc;
}

static int save_state(Session *s, const TrainedModel *models, int n_models, Error *err) {
  report_phase(s->report, PH_CHECKPOINT);
  s->state.metrics_bytes = report_metrics_bytes(s->report);
  s->state.totals = *report_totals(s->report);
  int rc = checkpoint_save(s->grid, s->recipe->run.directory, &s->state, models, n_models,
                           s->recipe->checkpoint.keep, err);
  if (rc == 0)
    rc = comm_agree(s->grid->all, s->grid->rank == 0 ? report_write(s->report, err) : 0, err);
  report_phase(s->report, PH_OTHER);
  return rc;
}

/* What refreshes sent since `before`, model by model. */
static void report_refreshes(Session *s, const Stage *stage, const ZeroPPRefresh *before) {
  if (strcmp(s->recipe->zeropp.refresh, "dense") == 0) return;
  for (int i = 0; i < stage->n_models; i++) {
    ZeroPPRefresh x = zeropp_refreshed(model_zero(stage->models[i].model));
    x.weights -= before[i].weights;
    x.changed -= before[i].changed;
    x.bytes -= before[i].bytes;
    x.dense_bytes -= before[i].dense_bytes;
    x.int8_bytes -= before[i].int8_bytes;
    x.delta_units -= before[i].delta_units;
    x.dense_units -= before[i].dense_units;
    report_refresh(s->report, stage->models[i].name, x);
  }
}

static int64_t updates(const Stage *stage) {
  int64_t n = 0;
  for (int i = 0; i < stage->n_models; i++) n += zeropp_steps(model_zero(stage->models[i].model));
  return n;
}

/* Counts a step whose optimizer steps were skipped, all or some. */
static void note_skipped(Session *s, Stage *stage, int64_t skipped, int64_t updated) {
  if (skipped > 0) report_show(s->report, "skipped", (double)skipped);
  stage->stuck = skipped > 0 && updated == 0 ? stage->stuck + 1 : 0;
}

static int refuse_stuck(const Stage *stage, Error *err) {
  if (stage->stuck < STUCK && stage->stuck < stage->steps) return 0;
  return error_set(err,
                   "none of the last %lld steps changed a model: every gradient held NaN or "
                   "infinity (in the weights, "
                   "the data, or for a learning rate that is too high)",
                   (long long)stage->stuck);
}

static int one_step(Session *s, Stage *stage, Error *err) {
  TrainState *at = &s->state;
  int64_t every = s->recipe->checkpoint.every;
  ZeroPPRefresh before[2] = {{0}};
  for (int i = 0; i < stage->n_models; i++)
    before[i] = zeropp_refreshed(model_zero(stage->models[i].model));
  int64_t skipped = at->skipped, updated = updates(stage);
  if (stage->step(stage->ctx, at->step, err)) return -1;
  note_skipped(s, stage, at->skipped - skipped, updates(stage) - updated);
  report_phase(s->report, PH_OTHER);
  at->step++;
  at->run_step++;
  if (evaluate(s, stage, at->step, err)) return -1;
  report_refreshes(s, stage, before);
  if (report_step(s->report, at->step, at->run_step, err) || refuse_stuck(stage, err)) return -1;
  bool last = at->step == stage->steps; /* the stage's end writes its own */
  if (every > 0 && at->step % every == 0 && !last)
    return save_state(s, stage->models, stage->n_models, err);
  return 0;
}

/* A resumed run must not end, and its moments be gone, because somebody mistook steps in all for
 * steps to come. */
static int check_steps(const Stage *stage, int64_t made, Error *err) {
  if (made <= stage->steps) return 0;
  return error_set(err,
                   "%lld steps are made, and the recipe comes to %lld; expected %lld, which end "
                   "the stage here, or more",
                   (long long)made, (long long)stage->steps, (long long)made);
}

int stage_run(Session *s, Stage *stage, Error *err) {
  TrainState *at = &s->state;
  if (check_steps(stage, at->step, err)) return -1;
  if (s->resume_from &&
      checkpoint_load_models(s->grid, s->resume_from, stage->models, stage->n_models, err))
    return -1;
  if (s->resumes && rundir_resumed(s, err)) return -1;
  s->resumes = false;
  report_stage(s->report, stage->name, at->step, stage->steps);
  if (at->step == 0 && evaluation_due(stage, 0)) {
    if (evaluate(s, stage, 0, err)) return -1;
    if (report_step(s->report, 0, at->run_step, err)) return -1;
  }
  while (at->step < stage->steps)
    if (one_step(s, stage, err)) return -1;
  report_break(s->report);
  return 0;
}

int stage_end(Session *s, const char *next, Error *err) {
  TrainState *at = &s->state;
  memset(at->stage, 0, sizeof at->stage);
  strncpy(at->stage, next, sizeof at->stage - 1);
  at->step = at->position = 0;
  return save_state(s, NULL, 0, err);
}
