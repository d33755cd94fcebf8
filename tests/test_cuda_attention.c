/* Attention on the GPU against the CPU's, and what serves it: for BF16 Hopper's kernels (heads of
 * 64 and 128) and cuDNN's graphs, the own kernels for the rest (test_cuda_attention_own has those
 * alone). Prints errors, the plans that were built, and TFLOP/s at the sizes of real models. */
#include "kernels/cuda/attention_report.h"
#include "tests/twin.h"

enum { MAX_SEQS = 80 };
typedef struct Case {
  DType type;
  int n_seqs;
  AttnShape s;
  int32_t len[MAX_SEQS];
} Case;

typedef struct Batch {
  Segments cpu, gpu;
  int64_t n, q, hd;
  int32_t offsets[MAX_SEQS + 1];
} Batch;

static void batch_fill(Batch *b, const Case *c) {
  *b = (Batch){.hd = (int64_t)c->s.n_heads * c->s.head_dim};
  b->q = b->hd + 2L * c->s.n_kv_heads * c->s.head_dim;
  bool small = test_is_watched_closely() && c->type == DT_F32;
  for (int i = 0; i < c->n_seqs; i++)
    b->offsets[i + 1] = b->offsets[i] + (small && c->len[i] > 70 ? 70 : c->len[i]);
  b->n = b->offsets[c->n_seqs];
  Pair p = twin_ints(b->offsets, c->n_seqs + 1);
  b->cpu = (Segments){c->n_seqs, b->offsets, {.data = NULL}};
  b->gpu = (Segments){c->n_seqs, b->offsets, p.gpu};
}

static const char *case_name(const Case *c) {
  static char name[128];
  int64_t n = 0;
  for (int i = 0; i < c->n_seqs; i++) n += c->len[i];
  snprintf(name, sizeof name, "%s H%d K%d D%d w%d, %d seqs of %lld", dtype_name(c->type),
           c->s.n_heads, c->s.n_kv_heads, c->s.head_dim, c->s.window, c->n_seqs, (long long)n);
  return name;
}

/* The three parts of dqkv have scales of their own. Where a query sees one key, dq and dk are zero
 * by cancellation of terms of size 1, and what is left is their rounding in F32. */
static const double CANCELLED = 1e-3;
static void compare_columns(const char *what, const Case *c, Pair p, int64_t first, int64_t count,
                            double bound) {
  const float *want = tensor_f32(p.cpu);
  float *got = twin_back(p);
  int64_t width = p.cpu.dim[1], bad = -1, odd = 0;
  double largest = 0, difference = 0;
  for (int64_t i = 0; i < p.cpu.dim[0]; i++)
    for (int64_t j = first; j < first + count; j++) {
      double w = (double)want[i * width + j], g = (double)got[i * width + j];
      largest = fmax(largest, fabs(w));
      odd += !isfinite(g);
      if (fabs(g - w) > difference || (!isfinite(g) && odd == 1)) bad = i * width + j;
      if (fabs(g - w) > difference) difference = fabs(g - w);
    }
  double error = difference / fmax(largest, CANCELLED);
  bool ok = error <= bound && odd == 0;
  print_message("%s %s, %s: error %.2e of %.3g, bound %.1e\n", ok ? "      " : "FAILED", what,
                case_name(c), error, largest, bound);
  if (!ok)
    print_message("       %lld not finite; row %lld column %lld: gpu %.9g, cpu %.9g\n",
                  (long long)odd, (long long)(bad / width), (long long)(bad % width),
                  (double)got[bad], (double)want[bad]);
  twin_state.failures += !ok;
  free(got);
}

typedef struct Run {
  Batch b;
  Pair qkv, out, lse, dout, dqkv;
  Rotation cpu, gpu; /* absent, unless run_rotate */
} Run;

static void run_make(Run *r, const Case *c, uint64_t seed) {
  *r = (Run){.cpu = {.cos_Pr = {.data = NULL}}};
  batch_fill(&r->b, c);
  r->qkv = twin_random(c->type, seed, 1.0F, 2, r->b.n, r->b.q);
  r->dout = twin_random(c->type, seed + 1, 1.0F, 2, r->b.n, r->b.hd);
  r->out = twin_unwritten(c->type, 2, r->b.n, r->b.hd);
  r->lse = twin_unwritten(DT_F32, 2, r->b.n, c->s.n_heads);
  r->dqkv = twin_unwritten(c->type, 2, r->b.n, r->b.q);
}

