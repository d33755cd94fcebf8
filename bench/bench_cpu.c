/* Tokens per second of training, scoring and decoding on the CPU, for a 10-million-parameter Llama
 * (vocabulary 4096, hidden 320, 6 layers, 5 heads, ffn 864, untied head), beside what the machine
 * can do: the measured GEMM rate and memory bandwidth. usage: bench_cpu [threads]
 *
 * Every figure is the best of several runs, since others may use the machine too. Model FLOPs count
 * the matrices and causal attention; backward twice the forward. A training step is forward, loss,
 * backward and AdamW. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "generation/generation.h"

enum { VOCAB = 4096, PROMPT = 128, NEW = 128 };

typedef struct Bench {
  Device *d;
  Grid *g;
  Arena *arena;
  Model *m;
  DeviceRates rates;
} Bench;

static void *arena_alloc(void *d, size_t bytes) { return device_alloc(d, bytes); }
static void arena_release(void *d, void *p) { device_free(d, p); }

static ModelConfig llama_10m(void) {
  ModelConfig c = {.family = "llama",
                   .vocab_size = VOCAB,
                   .hidden = 320,
                   .n_layers = 6,
                   .n_heads = 5,
                   .n_kv_heads = 5,
                   .head_dim = 64,
                   .ffn = 864,
                   .max_positions = 1024,
                   .norm_eps = 1e-5F,
                   .rope = ROPE_DEFAULT,
                   .rope_theta = 10000,
                   .init_std = 0.02F,
                   .bos_id = 1,
                   .pad_id = -1,
                   .head = HEAD_LM,
                   .dtype = DT_F32};
  return c;
}

static int32_t *random_tokens(int n) {
  int32_t *t = mem_alloc((size_t)n, sizeof *t);
  for (int i = 0; i < n; i++) t[i] = (int32_t)(rng_uniform(1, 2, (uint64_t)i) * VOCAB);
  return t;
}

/* ---- training and scoring: packed sequences, every token but the first is predicted ---- */

typedef struct Work {
  int n_seqs, len, n_rows;
  int32_t *offsets, *tokens, *rows, *targets;
  float *logprobs;
} Work;

static Work work_create(int n_seqs, int len) {
  Work w = {.n_seqs = n_seqs, .len = len, .n_rows = n_seqs * (len - 1)};
  w.offsets = mem_alloc((size_t)n_seqs + 1, sizeof(int32_t));
  w.tokens = random_tokens(n_seqs * len);
  w.rows = mem_alloc((size_t)w.n_rows, sizeof(int32_t));
  w.targets = mem_alloc((size_t)w.n_rows, sizeof(int32_t));
  w.logprobs = mem_alloc((size_t)w.n_rows, sizeof(float));
  for (int b = 0; b <= n_seqs; b++) w.offsets[b] = b * len;
  for (int i = 0; i < w.n_rows; i++) {
    w.rows[i] = i / (len - 1) * len + i % (len - 1);
    w.targets[i] = w.tokens[w.rows[i] + 1];
  }
  return w;
}

static void work_free(Work *w) {
  free(w->offsets);
  free(w->tokens);
  free(w->rows);
  free(w->targets);
  free(w->logprobs);
}

static void cross_entropy(void *ctx, int first, int n, const float *logprob, const float *entropy,
                          float *dlogprob, float *dentropy) {
  (void)first, (void)logprob, (void)entropy, (void)dentropy;
  const Work *w = ctx;
  for (int i = 0; i < n; i++) dlogprob[i] = -1.0F / (float)w->n_rows;
}

static void train_step(Bench *b, Work *w) {
  ZeroPP *z = model_zero(b->m);
  AdamW p = {.lr = 1e-5F, .beta1 = 0.9F, .beta2 = 0.95F, .eps = 1e-8F, .weight_decay = 0.1F};
  zeropp_zero_grad(z);
  model_train_lm(b->m, (Batch){w->n_seqs, w->offsets, w->tokens}, w->n_rows, w->rows, w->targets, 1,
                 false, cross_entropy, w);
  zeropp_step(z, p, 1);
}

static void score_step(Bench *b, Work *w) {
  model_logprobs(b->m, (Batch){w->n_seqs, w->offsets, w->tokens}, w->n_rows, w->rows, w->targets, 1,
                 w->logprobs, NULL);
}

