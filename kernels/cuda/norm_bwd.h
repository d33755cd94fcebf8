/* RMSNorm and LayerNorm backward: norm.cu and layernorm.cu make their ops of it, LAYER tells which.
 *
 * A block works through many rows, from the last ones on (block_from_end); it reads ahead into
 * shared memory, where each thread finds what it asked for itself, and keeps its columns' part of
 * dw in registers until the end; one barrier per row. Rows that are too wide or not aligned go
 * through kernels that take any shape and read a row again. */
#ifndef KERNELS_CUDA_NORM_BWD_H
#define KERNELS_CUDA_NORM_BWD_H

#include <cuda_pipeline.h>

#include "kernels/cuda/columns.h"
#include "kernels/cuda/norm_fwd.h"

template <class T>
struct NormBwd {
  int64_t n, c;
  const T *dy, *x, *w;
  const float *mean, *rstd;
  T *dx;
};

/* Both sums behind one barrier; RMSNorm needs b alone. `turn` alternates, so that a warp that is
 * ahead writes where nobody reads any more. */
struct Sums {
  float a, b;
};
template <bool LAYER>
__device__ inline Sums block_sums(Sums s, int turn) {
  __shared__ Sums part[2][NORM_MOST_THREADS / 32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if constexpr (LAYER) { /* each half of the warp adds up one of the two */
    const bool low = lane < 16;
    float mine = low ? s.a : s.b;
    mine += __shfl_xor_sync(0xffffffffu, low ? s.b : s.a, 16);
#pragma unroll
    for (int o = 8; o > 0; o /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, o);
    if (lane == 0) part[turn][warp].a = mine;
    if (lane == 16) part[turn][warp].b = mine;
  } else {
    s.b = warp_sum(s.b);
    if (lane == 0) part[turn][warp].b = s.b;
  }
  __syncthreads();
  s = {0, 0};
#pragma unroll 4
  for (unsigned w = 0; w < warps; w++) {
    if constexpr (LAYER) s.a += part[turn][w].a;
    s.b += part[turn][w].b;
  }
  return s;
}

/* What a thread reads of dy, x and dx for the next STAGES rows of its block. A row's rstd and mean
 * come the same way, for each warp by its first two lanes: a load of their own would be waited for
 * in every row. */
template <class T, int PACKS, int STAGES>
struct NormRing {
  uint4 *slots;   /* [STAGES, 3, PACKS, threads] */
  float2 *row_of; /* [STAGES, warps]: rstd and mean */
  __device__ uint4 *slot(int stage, int what, int p) const {
    return slots + ((stage * 3 + what) * PACKS + p) * blockDim.x + threadIdx.x;
  }
  __device__ float2 *of_row(int stage) const {
    return row_of + stage * (NORM_MOST_THREADS / 32) + threadIdx.x / 32;
  }
  __device__ void fetch(const NormBwd<T> &a, int64_t row, int stage) const {
    if (row >= 0) {
      const int lane = threadIdx.x % 32;
      if (lane == 0) __pipeline_memcpy_async(&of_row(stage)->x, a.rstd + row, sizeof(float));
      if (lane == 1 && a.mean)
        __pipeline_memcpy_async(&of_row(stage)->y, a.mean + row, sizeof(float));
#pragma unroll
      for (int p = 0; p < PACKS; p++) {
        int64_t j = (static_cast<int64_t>(p) * blockDim.x + threadIdx.x) * wide<T>;
        if (j >= a.c) continue;
        __pipeline_memcpy_async(slot(stage, 0, p), a.dy + row * a.c + j, 16);
        __pipeline_memcpy_async(slot(stage, 1, p), a.x + row * a.c + j, 16);
        __pipeline_memcpy_async(slot(stage, 2, p), a.dx + row * a.c + j, 16);
      }
    }
    __pipeline_commit();
  }
};

/* A thread's columns of a row: g = w dy and xhat = (x - mean) rstd. */
template <int V>
struct NormPart {
  Floats<V> g, xhat;
};
template <class T, int PACKS, int STAGES>
__device__ inline NormPart<wide<T>> norm_part(const NormRing<T, PACKS, STAGES> &ring, int stage,
                                              int p, const Raw<T, wide<T>> &w, float mean,
                                              float rstd, Floats<wide<T>> *dy) {
  constexpr int V = wide<T>;
  *dy = floats_of<T, V>(*ring.slot(stage, 0, p));
  Floats<V> x = floats_of<T, V>(*ring.slot(stage, 1, p)), wf = floats_of<T, V>(w);
  NormPart<V> part;
#pragma unroll
  for (int k = 0; k < V; k++) {
    part.g.v[k] = dy->v[k] * wf.v[k];
    part.xhat.v[k] = x.v[k] * rstd - mean * rstd;
  }
  return part;
}

/* 16 bytes at a time. */
template <int V>
__device__ inline void store_partial(float *to, const Floats<V> &x) {
#pragma unroll
  for (int k = 0; k < V; k += 4)
    floats_store<float, 4>(to + k, {{x.v[k], x.v[k + 1], x.v[k + 2], x.v[k + 3]}});
}

/* dx += rstd (g - mean(g) - xhat mean(g xhat)), RMSNorm without the means of x and g. partial is
 * [gridDim.x, LAYER ? 2 : 1, c]: sums of dy xhat, and of dy. Narrow parts stay in registers across
 * the barrier, wide ones are made again. */
template <class T, int PACKS, int STAGES, bool LAYER>
__global__ void __launch_bounds__(NORM_MOST_THREADS) norm_bwd_kernel(NormBwd<T> a, float *partial) {
  constexpr int V = wide<T>;
  constexpr bool KEEP = PACKS * V <= 8;
  extern __shared__ uint4 slots[];
  __shared__ float2 row_of[STAGES * NORM_MOST_THREADS / 32];
  const NormRing<T, PACKS, STAGES> ring = {slots, row_of};
  const int64_t stride = static_cast<int64_t>(blockDim.x) * V, step = gridDim.x;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * V;
  const float over_c = 1.0f / static_cast<float>(a.c);
  Floats<V> dw[PACKS] = {}, db[PACKS] = {};
  NormPart<V> part[PACKS];
  Raw<T, V> w[PACKS] = {};
  int64_t row = a.n - 1 - blockIdx.x;
  wait_for_kernel_before();
  let_next_kernel_start();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) ring.fetch(a, row - s * step, s);
#pragma unroll
  for (int p = 0; p < PACKS; p++)
    if (first + p * stride < a.c) w[p] = raw_load<T, V>(a.w + first + p * stride);

  for (int turn = 0; row >= 0; turn++, row -= step) {
    ring.fetch(a, row - (STAGES - 1) * step, (turn + STAGES - 1) % STAGES);
    const int stage = turn % STAGES;
    __pipeline_wait_prior(STAGES - 1);
    __syncwarp(); /* rstd and mean are from other lanes */
    const float rstd = ring.of_row(stage)->x, mean = LAYER ? ring.of_row(stage)->y : 0.0f;
    Sums s = {0, 0}; /* of g and of g xhat */
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      if (first + p * stride >= a.c) continue;
      Floats<V> dy;
      NormPart<V> now = norm_part<T, PACKS, STAGES>(ring, stage, p, w[p], mean, rstd, &dy);
#pragma unroll
      for (int k = 0; k < V; k++) {
        s.b += now.g.v[k] * now.xhat.v[k];
        dw[p].v[k] += dy.v[k] * now.xhat.v[k];
        if constexpr (LAYER) {
          s.a += now.g.v[k];
          db[p].v[k] += dy.v[k];
        }
      }
      if constexpr (KEEP) part[p] = now;
    }
    s = block_sums<LAYER>(s, turn % 2);
    const float shift = LAYER ? rstd * s.a * over_c : 0.0f, slope = rstd * s.b * over_c;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      if (first + p * stride >= a.c) continue;
      Floats<V> dy, dx = floats_of<T, V>(*ring.slot(stage, 2, p));
      if constexpr (!KEEP)
        part[p] = norm_part<T, PACKS, STAGES>(ring, stage, p, w[p], mean, rstd, &dy);
#pragma unroll
      for (int k = 0; k < V; k++)
        dx.v[k] = dx.v[k] - shift + rstd * part[p].g.v[k] - slope * part[p].xhat.v[k];
      floats_store<T, V>(a.dx + row * a.c + first + p * stride, dx);
    }
  }

  float *mine = partial + blockIdx.x * (LAYER ? 2 : 1) * a.c + first;
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    if (first + p * stride >= a.c) continue;
    store_partial(mine + p * stride, dw[p]);
    if constexpr (LAYER) store_partial(mine + a.c + p * stride, db[p]);
  }
}