/* With angles of any size, for `pairs` pairs of each head. */
static void run_rotate(Run *r, int64_t pairs) {
  enum { PLACES = 50 };
  int32_t *places = mem_alloc((size_t)r->b.n + 1, sizeof *places);
  float *cs = mem_alloc((size_t)(PLACES * pairs), sizeof *cs),
        *sn = mem_alloc((size_t)(PLACES * pairs), sizeof *sn);
  for (int64_t i = 0; i < r->b.n; i++) places[i] = (int32_t)(7 * i % PLACES);
  for (int64_t i = 0; i < PLACES * pairs; i++) cs[i] = cosf((float)i), sn[i] = sinf((float)i);
  Pair p = twin_ints(places, r->b.n), c = twin_floats(DT_F32, cs, 2, (int64_t)PLACES, pairs),
       s = twin_floats(DT_F32, sn, 2, (int64_t)PLACES, pairs);
  r->cpu = (Rotation){p.cpu, c.cpu, s.cpu};
  r->gpu = (Rotation){p.gpu, c.gpu, s.gpu};
  free(places);
  free(cs);
  free(sn);
}

static void gpu_forward(Twins *t, Run *r, AttnShape s) {
  t->gpu_ops->attention_fwd(t->gpu, r->qkv.gpu, r->b.gpu, s, r->out.gpu, r->lse.gpu);
}
static void gpu_backward(Twins *t, Run *r, AttnShape s) {
  t->gpu_ops->attention_bwd(t->gpu, r->dout.gpu, r->qkv.gpu, r->out.gpu, r->lse.gpu, r->b.gpu, s,
                            r->gpu, r->dqkv.gpu);
}

/* BF16: weights and their gradients are rounded before each product (2^-9 of every term), outputs
 * once more, and delta comes from the rounded out; of grouped heads each one's gradient is rounded
 * before their sum. F32: sums of up to some hundred terms, scores of some ten. */
static void check_case(Twins *t, const Case *c, uint64_t seed) {
  bool half = c->type == DT_BF16;
  Run r;
  run_make(&r, c, seed);
  if (seed % 3 > 0) run_rotate(&r, c->s.head_dim / (seed % 3 == 1 ? 2 : 4)); /* whole heads, half */
  t->cpu_ops->attention_fwd(t->cpu, r.qkv.cpu, r.b.cpu, c->s, r.out.cpu, r.lse.cpu);
  t->cpu_ops->attention_bwd(t->cpu, r.dout.cpu, r.qkv.cpu, r.out.cpu, r.lse.cpu, r.b.cpu, c->s,
                            r.cpu, r.dqkv.cpu);
  gpu_forward(t, &r, c->s);
  gpu_backward(t, &r, c->s);
  int64_t D = c->s.head_dim, H = c->s.n_heads, K = c->s.n_kv_heads;
  compare_columns("out", c, r.out, 0, H * D, half ? 1.0 / 128 : 1e-5);
  compare_columns("lse", c, r.lse, 0, H, 1e-5);
  compare_columns("dq", c, r.dqkv, 0, H * D, half ? 1.0 / 64 : 2e-5);
  compare_columns("dk", c, r.dqkv, H * D, K * D, half ? 1.0 / 64 : 2e-5);
  compare_columns("dv", c, r.dqkv, (H + K) * D, K * D, half ? 1.0 / 64 : 2e-5);
}

#define MANY_SHORT \
  { 1, 2, 1, 3, 1, 0, 5, 1, 1, 2, 8, 1, 1, 0, 4, 1, 7, 1, 1, 2, 16, 1, 3, 1 }

/* cuDNN compiles a kernel for each head size, direction and kind of mask, half a second each. So
 * the rarer ones have their turn only where RLHF_TEST_ALL is set, which takes a minute. */
static bool test_all(void) { return getenv("RLHF_TEST_ALL") != NULL; }

