/* Ops that work row by row: embedding, row selection, bias, RMSNorm, RoPE, SwiGLU. Forward against
 * double precision, gradient against finite differences of that. */
#include "tests/kernels_test.h"

typedef struct Shape {
  int64_t n, c;
} Shape;

static const Shape shapes[] = {{1, 1},    {3, 2},    {17, 33}, {33, 64}, {65, 320},
                               {129, 17}, {300, 70}, {1, 864}, {0, 5},   {5, 130}};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

/* Runs a check for every shape with one, two and three threads. */
static void for_shapes(void (*check)(Device *, Shape)) {
  for (int threads = 1; threads <= 3; threads++) {
    Device *d = open_cpu(threads);
    for (int i = 0; i < N_SHAPES; i++) check(d, shapes[i]);
    device_close(d);
  }
}

/* ---- embedding and row selection ---- */

static void check_rows(Device *d, Shape s) {
  const int vocab = 11;
  float *table = random_floats(1, vocab * s.c, 1), *y = filled_floats(s.n * s.c, NAN);
  float *sum = random_floats(2, vocab * s.c, 1);
  int32_t *ids = random_ids(3, s.n, vocab); /* 11 ids: rows repeat */
  double *want = widen(sum, vocab * s.c);
  device_ops(d)->embedding_fwd(d, i32_1d(ids, s.n), f32_2d(table, vocab, s.c), f32_2d(y, s.n, s.c));
  for (int64_t i = 0; i < s.n; i++)
    assert_same_bits("embedding", y + i * s.c, table + ids[i] * s.c, s.c);
  for (int64_t i = 0; i < s.n; i++)
    for (int64_t j = 0; j < s.c; j++) want[ids[i] * s.c + j] += (double)y[i * s.c + j];
  float *by_embedding = mem_alloc((size_t)(vocab * s.c), sizeof(float));
  memcpy(by_embedding, sum, sizeof(float) * (size_t)(vocab * s.c));
  device_ops(d)->scatter_add_rows(d, f32_2d(y, s.n, s.c), i32_1d(ids, s.n),
                                  f32_2d(sum, vocab, s.c));
  assert_close("scatter", sum, want, vocab * s.c, 3e-6, 1); /* up to 40 terms a row */
  device_ops(d)->embedding_bwd(d, i32_1d(ids, s.n), f32_2d(y, s.n, s.c),
                               f32_2d(by_embedding, vocab, s.c));
  assert_same_bits("embedding gradient", by_embedding, sum, vocab * s.c);
  free(table);
  free(y);
  free(sum);
  free(ids);
  free(want);
  free(by_embedding);
}

static void embedding_and_rows(void **state) { (void)state, for_shapes(check_rows); }

static void check_bias(Device *d, Shape s) {
  float *x = random_floats(1, s.n * s.c, 1), *b = random_floats(2, s.c, 1);
  float *db = random_floats(3, s.c, 1);
  double *want = widen(x, s.n * s.c), *want_db = widen(db, s.c);
  for (int64_t i = 0; i < s.n * s.c; i++) {
    want_db[i % s.c] += (double)x[i];
    want[i] += (double)b[i % s.c];
  }
  device_ops(d)->bias_grad(d, f32_2d(x, s.n, s.c), f32_1d(db, s.c));
  device_ops(d)->bias_add(d, f32_2d(x, s.n, s.c), f32_1d(b, s.c));
  assert_close("bias", x, want, s.n * s.c, 2e-7, 1);        /* one addition */
  assert_close("bias gradient", db, want_db, s.c, 5e-6, 1); /* sums of up to 300 */
  free(x);
  free(b);
  free(db);
  free(want);
  free(want_db);
}

static void bias(void **state) { (void)state, for_shapes(check_bias); }

/* ---- RMSNorm ---- */

static const float norm_eps = 1e-5F;

static void rmsnorm(int64_t n, int64_t c, const double *x, const double *w, double *y) {
  for (int64_t i = 0; i < n; i++) {
    double rstd = 1 / sqrt(weighted_sum(x + i * c, x + i * c, c) / (double)c + (double)norm_eps);
    for (int64_t j = 0; j < c; j++) y[i * c + j] = x[i * c + j] * rstd * w[j];
  }
}

