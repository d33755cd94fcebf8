/* RMSNorm and LayerNorm forward: norm.cu and layernorm.cu make their ops of it, LAYER tells which.
 * A block holds one row in registers. Rows that are too wide or not aligned go through a kernel
 * that takes any shape and reads a row again. */
#ifndef KERNELS_CUDA_NORM_FWD_H
#define KERNELS_CUDA_NORM_FWD_H

#include "kernels/cuda/rows.h"

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
  const int64_t row = block_from_end(), stride = static_cast<int64_t>(blockDim.x) * V;
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

#endif
