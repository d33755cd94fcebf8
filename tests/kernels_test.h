/* What the tests of the kernels share: tensors with random contents, comparison with a reference in
 * double precision, and finite differences.
 *
 * A reference computes the same op in double from the same float inputs, so a difference is the
 * op's own rounding: about FLT_EPSILON (1.2e-7) times the root of the number of terms summed. */
#ifndef KERNELS_TEST_H
#define KERNELS_TEST_H

#include <math.h>
#include <stdio.h>

#include "core/rng.h"
#include "kernels/kernels.h"
#include "tests/test.h"

static inline Device *open_cpu(int threads) {
  Error err = {""};
  Device *d = device_open(DEVICE_CPU, threads, &err);
  if (!d) fail_msg("%s", err.msg);
  return d;
}

/* n numbers from N(0, scale^2), exactly sized so that a sanitizer sees any step outside. */
static inline float *random_floats(uint64_t seed, int64_t n, float scale) {
  float *x = mem_alloc((size_t)n, sizeof *x);
  for (int64_t i = 0; i < n; i++) x[i] = scale * rng_normal(seed, 7, (uint64_t)i);
  return x;
}

static inline float *filled_floats(int64_t n, float value) {
  float *x = mem_alloc((size_t)n, sizeof *x);
  for (int64_t i = 0; i < n; i++) x[i] = value;
  return x;
}

static inline int32_t *random_ids(uint64_t seed, int64_t n, int32_t below) {
  int32_t *x = mem_alloc((size_t)n, sizeof *x);
  for (int64_t i = 0; i < n; i++)
    x[i] = (int32_t)(rng_uniform(seed, 8, (uint64_t)i) * (double)below);
  return x;
}

static inline double *widen(const float *x, int64_t n) {
  double *y = mem_alloc((size_t)n, sizeof *y);
  for (int64_t i = 0; i < n; i++) y[i] = (double)x[i];
  return y;
}

static inline double *zeros(int64_t n) { return mem_zalloc((size_t)n, sizeof(double)); }

static inline Tensor f32_1d(float *x, int64_t n) { return tensor_1d(x, DT_F32, n); }
static inline Tensor f32_2d(float *x, int64_t n, int64_t c) { return tensor_2d(x, DT_F32, n, c); }
static inline Tensor i32_1d(int32_t *x, int64_t n) { return tensor_1d(x, DT_I32, n); }
static inline Tensor absent(void) { return tensor_1d(NULL, DT_F32, 0); }

/* Fails unless every |got - want| <= tolerance * max(largest |want|, floor). NaN fails. */
static inline void assert_close(const char *what, const float *got, const double *want, int64_t n,
                                double tolerance, double floor) {
  double mag = floor;
  for (int64_t i = 0; i < n; i++) mag = fabs(want[i]) > mag ? fabs(want[i]) : mag;
  for (int64_t i = 0; i < n; i++)
    if (!(fabs((double)got[i] - want[i]) <= tolerance * mag))
      fail_msg("%s[%lld] = %.9g, expected %.9g (largest %.3g, tolerance %.1g)", what, (long long)i,
               (double)got[i], want[i], mag, tolerance);
}

static inline void assert_same_bits(const char *what, const float *a, const float *b, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (memcmp(a + i, b + i, sizeof *a) != 0)
      fail_msg("%s[%lld]: %.9g and %.9g", what, (long long)i, (double)a[i], (double)b[i]);
}

/* Central differences of a scalar function of x[n], in double: truncation h^2 and rounding
 * 1e-16/h are both far below float's 1e-7 at h = 1e-5. */
typedef double (*LossOf)(void *ctx);
static inline double *finite_differences(LossOf loss, void *ctx, double *x, int64_t n) {
  const double h = 1e-5;
  double *g = zeros(n);
  for (int64_t i = 0; i < n; i++) {
    double keep = x[i];
    x[i] = keep + h;
    double up = loss(ctx);
    x[i] = keep - h;
    g[i] = (up - loss(ctx)) / (2 * h);
    x[i] = keep;
  }
  return g;
}

static inline double weighted_sum(const double *w, const double *y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += w[i] * y[i];
  return sum;
}

#endif
