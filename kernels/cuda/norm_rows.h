/* RMSNorm and LayerNorm by rows: norm.cu and layernorm.cu make their ops of it, LAYER tells which.
 *
 * Forward: a block holds one row in registers. Backward: a block works through many rows; it reads
 * ahead into shared memory, where each thread finds what it asked for itself, and keeps its
 * columns' part of dw in registers until the end; one barrier per row. Rows that are too wide or
 * not aligned go through kernels that take any shape and read a row twice. */
#ifndef KERNELS_CUDA_NORM_ROWS_H
#define KERNELS_CUDA_NORM_ROWS_H

#include <cuda_pipeline.h>

#include "kernels/cuda/columns.h"

/* delta, y, and mean and rstd may be absent; RMSNorm has no mean and no b. */
template <class T>
struct NormFwd {
  int64_t n, c;
  float eps;
  T *x;
  const T *delta, *w, *b;
  T *y;
  float *mean, *rstd;
};

enum { NORM_MOST_THREADS = 512 };

/* PACKS accesses of a thread make its part of the row. The sum x + delta is what the next layers
 * see, so it is rounded before it is normalized. */
template <class T, int PACKS, bool LAYER>
__global__ void __launch_bounds__(NORM_MOST_THREADS) norm_fwd_kernel(NormFwd<T> a) {
  constexpr int V = wide<T>;
  const int64_t row = blockIdx.x, stride = static_cast<int64_t>(blockDim.x) * V;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * V;
  T *x_row = a.x + row * a.c;
  Raw<T, V> x[PACKS], w[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    x[p] = {};
    if (first + p * stride < a.c) x[p] = raw_load<T, V>(x_row + first + p * stride);
  }
  if (a.delta) {
    Raw<T, V> delta[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; p++)
      if (first + p * stride < a.c)
        delta[p] = raw_load<T, V>(a.delta + row * a.c + first + p * stride);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      if (first + p * stride >= a.c) continue;
      Floats<V> sum = floats_of<T, V>(x[p]), df = floats_of<T, V>(delta[p]);
#pragma unroll
      for (int k = 0; k < V; k++) sum.v[k] += df.v[k];
      x[p] = raw_of<T, V>(sum);
      raw_store<T, V>(x_row + first + p * stride, x[p]);
    }
  }
  if (!a.y && !a.rstd) return;
#pragma unroll
  for (int p = 0; p < PACKS; p++)
    if (a.y && first + p * stride < a.c) w[p] = raw_load<T, V>(a.w + first + p * stride);

  float mean = 0;
  if constexpr (LAYER) {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
      Floats<V> xf = floats_of<T, V>(x[p]);
#pragma unroll
      for (int k = 0; k < V; k++) sum += xf.v[k];
    }
    mean = block_sum(sum) / static_cast<float>(a.c);
  }
  float squares = 0;
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    if (first + p * stride >= a.c) continue;
    Floats<V> xf = floats_of<T, V>(x[p]);
#pragma unroll
    for (int k = 0; k < V; k++) squares += (xf.v[k] - mean) * (xf.v[k] - mean);
  }
  float rstd = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(a.c) + a.eps);
  if (threadIdx.x == 0 && a.rstd) {
    a.rstd[row] = rstd;
    if constexpr (LAYER) a.mean[row] = mean;
  }
  if (!a.y) return;
  Raw<T, V> b[PACKS] = {};
#pragma unroll
  for (int p = 0; p < PACKS; p++)
    if (LAYER && first + p * stride < a.c) b[p] = raw_load<T, V>(a.b + first + p * stride);
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    if (first + p * stride >= a.c) continue;
    Floats<V> xf = floats_of<T, V>(x[p]), wf = floats_of<T, V>(w[p]), bf = {};
    if constexpr (LAYER) bf = floats_of<T, V>(b[p]);
#pragma unroll
    for (int k = 0; k < V; k++) xf.v[k] = (xf.v[k] - mean) * rstd * wf.v[k] + bf.v[k];
    floats_store<T, V>(a.y + row * a.c + first + p * stride, xf);
  }
}

