/* Tiles of heads in shared memory as floats, and the products between them: what attention without
 * tensor cores is made of (F32, and BF16 of any head size or alignment).
 *
 * A block of 16 x 16 threads; a thread has of a [TILE, TILE] product rows y + 16 i and columns
 * x + 16 j, and of a [TILE, D] sum the same rows and columns 4 x + 64 c and the next three. Columns
 * of a head from its size up to D are zero. */
#ifndef KERNELS_CUDA_ATTENTION_OWN_PLAIN_H
#define KERNELS_CUDA_ATTENTION_OWN_PLAIN_H

#include "kernels/cuda/attention_own.h"

namespace {

template <int D, int TILE>
struct Plain {
  static constexpr int THREADS = 256, R = TILE / 16, C = D / 64;
  static constexpr int STRIDE = D + 4, P_STRIDE = TILE + 4; /* rows in different banks */
  static constexpr int HEAD = TILE * STRIDE, P = TILE * P_STRIDE;
  /* Bytes of `heads` tiles of heads and one product. */
  static constexpr size_t shared(int heads) { return sizeof(float) * (heads * HEAD + P); }
};

__device__ inline int thread_x() { return static_cast<int>(threadIdx.x) % 16; }
__device__ inline int thread_y() { return static_cast<int>(threadIdx.x) / 16; }

template <class T, int D, int TILE>
__device__ inline void plain_copy(float *tile, const T *head, int64_t stride, int rows, int dim) {
  using S = Plain<D, TILE>;
  for (int i = static_cast<int>(threadIdx.x); i < TILE * D; i += S::THREADS) {
    int row = i / D, column = i % D;
    bool exists = row < rows && column < dim;
    tile[row * S::STRIDE + column] = exists ? to_float(head[row * stride + column]) : 0;
  }
}

/* c[TILE, TILE] = a[TILE, D] b[TILE, D]^T */
template <int D, int TILE>
__device__ inline void plain_dot(float (&c)[TILE / 16][TILE / 16], const float *a, const float *b) {
  using S = Plain<D, TILE>;
#pragma unroll
  for (int i = 0; i < S::R; i++)
#pragma unroll
    for (int j = 0; j < S::R; j++) c[i][j] = 0;
  a += thread_y() * S::STRIDE;
  b += thread_x() * S::STRIDE;
#pragma unroll 4
  for (int k = 0; k < D; k += 4) {
    float4 x[S::R], y[S::R];
#pragma unroll
    for (int i = 0; i < S::R; i++) {
      x[i] = *reinterpret_cast<const float4 *>(a + 16 * i * S::STRIDE + k);
      y[i] = *reinterpret_cast<const float4 *>(b + 16 * i * S::STRIDE + k);
    }
#pragma unroll
    for (int i = 0; i < S::R; i++)
#pragma unroll
      for (int j = 0; j < S::R; j++) {
        c[i][j] += x[i].x * y[j].x;
        c[i][j] += x[i].y * y[j].y;
        c[i][j] += x[i].z * y[j].z;
        c[i][j] += x[i].w * y[j].w;
      }
  }
}

/* A product to shared memory, for plain_add. */
template <int D, int TILE>
__device__ inline void plain_put(float *p, const float (&c)[TILE / 16][TILE / 16]) {
  using S = Plain<D, TILE>;
#pragma unroll
  for (int i = 0; i < S::R; i++)
#pragma unroll
    for (int j = 0; j < S::R; j++)
      p[(thread_y() + 16 * i) * S::P_STRIDE + thread_x() + 16 * j] = c[i][j];
}

/* sum[TILE, D] += p[TILE, TILE] b[TILE, D] */
template <int D, int TILE>
__device__ inline void plain_add(float4 (&sum)[TILE / 16][D / 64], const float *p, const float *b) {
  using S = Plain<D, TILE>;
  p += thread_y() * S::P_STRIDE;
  b += thread_x() * 4;
#pragma unroll 4
  for (int k = 0; k < TILE; k++) {
    float4 y[S::C];
#pragma unroll
    for (int c = 0; c < S::C; c++)
      y[c] = *reinterpret_cast<const float4 *>(b + k * S::STRIDE + 64 * c);
#pragma unroll
    for (int i = 0; i < S::R; i++) {
      float x = p[16 * i * S::P_STRIDE + k];
#pragma unroll
      for (int c = 0; c < S::C; c++) {
        sum[i][c].x += x * y[c].x;
        sum[i][c].y += x * y[c].y;
        sum[i][c].z += x * y[c].z;
        sum[i][c].w += x * y[c].w;
      }
    }
  }
}

template <int D, int TILE>
__device__ inline void plain_clear(float4 (&sum)[TILE / 16][D / 64]) {
#pragma unroll
  for (int i = 0; i < TILE / 16; i++)
#pragma unroll
    for (int c = 0; c < D / 64; c++) sum[i][c] = make_float4(0, 0, 0, 0);
}

/* scale[i] * sum to `rows` rows of one head. */
template <class T, int D, int TILE>
__device__ inline void plain_store(const float4 (&sum)[TILE / 16][D / 64],
                                   const float (&scale)[TILE / 16], T *head, int64_t stride,
                                   int rows, int dim) {
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) {
    int row = thread_y() + 16 * i;
    if (row >= rows) continue;
#pragma unroll
    for (int c = 0; c < D / 64; c++) {
      const float v[4] = {sum[i][c].x, sum[i][c].y, sum[i][c].z, sum[i][c].w};
      int column = 4 * thread_x() + 64 * c;
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (column + e < dim) head[row * stride + column + e] = from_float<T>(scale[i] * v[e]);
    }
  }
}

}  // namespace

#endif
