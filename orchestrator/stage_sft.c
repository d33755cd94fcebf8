/* Supervised fine-tuning: the actor learns the completions of data.sft. Result: RUN/sft. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/train_examples.h"
#include "orchestrator/train_session.h"

typedef struct SftStage {
  Session *s;
  Model *model;
  int64_t steps;
} SftStage;

static int sft_one_step(void *ctx, int64_t step, Error *err) {
  (void)err;
  SftStage *st = ctx;
  Session *s = st->s;
  const Recipe *r = s->recipe;
  const SftSet *set = &s->data.sft;
  report_phase(s->report, PH_SFT);
  int n = (int)r->batch.sft;
  Examples e = examples_draw((uint64_t)r->run.seed, "sft", s->state.position, n, set->n,
                             set->offsets, set->tokens.v, 1);
  s->state.position += n;
  uint8_t *loss = mem_alloc((size_t)e.offsets[n], sizeof *loss);
  for (int i = 0; i < n; i++)
    memcpy(loss + e.offsets[i], set->loss + set->offsets[e.ids[i]],
           (size_t)(e.offsets[i + 1] - e.offsets[i]));
  SftBatch batch = {n, e.offsets, e.tokens, loss};
  double lr = optimizer_lr(&r->optimizer.sft, step, st->steps);
  SftStats stats;
  sft_step(st->model, &batch, (int)r->batch.micro_tokens, optimizer_adamw(&r->optimizer.sft, lr),
           (float)r->optimizer.sft.max_grad_norm, &stats);
  s->state.skipped += stats.skipped;
  report_count(s->report, n, stats.tokens, 0);
  report_metric(s->report, "loss", stats.loss);
  report_metric_int(s->report, "loss_tokens", stats.loss_tokens);
  report_metric_int(s->report, "tokens", stats.tokens);
  report_metric(s->report, "grad_norm", stats.grad_norm);
  report_metric(s->report, "lr", lr);
  report_metric_int(s->report, "skipped_steps", s->state.skipped);
  report_show(s->report, "loss", stats.loss);
  free(loss);
  examples_free(&e);
  return 0;
}

static int sft_evaluate(void *ctx, int64_t step, Error *err) {
  (void)step, (void)err;
  SftStage *st = ctx;
  const SftSet *set = &st->s->data.sft_held;
  SftBatch batch = {set->n, set->offsets, set->tokens.v, set->loss};
  SftStats stats;
  sft_eval(st->model, &batch, (int)st->s->recipe->batch.micro_tokens, &stats);
  report_count(st->s->report, set->n, stats.tokens, 0);
  report_metric(st->s->report, "eval_loss", stats.loss);
  report_show(st->s->report, "eval_loss", stats.loss);
  return 0;
}

int stage_sft(Session *s, int index, Error *err) {
  const Recipe *r = s->recipe;
  SftStage st = {.s = s};
  if (model_open(s, ROLE_ACTOR, index, true, &st.model, err)) return -1;
  st.steps = stage_steps(r->sft.steps, r->sft.epochs, s->data.sft.n, r->batch.sft);
  Stage stage = {.name = "sft",
                 .steps = st.steps,
                 .eval_every = r->sft.eval_every,
                 .models = {{"model", st.model}},
                 .n_models = 1,
                 .ctx = &st,
                 .step = sft_one_step,
                 .evaluate = s->data.sft_held.n > 0 ? sft_evaluate : NULL};
  int rc = stage_run(s, &stage, err);
  if (rc == 0) rc = model_store(s, st.model, "sft", STATE_MASTER, NULL, err);
  report_unwatch(s->report, st.model);
  model_free(st.model);
  return rc;
}
