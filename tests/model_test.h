/* What the tests of model/ share: a device and an arena, tiny configs with every feature on,
 * batches of odd sizes. */
#ifndef MODEL_TEST_H
#define MODEL_TEST_H

#include <math.h>
#include <stdio.h>

#include "core/fs.h"
#include "core/rng.h"
#include "model/model.h"
#include "tests/test.h"

typedef struct Bench {
  Device *device;
  Grid *grid; /* all ranks */
  Grid alone; /* one rank by itself: what the others are compared with */
  Arena *arena;
} Bench;

/* On a GPU that a checker looks at, full of NaN: what is used without having been written shows in
 * the results. initcheck, which does not see what NVIDIA's kernels write through the copy engine,
 * would report all that comes of it. */
static inline void *bench_take(void *ctx, size_t bytes) {
  static char nan[1 << 20];
  char *p = device_alloc(ctx, bytes);
  if (!test_is_watched() || device_kind(ctx) != DEVICE_CUDA) return p;
  memset(nan, 0xff, sizeof nan);
  for (size_t at = 0; at < bytes; at += sizeof nan)
    device_upload(ctx, p + at, nan, bytes - at < sizeof nan ? bytes - at : sizeof nan);
  return p;
}
static inline void bench_give(void *ctx, void *p) { device_free(ctx, p); }

/* device NULL, with the reason: no such device here. */
static inline Bench bench_open_on(DeviceKind kind, Error *err) {
  Bench b = {.alone = {.world = 1, .nodes = 1, .local = 1}};
  b.device = device_open(kind, 1, err);
  if (!b.device) return b;
  b.grid = grid_create(0, err);
  if (!b.grid || grid_attach(b.grid, b.device, err)) die("%s", err->msg);
  b.arena = arena_create(b.device, bench_take, bench_give);
  return b;
}

static inline Bench bench_open(void) {
  Error err = {""};
  Bench b = bench_open_on(DEVICE_CPU, &err);
  if (!b.device) die("%s", err.msg);
  return b;
}

static inline void bench_close(Bench *b) {
  arena_free(b->arena);
  grid_free(b->grid);
  device_close(b->device);
}

/* Odd sizes everywhere, grouped heads, heads x size is not hidden. */
static inline ModelConfig tiny_config(bool tied, bool biases) {
  return (ModelConfig){.family = "llama",
                       .vocab_size = 37,
                       .hidden = 15,
                       .n_layers = 2,
                       .n_heads = 6,
                       .n_kv_heads = 2,
                       .head_dim = 4,
                       .ffn = 22,
                       .max_positions = 64,
                       .norm_eps = 1e-5f,
                       .tied_head = tied,
                       .qkv_bias = biases,
                       .o_bias = biases,
                       .mlp_bias = biases,
                       .score_bias = biases,
                       .rope_theta = 10000,
                       .init_std = 0.2f,
                       .bos_id = 1,
                       .pad_id = -1,
                       .n_eos = 1,
                       .eos_ids = {2}};
}

static inline ModelOptions tiny_options(HeadKind head) {
  return (ModelOptions){.head = head, .trainable = true, .seed = 7, .zero = {.stage = 3}};
}

static inline PassPlan plan_of(bool train, const ModelOptions *o) {
  return (PassPlan){
      .train = train, .recompute = o->recompute, .recompute_blocks = o->recompute_blocks};
}

/* Ways to recompute: none, full, selective, and selective with one or all blocks whole. */
enum { RECOMPUTE_WAYS = 5 };
static inline void set_recompute(ModelOptions *o, int way) {
  o->recompute = way < 3 ? (Recompute)way : RECOMPUTE_SELECTIVE;
  o->recompute_blocks = way == 3 ? 1 : way == 4 ? 1000 : 0;
}