static const Case common[] = {
    {DT_BF16, 1, {2, 1, 64, 0.125F, 0}, {1}},
    {DT_BF16, 3, {8, 2, 64, 0.125F, 0}, {256, 256, 256}},
    {DT_BF16, 2, {3, 1, 64, 0.125F, 0}, {384, 384}},
    {DT_BF16, 1, {11, 11, 64, 0.125F, 0}, {128}},
    {DT_BF16, 2, {16, 2, 64, 0.125F, 0}, {640, 640}},
    {DT_BF16, 3, {8, 2, 64, 0.125F, 0}, {256, 255, 257}},
    {DT_BF16, 24, {4, 1, 64, 0.125F, 0}, MANY_SHORT},
    {DT_BF16, 14, {4, 1, 64, 0.125F, 0}, {9, 30, 600, 2, 64, 65, 1, 0, 129, 70, 3, 12, 31, 5}},
    {DT_BF16, 3, {4, 2, 64, 0.125F, 100}, {300, 50, 101}}, /* a sliding window */
    {DT_BF16, 2, {4, 2, 64, 0.125F, 1000}, {150, 50}},
    {DT_BF16, 1, {2, 2, 64, 1.0F, 0}, {512}}, /* sharp: scores of tens */
    {DT_BF16, 5, {9, 3, 64, 0.125F, 0}, {64, 65, 63, 0, 190}},
    {DT_BF16, 2, {4, 2, 128, 0.0884F, 0}, {384, 384}},
    {DT_BF16, 3, {8, 1, 128, 0.0884F, 0}, {700, 1, 129}},
    {DT_BF16, 24, {4, 4, 128, 0.0884F, 0}, MANY_SHORT},
    {DT_BF16, 5, {9, 3, 128, 0.0884F, 0}, {64, 65, 63, 0, 190}},
    {DT_BF16, 3, {35, 35, 128, 0.0884F, 0}, {128, 128, 128}},
    {DT_BF16, 2, {2, 2, 33, 0.17F, 0}, {70, 31}}, /* head sizes for the own kernels */
    {DT_BF16, 2, {2, 1, 20, 0.22F, 30}, {70, 31}},
    {DT_F32, 2, {4, 2, 64, 0.125F, 0}, {130, 200}},
    {DT_F32, 2, {3, 1, 33, 0.17F, 50}, {70, 131}},
    {DT_F32, 24, {4, 1, 20, 0.22F, 0}, MANY_SHORT},
};
static const Case rare[] = {
    {DT_BF16, 1, {1, 1, 64, 0.125F, 0}, {1}},
    {DT_BF16, 2, {4, 2, 64, 0.125F, 1}, {150, 50}},
    {DT_BF16, 1, {2, 1, 64, 0.125F, 0}, {128}},
    {DT_BF16, 2, {4, 2, 256, 0.0625F, 0}, {130, 200}},
    {DT_BF16, 2, {4, 2, 96, 0.102F, 0}, {130, 200}},
    {DT_BF16, 2, {4, 2, 80, 0.1118F, 0}, {130, 200}},
    {DT_BF16, 2, {3, 1, 40, 0.158F, 0}, {65, 90}},
    {DT_BF16, 2, {3, 1, 8, 0.35F, 0}, {65, 90}},
    {DT_BF16, 2, {4, 2, 64, 0.125F, 100}, {384, 384}},
    {DT_BF16, 2, {4, 2, 128, 0.0884F, 70}, {384, 333}},
};
enum { N_COMMON = sizeof common / sizeof *common, N_RARE = sizeof rare / sizeof *rare };

static void fixed_cases(void **state) {
  (void)state;
  Twins *t = twins();
  for (int i = 0; i < N_COMMON; i++) check_case(t, common + i, 100 + (uint64_t)i);
  for (int i = 0; i < N_RARE && test_all(); i++) check_case(t, rare + i, 150 + (uint64_t)i);
  twin_done();
}

static int pick(uint64_t seed, uint64_t i, int n) { return (int)(rng_uniform(seed, 3, i) * n); }

static void random_cases(void **state) {
  (void)state;
  static const int groups[] = {1, 2, 4, 8}, dims[] = {64, 128, 64, 32};
  Twins *t = twins();
  for (uint64_t i = 0; i < (test_all() ? 20 : 5); i++) {
    int K = 1 + pick(1, 6 * i, 3), D = dims[pick(1, 6 * i + 1, test_all() ? 4 : 2)];
    int seqs = 1 + pick(1, 6 * i + 2, 40), most = 1 + pick(1, 6 * i + 3, 300);
    Case c = {DT_BF16, seqs, {K * groups[pick(1, 6 * i + 4, 4)], K, D, 0.1F, 0}, {0}};
    for (int b = 0; b < seqs; b++) c.len[b] = pick(2, 100 * i + (uint64_t)b, most + 1);
    check_case(t, &c, 200 + i);
  }
  twin_done();
}

static void no_tokens(void **state) {
  (void)state;
  Twins *t = twins();
  static const Case none = {DT_BF16, 2, {2, 2, 64, 1, 0}, {0, 0}};
  check_case(t, &none, 1);
  twin_done();
}

