/* Reward-model training on the pairs of data.preference. Result: RUN/reward, with the mean and
 * deviation of its scores where the recipe asks for them. */
#include <math.h>
#include <stdlib.h>

#include "orchestrator/train_examples.h"
#include "orchestrator/train_session.h"

/* Pairs that the stored mean and deviation are taken over, at most: enough for two digits. */
enum { NORM_PAIRS = 512 };

typedef struct RewardStage {
  Session *s;
  Model *model;
  int64_t steps;
} RewardStage;

static int reward_one_step(void *ctx, int64_t step, Error *err) {
  (void)err;
  RewardStage *st = ctx;
  Session *s = st->s;
  const Recipe *r = s->recipe;
  const PairSet *set = &s->data.pairs;
  report_phase(s->report, PH_REWARD_TRAIN);
  int n = (int)r->batch.reward;
  Examples e = examples_draw((uint64_t)r->run.seed, "preference", s->state.position, n, set->n,
                             set->offsets, set->tokens.v, 2);
  s->state.position += n;
  float *margins = mem_alloc((size_t)n, sizeof *margins);
  for (int i = 0; i < n; i++) margins[i] = set->margins[e.ids[i]];
  PairBatch batch = {n, e.offsets, e.tokens, margins};
  double lr = optimizer_lr(&r->optimizer.reward, step, st->steps);
  PairStats stats;
  reward_train_step(st->model, &batch, (int)r->batch.micro_tokens,
                    optimizer_adamw(&r->optimizer.reward, lr),
                    (float)r->optimizer.reward.max_grad_norm, &stats);
  s->state.skipped += stats.skipped;
  report_count(s->report, 2 * n, stats.tokens, 0);
  report_metric(s->report, "loss", stats.loss);
  report_metric(s->report, "accuracy", stats.accuracy);
  report_metric(s->report, "margin_mean", stats.margin_mean);
  report_metric(s->report, "score_mean", stats.score_mean);
  report_metric(s->report, "score_std", stats.score_std);
  report_metric_int(s->report, "tokens", stats.tokens);
  report_metric(s->report, "grad_norm", stats.grad_norm);
  report_metric(s->report, "lr", lr);
  report_metric_int(s->report, "skipped_steps", s->state.skipped);
  report_show(s->report, "loss", stats.loss);
  report_show(s->report, "accuracy", stats.accuracy);
  free(margins);
  examples_free(&e);
  return 0;
}

static PairStats evaluate_pairs(RewardStage *st, const PairSet *set, int n) {
  PairBatch batch = {n, set->offsets, set->tokens.v, set->margins};
  PairStats stats;
  reward_eval(st->model, &batch, (int)st->s->recipe->batch.micro_tokens, &stats);
  report_count(st->s->report, 2 * (int64_t)n, stats.tokens, 0);
  return stats;
}

static int reward_evaluate(void *ctx, int64_t step, Error *err) {
  (void)step, (void)err;
  RewardStage *st = ctx;
  Report *report = st->s->report;
  PairStats stats = evaluate_pairs(st, &st->s->data.pairs_held, st->s->data.pairs_held.n);
  report_metric(report, "eval_loss", stats.loss);
  report_metric(report, "eval_accuracy", stats.accuracy);
  report_metric(report, "eval_margin_mean", stats.margin_mean);
  report_show(report, "eval_accuracy", stats.accuracy);
  return 0;
}

/* The keys that score_norm_read finds again; NULL when the recipe does not want them. */
static int score_keys(RewardStage *st, json_t **out, Error *err) {
  const PairSet *set = &st->s->data.pairs;
  *out = NULL;
  if (!st->s->recipe->reward.normalize) return 0;
  Phase before = report_phase(st->s->report, PH_EVAL);
  PairStats stats = evaluate_pairs(st, set, set->n < NORM_PAIRS ? set->n : NORM_PAIRS);
  report_phase(st->s->report, before);
  if (!isfinite(stats.score_mean) || !isfinite(stats.score_std) || stats.score_std <= 0)
    return error_set(err, "the trained model's scores have mean %g and deviation %g: no measure",
                     stats.score_mean, stats.score_std);
  *out = json_pack("{s:f, s:f}", "rlhf_score_mean", stats.score_mean, "rlhf_score_std",
                   stats.score_std);
  return 0;
}

int stage_reward(Session *s, int index, Error *err) {
  const Recipe *r = s->recipe;
  RewardStage st = {.s = s};
  if (model_open(s, ROLE_REWARD, index, true, &st.model, err)) return -1;
  st.steps = stage_steps(r->reward.steps, r->reward.epochs, s->data.pairs.n, r->batch.reward);
  Stage stage = {.name = "reward",
                 .steps = st.steps,
                 .eval_every = r->reward.eval_every,
                 .models = {{"model", st.model}},
                 .n_models = 1,
                 .ctx = &st,
                 .step = reward_one_step,
                 .evaluate = s->data.pairs_held.n > 0 ? reward_evaluate : NULL};
  json_t *keys = NULL;
  int rc = stage_run(s, &stage, err);
  if (rc == 0) rc = score_keys(&st, &keys, err);
  if (rc == 0) rc = model_store(s, st.model, "reward", STATE_MASTER, keys, err);
  json_decref(keys);
  report_unwatch(s->report, st.model);
  model_free(st.model);
  return rc;
}
