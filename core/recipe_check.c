/* Sections against each other: stages and their data, batches, sampling, PPO. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/recipe_read.h"

void check_fail(Reading *rd, const char *key, const char *fmt, ...) {
  char text[2048], path[256];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  snprintf(path, sizeof path, "%s", key);
  const Node *where = given_find(rd->box, path);
  for (char *dot; !where && (dot = strrchr(path, '.'));) {
    *dot = 0;
    where = given_find(rd->box, path);
  }
  problem_add(&rd->problems, where, "%s: %s", key, text);
}

static bool same_branch(const char *a, const char *b) {
  size_t n = strlen(a), m = strlen(b), k = n < m ? n : m;
  return !strncmp(a, b, k) && (a[k] == '.' || !a[k]) && (b[k] == '.' || !b[k]);
}

bool check_sound(const Reading *rd, const char *keys) {
  char key[256];
  while (*keys) {
    size_t len = strcspn(keys, " ");
    snprintf(key, sizeof key, "%.*s", (int)len, keys);
    keys += len + (keys[len] == ' ');
    for (int i = 0; i < rd->box->n_given; i++)
      if (rd->box->given[i].bad && same_branch(rd->box->given[i].path, key)) return false;
  }
  return true;
}

static void need_data(Reading *rd, StageKind stage, const char *name, const char *key,
                      const DataSource *data) {
  if (has_stage(&rd->box->r, stage) && !*data->path && check_sound(rd, key))
    check_fail(rd, key, "not given; expected a file for stage %s", name);
}

static void need_held_out(Reading *rd, StageKind stage, const char *key, int64_t every,
                          const char *data_key, const DataSource *data) {
  if (has_stage(&rd->box->r, stage) && every > 0 && data->held_out == 0 && check_sound(rd, key))
    check_fail(rd, key, "found %" PRId64 " with %s.held_out 0; expected 0, or something held out",
               every, data_key);
}

/* An example is at least a token that is given and one that is learnt. */
static void need_room(Reading *rd, const char *key, const DataSource *data) {
  if (data->max_tokens == 1)
    check_fail(rd, key, "found 1; expected at least 2, or 0: as many as the model has positions");
}

static void check_data(Reading *rd) {
  const Recipe *r = &rd->box->r;
  need_room(rd, "data.sft.max_tokens", &r->data.sft);
  need_room(rd, "data.preference.max_tokens", &r->data.preference);
  need_data(rd, STAGE_SFT, "sft", "data.sft.path", &r->data.sft);
  need_data(rd, STAGE_REWARD, "reward", "data.preference.path", &r->data.preference);
  need_data(rd, STAGE_PPO, "ppo", "data.prompts.path", &r->data.prompts);
  need_held_out(rd, STAGE_SFT, "sft.eval_every", r->sft.eval_every, "data.sft", &r->data.sft);
  need_held_out(rd, STAGE_REWARD, "reward.eval_every", r->reward.eval_every, "data.preference",
                &r->data.preference);
  need_held_out(rd, STAGE_PPO, "ppo.eval_every", r->ppo.eval_every, "data.prompts",
                &r->data.prompts);
}

/* ---- conversations ---- */

static void check_piece(Reading *rd, const char *key, const char *piece, bool required) {
  static const char content[] = "{content}";
  if (!*piece) {
    if (required) check_fail(rd, key, "not given; expected a text with {content}");
    return;
  }
  const char *first = strstr(piece, content);
  if (!first)
    check_fail(rd, key, "found no {content}; expected it once");
  else if (strstr(first + 1, content))
    check_fail(rd, key, "found {content} twice; expected once");
}

