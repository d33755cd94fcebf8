/* Ops that some model families need: LayerNorm, the norms of query and key heads, activations
 * without a gate. Forward against double precision, gradient against finite differences of that. */
#include "tests/kernels_test.h"

static const float eps = 1e-5F;

typedef struct Shape {
  int64_t n, c;
} Shape;
static const Shape shapes[] = {{1, 1},   {3, 2},  {17, 33}, {9, 64},
                               {130, 7}, {2, 70}, {0, 5},   {300, 70}};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

static void for_shapes(void (*check)(Device *, Shape)) {
  for (int threads = 1; threads <= 3; threads += 2) {
    Device *d = open_cpu(threads);
    for (int i = 0; i < N_SHAPES; i++) check(d, shapes[i]);
    device_close(d);
  }
}

/* ---- LayerNorm ---- */

typedef struct NormCase {
  int64_t n, c;
  double *x, *w, *b, *dy;
} NormCase;

static void layernorm(const NormCase *k, double *y) {
  for (int64_t i = 0; i < k->n; i++) {
    const double *x = k->x + i * k->c;
    double mean = 0, var = 0;
    for (int64_t j = 0; j < k->c; j++) mean += x[j] / (double)k->c;
    for (int64_t j = 0; j < k->c; j++) var += (x[j] - mean) * (x[j] - mean) / (double)k->c;
    for (int64_t j = 0; j < k->c; j++)
      y[i * k->c + j] = (x[j] - mean) / sqrt(var + (double)eps) * k->w[j] + k->b[j];
  }
}

static double layernorm_loss(void *ctx) {
  const NormCase *k = ctx;
  double *y = zeros(k->n * k->c);
  layernorm(k, y);
  double sum = weighted_sum(k->dy, y, k->n * k->c);
  free(y);
  return sum;
}

static void check_layernorm(Device *d, Shape s) {
  int64_t nc = s.n * s.c;
  float *x = random_floats(1, nc, 2), *delta = random_floats(2, nc, 1);
  float *w = random_floats(3, s.c, 1), *b = random_floats(4, s.c, 1);
  float *y = filled_floats(nc, NAN), *mean = filled_floats(s.n, NAN),
        *rstd = filled_floats(s.n, NAN);
  double *sum = widen(x, nc), *want = zeros(nc);
  for (int64_t i = 0; i < nc; i++) {
    x[i] += 10; /* a mean far from 0, which E[x^2] - E[x]^2 would not survive */
    sum[i] = (double)(x[i] + delta[i]);
  }
  NormCase k = {s.n, s.c, sum, widen(w, s.c), widen(b, s.c), NULL};
  layernorm(&k, want);
  Tensor tx = f32_2d(x, s.n, s.c), tw = f32_1d(w, s.c), tb = f32_1d(b, s.c);
  device_ops(d)->layernorm_fwd(d, tx, f32_2d(delta, s.n, s.c), tw, tb, eps, f32_2d(y, s.n, s.c),
                               f32_1d(mean, s.n), f32_1d(rstd, s.n));
  assert_close("x + delta", x, sum, nc, 1e-9, 1);
  /* 10 is rounded to 1e-6, and two values alone may lie as close as 0.01. */
  assert_close("layernorm", y, want, nc, s.c < 8 ? 2e-3 : 2e-5, 1);
  float *again = filled_floats(nc, NAN);
  device_ops(d)->layernorm_fwd(d, tx, absent(), tw, tb, eps, f32_2d(again, s.n, s.c), absent(),
                               absent());
  assert_same_bits("without delta or statistics", again, y, nc);
  free(x), free(delta), free(w), free(b), free(y), free(mean), free(rstd), free(again);
  free(sum), free(want), free(k.w), free(k.b);
}

