/* Models: folders and heads, and the vocabulary that all of them must share with the tokenizer. */
#include <string.h>

#include "orchestrator/check.h"

static bool role_needed(const Recipe *r, Role role) {
  if (role == ROLE_ACTOR && stage_in_recipe(r, STAGE_SFT)) return true;
  if (role == ROLE_REWARD && stage_in_recipe(r, STAGE_REWARD)) return true;
  return stage_in_recipe(r, STAGE_PPO) && ppo_needs(r, role);
}

static int read_config(Session *s, Role role, ModelConfig *out, Error *err) {
  ModelStart start;
  if (model_start(s->recipe, role, 0, &start, err)) return -1;
  ModelOptions o = {.head = role_head(role), .init_head = start.init_head};
  int rc;
  if (start.dir) {
    rc = model_check(start.dir, &o, out, err);
  } else {
    require(start.init);
    *out = init_model_config(start.init, s->tokenizer);
    out->head = o.head;
    rc = model_config_check(out, err);
  }
  model_start_free(&start);
  return rc;
}

static int check_vocabulary(Session *s, Role role, Error *err) {
  int have = s->config[role].vocab_size, tokens = tokenizer_vocab_size(s->tokenizer);
  int actor = s->has_config[ROLE_ACTOR] ? s->config[ROLE_ACTOR].vocab_size : have, n = 0;
  if (tokens > have)
    n += check_note(err,
                    "models.%s: the tokenizer has %d tokens, the embedding %d rows: expected "
                    "a tokenizer that fits",
                    role_name(role), tokens, have);
  if (actor != have)
    n += check_note(err,
                    "models.%s: the vocabulary has %d tokens, the actor's %d: expected the "
                    "same",
                    role_name(role), have, actor);
  return n;
}

int check_run_models(Session *s, Error *err) {
  int n = 0;
  for (Role role = 0; role < ROLE_COUNT; role++) {
    if (!role_needed(s->recipe, role)) continue;
    Error why = {""};
    s->has_config[role] = read_config(s, role, &s->config[role], &why) == 0;
    if (!s->has_config[role]) n += check_note(err, "models.%s: %s", role_name(role), why.msg);
  }
  for (Role role = 0; role < ROLE_COUNT; role++)
    if (s->has_config[role]) n += check_vocabulary(s, role, err);
  return n;
}
