/* A PPO folder: one minibatch through our own log-probabilities, shaping, advantages, losses and
 * updates. Taken from the reference are only what the fixture draws at random: tokens, scores and
 * old values. Actor and critic are the siblings llama and llama-reward. */
#include <math.h>
#include <stdlib.h>

#include "actor/actor.h"
#include "critic/critic.h"
#include "reward/reward.h"
#include "tests/parity.h"

typedef struct Hyper {
  double kl_coef, gamma, lam, clip_eps, value_clip, vf_coef, reward_clip, temperature;
} Hyper;

static Hyper read_hyper(const Parity *p) {
  Error err = {""};
  char *path = fs_join(p->dir, "hyperparameters.json");
  json_t *j = json_read(path, &err);
  if (!j) die("%s", err.msg);
  Hyper h;
  const struct {
    const char *key;
    double *value;
  } keys[] = {{"kl_coef", &h.kl_coef},
              {"gamma", &h.gamma},
              {"lam", &h.lam},
              {"clip_eps", &h.clip_eps},
              {"value_clip", &h.value_clip},
              {"vf_coef", &h.vf_coef},
              {"reward_clip", &h.reward_clip},
              {"temperature", &h.temperature}};
  for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
    if (json_get_f64_or(j, keys[i].key, path, NAN, keys[i].value, &err)) die("%s", err.msg);
    if (isnan(*keys[i].value)) die("%s: %s is missing", path, keys[i].key);
  }
  json_decref(j);
  free(path);
  return h;
}

/* ---- the rollout ---- */

static Rollout *read_rollout(const Parity *p) {
  Sequences seqs = parity_sequences(p);
  int32_t *lengths = mem_alloc((size_t)seqs.n, sizeof *lengths);
  for (int s = 0; s < seqs.n; s++) lengths[s] = seqs.offsets[s + 1] - seqs.offsets[s];
  Rollout *ro = rollout_create(seqs.n, lengths);
  for (int i = 0; i < ro->n_tokens; i++) ro->tokens[i] = seqs.tokens[i];
  for (int s = 0; s < seqs.n; s++) {
    char name[32];
    snprintf(name, sizeof name, "seq%d.prompt_len", s);
    int32_t *prompt_len = parity_i32(p, name, NULL);
    snprintf(name, sizeof name, "seq%d.score", s);
    float *score = parity_f32(p, name, 1);
    ro->prompt_len[s] = *prompt_len;
    ro->scores[s] = *score;
    ro->ended[s] = 1;
    free(prompt_len);
    free(score);
    snprintf(name, sizeof name, "seq%d.old_values", s);
    float *values = parity_f32(p, name, rollout_response_len(ro, s));
    for (int t = rollout_first(ro, s), i = 0; t < ro->offsets[s + 1]; t++, i++)
      ro->values[t] = values[i];
    free(values);
  }
  ro->have |= RO_SCORES | RO_VALUES;
  free(lengths);
  sequences_free(&seqs);
  return ro;
}

static void check_tokens(Parity *p, const Rollout *ro, const float *array_N, const char *tensor) {
  for (int s = 0; s < ro->n_seqs; s++) {
    char name[48];
    snprintf(name, sizeof name, "seq%d.%s", s, tensor);
    parity_pool(p, tensor, array_N + rollout_first(ro, s), name, rollout_response_len(ro, s));
  }
}

/* All sequences on every rank, so that nothing has to be exchanged. */
static BatchPlan whole_plan(const Rollout *ro) {
  int32_t *lengths = mem_alloc((size_t)ro->n_seqs, sizeof *lengths);
  for (int s = 0; s < ro->n_seqs; s++) lengths[s] = rollout_len(ro, s);
  BatchPlan plan = plan_batches(lengths, NULL, ro->n_seqs, 0, 1, 32);
  free(lengths);
  return plan;
}

static int logprobs_of(Parity *p, const char *weights, Rollout *ro, RolloutField field, float temp,
                       Error *err) {
  char *config = fs_join(p->root, "llama/config.json"), *file = fs_join(p->dir, weights);
  char *dir = parity_folder(p, config, file);
  Model *m = parity_load(p, dir, HEAD_LM, err);
  if (m) {
    BatchPlan plan = whole_plan(ro);
    actor_logprobs(m, &plan, ro, field, temp);
    ro->have |= (unsigned)field;
    plan_free(&plan);
    model_free(m);
  }
  comm_barrier(p->grid->all);
  if (p->grid->rank == 0) fs_remove_tree(dir, NULL);
  free(dir);
  free(config);
  free(file);
  return m ? 0 : -1;
}