static void check_layernorm_gradient(Device *d, Shape s) {
  int64_t nc = s.n * s.c;
  if (nc > 1000) return; /* finite differences take nc forwards */
  float *x = random_floats(1, nc, 1), *w = random_floats(3, s.c, 1), *b = random_floats(4, s.c, 1);
  float *dy = random_floats(5, nc, 1), *dx = filled_floats(nc, 0.5F);
  float *dw = filled_floats(s.c, 0.25F), *db = filled_floats(s.c, -1);
  float *y = filled_floats(nc, NAN), *mean = filled_floats(s.n, NAN),
        *rstd = filled_floats(s.n, NAN);
  Tensor tx = f32_2d(x, s.n, s.c), tw = f32_1d(w, s.c), tdy = f32_2d(dy, s.n, s.c);
  Tensor tmean = f32_1d(mean, s.n), trstd = f32_1d(rstd, s.n);
  device_ops(d)->layernorm_fwd(d, tx, absent(), tw, f32_1d(b, s.c), eps, f32_2d(y, s.n, s.c), tmean,
                               trstd);
  device_ops(d)->layernorm_bwd(d, tdy, tx, tw, tmean, trstd, f32_2d(dx, s.n, s.c), f32_1d(dw, s.c),
                               f32_1d(db, s.c));
  NormCase k = {s.n, s.c, widen(x, nc), widen(w, s.c), widen(b, s.c), widen(dy, nc)};
  double *want_x = finite_differences(layernorm_loss, &k, k.x, nc);
  double *want_w = finite_differences(layernorm_loss, &k, k.w, s.c);
  double *want_b = finite_differences(layernorm_loss, &k, k.b, s.c);
  for (int64_t i = 0; i < nc; i++) want_x[i] += 0.5; /* it is added to what was there */
  for (int64_t i = 0; i < s.c; i++) want_w[i] += 0.25;
  for (int64_t i = 0; i < s.c; i++) want_b[i] -= 1;
  /* Two close values: a large rstd on float differences. */
  double tolerance = s.c < 8 ? 2e-4 : 1e-5;
  assert_close("dx", dx, want_x, nc, tolerance, 1);
  assert_close("dw", dw, want_w, s.c, tolerance, 1);
  assert_close("db", db, want_b, s.c, 1e-5, 1);
  free(x), free(w), free(b), free(dy), free(dx), free(dw), free(db), free(y), free(mean),
      free(rstd);
  free(k.x), free(k.w), free(k.b), free(k.dy), free(want_x), free(want_w), free(want_b);
}

static void layernorm_forward(void **state) { (void)state, for_shapes(check_layernorm); }
static void layernorm_gradient(void **state) { (void)state, for_shapes(check_layernorm_gradient); }

/* ---- norms of query and key heads ---- */

typedef struct HeadCase {
  int64_t n;
  AttnShape s;
  double *x, *wq, *wk, *dy;
} HeadCase;

static int64_t width(AttnShape s) { return (int64_t)(s.n_heads + 2 * s.n_kv_heads) * s.head_dim; }

static void qk_norm(const HeadCase *k, double *y) {
  int dim = k->s.head_dim, heads = k->s.n_heads + 2 * k->s.n_kv_heads;
  for (int64_t i = 0; i < k->n * heads; i++) {
    const double *x = k->x + i * dim;
    int64_t h = i % heads;
    const double *w = h < k->s.n_heads ? k->wq : k->wk;
    double rstd = 1 / sqrt(weighted_sum(x, x, dim) / dim + (double)eps);
    bool value = h >= k->s.n_heads + k->s.n_kv_heads;
    for (int j = 0; j < dim; j++) y[i * dim + j] = value ? x[j] : x[j] * rstd * w[j];
  }
}

static double qk_norm_loss(void *ctx) {
  const HeadCase *k = ctx;
  int64_t size = k->n * width(k->s);
  double *y = zeros(size);
  qk_norm(k, y);
  double sum = weighted_sum(k->dy, y, size);
  free(y);
  return sum;
}

