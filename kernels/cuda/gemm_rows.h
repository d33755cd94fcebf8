/* Products of few rows. */
#ifndef KERNELS_CUDA_GEMM_ROWS_H
#define KERNELS_CUDA_GEMM_ROWS_H

#include "kernels/cuda/gemm_plan.h"

/* With more rows, reading x takes as long as reading W, and cuBLASLt is faster. */
enum { GEMM_ROWS_MOST = 16 };

/* Queues the product, bias included; false, having done nothing, where cuBLASLt is to do it: more
 * rows, another kind or type, rows of W that are not on 16 bytes. */
bool gemm_rows(Device *d, GemmKind kind, const GemmCall *x);

#endif
