/* Activations of the MLPs without a gate: ReLU and the two GELUs (Hendrycks & Gimpel 2016). */
#include <math.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vecmath.h"

/* Not x > 0 ? x : 0, which would turn NaN into 0. */
static inline float relu(float x) { return x < 0 ? 0 : x; }
static inline float relu_slope(float x) { return x > 0 ? 1.0f : 0.0f; }

/* x Phi(x), Phi the normal distribution. */
static inline float phi(float x) { return 0.5f * (1.0f + erff(x * (float)M_SQRT1_2)); }
static inline float gelu(float x) { return x * phi(x); }
static inline float gelu_slope(float x) {
  const float density = 0.398942280401f; /* 1 / sqrt(2 pi) */
  return phi(x) + x * density * exp_f32(-0.5f * x * x);
}

/* x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3); (1 + tanh u) / 2 = sigmoid(2 u). */
static const float cubic = 0.044715f, twice_root = 1.595769121606f; /* 2 sqrt(2 / pi) */
static inline float gelu_tanh(float x) {
  return x * sigmoid_f32(twice_root * (x + cubic * x * x * x));
}
static inline float gelu_tanh_slope(float x) {
  float s = sigmoid_f32(twice_root * (x + cubic * x * x * x));
  return s + x * s * (1.0f - s) * twice_root * (1.0f + 3.0f * cubic * x * x);
}

static void row_fwd(Activation kind, int64_t f, const float *x, float *y) {
  switch (kind) {
    case ACT_RELU:
      for (int64_t j = 0; j < f; j++) y[j] = relu(x[j]);
      return;
    case ACT_GELU:
      for (int64_t j = 0; j < f; j++) y[j] = gelu(x[j]);
      return;
    case ACT_GELU_TANH:
#pragma omp simd
      for (int64_t j = 0; j < f; j++) y[j] = gelu_tanh(x[j]);
      return;
  }
  die("no activation %d", (int)kind);
}

static void row_bwd(Activation kind, int64_t f, const float *dy, const float *x, float *dx) {
  switch (kind) {
    case ACT_RELU:
      for (int64_t j = 0; j < f; j++) dx[j] = dy[j] * relu_slope(x[j]);
      return;
    case ACT_GELU:
      for (int64_t j = 0; j < f; j++) dx[j] = dy[j] * gelu_slope(x[j]);
      return;
    case ACT_GELU_TANH:
#pragma omp simd
      for (int64_t j = 0; j < f; j++) dx[j] = dy[j] * gelu_tanh_slope(x[j]);
      return;
  }
  die("no activation %d", (int)kind);
}

void cpu_act_fwd(Device *d, Activation kind, Tensor x_NF, Tensor y_NF) {
  int64_t n = x_NF.dim[0], f = x_NF.dim[1];
  require(is_f32(x_NF, 2) && is_f32_2d(y_NF, n, f));
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * f >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++)
    row_fwd(kind, f, tensor_f32(x_NF) + i * f, tensor_f32(y_NF) + i * f);
}

void cpu_act_bwd(Device *d, Activation kind, Tensor dy_NF, Tensor x_NF, Tensor dx_NF) {
  int64_t n = x_NF.dim[0], f = x_NF.dim[1];
  require(is_f32(x_NF, 2) && is_f32_2d(dy_NF, n, f) && is_f32_2d(dx_NF, n, f));
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * f >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++)
    row_bwd(kind, f, tensor_f32(dy_NF) + i * f, tensor_f32(x_NF) + i * f,
            tensor_f32(dx_NF) + i * f);
}
