/* Session: what the checks and the stages of one run share. Every rank holds the same; the fields
 * are filled from top to bottom (session_open, check_all, train_run).
 *
 * Stages hand their results on through Hugging Face folders in the run directory: RUN/sft,
 * RUN/reward, RUN/critic, RUN/actor. So a stage starts from the same bits whether the run got there
 * at once or was resumed. */
#ifndef ORCHESTRATOR_TRAIN_SESSION_H
#define ORCHESTRATOR_TRAIN_SESSION_H

#include "orchestrator/checkpoint.h"
#include "orchestrator/report.h"

typedef enum Role { ROLE_ACTOR, ROLE_REFERENCE, ROLE_CRITIC, ROLE_REWARD, ROLE_COUNT } Role;
const char *role_name(Role role);

typedef struct TrainData { /* train and held-out sets of the recipe's stages */
  SftSet sft, sft_held;
  PairSet pairs, pairs_held;
  PromptSet prompts, prompts_held;
} TrainData;

typedef struct Session {
  const Recipe *recipe;
  Grid *grid;
  Device *device;
  DType compute; /* precision of weights and activations */
  Arena *arena;  /* activations or KV cache, never both */

  /* check_all: */
  Tokenizer *tokenizer;
  TrainData data;
  bool has_config[ROLE_COUNT]; /* roles that some stage of the recipe needs */
  ModelConfig config[ROLE_COUNT];
  int64_t longest[STAGE_PPO + 1];           /* tokens of the longest sequence of each stage */
  uint64_t arena_bytes[STAGE_PPO + 1];      /* of each stage, from the memory plan */
  RecomputeChoice recompute[STAGE_PPO + 1]; /* of each stage, from the memory plan */
  RolloutWeights rollout_weights;           /* what the recipe and the memory plan come to */
  WireKind rollout_format;
  int64_t kv_tokens; /* of the rollout's KV cache, from the memory plan */

  /* train_run: */
  bool resumes;      /* until its first stage goes on */
  int lock;          /* rank 0: what keeps others out of the run directory; -1: none */
  char changes[640]; /* rank 0, resumed: keys in which the recipe is not the one of the run; "":
                        none */
  Report *report;
  TrainState state;
  char
      *resume_from; /* checkpoint whose models the stage under way starts from; NULL at its start */
} Session;

int session_open(Session *s, const Recipe *r, Error *err);
ZeroPPConfig session_zeropp(const Session *s); /* the recipe's, in the session's precision */
void session_close(Session *s);

/* ---- checks (check.c) ---- */
/* Fills tokenizer, data and configs; every problem found is a line of err. Collective. */
int check_all(Session *s, Error *err);

/* ---- models (train_models.c) ---- */
bool stage_in_recipe(const Recipe *r, StageKind kind);
const char *stage_name(StageKind kind);
bool rewards_need_model(const Recipe *r);
/* Does PPO hold this role, under this recipe? */
bool ppo_needs(const Recipe *r, Role role);

/* Where a role's weights come from when `stages_done` stages of the recipe have ended. */
typedef struct ModelStart {
  char *dir;              /* a Hugging Face folder, or NULL: random weights */
  const InitConfig *init; /* when dir is NULL */
  bool init_head;         /* a scalar head may start at random */
  Role origin;            /* the role whose source this is; its name seeds random weights */
} ModelStart;
int model_start(const Recipe *r, Role role, int stages_done, ModelStart *out, Error *err);
void model_start_free(ModelStart *m);
/* The config of random weights: token ids are the tokenizer's. */
ModelConfig init_model_config(const InitConfig *init, const Tokenizer *t);
HeadKind role_head(Role role);
/* Opens a role's model as the stage with index `stage` finds it. Collective. */
int model_open(Session *s, Role role, int stage, bool trainable, Model **out, Error *err);
/* Saves as RUN/NAME. Collective. */
int model_store(Session *s, Model *m, const char *name, StateKind kind, const json_t *extra,
                Error *err);

/* ---- the run directory (train_rundir.c) ---- */
/* Refuses a directory in use, unless overwrite or resume; writes recipe.yaml, but for a run that is
 * resumed: it keeps its own until rundir_resumed, when the new one has proved to go on with what is
 * there. Collective, both. */
int rundir_open(Session *s, bool resume, Error *err);
int rundir_resumed(Session *s, Error *err);
void rundir_close(Session *s);
/* Names of keys in which two printed recipes differ, the first few: "ppo.steps, run.seed and 3
 * more"; "" where they do not (train_changes.c). */
void recipe_changes(const char *old, size_t old_len, const char *new, size_t new_len, char *out,
                    size_t size);
/* run.overwrite (train_overwrite.c): refused where the directory holds no run but things of the
 * names that a run writes, and where this run reads what would be removed. 0 where nothing is to be
 * overwritten. */
int rundir_may_overwrite(const Recipe *r, Error *err);
int rundir_remove(const char *dir, Error *err);

/* ---- stages ---- */
/* A stage as the driver sees it: one step, an evaluation, and the models whose state counts. */
typedef struct Stage {
  const char *name;
  int64_t steps, eval_every;
  int64_t stuck; /* steps in a row that changed no model (train_stage.c) */
  TrainedModel models[2];
  int n_models;
  void *ctx;
  int (*step)(void *ctx, int64_t step, Error *err); /* 0-based; one optimizer step or PPO step */
  int (*evaluate)(void *ctx, int64_t step,
                  Error *err); /* after `step` steps; NULL: nothing held out */
} Stage;
/* Runs the steps that are left, with evaluations, step lines and checkpoints. Collective. */
int stage_run(Session *s, Stage *stage, Error *err);
/* Behind a stage whose result is saved: notes that `next` (or STAGE_DONE) goes on. Collective. */
int stage_end(Session *s, const char *next, Error *err);
/* The stages: each loads its models, runs, and saves its result. `index` is their place in the
 * recipe. Collective. */
int stage_sft(Session *s, int index, Error *err);
int stage_reward(Session *s, int index, Error *err);
int stage_ppo(Session *s, int index, Error *err);
/* Steps of a stage over n examples. */
int64_t stage_steps(int64_t steps, int64_t epochs, int n, int64_t batch);

#endif
