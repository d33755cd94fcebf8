/* Linear of 33 to 64 rows of BF16 with small W, behind a norm. Behind attention, which has no room
 * for it beside itself, or SwiGLU it is slower than cuBLASLt's: a step of 1.1B with 64 sequences
 * takes 1.35 ms with cuBLASLt's products alone, 1.28 with q, k and v this way, 1.39 with o or down
 * instead (H200). */
#ifndef KERNELS_CUDA_LINEAR_CLUSTER_H
#define KERNELS_CUDA_LINEAR_CLUSTER_H

#include "kernels/cuda/cuda.h"

/* x: what the front makes. All must lie on 16 bytes. */
bool linear_cluster_takes(Device *d, const Linear &l, Tensor x, Tensor y_MO);
/* Queues it; the front is made. Shapes are checked. */
void linear_cluster(Device *d, const Linear &l, Tensor x, Tensor y_MO);

#endif
