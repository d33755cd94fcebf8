/* critic: values, generalised advantage estimation (Schulman et al. 2016), the clipped value loss,
 * its update. */
#ifndef CRITIC_H
#define CRITIC_H

#include "core/rollout.h"
#include "model/model.h"

/* Fills ro->values of this rank's sequences: values[t] = the head at token t - 1, for response
 * tokens t. Collective. */
void critic_values(Model *m, const BatchPlan *plan, Rollout *ro);

/* From values and rewards: delta_t = r_t + gamma V_{t+1} - V_t with V = 0 beyond the last response
 * token, A_t = delta_t + gamma lambda A_{t+1}; returns = A + V. Writes advantages and returns, sets
 * their bits. Pure. */
void gae(Rollout *ro, float gamma, float lambda);
/* (A - mean) / sqrt(var + 1e-8), biased variance, two passes in double, over all response tokens.
 * Others stay 0. */
void whiten_advantages(Rollout *ro);

/* 0.5 * max((v - ret)^2, (v_clip - ret)^2), v_clip = old + clamp(v - old, +-clip); clip 0: no
 * clipping. clipped: |v - old| > clip, whether or not that side is the larger. */
typedef struct ValueTerm {
  float loss, dvalue;
  bool clipped;
} ValueTerm;
ValueTerm value_term(float v, float old, float ret, float clip);

/* Global (all ranks); loss without vf_coef. explained_variance = 1 - var(returns - v) /
 * var(returns) over the response tokens, v before the step; 0 when the returns do not vary. */
typedef struct ValueStats {
  double loss, clip_fraction, explained_variance, grad_norm;
  bool skipped;
} ValueStats;
/* One optimizer step on one minibatch of global sequence ids (NULL: all); gradient of vf_coef *
 * mean value loss. Reads VALUES, RETURNS. Returns 0; 1 when the minibatch has no response token:
 * then nothing is trained and the statistics are 0. Collective. */
int critic_update(Model *m, const Rollout *ro, const int32_t *ids, int n, float value_clip,
                  float vf_coef, bool sequence_mean, int micro_tokens, AdamW opt, float max_norm,
                  ValueStats *out);

#endif
