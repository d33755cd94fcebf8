/* Our own attention kernels against the CPU's: F32 and BF16, packed sequences, grouped heads,
 * windows, head sizes on and off the tensor cores. */
#include "tests/attention_cases.h"
#include "tests/twin.h"

/* Behind the ops' backs: attention.cu may prefer cuDNN. Absent from builds without CUDA. */
__attribute__((weak)) void own_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s,
                                             Tensor out_NHD, Tensor lse_NH);
__attribute__((weak)) void own_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ,
                                             Tensor out_NHD, Tensor lse_NH, Segments seg,
                                             AttnShape s, Tensor dqkv_NQ);

static const Case cases[] = {
    {1, {1}, {1, 1, 8, 1, 0}},
    {1, {3}, {2, 1, 16, 0.25F, 0}},
    {2, {17, 5}, {4, 2, 8, 0.35F, 0}},
    {3, {0, 129, 64}, {2, 2, 32, 0.177F, 0}},
    {3, {64, 128, 63}, {4, 1, 64, 0.125F, 0}},
    {2, {300, 1}, {8, 2, 64, 0.125F, 0}},
    {1, {517}, {2, 2, 64, 0.125F, 0}},
    {2, {200, 333}, {3, 3, 128, 0.0884F, 0}},
    {1, {257}, {8, 1, 128, 0.0884F, 0}},
    {1, {200}, {5, 5, 24, 0.2F, 0}},
    {2, {129, 70}, {6, 2, 80, 0.11F, 64}},
    {2, {190, 31}, {4, 2, 96, 0.1F, 0}},
    {2, {150, 40}, {2, 1, 160, 0.08F, 0}},
    {2, {210, 77}, {4, 2, 256, 0.0625F, 0}},
    {1, {140}, {2, 2, 256, 0.0625F, 33}},
    {24, MANY_SHORT, {4, 1, 20, 0.22F, 0}},
    {24, MANY_SHORT, {4, 1, 40, 0.16F, 0}},
    {0, {0}, {2, 2, 8, 1, 0}},
    {2, {50, 7}, {2, 1, 8, 0.35F, 1}},
    {1, {350}, {2, 1, 16, 0.25F, 40}},
    {1, {300}, {2, 2, 12, 0.3F, 100}},
    {1, {70}, {8, 1, 48, 0.144F, 1000}},
    {1, {9}, {1, 1, 3, 0.5F, 0}},
    {1, {150}, {2, 2, 100, 0.1F, 0}},
    {2, {90, 61}, {2, 1, 131, 0.09F, 17}},
    {1, {260}, {1, 1, 64, 3.0F, 0}}, /* sharp softmax: scores of several tens */
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

/* A case's operands on both devices. */
typedef struct Packed {
  const Case *c;
  DType type;
  int64_t n;
  Pair offsets, qkv, dout, out, lse, dqkv;
} Packed;

/* Where a checker looks on, tokens of three tiles at most, or of two. */
static int32_t len_of(int32_t len) {
  int32_t most = test_is_watched_closely() ? 70 : test_is_watched() ? 140 : len;
  return len < most ? len : most;
}

static Packed pack(const Case *c, DType type, uint64_t seed) {
  Packed p = {.c = c, .type = type};
  int32_t offsets[32] = {0};
  for (int b = 0; b < c->n_seqs; b++) offsets[b + 1] = offsets[b] + len_of(c->len[b]);
  p.n = offsets[c->n_seqs];
  int64_t hd = (int64_t)c->s.n_heads * c->s.head_dim;
  int64_t q = hd + 2L * c->s.n_kv_heads * c->s.head_dim;
  p.offsets = twin_ints(offsets, c->n_seqs + 1);
  p.qkv = twin_random(type, seed, 1, 2, p.n, q);
  p.dout = twin_random(type, seed + 1, 1, 2, p.n, hd);
  p.out = twin_unwritten(type, 2, p.n, hd);
  p.lse = twin_unwritten(DT_F32, 2, p.n, c->s.n_heads);
  p.dqkv = twin_unwritten(type, 2, p.n, q);
  return p;
}

static Segments segments(const Packed *p) {
  return (Segments){p->c->n_seqs, tensor_i32(p->offsets.cpu), p->offsets.gpu};
}

static void run_gpu(const Packed *p) {
  Device *d = twin_state.gpu;
  require(own_attention_fwd && own_attention_bwd);
  own_attention_fwd(d, p->qkv.gpu, segments(p), p->c->s, p->out.gpu, p->lse.gpu);
  own_attention_bwd(d, p->dout.gpu, p->qkv.gpu, p->out.gpu, p->lse.gpu, segments(p), p->c->s,
                    p->dqkv.gpu);
}

static void run_cpu(const Twins *t, const Packed *p) {
  t->cpu_ops->attention_fwd(t->cpu, p->qkv.cpu, segments(p), p->c->s, p->out.cpu, p->lse.cpu);
  t->cpu_ops->attention_bwd(t->cpu, p->dout.cpu, p->qkv.cpu, p->out.cpu, p->lse.cpu, segments(p),
                            p->c->s, (Rotation){0}, p->dqkv.cpu);
}

static Twins *own_twins(void) {
  if (!own_attention_fwd) skip();
  return twins();
}

/* F32: a score near s is off by about s eps on either device, and so, relatively, is its weight;
 * the largest log-sum-exp says how large scores get. The rest is sums of hundreds of terms. */
static double f32_tolerance(const Packed *p) {
  double most = 0;
  for (int64_t i = 0; i < tensor_numel(p->lse.cpu); i++)
    most = fmax(most, fabs((double)tensor_f32(p->lse.cpu)[i]));
  return 3e-6 + 2.4e-7 * most;
}

/* BF16: weights, and in the backward ds and the forward's out that delta is made of, are rounded to
 * 2^-9 of themselves before they are summed, and the result is. */
static void agrees(DType type) {
  static const bool closely[2][N_CASES] = {
      /* each size of a head that has kernels of its own */
      {[2] = true, [4] = true, [7] = true, [10] = true, [13] = true, [17] = true},
      {[2] = true,
       [4] = true,
       [7] = true,
       [10] = true,
       [13] = true,
       [14] = true,
       [17] = true,
       [22] = true,
       [23] = true,
       [24] = true}};
  Twins *t = own_twins();
  for (int i = 0; i < N_CASES; i++) {
    const Case *c = cases + i;
    if (test_is_watched_closely() && !closely[type == DT_BF16][i]) continue;
    Packed p = pack(c, type, 10 * (uint64_t)i);
    run_gpu(&p);
    run_cpu(t, &p);
    char name[96];
    snprintf(name, sizeof name, "case %d (%s H %d K %d D %d window %d N %d)", i, dtype_name(type),
             c->s.n_heads, c->s.n_kv_heads, c->s.head_dim, c->s.window, (int)p.n);
    print_message("       %s\n", name);
    if (p.n == 0) continue;
    double forward = type == DT_F32 ? f32_tolerance(&p) : 1.0 / 128;
    double backward = type == DT_F32 ? 2 * forward : 1.0 / 64;
    twin_compare("out", p.out, forward);
    twin_compare("lse", p.lse, 1e-5); /* F32 products of BF16 inputs either way */
    twin_compare("dqkv", p.dqkv, backward);
  }
  twin_done();
}

static void f32_agrees(void **state) {
  (void)state;
  agrees(DT_F32);
}

static void bf16_agrees(void **state) {
  (void)state;
  agrees(DT_BF16);
}

static void check_same(const char *what, const float *a, const float *b, int64_t n) {
  int64_t differ = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t x, y;
    memcpy(&x, a + i, sizeof x);
    memcpy(&y, b + i, sizeof y);
    differ += x != y;
  }
  if (differ)
    print_message("FAILED %s: %lld of %lld differ\n", what, (long long)differ, (long long)n);
  twin_state.failures += differ > 0;
}

