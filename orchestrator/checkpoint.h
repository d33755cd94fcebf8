/* Checkpoints of a run: RUN/checkpoints/step_NNNNNN/ with the training state of each model
 * (zeropp_save_state) and state.json, which says where the run stands. A folder appears whole or
 * not at all; older ones are removed only after the new one is whole. Nothing in it depends on the
 * number of ranks. Where one stage ends and the next begins, a checkpoint without models is
 * written: the next stage starts from the folders that the one before left. */
#ifndef ORCHESTRATOR_CHECKPOINT_H
#define ORCHESTRATOR_CHECKPOINT_H

#include "orchestrator/report.h"

#define STAGE_DONE "done"

typedef struct TrainState {
  char stage[16];        /* the stage that goes on: sft, reward, ppo, or STAGE_DONE */
  int64_t step;          /* its steps that are behind */
  int64_t run_step;      /* the same over all stages */
  int64_t position;      /* items of the stage's data walk that were used */
  int64_t skipped;       /* optimizer steps that were skipped for NaN or Inf */
  double kl_coef;        /* of the KL controller */
  int64_t metrics_bytes; /* length of metrics.jsonl */
  ReportTotals totals;
} TrainState;

/* A model whose training state belongs to the checkpoint, as NAME.safetensors. */
typedef struct TrainedModel {
  const char *name;
  Model *model;
} TrainedModel;

/* Writes one and then removes all but the newest `keep`. Collective. */
int checkpoint_save(Grid *g, const char *run_dir, const TrainState *state,
                    const TrainedModel *models, int n_models, int64_t keep, Error *err);
/* The newest whole checkpoint: its folder (the caller frees) and state; NULL in *dir when there is
 * none. Half-written ones are passed over. Not collective. */
int checkpoint_newest(const char *run_dir, char **dir, TrainState *state, Error *err);
/* Loads the models' training state from a checkpoint's folder, when its files are as they were
 * written. Collective. */
int checkpoint_load_models(Grid *g, const char *dir, const TrainedModel *models, int n_models,
                           Error *err);

#endif
