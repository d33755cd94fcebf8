/* Embedding and row selection. Scattered sums put the rows' numbers in order first, equal ones in
 * token order, so that what goes to one row lies together: runs. A
 * block walks CHUNK sorted places; a run that lies in one chunk is added to its row at once, one
 * that crosses chunks leaves partial sums, which a second pass adds in order. So a token that
 * occurs in every row is as many blocks' work as any other. */
#include <cassert>

#include "kernels/cuda/row_order.h"

/* ---- gather ---- */

enum { GATHER_THREADS = 256, GATHER_UNROLL = 4 };

/* Rows are per_row words; nothing is computed, so the type of elements does not matter. */
template <class W>
__global__ void __launch_bounds__(GATHER_THREADS)
    gather_kernel(int64_t words, int64_t per_row, int64_t n, const W *x, const int32_t *rows,
                  W *y) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * GATHER_UNROLL * GATHER_THREADS + threadIdx.x;
  W w[GATHER_UNROLL];
#pragma unroll
  for (int u = 0; u < GATHER_UNROLL; u++) {
    int64_t i = first + u * GATHER_THREADS;
    if (i >= words) continue;
    int64_t r = i / per_row, row = rows[r];
    assert(row >= 0 && row < n);
    w[u] = x[row * per_row + (i - r * per_row)];
  }
#pragma unroll
  for (int u = 0; u < GATHER_UNROLL; u++)
    if (first + u * GATHER_THREADS < words) y[first + u * GATHER_THREADS] = w[u];
}

template <class W>
static void gather(Device *d, Tensor x_NC, Tensor rows_R, Tensor y_RC) {
  int64_t per_row = static_cast<int64_t>(tensor_bytes(x_NC) / sizeof(W)) / x_NC.dim[0];
  int64_t words = per_row * rows_R.dim[0];
  unsigned grid = grid_of(cuda_ceil(words, GATHER_UNROLL * GATHER_THREADS));
  gather_kernel<W><<<grid, GATHER_THREADS, 0, cuda_stream(d)>>>(
      words, per_row, x_NC.dim[0], cuda_data<W>(x_NC), tensor_i32(rows_R), cuda_data<W>(y_RC));
  CUDA_LAUNCHED();
}

void cuda_gather_rows(Device *d, Tensor x_NC, Tensor rows_R, Tensor y_RC) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1], r = rows_R.dim[0];
  require(x_NC.ndim == 2 && is_i32_1d(rows_R, r) && is_2d(y_RC, x_NC.dtype, r, c));
  require(x_NC.dtype == DT_F32 || x_NC.dtype == DT_BF16);
  if (r * c == 0) return;
  require(n > 0);
  if (is_wide(x_NC.dtype, c) && are_aligned(x_NC, y_RC))
    gather<uint4>(d, x_NC, rows_R, y_RC);
  else if (x_NC.dtype == DT_F32)
    gather<unsigned>(d, x_NC, rows_R, y_RC);
  else
    gather<unsigned short>(d, x_NC, rows_R, y_RC);
}

void cuda_embedding_fwd(Device *d, Tensor tokens_N, Tensor table_VC, Tensor y_NC) {
  cuda_gather_rows(d, table_VC, tokens_N, y_NC);
}

/* ---- scatter ---- */

enum {
  CHUNK = 16, /* at most 30: a warp's lanes hold a chunk and its neighbours */
  SCATTER_UNROLL = 4,
  SCATTER_THREADS = 128
};

/* x_NC[row] += the sum of y_RC's rows; partial is [chunks, 2, c]: of the run that came into the
 * chunk, and of the one that goes on after it. */
template <class TY, class TX>
struct Scatter {
  int64_t r, c;
  const Place *places; /* sorted */
  const TY *y;
  TX *x;
  float *partial;
};

/* V elements of x, in the widest accesses that there are. */
template <int V, class TX>
__device__ inline Floats<V> x_load(const TX *p) {
  constexpr int W = V < wide<TX> ? V : wide<TX>;
  Floats<V> f;
#pragma unroll
  for (int i = 0; i < V; i += W) {
    Floats<W> few = floats_load<TX, W>(p + i);
#pragma unroll
    for (int k = 0; k < W; k++) f.v[i + k] = few.v[k];
  }
  return f;
}
template <int V, class TX>
__device__ inline void x_store(TX *p, const Floats<V> &f) {
  constexpr int W = V < wide<TX> ? V : wide<TX>;
#pragma unroll
  for (int i = 0; i < V; i += W) {
    Floats<W> few;
#pragma unroll
    for (int k = 0; k < W; k++) few.v[k] = f.v[i + k];
    floats_store<TX, W>(p + i, few);
  }
}

