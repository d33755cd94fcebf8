/* The models section: sources, copies of each other, sizes of random weights. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/recipe_read.h"

static int sources(const ModelSource *m) {
  return (*m->path != 0) + (*m->from != 0) + (m->init.hidden_size > 0);
}

static void check_source(Reading *rd, const char *key, const ModelSource *m) {
  if (sources(m) > 1 && check_sound(rd, key))
    check_fail(rd, key, "found %s%s%s; expected exactly one of path, from, init",
               *m->path ? "path" : "from", *m->path && *m->from ? ", from" : "",
               m->init.hidden_size > 0 ? " and init" : "");
}

static void need_size(Reading *rd, const char *init, const char *name, int64_t value) {
  char key[64];
  snprintf(key, sizeof key, "%s.%s", init, name);
  if (value == 0)
    check_fail(rd, key,
               "found 0; expected at least 1 (init needs hidden_size, layers, heads, ffn)");
}

static void check_init(Reading *rd, const char *key, const InitConfig *c) {
  char sub[64];
  bool any = c->hidden_size > 0 || c->layers > 0 || c->heads > 0 || c->ffn > 0 || c->kv_heads > 0 ||
             c->head_dim > 0 || c->vocab_size > 0;
  if (!any || !check_sound(rd, key)) return;
  need_size(rd, key, "hidden_size", c->hidden_size);
  need_size(rd, key, "layers", c->layers);
  need_size(rd, key, "heads", c->heads);
  need_size(rd, key, "ffn", c->ffn);
  if (c->hidden_size == 0 || c->heads == 0) return;
  snprintf(sub, sizeof sub, "%s.heads", key);
  if (c->head_dim == 0 && c->hidden_size % c->heads != 0)
    check_fail(rd, sub,
               "found %" PRId64 "; expected a divisor of hidden_size, %" PRId64 ", or a head_dim",
               c->heads, c->hidden_size);
  else if ((c->head_dim ? c->head_dim : c->hidden_size / c->heads) % 2 != 0)
    check_fail(rd, sub,
               "found heads of odd size; expected an even one, as rotary embeddings pair "
               "their elements");
  snprintf(sub, sizeof sub, "%s.kv_heads", key);
  if (c->kv_heads > 0 && c->heads % c->kv_heads != 0)
    check_fail(rd, sub, "found %" PRId64 "; expected a divisor of heads, %" PRId64, c->kv_heads,
               c->heads);
}

/* Only the actor has a place from the start; a scalar head comes from the reward model or a critic.
 */
static void check_from(Reading *rd) {
  const Recipe *r = &rd->box->r;
  const ModelSource *reward = &r->models.reward, *critic = &r->models.critic;
  if (!check_sound(rd, "models")) return;
  if (*r->models.reference.from && strcmp(r->models.reference.from, "actor") != 0)
    check_fail(rd, "models.reference.from",
               "found %s, whose head gives no probabilities; expected actor",
               r->models.reference.from);
  bool reward_loop = !strcmp(reward->from, "reward"), critic_loop = !strcmp(critic->from, "critic");
  if (reward_loop) check_fail(rd, "models.reward.from", "found itself; expected another model");
  if (critic_loop) check_fail(rd, "models.critic.from", "found itself; expected another model");
  if (!strcmp(reward->from, "critic") && !strcmp(critic->from, "reward"))
    check_fail(rd, "models.critic.from",
               "found reward, which is itself from critic; expected one of them from elsewhere");
  if (!strcmp(critic->from, "reward") && !has_source(reward))
    check_fail(
        rd, "models.critic.from",
        "found reward, but there is no reward model; expected models.reward or stage reward");
}

static void check_head(Reading *rd, const char *key, const ModelSource *m) {
  char sub[64];
  snprintf(sub, sizeof sub, "%s.init_head", key);
  bool headless = !strcmp(m->from, "actor") || m->init.hidden_size > 0;
  if (headless && !m->init_head && check_sound(rd, key))
    check_fail(rd, sub, "found false, but the source has no scalar head; expected true");
}

