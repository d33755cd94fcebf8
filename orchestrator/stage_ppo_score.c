/* The forwards over a rollout, and its scores: the reward model's and the programmatic terms'. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/minibatch.h"
#include "orchestrator/ppo.h"

/* ---- forwards ---- */

static BatchPlan own_plan(Ppo *p, const Rollout *ro) {
  const Grid *g = p->s->grid;
  int32_t *lengths = packed_lengths(ro->offsets, ro->n_seqs);
  BatchPlan plan = plan_batches(lengths, NULL, ro->n_seqs, g->rank, g->world,
                                (int)p->s->recipe->batch.micro_tokens);
  free(lengths);
  return plan;
}

void ppo_logprobs(Ppo *p, Model *m, Rollout *ro, RolloutField field) {
  BatchPlan plan = own_plan(p, ro);
  actor_logprobs(m, &plan, ro, field, (float)p->s->recipe->rollout.temperature);
  rollout_share_field(p->s->grid->all, ro, field, (int)p->s->recipe->batch.micro_tokens);
  ppo_count(p, ro, NULL, ro->n_seqs);
  plan_free(&plan);
}

void ppo_values(Ppo *p, Rollout *ro) {
  BatchPlan plan = own_plan(p, ro);
  critic_values(p->critic, &plan, ro);
  rollout_share_field(p->s->grid->all, ro, RO_VALUES, (int)p->s->recipe->batch.micro_tokens);
  ppo_count(p, ro, NULL, ro->n_seqs);
  plan_free(&plan);
}

static int model_scores(Ppo *p, Rollout *ro, float *out, Error *err) {
  BatchPlan plan = own_plan(p, ro);
  reward_scores(p->reward, &plan, ro, out);
  rollout_share_scores(p->s->grid->all, ro, out, (int)p->s->recipe->batch.micro_tokens);
  plan_free(&plan);
  for (int b = 0; b < ro->n_seqs; b++) { /* the same on all ranks */
    if (p->norm.known) out[b] = (float)(((double)out[b] - p->norm.mean) / p->norm.std);
    if (!isfinite(out[b]))
      return error_set(err,
                       "models.reward: the score of answer %d is %g; the model's weights or "
                       "activations hold NaN or "
                       "infinity",
                       b, (double)out[b]);
  }
  return 0;
}

/* ---- programmatic terms: rank 0 looks at the text and tells the others ---- */

/* The vocabulary of many models is padded past the tokenizer's: such an id can be drawn, and spells
 * nothing. */
char *ppo_answer_text(Ppo *p, const Rollout *ro, int b, size_t *len, Error *err) {
  const int32_t *tokens = ro->tokens + rollout_first(ro, b);
  int n = rollout_response_len(ro, b), kept = 0;
  int32_t *ids = mem_alloc((size_t)n, sizeof *ids);
  for (int i = 0; i < n; i++)
    if (tokens[i] < tokenizer_vocab_size(p->s->tokenizer)) ids[kept++] = tokens[i];
  char *text = tokenizer_decode(p->s->tokenizer, ids, kept, len, err);
  free(ids);
  return text;
}

static int make_inputs(Ppo *p, const PromptSet *set, const Rollout *ro, RewardInput *in,
                       Error *err) {
  for (int b = 0; b < ro->n_seqs; b++) {
    size_t len;
    int n = rollout_response_len(ro, b), id = ro->prompt_id[b];
    char *text = ppo_answer_text(p, ro, b, &len, err);
    if (!text) return -1;
    in[b] = (RewardInput){.prompt_text = set->text[id],
                          .response_text = text,
                          .response_len = len,
                          .answer = set->answer ? set->answer[id] : NULL,
                          .response_tokens = n,
                          .ended = ro->ended[b] != 0};
  }
  return 0;
}

