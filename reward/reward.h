/* reward: the reward model, programmatic rewards, shaping and KL control; pairwise training. */
#ifndef REWARD_H
#define REWARD_H

#include "core/kl.h"
#include "core/recipe.h"
#include "core/rollout.h"
#include "model/model.h"

/* ---- the reward model ---- */
/* scores[b] = head at the last token of each of this rank's sequences, as the model gives them.
 * Collective. */
void reward_scores(Model *m, const BatchPlan *plan, Rollout *ro, float *scores);

/* Pairs: sequences 2i (chosen) and 2i + 1 (rejected), packed; the whole global batch on every rank.
 * loss = mean over pairs of softplus(-(s_c - s_r - margin)), computed without overflow. */
typedef struct PairBatch {
  int n_pairs;
  const int32_t *offsets; /* [2 n + 1] */
  const int32_t *tokens;
  const float *margins; /* or NULL */
} PairBatch;
/* Over all pairs of all ranks. accuracy: the share with chosen above rejected, a tie counts half.
 * score_*: over all 2n scores, biased deviation. margin_mean: mean of chosen - rejected. */
typedef struct PairStats {
  double loss, accuracy, score_mean, score_std, margin_mean, grad_norm;
  int64_t tokens;
  bool skipped;
} PairStats;
typedef struct PairTerm {
  float loss, dchosen, drejected;
} PairTerm;
PairTerm pair_term(float chosen, float rejected, float margin);
/* Both are collective; a batch without pairs trains nothing and all statistics are 0. */
void reward_train_step(Model *m, const PairBatch *b, int micro_tokens, AdamW opt, float max_norm,
                       PairStats *out);
void reward_eval(Model *m, const PairBatch *b, int micro_tokens, PairStats *out);

/* Mean and standard deviation of scores, kept in the model's config.json as "rlhf_score_mean",
 * "rlhf_score_std". Neither there: known is false. One alone, or a deviation that is not above 0,
 * is an error. */
typedef struct ScoreNorm {
  double mean, std;
  bool known;
} ScoreNorm;
int score_norm_read(const char *model_dir, ScoreNorm *out, Error *err);

/* ---- programmatic rewards ---- */
/* What a term may look at. Text is the decoded response (special tokens left out). Words, patterns
 * and ignore_case know Unicode; bytes that are not valid UTF-8 match nothing. */
typedef struct RewardInput {
  const char *prompt_text, *response_text;
  size_t response_len;
  const char *answer; /* or NULL */
  int response_tokens;
  bool ended;
} RewardInput;
typedef struct RewardTerms RewardTerms;
/* Compiles patterns; copies what it needs. NULL on error, naming the term as rewards[i]. */
RewardTerms *reward_terms_create(const RewardTerm *terms, int n, Error *err);
void reward_terms_free(RewardTerms *t);
/* out[i] = sum over terms but "model" of weight * value. One call for many, so that an external
 * command starts once per batch. An external command that fails, times out or answers wrongly is an
 * error; so are a pattern that runs out of its match limit, "exact" without an answer, and a value
 * that is not finite. */
int reward_terms_eval(RewardTerms *t, const RewardInput *in, int n, float *out, Error *err);

/* ---- shaping and KL control ---- */
typedef struct KlController {
  bool adaptive;
  double coef, target, horizon;
} KlController;
/* Ziegler et al. 2019: coef *= 1 + clip(kl / target - 1, +-0.2) * n / horizon; n = sequences.
 * Fixed: nothing. A KL that is not finite changes nothing either. n must be below 5 horizon, or the
 * coefficient could turn negative. */
void kl_controller_update(KlController *c, double kl, int64_t n);

typedef struct ShapeConfig {
  double kl_coef;
  bool kl_in_reward;
  int kl_kind; /* a KlKind: 1, 2, 3 */
  double reward_clip, missing_eos_penalty;
} ShapeConfig;
/* Over the sequences that have a response: an empty answer weighs nothing. */
typedef struct ShapeStats {
  double kl_mean; /* per sequence: sum over response tokens of the estimator in use, mean over
                     sequences; the KL that the controller is fed */
  double kl_token_mean;
  double score_mean, score_std, reward_mean; /* scores raw, biased deviation; reward: whole shaped
                                                sum per sequence */
  double ended_fraction, response_len_mean;
} ShapeStats;
/* rewards[t] = -kl_coef * kl_t (if kl_in_reward); on the last response token + clamp(score - (ended
 * ? 0 : penalty), +-reward_clip), clip 0: none. An empty answer has no token to carry a
 * reward. Reads SCORES, and OLD and REF if kl_in_reward; the KL statistics need both and are 0
 * without. Writes ro->rewards, sets its bit. Pure. */
void shape_rewards(Rollout *ro, const ShapeConfig *c, ShapeStats *out);

#endif
