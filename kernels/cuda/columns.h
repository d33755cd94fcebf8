/* Column sums of an [n, c] matrix whose terms a functor computes: out[j] += sum over rows of
 * term (row, j). A block sums a strip of columns over a run of rows; the blocks' sums meet in a
 * second pass, in a fixed order. */
#ifndef KERNELS_CUDA_COLUMNS_H
#define KERNELS_CUDA_COLUMNS_H

#include "kernels/cuda/rows.h"

enum { COLUMN_LANES = 32, COLUMN_ROWS = 16, COLUMN_UNROLL = 8 };

/* f.read(row, column) reads what makes the V terms from there on, f.terms makes them; partial is
 * [gridDim.y, c]. */
template <int V, class F>
__global__ void __launch_bounds__(COLUMN_LANES *COLUMN_ROWS)
    column_kernel(int64_t n, int64_t c, int64_t rows_per_block, float *partial, F f) {
  __shared__ float part[COLUMN_ROWS][COLUMN_LANES * V];
  int64_t column = (static_cast<int64_t>(blockIdx.x) * COLUMN_LANES + threadIdx.x) * V;
  int64_t first = blockIdx.y * rows_per_block;
  int64_t end = first + rows_per_block < n ? first + rows_per_block : n;
  Floats<V> sum = {};
  wait_for_kernel_before();
  let_next_kernel_start();
  for (int64_t row = first + threadIdx.y; row < end && column < c;
       row += COLUMN_ROWS * COLUMN_UNROLL) {
    typename F::Read read[COLUMN_UNROLL];
#pragma unroll
    for (int u = 0; u < COLUMN_UNROLL; u++)
      if (row + u * COLUMN_ROWS < end) read[u] = f.read(row + u * COLUMN_ROWS, column);
#pragma unroll
    for (int u = 0; u < COLUMN_UNROLL; u++) {
      if (row + u * COLUMN_ROWS >= end) break;
      Floats<V> x = f.terms(read[u]);
#pragma unroll
      for (int k = 0; k < V; k++) sum.v[k] += x.v[k];
    }
  }
#pragma unroll
  for (int k = 0; k < V; k++) part[threadIdx.y][k * COLUMN_LANES + threadIdx.x] = sum.v[k];
  __syncthreads();
  if (threadIdx.y > 0 || column >= c) return;
#pragma unroll
  for (int k = 0; k < V; k++) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < COLUMN_ROWS; r++) total += part[r][k * COLUMN_LANES + threadIdx.x];
    partial[blockIdx.y * c + column + k] = total;
  }
}

/* c is a multiple of V. */
template <int V, class F>
static void cuda_column_sums(Device *d, int64_t n, int64_t c, F f, float *out) {
  constexpr int64_t FEWEST_ROWS = 4 * COLUMN_ROWS;
  if (n == 0 || c == 0) return;
  int64_t strips = cuda_ceil(c, COLUMN_LANES * V);
  int64_t blocks =
      resident_blocks(d, column_kernel<V, F>, COLUMN_LANES * COLUMN_ROWS, 0, strips * n);
  int64_t runs = blocks < strips ? 1 : blocks / strips;
  int64_t rows = cuda_ceil(n, runs);
  rows = rows < FEWEST_ROWS ? FEWEST_ROWS : rows;
  runs = cuda_ceil(n, rows);
  float *partial =
      static_cast<float *>(cuda_scratch(d, sizeof(float) * static_cast<size_t>(runs * c)));
  dim3 grid(grid_of(strips), grid_of(runs)), block(COLUMN_LANES, COLUMN_ROWS);
  launch_behind(d, grid, block, 0, column_kernel<V, F>, n, c, rows, partial, f);
  cuda_sum_partials(d, c, {partial, runs, c, out}, {});
}

#endif