/* Any shape. A thread reads again only what it wrote itself. */
template <class T, bool LAYER>
__global__ void __launch_bounds__(NORM_MOST_THREADS) norm_fwd_any_kernel(NormFwd<T> a) {
  const int64_t row = blockIdx.x;
  T *x = a.x + row * a.c;
  float sum = 0, squares = 0;
  for (int64_t j = threadIdx.x; j < a.c; j += blockDim.x) {
    if (a.delta) x[j] = from_float<T>(to_float(x[j]) + to_float(a.delta[row * a.c + j]));
    sum += to_float(x[j]);
  }
  if (!a.y && !a.rstd) return;
  float mean = LAYER ? block_sum(sum) / static_cast<float>(a.c) : 0.0f;
  for (int64_t j = threadIdx.x; j < a.c; j += blockDim.x) {
    float v = to_float(x[j]) - mean;
    squares += v * v;
  }
  float rstd = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(a.c) + a.eps);
  if (threadIdx.x == 0 && a.rstd) {
    a.rstd[row] = rstd;
    if constexpr (LAYER) a.mean[row] = mean;
  }
  if (!a.y) return;
  for (int64_t j = threadIdx.x; j < a.c; j += blockDim.x) {
    float y = (to_float(x[j]) - mean) * rstd * to_float(a.w[j]);
    if constexpr (LAYER) y += to_float(a.b[j]);
    a.y[row * a.c + j] = from_float<T>(y);
  }
}

/* Threads for `packs` accesses, PACKS each. */
static inline unsigned norm_threads(int64_t packs, int each) {
  return static_cast<unsigned>(cuda_ceil(cuda_ceil(packs, each), 32) * 32);
}

template <class T, bool LAYER>
static void norm_fwd_launch(Device *d, NormFwd<T> a, bool aligned) {
  int64_t packs = a.c / wide<T>;
  bool fits = aligned && a.c % wide<T> == 0 && packs <= 8 * NORM_MOST_THREADS;
  unsigned grid = grid_of(a.n);
  cudaStream_t s = cuda_stream(d);
  if (!fits)
    norm_fwd_any_kernel<T, LAYER><<<grid, NORM_MOST_THREADS, 0, s>>>(a);
  else if (packs <= 2 * 256)
    norm_fwd_kernel<T, 2, LAYER><<<grid, norm_threads(packs, 2), 0, s>>>(a);
  else if (packs <= 4 * NORM_MOST_THREADS)
    norm_fwd_kernel<T, 4, LAYER><<<grid, norm_threads(packs, 4), 0, s>>>(a);
  else
    norm_fwd_kernel<T, 8, LAYER><<<grid, norm_threads(packs, 8), 0, s>>>(a);
  CUDA_LAUNCHED();
}

/* ---- backward ---- */

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
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  s = {LAYER ? warp_sum(s.a) : 0.0f, warp_sum(s.b)};
  if (lane == 0) part[turn][warp] = s;
  __syncthreads();
  s = lane < blockDim.x / 32 ? part[turn][lane] : Sums{0, 0};
  return {LAYER ? warp_sum(s.a) : 0.0f, warp_sum(s.b)};
}

