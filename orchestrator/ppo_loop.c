/* The loop of RLHF: prompts are answered, the answers judged, the judgement spread over tokens, and
 * actor and critic moved towards it, while the reference holds the actor back.
 *
 * Every rank holds the same rollout from the first line on; how many ranks there are decides who
 * computes what and changes no result. */
#include <stdlib.h>

#include "core/minibatch.h"
#include "orchestrator/ppo.h"

static void add_policy(UpdateFigures *u, const PolicyStats *s) {
  if (u->actor_steps++ == 0) u->first_ratio_dev = s->ratio_max_dev;
  u->policy.loss += s->loss;
  u->policy.policy_loss += s->policy_loss;
  u->policy.entropy += s->entropy;
  u->policy.kl_ref += s->kl_ref;
  u->policy.kl_old_k1 += s->kl_old_k1;
  u->policy.kl_old_k3 += s->kl_old_k3;
  u->policy.clip_fraction += s->clip_fraction;
  u->policy.grad_norm += s->grad_norm;
}

static void add_value(UpdateFigures *u, const ValueStats *s) {
  u->critic_steps++;
  u->value.loss += s->loss;
  u->value.clip_fraction += s->clip_fraction;
  u->value.explained_variance += s->explained_variance;
  u->value.grad_norm += s->grad_norm;
}

static void update_actor(Ppo *p, const Rollout *ro, const int32_t *ids, int n, UpdateFigures *u) {
  const Recipe *r = p->s->recipe;
  PolicyStats stats;
  report_phase(p->s->report, PH_ACTOR_UPDATE);
  ppo_count(p, ro, ids, n);
  bool sequence_mean = r->ppo.mean[0] == 's';
  if (actor_update(p->actor, ro, ids, n, &p->loss, sequence_mean, (int)r->batch.micro_tokens,
                   optimizer_adamw(&r->optimizer.actor, u->actor_lr),
                   (float)r->optimizer.actor.max_grad_norm, &stats))
    return;
  add_policy(u, &stats);
  p->s->state.skipped += stats.skipped;
  u->stopped = r->ppo.max_kl > 0 && stats.kl_old_k3 > r->ppo.max_kl;
  if (zeropp_has_ema(model_zero(p->actor)) && !stats.skipped)
    zeropp_ema_update(model_zero(p->actor), (float)r->ppo.ema_decay);
}

static void update_critic(Ppo *p, const Rollout *ro, const int32_t *ids, int n, UpdateFigures *u) {
  const Recipe *r = p->s->recipe;
  ValueStats stats;
  report_phase(p->s->report, PH_CRITIC_UPDATE);
  ppo_count(p, ro, ids, n);
  bool sequence_mean = r->ppo.mean[0] == 's';
  if (critic_update(p->critic, ro, ids, n, (float)r->ppo.value_clip, (float)r->ppo.vf_coef,
                    sequence_mean, (int)r->batch.micro_tokens,
                    optimizer_adamw(&r->optimizer.critic, u->critic_lr),
                    (float)r->optimizer.critic.max_grad_norm, &stats))
    return;
  add_value(u, &stats);
  p->s->state.skipped += stats.skipped;
}

/* Epochs over the rollout, each a new permutation cut into equal minibatches. */
static void update_models(Ppo *p, int64_t step, const Rollout *ro, UpdateFigures *u) {
  const Recipe *r = p->s->recipe;
  int64_t warmup = r->ppo.critic_warmup_steps;
  bool actor_moves = step >= warmup;
  int n = ro->n_seqs, parts = (int)r->ppo.minibatches, size = n / parts;
  if (actor_moves)
    u->actor_lr = optimizer_lr(&r->optimizer.actor, step - warmup, r->ppo.steps - warmup);
  u->critic_lr = optimizer_lr(&r->optimizer.critic, step, r->ppo.steps);
  int32_t *ids = mem_alloc((size_t)n, sizeof *ids);
  for (int epoch = 0; epoch < r->ppo.epochs && !u->stopped; epoch++, u->epochs++) {
    minibatch_order((uint64_t)r->run.seed, step, r->ppo.epochs, epoch, ids, n);
    for (int i = 0; i < parts && !u->stopped; i++) {
      if (actor_moves) update_actor(p, ro, ids + i * size, size, u);
      update_critic(p, ro, ids + i * size, size, u);
    }
  }
  free(ids);
}

int ppo_step(void *ctx, int64_t step, Error *err) {
  Ppo *p = ctx;
  const Recipe *r = p->s->recipe;
  Report *report = p->s->report;
  Rollout *ro = NULL;
  ScoreFigures scores;
  ShapeStats shape;
  UpdateFigures update = {.stopped = false};

  PromptPick prompts = ppo_pick_prompts(p);
  p->gen.seed = (uint64_t)r->run.seed;
  p->gen.step = (uint64_t)step;
  int rc = ppo_generate(p, &prompts, &p->gen, &ro, err);
  free(prompts.ids);
  if (rc) return -1;

  report_phase(report, PH_ACTOR_LOGPROBS);
  ppo_logprobs(p, p->actor, ro, RO_OLD_LOGPROBS);
  report_phase(report, PH_REFERENCE);
  if (p->reference) ppo_logprobs(p, p->reference, ro, RO_REF_LOGPROBS);
  report_phase(report, PH_VALUES);
  ppo_values(p, ro);
  report_phase(report, PH_REWARDS);
  ppo_count(p, ro, NULL, ro->n_seqs);
  rc = ppo_scores(p, prompts.set, ro, &scores, err);

  if (rc == 0) {
    report_phase(report, PH_ADVANTAGES);
    double kl_coef = p->shape.kl_coef = p->kl.coef;
    p->loss.kl_coef = (float)kl_coef;
    shape_rewards(ro, &p->shape, &shape);
    gae(ro, (float)r->ppo.gamma, (float)r->ppo.lambda);
    if (r->ppo.whiten_advantages) whiten_advantages(ro);

    update_models(p, step, ro, &update);
    report_phase(report, PH_OTHER);
    kl_controller_update(&p->kl, shape.kl_mean, ro->n_seqs);
    p->s->state.kl_coef = p->kl.coef;
    ppo_report(p, ro, &scores, &shape, &update, kl_coef);
  }
  rollout_free(ro);
  return rc;
}
