/* Parts of deltas as kernels see them. Internal to kernels/cuda/delta*.cu. */
#ifndef KERNELS_CUDA_DELTA_H
#define KERNELS_CUDA_DELTA_H

#include "kernels/cuda/cuda.h"

extern "C" {
#include "kernels/delta.h"
}

enum { DELTA_PARTS = 64, DELTA_THREADS = 256, DELTA_PACK = 8 };

struct DeltaSpan {
  const void *now;
  uint16_t *last;
  char *wire;
  uint64_t room;
  int64_t n, first_block; /* among the blocks of the launch */
  DType type;             /* of now */
  bool aligned;           /* now and last, for 16 bytes at a time */
};

struct DeltaJob {
  int n;
  DeltaSpan part[DELTA_PARTS];
};

__device__ inline int delta_part_of(const DeltaJob &job, int64_t block) {
  int low = 0, high = job.n - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (job.part[middle].first_block <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/* What is before this thread's x among the threads of the block, and the sum of all. Fields of 16
 * bits that do not overflow may be summed together. */
__device__ inline uint64_t delta_scan(uint64_t x, uint64_t *total) {
  __shared__ uint64_t warp[DELTA_THREADS / 32];
  int lane = threadIdx.x % 32;
  uint64_t sum = x;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    uint64_t below = __shfl_up_sync(0xffffffffu, sum, o);
    if (lane >= o) sum += below;
  }
  __syncthreads();
  if (lane == 31) warp[threadIdx.x / 32] = sum;
  __syncthreads();
  uint64_t before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < DELTA_THREADS / 32; w++) {
    if (w < static_cast<int>(threadIdx.x / 32)) before += warp[w];
    all += warp[w];
  }
  *total = all;
  return before + sum - x;
}

#endif
