/* Minibatches: their order, and the plan and the token weights that actor and critic share. */
#include "core/minibatch.h"

#include <stdlib.h>

#include "core/rng.h"

int32_t *packed_lengths(const int32_t *offsets, int n) {
  int32_t *lengths = mem_alloc((size_t)n, sizeof *lengths);
  for (int b = 0; b < n; b++) lengths[b] = offsets[b + 1] - offsets[b];
  return lengths;
}

Minibatch minibatch_create(const Rollout *ro, const int32_t *ids, int n, bool sequence_mean,
                           int rank, int world, int micro_tokens) {
  Minibatch mb = {.weight_N = mem_zalloc((size_t)ro->n_tokens, sizeof *mb.weight_N)};
  double *weight_B = mem_zalloc((size_t)ro->n_seqs, sizeof *weight_B);
  rollout_weights(ro, ids, n, sequence_mean, weight_B);
  for (int i = 0; i < n; i++) {
    int b = ids ? ids[i] : i;
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) mb.weight_N[t] = weight_B[b];
    mb.tokens += rollout_response_len(ro, b);
  }
  free(weight_B);
  int32_t *lengths = packed_lengths(ro->offsets, ro->n_seqs);
  mb.plan = plan_batches(lengths, ids, n, rank, world, micro_tokens);
  free(lengths);
  return mb;
}

void minibatch_order(uint64_t seed, int64_t step, int64_t epochs, int64_t epoch, int32_t *ids,
                     int n) {
  uint64_t stream = rng_mix(rng_hash("minibatches"), (uint64_t)(step * epochs + epoch));
  rng_permute(seed, stream, ids, n);
}

void minibatch_free(Minibatch *mb) {
  plan_free(&mb->plan);
  free(mb->weight_N);
  mb->weight_N = NULL;
}