static void check_norm_forward(Device *d, Shape s) {
  int64_t nc = s.n * s.c;
  float *x = random_floats(1, nc, 2), *delta = random_floats(2, nc, 1);
  float *w = random_floats(3, s.c, 1), *y = filled_floats(nc, NAN), *rstd = filled_floats(s.n, NAN);
  double *want = zeros(nc), *dw = widen(w, s.c), *sum = widen(x, nc);
  for (int64_t i = 0; i < nc; i++) sum[i] += (double)delta[i];
  rmsnorm(s.n, s.c, sum, dw, want);
  Tensor tx = f32_2d(x, s.n, s.c), ty = f32_2d(y, s.n, s.c), tw = f32_1d(w, s.c);
  device_ops(d)->rmsnorm_fwd(d, tx, f32_2d(delta, s.n, s.c), tw, norm_eps, ty, f32_1d(rstd, s.n));
  assert_close("x + delta", x, sum, nc, 2e-7, 1); /* one addition */
  assert_close("norm", y, want, nc, 2e-6, 1);     /* a sum of up to 864 positive terms */
  device_ops(d)->rmsnorm_fwd(d, tx, absent(), tw, norm_eps, ty, absent());
  assert_close("norm without delta", y, want, nc, 2e-6, 1);
  for (int64_t i = 0; i < s.n; i++) {
    double ms = weighted_sum(sum + i * s.c, sum + i * s.c, s.c) / (double)s.c;
    assert_true(fabs((double)rstd[i] * sqrt(ms + (double)norm_eps) - 1) < 2e-6);
  }
  for (int64_t i = 0; i < nc; i++) sum[i] += (double)delta[i];
  device_ops(d)->rmsnorm_fwd(d, tx, f32_2d(delta, s.n, s.c), absent(), norm_eps, absent(),
                             absent());
  assert_close("residual alone", x, sum, nc, 4e-7, 1); /* two additions */
  free(x);
  free(delta);
  free(w);
  free(y);
  free(rstd);
  free(want);
  free(dw);
  free(sum);
}

typedef struct NormLoss {
  int64_t n, c;
  double *x, *w, *dy, *y;
} NormLoss;

static double norm_loss(void *ctx) {
  NormLoss *a = ctx;
  rmsnorm(a->n, a->c, a->x, a->w, a->y);
  return weighted_sum(a->dy, a->y, a->n * a->c);
}

static void check_norm_backward(Device *d, Shape s) {
  int64_t nc = s.n * s.c;
  if (nc > 3000) return; /* finite differences cost its square; the gradient has no size cases */
  float *x = random_floats(1, nc, 2), *dy = random_floats(2, nc, 1), *w = random_floats(3, s.c, 1);
  float *y = filled_floats(nc, 0), *rstd = filled_floats(s.n, 0);
  float *dx = random_floats(4, nc, 1), *dw = random_floats(5, s.c, 1);
  NormLoss a = {s.n, s.c, widen(x, nc), widen(w, s.c), widen(dy, nc), zeros(nc)};
  double *want_dx = finite_differences(norm_loss, &a, a.x, nc);
  double *want_dw = finite_differences(norm_loss, &a, a.w, s.c);
  for (int64_t i = 0; i < nc; i++) want_dx[i] += (double)dx[i];
  for (int64_t i = 0; i < s.c; i++) want_dw[i] += (double)dw[i];
  Tensor tx = f32_2d(x, s.n, s.c), tw = f32_1d(w, s.c), tr = f32_1d(rstd, s.n);
  device_ops(d)->rmsnorm_fwd(d, tx, absent(), tw, norm_eps, f32_2d(y, s.n, s.c), tr);
  device_ops(d)->rmsnorm_bwd(d, f32_2d(dy, s.n, s.c), tx, tw, tr, f32_2d(dx, s.n, s.c),
                             f32_1d(dw, s.c));
  assert_close("dx", dx, want_dx, nc, 3e-6, 1);  /* sums over a row; where c = 1 they cancel */
  assert_close("dw", dw, want_dw, s.c, 5e-6, 1); /* sums over up to 129 rows */
  free(x);
  free(dy);
  free(w);
  free(y);
  free(rstd);
  free(dx);
  free(dw);
  free(a.x);
  free(a.w);
  free(a.dy);
  free(a.y);
  free(want_dx);
  free(want_dw);
}