/* Same bits when run again, without lse, and for a sequence whatever else is packed with it. */
static void same_bits(void **state) {
  (void)state;
  own_twins();
  static const Case alone = {1, {333}, {8, 2, 64, 0.125F, 0}};
  static const Case among = {3, {77, 333, 210}, {8, 2, 64, 0.125F, 0}};
  for (int k = 0; k < 2; k++) {
    DType type = k ? DT_BF16 : DT_F32;
    Packed a = pack(&among, type, 3), b = pack(&alone, type, 5), again = pack(&among, type, 3);
    int64_t q = a.qkv.cpu.dim[1], hd = a.out.cpu.dim[1], skip_rows = len_of(77), n = len_of(333);
    size_t size = dtype_size(type);
    device_copy(twin_state.gpu, b.qkv.gpu.data,
                (char *)a.qkv.gpu.data + (size_t)(skip_rows * q) * size, (size_t)(n * q) * size);
    device_copy(twin_state.gpu, b.dout.gpu.data,
                (char *)a.dout.gpu.data + (size_t)(skip_rows * hd) * size, (size_t)(n * hd) * size);
    run_gpu(&a);
    run_gpu(&b);
    run_gpu(&again);
    float *x = twin_back(a.dqkv), *y = twin_back(b.dqkv), *z = twin_back(again.dqkv);
    check_same("dqkv, run twice", x, z, a.n * q);
    check_same("dqkv, alone and in company", x + skip_rows * q, y, n * q);
    float *out = twin_back(a.out);
    own_attention_fwd(twin_state.gpu, a.qkv.gpu, segments(&a), among.s, a.out.gpu,
                      twin_absent().gpu);
    float *bare = twin_back(a.out);
    check_same("out with and without lse", out, bare, a.n * hd);
    free(x);
    free(y);
    free(z);
    free(out);
    free(bare);
  }
  twin_done();
}