/* out without lse; a NaN of one sequence stays in it. */
static void check_neighbours(Twins *t, int head_dim) {
  const Case c = {DT_BF16, 3, {4, 2, head_dim, 0.125F, 0}, {70, 90, 66}};
  Run r;
  run_make(&r, &c, 7);
  Pair alone = twin_unwritten(DT_BF16, 2, r.b.n, r.b.hd);
  gpu_forward(t, &r, c.s);
  t->gpu_ops->attention_fwd(t->gpu, r.qkv.gpu, r.b.gpu, c.s, alone.gpu, (Tensor){.data = NULL});
  float *with = twin_back(r.out), *without = twin_back(alone);
  twin_check("out with and without lse",
             !memcmp(with, without, sizeof(float) * (size_t)tensor_numel(r.out.cpu)));
  free(with);
  free(without);

  uint16_t *nan_row = mem_alloc((size_t)r.b.q, sizeof *nan_row);
  for (int64_t j = 0; j < r.b.q; j++) nan_row[j] = 0x7fc0;
  int64_t bad = r.b.offsets[1] + 40;
  device_upload(t->gpu, (char *)r.qkv.gpu.data + 2 * bad * r.b.q, nan_row, 2 * (size_t)r.b.q);
  free(nan_row);
  gpu_forward(t, &r, c.s);
  gpu_backward(t, &r, c.s);
  float *out = twin_back(r.out), *dqkv = twin_back(r.dqkv);
  int64_t leaked = 0, lost = 0;
  for (int64_t i = 0; i < r.b.n; i++) {
    bool inside = i >= r.b.offsets[1] && i < r.b.offsets[2];
    for (int64_t j = 0; j < r.b.hd; j++) {
      leaked += !inside && (isnan(out[i * r.b.hd + j]) || isnan(dqkv[i * r.b.q + j]));
      lost += inside && i >= bad && !(isnan(out[i * r.b.hd + j]) && isnan(dqkv[i * r.b.q + j]));
    }
  }
  print_message("       NaN: %lld leaked, %lld lost\n", (long long)leaked, (long long)lost);
  twin_check("a NaN stays in its sequence and shows there", leaked == 0 && lost == 0);
  free(out);
  free(dqkv);
}

static void neighbours(void **state) {
  (void)state;
  Twins *t = twins();
  check_neighbours(t, 64);
  check_neighbours(t, 128);
  twin_done();
}

/* ---- real sizes, or fewer tokens where a checker looks on: same bits twice, and time ---- */

static int32_t len_of(int tokens) {
  return tokens / (test_is_watched_closely() ? 16 : test_is_watched() ? 8 : 1);
}

/* Random numbers, 2^20 of them over and over. */
static Tensor filled(Device *d, uint64_t seed, int64_t rows, int64_t columns) {
  enum { N = 1 << 20 };
  size_t bytes = 2 * (size_t)(rows * columns), piece = 2 * (size_t)N;
  char *p = device_alloc(d, bytes);
  float *x = mem_alloc(N, sizeof *x);
  for (int i = 0; i < N; i++) x[i] = rng_normal(seed, 5, (uint64_t)i);
  uint16_t *half = mem_alloc(N, sizeof *half);
  if (convert_from_f32(x, half, DT_BF16, N)) die("BF16");
  for (size_t at = 0; at < bytes; at += piece) {
    size_t n = bytes - at < piece ? bytes - at : piece;
    if (at == 0)
      device_upload(d, p, half, n);
    else
      device_copy(d, p + at, p, n);
  }
  device_sync(d);
  free(x);
  free(half);
  return tensor_2d(p, DT_BF16, rows, columns);
}

typedef struct Big {
  Twins *t;
  Segments seg;
  AttnShape s;
  Tensor qkv, out, lse, dout, dqkv;
} Big;
static void big_forward(void *arg) {
  Big *b = arg;
  b->t->gpu_ops->attention_fwd(b->t->gpu, b->qkv, b->seg, b->s, b->out, b->lse);
}
static void big_backward(void *arg) {
  Big *b = arg;
  b->t->gpu_ops->attention_bwd(b->t->gpu, b->dout, b->qkv, b->out, b->lse, b->seg, b->s,
                               (Rotation){.cos_Pr = {.data = NULL}}, b->dqkv);
}

