/* The kernel for few rows that gemm.c chooses by shape. Internal to kernels/cpu. */
#ifndef KERNELS_CPU_GEMM_H
#define KERNELS_CPU_GEMM_H

#include "kernels/cpu/cpu.h"

/* y[m, n] = alpha * x[m, k] W[n, k]^T + beta * y; beta = 0 never reads y. */
typedef struct SkinnyGemm {
  int64_t m, n, k;
  float alpha, beta;
  const float *x, *w;
  float *y;
} SkinnyGemm;
void gemm_skinny(Device *d, const SkinnyGemm *g);

#endif
