/* Rewards: terms that compile, scores that can be normalized, minibatches that divide. */
#include "orchestrator/check.h"

static int check_terms(const Recipe *r, Error *err) {
  Error why = {""};
  RewardTerms *t = reward_terms_create(r->rewards, r->n_rewards, &why);
  int n = t ? 0 : check_note(err, "%s: %s", r->file, why.msg);
  reward_terms_free(t);
  return n;
}

/* Mean and deviation must be known when PPO starts: from the reward stage, or from the folder. */
static int check_norm(const Recipe *r, Error *err) {
  if (!r->ppo.normalize_scores || !rewards_need_model(r)) return 0;
  if (stage_in_recipe(r, STAGE_REWARD))
    return r->reward.normalize
               ? 0
               : check_note(err, "%s: ppo.normalize_scores needs reward.normalize: true", r->file);
  ModelStart start;
  ScoreNorm norm = {.known = false};
  Error why = {""};
  if (model_start(r, ROLE_REWARD, 0, &start, &why)) return 0; /* check_models has said it */
  int n = 0;
  if (start.dir && score_norm_read(start.dir, &norm, &why))
    n = check_note(err, "%s", why.msg);
  else if (!norm.known)
    n = check_note(err, "ppo.normalize_scores: %s has no rlhf_score_mean and rlhf_score_std",
                   start.dir ? start.dir : "a reward model of random weights");
  model_start_free(&start);
  return n;
}

static int check_minibatches(const Recipe *r, Error *err) {
  int64_t sequences = r->rollout.prompts_per_step * r->rollout.samples_per_prompt;
  if (sequences % r->ppo.minibatches == 0) return 0;
  return check_note(err, "%s: ppo.minibatches: %lld does not divide the %lld sequences of a step",
                    recipe_place(r, "ppo.minibatches"), (long long)r->ppo.minibatches,
                    (long long)sequences);
}

int check_run_rewards(Session *s, Error *err) {
  const Recipe *r = s->recipe;
  if (!stage_in_recipe(r, STAGE_PPO)) return 0;
  return check_terms(r, err) + check_norm(r, err) + check_minibatches(r, err);
}
