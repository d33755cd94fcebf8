/* Fronts of a Linear for few rows of BF16: what rmsnorm_fwd and swiglu_fwd do, in kernels that let
 * the product behind them ask for its weights while the one before is still at work. */
#ifndef KERNELS_CUDA_LINEAR_FRONT_H
#define KERNELS_CUDA_LINEAR_FRONT_H

#include "kernels/cuda/cuda.h"

enum { LINEAR_FRONT_ROWS = 64 };

/* Queues front(x) into l.front_MK, both of whose shapes are checked; false, having done nothing,
 * where that is for others. */
bool linear_front(Device *d, const Linear &l, Tensor x);

#endif
