/* Products of few rows. */
#ifndef KERNELS_CUDA_GEMM_ROWS_H
#define KERNELS_CUDA_GEMM_ROWS_H

#include "kernels/cuda/gemm_plan.h"

enum { GEMM_ROWS_MOST = 32 };

/* Queues the product, bias included; false, having done nothing, where cuBLASLt is to do it: more
 * rows, another kind or type, rows of W that are not on 16 bytes. */
bool gemm_rows(Device *d, GemmKind kind, const GemmCall *x);

#endif