/* NaN in one sequence must not leak into another, and must show in its own. */
static void nan_stays_in_its_sequence(void **state) {
  (void)state;
  Twins *t = own_twins();
  static const Case c = {3, {70, 90, 66}, {2, 1, 16, 0.25F, 0}};
  for (int k = 0; k < 2; k++) {
    Packed p = pack(&c, k ? DT_BF16 : DT_F32, 7);
    int64_t q = p.qkv.cpu.dim[1], hd = p.out.cpu.dim[1], bad = 70 + 40, end = 70 + len_of(90);
    size_t size = dtype_size(p.type), bytes = (size_t)q * size;
    void *row = mem_alloc(bytes, 1);
    memset(row, 0xff, bytes);
    device_upload(t->gpu, (char *)p.qkv.gpu.data + (size_t)bad * bytes, row, bytes);
    run_gpu(&p);
    float *out = twin_back(p.out), *dqkv = twin_back(p.dqkv);
    bool leak = false, lost = false;
    for (int64_t i = 0; i < p.n; i++) {
      bool other = i < 70 || i >= end;
      for (int64_t j = 0; other && j < hd; j++) leak |= isnan(out[i * hd + j]);
      for (int64_t j = 0; other && j < q; j++) leak |= isnan(dqkv[i * q + j]);
      if (!other && i >= bad) lost |= !isnan(out[i * hd]) || !isnan(dqkv[i * q]);
    }
    twin_check("NaN leaks into another sequence", !leak);
    twin_check("NaN is lost", !lost);
    free(row);
    free(out);
    free(dqkv);
  }
  twin_done();
}

static void time_fwd(void *arg) {
  const Packed *p = arg;
  own_attention_fwd(twin_state.gpu, p->qkv.gpu, segments(p), p->c->s, p->out.gpu, p->lse.gpu);
}
static void time_bwd(void *arg) {
  const Packed *p = arg;
  own_attention_bwd(twin_state.gpu, p->dout.gpu, p->qkv.gpu, p->out.gpu, p->lse.gpu, segments(p),
                    p->c->s, p->dqkv.gpu);
}

/* Model FLOPs: 4 D for each pair of a query and a key that it sees, 10 D in the backward. */
static void rates(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  own_twins();
  static const struct {
    const char *name;
    DType type;
    Case c;
  } runs[] = {
      {"bf16 8 x 2048, H 32 K 4 D 64",
       DT_BF16,
       {8, {2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048}, {32, 4, 64, 0.125F, 0}}},
      {"bf16 2 x 2048, H 32 K 32 D 128", DT_BF16, {2, {2048, 2048}, {32, 32, 128, 0.0884F, 0}}},
      {"f32 4 x 1024, H 16 K 4 D 64",
       DT_F32,
       {4, {1024, 1024, 1024, 1024}, {16, 4, 64, 0.125F, 0}}},
  };
  for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
    Packed p = pack(&runs[i].c, runs[i].type, 1);
    double pairs = 0, each = (double)runs[i].c.s.n_heads * runs[i].c.s.head_dim;
    for (int b = 0; b < runs[i].c.n_seqs; b++)
      pairs += 0.5 * (double)runs[i].c.len[b] * (double)(runs[i].c.len[b] + 1);
    char name[96];
    snprintf(name, sizeof name, "own forward %s", runs[i].name);
    twin_time(name, time_fwd, &p, 0, 4 * pairs * each);
    snprintf(name, sizeof name, "own backward %s", runs[i].name);
    twin_time(name, time_bwd, &p, 0, 10 * pairs * each);
    twin_done();
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(f32_agrees), cmocka_unit_test(bf16_agrees),
    cmocka_unit_test(same_bits),  cmocka_unit_test(nan_stays_in_its_sequence),
    cmocka_unit_test(rates),
};
TEST_MAIN(tests)
