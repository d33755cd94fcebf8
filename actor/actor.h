/* actor: the policy and its frozen reference: log-probabilities, policy losses, updates; supervised
 * fine-tuning. Denominators are global counts known before the first micro-batch, so a gradient
 * does not depend on micro-batching, packing or the number of ranks. */
#ifndef ACTOR_H
#define ACTOR_H

#include "core/kl.h"
#include "core/recipe.h"
#include "core/rollout.h"
#include "model/model.h"

/* ---- formulas (pure; arrays are per response token; tests call them) ---- */

/* The KL estimators are in core/kl.h, which reward shaping shares. */

typedef struct PolicyLoss {
  float clip_low, clip_high; /* ratio clipped to [1 - low, 1 + high] */
  float entropy_coef;        /* loss -= coef * entropy */
  bool kl_in_loss;
  KlKind kl_kind;
  float kl_coef; /* loss += coef * kl(new, ref) */
  float temperature;
  float importance_cap; /* 0: every importance weight is 1 */
} PolicyLoss;

/* Truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
 * Off-Policy RL Training"): min(exp(old - sampled), cap), exponent limited to +-20. A token is
 * drawn by what generates, from other numbers than the update's own forward computes before the
 * first update: other rounding, weights in another format, filters. `old` is of the latter, so the
 * ratio of the first minibatch is 1 all the same; the weight makes the policy's gradient one over
 * answers of the old policy. It is a constant: no gradient goes through it. cap 0: 1. */
float importance_weight(float cap, float oldlp, float sampledlp);

/* Per-token loss before weighting and its derivatives: policy = importance * max(-A ratio, -A
 * clip(ratio)), PPO (Schulman et al. 2017), ratio = exp(new - old) with the log-ratio limited to
 * +-20, importance as importance_weight gives it; loss = policy - entropy_coef * entropy + kl_coef
 * * kl (if kl_in_loss). kl is the estimator on (new, ref). clipped: the ratio lies outside [1 -
 * low, 1 + high], whether or not that side is the larger. */
typedef struct PolicyTerm {
  float loss, policy, dlogprob, dentropy, ratio, kl;
  bool clipped;
} PolicyTerm;
PolicyTerm policy_term(const PolicyLoss *p, float newlp, float oldlp, float reflp, float adv,
                       float entropy, float importance);

/* ---- the loop's calls (collective) ----
 * Where the rollout says which ids its tokens were drawn from (kept), all log-probabilities and
 * entropies are over those ids alone, renormalized, in scoring and update alike: the policy that
 * answers came from, and the one that is trained, is the filtered one. */

/* Fills this rank's sequences of `field` (RO_OLD_LOGPROBS or RO_REF_LOGPROBS) with the model's
 * log-probabilities at `temperature`; the caller shares them over ranks and sets the have bit.
 * plan: this rank's micro-batches. */
void actor_logprobs(Model *m, const BatchPlan *plan, Rollout *ro, RolloutField field,
                    float temperature);

/* Global (all ranks). loss and policy_loss use the weights of the gradient (token or sequence
 * mean); the rest are means over the response tokens of the minibatch. */
typedef struct PolicyStats {
  double loss, policy_loss, entropy;
  double kl_ref;                       /* the estimator in use, new against reference; 0 when the
                                          rollout has no reference log-probs */
  double kl_old_k1, kl_old_k3;         /* new against old */
  double clip_fraction, ratio_max_dev; /* max |ratio - 1| */
  double grad_norm, lr;
  bool skipped;
} PolicyStats;
/* One optimizer step on one minibatch (global sequence ids; NULL: all). Reads OLD, REF (if KL in
 * the loss), SAMPLED (with an importance cap), ADVANTAGES. Returns 0; 1 when no sequence of the
 * minibatch has a response token: then nothing is trained and the statistics are 0. Collective. */
int actor_update(Model *m, const Rollout *ro, const int32_t *ids, int n, const PolicyLoss *loss,
                 bool sequence_mean, int micro_tokens, AdamW opt, float max_norm, PolicyStats *out);

/* ---- supervised fine-tuning ---- */
/* Examples: packed tokens. The first token of an example is never a target: nothing is before it
 * that could predict it. */
typedef struct SftBatch {
  int n_seqs;
  const int32_t *offsets;
  const int32_t *tokens;
  const uint8_t *loss; /* 1: the token is a target; NULL: all are */
} SftBatch;
typedef struct SftStats {
  double loss;
  int64_t loss_tokens, tokens;
  double grad_norm;
  bool skipped;
} SftStats;
/* The whole global batch is given on every rank. Loss = mean negative log-prob over its loss tokens
 * (all ranks). A batch without any loss token trains nothing: loss 0. */
void sft_step(Model *m, const SftBatch *b, int micro_tokens, AdamW opt, float max_norm,
              SftStats *out);
void sft_eval(Model *m, const SftBatch *b, int micro_tokens, SftStats *out); /* loss only */

#endif