static void same_bits(const char *what, Big *b, void (*op)(void *), Tensor result) {
  size_t bytes = tensor_bytes(result);
  char *first = mem_alloc(bytes, 1), *again = mem_alloc(bytes, 1);
  bool same = true;
  op(b);
  device_download(b->t->gpu, first, result.data, bytes);
  for (int i = 0; i < 2; i++) {
    device_zero(b->t->gpu, result.data, bytes);
    op(b);
    device_download(b->t->gpu, again, result.data, bytes);
    same &= !memcmp(first, again, bytes);
  }
  twin_check(what, same);
  free(first);
  free(again);
}

static void real_size(Twins *t, const Case *c, const char *name) {
  Batch seg;
  batch_fill(&seg, c);
  Big b = {.t = t, .seg = seg.gpu, .s = c->s};
  b.qkv = filled(t->gpu, 1, seg.n, seg.q);
  b.dout = filled(t->gpu, 2, seg.n, seg.hd);
  b.out = filled(t->gpu, 3, seg.n, seg.hd);
  b.dqkv = filled(t->gpu, 4, seg.n, seg.q);
  b.lse = tensor_2d(device_alloc(t->gpu, 4 * (size_t)(seg.n * c->s.n_heads)), DT_F32, seg.n,
                    c->s.n_heads);
  double pairs = 0;
  for (int i = 0; i < c->n_seqs; i++) pairs += 0.5 * c->len[i] * c->len[i];
  double flops = 4 * pairs * c->s.n_heads * c->s.head_dim;
  double start = clock_seconds();
  big_forward(&b);
  device_sync(t->gpu);
  double first = clock_seconds() - start;
  start = clock_seconds();
  big_backward(&b);
  device_sync(t->gpu);
  print_message("       %s: %s; first calls %.3f s and %.3f s\n", name, case_name(c), first,
                clock_seconds() - start);
  same_bits("the forward gives the same bits", &b, big_forward, b.out);
  same_bits("the backward gives the same bits", &b, big_backward, b.dqkv);
  if (!test_is_watched()) twin_time("forward", big_forward, &b, 0, flops);
  if (!test_is_watched()) twin_time("backward", big_backward, &b, 0, 2.5 * flops);
  void *owned[] = {b.qkv.data, b.dout.data, b.out.data, b.dqkv.data, b.lse.data};
  for (int i = 0; i < 5; i++) device_free(t->gpu, owned[i]);
}

static void real_sizes(void **state) {
  (void)state;
  Twins *t = twins();
  Case small = {DT_BF16, 8, {32, 4, 64, 0.125F, 0}, {0}};
  for (int i = 0; i < 8; i++) small.len[i] = len_of(2048);
  real_size(t, &small, "1.1B, equal lengths");
  for (int i = 0; i < 8; i++) small.len[i] = len_of(2048 - 70 * i);
  real_size(t, &small, "1.1B, packed");
  Case many = {DT_BF16, 64, {32, 4, 64, 0.125F, 0}, {0}}; /* runs in parts */
  for (int i = 0; i < 64; i++) many.len[i] = len_of(i % 16 == 3 ? 1800 : 100 + 3 * i);
  real_size(t, &many, "1.1B, mixed");
  Case large = {DT_BF16, 4, {32, 32, 128, 0.0884F, 0}, {0}};
  for (int i = 0; i < 4; i++) large.len[i] = len_of(2048);
  real_size(t, &large, "7B, equal lengths");
  large.len[3] = len_of(1900);
  real_size(t, &large, "7B, packed");
  if (test_all()) {
    small.n_seqs = 32;
    for (int i = 0; i < 32; i++) small.len[i] = 300 + 6 * i;
    real_size(t, &small, "1.1B, short");
    Case grouped = {DT_BF16, 4, {32, 8, 128, 0.0884F, 0}, {4096, 4096, 4096, 4096}};
    real_size(t, &grouped, "8B, 4096");
  }
  twin_done();
}

/* Last: everything that was asked for above. */
static void report(void **state) {
  (void)state;
  Twins *t = twins();
  char *text = cuda_attention_report(t->gpu);
  char *rest = text;
  for (char *line = strsep(&rest, "\n"); line; line = strsep(&rest, "\n"))
    print_message("       %s\n", line);
  free(text);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(fixed_cases), cmocka_unit_test(random_cases), cmocka_unit_test(no_tokens),
    cmocka_unit_test(neighbours),  cmocka_unit_test(real_sizes),   cmocka_unit_test(report),
};
TEST_MAIN(tests)
