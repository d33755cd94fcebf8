/* The kernels for few rows, between which and oneDNN gemm.c chooses by shape. Internal to
 * kernels/cpu. */
#ifndef KERNELS_CPU_GEMM_H
#define KERNELS_CPU_GEMM_H

#include "kernels/cpu/cpu.h"

/* y[m, n] = alpha * x[m, k] W[n, k]^T + beta * y; beta = 0 never reads y. */
typedef struct RowsGemm {
  int64_t m, n, k;
  float alpha, beta;
  const float *x, *w;
  float *y;
} RowsGemm;
void gemm_dot(Device *d, const RowsGemm *g);
void gemm_lanes(Device *d, const RowsGemm *g); /* m <= LANES_MOST */
enum { LANES_MOST = 128 };

#endif
