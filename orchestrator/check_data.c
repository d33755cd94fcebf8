/* Data: read and tokenized as the stages will use it, and short enough for the models. */
#include <string.h>

#include "orchestrator/check.h"

/* Longest sequence of a set, 0 when it is empty. */
static int longest(const int32_t *offsets, int n) {
  int most = 0;
  for (int i = 0; i < n; i++)
    if (offsets[i + 1] - offsets[i] > most) most = offsets[i + 1] - offsets[i];
  return most;
}

static int max_int(int a, int b) { return a > b ? a : b; }

static void note_data(const char *what, int n, int held, const DataReport *rep) {
  log_info("%s: %d examples and %d held out (%lld records, %lld dropped, %lld truncated)", what, n,
           held, (long long)rep->records, (long long)rep->dropped, (long long)rep->truncated);
}

/* A sequence of `tokens` tokens against the positions of a role's model. */
static int check_length(const Session *s, Role role, int64_t tokens, const char *what, Error *err) {
  if (!s->has_config[role] || tokens <= s->config[role].max_positions) return 0;
  return check_note(err, "%s: %lld tokens, but models.%s has %d positions", what, (long long)tokens,
                    role_name(role), s->config[role].max_positions);
}

/* Positions of a role's model; where the model itself is refused, no limit. */
static int64_t positions(const Session *s, Role role) {
  return s->has_config[role] ? s->config[role].max_positions : INT32_MAX;
}

/* What max_new_tokens leaves for prompts in every model that PPO holds. */
static int64_t prompt_room(const Session *s) {
  int64_t least = INT32_MAX;
  for (Role role = 0; role < ROLE_COUNT; role++)
    if (ppo_needs(s->recipe, role) && positions(s, role) < least) least = positions(s, role);
  return least - s->recipe->rollout.max_new_tokens;
}

/* A step that sees examples twice is small data's right, but seldom what is meant. */
static void note_batch(const char *key, int64_t batch, const char *what, int n) {
  if (batch > n)
    log_warn("%s: %lld a step, and %s has %d: a step takes some more than once", key,
             (long long)batch, what, n);
}

static int check_sft(Session *s, Error *err) {
  TrainData *d = &s->data;
  DataReport rep = {0};
  Error why = {""};
  if (data_load_sft(s->recipe, s->tokenizer, positions(s, ROLE_ACTOR), &d->sft, &d->sft_held, &rep,
                    &why))
    return check_note(err, "%s", why.msg);
  note_data("data.sft", d->sft.n, d->sft_held.n, &rep);
  note_batch("batch.sft", s->recipe->batch.sft, "data.sft", d->sft.n);
  if (d->sft.n == 0) return check_note(err, "%s: no example to train on", s->recipe->data.sft.path);
  s->longest[STAGE_SFT] =
      max_int(longest(d->sft.offsets, d->sft.n), longest(d->sft_held.offsets, d->sft_held.n));
  return check_length(s, ROLE_ACTOR, s->longest[STAGE_SFT], "data.sft: the longest example", err);
}

static int check_pairs(Session *s, Error *err) {
  TrainData *d = &s->data;
  DataReport rep = {0};
  Error why = {""};
  if (data_load_pairs(s->recipe, s->tokenizer, positions(s, ROLE_REWARD), &d->pairs, &d->pairs_held,
                      &rep, &why))
    return check_note(err, "%s", why.msg);
  note_data("data.preference", d->pairs.n, d->pairs_held.n, &rep);
  note_batch("batch.reward", s->recipe->batch.reward, "data.preference", d->pairs.n);
  if (d->pairs.n == 0)
    return check_note(err, "%s: no pair to train on", s->recipe->data.preference.path);
  s->longest[STAGE_REWARD] = max_int(longest(d->pairs.offsets, 2 * d->pairs.n),
                                     longest(d->pairs_held.offsets, 2 * d->pairs_held.n));
  return check_length(s, ROLE_REWARD, s->longest[STAGE_REWARD],
                      "data.preference: the longest answer", err);
}

static int check_answers(const PromptSet *set, const char *path, Error *err) {
  for (int i = 0; i < set->n; i++)
    if (!set->answer || !set->answer[i])
      return check_note(err,
                        "%s: prompt %d has no answer, which the reward \"exact\" needs "
                        "(data.prompts.answer_field)",
                        path, i + 1);
  return 0;
}

static bool wants_answers(const Recipe *r) {
  for (int i = 0; i < r->n_rewards; i++)
    if (strcmp(r->rewards[i].kind, "exact") == 0) return true;
  return false;
}

static int check_prompts(Session *s, Error *err) {
  const Recipe *r = s->recipe;
  TrainData *d = &s->data;
  DataReport rep = {0};
  Error why = {""};
  int64_t room = prompt_room(s);
  if (room < 1)
    return check_note(err,
                      "%s: rollout.max_new_tokens: %lld leaves no position of the models for a "
                      "prompt: expected less",
                      recipe_place(r, "rollout.max_new_tokens"),
                      (long long)r->rollout.max_new_tokens);
  if (data_load_prompts(r, s->tokenizer, room, &d->prompts, &d->prompts_held, &rep, &why))
    return check_note(err, "%s", why.msg);
  note_data("data.prompts", d->prompts.n, d->prompts_held.n, &rep);
  if (d->prompts.n == 0) return check_note(err, "%s: no prompt to answer", r->data.prompts.path);
  int n = 0;
  s->longest[STAGE_PPO] = max_int(longest(d->prompts.offsets, d->prompts.n),
                                  longest(d->prompts_held.offsets, d->prompts_held.n)) +
                          r->rollout.max_new_tokens;
  for (Role role = 0; role < ROLE_COUNT; role++)
    n += check_length(s, role, s->longest[STAGE_PPO],
                      "the longest of data.prompts with rollout.max_new_tokens", err);
  if (!wants_answers(r)) return n;
  n += check_answers(&d->prompts, r->data.prompts.path, err);
  return n + check_answers(&d->prompts_held, r->data.prompts.path, err);
}

int check_run_data(Session *s, Error *err) {
  int n = 0;
  if (stage_in_recipe(s->recipe, STAGE_SFT)) n += check_sft(s, err);
  if (stage_in_recipe(s->recipe, STAGE_REWARD)) n += check_pairs(s, err);
  if (stage_in_recipe(s->recipe, STAGE_PPO)) n += check_prompts(s, err);
  return n;
}
