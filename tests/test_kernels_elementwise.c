/* AdamW, sums over whole tensors, axpy, scale, lerp: odd sizes, NaN, same bits for any threads. */
#include "tests/kernels_test.h"

static const int64_t sizes[] = {0, 1, 3, 17, 1000, 16383, 16385, 100003};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };

/* torch.optim.AdamW's update of one element, in double. */
static void adamw_reference(const AdamW *p, double *w, double g, double *m, double *v) {
  double b1 = (double)p->beta1, b2 = (double)p->beta2, lr = (double)p->lr;
  g *= (double)p->grad_scale;
  *w *= 1 - lr * (double)p->weight_decay;
  *m = b1 * *m + (1 - b1) * g;
  *v = b2 * *v + (1 - b2) * g * g;
  double denominator = sqrt(*v) / sqrt(1 - pow(b2, (double)p->t)) + (double)p->eps;
  *w -= lr / (1 - pow(b1, (double)p->t)) * *m / denominator;
}

static void adamw_steps(void **state) {
  (void)state;
  for (int i = 0; i < N_SIZES; i++) {
    int64_t n = sizes[i];
    Device *d = open_cpu(1 + i % 3);
    float *w = random_floats(1, n, 1), *m = filled_floats(n, 0), *v = filled_floats(n, 0);
    double *dw = widen(w, n), *dm = zeros(n), *dv = zeros(n);
    for (int64_t t = 1; t <= 5; t++) {
      AdamW p = {1e-2F, 0.9F, 0.95F, 1e-8F, 0.1F, 0.25F, t};
      float *g = random_floats((uint64_t)t + 10, n, 1);
      device_ops(d)->adamw(d, p, f32_1d(w, n), f32_1d(g, n), f32_1d(m, n), f32_1d(v, n),
                           (Tensor){0});
      for (int64_t j = 0; j < n; j++) adamw_reference(&p, dw + j, (double)g[j], dm + j, dv + j);
      free(g);
    }
    assert_close("w", w, dw, n, 1e-6, 1); /* five updates, each rounded a few times */
    assert_close("m", m, dm, n, 1e-6, 0.1);
    assert_close("v", v, dv, n, 1e-6, 0.01);
    free(w);
    free(m);
    free(v);
    free(dw);
    free(dm);
    free(dv);
    device_close(d);
  }
}

static void sum_squares(void **state) {
  (void)state;
  for (int i = 0; i < N_SIZES; i++) {
    int64_t n = sizes[i];
    float *x = random_floats(3, n, 2);
    double want = 0, first = 0;
    for (int64_t j = 0; j < n; j++) want += (double)x[j] * (double)x[j];
    for (int threads = 1; threads <= 3; threads++) {
      Device *d = open_cpu(threads);
      double got = device_ops(d)->sum_squares(d, f32_1d(x, n));
      assert_true(fabs(got - want) <= 1e-13 * want); /* sums in double */
      if (threads == 1) first = got;
      assert_true(got == first); /* the same bits */
      device_close(d);
    }
    free(x);
  }
}

static void sum_squares_shows_nan_and_infinity(void **state) {
  (void)state;
  Device *d = open_cpu(2);
  int64_t n = 100003;
  float *x = random_floats(3, n, 2);
  const int64_t places[] = {0, 1, 389, 50000, n - 1};
  for (int i = 0; i < 5; i++) {
    float keep = x[places[i]];
    x[places[i]] = NAN;
    assert_true(!isfinite(device_ops(d)->sum_squares(d, f32_1d(x, n))));
    x[places[i]] = -INFINITY;
    assert_true(!isfinite(device_ops(d)->sum_squares(d, f32_1d(x, n))));
    x[places[i]] = 3e38F; /* its square fits a double */
    assert_true(isfinite(device_ops(d)->sum_squares(d, f32_1d(x, n))));
    x[places[i]] = keep;
  }
  free(x);
  device_close(d);
}

static void axpy_scale_lerp(void **state) {
  (void)state;
  for (int i = 0; i < N_SIZES; i++) {
    int64_t n = sizes[i];
    Device *d = open_cpu(1 + i % 3);
    const Ops *ops = device_ops(d);
    float *x = random_floats(1, n, 1), *y = random_floats(2, n, 1);
    double *want = widen(y, n);
    for (int64_t j = 0; j < n; j++) {
      want[j] += 0.5 * (double)x[j];
      want[j] *= -3;
      want[j] = 0.75 * want[j] + 0.25 * (double)x[j];
    }
    ops->axpy(d, 0.5F, f32_1d(x, n), f32_1d(y, n));
    ops->scale(d, -3, f32_1d(y, n));
    ops->lerp(d, 0.75F, f32_1d(x, n), f32_1d(y, n));
    assert_close("y", y, want, n, 3e-7, 1); /* three roundings */
    for (int64_t j = 0; j < n; j += 7) y[j] = NAN;
    ops->scale(d, 0, f32_1d(y, n));
    for (int64_t j = 0; j < n; j++) assert_true(y[j] == 0);
    free(x);
    free(y);
    free(want);
    device_close(d);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(adamw_steps),
    cmocka_unit_test(sum_squares),
    cmocka_unit_test(sum_squares_shows_nan_and_infinity),
    cmocka_unit_test(axpy_scale_lerp),
};
TEST_MAIN(tests)