static void rmsnorm_forward(void **state) { (void)state, for_shapes(check_norm_forward); }
static void rmsnorm_backward(void **state) { (void)state, for_shapes(check_norm_backward); }

/* A column sum that is wrong only for many rows or wide rows would escape the small cases. */
static void rmsnorm_backward_large(void **state) {
  (void)state;
  enum { N = 1000, C = 333 };
  Device *d = open_cpu(2);
  float *x = random_floats(1, N * C, 1), *dy = random_floats(2, N * C, 1), *w = filled_floats(C, 1);
  float *rstd = random_floats(3, N, 1), *dx = filled_floats(N * C, 0), *dw = filled_floats(C, 0);
  double *want = zeros(C);
  for (int64_t i = 0; i < N * C; i++)
    want[i % C] += (double)dy[i] * (double)x[i] * (double)rstd[i / C];
  device_ops(d)->rmsnorm_bwd(d, f32_2d(dy, N, C), f32_2d(x, N, C), f32_1d(w, C), f32_1d(rstd, N),
                             f32_2d(dx, N, C), f32_1d(dw, C));
  assert_close("dw", dw, want, C, 5e-6, 1); /* root of 1000 terms */
  free(x);
  free(dy);
  free(w);
  free(rstd);
  free(dx);
  free(dw);
  free(want);
  device_close(d);
}

/* ---- RoPE ---- */

static void check_rope(Device *d, AttnShape s, int64_t n, int64_t half) {
  enum { P = 50 };
  int64_t D = s.head_dim, heads = s.n_heads + s.n_kv_heads, q = (heads + s.n_kv_heads) * D;
  float *x = random_floats(1, n * q, 1), *cs = mem_alloc((size_t)(P * half), sizeof(float));
  float *sn = mem_alloc((size_t)(P * half), sizeof(float));
  int32_t *pos = random_ids(2, n, P);
  for (int64_t i = 0; i < P * half; i++) {
    int64_t position = i / half;
    double angle = (double)position * pow(100.0, -(double)(i % half) / (double)half);
    cs[i] = (float)cos(angle);
    sn[i] = (float)sin(angle);
  }
  double *before = widen(x, n * q), *want = widen(x, n * q);
  for (int64_t i = 0; i < n; i++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t j = 0; j < half; j++) {
        const double *in = before + i * q + h * D;
        double c = (double)cs[pos[i] * half + j], sine = (double)sn[pos[i] * half + j];
        want[i * q + h * D + j] = in[j] * c - in[j + half] * sine;
        want[i * q + h * D + j + half] = in[j + half] * c + in[j] * sine;
      }
  Tensor tx = f32_2d(x, n, q), tc = f32_2d(cs, P, half), ts = f32_2d(sn, P, half);
  device_ops(d)->rope(d, tx, i32_1d(pos, n), tc, ts, s, false);
  assert_close("rope", x, want, n * q, 3e-7, 1); /* two products */
  device_ops(d)->rope(d, tx, i32_1d(pos, n), tc, ts, s, true);
  assert_close("rope and back", x, before, n * q, 5e-7,
               1); /* a rotation: its transpose undoes it */
  free(x);
  free(cs);
  free(sn);
  free(pos);
  free(before);
  free(want);
}

