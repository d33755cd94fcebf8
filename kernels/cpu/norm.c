/* RMSNorm (Zhang & Sennrich 2019), with the residual add in front fused in. */
#include <math.h>

#include "kernels/cpu/cpu.h"

void cpu_rmsnorm_fwd(Device *d, Tensor x_NC, Tensor delta_NC, Tensor w_C, float eps, Tensor y_NC,
                     Tensor rstd_N) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  require(is_f32(x_NC, 2) && (!delta_NC.data || is_f32_2d(delta_NC, n, c)));
  require(!y_NC.data || (is_f32_2d(y_NC, n, c) && is_f32_1d(w_C, c)));
  require(!rstd_N.data || is_f32_1d(rstd_N, n));
  const float *w = tensor_f32(w_C);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    float *x = tensor_f32(x_NC) + i * c;
    if (delta_NC.data) {
      const float *delta = tensor_f32(delta_NC) + i * c;
      for (int64_t j = 0; j < c; j++) x[j] += delta[j];
    }
    if (!y_NC.data && !rstd_N.data) continue;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < c; j++) sum += x[j] * x[j];
    float rstd = 1.0f / sqrtf(sum / (float)c + eps);
    if (rstd_N.data) tensor_f32(rstd_N)[i] = rstd;
    if (!y_NC.data) continue;
    float *y = tensor_f32(y_NC) + i * c;
    for (int64_t j = 0; j < c; j++) y[j] = x[j] * rstd * w[j];
  }
}

/* With xhat = x rstd: dx += rstd (w dy - xhat mean(w dy xhat)). */
static void rmsnorm_bwd_row(int64_t c, const float *dy, const float *x, const float *w, float rstd,
                            float *dx) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t j = 0; j < c; j++) dot += dy[j] * w[j] * x[j];
  float a = dot * rstd * rstd / (float)c;
  for (int64_t j = 0; j < c; j++) dx[j] += rstd * (dy[j] * w[j] - a * x[j]);
}

void cpu_rmsnorm_bwd(Device *d, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor rstd_N, Tensor dx_NC,
                     Tensor dw_C) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  require(is_f32(x_NC, 2) && is_f32_2d(dy_NC, n, c) && is_f32_2d(dx_NC, n, c));
  require(is_f32_1d(w_C, c) && is_f32_1d(dw_C, c) && is_f32_1d(rstd_N, n));
  const float *dy = tensor_f32(dy_NC), *x = tensor_f32(x_NC), *w = tensor_f32(w_C),
              *rstd = tensor_f32(rstd_N);
  float *dx = tensor_f32(dx_NC), *dw = tensor_f32(dw_C);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) rmsnorm_bwd_row(c, dy + i * c, x + i * c, w, rstd[i], dx + i * c);

  /* Column sums: each block of columns is one thread's, rows in order, in groups that keep the
   * running sums short. */
  enum { COLUMNS = 64, GROUP = 128 };
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t c0 = 0; c0 < c; c0 += COLUMNS) {
    int64_t width = min_i64(COLUMNS, c - c0);
    for (int64_t g = 0; g < n; g += GROUP) {
      float acc[COLUMNS] = {0};
      for (int64_t i = g; i < min_i64(n, g + GROUP); i++) {
        const float *dyi = dy + i * c + c0, *xi = x + i * c + c0;
        for (int64_t j = 0; j < width; j++) acc[j] += dyi[j] * xi[j] * rstd[i];
      }
      for (int64_t j = 0; j < width; j++) dw[c0 + j] += acc[j];
    }
  }
}
