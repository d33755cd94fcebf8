/* One optimizer step of the policy on one minibatch.
 *
 * Invariant: the weights of all tokens come from the whole minibatch before the first micro-batch
 * runs, and gradients are sums, so how the work is cut does not show in the result. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "actor/actor.h"
#include "core/minibatch.h"

enum { SUM_LOSS, SUM_POLICY, SUM_ENTROPY, SUM_KL_REF, SUM_K1, SUM_K3, SUM_CLIPPED, SUMS };

typedef struct PolicyPass {
  const Rollout *ro;
  const PolicyLoss *loss;
  const double *weight_N;
  const int32_t *index; /* of the micro-batch at hand: row -> token of the rollout */
  bool have_ref;
  double sum[SUMS], ratio_max_dev;
} PolicyPass;

static void add_statistics(PolicyPass *s, const PolicyTerm *t, double weight, float newlp,
                           float oldlp, float entropy) {
  s->sum[SUM_LOSS] += weight * (double)t->loss;
  s->sum[SUM_POLICY] += weight * (double)t->policy;
  s->sum[SUM_ENTROPY] += (double)entropy;
  s->sum[SUM_KL_REF] += (double)t->kl;
  /* The samples came from the old policy. */
  s->sum[SUM_K1] += (double)kl_estimate(KL_K1, oldlp, newlp);
  s->sum[SUM_K3] += (double)kl_estimate(KL_K3, oldlp, newlp);
  s->sum[SUM_CLIPPED] += t->clipped;
  double dev = fabs((double)t->ratio - 1.0);
  if (!(dev <= s->ratio_max_dev)) s->ratio_max_dev = dev; /* NaN shows */
}

static void policy_rows(void *ctx, int first, int n, const float *logprob, const float *entropy,
                        float *dlogprob, float *dentropy) {
  PolicyPass *s = ctx;
  const Rollout *ro = s->ro;
  for (int i = 0; i < n; i++) {
    int32_t t = s->index[first + i];
    float oldlp = ro->old_logprobs[t], reflp = s->have_ref ? ro->ref_logprobs[t] : logprob[i];
    float weight = importance_weight(s->loss->importance_cap, oldlp, ro->sampled_logprobs[t]);
    PolicyTerm term =
        policy_term(s->loss, logprob[i], oldlp, reflp, ro->advantages[t], entropy[i], weight);
    double w = s->weight_N[t];
    dlogprob[i] = (float)(w * (double)term.dlogprob);
    dentropy[i] = (float)(w * (double)term.dentropy);
    add_statistics(s, &term, w, logprob[i], oldlp, entropy[i]);
  }
}

static void gather_statistics(Grid *g, PolicyPass *s, int64_t tokens, PolicyStats *out) {
  comm_all_reduce_f64(g->all, s->sum, SUMS, false);
  comm_all_reduce_f64(g->all, &s->ratio_max_dev, 1, true);
  double n = (double)tokens;
  out->loss = s->sum[SUM_LOSS];
  out->policy_loss = s->sum[SUM_POLICY];
  out->entropy = s->sum[SUM_ENTROPY] / n;
  out->kl_ref = s->sum[SUM_KL_REF] / n;
  out->kl_old_k1 = s->sum[SUM_K1] / n;
  out->kl_old_k3 = s->sum[SUM_K3] / n;
  out->clip_fraction = s->sum[SUM_CLIPPED] / n;
  out->ratio_max_dev = s->ratio_max_dev;
}

int actor_update(Model *m, const Rollout *ro, const int32_t *ids, int n, const PolicyLoss *loss,
                 bool sequence_mean, int micro_tokens, AdamW opt, float max_norm,
                 PolicyStats *out) {
  unsigned need = RO_OLD_LOGPROBS | RO_ADVANTAGES | (loss->kl_in_loss ? RO_REF_LOGPROBS : 0u) |
                  (loss->importance_cap > 0 ? RO_SAMPLED_LOGPROBS : 0u);
  rollout_need(ro, need, "actor_update");
  *out = (PolicyStats){.lr = (double)opt.lr};
  Grid *g = model_grid(m);
  Minibatch mb = minibatch_create(ro, ids, n, sequence_mean, g->rank, g->world, micro_tokens);
  bool empty = mb.tokens == 0;
  if (!empty) {
    PolicyPass pass = {.ro = ro,
                       .loss = loss,
                       .weight_N = mb.weight_N,
                       .have_ref = (ro->have & RO_REF_LOGPROBS) != 0};
    zeropp_zero_grad(model_zero(m));
    for (int i = 0; i < mb.plan.n_micro; i++) {
      if (i == mb.plan.n_micro - 1) zeropp_last_micro(model_zero(m));
      Pack p = pack_targets(ro->offsets, ro->tokens, ro->prompt_len, &mb.plan.micro[i]);
      pass.index = p.index;
      uint8_t *kept_RW = pack_kept(&p, ro);
      model_restrict(m, kept_RW);
      model_train_lm(m, p.batch, p.n_rows, p.rows, p.targets, loss->temperature, true, policy_rows,
                     &pass);
      model_restrict(m, NULL);
      free(kept_RW);
      pack_free(&p);
    }
    StepResult step = zeropp_step(model_zero(m), opt, max_norm);
    gather_statistics(g, &pass, mb.tokens, out);
    out->grad_norm = step.grad_norm;
    out->skipped = step.skipped;
  }
  minibatch_free(&mb);
  return empty;
}
