/* What the tests of generation share: a model with its device and arena, a set of requests, and the
 * comparison of results. */
#ifndef GENERATION_TEST_H
#define GENERATION_TEST_H

#include <math.h>

#include "core/rng.h"
#include "generation/generation.h"
#include "tests/test.h"

typedef struct World {
  Device *device;
  Grid *grid;
  Arena *arena;
  Model *model;
} World;

static void *world_take(void *ctx, size_t bytes) { return device_alloc(ctx, bytes); }
static void world_give(void *ctx, void *p) { device_free(ctx, p); }

static inline World world_open(void) {
  Error err = {""};
  World w = {.device = device_open(DEVICE_CPU, 1, &err)};
  w.grid = grid_create(0, &err);
  if (!w.device || !w.grid) fail_msg("%s", err.msg);
  w.arena = arena_create(w.device, world_take, world_give);
  return w;
}

static inline World world_load(const char *below) {
  Error err = {""};
  const char *dir = test_path(below);
  World w = world_open();
  ModelOptions o = {.head = HEAD_LM, .zero = {.stage = 3}};
  w.model = model_load(w.device, w.grid, w.arena, dir, &o, &err);
  if (!w.model) fail_msg("%s", err.msg);
  return w;
}

static inline World world_random(ModelConfig c) {
  World w = world_open();
  ModelOptions o = {.head = HEAD_LM, .seed = 9, .zero = {.stage = 3}};
  w.model = model_create(w.device, w.grid, w.arena, &c, &o);
  return w;
}

/* A small Llama with grouped heads; weights large enough for distributions far from uniform. */
static inline ModelConfig tiny_config(void) {
  return (ModelConfig){.family = "llama",
                       .vocab_size = 97,
                       .hidden = 48,
                       .n_layers = 3,
                       .n_heads = 4,
                       .n_kv_heads = 2,
                       .head_dim = 12,
                       .ffn = 80,
                       .max_positions = 160,
                       .norm_eps = 1e-5f,
                       .rope_theta = 10000,
                       .init_std = 0.1f,
                       .bos_id = 1,
                       .pad_id = -1};
}

static inline void world_close(World *w) {
  model_free(w->model);
  arena_free(w->arena);
  grid_free(w->grid);
  device_close(w->device);
}

/* n requests with prompts of 1 to `longest` random tokens; `per_prompt` samples of each. */
static inline GenRequest *make_requests(int n, int longest, int per_prompt, int vocab) {
  GenRequest *req = mem_alloc((size_t)n, sizeof *req);
  for (int i = 0; i < n; i++) {
    int id = i / per_prompt;
    int len = 1 + (int)(rng_block(11, 1, (uint64_t)id).v[0] % (unsigned)longest);
    int32_t *prompt = mem_alloc((size_t)len, sizeof *prompt);
    for (int t = 0; t < len; t++)
      prompt[t] = (int32_t)(rng_block(12, (uint64_t)id, (uint64_t)t).v[0] % (unsigned)vocab);
    req[i] = (GenRequest){
        .prompt = prompt, .prompt_len = len, .prompt_id = id, .sample_id = i % per_prompt};
  }
  return req;
}

static inline void free_requests(GenRequest *req, int n) {
  for (int i = 0; i < n; i++) free((void *)req[i].prompt);
  free(req);
}

static inline GenResult *generate_ok(World *w, const GenParams *p, const GenRequest *req, int n) {
  Error err = {""};
  GenResult *out = mem_alloc((size_t)n + 1, sizeof *out);
  if (generate(w->model, p, req, n, out, NULL, &err)) fail_msg("%s", err.msg);
  return out;
}

static inline void free_results(GenResult *r, int n) {
  gen_results_free(r, n);
  free(r);
}

/* The same tokens; log-probabilities to 1e-5: they come from matrices of other sizes, whose sums
 * run in another order (float epsilon 1.2e-7 times some tens of additions). */
static inline void expect_same(const GenResult *a, const GenResult *b) {
  assert_int_equal(a->n, b->n);
  assert_int_equal(a->ended, b->ended);
  assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens);
  for (int t = 0; t < a->n; t++)
    if (!(fabsf(a->logprobs[t] - b->logprobs[t]) < 1e-5f))
      fail_msg("log-probability %d: %.9g and %.9g", t, (double)a->logprobs[t],
               (double)b->logprobs[t]);
}

static inline void expect_all_same(const GenResult *a, const GenResult *b, int n) {
  for (int i = 0; i < n; i++) expect_same(&a[i], &b[i]);
}

#endif
