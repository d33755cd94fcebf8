/* Rates of single kernels beside what the machine can do: GEMM by shape, attention, and the ops
 * that memory bounds. usage: bench_kernels [threads [attention|rows|gemm]]. Figures are the best of
 * several runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "kernels/kernels.h"

typedef struct Bench {
  Device *d;
  const Ops *ops;
  DeviceRates rates;
} Bench;

static Tensor make(Bench *b, int64_t n, int64_t c) {
  Tensor t = tensor_2d(device_alloc(b->d, (size_t)(n * c) * sizeof(float)), DT_F32, n, c);
  float *x = mem_alloc((size_t)(n * c), sizeof *x);
  for (int64_t i = 0; i < n * c; i++)
    x[i] = i < 10007 ? 0.1F * rng_normal(1, (uint64_t)n, (uint64_t)i) : x[i - 10007];
  device_upload(b->d, t.data, x, tensor_bytes(t));
  free(x);
  return t;
}

static Tensor flat(Tensor t) { return tensor_1d(t.data, t.dtype, tensor_numel(t)); }

typedef void (*Work)(Bench *, void *arg);

/* Best seconds of one call within about 0.3 s. */
static double best_seconds(Bench *b, Work work, void *arg) {
  double best = 1e9, end = clock_seconds() + 0.3;
  for (int i = 0; i < 5 || clock_seconds() < end; i++) {
    double t = clock_seconds();
    work(b, arg);
    device_sync(b->d);
    t = clock_seconds() - t;
    if (t < best) best = t;
  }
  return best;
}

static void print_flops(Bench *b, const char *what, double flops, double seconds) {
  double rate = flops / seconds;
  printf("%-34s %10.1f us %8.1f GFLOP/s %5.1f %% of GEMM\n", what, seconds * 1e6, rate * 1e-9,
         100 * rate / b->rates.gemm_flops);
}

static void print_bytes(Bench *b, const char *what, double bytes, double seconds) {
  double rate = bytes / seconds;
  printf("%-34s %10.1f us %8.1f GB/s    %5.1f %% of copy\n", what, seconds * 1e6, rate * 1e-9,
         100 * rate / b->rates.copy_bytes);
}

/* ---- GEMM ---- */

typedef struct Gemm {
  GemmKind kind;
  int64_t m, n, k;
  Tensor a, b, c;
} Gemm;

static void run_gemm(Bench *b, void *arg) {
  Gemm *g = arg;
  b->ops->gemm(b->d, g->kind, 1, g->a, g->b, g->kind == GEMM_TN ? 1 : 0, g->c);
}

static void bench_gemm(Bench *b, GemmKind kind, int64_t m, int64_t n, int64_t k) {
  static const char *const names[] = {"NT", "NN", "TN"};
  Gemm g = {kind, m, n, k, {0}, {0}, {0}};
  g.a = kind == GEMM_TN ? make(b, k, m) : make(b, m, k);
  g.b = kind == GEMM_NT ? make(b, n, k) : make(b, k, n);
  g.c = make(b, m, n);
  char what[96];
  snprintf(what, sizeof what, "gemm %s %lld x %lld x %lld", names[kind], (long long)m, (long long)n,
           (long long)k);
  print_flops(b, what, 2.0 * (double)m * (double)n * (double)k, best_seconds(b, run_gemm, &g));
  device_free(b->d, g.a.data);
  device_free(b->d, g.b.data);
  device_free(b->d, g.c.data);
}

/* The shapes of a 10-million-parameter Llama: hidden 320, ffn 864, vocabulary 4096. */
static void bench_gemms(Bench *b) {
  static const int64_t nk[][2] = {{960, 320}, {320, 320}, {1728, 320}, {320, 864}, {4096, 320}};
  static const int64_t rows[] = {1, 2, 4, 8, 16, 32, 48, 64, 128, 2048};
  for (int i = 0; i < 10; i++)
    for (int j = 0; j < 5; j++) bench_gemm(b, GEMM_NT, rows[i], nk[j][0], nk[j][1]);
  for (int j = 0; j < 5; j++) bench_gemm(b, GEMM_NN, 2048, nk[j][1], nk[j][0]);
  for (int j = 0; j < 5; j++) bench_gemm(b, GEMM_TN, nk[j][0], nk[j][1], 2048);
}

