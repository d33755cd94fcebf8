/* Pairwise training of the reward model: Bradley-Terry with an optional margin.
 *
 * All ranks hold all scores after a pass (one reduction), so the statistics are computed in two
 * passes over the whole batch and do not depend on the number of ranks. */
#include <math.h>
#include <stdlib.h>

#include "core/minibatch.h"
#include "reward/reward.h"

PairTerm pair_term(float chosen, float rejected, float margin) {
  double x = (double)chosen - (double)rejected - (double)margin;
  double e = exp(-fabs(x));                                /* never above 1 */
  double wrong = x >= 0 ? e / (1.0 + e) : 1.0 / (1.0 + e); /* sigmoid(-x) */
  if (isnan(x)) wrong = x;
  return (PairTerm){.loss = (float)(log1p(e) + (x < 0 ? -x : 0.0)),
                    .dchosen = (float)-wrong,
                    .drejected = (float)wrong};
}

typedef struct PairPass {
  const PairBatch *batch;
  const int32_t *ids; /* of the micro-batch at hand: row -> sequence */
  double *scores;     /* [2 n_pairs], 0 where another rank has it */
} PairPass;

static float pair_margin(const PairBatch *b, int pair) { return b->margins ? b->margins[pair] : 0; }

static void pair_rows(void *ctx, int n, const float *values, float *dvalues) {
  PairPass *s = ctx;
  float weight = 1.0f / (float)s->batch->n_pairs;
  for (int i = 0; i < n; i += 2) {
    int pair = s->ids[i] / 2;
    require(i + 1 < n && s->ids[i] == 2 * pair && s->ids[i + 1] == 2 * pair + 1);
    PairTerm t = pair_term(values[i], values[i + 1], pair_margin(s->batch, pair));
    dvalues[i] = weight * t.dchosen;
    dvalues[i + 1] = weight * t.drejected;
    for (int k = 0; k < 2; k++) s->scores[s->ids[i + k]] = (double)values[i + k];
  }
}

static void pair_score(Model *m, const Pack *p, PairPass *s) {
  float *score_R = mem_alloc((size_t)p->n_rows, sizeof *score_R);
  model_values(m, p->batch, p->n_rows, p->rows, score_R);
  for (int i = 0; i < p->n_rows; i++) s->scores[s->ids[i]] = (double)score_R[i];
  free(score_R);
}

static void pair_statistics(const PairBatch *b, const double *scores, PairStats *out) {
  double pairs = b->n_pairs, var = 0;
  for (int i = 0; i < b->n_pairs; i++) {
    double chosen = scores[2 * i], rejected = scores[2 * i + 1];
    out->loss += (double)pair_term((float)chosen, (float)rejected, pair_margin(b, i)).loss / pairs;
    out->accuracy += (chosen > rejected ? 1.0 : chosen == rejected ? 0.5 : 0.0) / pairs;
    out->margin_mean += (chosen - rejected) / pairs;
    out->score_mean += 0.5 * (chosen + rejected) / pairs;
  }
  for (int i = 0; i < 2 * b->n_pairs; i++)
    var += (scores[i] - out->score_mean) * (scores[i] - out->score_mean);
  out->score_std = sqrt(var / (2 * pairs));
}

/* Runs the batch forward, and backward when train; out's statistics, all ranks. */
static void pair_pass(Model *m, const PairBatch *b, int micro_tokens, bool train, PairStats *out) {
  *out = (PairStats){.tokens = b->offsets[2 * b->n_pairs] - b->offsets[0]};
  if (b->n_pairs == 0) return;
  Grid *g = model_grid(m);
  int32_t *lengths = packed_lengths(b->offsets, 2 * b->n_pairs);
  PairPass pass = {.batch = b, .scores = mem_zalloc(2 * (size_t)b->n_pairs, sizeof(double))};
  BatchPlan plan = plan_pairs(lengths, NULL, b->n_pairs, g->rank, g->world, micro_tokens);
  for (int i = 0; i < plan.n_micro; i++) {
    if (train && i == plan.n_micro - 1) zeropp_last_micro(model_zero(m));
    Pack p = pack_last(b->offsets, b->tokens, &plan.micro[i]);
    pass.ids = plan.micro[i].ids;
    if (train)
      model_train_values(m, p.batch, p.n_rows, p.rows, pair_rows, &pass);
    else
      pair_score(m, &p, &pass);
    pack_free(&p);
  }
  comm_all_reduce_f64(g->all, pass.scores, 2 * b->n_pairs, false);
  pair_statistics(b, pass.scores, out);
  plan_free(&plan);
  free(pass.scores);
  free(lengths);
}

void reward_train_step(Model *m, const PairBatch *b, int micro_tokens, AdamW opt, float max_norm,
                       PairStats *out) {
  zeropp_zero_grad(model_zero(m));
  pair_pass(m, b, micro_tokens, true, out);
  if (b->n_pairs == 0) return;
  StepResult step = zeropp_step(model_zero(m), opt, max_norm);
  out->grad_norm = step.grad_norm;
  out->skipped = step.skipped;
}

void reward_eval(Model *m, const PairBatch *b, int micro_tokens, PairStats *out) {
  pair_pass(m, b, micro_tokens, false, out);
}
