/* The same weights as another model: a critic from a reward model, a reference from an actor. */
#include <string.h>

#include "model/internal.h"

static bool is_head_param(const Model *m, int param) {
  return param == m->params.head.weight || param == m->params.head.bias;
}

static int check_derive(const Model *from, const ModelOptions *o, Error *err) {
  if (o->head == HEAD_SCALAR && from->head != HEAD_SCALAR && !o->init_head)
    return error_set(err,
                     "the source is a language model without a scalar head; expected a reward "
                     "model, or init_head: true to start one at random");
  if (o->head == HEAD_LM && from->head != HEAD_LM && !from->config.tied_head)
    return error_set(err, "the source is a reward model and has no language-model head");
  return 0;
}

Model *model_derive(Model *from, const ModelOptions *o, Error *err) {
  if (check_derive(from, o, err)) return NULL;
  ModelConfig config = from->config;
  if (from->head != HEAD_SCALAR) config.score_bias = false;
  Model *m = model_new(from->device, from->grid, from->arena, &config, o);
  m->rope_fixed = from->rope_fixed;
  m->source_config = json_incref(from->source_config);
  m->source_generation = json_incref(from->source_generation);
  for (int i = 0; i < zeropp_n_params(m->zero); i++) {
    int source = zeropp_find(from->zero, zeropp_spec(m->zero, i)->name);
    if (source < 0) {
      require(m->head == HEAD_SCALAR && is_head_param(m, i));
      zeropp_init_param(m->zero, i, o->seed);
      continue;
    }
    /* The same shape on the same grid: this rank owns the same range of both. */
    int64_t start, count, source_start, source_count;
    float *to = zeropp_shard(m->zero, STATE_MASTER, i, &start, &count);
    const float *at = zeropp_shard(from->zero, STATE_MASTER, source, &source_start, &source_count);
    require(start == source_start && count == source_count);
    if (count > 0) memcpy(to, at, (size_t)count * sizeof(float));
    zeropp_shard_written(m->zero, STATE_MASTER, i);
  }
  zeropp_weights_written(m->zero);
  return m;
}
