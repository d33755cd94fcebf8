/* SwiGLU (Shazeer 2020): y = silu(g) u with g and u side by side in one row. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vecmath.h"

void cpu_swiglu_fwd(Device *d, Tensor gu_N2F, Tensor y_NF) {
  int64_t n = y_NF.dim[0], f = y_NF.dim[1];
  require(is_f32(y_NF, 2) && is_f32_2d(gu_N2F, n, 2 * f));
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * f >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    const float *g = tensor_f32(gu_N2F) + i * 2 * f, *u = g + f;
    float *y = tensor_f32(y_NF) + i * f;
#pragma omp simd
    for (int64_t j = 0; j < f; j++) y[j] = g[j] * sigmoid_f32(g[j]) * u[j];
  }
}

/* d silu(g) / dg = s + g s (1 - s), s = sigmoid(g). */
void cpu_swiglu_bwd(Device *d, Tensor dy_NF, Tensor gu_N2F, Tensor dgu_N2F, Tensor y_NF) {
  int64_t n = dy_NF.dim[0], f = dy_NF.dim[1];
  require(is_f32(dy_NF, 2) && is_f32_2d(gu_N2F, n, 2 * f) && is_f32_2d(dgu_N2F, n, 2 * f));
  if (y_NF.data) cpu_swiglu_fwd(d, gu_N2F, y_NF);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * f >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    const float *g = tensor_f32(gu_N2F) + i * 2 * f, *u = g + f;
    const float *dy = tensor_f32(dy_NF) + i * f;
    float *dg = tensor_f32(dgu_N2F) + i * 2 * f, *du = dg + f;
#pragma omp simd
    for (int64_t j = 0; j < f; j++) {
      float gate = g[j], up = u[j], s = sigmoid_f32(gate);
      dg[j] = dy[j] * up * s * (1.0f + gate * (1.0f - s));
      du[j] = dy[j] * gate * s;
    }
  }
}