static void bench_packed(Bench *b, const char *what, void (*step)(Bench *, Work *), int n_seqs,
                         int len) {
  Work w = work_create(n_seqs, len);
  double best = 1e9, flops = 0, end = clock_seconds() + 6;
  for (int i = 0; i < 4 || clock_seconds() < end; i++) {
    double t = clock_seconds(), before = model_flops_done(b->m);
    step(b, &w);
    device_sync(b->d);
    t = clock_seconds() - t;
    flops = model_flops_done(b->m) - before;
    if (t < best) best = t;
  }
  printf("%-9s %2d x %4d tokens  %9.0f tokens/s  %7.1f model GFLOP/s  %5.1f %% of GEMM\n", what,
         n_seqs, len, n_seqs * len / best, flops / best * 1e-9,
         100 * flops / best / b->rates.gemm_flops);
  work_free(&w);
}

/* ---- decoding ---- */

/* What bounds a decode step of n sequences: the arithmetic of the matrices, or reading the weights
 * and the cache, half filled by the answers on average. */
static double decode_bound(const Bench *b, int n) {
  const ModelConfig *c = model_config(b->m);
  double weights = (double)(model_config_params(c, HEAD_LM) - (int64_t)c->vocab_size * c->hidden);
  double tokens = n * (PROMPT + 0.5 * NEW);
  double cache = 2 * tokens * c->n_layers * c->n_kv_heads * c->head_dim;
  double compute = 2 * weights * n / b->rates.gemm_flops;
  double read = (weights + cache) * sizeof(float) / b->rates.copy_bytes;
  return n / (compute > read ? compute : read);
}

static void bench_decode(Bench *b, int n) {
  GenParams p = {.sample = {.temperature = 1, .top_p = 1}, .max_new_tokens = NEW, .seed = 3};
  int32_t *prompts = random_tokens(n * PROMPT);
  GenRequest *req = mem_zalloc((size_t)n, sizeof *req);
  GenResult *out = mem_alloc((size_t)n, sizeof *out);
  for (int i = 0; i < n; i++) req[i] = (GenRequest){prompts + (ptrdiff_t)i * PROMPT, PROMPT, i, 0};
  double best = 0, whole = 0, end = clock_seconds() + 4;
  for (int i = 0; i < 3 || clock_seconds() < end; i++) {
    GenStats s;
    Error err = {""};
    if (generate(b->m, &p, req, n, out, &s, &err)) die("%s", err.msg);
    gen_results_free(out, n);
    /* The first token of each sequence comes out of its prefill. */
    double rate = (double)(s.generated_tokens - n) / s.decode_seconds;
    double all = (double)s.generated_tokens / (s.prefill_seconds + s.decode_seconds);
    if (rate > best) best = rate;
    if (all > whole) whole = all;
  }
  double bound = decode_bound(b, n);
  printf(
      "decode    %2d x %d + %d    %9.0f tokens/s  %7.0f per core  %5.1f %% of %.0f  (%.0f with "
      "prefill)\n",
      n, PROMPT, NEW, best, best / device_threads(b->d), 100 * best / bound, bound, whole);
  free(prompts);
  free(req);
  free(out);
}

static void open_all(Bench *b, int threads) {
  Error err = {""};
  b->d = device_open(DEVICE_CPU, threads, &err);
  b->g = b->d ? grid_create(0, &err) : NULL;
  if (!b->g) die("%s", err.msg);
  b->arena = arena_create(b->d, arena_alloc, arena_release);
  b->rates = device_measure(b->d);
  ModelConfig c = llama_10m();
  ModelOptions o = {.head = HEAD_LM, .trainable = true, .seed = 1, .zero = {.stage = 3}};
  b->m = model_create(b->d, b->g, b->arena, &c, &o);
}

static void close_all(Bench *b) {
  model_free(b->m);
  arena_free(b->arena);
  grid_free(b->g);
  device_close(b->d);
}

int main(int argc, char **argv) {
  Error err = {""};
  if (launch_init(&argc, &argv, &err)) die("%s", err.msg);
  Bench b = {0};
  open_all(&b, argc > 1 ? atoi(argv[1]) : 0);
  printf("%s\nGEMM %.1f GFLOP/s, copy %.1f GB/s; %.2f million parameters\n", device_describe(b.d),
         b.rates.gemm_flops * 1e-9, b.rates.copy_bytes * 1e-9,
         1e-6 * (double)model_config_params(model_config(b.m), HEAD_LM));
  bench_packed(&b, "training", train_step, 8, 256);
  bench_packed(&b, "training", train_step, 4, 512);
  bench_packed(&b, "scoring", score_step, 8, 256);
  bench_packed(&b, "scoring", score_step, 4, 512);
  bench_decode(&b, 1);
  bench_decode(&b, 8);
  bench_decode(&b, 32);
  close_all(&b);
  launch_finish();
  return 0;
}
