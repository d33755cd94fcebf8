/* The kernels for few rows, between which and oneDNN gemm.c chooses by shape. Internal to
 * kernels/cpu. */
#ifndef KERNELS_CPU_GEMM_H
#define KERNELS_CPU_GEMM_H

#include "kernels/cpu/cpu.h"

/* y[m, n] = alpha * x[m, k] W[n, k]^T + beta * y; beta = 0 never reads y, whose rows are `stride`
 * apart. */
typedef struct RowsGemm {
  int64_t m, n, k, stride;
  float alpha, beta;
  const float *x, *w;
  float *y;
} RowsGemm;
void gemm_dot(Device *d, const RowsGemm *g);
void gemm_lanes(Device *d, const RowsGemm *g); /* m <= LANES_MOST */
/* y = x W^T of a Linear whose weights are codes, added to y where it says so: the bits that
 * cpu_gemm makes of the numbers that they stand for. */
void gemm_codes(Device *d, const Linear *l, Tensor x, Tensor y_MO);
enum { LANES_MOST = 128 };
/* Rows of x up to which gemm_dot is the faster one: sums across lanes cost more, the shorter they
 * are. */
static inline int64_t dot_most(int64_t k) { return k < 256 ? 16 : 24; }

#endif