static void check_chat(Reading *rd) {
  const ChatTemplate *c = &rd->box->r.data.chat;
  if (!check_sound(rd, "data.chat")) return;
  if (strcmp(c->name, "custom") != 0) {
    if (*c->system || *c->user || *c->assistant || *c->assistant_prefix)
      check_fail(rd, "data.chat.name", "found %s with pieces; expected custom", c->name);
    return;
  }
  check_piece(rd, "data.chat.system", c->system, false);
  check_piece(rd, "data.chat.user", c->user, true);
  check_piece(rd, "data.chat.assistant", c->assistant, true);
  const char *content = strstr(c->assistant, "{content}");
  size_t len = content ? (size_t)(content - c->assistant) : 0;
  bool same =
      strlen(c->assistant_prefix) == len && !strncmp(c->assistant_prefix, c->assistant, len);
  if (content && !same)
    check_fail(rd, "data.chat.assistant_prefix",
               "found %s; expected %s, the assistant piece up to {content}",
               text_quote(c->assistant_prefix, strlen(c->assistant_prefix)).s,
               text_quote(c->assistant, len).s);
}

/* ---- rollout and PPO ---- */

/* One error at the first of them, which names all. */
static void check_filters(Reading *rd) {
  const char *keys[RECIPE_FILTERS];
  char all[128] = "";
  int n = recipe_filters(&rd->box->r, keys);
  for (int i = 0; i < n; i++) {
    strcat(all, i ? ", " : "");
    strcat(all, keys[i]);
  }
  if (n > 0)
    check_fail(rd, keys[0],
               "found sampling in PPO changed by %s, while log-probabilities of the update are of "
               "the whole softmax; expected none of it, or rollout.filters: renormalize or allow",
               all);
}

static void check_rollout(Reading *rd) {
  const Recipe *r = &rd->box->r;
  if (check_sound(rd, "rollout.min_new_tokens rollout.max_new_tokens") &&
      r->rollout.min_new_tokens > r->rollout.max_new_tokens)
    check_fail(rd, "rollout.min_new_tokens",
               "found %" PRId64 "; expected at most rollout.max_new_tokens, %" PRId64,
               r->rollout.min_new_tokens, r->rollout.max_new_tokens);
  if (!check_sound(rd, "rollout")) return;
  if (!strcmp(r->rollout.filters, "refuse")) check_filters(rd);
  double penalty = r->rollout.repetition_penalty;
  if (!strcmp(r->rollout.filters, "renormalize") && (penalty < 1 || penalty > 1))
    check_fail(rd, "rollout.repetition_penalty",
               "found %g with rollout.filters: renormalize, which knows what was left to draw from "
               "and not how it was changed; expected 1",
               penalty);
}

static void check_batch(Reading *rd) {
  const Recipe *r = &rd->box->r;
  int64_t n = r->rollout.prompts_per_step * r->rollout.samples_per_prompt, m = r->ppo.minibatches;
  if (!check_sound(rd, "rollout.prompts_per_step rollout.samples_per_prompt ppo.minibatches"))
    return;
  if (n % m != 0)
    check_fail(rd, "ppo.minibatches",
               "found %" PRId64
               "; expected a divisor of rollout.prompts_per_step * "
               "samples_per_prompt, %" PRId64,
               m, n);
}

static void check_ppo(Reading *rd) {
  const Recipe *r = &rd->box->r;
  if (!check_sound(rd, "ppo")) return;
  if (!strcmp(r->ppo.kl_controller, "adaptive") && r->ppo.kl_coef == 0)
    check_fail(rd, "ppo.kl_coef",
               "found 0 with an adaptive controller, which multiplies it; "
               "expected a number above 0");
  if (r->ppo.critic_warmup_steps > r->ppo.steps)
    check_fail(rd, "ppo.critic_warmup_steps",
               "found %" PRId64 "; expected at most ppo.steps, %" PRId64,
               r->ppo.critic_warmup_steps, r->ppo.steps);
  if (r->ppo.normalize_scores && !has_model_term(r) && check_sound(rd, "rewards"))
    check_fail(rd, "ppo.normalize_scores",
               "found true without a reward term of kind model; expected false");
}

void recipe_check(Reading *rd) {
  const Recipe *r = &rd->box->r;
  check_models(rd);
  check_data(rd);
  check_chat(rd);
  check_rewards(rd);
  check_zeropp(rd);
  if (!has_stage(r, STAGE_PPO)) return;
  check_rollout(rd);
  check_batch(rd);
  check_ppo(rd);
}
