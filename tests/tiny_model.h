/* A tiny random model on however many ranks there are, a rollout for it, and what the tests of the
 * updates compare: whole gradients and whole weights, the same on every rank. */
#ifndef TESTS_TINY_MODEL_H
#define TESTS_TINY_MODEL_H

#include <math.h>

#include "core/rng.h"
#include "model/model.h"
#include "tests/test.h"

#define TINY_VOCAB 37

typedef struct World {
  Grid *grid;
  Device *device;
  Arena *arena;
} World;

static inline void *tiny_alloc(void *ctx, size_t bytes) { return device_alloc(ctx, bytes); }
static inline void tiny_release(void *ctx, void *p) { device_free(ctx, p); }

static inline World world_open(void) {
  Error err = {""};
  World w = {.grid = grid_create(0, &err), .device = device_open(DEVICE_CPU, 1, &err)};
  if (!w.grid || !w.device) fail_msg("%s", err.msg);
  w.arena = arena_create(w.device, tiny_alloc, tiny_release);
  return w;
}

static inline void world_close(World *w) {
  arena_free(w->arena);
  device_close(w->device);
  grid_free(w->grid);
}

/* Wide initial weights, so that neither logits nor gradients are near 0. */
static inline Model *tiny_model(World *w, HeadKind head, uint64_t seed) {
  ModelConfig c = {.family = "llama",
                   .vocab_size = TINY_VOCAB,
                   .hidden = 24,
                   .n_layers = 2,
                   .n_heads = 3,
                   .n_kv_heads = 1,
                   .head_dim = 8,
                   .ffn = 40,
                   .max_positions = 64,
                   .norm_eps = 1e-5f,
                   .rope_theta = 10000,
                   .init_std = 0.25f,
                   .bos_id = 1,
                   .pad_id = -1,
                   .n_eos = 1,
                   .eos_ids = {2},
                   .head = head,
                   .dtype = DT_F32};
  ModelOptions o = {
      .head = head, .trainable = true, .init_head = true, .seed = seed, .zero = {.stage = 3}};
  return model_create(w->device, w->grid, w->arena, &c, &o);
}

/* Nine sequences of odd sizes; the third has no response, the fifth one token of it. */
static inline Rollout *tiny_rollout(void) {
  const int32_t lengths[9] = {9, 14, 6, 21, 5, 11, 3, 17, 8};
  const int32_t prompts[9] = {4, 3, 6, 10, 4, 1, 1, 8, 2};
  Rollout *ro = rollout_create(9, lengths);
  for (int b = 0; b < 9; b++) ro->prompt_len[b] = prompts[b];
  for (int t = 0; t < ro->n_tokens; t++)
    ro->tokens[t] = (int32_t)(rng_uniform(5, 0, (uint64_t)t) * TINY_VOCAB);
  return ro;
}

/* One state kind of all parameters, in the order of the table, gathered from all ranks. */
static inline float *tiny_state(Model *m, StateKind kind) {
  ZeroPP *z = model_zero(m);
  size_t n = (size_t)zeropp_numel(z), at = 0;
  double *sum = mem_zalloc(n, sizeof *sum);
  for (int p = 0; p < zeropp_n_params(z); p++) {
    int64_t start, count;
    const float *own = zeropp_shard(z, kind, p, &start, &count);
    for (int64_t i = 0; i < count; i++) sum[at + (size_t)(start + i)] = (double)own[i];
    at += (size_t)(zeropp_spec(z, p)->dim[0] * zeropp_spec(z, p)->dim[1]);
  }
  comm_all_reduce_f64(model_grid(m)->all, sum, (int)n, false);
  float *x = mem_alloc(n, sizeof *x);
  for (size_t i = 0; i < n; i++) x[i] = (float)sum[i];
  free(sum);
  return x;
}

static inline size_t tiny_numel(Model *m) { return (size_t)zeropp_numel(model_zero(m)); }

/* Adds h * direction (of tiny_state's order) to the weights. */
static inline void tiny_move(Model *m, const float *direction, double h) {
  ZeroPP *z = model_zero(m);
  size_t at = 0;
  for (int p = 0; p < zeropp_n_params(z); p++) {
    int64_t start, count;
    float *own = zeropp_shard(z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++)
      own[i] = (float)((double)own[i] + h * (double)direction[at + (size_t)(start + i)]);
    at += (size_t)(zeropp_spec(z, p)->dim[0] * zeropp_spec(z, p)->dim[1]);
  }
  zeropp_weights_written(z);
}

/* Sequence b alone on rank 0, nothing on the others: what a single rank would run. */
static inline Batch tiny_alone(const Grid *g, const int32_t *offsets, const int32_t *tokens, int b,
                               int32_t own_offsets[2]) {
  own_offsets[0] = 0;
  own_offsets[1] = offsets[b + 1] - offsets[b];
  return (Batch){.n_seqs = g->rank == 0, .offsets = own_offsets, .tokens = tokens + offsets[b]};
}

static inline void check_close(double got, double want, double tolerance) {
  if (!(fabs(got - want) <= tolerance * fmax(1, fabs(want))))
    fail_msg("got %.9g, expected %.9g (tolerance %g)", got, want, tolerance);
}

/* No step: weights and moments of the optimizer stay, the gradient remains to be looked at. */
static inline AdamW tiny_no_step(void) {
  return (AdamW){.lr = 0, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
}

/* Compares the gradient with another; 1e-5 of the largest: sums of floats in another order. */
static inline void check_gradient(Model *m, const float *want) {
  float *got = tiny_state(m, STATE_GRAD);
  double e = test_rel_error(got, want, tiny_numel(m));
  free(got);
  if (!(e < 1e-5)) fail_msg("the gradient is off by %.3g of its largest element", e);
}

/* The derivative of loss along the gradient must be the gradient's length. */
static inline void check_differences(Model *m, double (*loss)(Model *, void *), void *ctx,
                                     const float *gradient) {
  size_t n = tiny_numel(m);
  double norm = 0;
  float *direction = mem_alloc(n, sizeof *direction);
  for (size_t i = 0; i < n; i++) norm += (double)gradient[i] * (double)gradient[i];
  norm = sqrt(norm);
  for (size_t i = 0; i < n; i++) direction[i] = (float)((double)gradient[i] / norm);
  const double h = 2e-3;
  tiny_move(m, direction, h);
  double up = loss(m, ctx);
  tiny_move(m, direction, -2 * h);
  double down = loss(m, ctx);
  tiny_move(m, direction, h);
  free(direction);
  /* The loss is good to some 1e-6 and its third derivative is of order one: (1e-6 + h^2) / h. */
  check_close((up - down) / (2 * h) / norm, 1, 5e-3);
}

#endif