template <int V>
__device__ inline void add_to(Floats<V> *sum, const Floats<V> &x) {
#pragma unroll
  for (int k = 0; k < V; k++) sum->v[k] += x.v[k];
}

/* A chunk as a warp sees it: lane i has place i - 1, so the one before the chunk as well. Bit i of
 * a mask is the chunk's place i. */
struct ChunkOf {
  unsigned row, source; /* of the lane's place; row is NONE where there is no place */
  unsigned there;       /* the place exists */
  unsigned ends;        /* its run ends with it */
  unsigned incoming;    /* its run began before the chunk */
};
__device__ inline ChunkOf chunk_of(const Place *places, int64_t r, int64_t first) {
  constexpr unsigned NONE = 0xffffffffu, ALL = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const int64_t i = first - 1 + lane;
  const bool exists = lane <= CHUNK + 1 && i >= 0 && i < r;
  const Place p = exists ? places[i] : 0;
  ChunkOf c = {exists ? row_of(p) : NONE, source_of(p), 0, 0, 0};
  const unsigned next = __shfl_down_sync(ALL, c.row, 1), before = __shfl_sync(ALL, c.row, 0);
  c.there = __ballot_sync(ALL, exists && lane >= 1 && lane <= CHUNK) >> 1;
  c.ends = __ballot_sync(ALL, c.row != next) >> 1 & c.there;
  c.incoming = __ballot_sync(ALL, c.row == before) >> 1 & c.there;
  return c;
}

/* blockIdx.x counts chunks, blockIdx.y strips of columns. */
template <class TY, class TX, int V>
__global__ void __launch_bounds__(SCATTER_THREADS) scatter_kernel(Scatter<TY, TX> a) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * SCATTER_THREADS + threadIdx.x) * V;
  const bool mine = column < a.c;
  float *incoming = a.partial + blockIdx.x * 2 * a.c + column, *outgoing = incoming + a.c;
  wait_for_kernel_before();
  let_next_kernel_start();
  const ChunkOf chunk = chunk_of(a.places, a.r, static_cast<int64_t>(blockIdx.x) * CHUNK);
  const unsigned whole = chunk.ends & ~chunk.incoming; /* added to their rows at once */
  Floats<V> sum = {};
#pragma unroll 1
  for (int at = 0; at < CHUNK; at += SCATTER_UNROLL) {
    Raw<TY, V> y[SCATTER_UNROLL];
    Floats<V> x[SCATTER_UNROLL];
    TX *to[SCATTER_UNROLL];
#pragma unroll
    for (int u = 0; u < SCATTER_UNROLL; u++) {
      const unsigned row = __shfl_sync(0xffffffffu, chunk.row, at + u + 1);
      const unsigned source = __shfl_sync(0xffffffffu, chunk.source, at + u + 1);
      to[u] = a.x + row * a.c + column;
      if (!mine || !(chunk.there >> (at + u) & 1)) continue;
      y[u] = raw_load<TY, V>(a.y + source * a.c + column);
      if (whole >> (at + u) & 1) x[u] = x_load<V, TX>(to[u]);
    }
#pragma unroll
    for (int u = 0; u < SCATTER_UNROLL; u++) {
      const unsigned bit = 1u << (at + u);
      if (!mine || !(chunk.there & bit)) continue;
      add_to<V>(&sum, floats_of<TY, V>(y[u]));
      if (whole & bit) {
        add_to<V>(&x[u], sum);
        x_store<V, TX>(to[u], x[u]);
      } else if (chunk.ends & bit || at + u + 1 == CHUNK) {
        x_store<V, float>(chunk.incoming & bit ? incoming : outgoing, sum);
      }
      if (chunk.ends & bit) sum = {};
    }
  }
}

/* Runs that cross chunks: the block of the chunk where a run begins adds the partial sums. Which
 * these are is known before the partial sums are. */