/* Random weights; norms and biases away from 1 and 0, so that a forgotten one shows. */
static inline Model *tiny_model(Bench *b, Grid *g, const ModelConfig *c, const ModelOptions *o) {
  Model *m = model_create(b->device, g, b->arena, c, o);
  ZeroPP *z = model_zero(m);
  for (int p = 0; p < zeropp_n_params(z); p++) {
    const ParamSpec *s = zeropp_spec(z, p);
    int64_t start, count;
    float *w = zeropp_shard(z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count && s->ndim == 1; i++)
      w[i] += 0.2f * rng_normal(99, rng_hash(s->name), (uint64_t)(start + i));
    zeropp_shard_written(z, STATE_MASTER, p);
  }
  zeropp_weights_written(z);
  return m;
}

/* Sequences of these lengths with random tokens; tokens depend on (sequence, place) only. */
typedef struct TestBatch {
  int n_seqs, n_tokens, n_rows;
  int32_t offsets[32], tokens[512], rows[512], targets[512];
} TestBatch;

static inline TestBatch test_batch(int n_seqs, const int *lengths, int vocab) {
  TestBatch b = {.n_seqs = n_seqs};
  for (int s = 0; s < n_seqs; s++) {
    for (int t = 0; t < lengths[s]; t++) {
      uint32_t r = rng_block(5, (uint64_t)s, (uint64_t)t).v[0];
      b.tokens[b.n_tokens++] = (int32_t)(r % (uint32_t)vocab);
    }
    b.offsets[s + 1] = b.n_tokens;
  }
  for (int s = 0; s < n_seqs; s++)
    for (int t = b.offsets[s]; t + 1 < b.offsets[s + 1]; t++, b.n_rows++) {
      b.rows[b.n_rows] = t;
      b.targets[b.n_rows] = b.tokens[t + 1];
    }
  return b;
}

static inline Batch as_batch(const TestBatch *b) {
  return (Batch){.n_seqs = b->n_seqs, .offsets = b->offsets, .tokens = b->tokens};
}

/* Sequence s of b as a batch of its own. */
static inline TestBatch one_sequence(const TestBatch *b, int s) {
  TestBatch one = {.n_seqs = 1, .n_tokens = b->offsets[s + 1] - b->offsets[s]};
  one.offsets[1] = one.n_tokens;
  for (int t = 0; t < one.n_tokens; t++) one.tokens[t] = b->tokens[b->offsets[s] + t];
  for (int t = 0; t + 1 < one.n_tokens; t++, one.n_rows++) {
    one.rows[t] = t;
    one.targets[t] = one.tokens[t + 1];
  }
  return one;
}

/* A loss whose coefficients depend on the row's place in its sequence only, so that packing does
 * not change it: sum of a_t logprob + b_t entropy. */
typedef struct TestLoss {
  const int32_t *rows, *offsets; /* of the batch at hand */
  double sum;
} TestLoss;

static inline int place_in_sequence(const TestLoss *l, int row) {
  int s = 0;
  while (l->offsets[s + 1] <= row) s++;
  return row - l->offsets[s];
}
static inline float coef_logprob(int t) { return 0.3f * sinf(1.0f + (float)t); }
static inline float coef_entropy(int t) { return 0.2f * cosf(2.0f + (float)t); }

static inline void test_lm_loss(void *ctx, int first, int n, const float *logprob,
                                const float *entropy, float *dlogprob, float *dentropy) {
  TestLoss *l = ctx;
  for (int i = 0; i < n; i++) {
    int t = place_in_sequence(l, l->rows[first + i]);
    l->sum += (double)coef_logprob(t) * (double)logprob[i];
    dlogprob[i] = coef_logprob(t);
    if (!entropy) continue;
    l->sum += (double)coef_entropy(t) * (double)entropy[i];
    dentropy[i] = coef_entropy(t);
  }
}

static inline void test_value_loss(void *ctx, int n, const float *values, float *dvalues) {
  TestLoss *l = ctx;
  for (int i = 0; i < n; i++) {
    int t = place_in_sequence(l, l->rows[i]);
    l->sum += (double)coef_logprob(t) * (double)values[i];
    dvalues[i] = coef_logprob(t);
  }
}

