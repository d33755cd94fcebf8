/* Defaults that depend on other keys: after this the recipe says everything that will happen. */
#include <stdio.h>
#include <string.h>

#include "core/recipe_read.h"

bool has_stage(const Recipe *r, StageKind stage) {
  for (int i = 0; i < r->n_stages; i++)
    if (r->stages[i] == stage) return true;
  return false;
}

bool has_source(const ModelSource *m) { return *m->path || *m->from || m->init.hidden_size > 0; }

bool has_model_term(const Recipe *r) {
  for (int i = 0; i < r->n_rewards; i++)
    if (!strcmp(r->rewards[i].kind, "model")) return true;
  return false;
}

/* runs/NAME of recipes/NAME.yaml */
static void resolve_directory(Reading *rd) {
  Recipe *r = &rd->box->r;
  if (*r->run.directory) return;
  const char *slash = strrchr(r->file, '/'), *name = slash ? slash + 1 : r->file;
  const char *dot = strrchr(name, '.');
  int len = dot && dot > name ? (int)(dot - name) : (int)strlen(name);
  r->run.directory = pool_printf(&rd->box->pool, "runs/%.*s", len, name);
}

/* An actor has no scalar head to start from, and neither have random weights. */
static void resolve_head(Reading *rd, ModelSource *m, const char *key) {
  if (given_find(rd->box, key)) return;
  m->init_head = !strcmp(m->from, "actor") || m->init.hidden_size > 0;
}

static void resolve_models(Reading *rd) {
  Recipe *r = &rd->box->r;
  ModelSource *reward = &r->models.reward, *critic = &r->models.critic;
  if (has_stage(r, STAGE_REWARD) && !has_source(reward)) reward->from = "actor";
  if (has_stage(r, STAGE_PPO) && !has_source(critic))
    critic->from = has_source(reward) ? "reward" : "actor";
  if (has_stage(r, STAGE_PPO) && !has_source(&r->models.reference))
    r->models.reference.from = "actor";
  resolve_head(rd, reward, "models.reward.init_head");
  resolve_head(rd, critic, "models.critic.init_head");
}

static void resolve_chat(Reading *rd) {
  ChatTemplate *c = &rd->box->r.data.chat;
  const char *content = strstr(c->assistant, "{content}");
  if (!*c->assistant_prefix && content)
    c->assistant_prefix = pool_text(&rd->box->pool, c->assistant, (size_t)(content - c->assistant));
}

/* Nothing held out: nothing to evaluate on. A recipe that asks for it all the same is refused. */
static void resolve_eval(Reading *rd, int64_t *every, const char *key, const DataSource *data) {
  if (data->held_out == 0 && !given_find(rd->box, key)) *every = 0;
}

void recipe_resolve(Reading *rd) {
  Recipe *r = &rd->box->r;
  resolve_directory(rd);
  if (r->n_rewards == 0) {
    r->rewards[0].kind = "model";
    r->n_rewards = 1;
  }
  resolve_models(rd);
  resolve_chat(rd);
  resolve_eval(rd, &r->sft.eval_every, "sft.eval_every", &r->data.sft);
  resolve_eval(rd, &r->reward.eval_every, "reward.eval_every", &r->data.preference);
  resolve_eval(rd, &r->ppo.eval_every, "ppo.eval_every", &r->data.prompts);
  r->data.prompts.max_tokens = r->rollout.max_prompt_tokens;
}
