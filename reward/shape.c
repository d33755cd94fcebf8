/* From scores to one reward per token: the KL penalty on every response token, the score on the
 * last. */
#include <math.h>

#include "reward/reward.h"

/* NaN stays NaN; limit 0 is no limit. */
static double clamp_score(double x, double limit) {
  if (limit <= 0) return x;
  return x > limit ? limit : x < -limit ? -limit : x;
}

/* KL of one sequence, summed over its response; rewards of its tokens when it is paid there. */
static double penalise_kl(Rollout *ro, int b, const ShapeConfig *c) {
  double sum = 0;
  for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) {
    double kl = (double)kl_estimate((KlKind)c->kl_kind, ro->old_logprobs[t], ro->ref_logprobs[t]);
    sum += kl;
    if (c->kl_in_reward) ro->rewards[t] = (float)(-c->kl_coef * kl);
  }
  return sum;
}

static double score_deviation(const Rollout *ro, double mean, double answered) {
  double var = 0;
  for (int b = 0; b < ro->n_seqs; b++) {
    double d = (double)ro->scores[b] - mean;
    if (rollout_response_len(ro, b) > 0) var += d * d;
  }
  return sqrt(var / answered);
}

void shape_rewards(Rollout *ro, const ShapeConfig *c, ShapeStats *out) {
  const unsigned both = RO_OLD_LOGPROBS | RO_REF_LOGPROBS;
  rollout_need(ro, RO_SCORES | (c->kl_in_reward ? both : 0u), "shape_rewards");
  bool have_kl = (ro->have & both) == both;
  ShapeStats s = {0};
  double answered = 0, tokens = 0;
  for (int b = 0; b < ro->n_seqs; b++) {
    int len = rollout_response_len(ro, b), last = ro->offsets[b + 1] - 1;
    if (len <= 0) continue;
    for (int t = rollout_first(ro, b); t <= last; t++) ro->rewards[t] = 0;
    if (have_kl) s.kl_mean += penalise_kl(ro, b, c);
    double score = (double)ro->scores[b] - (ro->ended[b] ? 0.0 : c->missing_eos_penalty);
    double paid = (double)ro->rewards[last] + clamp_score(score, c->reward_clip);
    ro->rewards[last] = (float)paid;
    for (int t = rollout_first(ro, b); t <= last; t++) s.reward_mean += (double)ro->rewards[t];
    s.score_mean += (double)ro->scores[b];
    s.ended_fraction += ro->ended[b] != 0;
    answered++;
    tokens += len;
  }
  ro->have |= RO_REWARDS;
  if (answered > 0) {
    s.kl_token_mean = s.kl_mean / tokens;
    s.response_len_mean = tokens / answered;
    s.kl_mean /= answered;
    s.reward_mean /= answered;
    s.score_mean /= answered;
    s.ended_fraction /= answered;
    s.score_std = score_deviation(ro, s.score_mean, answered);
  }
  *out = s;
}