/* Any shape; dx of one row. */
template <class T, bool LAYER>
__global__ void __launch_bounds__(NORM_MOST_THREADS) norm_bwd_any_kernel(NormBwd<T> a) {
  const int64_t at = blockIdx.x * a.c;
  const float rstd = a.rstd[blockIdx.x], mean = LAYER ? a.mean[blockIdx.x] : 0.0f;
  Sums s = {0, 0};
  for (int64_t j = threadIdx.x; j < a.c; j += blockDim.x) {
    float g = to_float(a.dy[at + j]) * to_float(a.w[j]);
    s.a += g;
    s.b += g * (to_float(a.x[at + j]) - mean);
  }
  s = block_sums<true>(s, 0);
  const float mean_g = LAYER ? s.a / static_cast<float>(a.c) : 0.0f;
  const float slope = s.b * rstd * rstd / static_cast<float>(a.c);
  for (int64_t j = threadIdx.x; j < a.c; j += blockDim.x) {
    float g = to_float(a.dy[at + j]) * to_float(a.w[j]);
    float centred = to_float(a.x[at + j]) - mean;
    a.dx[at + j] = from_float<T>(to_float(a.dx[at + j]) + rstd * (g - mean_g - slope * centred));
  }
}

/* Terms of dw, and of db. */
template <class T, bool LAYER>
struct NormTerms {
  NormBwd<T> a;
  bool of_w;
  using Read = Floats<1>;
  __device__ Read read(int64_t row, int64_t j) const {
    float dy = to_float(a.dy[row * a.c + j]), mean = LAYER ? a.mean[row] : 0.0f;
    return {{of_w ? dy * (to_float(a.x[row * a.c + j]) - mean) * a.rstd[row] : dy}};
  }
  __device__ Floats<1> terms(Read r) const { return r; }
};