static void check_needed(Reading *rd) {
  const Recipe *r = &rd->box->r;
  bool ppo = has_stage(r, STAGE_PPO), reward_stage = has_stage(r, STAGE_REWARD);
  const ModelSource *reward = &r->models.reward;
  if (!check_sound(rd, "models stages tokenizer.path")) return;
  bool wanted = ppo || has_stage(r, STAGE_SFT) || !strcmp(reward->from, "actor");
  if (wanted && !has_source(&r->models.actor))
    check_fail(rd, "models.actor", "not given; expected path (a Hugging Face folder) or init");
  if (r->n_stages > 0 && !*r->tokenizer.path && !*r->models.actor.path &&
      has_source(&r->models.actor))
    check_fail(rd, "tokenizer.path",
               "not given; expected a folder with a tokenizer, since the "
               "actor is not read from a folder");
  if (!wanted && r->n_stages > 0 && !*r->tokenizer.path && !has_source(&r->models.actor))
    check_fail(rd, "tokenizer.path",
               "not given; expected a folder with a tokenizer, since "
               "there is no actor");
  bool scored = ppo && check_sound(rd, "rewards") && has_model_term(r);
  if (scored && !has_source(reward))
    check_fail(rd, "models.reward",
               "not given; expected a reward model or stage reward, or other "
               "kinds of rewards than model");
  else if (scored && !reward_stage && !*reward->path)
    check_fail(rd, "models.reward",
               "found a score head at random that no stage trains; expected a "
               "path, or stage reward");
}

static void check_positions(Reading *rd) {
  const Recipe *r = &rd->box->r;
  int64_t most = r->models.actor.init.max_positions;
  if (!r->models.actor.init.hidden_size) return;
  if (!check_sound(rd, "models.actor.init data rollout stages")) return;
  if (has_stage(r, STAGE_SFT) && r->data.sft.max_tokens > most)
    check_fail(rd, "data.sft.max_tokens",
               "found %" PRId64
               "; expected at most max_positions of the "
               "actor, %" PRId64,
               r->data.sft.max_tokens, most);
  if (has_stage(r, STAGE_REWARD) && !strcmp(r->models.reward.from, "actor") &&
      r->data.preference.max_tokens > most)
    check_fail(rd, "data.preference.max_tokens",
               "found %" PRId64
               "; expected at most max_positions "
               "of the actor, %" PRId64,
               r->data.preference.max_tokens, most);
  int64_t longest = r->rollout.max_prompt_tokens + r->rollout.max_new_tokens;
  if (!has_stage(r, STAGE_PPO)) return;
  if (r->rollout.max_prompt_tokens == 0 && r->rollout.max_new_tokens >= most)
    check_fail(rd, "rollout.max_new_tokens",
               "found %" PRId64 "; expected less than max_positions of the actor, %" PRId64,
               r->rollout.max_new_tokens, most);
  else if (longest > most)
    check_fail(rd, "rollout.max_new_tokens",
               "found %" PRId64 " with max_prompt_tokens %" PRId64
               "; expected at most max_positions of the actor "
               "together, %" PRId64,
               r->rollout.max_new_tokens, r->rollout.max_prompt_tokens, most);
}

void check_models(Reading *rd) {
  const Recipe *r = &rd->box->r;
  check_source(rd, "models.actor", &r->models.actor);
  check_source(rd, "models.critic", &r->models.critic);
  check_source(rd, "models.reward", &r->models.reward);
  check_source(rd, "models.reference", &r->models.reference);
  check_init(rd, "models.actor.init", &r->models.actor.init);
  check_init(rd, "models.critic.init", &r->models.critic.init);
  check_init(rd, "models.reward.init", &r->models.reward.init);
  check_from(rd);
  check_head(rd, "models.reward", &r->models.reward);
  check_head(rd, "models.critic", &r->models.critic);
  check_needed(rd);
  check_positions(rd);
}
