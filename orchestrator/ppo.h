/* PPO: what the loop (ppo_loop.c) and its parts (stage_ppo*.c) share. */
#ifndef ORCHESTRATOR_PPO_H
#define ORCHESTRATOR_PPO_H

#include "orchestrator/train_session.h"

/* One programmatic term of the reward, evaluated on its own so that its values can be reported. */
typedef struct ScoreTerm {
  char name[32]; /* "words", "words_2" */
  double weight;
  RewardTerms *terms; /* NULL: the reward model */
} ScoreTerm;

/* Means over the answers of one rollout, the same on every rank. */
typedef struct ScoreFigures {
  double term_mean[RECIPE_MAX_REWARDS]; /* unweighted; the model's as it is used */
  double mean, std;                     /* of the weighted sum */
} ScoreFigures;

typedef struct Ppo {
  Session *s;
  Model *actor, *critic;
  Model *reference; /* NULL: kl_coef is 0 */
  Model *reward;    /* NULL: programmatic rewards only */
  ScoreTerm term[RECIPE_MAX_REWARDS];
  int n_terms;
  ScoreNorm norm; /* of the reward model's scores, when the recipe normalizes them */
  KlController kl;
  ShapeConfig shape;
  PolicyLoss loss;
  GenParams gen;
  double rollout_busy; /* of the newest rollout */
} Ppo;

/* Figures of one step's updates: sums over its minibatches, and what is not a mean. */
typedef struct UpdateFigures {
  PolicyStats policy;
  ValueStats value;
  int actor_steps, critic_steps, epochs;
  double first_ratio_dev; /* max |ratio - 1| before any update of the step */
  double actor_lr, critic_lr;
  bool stopped; /* by max_kl */
} UpdateFigures;

/* One step: 0-based. The loop of RLHF (ppo_loop.c). */
int ppo_step(void *ctx, int64_t step, Error *err);

/* Prompts of one step: indices into the training set. */
typedef struct PromptPick {
  const PromptSet *set;
  int n, samples;
  int32_t *ids; /* [n] */
} PromptPick;
PromptPick ppo_pick_prompts(Ppo *p);
/* Generates `samples` answers to each prompt, all ranks together. The seed and step of gen are as
 * set by the caller. Collective. */
int ppo_generate(Ppo *p, const PromptPick *pick, const GenParams *gen, Rollout **out, Error *err);
/* What an answer says; the caller frees. Ids that the tokenizer lacks are left out. */
char *ppo_answer_text(Ppo *p, const Rollout *ro, int b, size_t *len, Error *err);

/* The forwards over a rollout: each rank its share, every rank gets all. Collective. */
void ppo_logprobs(Ppo *p, Model *m, Rollout *ro, RolloutField field);
void ppo_values(Ppo *p, Rollout *ro);
/* Scores of all terms, weighted. */
int ppo_scores(Ppo *p, const PromptSet *set, Rollout *ro, ScoreFigures *out, Error *err);
int score_terms_open(Ppo *p, Error *err);
void score_terms_close(Ppo *p);

/* Adds a rollout's sequences and tokens to the phase under way. */
void ppo_count(Ppo *p, const Rollout *ro, const int32_t *ids, int n);
/* Held-out prompts answered and scored; samples/step_NNNNNN.jsonl. Collective. */
int ppo_evaluate(void *ctx, int64_t step, Error *err);
/* The step's figures for its line (pure but for the report). */
void ppo_report(Ppo *p, const Rollout *ro, const ScoreFigures *scores, const ShapeStats *shape,
                const UpdateFigures *u, double kl_coef);

#endif
