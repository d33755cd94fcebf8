/* A Model: its config, its sharded parameters, and the small things every call needs. */
#include "model/internal.h"

Model *model_new(Device *d, Grid *g, Arena *arena, const ModelConfig *c, const ModelOptions *o) {
  Error err = {""};
  if (model_config_check(c, &err)) die("%s", err.msg);
  Model *m = mem_zalloc(1, sizeof *m);
  m->config = *c;
  m->config.head = o->head;
  m->head = o->head;
  m->trainable = o->trainable;
  m->recompute = o->recompute;
  m->whole_blocks = recomputed_blocks(c, o->recompute, o->recompute_blocks);
  m->compute = o->zero.compute;
  m->device = d;
  m->ops = device_ops(d);
  m->grid = g;
  m->arena = arena;
  ParamSpec *specs;
  int n = params_list(&m->config, o->head, &specs, &m->params);
  ZeroPPConfig zero = o->zero;
  zero.trainable = o->trainable;
  m->zero = zeropp_create(d, g, &zero, specs, n);
  free(specs);
  return m;
}

Model *model_create(Device *d, Grid *g, Arena *arena, const ModelConfig *c, const ModelOptions *o) {
  Model *m = model_new(d, g, arena, c, o);
  zeropp_init_random(m->zero, o->seed);
  return m;
}

void model_free(Model *m) {
  if (!m) return;
  zeropp_destroy(m->zero);
  rope_free(m);
  free(m->tokens_of);
  json_decref(m->source_config);
  json_decref(m->source_generation);
  free(m->params.block);
  free(m);
}

const ModelConfig *model_config(const Model *m) { return &m->config; }

int model_add_eos(Model *m, int id, Error *err) {
  ModelConfig *c = &m->config;
  for (int i = 0; i < c->n_eos; i++)
    if (c->eos_ids[i] == id) return 0;
  if (id < 0 || id >= c->vocab_size)
    return error_set(err, "EOS id %d is outside the model's vocabulary of %d", id, c->vocab_size);
  if (c->n_eos == MODEL_MAX_EOS)
    return error_set(err, "EOS id %d: the model has %d already, which is all that is supported", id,
                     c->n_eos);
  c->eos_ids[c->n_eos++] = id;
  return 0;
}
HeadKind model_head(const Model *m) { return m->head; }
ZeroPP *model_zero(Model *m) { return m->zero; }
Device *model_device(Model *m) { return m->device; }
Grid *model_grid(Model *m) { return m->grid; }
Arena *model_arena(Model *m) { return m->arena; }
DType model_compute(const Model *m) { return m->compute; }
double model_flops_done(const Model *m) { return m->flops; }

/* ---- arena tensors ---- */

/* Never NULL, so that an empty tensor is not taken for an absent operand. */
static void *push_bytes(Model *m, int64_t n, size_t size) {
  size_t bytes = (size_t)n * size;
  return arena_push(m->arena, bytes ? bytes : 1);
}

Tensor push_act(Model *m, int64_t rows, int64_t cols) {
  return tensor_2d(push_bytes(m, rows * cols, dtype_size(m->compute)), m->compute, rows, cols);
}

Tensor push_f32(Model *m, int64_t rows, int64_t cols) {
  return tensor_2d(push_bytes(m, rows * cols, sizeof(float)), DT_F32, rows, cols);
}

Tensor push_f32_1d(Model *m, int64_t n) {
  return tensor_1d(push_bytes(m, n, sizeof(float)), DT_F32, n);
}

Tensor push_i32(Model *m, int64_t n, const int32_t *host) {
  Tensor t = tensor_1d(push_bytes(m, n, sizeof(int32_t)), DT_I32, n);
  if (n > 0) device_upload(m->device, t.data, host, (size_t)n * sizeof(int32_t));
  return t;
}
