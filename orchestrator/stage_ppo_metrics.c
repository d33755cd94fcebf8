/* The figures of a PPO step. Names ending in _mean and the like are over all answers of all ranks;
 * those of the update are means over the step's minibatches. */
#include <math.h>

#include "orchestrator/ppo.h"

static RolloutGap rollout_gap(const Rollout *ro, float cap) {
  RolloutGap g = {.tokens = rollout_response_tokens(ro)};
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) {
      float sampled = ro->sampled_logprobs[t], old = ro->old_logprobs[t];
      double d = fabs((double)sampled - (double)old);
      g.sum += d;
      g.exp_sum += exp(d);
      if (!(d <= g.max)) g.max = d; /* NaN shows */
      if (cap <= 0) continue;
      float weight = importance_weight(cap, old, sampled);
      g.weighed++;
      g.weight_sum += (double)weight;
      g.capped += weight >= cap;
    }
  return g;
}

static void report_rollout_gap(Report *r, const RolloutGap *g) {
  double n = g->tokens > 0 ? (double)g->tokens : NAN, w = g->weighed > 0 ? (double)g->weighed : NAN;
  report_metric(r, "gap_mean", g->sum / n);
  report_metric(r, "gap_max", g->max);
  report_metric(r, "gap_exp_mean", g->exp_sum / n);
  report_metric(r, "importance_mean", g->weight_sum / w);
  report_metric(r, "importance_capped", (double)g->capped / w);
  report_gap(r, *g);
}

/* 1 - var(returns - values) / var(returns), before the update. */
static double explained_variance(const Rollout *ro) {
  double n = (double)rollout_response_tokens(ro), mean = 0, error = 0, var = 0, error_var = 0;
  for (int pass = 0; pass < 2; pass++)
    for (int b = 0; b < ro->n_seqs; b++)
      for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) {
        double ret = (double)ro->returns[t], e = ret - (double)ro->values[t];
        if (pass == 0) {
          mean += ret / n;
          error += e / n;
        } else {
          var += (ret - mean) * (ret - mean);
          error_var += (e - error) * (e - error);
        }
      }
  return var > 0 ? 1 - error_var / var : NAN;
}

static void report_answers(Ppo *p, const Rollout *ro, const ScoreFigures *scores,
                           const ShapeStats *shape) {
  Report *r = p->s->report;
  int64_t response = rollout_response_tokens(ro);
  report_metric(r, "reward_mean", scores->mean);
  report_metric(r, "reward_std", scores->std);
  for (int t = 0; t < p->n_terms; t++) {
    char name[64];
    snprintf(name, sizeof name, "score_%s", p->term[t].name);
    report_metric(r, name, scores->term_mean[t]);
  }
  report_metric(r, "shaped_reward_mean", shape->reward_mean);
  report_metric_int(r, "sequences", ro->n_seqs);
  report_metric_int(r, "prompt_tokens", ro->n_tokens - response);
  report_metric_int(r, "generated_tokens", response);
  report_metric(r, "response_tokens_mean", shape->response_len_mean);
  report_metric(r, "eos_fraction", shape->ended_fraction);
}

static void report_actor(Report *r, const UpdateFigures *u) {
  double n = u->actor_steps > 0 ? u->actor_steps : (double)NAN;
  report_metric(r, "actor_loss", u->policy.loss / n);
  report_metric(r, "policy_loss", u->policy.policy_loss / n);
  report_metric(r, "entropy", u->policy.entropy / n);
  report_metric(r, "clip_fraction", u->policy.clip_fraction / n);
  report_metric(r, "update_kl_ref", u->policy.kl_ref / n);
  report_metric(r, "update_kl_k1", u->policy.kl_old_k1 / n);
  report_metric(r, "update_kl_k3", u->policy.kl_old_k3 / n);
  report_metric(r, "first_ratio_deviation", u->actor_steps > 0 ? u->first_ratio_dev : NAN);
  report_metric(r, "actor_grad_norm", u->policy.grad_norm / n);
  report_metric(r, "actor_lr", u->actor_lr);
  report_metric_int(r, "actor_updates", u->actor_steps);
}

static void report_critic(Report *r, const UpdateFigures *u) {
  double n = u->critic_steps > 0 ? u->critic_steps : (double)NAN;
  report_metric(r, "value_loss", u->value.loss / n);
  report_metric(r, "value_clip_fraction", u->value.clip_fraction / n);
  report_metric(r, "critic_grad_norm", u->value.grad_norm / n);
  report_metric(r, "critic_lr", u->critic_lr);
  report_metric_int(r, "critic_updates", u->critic_steps);
}

void ppo_report(Ppo *p, const Rollout *ro, const ScoreFigures *scores, const ShapeStats *shape,
                const UpdateFigures *u, double kl_coef) {
  Report *r = p->s->report;
  RolloutGap gap = rollout_gap(ro, p->loss.importance_cap);
  report_answers(p, ro, scores, shape);
  report_metric(r, "kl", p->reference ? shape->kl_mean : NAN); /* what the controller is fed */
  report_metric(r, "kl_per_token", p->reference ? shape->kl_token_mean : NAN);
  report_metric(r, "kl_coef", kl_coef);
  report_actor(r, u);
  report_critic(r, u);
  report_metric(r, "explained_variance", explained_variance(ro));
  report_rollout_gap(r, &gap);
  report_cost(r, "rollout_busy_least", p->rollout_busy);
  report_metric_int(r, "epochs", u->epochs);
  report_metric_int(r, "stopped_by_kl", u->stopped);
  report_metric_int(r, "skipped_steps", p->s->state.skipped);
  report_show(r, "reward", scores->mean);
  if (p->reference) report_show(r, "kl", shape->kl_mean);
  report_show(r, "len", shape->response_len_mean);
  report_show(r, "gap", gap.sum / (double)gap.tokens);
}