template <class T, bool LAYER>
static void norm_bwd_any(Device *d, NormBwd<T> a, float *dw, float *db) {
  cuda_column_sums<1>(d, a.n, a.c, NormTerms<T, LAYER>{a, true}, dw);
  if constexpr (LAYER) cuda_column_sums<1>(d, a.n, a.c, NormTerms<T, LAYER>{a, false}, db);
  norm_bwd_any_kernel<T, LAYER><<<grid_of(a.n), NORM_MOST_THREADS, 0, cuda_stream(d)>>>(a);
  CUDA_LAUNCHED();
}

/* Returns false, having done nothing, where the GPU's shared memory is too small. A block has
 * several rows, or its part of dw would be traffic worth mentioning. More threads than THREADS to a
 * multiprocessor are slower, and so are fewer; as blocks start while those of the kernel before are
 * still there, only shared memory that they do not need keeps them from gathering on some. */
template <class T, int PACKS, int STAGES, bool LAYER>
static bool norm_bwd_rows(Device *d, NormBwd<T> a, float *dw, float *db) {
  constexpr int FEWEST_ROWS = 8, THREADS = 512;
  constexpr int FIXED = (2 * sizeof(Sums) + STAGES * sizeof(float2)) * NORM_MOST_THREADS / 32;
  auto kernel = norm_bwd_kernel<T, PACKS, STAGES, LAYER>;
  const int threads = static_cast<int>(norm_threads(a.c / wide<T>, PACKS));
  const int per_sm = threads < THREADS ? THREADS / threads : 1, gpu = cuda_of(d)->gpu;
  int shared = 16 * STAGES * 3 * PACKS * threads, most = 0, of_sm = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu));
  CUDA_CHECK(cudaDeviceGetAttribute(&of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, gpu));
  if (shared + FIXED > most) return false;
  if (shared < of_sm / (per_sm + 1)) shared = of_sm / (per_sm + 1);
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const int64_t blocks =
      resident_blocks(d, kernel, threads, static_cast<size_t>(shared), cuda_ceil(a.n, FEWEST_ROWS));
  const int64_t stride = (LAYER ? 2 : 1) * a.c;
  float *partial =
      static_cast<float *>(cuda_scratch(d, sizeof(float) * static_cast<size_t>(blocks * stride)));
  launch_behind(d, grid_of(blocks), static_cast<unsigned>(threads), static_cast<size_t>(shared),
                kernel, a, partial);
  PartialSum sum_w = {partial, blocks, stride, dw}, sum_b = {};
  if constexpr (LAYER) sum_b = {partial + a.c, blocks, stride, db};
  cuda_sum_partials(d, a.c, sum_w, sum_b);
  return true;
}

template <class T, bool LAYER>
static void norm_bwd_launch(Device *d, NormBwd<T> a, bool aligned, float *dw, float *db) {
  const int64_t packs = a.c / wide<T>;
  bool done = false;
  if (aligned && a.c % wide<T> == 0) {
    if (packs <= NORM_MOST_THREADS)
      done = norm_bwd_rows<T, 1, 3, LAYER>(d, a, dw, db);
    else if (packs <= 2 * NORM_MOST_THREADS)
      done = norm_bwd_rows<T, 2, 3, LAYER>(d, a, dw, db);
    else if (packs <= 4 * NORM_MOST_THREADS)
      done = norm_bwd_rows<T, 4, 2, LAYER>(d, a, dw, db);
  }
  if (!done) norm_bwd_any<T, LAYER>(d, a, dw, db);
}

#endif
