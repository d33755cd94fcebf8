/* Generalised advantage estimation and whitening, over response tokens only. */
#include <math.h>

#include "critic/critic.h"

void gae(Rollout *ro, float gamma, float lambda) {
  rollout_need(ro, RO_VALUES | RO_REWARDS, "gae");
  double g = (double)gamma, gl = g * (double)lambda;
  for (int b = 0; b < ro->n_seqs; b++) {
    double next_value = 0, advantage = 0; /* beyond the last token there is nothing to come */
    for (int t = ro->offsets[b + 1] - 1; t >= rollout_first(ro, b); t--) {
      double value = (double)ro->values[t];
      double delta = (double)ro->rewards[t] + g * next_value - value;
      advantage = delta + gl * advantage;
      next_value = value;
      ro->advantages[t] = (float)advantage;
      ro->returns[t] = (float)(advantage + value);
    }
  }
  ro->have |= RO_ADVANTAGES | RO_RETURNS;
}

void whiten_advantages(Rollout *ro) {
  rollout_need(ro, RO_ADVANTAGES, "whiten_advantages");
  double n = (double)rollout_response_tokens(ro), mean = 0, var = 0;
  if (n == 0) return;
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++)
      mean += (double)ro->advantages[t];
  mean /= n;
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) {
      double d = (double)ro->advantages[t] - mean;
      var += d * d;
    }
  var /= n;
  double scale = 1.0 / sqrt(var + 1e-8);
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++)
      ro->advantages[t] = (float)(((double)ro->advantages[t] - mean) * scale);
}
