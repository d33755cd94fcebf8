/* What becomes of the sums of linear_stream.h: parts of a tile are added up, and what the product's
 * Linear says is done with them. */
#ifndef KERNELS_CUDA_LINEAR_STREAM_END_H
#define KERNELS_CUDA_LINEAR_STREAM_END_H

#include "kernels/cuda/linear_stream_ring.h"

/* Of each tile: blocks that have left their part, and that have read them. Every product leaves
 * zeros. */
[[maybe_unused]] static __device__ unsigned stream_arrived[STREAM_TILES][2];

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The threads that finish tiles. */
__device__ inline void stream_meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

/* Two columns of y of one row, as a thread has them. */
struct StreamPair {
  int first, second; /* columns */
  bool both, one;    /* which of them exist */
};
__device__ inline StreamPair stream_pair(const Stream &a, int base) {
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int first = base + 16 * warp + (a.paired ? lane / 4 * 2 : lane / 4);
  int second = first + (a.paired ? 1 : 8);
  return {first, second, second < a.n, first < a.n};
}
__device__ inline float2 load_pair(const bf16 *p, const StreamPair &c) {
  if (c.second == c.first + 1)
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(p + c.first));
  return make_float2(to_float(p[c.first]), c.both ? to_float(p[c.second]) : 0.0f);
}
__device__ inline void store_pair(bf16 *p, const StreamPair &c, __nv_bfloat162 v) {
  if (c.second == c.first + 1) {
    *reinterpret_cast<__nv_bfloat162 *>(p + c.first) = v;
  } else {
    p[c.first] = v.x;
    if (c.both) p[c.second] = v.y;
  }
}
__device__ inline void store_pair(float *p, const StreamPair &c, float2 v, bool add) {
  if (c.second == c.first + 1) {
    float2 *y = reinterpret_cast<float2 *>(p + c.first);
    if (add) v = make_float2(v.x + y->x, v.y + y->y);
    *y = v;
  } else {
    p[c.first] = add ? p[c.first] + v.x : v.x;
    if (c.both) p[c.second] = add ? p[c.second] + v.y : v.y;
  }
}

/* Two numbers of a row of y. */
__device__ inline void stream_store(const Stream &a, int row, const StreamPair &c, float2 v) {
  int64_t at = static_cast<int64_t>(row) * a.n;
  if (a.y_f32) {
    store_pair(static_cast<float *>(a.y) + at, c, v, a.add);
    return;
  }
  bf16 *y = static_cast<bf16 *>(a.y) + at;
  if (a.add) {
    float2 old = load_pair(y, c);
    v = make_float2(v.x + old.x, v.y + old.y);
  }
  store_pair(y, c, __floats2bfloat162_rn(v.x, v.y));
}

/* Columns [8 j, 8 j + 8) of the product of a tile, which are rows of y, from their sums. */
__device__ inline void stream_finish(const Stream &a, int tile, int j, const float (&sum)[2][4]) {
  int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int row = 8 * j + lane % 4 * 2 + e;
    if (row >= a.m) continue;
#pragma unroll
    for (int t = 0; t < 2; t++) {
      StreamPair c = stream_pair(a, STREAM_TILE * tile + 64 * t);
      if (!c.one) continue;
      float2 v = make_float2(sum[t][e], sum[t][2 + e]);
      if (a.bias) {
        float2 b = load_pair(a.bias, c);
        v = make_float2(v.x + b.x, v.y + b.y);
      }
      stream_store(a, row, c, v);
    }
  }
}

/* ---- tiles of several blocks ---- */

template <int N>
__device__ inline float4 *stream_part(const Stream &a, int block, int tile) {
  int slot = 2 * block + (stream_start(a, block) / a.chunks == tile ? 0 : 1);
  return a.parts + static_cast<int64_t>(slot) * (N / 4) * STREAM_WORKERS + threadIdx.x;
}

/* This block's part of a tile to memory, for all that have one. */
template <int N>
__device__ inline void stream_leave(const Stream &a, int tile, const float (&sum)[2][N / 2]) {
  float4 *part = stream_part<N>(a, static_cast<int>(blockIdx.x), tile);
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int t = 0; t < 2; t++)
      __stcg(part + (2 * j + t) * STREAM_WORKERS,
             make_float4(sum[t][4 * j], sum[t][4 * j + 1], sum[t][4 * j + 2], sum[t][4 * j + 3]));
  __threadfence();
  stream_meet();
  if (threadIdx.x == 0)
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(stream_arrived[tile]) : "memory");
}

/* Adds up this block's share of a tile's columns, once all parts are there. Blocks of a grid that
 * wait for each other are all on the card, or will be when the kernel before has ended: the next
 * one starts when all of this one's have. */
template <int N>
__device__ inline void stream_add_up(const Stream &a, int tile) {
  int first = stream_block_of(a, tile * a.chunks);
  int blocks = stream_block_of(a, (tile + 1) * a.chunks - 1) - first + 1;
  int mine = static_cast<int>(blockIdx.x) - first;
  if (blocks == 1 || mine >= N / 8) return;
  if (threadIdx.x == 0) {
    unsigned *arrived = stream_arrived[tile], there;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(arrived) : "memory");
    while (there < static_cast<unsigned>(blocks));
    unsigned readers = static_cast<unsigned>(min(blocks, N / 8));
    if (atomicAdd(arrived + 1, 1) == readers - 1) arrived[0] = arrived[1] = 0;
  }
  stream_meet();
  for (int j = mine; j < N / 8; j += blocks) {
    float sum[2][4] = {};
#pragma unroll 4
    for (int b = 0; b < blocks; b++) {
      const float4 *part = stream_part<N>(a, first + b, tile);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        float4 x = __ldcg(part + (2 * j + t) * STREAM_WORKERS);
        sum[t][0] += x.x;
        sum[t][1] += x.y;
        sum[t][2] += x.z;
        sum[t][3] += x.w;
      }
    }
    stream_finish(a, tile, j, sum);
  }
}

/* A block has the sums of `units` units of a tile. */
template <int N>
__device__ inline void stream_end_tile(const Stream &a, int tile, int units,
                                       const float (&sum)[2][N / 2]) {
  if (units < a.chunks) {
    stream_leave<N>(a, tile, sum);
    return;
  }
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float part[2][4] = {
        {sum[0][4 * j], sum[0][4 * j + 1], sum[0][4 * j + 2], sum[0][4 * j + 3]},
        {sum[1][4 * j], sum[1][4 * j + 1], sum[1][4 * j + 2], sum[1][4 * j + 3]}};
    stream_finish(a, tile, j, part);
  }
}
/* Of all its tiles only the first and the last can be others' too. */
template <int N>
__device__ inline void stream_add_up_all(const Stream &a, int first, int last) {
  stream_add_up<N>(a, first);
  if (last != first) stream_add_up<N>(a, last);
}

#endif
#endif
