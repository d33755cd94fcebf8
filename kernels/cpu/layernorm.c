/* LayerNorm (Ba, Kiros & Hinton 2016), with the residual add in front fused in. */
#include <math.h>

#include "kernels/cpu/cpu.h"

typedef struct Moments {
  float mean, rstd;
} Moments;

/* The variance from the differences to the mean: E[x^2] - E[x]^2 would cancel. */
static Moments moments_of(const float *x, int64_t c, float eps) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < c; j++) sum += x[j];
  float mean = sum / (float)c;
#pragma omp simd reduction(+ : squares)
  for (int64_t j = 0; j < c; j++) squares += (x[j] - mean) * (x[j] - mean);
  return (Moments){mean, 1.0f / sqrtf(squares / (float)c + eps)};
}

void cpu_layernorm_fwd(Device *d, Tensor x_NC, Tensor delta_NC, Tensor w_C, Tensor b_C, float eps,
                       Tensor y_NC, Tensor mean_N, Tensor rstd_N) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  require(is_f32(x_NC, 2) && (!delta_NC.data || is_f32_2d(delta_NC, n, c)));
  require(!y_NC.data || (is_f32_2d(y_NC, n, c) && is_f32_1d(w_C, c) && is_f32_1d(b_C, c)));
  require(!mean_N.data == !rstd_N.data);
  require(!rstd_N.data || (is_f32_1d(rstd_N, n) && is_f32_1d(mean_N, n)));
  const float *w = tensor_f32(w_C), *b = tensor_f32(b_C);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    float *x = tensor_f32(x_NC) + i * c;
    if (delta_NC.data) {
      const float *delta = tensor_f32(delta_NC) + i * c;
      for (int64_t j = 0; j < c; j++) x[j] += delta[j];
    }
    if (!y_NC.data && !rstd_N.data) continue;
    Moments m = moments_of(x, c, eps);
    if (rstd_N.data) {
      tensor_f32(mean_N)[i] = m.mean;
      tensor_f32(rstd_N)[i] = m.rstd;
    }
    if (!y_NC.data) continue;
    float *y = tensor_f32(y_NC) + i * c;
    for (int64_t j = 0; j < c; j++) y[j] = (x[j] - m.mean) * m.rstd * w[j] + b[j];
  }
}

/* With xhat = (x - mean) rstd and g = w dy: dx += rstd (g - mean(g) - xhat mean(g xhat)). */
static void layernorm_bwd_row(int64_t c, const float *dy, const float *x, const float *w, Moments m,
                              float *dx) {
  float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t j = 0; j < c; j++) {
    float g = dy[j] * w[j];
    sum += g;
    dot += g * (x[j] - m.mean);
  }
  float mean_g = sum / (float)c, a = dot * m.rstd * m.rstd / (float)c;
  for (int64_t j = 0; j < c; j++) dx[j] += m.rstd * (dy[j] * w[j] - mean_g - a * (x[j] - m.mean));
}

/* The columns [c0, c0 + width) of dw and db: rows in order, in groups that keep the running sums
 * short. */
enum { COLUMNS = 64, GROUP = 128 };
static void layernorm_bwd_columns(Tensor dy_NC, Tensor x_NC, const float *mean, const float *rstd,
                                  int64_t c0, int64_t width, float *dw, float *db) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  for (int64_t g = 0; g < n; g += GROUP) {
    float sum_w[COLUMNS] = {0}, sum_b[COLUMNS] = {0};
    for (int64_t i = g; i < min_i64(n, g + GROUP); i++) {
      const float *dy = tensor_f32(dy_NC) + i * c + c0, *x = tensor_f32(x_NC) + i * c + c0;
      for (int64_t j = 0; j < width; j++) {
        sum_w[j] += dy[j] * (x[j] - mean[i]) * rstd[i];
        sum_b[j] += dy[j];
      }
    }
    for (int64_t j = 0; j < width; j++) {
      dw[c0 + j] += sum_w[j];
      db[c0 + j] += sum_b[j];
    }
  }
}

void cpu_layernorm_bwd(Device *d, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor mean_N,
                       Tensor rstd_N, Tensor dx_NC, Tensor dw_C, Tensor db_C) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  require(is_f32(x_NC, 2) && is_f32_2d(dy_NC, n, c) && is_f32_2d(dx_NC, n, c));
  require(is_f32_1d(w_C, c) && is_f32_1d(dw_C, c) && is_f32_1d(db_C, c));
  require(is_f32_1d(mean_N, n) && is_f32_1d(rstd_N, n));
  const float *mean = tensor_f32(mean_N), *rstd = tensor_f32(rstd_N);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++)
    layernorm_bwd_row(c, tensor_f32(dy_NC) + i * c, tensor_f32(x_NC) + i * c, tensor_f32(w_C),
                      (Moments){mean[i], rstd[i]}, tensor_f32(dx_NC) + i * c);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t c0 = 0; c0 < c; c0 += COLUMNS)
    layernorm_bwd_columns(dy_NC, x_NC, mean, rstd, c0, min_i64(COLUMNS, c - c0), tensor_f32(dw_C),
                          tensor_f32(db_C));
}