/* What a thread reads of dy, x and dx for the next STAGES rows of its block. */
template <class T, int PACKS, int STAGES>
struct NormRing {
  uint4 *slots; /* [STAGES, 3, PACKS, threads] */
  __device__ uint4 *slot(int stage, int what, int p) const {
    return slots + ((stage * 3 + what) * PACKS + p) * blockDim.x + threadIdx.x;
  }
  __device__ void fetch(const NormBwd<T> &a, int64_t row, int stage) const {
    if (row < a.n) {
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

/* dx += rstd (g - mean(g) - xhat mean(g xhat)), RMSNorm without the means of x and g. partial is
 * [gridDim.x, LAYER ? 2 : 1, c]: sums of dy xhat, and of dy. Narrow parts stay in registers across
 * the barrier, wide ones are made again. */
template <class T, int PACKS, int STAGES, bool LAYER>
__global__ void __launch_bounds__(NORM_MOST_THREADS) norm_bwd_kernel(NormBwd<T> a, float *partial) {
  constexpr int V = wide<T>;
  constexpr bool KEEP = PACKS * V <= 8;
  extern __shared__ uint4 slots[];
  const NormRing<T, PACKS, STAGES> ring = {slots};
  const int64_t stride = static_cast<int64_t>(blockDim.x) * V, step = gridDim.x;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * V;
  const float over_c = 1.0f / static_cast<float>(a.c);
  Floats<V> dw[PACKS] = {}, db[PACKS] = {};
  NormPart<V> part[PACKS];
  Raw<T, V> w[PACKS] = {};
  int64_t row = blockIdx.x;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) ring.fetch(a, row + s * step, s);
#pragma unroll
  for (int p = 0; p < PACKS; p++)
    if (first + p * stride < a.c) w[p] = raw_load<T, V>(a.w + first + p * stride);
  float rstd = a.rstd[row], mean = LAYER ? a.mean[row] : 0.0f;

  for (int turn = 0; row < a.n; turn++, row += step) {
    ring.fetch(a, row + (STAGES - 1) * step, (turn + STAGES - 1) % STAGES);
    const bool more = row + step < a.n;
    const float next_rstd = more ? a.rstd[row + step] : 0.0f;
    const float next_mean = LAYER && more ? a.mean[row + step] : 0.0f;
    const int stage = turn % STAGES;
    __pipeline_wait_prior(STAGES - 1);
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
    rstd = next_rstd;
    mean = next_mean;
  }

  float *mine = partial + blockIdx.x * (LAYER ? 2 : 1) * a.c;
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    if (first + p * stride >= a.c) continue;
#pragma unroll
    for (int k = 0; k < V; k++) {
      mine[first + p * stride + k] = dw[p].v[k];
      if constexpr (LAYER) mine[a.c + first + p * stride + k] = db[p].v[k];
    }
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
 * several rows, or its part of dw would be traffic worth mentioning. */
template <class T, int PACKS, int STAGES, bool LAYER>
static bool norm_bwd_rows(Device *d, NormBwd<T> a, float *dw, float *db) {
  constexpr int64_t FEWEST_ROWS = 8;
  auto kernel = norm_bwd_kernel<T, PACKS, STAGES, LAYER>;
  const int threads = static_cast<int>(norm_threads(a.c / wide<T>, PACKS));
  const int shared = 16 * STAGES * 3 * PACKS * threads, gpu = cuda_of(d)->gpu;
  int most = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu));
  if (shared + static_cast<int>(sizeof(Sums)) * NORM_MOST_THREADS / 16 > most) return false;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  int64_t blocks =
      resident_blocks(d, kernel, threads, static_cast<size_t>(shared), cuda_ceil(a.n, FEWEST_ROWS));
  const int64_t stride = (LAYER ? 2 : 1) * a.c;
  float *partial =
      static_cast<float *>(cuda_scratch(d, sizeof(float) * static_cast<size_t>(blocks * stride)));
  kernel<<<grid_of(blocks), static_cast<unsigned>(threads), static_cast<size_t>(shared),
           cuda_stream(d)>>>(a, partial);
  CUDA_LAUNCHED();
  cuda_sum_partials(d, partial, blocks, stride, a.c, dw);
  if constexpr (LAYER) cuda_sum_partials(d, partial + a.c, blocks, stride, a.c, db);
  return true;
}

template <class T, bool LAYER>
static void norm_bwd_launch(Device *d, NormBwd<T> a, bool aligned, float *dw, float *db) {
  const int64_t packs = a.c / wide<T>;
  bool done = false;
  if (aligned && a.c % wide<T> == 0) {
    if (packs <= NORM_MOST_THREADS)
      done = norm_bwd_rows<T, 1, 4, LAYER>(d, a, dw, db);
    else if (packs <= 2 * NORM_MOST_THREADS)
      done = norm_bwd_rows<T, 2, 3, LAYER>(d, a, dw, db);
    else if (packs <= 4 * NORM_MOST_THREADS)
      done = norm_bwd_rows<T, 4, 2, LAYER>(d, a, dw, db);
  }
  if (!done) norm_bwd_any<T, LAYER>(d, a, dw, db);
}

#endif
