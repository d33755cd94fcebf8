/* The scales that threads of linear_stream_codes.cu need, asked for ahead. */
#ifndef KERNELS_CUDA_LINEAR_STREAM_SCALES_H
#define KERNELS_CUDA_LINEAR_STREAM_SCALES_H

#include "kernels/cuda/linear_stream.h"

namespace {

/* The row of W at place p of a tile's 128, or its last one. */
__device__ inline int codes_row(const Stream &a, int tile, int p) {
  int t = p / 64, in = p % 64;
  int row = a.paired ? in / 16 * 16 + in % 8 * 2 + in / 8 % 2 : in;
  return min(STREAM_TILE * tile + 64 * t + row, a.n - 1);
}

/* The scales of a thread's four rows, unit by unit of its warpgroup's, which are every G-th. */
template <int G>
struct CodesScales {
  int tile, chunk, units; /* units: that are left to ask for, of this block */
  int row[2][2];          /* where the rows' scales begin */
  uint32_t ahead[2][2];   /* of the unit at `chunk`, as they lie in memory */

  __device__ void find(const Stream &a, const CodeScales &c) {
    int thread = static_cast<int>(threadIdx.x % STREAM_WORKERS);
    int place = thread / 32 * 16 + thread % 32 / 4;
    while (chunk >= a.chunks) {
      chunk -= a.chunks;
      tile++;
    }
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) row[t][h] = codes_row(a, tile, 64 * t + place + 8 * h) * c.blocks;
  }
  __device__ void ask(const CodeScales &c) {
    unsigned block = static_cast<unsigned>(
        static_cast<uint64_t>(static_cast<unsigned>(chunk)) * c.per_unit >> 31);
    unsigned bytes = c.half ? 2 : 4;
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint64_t at = static_cast<uint64_t>(static_cast<unsigned>(row[t][h]) + block) * bytes;
        const char *p = static_cast<const char *>(c.scales) + at;
        ahead[t][h] = c.half ? __ldg(reinterpret_cast<const uint16_t *>(p))
                             : __ldg(reinterpret_cast<const uint32_t *>(p));
      }
  }
  __device__ void start(const Stream &a, const CodeScales &c, int first, int end) {
    tile = 0;
    chunk = first;
    units = end - first;
    if (units <= 0) return;
    tile = first / a.chunks;
    chunk = first % a.chunks;
    find(a, c);
    ask(c);
  }
  /* Those of the unit that was asked for last; asks for the next. */
  __device__ void next(const Stream &a, const CodeScales &c, float (&scale)[2][2]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      scale[i / 2][i % 2] = __uint_as_float(ahead[i / 2][i % 2] << (c.half ? 16 : 0));
    chunk += G;
    units -= G;
    if (units <= 0) return;
    if (chunk >= a.chunks) find(a, c);
    ask(c);
  }
};

}  // namespace

#endif
