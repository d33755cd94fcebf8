/* What the tensor-core kernels of attention share: tiles of heads in shared memory, the products
 * between them, and the list of head sizes. Head sizes in between are padded with zeros, which add
 * nothing to any product. */
#ifndef KERNELS_CUDA_ATTENTION_OWN_TILE_H
#define KERNELS_CUDA_ATTENTION_OWN_TILE_H

#include "kernels/cuda/attention_own.h"
#include "kernels/cuda/mma.h"

/* Numbers between the starts of a tile's rows. */
template <int D>
struct TileStride {
  static constexpr int value = D + 8;
};

/* Rows [0, ROWS) of one head to shared memory; rows from `rows` on and columns from `dim` on become
 * zero. All THREADS call it; the copy is under way when it returns. */
template <int D, int ROWS, int THREADS>
__device__ inline void tile_copy(bf16 *tile, const bf16 *head, int64_t stride, int rows, int dim) {
  constexpr int PACKS = D / 8, STEP = THREADS / PACKS; /* rows that are copied at a time */
  int row = static_cast<int>(threadIdx.x) / PACKS,
      column = static_cast<int>(threadIdx.x) % PACKS * 8;
  if (row >= STEP) return;
  const bf16 *from = head + row * stride + column;
  tile += row * TileStride<D>::value + column;
#pragma unroll
  for (int i = 0; i < ROWS; i += STEP) {
    if (ROWS % STEP != 0 && i + row >= ROWS) break;
    bool exists = i + row < rows && column < dim;
    copy_async_16(tile + i * TileStride<D>::value, from, exists);
    from += STEP * stride;
  }
}

/* c[16, COLUMNS] += a[16, D] b[COLUMNS, D]^T, both tiles in shared memory. */
template <int D, int COLUMNS>
__device__ inline void tile_dot(float (&c)[COLUMNS / 8][4], const bf16 *a, const bf16 *b) {
  constexpr int STRIDE = TileStride<D>::value;
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    uint32_t x[4], y[4];
    load_a(x, a + k, STRIDE);
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 16) {
      load_b_of_rows(y, b + j * STRIDE + k, STRIDE);
      mma_bf16(c[j / 8], x, y[0], y[1]);
      mma_bf16(c[j / 8 + 1], x, y[2], y[3]);
    }
  }
}

/* c[16, COLUMNS] += p[16, ROWS] b[ROWS, COLUMNS], p rounded to BF16, b in shared memory with rows
 * of a head padded to D. */
template <int D, int ROWS, int COLUMNS>
__device__ inline void tile_add(float (&c)[COLUMNS / 8][4], const float (&p)[ROWS / 8][4],
                                const bf16 *b) {
  constexpr int STRIDE = TileStride<D>::value;
#pragma unroll
  for (int k = 0; k < ROWS; k += 16) {
    uint32_t x[4], y[4];
    a_of_c(x, p[k / 8], p[k / 8 + 1]);
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 16) {
      load_b_of_columns(y, b + k * STRIDE + j, STRIDE);
      mma_bf16(c[j / 8], x, y[0], y[1]);
      mma_bf16(c[j / 8 + 1], x, y[2], y[3]);
    }
  }
}

template <int N>
__device__ inline void tile_clear(float (&c)[N][4]) {
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) c[j][i] = 0;
}

/* scale * c[16, COLUMNS] to 16 rows of a tile in shared memory, columns from `first` on; from there
 * `rows` rows of them to one head in global memory. The rows are this warp's own. */
template <int D, int COLUMNS>
__device__ inline void tile_store(const float (&c)[COLUMNS / 8][4], const float (&scale)[2],
                                  bf16 *tile, int first, bf16 *head, int64_t stride, int rows,
                                  int dim) {
  constexpr int STRIDE = TileStride<D>::value, PACKS = COLUMNS / 8;
  int lane = static_cast<int>(threadIdx.x % 32);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<uint32_t *>(tile + (lane / 4 + 8 * i) * STRIDE + first + 8 * j +
                                    lane % 4 * 2) =
          pack_bf16(scale[i] * c[j][2 * i], scale[i] * c[j][2 * i + 1]);
  __syncwarp();
  for (int i = lane; i < 16 * PACKS; i += 32) {
    int row = i / PACKS, column = first + i % PACKS * 8;
    if (row < rows && column < dim)
      *reinterpret_cast<uint4 *>(head + row * stride + column) =
          *reinterpret_cast<const uint4 *>(tile + row * STRIDE + column);
  }
}

/* Calls f with the padded head size as a type's value. */
template <int D>
struct HeadSize {
  static constexpr int value = D;
};
template <class F>
static inline void own_by_head(int head_dim, F f) {
  if (head_dim <= 32)
    f(HeadSize<32>());
  else if (head_dim <= 64)
    f(HeadSize<64>());
  else if (head_dim <= 96)
    f(HeadSize<96>());
  else if (head_dim <= 128)
    f(HeadSize<128>());
  else
    f(HeadSize<256>());
}

#endif
