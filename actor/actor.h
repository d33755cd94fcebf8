/* actor: the policy and its frozen reference: log-probabilities, policy losses, updates; supervised
 * fine-tuning. Denominators are global counts known before the first micro-batch, so a gradient
 * does not depend on micro-batching, packing or the number of ranks. */
#ifndef ACTOR_H
#define ACTOR_H

#include "core/recipe.h"
#include "core/rollout.h"
#include "model/model.h"

/* ---- formulas (pure; arrays are per response token; tests call them) ---- */

/* KL estimators of token t (Schulman 2020, "Approximating KL Divergence"), logr = logp - logq,
 * samples from p: k1 = logr, k2 = logr^2 / 2, k3 = exp(-logr) - 1 + logr. The exponent is clamped
 * to +-20. */
typedef enum KlKind { KL_K1, KL_K2, KL_K3 } KlKind;
int kl_kind_parse(const char *name); /* -1 unknown */
float kl_estimate(KlKind kind, float logp, float logq);
float kl_gradient(KlKind kind, float logp, float logq); /* d kl / d logp */

typedef struct PolicyLoss {
  float clip_low, clip_high; /* ratio clipped to [1 - low, 1 + high] */
  float entropy_coef;        /* loss -= coef * entropy */
  bool kl_in_loss;
  KlKind kl_kind;
  float kl_coef; /* loss += coef * kl(new, ref) */
  float temperature;
} PolicyLoss;

/* Per-token loss before weighting and its derivatives: max(-A ratio, -A clip(ratio)), PPO (Schulman
 * et al. 2017). */
typedef struct PolicyTerm {
  float loss, dlogprob, dentropy, ratio, kl;
  bool clipped;
} PolicyTerm;
PolicyTerm policy_term(const PolicyLoss *p, float newlp, float oldlp, float reflp, float adv,
                       float entropy);

/* ---- the loop's calls (collective) ---- */

/* Fills this rank's sequences of `field` (RO_OLD_LOGPROBS or RO_REF_LOGPROBS) with the model's
 * log-probabilities at `temperature`; the caller shares them over ranks and sets the have bit.
 * plan: this rank's micro-batches. */
void actor_logprobs(Model *m, const BatchPlan *plan, Rollout *ro, RolloutField field,
                    float temperature);

typedef struct PolicyStats { /* global (all ranks), means over the response tokens of the minibatch
                              */
  double loss, policy_loss, entropy,
      kl_ref;                          /* kl_ref: the estimator in use, new against reference */
  double kl_old_k1, kl_old_k3;         /* new against old */
  double clip_fraction, ratio_max_dev; /* max |ratio - 1| */
  double grad_norm, lr;
  bool skipped;
} PolicyStats;
/* One optimizer step on one minibatch (global sequence ids). Reads OLD, REF (if KL in the loss),
 * ADVANTAGES. */
int actor_update(Model *m, const Rollout *ro, const int32_t *ids, int n, const PolicyLoss *loss,
                 bool sequence_mean, int micro_tokens, AdamW opt, float max_norm, PolicyStats *out);

/* ---- supervised fine-tuning ---- */
/* Examples: packed tokens; targets are tokens at positions >= loss_from (0 or 1: all but the
 * first). */
typedef struct SftBatch {
  int n_seqs;
  const int32_t *offsets;
  const int32_t *tokens;
  const int32_t *loss_from; /* [n_seqs] */
} SftBatch;
typedef struct SftStats {
  double loss;
  int64_t loss_tokens, tokens;
  double grad_norm;
  bool skipped;
} SftStats;
/* The whole global batch is given on every rank. Loss = mean negative log-prob over its loss tokens
 * (all ranks). */
void sft_step(Model *m, const SftBatch *b, int micro_tokens, AdamW opt, float max_norm,
              SftStats *out);
void sft_eval(Model *m, const SftBatch *b, int micro_tokens, SftStats *out); /* loss only */

#endif