template <class TY, class TX, int V>
__global__ void __launch_bounds__(SCATTER_THREADS) crossing_kernel(Scatter<TY, TX> a) {
  constexpr unsigned LAST = 1u << (CHUNK - 1);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * CHUNK, end = first + CHUNK;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * SCATTER_THREADS + threadIdx.x) * V;
  const ChunkOf chunk = chunk_of(a.places, a.r, first);
  const bool goes_on = chunk.there & LAST && !((chunk.ends | chunk.incoming) & LAST);
  const unsigned row = goes_on ? row_of(a.places[end - 1]) : 0;
  int64_t chunks = 1, beyond = goes_on ? gridDim.x - blockIdx.x : 0; /* reaches 1, not `beyond` */
  while (beyond - chunks > 1) {
    const int64_t middle = (chunks + beyond) / 2;
    (row_of(a.places[first + middle * CHUNK]) == row ? chunks : beyond) = middle;
  }
  wait_for_kernel_before(); /* also with nothing to do: the next op relies on this kernel's end */
  if (!goes_on || column >= a.c) return;
  const float *partial = a.partial + blockIdx.x * 2 * a.c + column;
  Floats<V> sum = x_load<V, float>(partial + a.c);
#pragma unroll 8
  for (int64_t k = 1; k <= chunks; k++) add_to<V>(&sum, x_load<V, float>(partial + k * 2 * a.c));
  Floats<V> x = x_load<V, TX>(a.x + row * a.c + column);
  add_to<V>(&x, sum);
  x_store<V, TX>(a.x + row * a.c + column, x);
}

template <class TY, class TX, int V>
static void scatter(Device *d, Tensor y_RC, Tensor rows_R, Tensor x_NC) {
  constexpr int VC = V < 4 ? V : 4; /* columns of a thread that adds partial sums */
  const int64_t r = y_RC.dim[0], c = y_RC.dim[1], chunks = cuda_ceil(r, CHUNK);
  const size_t order_bytes = row_order_bytes(r);
  char *scratch = static_cast<char *>(
      cuda_scratch(d, order_bytes + sizeof(float) * static_cast<size_t>(chunks * 2 * c)));
  Scatter<TY, TX> a = {r,
                       c,
                       nullptr,
                       cuda_data<TY>(y_RC),
                       cuda_data<TX>(x_NC),
                       reinterpret_cast<float *>(scratch + order_bytes)};
  a.places = cuda_row_order(d, rows_R, x_NC.dim[0], scratch);
  const int64_t strips = cuda_ceil(c, SCATTER_THREADS * V);
  const int64_t crossing_strips = cuda_ceil(c, SCATTER_THREADS * VC);
  require(crossing_strips <= UINT16_MAX);
  launch_behind(d, dim3(grid_of(chunks), grid_of(strips)), SCATTER_THREADS, 0,
                scatter_kernel<TY, TX, V>, a);
  launch_behind(d, dim3(grid_of(chunks), grid_of(crossing_strips)), SCATTER_THREADS, 0,
                crossing_kernel<TY, TX, VC>, a);
}

template <class TY, class TX>
static void scatter_any(Device *d, Tensor y_RC, Tensor rows_R, Tensor x_NC) {
  bool fits = y_RC.dim[1] % wide<TY> == 0 && are_aligned(y_RC, x_NC);
  fits ? scatter<TY, TX, wide<TY>>(d, y_RC, rows_R, x_NC)
       : scatter<TY, TX, 1>(d, y_RC, rows_R, x_NC);
}

void cuda_scatter_add_rows(Device *d, Tensor y_RC, Tensor rows_R, Tensor x_NC) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1], r = rows_R.dim[0];
  require(x_NC.ndim == 2 && is_i32_1d(rows_R, r) && is_2d(y_RC, x_NC.dtype, r, c));
  if (r * c == 0) return;
  require(n > 0);
  cuda_by_type(x_NC.dtype, [&]<class T>(T) { scatter_any<T, T>(d, y_RC, rows_R, x_NC); });
}

void cuda_embedding_bwd(Device *d, Tensor tokens_N, Tensor dy_NC, Tensor dtable_VC) {
  int64_t n = tokens_N.dim[0], c = dtable_VC.dim[1], v = dtable_VC.dim[0];
  require(is_2d(dtable_VC, DT_F32, v, c) && is_i32_1d(tokens_N, n));
  require(is_2d(dy_NC, dy_NC.dtype, n, c));
  if (n * c == 0) return;
  require(v > 0);
  cuda_by_type(dy_NC.dtype,
               [&]<class T>(T) { scatter_any<T, float>(d, dy_NC, tokens_N, dtable_VC); });
}