static void rope(void **state) {
  (void)state;
  for (int threads = 1; threads <= 2; threads++) {
    Device *d = open_cpu(threads);
    check_rope(d, (AttnShape){1, 1, 8, 1, 0}, 1, 4);
    check_rope(d, (AttnShape){4, 2, 64, 1, 0}, 65, 32);
    check_rope(d, (AttnShape){5, 5, 64, 1, 0}, 33, 32);
    check_rope(d, (AttnShape){2, 1, 128, 1, 0}, 17, 64);
    check_rope(d, (AttnShape){3, 1, 20, 1, 0}, 3, 5); /* partial rotation: the rest is untouched */
    check_rope(d, (AttnShape){2, 2, 8, 1, 0}, 0, 4);
    device_close(d);
  }
}

/* ---- SwiGLU ---- */

typedef struct GluLoss {
  int64_t n, f;
  double *gu, *dy, *y;
} GluLoss;

static double glu_loss(void *ctx) {
  GluLoss *a = ctx;
  for (int64_t i = 0; i < a->n * a->f; i++) {
    const double *g = a->gu + i / a->f * 2 * a->f + i % a->f;
    a->y[i] = g[0] / (1 + exp(-g[0])) * g[a->f];
  }
  return weighted_sum(a->dy, a->y, a->n * a->f);
}

static void check_swiglu(Device *d, Shape s) {
  int64_t nf = s.n * s.c;
  if (nf > 3000) return; /* as for the norm */
  float *gu = random_floats(1, 2 * nf, 4), *dy = random_floats(2, nf, 1);
  float *y = filled_floats(nf, NAN), *dgu = filled_floats(2 * nf, NAN);
  float *again = filled_floats(nf, NAN);
  GluLoss a = {s.n, s.c, widen(gu, 2 * nf), widen(dy, nf), zeros(nf)};
  double *want = finite_differences(glu_loss, &a, a.gu, 2 * nf);
  glu_loss(&a);
  device_ops(d)->swiglu_fwd(d, f32_2d(gu, s.n, 2 * s.c), f32_2d(y, s.n, s.c));
  device_ops(d)->swiglu_bwd(d, f32_2d(dy, s.n, s.c), f32_2d(gu, s.n, 2 * s.c),
                            f32_2d(dgu, s.n, 2 * s.c), f32_2d(again, s.n, s.c));
  assert_close("swiglu", y, a.y, nf, 6e-7, 1); /* exp, division and two products */
  assert_memory_equal(again, y, (size_t)nf * sizeof *y);
  assert_close("dgu", dgu, want, 2 * nf, 1e-6, 1);
  device_ops(d)->swiglu_bwd(d, f32_2d(dy, s.n, s.c), f32_2d(gu, s.n, 2 * s.c),
                            f32_2d(gu, s.n, 2 * s.c), (Tensor){0});
  assert_memory_equal(gu, dgu, 2 * (size_t)nf * sizeof *gu); /* in place */
  free(gu);
  free(dy);
  free(y);
  free(again);
  free(dgu);
  free(a.gu);
  free(a.dy);
  free(a.y);
  free(want);
}

static void swiglu(void **state) { (void)state, for_shapes(check_swiglu); }

/* Gates far out: silu goes to 0 and to the identity without NaN. */
static void swiglu_extremes(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  float gu[] = {-200, 200, -1e30F, 1e30F, 2, 2, 2, 2}, y[4], dy[] = {1, 1, 1, 1}, dgu[8];
  device_ops(d)->swiglu_fwd(d, f32_2d(gu, 1, 8), f32_2d(y, 1, 4));
  device_ops(d)->swiglu_bwd(d, f32_2d(dy, 1, 4), f32_2d(gu, 1, 8), f32_2d(dgu, 1, 8), (Tensor){0});
  const float want_y[] = {0, 400, 0, 2e30F}, want_dg[] = {0, 2, 0, 2};
  for (int i = 0; i < 4; i++) assert_true(y[i] == want_y[i] && dgu[i] == want_dg[i]);
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(embedding_and_rows),
    cmocka_unit_test(bias),
    cmocka_unit_test(rmsnorm_forward),
    cmocka_unit_test(rmsnorm_backward),
    cmocka_unit_test(rmsnorm_backward_large),
    cmocka_unit_test(rope),
    cmocka_unit_test(swiglu),
    cmocka_unit_test(swiglu_extremes),
};
TEST_MAIN(tests)
