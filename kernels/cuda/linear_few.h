/* Linear of few rows in one launch. */
#ifndef KERNELS_CUDA_LINEAR_FEW_H
#define KERNELS_CUDA_LINEAR_FEW_H

#include "kernels/cuda/cuda.h"

enum { LINEAR_FEW_ROWS = 64, LINEAR_FEW_MOST_K = LINEAR_CODES_MOST };

/* Queues it; false, having done nothing, where it is for others: more rows, another type, rows that
 * do not lie on 16 bytes, more inputs, a card without clusters. Shapes are checked. */
bool linear_few(Device *d, const Linear &l, Tensor x, Tensor y_MO);

#endif