/* ---- attention ---- */

typedef struct Attn {
  AttnShape s;
  Segments seg;
  Tensor qkv, out, dout, lse, dqkv;
} Attn;

static void run_attn_fwd(Bench *b, void *arg) {
  Attn *a = arg;
  b->ops->attention_fwd(b->d, a->qkv, a->seg, a->s, a->out, a->lse);
}

static void run_attn_bwd(Bench *b, void *arg) {
  Attn *a = arg;
  b->ops->attention_bwd(b->d, a->dout, a->qkv, a->out, a->lse, a->seg, a->s, (Rotation){0},
                        a->dqkv);
}

static void bench_attention(Bench *b, int n_seqs, int32_t len, int heads, int kv_heads, int dim) {
  Attn a = {.s = {heads, kv_heads, dim, 0.125F, 0}};
  int32_t *offsets = mem_alloc((size_t)n_seqs + 1, sizeof *offsets);
  for (int i = 0; i <= n_seqs; i++) offsets[i] = i * len;
  int64_t n = (int64_t)n_seqs * len, hd = (int64_t)heads * dim, q = hd + 2L * kv_heads * dim;
  a.seg = (Segments){.n_seqs = n_seqs, .offsets = offsets};
  a.qkv = make(b, n, q);
  a.dqkv = make(b, n, q);
  a.out = make(b, n, hd);
  a.dout = make(b, n, hd);
  a.lse = make(b, n, heads);
  char what[96];
  double flops = 2.0 * (double)n * (len + 1) * (double)hd; /* two products of half a square */
  snprintf(what, sizeof what, "attention %d x %d h %d/%d d %d", n_seqs, len, heads, kv_heads, dim);
  print_flops(b, what, flops, best_seconds(b, run_attn_fwd, &a));
  snprintf(what, sizeof what, "   backward");
  print_flops(b, what, 2 * flops,
              best_seconds(b, run_attn_bwd, &a)); /* recomputation not counted */
  Tensor *all[] = {&a.qkv, &a.dqkv, &a.out, &a.dout, &a.lse};
  for (int i = 0; i < 5; i++) device_free(b->d, all[i]->data);
  free(offsets);
}

static void bench_attentions(Bench *b) {
  bench_attention(b, 8, 256, 5, 5, 64);
  bench_attention(b, 4, 512, 5, 5, 64);
  bench_attention(b, 1, 2048, 8, 2, 128);
  bench_attention(b, 128, 16, 5, 5, 64);
  bench_attention(b, 8, 256, 16, 4, 20);
}

/* ---- what memory bounds ---- */

typedef struct Rows {
  Tensor x, y, w, stat, gu, dgu, dy, logits, ids, grad, lse, cs, sn, qkv;
  AttnShape s;
} Rows;

static void run_norm(Bench *b, void *arg) {
  Rows *r = arg;
  b->ops->rmsnorm_fwd(b->d, r->x, r->y, r->w, 1e-5F, r->dy, r->stat);
}
static void run_norm_bwd(Bench *b, void *arg) {
  Rows *r = arg;
  b->ops->rmsnorm_bwd(b->d, r->dy, r->x, r->w, r->stat, r->y, r->w);
}
static void run_glu(Bench *b, void *arg) {
  Rows *r = arg;
  b->ops->swiglu_fwd(b->d, r->gu, r->grad);
}
static void run_glu_bwd(Bench *b, void *arg) {
  Rows *r = arg;
  b->ops->swiglu_bwd(b->d, r->grad, r->gu, r->dgu, (Tensor){0});
}
static void run_rope(Bench *b, void *arg) {
  Rows *r = arg;
  b->ops->rope(b->d, r->qkv, r->ids, r->cs, r->sn, r->s, false);
}
static void run_logprob(Bench *b, void *arg) {
  Rows *r = arg;
  b->ops->logprob_fwd(b->d, r->logits, r->ids, 1, flat(r->stat), flat(r->lse),
                      tensor_1d(NULL, DT_F32, 0));
}
static void run_logprob_bwd(Bench *b, void *arg) {
  Rows *r = arg;
  b->ops->logprob_bwd(b->d, r->logits, r->ids, 1, flat(r->lse), tensor_1d(NULL, DT_F32, 0),
                      flat(r->stat), tensor_1d(NULL, DT_F32, 0), r->logits);
}
static void run_adamw(Bench *b, void *arg) {
  Rows *r = arg;
  AdamW p = {1e-4F, 0.9F, 0.95F, 1e-8F, 0.1F, 1, 10};
  b->ops->adamw(b->d, p, flat(r->logits), flat(r->logits), flat(r->logits), flat(r->logits),
                tensor_1d(NULL, DT_F32, 0));
}

