/* The clipped policy loss of one token, with entropy bonus and KL penalty, and its derivatives. */
#include <math.h>

#include "actor/actor.h"

float importance_weight(float cap, float oldlp, float sampledlp) {
  if (cap <= 0.0f) return 1.0f;
  float weight = expf(log_ratio_clamp(oldlp - sampledlp));
  return weight > cap ? cap : weight; /* NaN stays */
}

PolicyTerm policy_term(const PolicyLoss *p, float newlp, float oldlp, float reflp, float adv,
                       float entropy, float importance) {
  float low = 1.0f - p->clip_low, high = 1.0f + p->clip_high;
  float ratio = expf(log_ratio_clamp(newlp - oldlp));
  float limited_ratio = ratio < low ? low : ratio > high ? high : ratio;
  float plain = importance * -adv * ratio, limited = importance * -adv * limited_ratio;
  /* Written so that NaN takes the plain side: its gradient must be NaN, not 0. */
  bool plain_is_max = !(plain < limited);

  PolicyTerm t = {.policy = plain_is_max ? plain : limited,
                  .ratio = ratio,
                  .kl = kl_estimate(p->kl_kind, newlp, reflp),
                  .clipped = ratio < low || ratio > high};
  t.loss = t.policy - p->entropy_coef * entropy;
  t.dentropy = -p->entropy_coef;
  /* d ratio / d newlp = ratio; the limited side is constant wherever it is the larger. */
  t.dlogprob = plain_is_max ? plain : 0.0f;
  if (p->kl_in_loss) {
    t.loss += p->kl_coef * t.kl;
    t.dlogprob += p->kl_coef * kl_gradient(p->kl_kind, newlp, reflp);
  }
  return t;
}