static void check_advantages(Parity *p, Rollout *ro, const Hyper *h) {
  ShapeConfig shape = {
      .kl_coef = h->kl_coef, .kl_in_reward = true, .kl_kind = KL_K1, .reward_clip = h->reward_clip};
  ShapeStats stats;
  shape_rewards(ro, &shape, &stats);
  check_tokens(p, ro, ro->rewards, "rewards");
  gae(ro, (float)h->gamma, (float)h->lam);
  check_tokens(p, ro, ro->advantages, "advantages_raw");
  check_tokens(p, ro, ro->returns, "returns");
  whiten_advantages(ro);
  check_tokens(p, ro, ro->advantages, "advantages");
}

/* ---- updates at learning rate 0: the gradient stays in the shards ---- */

static const AdamW still = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
enum { MICRO_TOKENS = 24 }; /* two micro-batches */

static void check_number(Parity *p, const char *tensor, double x) {
  float got = (float)x;
  parity_check(p, tensor, PARITY_VALUE, &got, tensor, 1);
}

/* Largest terms of the two means: |log ratio|, and |advantage| (ratios are near 1). */
static double largest_log_ratio(const Rollout *now, const Rollout *old) {
  double most = 0;
  for (int t = 0; t < old->n_tokens; t++)
    most = fmax(most, fabs((double)now->old_logprobs[t] - (double)old->old_logprobs[t]));
  return most;
}

static double largest_advantage(const Rollout *ro) {
  double most = 0;
  for (int t = 0; t < ro->n_tokens; t++) most = fmax(most, fabs((double)ro->advantages[t]));
  return most;
}

static int check_actor(Parity *p, Rollout *ro, const Hyper *h, Error *err) {
  char *dir = fs_join(p->root, "llama");
  Model *m = parity_load(p, dir, HEAD_LM, err);
  free(dir);
  if (!m) return -1;
  Rollout *now = read_rollout(p);
  BatchPlan plan = whole_plan(now);
  actor_logprobs(m, &plan, now, RO_OLD_LOGPROBS, (float)h->temperature);
  check_tokens(p, now, now->old_logprobs, "new_logprobs");
  PolicyLoss loss = {.clip_low = (float)h->clip_eps,
                     .clip_high = (float)h->clip_eps,
                     .kl_kind = KL_K1,
                     .temperature = (float)h->temperature};
  PolicyStats stats;
  if (actor_update(m, ro, NULL, ro->n_seqs, &loss, false, MICRO_TOKENS, still, 0, &stats))
    die("%s: an empty minibatch", p->dir);
  parity_mean(p, "policy_loss", stats.policy_loss, largest_advantage(ro));
  parity_mean(p, "approx_kl_k1", stats.kl_old_k1, largest_log_ratio(now, ro));
  check_number(p, "clip_fraction", stats.clip_fraction);
  check_number(p, "entropy", stats.entropy);
  parity_params(p, "actor gradients", m, STATE_GRAD, "grad.actor.");
  plan_free(&plan);
  rollout_free(now);
  model_free(m);
  return 0;
}

static int check_critic(Parity *p, Rollout *ro, const Hyper *h, Error *err) {
  char *dir = fs_join(p->root, "llama-reward");
  Model *m = parity_load(p, dir, HEAD_SCALAR, err);
  free(dir);
  if (!m) return -1;
  Rollout *now = read_rollout(p);
  BatchPlan plan = whole_plan(now);
  critic_values(m, &plan, now);
  check_tokens(p, now, now->values, "new_values");
  ValueStats stats;
  if (critic_update(m, ro, NULL, ro->n_seqs, (float)h->value_clip, (float)h->vf_coef, false,
                    MICRO_TOKENS, still, 0, &stats))
    die("%s: an empty minibatch", p->dir);
  check_number(p, "value_loss", stats.loss);
  parity_params(p, "critic gradients", m, STATE_GRAD, "grad.critic.");
  plan_free(&plan);
  rollout_free(now);
  model_free(m);
  return 0;
}

int parity_ppo(Parity *p, Error *err) {
  Hyper h = read_hyper(p);
  Rollout *ro = read_rollout(p);
  float temp = (float)h.temperature;
  int rc = logprobs_of(p, "rollout_model.safetensors", ro, RO_OLD_LOGPROBS, temp, err);
  if (!rc) rc = logprobs_of(p, "reference_model.safetensors", ro, RO_REF_LOGPROBS, temp, err);
  if (!rc) {
    check_tokens(p, ro, ro->old_logprobs, "old_logprobs");
    check_tokens(p, ro, ro->ref_logprobs, "ref_logprobs");
    check_advantages(p, ro, &h);
    rc = check_actor(p, ro, &h, err);
  }
  if (!rc) rc = check_critic(p, ro, &h, err);
  rollout_free(ro);
  return rc;
}
