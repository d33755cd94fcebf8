/* What the benchmarks work on: random weights, random tokens that are the same in every step, the
 * mean loss over them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "core/rng.h"
#include "orchestrator/cli_bench.h"

enum { SEED = 1 };

void *bench_take(void *ctx, size_t bytes) { return device_alloc(ctx, bytes); }
void bench_give(void *ctx, void *p) { device_free(ctx, p); }

CliResult bench_rig_open(BenchRig *r, const Args *a, Error *err) {
  const char *device, *precision;
  *r = (BenchRig){.lr = args_float(a, "--lr")};
  if (args_device(a, &device, &precision, err)) return CLI_USAGE;
  r->grid = grid_create((int)args_int(a, "--ranks-per-node"), err);
  if (!r->grid) return CLI_FAILED;
  r->device = device_choose(r->grid, device, (int)args_int(a, "--threads"), false, err);
  if (!r->device) return CLI_FAILED;
  if (precision_choose(precision, r->device, &r->compute, err) == 0) return CLI_OK;
  error_prefix(err, "--precision");
  return CLI_FAILED;
}

/* The grid may hold communicators of the device. */
void bench_rig_close(BenchRig *r) {
  if (r->grid) grid_free(r->grid);
  if (r->device) device_close(r->device);
}

/* Thirteen million parameters, few of them in the embedding: bound by a slow network, small enough
 * for any host. */
static ModelConfig default_model(void) {
  return (ModelConfig){.family = "llama",
                       .vocab_size = 1024,
                       .hidden = 256,
                       .n_layers = 16,
                       .n_heads = 4,
                       .n_kv_heads = 4,
                       .head_dim = 64,
                       .ffn = 688,
                       .max_positions = 4096, /* more than --length is by default */
                       .norm_eps = 1e-5F,
                       .rope = ROPE_DEFAULT,
                       .rope_theta = 10000,
                       .rope_factor = 1,
                       .init_std = 0.02F,
                       .bos_id = -1,
                       .pad_id = -1,
                       .head = HEAD_LM,
                       .dtype = DT_F32};
}

static int read_model(const char *path, ModelConfig *c, Error *err) {
  *c = default_model();
  if (!path) return 0;
  if (fs_is_dir(path) ? model_config_read(path, c, err) : model_config_read_file(path, c, err))
    return -1;
  return c->head == HEAD_LM ? 0 : error_set(err, "%s: expected a language model", path);
}

int bench_model(const char *path, const char **name, ModelConfig *c, Error *err) {
  *name = path ? path : "a Llama of 16 layers, hidden 256";
  if (read_model(path, c, err)) return -1;
  return model_config_check(c, err) ? error_prefix(err, "%s", *name) : 0;
}

/* Weights of the right size: a few thousand normal numbers over and over, since billions of them
 * would take longer than the benchmark. */
static void fill_param(ZeroPP *z, int param, const float *normal, float *scaled, int64_t n) {
  const ParamSpec *s = zeropp_spec(z, param);
  const float one = 1, zero = 0;
  if (s->init != INIT_NORMAL) {
    zeropp_init_repeated(z, param, s->init == INIT_ONES ? &one : &zero, 1);
    return;
  }
  for (int64_t i = 0; i < n; i++) scaled[i] = s->init_std * normal[i];
  zeropp_init_repeated(z, param, scaled, n);
}

Model *bench_model_create(Device *d, Grid *g, Arena *arena, const ModelConfig *c,
                          const ModelOptions *o) {
  enum { NORMALS = 65521 }; /* prime: rows of a matrix differ */
  Model *m = model_new(d, g, arena, c, o);
  ZeroPP *z = model_zero(m);
  float *normal = mem_alloc(2 * NORMALS, sizeof *normal);
  rng_normals(SEED, o->seed, 0, NORMALS, normal);
  for (int p = 0; p < zeropp_n_params(z); p++) fill_param(z, p, normal, normal + NORMALS, NORMALS);
  free(normal);
  zeropp_weights_written(z);
  return m;
}

Tokens tokens_draw(const ModelConfig *c, int n_seqs, int n, uint64_t stream) {
  Tokens t = {.n_seqs = n_seqs};
  t.offsets = mem_alloc((size_t)t.n_seqs + 1, sizeof *t.offsets);
  t.tokens = mem_alloc((size_t)n, sizeof *t.tokens);
  t.rows = mem_alloc((size_t)n, sizeof *t.rows);
  t.targets = mem_alloc((size_t)n, sizeof *t.targets);
  for (int i = 0; i < n; i++)
    t.tokens[i] = (int32_t)(rng_uniform(SEED, stream, (uint64_t)i) * c->vocab_size);
  for (int s = 0; s <= t.n_seqs; s++) t.offsets[s] = (int32_t)((int64_t)n * s / t.n_seqs);
  for (int s = 0; s < t.n_seqs; s++)
    for (int32_t i = t.offsets[s]; i + 1 < t.offsets[s + 1]; i++) {
      t.rows[t.n_rows] = i;
      t.targets[t.n_rows++] = t.tokens[i + 1];
    }
  return t;
}

void tokens_free(Tokens *t) {
  free(t->offsets);
  free(t->tokens);
  free(t->rows);
  free(t->targets);
}

static void loss_rows(void *ctx, int first, int n, const float *logprob, const float *entropy,
                      float *dlogprob, float *dentropy) {
  (void)entropy, (void)dentropy;
  StepLoss *l = ctx;
  if (first == 0) l->reached = clock_seconds();
  for (int i = 0; i < n; i++) {
    dlogprob[i] = (float)-l->weight;
    l->sum -= (double)logprob[i];
  }
}

void bench_micro_batch(Model *m, const Tokens *t, StepLoss *l) {
  Batch b = {.n_seqs = t->n_seqs, .offsets = t->offsets, .tokens = t->tokens};
  model_train_lm(m, b, t->n_rows, t->rows, t->targets, 1.0F, false, loss_rows, l);
}

AdamW bench_adamw(double lr) {
  return (AdamW){.lr = (float)lr, .beta1 = 0.9F, .beta2 = 0.95F, .eps = 1e-8F};
}

Count count_now(void) {
  Traffic t = traffic_now();
  Count c = {.seconds = clock_seconds()};
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    c.intra += (double)t.of[k].intra_bytes;
    c.inter += (double)t.of[k].inter_bytes;
    c.exposed += t.of[k].seconds;
    c.hidden += t.of[k].hidden_seconds;
  }
  return c;
}
