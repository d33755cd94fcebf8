/* GEMM against a product in double precision: every kind, odd sizes, alpha and beta. */
#include "tests/kernels_test.h"

typedef struct Case {
  int64_t m, n, k;
  float alpha, beta;
} Case;

static const Case cases[] = {
    {1, 1, 1, 1, 0},       {1, 17, 33, 1, 0},       {3, 5, 7, 1, 1},         {17, 33, 65, 0.5F, -2},
    {33, 129, 3, 1, 0},    {65, 64, 128, 1, 1},     {129, 65, 17, -1, 0.5F}, {1, 960, 320, 1, 0},
    {2, 333, 321, 1, 0},   {8, 320, 864, 1, 0},     {31, 97, 320, 1, 1},     {32, 1728, 320, 1, 0},
    {64, 100, 100, 1, 0},  {200, 300, 250, 1, 1},   {0, 5, 3, 1, 0},         {5, 0, 3, 1, 0},
    {5, 3, 0, 1, 0},       {5, 3, 0, 1, 0.5F},      {16, 7, 1000, 1, 0},     {5, 4097, 9, 1, 1},
    {129, 257, 513, 1, 0}, {7, 48, 2, 0, 1},        {13, 1, 5, 1, 0},        {300, 1, 129, 1, 1},
    {12, 9, 40, 1, 0},     {33, 70, 1500, 1, 0.5F}, {100, 31, 1025, -2, 1},  {128, 24, 65, 1, 0},
    {129, 24, 65, 1, 0},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static void product(GemmKind kind, const Case *s, const float *a, const float *b, double *c) {
  for (int64_t i = 0; i < s->m; i++)
    for (int64_t j = 0; j < s->n; j++) {
      double sum = 0;
      for (int64_t p = 0; p < s->k; p++) {
        double x = (double)(kind == GEMM_TN ? a[p * s->m + i] : a[i * s->k + p]);
        double y = (double)(kind == GEMM_NT ? b[j * s->k + p] : b[p * s->n + j]);
        sum += x * y;
      }
      c[i * s->n + j] = (double)s->alpha * sum;
    }
}

static void run(Device *d, GemmKind kind, const Case *s, float *a, float *b, float *c) {
  Tensor ta = kind == GEMM_TN ? f32_2d(a, s->k, s->m) : f32_2d(a, s->m, s->k);
  Tensor tb = kind == GEMM_NT ? f32_2d(b, s->n, s->k) : f32_2d(b, s->k, s->n);
  device_ops(d)->gemm(d, kind, s->alpha, ta, tb, s->beta, f32_2d(c, s->m, s->n));
}

static void check_case(Device *d, GemmKind kind, const Case *s) {
  int64_t mn = s->m * s->n;
  float *a = random_floats(1, s->m * s->k, 1), *b = random_floats(2, s->n * s->k, 1);
  float *c = s->beta == 0 ? filled_floats(mn, NAN) : random_floats(3, mn, 1);
  float *again = mem_alloc((size_t)mn, sizeof(float));
  memcpy(again, c, sizeof(float) * (size_t)mn);
  double *want = zeros(mn);
  product(kind, s, a, b, want);
  for (int64_t i = 0; s->beta != 0 && i < mn; i++) want[i] += (double)s->beta * (double)c[i];
  run(d, kind, s, a, b, c);
  char what[96];
  snprintf(what, sizeof what, "kind %d m %lld n %lld k %lld", (int)kind, (long long)s->m,
           (long long)s->n, (long long)s->k);
  /* Sums of k products of N(0,1): error about eps sqrt(k), values about sqrt(k). */
  assert_close(what, c, want, mn, 2e-6, 1);
  run(d, kind, s, a, b, again);
  assert_same_bits(what, c, again, mn);
  free(a);
  free(b);
  free(c);
  free(again);
  free(want);
}

static void check_kind(GemmKind kind) {
  for (int threads = 1; threads <= 3; threads++) {
    Device *d = open_cpu(threads);
    for (int i = 0; i < N_CASES; i++) check_case(d, kind, cases + i);
    device_close(d);
  }
}

static void gemm_nt(void **state) { (void)state, check_kind(GEMM_NT); }
static void gemm_nn(void **state) { (void)state, check_kind(GEMM_NN); }
static void gemm_tn(void **state) { (void)state, check_kind(GEMM_TN); }

/* NaN in the inputs must reach the result: nothing may skip it. */
static void gemm_keeps_nan(void **state) {
  (void)state;
  Device *d = open_cpu(2);
  for (int kind = GEMM_NT; kind <= GEMM_TN; kind++)
    for (int i = 0; i < N_CASES; i++) {
      Case s = cases[i];
      if (s.m * s.n * s.k == 0 || s.alpha == 0) continue;
      float *a = filled_floats(s.m * s.k, 0), *b = filled_floats(s.n * s.k, 0);
      float *c = filled_floats(s.m * s.n, 0);
      a[s.m * s.k - 1] = NAN; /* row m - 1, depth k - 1 in both layouts */
      run(d, (GemmKind)kind, &s, a, b, c);
      for (int64_t j = 0; j < s.n; j++) assert_true(isnan(c[(s.m - 1) * s.n + j]));
      free(a);
      free(b);
      free(c);
    }
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(gemm_nt),
    cmocka_unit_test(gemm_nn),
    cmocka_unit_test(gemm_tn),
    cmocka_unit_test(gemm_keeps_nan),
};
TEST_MAIN(tests)