enum { WITH_ENTROPY = 1, COLD = 2 };
/* Adds the batch's gradient to the shards; the loss. */
static inline double train_batch(Model *m, const TestBatch *b, int flags) {
  TestLoss l = {.rows = b->rows, .offsets = b->offsets};
  float temperature = flags & COLD ? 0.7f : 1.0f;
  if (model_head(m) == HEAD_LM)
    model_train_lm(m, as_batch(b), b->n_rows, b->rows, b->targets, temperature,
                   flags & WITH_ENTROPY, test_lm_loss, &l);
  else
    model_train_values(m, as_batch(b), b->n_rows, b->rows, test_value_loss, &l);
  return l.sum;
}

/* The same loss by inference. */
static inline double eval_batch(Model *m, const TestBatch *b, int flags) {
  float value[512], entropy[512], d[512], de[512];
  TestLoss l = {.rows = b->rows, .offsets = b->offsets};
  float temperature = flags & COLD ? 0.7f : 1.0f;
  if (model_head(m) == HEAD_LM) {
    model_logprobs(m, as_batch(b), b->n_rows, b->rows, b->targets, temperature, value, entropy);
    test_lm_loss(&l, 0, b->n_rows, value, flags & WITH_ENTROPY ? entropy : NULL, d, de);
  } else {
    model_values(m, as_batch(b), b->n_rows, b->rows, value);
    test_value_loss(&l, b->n_rows, value, d);
  }
  return l.sum;
}

/* A pass with five blocks of the config takes no more of the arena than the plan says, nor less
 * than `least` of it: chunks, rounding to 64 bytes and the row lists are all it may be off by.
 * kind: every way to recompute, with either head, in training and in inference. */
enum { PASS_KINDS = 4 * RECOMPUTE_WAYS };
static inline void check_activation_plan(Bench *bench, ModelConfig c, int kind, double least,
                                         const char *name) {
  static const int lengths[] = {60, 50, 64, 40, 62, 64};
  bool train = kind < 2 * RECOMPUTE_WAYS;
  c.n_layers = 5;
  ModelOptions o = tiny_options(kind / RECOMPUTE_WAYS % 2 ? HEAD_SCALAR : HEAD_LM);
  set_recompute(&o, kind % RECOMPUTE_WAYS);
  Model *m = tiny_model(bench, bench->grid, &c, &o);
  TestBatch b = test_batch(6, lengths, c.vocab_size);
  arena_reset_peak(bench->arena);
  zeropp_zero_grad(model_zero(m));
  if (train)
    train_batch(m, &b, 0);
  else
    eval_batch(m, &b, 0);
  double used = (double)arena_peak(bench->arena);
  double plan = (double)model_activation_bytes(&c, o.head, b.n_tokens, plan_of(train, &o));
  if (used > plan || used < least * plan)
    fail_msg("%s, kind %d: planned %.0f bytes, used %.0f", name, kind, plan, used);
  model_free(m);
}

/* Largest difference of two models' shards over the largest magnitude of each parameter; the
 * parameter where it is. `whole` is on one rank and holds all. */
static inline double shard_error(Model *m, Model *whole, StateKind kind, const char **where) {
  double worst = 0;
  ZeroPP *a = model_zero(m), *b = model_zero(whole);
  for (int p = 0; p < zeropp_n_params(a); p++) {
    int64_t start, count, first, all;
    const float *x = zeropp_shard(a, kind, p, &start, &count);
    const float *y = zeropp_shard(b, kind, p, &first, &all);
    double most = 1e-12;
    for (int64_t i = 0; i < all; i++) most = fmax(most, fabs((double)y[i]));
    for (int64_t i = 0; i < count; i++) {
      double e = fabs((double)x[i] - (double)y[start + i]) / most;
      if (e <= worst) continue;
      worst = e;
      if (where) *where = zeropp_spec(a, p)->name;
    }
  }
  return worst;
}

#endif
