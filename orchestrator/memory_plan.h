/* The memory plan: bytes that one rank needs in each stage, computed from configs and the recipe
 * before anything is allocated. Pure arithmetic.
 *
 * Weights and optimizer state stay; activations (update, scoring) and the KV cache (rollout) are
 * never alive together: the larger of the two counts. */
#ifndef ORCHESTRATOR_MEMORY_PLAN_H
#define ORCHESTRATOR_MEMORY_PLAN_H

#include "orchestrator/orchestrator.h"

typedef struct PlannedModel {
  const ModelConfig *config;
  HeadKind head;
  bool trainable, ema;
} PlannedModel;

typedef struct PlannedStage {
  const char *name;
  PlannedModel model[4];
  int n_models;
  int nodes, local;
  ZeroPPConfig zero; /* trainable is the models' own */
  RecomputeChoice recompute;
  DeviceKind device;
  int64_t micro_tokens; /* asked for */
  int64_t longest;      /* longest sequence: it runs even when it is longer than micro_tokens */
  int64_t batch_tokens; /* most tokens of one optimizer step: no micro-batch is larger */
  /* Rollout of model[0]; rows 0: none. */
  RolloutWeights weights;
  WireKind format;
  int64_t rollout_rows, page_size;
  bool penalty; /* of repetition, in the rollout */
  bool kept;    /* rows of bits of the ids that answers were drawn from */
} PlannedStage;

typedef struct MemoryNeed { /* bytes, one rank */
  uint64_t weights, moments, gradients, ema, gathered;
  uint64_t activations;
  uint64_t rollout; /* KV cache and what a decode step takes */
  uint64_t replica; /* the actor's weights as the rollout holds them */
  uint64_t arena;   /* of the phase that needs most of it */
  uint64_t total;
} MemoryNeed;

/* What a plan may use of the device: kernels have scratch of their own, which on a GPU is a few
 * hundred MiB and no plan counts. */
uint64_t memory_limit(const Device *d);
MemoryNeed memory_need(const PlannedStage *s);
/* Where the choice is by memory: the least recomputation with which the stage fits; all blocks
 * whole where none does, which is a little less memory than full. */
void memory_choose_recompute(PlannedStage *s, uint64_t limit);
/* The kind of weights that lets the rollout have all its rows, or else most of them; the ones that
 * talk least come first. */
RolloutWeights memory_choose_weights(const PlannedStage *s, uint64_t limit);
/* Tokens of KV cache that `rollout_rows` sequences of the longest length fill. */
int64_t memory_kv_tokens(const PlannedStage *s);
/* Largest micro_tokens, at most the stage's own, with which it fits; 0: none does. */
int64_t memory_fit_micro(const PlannedStage *s, uint64_t limit);
/* Largest rollout_rows, at most the stage's own, with which it fits; 0: none does. */
int64_t memory_fit_rows(const PlannedStage *s, uint64_t limit);
void memory_print(const PlannedStage *stages, int n, uint64_t limit, FILE *out);

#endif
