/* y = x W^T for few rows of x, as decoding has them: bound by the reading of W, so W goes straight
 * from memory into the registers of tensor-core instructions, all of it asked for at once.
 *
 * A block owns 16 rows of W (columns of y); its warps take pieces of 64 numbers of k in turn and
 * their sums are added in order at the end. Where a thread's numbers lie in k does not matter to a
 * sum as long as x and W agree, so each thread reads 16 bytes in a row and calls them its share of
 * two instructions. The order of a sum depends on k alone: a row of y has the same bits whatever
 * other rows are with it. */
#include "kernels/cuda/aligned.h"
#include "kernels/cuda/gemm_rows.h"
#include "kernels/cuda/mma.h"

enum { WARPS = 8, ROWS = 16, PIECE = 64, AHEAD = 4 };

struct RowsArgs {
  const bf16 *x, *w, *bias;
  void *y;
  int64_t m, n, k;
  float alpha, beta;
};

/* W is read once: it must not push x out of the caches. */
__device__ static uint4 load_once(const bf16 *p) {
  uint4 r;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
      : "l"(p));
  return r;
}

__device__ static void multiply(float (&sum)[4], uint4 top, uint4 bottom, uint4 x) {
  const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y};
  const uint32_t second[4] = {top.z, bottom.z, top.w, bottom.w};
  mma_bf16(sum, first, x.x, x.y);
  mma_bf16(sum, second, x.z, x.w);
}

/* This warp's part of the sums of 16 columns of y and 8 TILES rows. */
template <int TILES>
__device__ static void sum_pieces(const RowsArgs &g, int64_t first_row, float (&sum)[TILES][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t own = lane % 4 * 8; /* this thread's place in half a piece */
  /* rows that do not exist: the last one once more, its results are not kept */
  const bf16 *top = g.w + min(first_row + lane / 4, g.n - 1) * g.k;
  const bf16 *bottom = g.w + min(first_row + lane / 4 + 8, g.n - 1) * g.k;
  const bf16 *x[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++)
    x[t] = g.x + min(static_cast<int64_t>(8 * t + lane / 4), g.m - 1) * g.k;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  /* the whole warp goes round together: its instructions need all threads */
  for (int64_t k0 = warp * PIECE; k0 < g.k; k0 += AHEAD * WARPS * PIECE) {
    uint4 w[AHEAD][2][2];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int64_t k = k0 + i * (WARPS * PIECE) + half * (PIECE / 2) + own;
        w[i][half][0] = k < g.k ? load_once(top + k) : zero;
        w[i][half][1] = k < g.k ? load_once(bottom + k) : zero;
      }
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int64_t k = k0 + i * (WARPS * PIECE) + half * (PIECE / 2) + own;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          uint4 b = k < g.k ? __ldg(reinterpret_cast<const uint4 *>(x[t] + k)) : zero;
          multiply(sum[t], w[i][half][0], w[i][half][1], b);
        }
      }
  }
}

template <int TILES, class Out>
static __global__ void __launch_bounds__(32 * WARPS, 2) rows_kernel(RowsArgs g) {
  __shared__ float part[WARPS][8 * TILES][ROWS + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * ROWS;
  float sum[TILES][4] = {};
  sum_pieces<TILES>(g, first_row, sum);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      part[warp][8 * t + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sum[t][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * TILES * ROWS; i += blockDim.x) {
    const int64_t row = i / ROWS, column = first_row + i % ROWS;
    if (row >= g.m || column >= g.n) continue;
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += part[w][row][i % ROWS];
    Out *y = static_cast<Out *>(g.y) + row * g.n + column;
    total *= g.alpha;
    if (g.bias) total += to_float(g.bias[column]);
    if (g.beta != 0) total += g.beta * to_float(*y);
    *y = from_float<Out>(total);
  }
}

template <class Out>
static void launch(Device *d, const RowsArgs &g) {
  const unsigned blocks = static_cast<unsigned>(cuda_ceil(g.n, ROWS));
  if (g.m <= 8)
    rows_kernel<1, Out><<<blocks, 32 * WARPS, 0, cuda_stream(d)>>>(g);
  else
    rows_kernel<2, Out><<<blocks, 32 * WARPS, 0, cuda_stream(d)>>>(g);
  CUDA_LAUNCHED();
}

bool gemm_rows(Device *d, GemmKind kind, const GemmCall *x) {
  int64_t k = x->a.dim[1];
  if (kind != GEMM_NT || x->a.dtype != DT_BF16 || x->a.dim[0] > GEMM_ROWS_MOST || k % 8 != 0 ||
      !aligned(x->a.data) || !aligned(x->b.data))
    return false;
  RowsArgs g = {cuda_data<bf16>(x->a),
                cuda_data<bf16>(x->b),
                cuda_data<bf16>(x->bias),
                x->c.data,
                x->c.dim[0],
                x->c.dim[1],
                k,
                x->alpha,
                x->beta};
  cuda_by_type(x->c.dtype, [&](auto type) { launch<decltype(type)>(d, g); });
  return true;
}
