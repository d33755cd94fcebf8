/* Places of a list of row numbers in the order of the numbers, equal ones in the order of the list.
 */
#ifndef KERNELS_CUDA_ROW_ORDER_H
#define KERNELS_CUDA_ROW_ORDER_H

#include "kernels/cuda/rows.h"

/* A row's number above, its place in the list below. */
using Place = unsigned long long;
__device__ inline unsigned row_of(Place p) { return static_cast<unsigned>(p >> 32); }
__device__ inline unsigned source_of(Place p) { return static_cast<unsigned>(p); }

/* rows_R: numbers of rows of x_NC, the first of which come to L2 meanwhile. scratch has
 * row_order_bytes(r); the sorted places are in it. */
size_t row_order_bytes(int64_t r);
const Place *cuda_row_order(Device *d, Tensor rows_R, Tensor x_NC, void *scratch);

#endif
