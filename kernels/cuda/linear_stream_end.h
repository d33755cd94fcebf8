/* What becomes of the sums of linear_stream.h: parts of a tile are added up, and what the product's
 * Linear says is done with them. */
#ifndef KERNELS_CUDA_LINEAR_STREAM_END_H
#define KERNELS_CUDA_LINEAR_STREAM_END_H

#include "kernels/cuda/linear_stream_ring.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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

/* A piece of a tile's product: columns [8 j, 8 j + 8), which are rows of y, of its rows [64 t, 64 t
 * + 64). Pieces are numbered 2 j + t. */
__device__ inline void stream_finish(const Stream &a, int tile, int piece, float4 sum) {
  StreamPair c = stream_pair(a, STREAM_TILE * tile + 64 * (piece % 2));
  if (!c.one) return;
  float2 bias = a.bias ? load_pair(a.bias, c) : make_float2(0, 0);
  int row = 8 * (piece / 2) + static_cast<int>(threadIdx.x % 4) * 2;
  if (row < a.m) stream_store(a, row, c, make_float2(sum.x + bias.x, sum.z + bias.y));
  if (row + 1 < a.m) stream_store(a, row + 1, c, make_float2(sum.y + bias.x, sum.w + bias.y));
}
template <int N>
__device__ inline float4 stream_piece(const float (&sum)[2][N / 2], int piece) {
  const float *s = sum[piece % 2] + piece / 2 * 4;
  return make_float4(s[0], s[1], s[2], s[3]);
}

/* ---- tiles of several blocks ----
 *
 * A word of a part is there when it is not zero: who leaves one writes a sum of 0 as -0, which adds
 * nothing either, and who takes it leaves 0 for the next product. So no fence, no counter and one
 * way through L2 lie between the two. */

__device__ inline float stream_marked(float x) { return __float_as_uint(x) == 0 ? -0.0f : x; }
__device__ inline bool stream_there(float4 x) {
  return __float_as_uint(x.x) != 0 && __float_as_uint(x.y) != 0 && __float_as_uint(x.z) != 0 &&
         __float_as_uint(x.w) != 0;
}
__device__ inline float4 stream_look(const float4 *p) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ inline void stream_put(float4 *p, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

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
  for (int i = 0; i < N / 4; i++) {
    float4 x = stream_piece<N>(sum, i);
    stream_put(part + i * STREAM_WORKERS, make_float4(stream_marked(x.x), stream_marked(x.y),
                                                      stream_marked(x.z), stream_marked(x.w)));
  }
}

/* Adds up this block's share of a tile's pieces, in order of k, as parts come. Blocks of a grid
 * that wait for each other are all on the card, or will be when the kernel before has ended: the
 * next one starts when all of this one's have. */
template <int N>
__device__ inline void stream_add_up(const Stream &a, int tile) {
  constexpr int AT_ONCE = 6;
  int first = stream_block_of(a, tile * a.chunks);
  int blocks = stream_block_of(a, (tile + 1) * a.chunks - 1) - first + 1;
  if (blocks == 1) return;
  for (int i = static_cast<int>(blockIdx.x) - first; i < N / 4; i += blocks) {
    float4 sum = make_float4(0, 0, 0, 0);
    for (int b = 0; b < blocks; b += AT_ONCE) {
      float4 *part[AT_ONCE], x[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
        if (b + k < blocks) {
          part[k] = stream_part<N>(a, first + b + k, tile) + i * STREAM_WORKERS;
          x[k] = stream_look(part[k]);
        }
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++)
        if (b + k < blocks) {
          while (!stream_there(x[k])) {
            __nanosleep(40);
            x[k] = stream_look(part[k]);
          }
          stream_put(part[k], make_float4(0, 0, 0, 0));
          sum = make_float4(sum.x + x[k].x, sum.y + x[k].y, sum.z + x[k].z, sum.w + x[k].w);
        }
    }
    stream_finish(a, tile, i, sum);
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
  for (int i = 0; i < N / 4; i++) stream_finish(a, tile, i, stream_piece<N>(sum, i));
}
/* Of all its tiles only the first and the last can be others' too. */
template <int N>
__device__ inline void stream_add_up_all(const Stream &a, int first, int last) {
  stream_add_up<N>(a, first);
  if (last != first) stream_add_up<N>(a, last);
}

#endif
#endif