/* Values of every programmatic term, one row of n_seqs each; the model's rows are left alone. */
static int text_scores(Ppo *p, const PromptSet *set, const Rollout *ro, float *value_TB,
                       Error *err) {
  RewardInput *in = mem_zalloc((size_t)ro->n_seqs, sizeof *in);
  int rc = make_inputs(p, set, ro, in, err);
  for (int t = 0; t < p->n_terms && rc == 0; t++)
    if (p->term[t].terms)
      rc = reward_terms_eval(p->term[t].terms, in, ro->n_seqs, value_TB + t * ro->n_seqs, err);
  for (int b = 0; b < ro->n_seqs; b++) free((char *)in[b].response_text);
  free(in);
  return rc;
}

static bool any_text_term(const Ppo *p) {
  for (int t = 0; t < p->n_terms; t++)
    if (p->term[t].terms) return true;
  return false;
}

static void add_up(Ppo *p, Rollout *ro, const float *value_TB, ScoreFigures *out) {
  int n = ro->n_seqs;
  *out = (ScoreFigures){0};
  for (int b = 0; b < n; b++) {
    double sum = 0;
    for (int t = 0; t < p->n_terms; t++) {
      double value = (double)value_TB[t * n + b];
      sum += p->term[t].weight * value;
      out->term_mean[t] += value / n;
    }
    ro->scores[b] = (float)sum;
    out->mean += sum / n;
  }
  double var = 0;
  for (int b = 0; b < n; b++)
    var += ((double)ro->scores[b] - out->mean) * ((double)ro->scores[b] - out->mean) / n;
  out->std = sqrt(var);
  ro->have |= RO_SCORES;
}

int ppo_scores(Ppo *p, const PromptSet *set, Rollout *ro, ScoreFigures *out, Error *err) {
  Grid *g = p->s->grid;
  size_t n = (size_t)ro->n_seqs, rows = (size_t)p->n_terms;
  float *value_TB = mem_zalloc(rows * n, sizeof *value_TB);
  int rc = 0;
  if (any_text_term(p)) {
    rc = g->rank == 0 ? text_scores(p, set, ro, value_TB, err) : 0;
    rc = comm_agree(g->all, rc, err);
    if (rc == 0) comm_broadcast(g->all, value_TB, rows * n * sizeof *value_TB, 0);
  }
  if (rc == 0 && p->reward) {
    float *score = mem_zalloc(n, sizeof *score);
    rc = model_scores(p, ro, score, err);
    for (int t = 0; t < p->n_terms && rc == 0; t++)
      if (!p->term[t].terms) memcpy(value_TB + (size_t)t * n, score, n * sizeof *score);
    free(score);
  }
  if (rc == 0) add_up(p, ro, value_TB, out);
  free(value_TB);
  return rc;
}

/* ---- opening ---- */

/* Terms of one kind are told apart by their number: words, words_2. */
static void name_term(const Recipe *r, int t, char *out, size_t size) {
  int number = 1;
  for (int i = 0; i < t; i++) number += strcmp(r->rewards[i].kind, r->rewards[t].kind) == 0;
  if (number == 1)
    snprintf(out, size, "%s", r->rewards[t].kind);
  else
    snprintf(out, size, "%s_%d", r->rewards[t].kind, number);
}

/* One term alone, with weight 1. Rows of the model, which are never evaluated, stand before it, so
 * that messages name it by its place in the recipe. */
static RewardTerms *term_alone(const Recipe *r, int t, Error *err) {
  RewardTerm rows[RECIPE_MAX_REWARDS] = {0};
  for (int i = 0; i < t; i++) rows[i].kind = "model";
  rows[t] = r->rewards[t];
  rows[t].weight = 1;
  return reward_terms_create(rows, t + 1, err);
}

int score_terms_open(Ppo *p, Error *err) {
  const Recipe *r = p->s->recipe;
  for (int t = 0; t < r->n_rewards; t++, p->n_terms++) {
    ScoreTerm *term = &p->term[t];
    name_term(r, t, term->name, sizeof term->name);
    term->weight = r->rewards[t].weight;
    if (strcmp(r->rewards[t].kind, "model") == 0) continue;
    term->terms = term_alone(r, t, err);
    if (!term->terms) return -1;
  }
  return 0;
}

void score_terms_close(Ppo *p) {
  for (int t = 0; t < p->n_terms; t++) reward_terms_free(p->term[t].terms);
}
