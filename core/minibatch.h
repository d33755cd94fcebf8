/* What a loss over one minibatch of a rollout needs: this rank's micro-batches and the weight of
 * every response token. Both are computed from the whole minibatch, the same on every rank, before
 * the first micro-batch runs. */
#ifndef CORE_MINIBATCH_H
#define CORE_MINIBATCH_H

#include "core/rollout.h"

typedef struct Minibatch {
  BatchPlan plan;
  int64_t tokens;   /* response tokens of the minibatch, all ranks */
  double *weight_N; /* indexed like the rollout's tokens; sums to 1 over the minibatch */
} Minibatch;

/* ids[0..n): global sequence ids; NULL: all. */
Minibatch minibatch_create(const Rollout *ro, const int32_t *ids, int n, bool sequence_mean,
                           int rank, int world, int micro_tokens);
void minibatch_free(Minibatch *mb);

/* The order in which an epoch of a step goes through n sequences: minibatches are equal parts of
 * it, one after another. epochs: of a step. */
void minibatch_order(uint64_t seed, int64_t step, int64_t epochs, int64_t epoch, int32_t *ids,
                     int n);

/* Lengths of n packed sequences; the caller frees. */
int32_t *packed_lengths(const int32_t *offsets, int n);

#endif
