/* The PPO stage: opens the models, runs the loop, saves RUN/critic and RUN/actor. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/ppo.h"

static int read_norm(Ppo *p, int stage, Error *err) {
  const Recipe *r = p->s->recipe;
  if (!p->reward || !r->ppo.normalize_scores) return 0;
  ModelStart start;
  if (model_start(r, ROLE_REWARD, stage, &start, err)) return -1;
  int rc = start.dir ? score_norm_read(start.dir, &p->norm, err) : 0;
  if (rc == 0 && !p->norm.known)
    rc = error_set(err, "ppo.normalize_scores: %s has no rlhf_score_mean and rlhf_score_std",
                   start.dir ? start.dir : "a reward model of random weights");
  model_start_free(&start);
  return rc;
}

static int open_models(Ppo *p, int stage, Error *err) {
  Session *s = p->s;
  const Recipe *r = s->recipe;
  if (model_open(s, ROLE_ACTOR, stage, true, &p->actor, err)) return -1;
  if (model_open(s, ROLE_CRITIC, stage, true, &p->critic, err)) return -1;
  if (ppo_needs(r, ROLE_REFERENCE) &&
      model_open(s, ROLE_REFERENCE, stage, false, &p->reference, err))
    return -1;
  if (ppo_needs(r, ROLE_REWARD) && model_open(s, ROLE_REWARD, stage, false, &p->reward, err))
    return -1;
  if (r->ppo.ema_decay > 0) zeropp_ema_enable(model_zero(p->actor));
  return read_norm(p, stage, err);
}

static int longest_prompt(const PromptSet *set) {
  int longest = 0;
  for (int i = 0; i < set->n; i++) {
    int len = set->offsets[i + 1] - set->offsets[i];
    if (len > longest) longest = len;
  }
  return longest;
}

/* Where rotary positions depend on the length of a sequence, rollout and update must mean the same
 * one, or their log-probabilities differ: the longest that there may be (model_rope_fix). The
 * critic and the reward model only ever see whole sequences. */
static void fix_rope(Ppo *p) {
  int held = longest_prompt(&p->s->data.prompts_held), prompt = longest_prompt(&p->s->data.prompts);
  int longest = (held > prompt ? held : prompt) + (int)p->s->recipe->rollout.max_new_tokens;
  if (model_rope_varies(model_config(p->actor))) model_rope_fix(p->actor, longest);
  if (p->reference && model_rope_varies(model_config(p->reference)))
    model_rope_fix(p->reference, longest);
}

static void close_models(Ppo *p) {
  Model *all[ROLE_COUNT] = {p->actor, p->critic, p->reference, p->reward};
  for (int i = 0; i < ROLE_COUNT; i++) {
    if (!all[i]) continue;
    report_unwatch(p->s->report, all[i]);
    model_free(all[i]);
  }
}

static void set_parameters(Ppo *p) {
  const Recipe *r = p->s->recipe;
  const ModelConfig *c = model_config(p->actor);
  KlKind kind = (KlKind)kl_kind_parse(r->ppo.kl_estimator);
  bool in_reward = strcmp(r->ppo.kl_in, "reward") == 0;
  p->kl = (KlController){.adaptive = strcmp(r->ppo.kl_controller, "adaptive") == 0,
                         .coef = p->s->state.kl_coef,
                         .target = r->ppo.kl_target,
                         .horizon = r->ppo.kl_horizon};
  p->shape = (ShapeConfig){.kl_in_reward = in_reward && p->reference,
                           .kl_kind = (int)kind,
                           .reward_clip = r->ppo.reward_clip,
                           .missing_eos_penalty = r->ppo.missing_eos_penalty};
  p->loss = (PolicyLoss){.clip_low = (float)r->ppo.clip_low,
                         .clip_high = (float)r->ppo.clip_high,
                         .entropy_coef = (float)r->ppo.entropy_coef,
                         .kl_in_loss = !in_reward && p->reference,
                         .kl_kind = kind,
                         .temperature = (float)r->rollout.temperature};
  if (recipe_corrects_importance(r)) p->loss.importance_cap = (float)r->ppo.importance_cap;
  p->gen = (GenParams){.sample = {.temperature = (float)r->rollout.temperature,
                                  .top_k = (int)r->rollout.top_k,
                                  .top_p = (float)r->rollout.top_p,
                                  .min_p = (float)r->rollout.min_p,
                                  .repetition_penalty = (float)r->rollout.repetition_penalty},
                       .max_new_tokens = (int)r->rollout.max_new_tokens,
                       .min_new_tokens = (int)r->rollout.min_new_tokens,
                       .n_eos = c->n_eos,
                       .keep = recipe_renormalizes(r),
                       .max_batch = (int)r->rollout.max_batch,
                       .page_size = (int)r->rollout.page_size,
                       .max_kv_tokens = p->s->kv_tokens,
                       .weights = p->s->rollout_weights,
                       .format = p->s->rollout_format};
  memcpy(p->gen.eos_ids, c->eos_ids, sizeof p->gen.eos_ids);
  if (p->gen.n_eos == 0 && tokenizer_eos(p->s->tokenizer) >= 0) {
    p->gen.eos_ids[p->gen.n_eos++] = tokenizer_eos(p->s->tokenizer);
    log_info("the actor names no EOS token: answers end with the tokenizer's, %d",
             p->gen.eos_ids[0]);
  }
}

static int store_results(Ppo *p, Error *err) {
  StateKind kind = p->s->recipe->ppo.ema_decay > 0 ? STATE_EMA : STATE_MASTER;
  if (model_store(p->s, p->critic, "critic", STATE_MASTER, NULL, err)) return -1;
  return model_store(p->s, p->actor, "actor", kind, NULL, err);
}

int stage_ppo(Session *s, int index, Error *err) {
  const Recipe *r = s->recipe;
  Ppo p = {.s = s};
  int rc = score_terms_open(&p, err);
  if (rc == 0) rc = open_models(&p, index, err);
  if (rc == 0) {
    set_parameters(&p);
    fix_rope(&p);
    Stage stage = {.name = "ppo",
                   .steps = r->ppo.steps,
                   .eval_every = r->ppo.eval_every,
                   .models = {{"actor", p.actor}, {"critic", p.critic}},
                   .n_models = 2,
                   .ctx = &p,
                   .step = ppo_step,
                   .evaluate = s->data.prompts_held.n > 0 ? ppo_evaluate : NULL};
    rc = stage_run(s, &stage, err);
  }
  if (rc == 0) rc = store_results(&p, err);
  close_models(&p);
  score_terms_close(&p);
  return rc;
}