static void check_heads(Device *d, int64_t n, AttnShape s) {
  int64_t q = width(s), size = n * q, heads = s.n_heads + s.n_kv_heads, dim = s.head_dim;
  float *x = random_floats(1, size, 1), *wq = random_floats(2, dim, 1);
  float *wk = random_floats(3, dim, 1), *dy = random_floats(4, size, 1);
  float *y = filled_floats(size, NAN), *rstd = filled_floats(n * heads, NAN);
  float *dwq = filled_floats(dim, 2), *dwk = filled_floats(dim, 3);
  HeadCase k = {n, s, widen(x, size), widen(wq, dim), widen(wk, dim), widen(dy, size)};
  double *want = zeros(size);
  qk_norm(&k, want);
  Tensor tx = f32_2d(x, n, q), tq = f32_1d(wq, dim), tk = f32_1d(wk, dim);
  Tensor trstd = f32_2d(rstd, n, heads);
  device_ops(d)->qk_norm_fwd(d, tx, tq, tk, eps, s, f32_2d(y, n, q), absent());
  assert_close("heads", y, want, size, 2e-6, 1);
  device_ops(d)->qk_norm_fwd(d, tx, tq, tk, eps, s, f32_2d(y, n, q), trstd);
  assert_close("heads, with statistics", y, want, size, 2e-6, 1);
  device_ops(d)->qk_norm_bwd(d, tx, tq, tk, trstd, s, f32_2d(dy, n, q), f32_1d(dwq, dim),
                             f32_1d(dwk, dim));
  if (size < 1000) {
    double *want_x = finite_differences(qk_norm_loss, &k, k.x, size);
    double *want_q = finite_differences(qk_norm_loss, &k, k.wq, dim);
    double *want_k = finite_differences(qk_norm_loss, &k, k.wk, dim);
    for (int j = 0; j < dim; j++) {
      want_q[j] += 2;
      want_k[j] += 3;
    }
    assert_close("heads' gradient", dy, want_x, size, 1e-5, 1);
    assert_close("dwq", dwq, want_q, dim, 1e-5, 1);
    assert_close("dwk", dwk, want_k, dim, 1e-5, 1);
    free(want_x), free(want_q), free(want_k);
  }
  free(x), free(wq), free(wk), free(dy), free(y), free(rstd), free(dwq), free(dwk);
  free(k.x), free(k.wq), free(k.wk), free(k.dy), free(want);
}

static void query_key_norms(void **state) {
  (void)state;
  const AttnShape s[] = {
      {1, 1, 6, 1, 0}, {4, 2, 8, 1, 0}, {3, 3, 5, 1, 0}, {6, 1, 32, 1, 0}, {8, 2, 64, 1, 0}};
  for (int threads = 1; threads <= 3; threads += 2) {
    Device *d = open_cpu(threads);
    for (int i = 0; i < 5; i++) check_heads(d, i == 4 ? 70 : 4 - i, s[i]);
    check_heads(d, 0, s[0]);
    device_close(d);
  }
}

/* ---- activations ---- */

static double wanted(Activation a, double x) {
  if (a == ACT_RELU) return x > 0 ? x : 0;
  if (a == ACT_GELU) return 0.5 * x * (1 + erf(x / sqrt(2)));
  return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

/* From deep in the tails to the steep middle, at points where ReLU has a slope. */
static void activations(void **state) {
  (void)state;
  enum { N = 41, F = 500 };
  float *x = mem_alloc(N * F, sizeof *x), *dy = random_floats(1, N * F, 1);
  float *y = filled_floats(N * F, NAN), *dx = filled_floats(N * F, NAN);
  for (int i = 0; i < N * F; i++) x[i] = -12.0F + 24.0F * ((float)i + 0.5F) / (float)(N * F);
  for (int threads = 1; threads <= 3; threads += 2) {
    Device *d = open_cpu(threads);
    for (int a = ACT_RELU; a <= ACT_GELU_TANH; a++) {
      device_ops(d)->act_fwd(d, (Activation)a, f32_2d(x, N, F), f32_2d(y, N, F));
      device_ops(d)->act_bwd(d, (Activation)a, f32_2d(dy, N, F), f32_2d(x, N, F), f32_2d(dx, N, F));
      for (int i = 0; i < N * F; i++) {
        double at = (double)x[i], h = 1e-4;
        double slope = (wanted((Activation)a, at + h) - wanted((Activation)a, at - h)) / (2 * h);
        /* A few float roundings of numbers around 1; of x beyond it. h^2 is 1e-8. */
        double scale = fmax(1, fabs(at));
        assert_true(fabs((double)y[i] - wanted((Activation)a, at)) < 5e-7 * scale);
        assert_true(fabs((double)dx[i] - (double)dy[i] * slope) < 2e-6 * scale * 4);
      }
    }
    device_close(d);
  }
  free(x), free(dy), free(y), free(dx);
}

/* NaN must stay: a ReLU that turned it into 0 would hide a broken step. */
static void nan_stays(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  for (int a = ACT_RELU; a <= ACT_GELU_TANH; a++) {
    float x = NAN, y = 0;
    device_ops(d)->act_fwd(d, (Activation)a, f32_2d(&x, 1, 1), f32_2d(&y, 1, 1));
    assert_true(isnan(y));
  }
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(layernorm_forward), cmocka_unit_test(layernorm_gradient),
    cmocka_unit_test(query_key_norms),   cmocka_unit_test(activations),
    cmocka_unit_test(nan_stays),
};
TEST_MAIN(tests)
