/* Rotary position embedding (Su et al. 2021), half-split pairs as in Hugging Face's Llama. */
#include "kernels/cpu/cpu.h"

void cpu_rope(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
              AttnShape s, bool inverse) {
  int64_t n = qkv_NQ.dim[0], q = qkv_NQ.dim[1], half = cos_Pr.dim[1], p = cos_Pr.dim[0];
  int heads = s.n_heads + s.n_kv_heads; /* q and k heads lie next to each other */
  require(is_f32(qkv_NQ, 2) && q == (int64_t)(heads + s.n_kv_heads) * s.head_dim);
  require(is_i32_1d(positions_N, n) && is_f32_2d(cos_Pr, p, half) && is_f32_2d(sin_Pr, p, half));
  require(2 * half <= s.head_dim);
  const int32_t *positions = tensor_i32(positions_N);
  float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * q >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    if (positions[i] < 0 || positions[i] >= p)
      die("position %d is outside [0, %lld)", positions[i], (long long)p);
    const float *cs = tensor_f32(cos_Pr) + positions[i] * half;
    const float *sn = tensor_f32(sin_Pr) + positions[i] * half;
    for (int h = 0; h < heads; h++) {
      float *x = tensor_f32(qkv_NQ) + i * q + (int64_t)h * s.head_dim;
      float *y = x + half;
#pragma omp simd
      for (int64_t j = 0; j < half; j++) {
        float a = x[j], b = y[j], sj = sign * sn[j];
        x[j] = a * cs[j] - b * sj;
        y[j] = b * cs[j] + a * sj;
      }
    }
  }
}
