/* How recipes and options call a rollout's weights. */
#include <string.h>

#include "orchestrator/orchestrator.h"

static const char *const weights_names[] = {[ROLLOUT_REPLICA] = "replica",
                                            [ROLLOUT_TENSOR_PARALLEL] = "tensor_parallel",
                                            [ROLLOUT_STREAM] = "stream"};

int rollout_weights_parse(const char *word, RolloutWeights *out) {
  for (*out = ROLLOUT_REPLICA; *out <= ROLLOUT_STREAM; (*out)++)
    if (!strcmp(word, weights_names[*out])) return 0;
  *out = ROLLOUT_REPLICA;
  return -1;
}

const char *rollout_weights_name(RolloutWeights w) { return weights_names[w]; }

int rollout_format_parse(const char *word, WireKind *out) {
  static const struct {
    const char *word;
    WireKind kind;
  } known[] = {{"training", WIRE_F32}, {"int8", WIRE_INT8}, {"fp8", WIRE_FP8}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(word, known[i].word)) {
      *out = known[i].kind;
      return 0;
    }
  *out = WIRE_F32;
  return -1;
}
