/* The weights of a rollout: how the trunk for generation finds them. */
#include "model/internal.h"

/* Tokens are looked up in the first unit's tables. */
static ZeroPPRollout rollout_of(RolloutWeights weights, WireKind format) {
  return (ZeroPPRollout){.weights = weights, .format = format, .whole_units = 1};
}

int model_rollout_check(const Model *m, RolloutWeights weights, WireKind format, Error *err) {
  return zeropp_rollout_check(m->device, zeropp_config_of(m->zero), zeropp_spec(m->zero, 0),
                              zeropp_n_params(m->zero), rollout_of(weights, format), err);
}

void model_rollout_begin(Model *m, RolloutWeights weights, WireKind format) {
  zeropp_rollout_begin(m->zero, rollout_of(weights, format));
}

void model_rollout_end(Model *m) { zeropp_rollout_end(m->zero); }

int model_rollout_plan(const Device *d, const ModelConfig *c, const ZeroPPConfig *zero,
                       RolloutWeights weights, WireKind format, int *coded, int *matrices,
                       Error *err) {
  ParamSpec *specs;
  ZeroPPRollout r = rollout_of(weights, format);
  int n = model_specs(c, HEAD_LM, &specs), rc = zeropp_rollout_check(d, zero, specs, n, r, err);
  *coded = zeropp_rollout_coded(zero, specs, n, r, matrices);
  free(specs);
  return rc;
}

uint64_t model_rollout_bytes(const ModelConfig *c, const ZeroPPConfig *zero, int nodes, int local,
                             RolloutWeights weights, WireKind format) {
  ParamSpec *specs;
  int n = model_specs(c, HEAD_LM, &specs);
  uint64_t bytes = zeropp_rollout_memory(zero, specs, n, nodes, local, rollout_of(weights, format));
  free(specs);
  return bytes;
}

Comm *model_rollout_group(const Model *m, RolloutWeights weights) {
  const ZeroPPConfig *c = zeropp_config_of(m->zero);
  if (weights == ROLLOUT_TENSOR_PARALLEL) return m->grid->intra;
  if (weights == ROLLOUT_REPLICA || c->stage < 3) return NULL;
  return c->hpz || m->grid->nodes == 1 ? m->grid->intra : m->grid->all;
}

bool model_decode_captures(const Model *m, int rows) {
  if (zeropp_in_rollout(m->zero, ROLLOUT_TENSOR_PARALLEL))
    return sliced_block_bytes(m, rows) <= comm_captured_bytes(m->grid->dev_intra);
  return !zeropp_in_rollout(m->zero, ROLLOUT_STREAM);
}
