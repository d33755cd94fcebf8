/* Element-wise ops and sums. Sums over a whole tensor use a fixed number of blocks, so that their
 * bits do not depend on the number of threads. */
#include "kernels/cpu/cpu.h"

void cpu_bias_add(Device *d, Tensor x_NC, Tensor b_C) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  require(is_f32(x_NC, 2) && is_f32_1d(b_C, c));
  const float *b = tensor_f32(b_C);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    float *x = tensor_f32(x_NC) + i * c;
    for (int64_t j = 0; j < c; j++) x[j] += b[j];
  }
}

void cpu_linear_bias(Device *d, Tensor x_NC, Tensor w_OC, Tensor b_O, Tensor y_NO) {
  cpu_gemm(d, GEMM_NT, 1, x_NC, w_OC, 0, y_NO);
  cpu_bias_add(d, y_NO, b_O);
}

void cpu_bias_grad(Device *d, Tensor dy_NC, Tensor db_C) {
  int64_t n = dy_NC.dim[0], c = dy_NC.dim[1];
  require(is_f32(dy_NC, 2) && is_f32_1d(db_C, c));
  enum { COLUMNS = 64, GROUP = 128 };
  const float *dy = tensor_f32(dy_NC);
  float *db = tensor_f32(db_C);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * c >= PARALLEL_MIN)
  for (int64_t c0 = 0; c0 < c; c0 += COLUMNS) {
    int64_t width = min_i64(COLUMNS, c - c0);
    for (int64_t g = 0; g < n; g += GROUP) {
      float acc[COLUMNS] = {0};
      for (int64_t i = g; i < min_i64(n, g + GROUP); i++)
        for (int64_t j = 0; j < width; j++) acc[j] += dy[i * c + c0 + j];
      for (int64_t j = 0; j < width; j++) db[c0 + j] += acc[j];
    }
  }
}

double cpu_sum_squares(Device *d, Tensor x) {
  require(x.dtype == DT_F32);
  enum { BLOCKS = 256 };
  double part[BLOCKS];
  int64_t n = tensor_numel(x), block = (n + BLOCKS - 1) / BLOCKS;
  const float *v = tensor_f32(x);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n >= PARALLEL_MIN)
  for (int b = 0; b < BLOCKS; b++) {
    int64_t end = min_i64(n, (b + 1) * block);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = b * block; i < end; i++) sum += (double)v[i] * (double)v[i];
    part[b] = sum;
  }
  double total = 0;
  for (int b = 0; b < BLOCKS; b++) total += part[b];
  return total;
}

void cpu_axpy(Device *d, float alpha, Tensor x, Tensor y) {
  int64_t n = tensor_numel(x);
  require(x.dtype == DT_F32 && y.dtype == DT_F32 && tensor_numel(y) == n);
  const float *xv = tensor_f32(x);
  float *yv = tensor_f32(y);
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) yv[i] += alpha * xv[i];
}

void cpu_scale(Device *d, float alpha, Tensor x) {
  int64_t n = tensor_numel(x);
  require(x.dtype == DT_F32);
  float *v = tensor_f32(x);
  bool clear = alpha == 0; /* 0 x NaN is NaN, but a cleared tensor is 0 */
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) v[i] = clear ? 0.0f : alpha * v[i];
}

void cpu_lerp(Device *d, float w, Tensor x, Tensor y) {
  int64_t n = tensor_numel(x);
  require(x.dtype == DT_F32 && y.dtype == DT_F32 && tensor_numel(y) == n);
  const float *xv = tensor_f32(x);
  float *yv = tensor_f32(y);
#pragma omp parallel for simd num_threads(d->threads) schedule(static) if (n >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) yv[i] = w * yv[i] + (1.0f - w) * xv[i];
}
