/* What becomes of the sums of linear_stream.h: parts of a tile are added up, and what the product's
 * Linear says is done with them. */
#ifndef KERNELS_CUDA_LINEAR_STREAM_END_H
#define KERNELS_CUDA_LINEAR_STREAM_END_H

#include "kernels/cuda/linear_stream_ring.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A thread's place in its warpgroup. */
__device__ inline int stream_worker() { return static_cast<int>(threadIdx.x % STREAM_WORKERS); }

/* Two columns of y of one row, as a thread has them. */
struct StreamPair {
  int first, second; /* columns */
  bool both, one;    /* which of them exist */
};
__device__ inline StreamPair stream_pair(const Stream &a, int base) {
  int lane = stream_worker() % 32, warp = stream_worker() / 32;
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
__device__ inline float2 load_pair(const float *p, const StreamPair &c) {
  if (c.second == c.first + 1) return *reinterpret_cast<const float2 *>(p + c.first);
  return make_float2(p[c.first], c.both ? p[c.second] : 0.0f);
}
__device__ inline void store_pair(float *p, const StreamPair &c, float2 v) {
  if (c.second == c.first + 1) {
    *reinterpret_cast<float2 *>(p + c.first) = v;
  } else {
    p[c.first] = v.x;
    if (c.both) p[c.second] = v.y;
  }
}

/* A piece of a tile's product: columns [8 j, 8 j + 8), which are rows of y, of its rows [64 t, 64 t
 * + 64). Pieces are numbered 2 j + t. A thread has two numbers of two rows of y; what they are
 * added to, bias and what y holds, can be asked for before they are there. */
struct StreamGoal {
  StreamPair c;
  int row, rows;
  float2 bias, old[2];
};
__device__ inline StreamGoal stream_goal(const Stream &a, int tile, int piece) {
  StreamGoal g = {stream_pair(a, STREAM_TILE * tile + 64 * (piece % 2))};
  g.row = 8 * (piece / 2) + static_cast<int>(threadIdx.x % 4) * 2;
  g.rows = g.c.one ? min(a.m - g.row, 2) : 0;
  if (a.bias && g.rows > 0) g.bias = load_pair(a.bias, g.c);
  if (!a.add) return g;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int64_t at = static_cast<int64_t>(g.row + i) * a.n;
    if (i < g.rows)
      g.old[i] = a.y_f32 ? load_pair(static_cast<const float *>(a.y) + at, g.c)
                         : load_pair(static_cast<const bf16 *>(a.y) + at, g.c);
  }
  return g;
}
__device__ inline void stream_finish(const Stream &a, const StreamGoal &g, float4 sum) {
  float2 v[2] = {make_float2(sum.x, sum.z), make_float2(sum.y, sum.w)};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (i >= g.rows) return;
    int64_t at = static_cast<int64_t>(g.row + i) * a.n;
    float x = v[i].x + g.bias.x + g.old[i].x, y = v[i].y + g.bias.y + g.old[i].y;
    if (a.y_f32)
      store_pair(static_cast<float *>(a.y) + at, g.c, make_float2(x, y));
    else
      store_pair(static_cast<bf16 *>(a.y) + at, g.c, __floats2bfloat162_rn(x, y));
  }
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
  int slot = 2 * block + (stream_start(a, block) < tile * a.chunks ? 1 : 0);
  return a.parts + static_cast<int64_t>(slot) * (N / 4) * STREAM_WORKERS + stream_worker();
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

/* The blocks that have a part of a tile. */
struct StreamSharers {
  int first, blocks;
};
__device__ inline StreamSharers stream_sharers(const Stream &a, int tile) {
  int first = stream_block_of(a, tile * a.chunks);
  return {first, stream_block_of(a, (tile + 1) * a.chunks - 1) - first + 1};
}

/* Adds up this block's share of a tile's pieces, in order of k, as parts come. Blocks of a grid
 * that wait for each other are all on the card, or will be when the kernel before has ended: the
 * next one starts when all of this one's have. */
template <int N, int G>
__device__ inline void stream_add_up(const Stream &a, int tile, const StreamSharers &by, int group,
                                     int &job) {
  constexpr int AT_ONCE = 6;
  int first = by.first, blocks = by.blocks;
  if (blocks == 1) return;
  for (int i = static_cast<int>(blockIdx.x) - first; i < N / 4; i += blocks) {
    if (job++ % G != group) continue;
    StreamGoal goal = stream_goal(a, tile, i);
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
    stream_finish(a, goal, sum);
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
  for (int i = 0; i < N / 4; i++)
    stream_finish(a, stream_goal(a, tile, i), stream_piece<N>(sum, i));
}
/* Of all its tiles only the first and the last can be others' too. G warpgroups take what is to be
 * done in turn. */
template <int N, int G>
__device__ inline void stream_add_up_all(const Stream &a, int first, int last,
                                         const StreamSharers &by_first,
                                         const StreamSharers &by_last) {
  int job = 0, group = static_cast<int>(threadIdx.x) / STREAM_WORKERS;
  stream_add_up<N, G>(a, first, by_first, group, job);
  if (last != first) stream_add_up<N, G>(a, last, by_last, group, job);
}

#endif
#endif
