/* One optimizer step of the critic on one minibatch. Weights come from the whole minibatch, as in
 * actor/update.c. */
#include "core/minibatch.h"
#include "critic/critic.h"

enum { SUM_LOSS, SUM_CLIPPED, SUM_ERROR, SUM_ERROR_SQUARE, SUMS };

typedef struct ValuePass {
  const Rollout *ro;
  const double *weight_N;
  const int32_t *index;
  float clip;
  double vf_coef;
  double
      shift; /* close to the mean of returns - v, so that the one-pass variance keeps its digits */
  double sum[SUMS];
} ValuePass;

/* Variance (two passes) of the returns, and the mean of returns - old values: known to all ranks
 * beforehand, since all hold the rollout. */
typedef struct ReturnsMoments {
  double var, error_mean;
} ReturnsMoments;

/* Sums first, one division after: the mean of equal floats is then exact, and their variance 0. */
static ReturnsMoments returns_moments(const Rollout *ro, const int32_t *ids, int n,
                                      int64_t tokens) {
  double sum = 0, error_sum = 0, squares = 0;
  for (int i = 0; i < n; i++) {
    int b = ids ? ids[i] : i;
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) {
      sum += (double)ro->returns[t];
      error_sum += (double)ro->returns[t] - (double)ro->values[t];
    }
  }
  double count = (double)tokens, mean = sum / count;
  for (int i = 0; i < n; i++) {
    int b = ids ? ids[i] : i;
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++)
      squares += ((double)ro->returns[t] - mean) * ((double)ro->returns[t] - mean);
  }
  return (ReturnsMoments){.var = squares / count, .error_mean = error_sum / count};
}

static void value_rows(void *ctx, int n, const float *values, float *dvalues) {
  ValuePass *s = ctx;
  for (int i = 0; i < n; i++) {
    int32_t t = s->index[i];
    float ret = s->ro->returns[t];
    ValueTerm term = value_term(values[i], s->ro->values[t], ret, s->clip);
    double w = s->weight_N[t], error = (double)ret - (double)values[i] - s->shift;
    dvalues[i] = (float)(s->vf_coef * w * (double)term.dvalue);
    s->sum[SUM_LOSS] += w * (double)term.loss;
    s->sum[SUM_CLIPPED] += term.clipped;
    s->sum[SUM_ERROR] += error;
    s->sum[SUM_ERROR_SQUARE] += error * error;
  }
}

static void gather_statistics(Grid *g, ValuePass *s, int64_t tokens, double returns_var,
                              ValueStats *out) {
  comm_all_reduce_f64(g->all, s->sum, SUMS, false);
  double n = (double)tokens, error_mean = s->sum[SUM_ERROR] / n;
  double error_var = s->sum[SUM_ERROR_SQUARE] / n - error_mean * error_mean;
  out->loss = s->sum[SUM_LOSS];
  out->clip_fraction = s->sum[SUM_CLIPPED] / n;
  out->explained_variance = returns_var > 0 ? 1.0 - error_var / returns_var : 0.0;
}

int critic_update(Model *m, const Rollout *ro, const int32_t *ids, int n, float value_clip,
                  float vf_coef, bool sequence_mean, int micro_tokens, AdamW opt, float max_norm,
                  ValueStats *out) {
  rollout_need(ro, RO_VALUES | RO_RETURNS, "critic_update");
  *out = (ValueStats){.skipped = false};
  Grid *g = model_grid(m);
  Minibatch mb = minibatch_create(ro, ids, n, sequence_mean, g->rank, g->world, micro_tokens);
  bool empty = mb.tokens == 0;
  if (!empty) {
    ReturnsMoments returns = returns_moments(ro, ids, n, mb.tokens);
    ValuePass pass = {.ro = ro,
                      .weight_N = mb.weight_N,
                      .clip = value_clip,
                      .vf_coef = (double)vf_coef,
                      .shift = returns.error_mean};
    zeropp_zero_grad(model_zero(m));
    for (int i = 0; i < mb.plan.n_micro; i++) {
      if (i == mb.plan.n_micro - 1) zeropp_last_micro(model_zero(m));
      Pack p = pack_targets(ro->offsets, ro->tokens, ro->prompt_len, &mb.plan.micro[i]);
      pass.index = p.index;
      model_train_values(m, p.batch, p.n_rows, p.rows, value_rows, &pass);
      pack_free(&p);
    }
    StepResult step = zeropp_step(model_zero(m), opt, max_norm);
    gather_statistics(g, &pass, mb.tokens, returns.var, out);
    out->grad_norm = step.grad_norm;
    out->skipped = step.skipped;
  }
  minibatch_free(&mb);
  return empty;
}
