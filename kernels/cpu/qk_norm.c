/* RMSNorm of each query and key head by itself, in front of the rotary embedding (Qwen3). */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static void check_shapes(Tensor raw_NQ, Tensor wq_D, Tensor wk_D, AttnShape s) {
  require(is_f32(raw_NQ, 2) && is_f32_1d(wq_D, s.head_dim) && is_f32_1d(wk_D, s.head_dim));
  require(raw_NQ.dim[1] == (int64_t)(s.n_heads + 2 * s.n_kv_heads) * s.head_dim);
}

void cpu_qk_norm_fwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, float eps, AttnShape s,
                     Tensor qkv_NQ, Tensor rstd_NH) {
  int64_t n = raw_NQ.dim[0], q = raw_NQ.dim[1], dim = s.head_dim;
  int heads = s.n_heads + s.n_kv_heads; /* q and k heads lie next to each other */
  check_shapes(raw_NQ, wq_D, wk_D, s);
  require(is_f32_2d(qkv_NQ, n, q) && (!rstd_NH.data || is_f32_2d(rstd_NH, n, heads)));
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * q >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    const float *x = tensor_f32(raw_NQ) + i * q;
    float *y = tensor_f32(qkv_NQ) + i * q;
    for (int h = 0; h < heads; h++, x += dim, y += dim) {
      const float *w = tensor_f32(h < s.n_heads ? wq_D : wk_D);
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < dim; j++) sum += x[j] * x[j];
      float rstd = 1.0f / sqrtf(sum / (float)dim + eps);
      if (rstd_NH.data) tensor_f32(rstd_NH)[i * heads + h] = rstd;
      for (int64_t j = 0; j < dim; j++) y[j] = x[j] * rstd * w[j];
    }
    memcpy(y, x, sizeof(float) * (size_t)(s.n_kv_heads * dim)); /* the values */
  }
}

/* dw += over rows and heads [h0, h1), in groups of rows that keep the running sums short. */
static void sum_weight_gradient(Tensor dy_NQ, Tensor raw_NQ, Tensor rstd_NH, int h0, int h1,
                                int64_t dim, int64_t j, float *dw) {
  enum { GROUP = 32 };
  int64_t n = raw_NQ.dim[0], q = raw_NQ.dim[1], heads = rstd_NH.dim[1];
  for (int64_t g = 0; g < n; g += GROUP) {
    float sum = 0;
    for (int64_t i = g; i < min_i64(n, g + GROUP); i++)
      for (int64_t h = h0; h < h1; h++) {
        int64_t at = i * q + h * dim + j;
        sum += tensor_f32(dy_NQ)[at] * tensor_f32(raw_NQ)[at] * tensor_f32(rstd_NH)[i * heads + h];
      }
    dw[j] += sum;
  }
}

/* As in rmsnorm_bwd, with xhat = x rstd: dx = rstd (w dy - xhat mean(w dy xhat)), over dy. */
static void head_bwd(int64_t dim, const float *x, const float *w, float rstd, float *dy) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t j = 0; j < dim; j++) dot += dy[j] * w[j] * x[j];
  float a = dot * rstd * rstd / (float)dim;
  for (int64_t j = 0; j < dim; j++) dy[j] = rstd * (dy[j] * w[j] - a * x[j]);
}

void cpu_qk_norm_bwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, Tensor rstd_NH,
                     AttnShape s, Tensor dqkv_NQ, Tensor dwq_D, Tensor dwk_D) {
  int64_t n = raw_NQ.dim[0], q = raw_NQ.dim[1], dim = s.head_dim;
  int heads = s.n_heads + s.n_kv_heads;
  check_shapes(raw_NQ, wq_D, wk_D, s);
  require(is_f32_2d(dqkv_NQ, n, q) && is_f32_2d(rstd_NH, n, heads));
  require(is_f32_1d(dwq_D, dim) && is_f32_1d(dwk_D, dim));
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * q >= PARALLEL_MIN)
  for (int64_t j = 0; j < dim; j++) {
    sum_weight_gradient(dqkv_NQ, raw_NQ, rstd_NH, 0, s.n_heads, dim, j, tensor_f32(dwq_D));
    sum_weight_gradient(dqkv_NQ, raw_NQ, rstd_NH, s.n_heads, heads, dim, j, tensor_f32(dwk_D));
  }
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * q >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++)
    for (int h = 0; h < heads; h++)
      head_bwd(dim, tensor_f32(raw_NQ) + i * q + h * dim, tensor_f32(h < s.n_heads ? wq_D : wk_D),
               tensor_f32(rstd_NH)[i * heads + h], tensor_f32(dqkv_NQ) + i * q + h * dim);
}