static void bench_rows(Bench *b) {
  enum { N = 2048, C = 320, F = 864, V = 4096, Q = 960 };
  Rows r = {.s = {5, 5, 64, 0.125F, 0}};
  r.x = make(b, N, C), r.y = make(b, N, C), r.dy = make(b, N, C), r.w = flat(make(b, 1, C));
  r.stat = flat(make(b, N, 1)), r.lse = flat(make(b, N, 1)), r.gu = make(b, N, 2 * F);
  r.dgu = make(b, N, 2 * F), r.grad = make(b, N, F), r.logits = make(b, N, V),
  r.qkv = make(b, N, Q);
  r.cs = make(b, N, 32), r.sn = make(b, N, 32);
  r.ids = tensor_1d(device_alloc(b->d, N * 4), DT_I32, N);
  int32_t ids[N];
  for (int i = 0; i < N; i++) ids[i] = i;
  device_upload(b->d, r.ids.data, ids, sizeof ids);
  const double f = sizeof(float);
  print_bytes(b, "rmsnorm with residual 2048 x 320", 4 * f * N * C, best_seconds(b, run_norm, &r));
  print_bytes(b, "   backward", 4 * f * N * C, best_seconds(b, run_norm_bwd, &r));
  print_bytes(b, "swiglu 2048 x 864", 3 * f * N * F, best_seconds(b, run_glu, &r));
  print_bytes(b, "   backward", 5 * f * N * F, best_seconds(b, run_glu_bwd, &r));
  print_bytes(b, "rope 2048 x 10 heads of 64", 2 * f * N * 640, best_seconds(b, run_rope, &r));
  print_bytes(b, "logprob 2048 x 4096", f * N * V, best_seconds(b, run_logprob, &r));
  print_bytes(b, "   backward", 2 * f * N * V, best_seconds(b, run_logprob_bwd, &r));
  print_bytes(b, "adamw on 8 million, one array", 2 * f * N * V, best_seconds(b, run_adamw, &r));
  Tensor *all[] = {&r.x,      &r.y,   &r.w,    &r.stat, &r.gu, &r.dgu, &r.dy,
                   &r.logits, &r.ids, &r.grad, &r.lse,  &r.cs, &r.sn,  &r.qkv};
  for (int i = 0; i < 14; i++) device_free(b->d, all[i]->data);
}

int main(int argc, char **argv) {
  Error err = {""};
  if (launch_init(&argc, &argv, &err)) die("%s", err.msg);
  Bench b = {.d = device_open(DEVICE_CPU, argc > 1 ? atoi(argv[1]) : 0, &err)};
  if (!b.d) die("%s", err.msg);
  b.ops = device_ops(b.d);
  b.rates = device_measure(b.d);
  printf("%s: GEMM %.1f GFLOP/s, copy %.1f GB/s\n", device_describe(b.d), b.rates.gemm_flops * 1e-9,
         b.rates.copy_bytes * 1e-9);
  const char *only = argc > 2 ? argv[2] : "";
  if (!*only || strcmp(only, "attention") == 0) bench_attentions(&b);
  if (!*only || strcmp(only, "rows") == 0) bench_rows(&b);
  if (!*only || strcmp(only, "gemm") == 0) bench_gemms(&b);
  device_close(b.d);
  launch_finish();
  return 0;
}
