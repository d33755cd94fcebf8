/* Embedding and row selection. Scattered sums put the rows' numbers in order first, equal ones in
 * token order, so that what goes to one row lies together: runs. A block walks the runs that begin
 * in its CHUNK of sorted places, and adds each to its row at once. A long run, one that goes on
 * through all of the next chunk, leaves a partial sum in every chunk instead, and a second pass
 * adds these in order: so a token that occurs in every row is as many blocks' work as any other. */
#include <cassert>

#include "kernels/cuda/row_order.h"

/* ---- gather ---- */

enum { GATHER_THREADS = 256, GATHER_UNROLL = 4 };

/* Rows are per_row words; nothing is computed, so the type of elements does not matter. It begins
 * when all before it is done, so what is behind it may begin at once. */
template <class W>
__global__ void __launch_bounds__(GATHER_THREADS)
    gather_kernel(int64_t words, int64_t per_row, int64_t n, const W *x, const int32_t *rows,
                  W *y) {
  let_next_kernel_start();
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
  CHUNK = 16, /* a warp's lanes hold two */
  SCATTER_UNROLL = 8,
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

/* V elements of x, as they lie in memory, in the widest accesses that there are. */
template <int V, class TX>
struct Words {
  static constexpr int W = V < wide<TX> ? V : wide<TX>;
  Raw<TX, W> w[V / W];
};
template <int V, class TX>
__device__ inline Words<V, TX> words_load(const TX *p) {
  constexpr int W = Words<V, TX>::W;
  Words<V, TX> x;
#pragma unroll
  for (int i = 0; i < V / W; i++) x.w[i] = raw_load<TX, W>(p + i * W);
  return x;
}
template <int V, class TX>
__device__ inline Floats<V> floats_of_words(const Words<V, TX> &x) {
  constexpr int W = Words<V, TX>::W;
  Floats<V> f;
#pragma unroll
  for (int i = 0; i < V; i += W) {
    Floats<W> few = floats_of<TX, W>(x.w[i / W]);
#pragma unroll
    for (int k = 0; k < W; k++) f.v[i + k] = few.v[k];
  }
  return f;
}
template <int V, class TX>
__device__ inline Floats<V> x_load(const TX *p) {
  return floats_of_words<V, TX>(words_load<V, TX>(p));
}
template <int V, class TX>
__device__ inline void x_store(TX *p, const Floats<V> &f) {
  constexpr int W = Words<V, TX>::W;
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

/* What is walked of a chunk and the next one, as a warp sees it: lane i has place i of the two, and
 * bit i of a mask is that place. Short runs belong to the chunk where they begin, and of long ones
 * each chunk has its own part. */
struct Walk {
  unsigned row, source; /* of the lane's place */
  int begin, end;       /* the places */
  unsigned ends;        /* with this one a run, or the chunk's part of it, ends */
  unsigned incoming;    /* and this is the end of a long run's part that began before the chunk */
  unsigned outgoing;    /* or of one that goes on behind it */
};
__device__ inline Walk walk_of(const Place *places, int64_t r, int64_t first) {
  constexpr unsigned NONE = 0xffffffffu, ALL = 0xffffffffu, OWN = (1u << CHUNK) - 1;
  static_assert(2 * CHUNK == 32, "a warp's lanes hold two chunks");
  const int lane = threadIdx.x % 32;
  const int64_t i = first + lane, back = first - (lane == 0 ? 1 : 1 + CHUNK);
  const Place p = i < r ? places[i] : 0;
  const unsigned row = i < r ? row_of(p) : NONE;
  const unsigned row_back = lane < 2 && back >= 0 ? row_of(places[back]) : NONE;
  const unsigned before = __shfl_sync(ALL, row_back, 0), far_before = __shfl_sync(ALL, row_back, 1);
  const unsigned left = __shfl_up_sync(ALL, row, 1), own_row = __shfl_sync(ALL, row, 0);
  const unsigned there = __ballot_sync(ALL, i < r);
  /* Here a run begins, or there is no place. */
  const unsigned begins = __ballot_sync(ALL, i >= r || row != (lane == 0 ? before : left));
  const unsigned own = begins & OWN, next = begins >> CHUNK;
  const int from = own ? __ffs(static_cast<int>(own)) - 1 : CHUNK; /* the first run of its own */
  const bool comes_in = from > 0 && (own == 0 || far_before == own_row);
  const bool goes_out = (own & there) && next == 0;
  Walk w = {row, source_of(p), comes_in ? 0 : from, 0, 0, 0, 0};
  w.end = own == 0 || next == 0 ? CHUNK : CHUNK + __ffs(static_cast<int>(next)) - 1;
  const int exist = __popc(there);
  if (w.end > exist) w.end = exist;
  if (w.begin >= w.end) return w;
  w.ends = begins >> 1 | 1u << (w.end - 1);
  if (comes_in) w.incoming = 1u << (from - 1);
  if (goes_out) w.outgoing = 1u << (CHUNK - 1);
  return w;
}

/* blockIdx.x counts chunks, blockIdx.y strips of columns. */
template <class TY, class TX, int V>
__global__ void __launch_bounds__(SCATTER_THREADS) scatter_kernel(Scatter<TY, TX> a) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * SCATTER_THREADS + threadIdx.x) * V;
  const bool mine = column < a.c;
  float *incoming = a.partial + blockIdx.x * 2 * a.c + column, *outgoing = incoming + a.c;
  wait_for_kernel_before();
  let_next_kernel_start();
  const Walk walk = walk_of(a.places, a.r, static_cast<int64_t>(blockIdx.x) * CHUNK);
  const unsigned whole =
      walk.ends & ~(walk.incoming | walk.outgoing); /* go to their rows at once */
  Floats<V> sum = {};
#pragma unroll 1
  for (int at = walk.begin; at < walk.end; at += SCATTER_UNROLL) {
    Raw<TY, V> y[SCATTER_UNROLL];
    Words<V, TX> x[SCATTER_UNROLL];
    TX *to[SCATTER_UNROLL];
#pragma unroll
    for (int u = 0; u < SCATTER_UNROLL; u++) {
      const unsigned row = __shfl_sync(0xffffffffu, walk.row, at + u);
      const unsigned source = __shfl_sync(0xffffffffu, walk.source, at + u);
      to[u] = a.x + row * a.c + column;
      if (!mine || at + u >= walk.end) continue;
      y[u] = raw_load<TY, V>(a.y + source * a.c + column);
      if (whole >> (at + u) & 1) x[u] = words_load<V, TX>(to[u]);
    }
#pragma unroll
    for (int u = 0; u < SCATTER_UNROLL; u++) {
      if (!mine || at + u >= walk.end) continue;
      const unsigned bit = 1u << (at + u);
      add_to<V>(&sum, floats_of<TY, V>(y[u]));
      if (!(walk.ends & bit)) continue;
      if (whole & bit) {
        Floats<V> all = floats_of_words<V, TX>(x[u]);
        add_to<V>(&all, sum);
        x_store<V, TX>(to[u], all);
      } else {
        x_store<V, float>(walk.incoming & bit ? incoming : outgoing, sum);
      }
      sum = {};
    }
  }
}

/* Long runs: the block that has the chunk where one begins adds the partial sums. Which these are
 * is known before the partial sums are. A warp looks at 32 chunks. */
template <class TY, class TX, int V>
__global__ void __launch_bounds__(SCATTER_THREADS)
    crossing_kernel(Scatter<TY, TX> a, int64_t all_chunks) {
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * SCATTER_THREADS + threadIdx.x) * V;
  const int64_t chunk = blockIdx.x * 32 + threadIdx.x % 32, next_end = (chunk + 2) * CHUNK - 1;
  bool is_long = false;
  if (next_end < a.r) { /* it goes on to the end of the next chunk, and came not from before */
    const unsigned row = row_of(a.places[next_end]);
    is_long = row_of(a.places[next_end - CHUNK]) == row &&
              (chunk == 0 || row_of(a.places[chunk * CHUNK - 1]) != row);
  }
  unsigned todo = __ballot_sync(0xffffffffu, is_long);
  let_next_kernel_start();
  wait_for_kernel_before(); /* also with nothing to do: the next op relies on this kernel's end */
  for (; todo && column < a.c; todo &= todo - 1) {
    const int64_t first = blockIdx.x * 32 + __ffs(static_cast<int>(todo)) - 1;
    const unsigned row = row_of(a.places[(first + 1) * CHUNK]);
    int64_t chunks = 1, beyond = all_chunks - first; /* it reaches chunk 1, not `beyond` */
    while (beyond - chunks > 1) {
      const int64_t middle = (chunks + beyond) / 2;
      (row_of(a.places[(first + middle) * CHUNK]) == row ? chunks : beyond) = middle;
    }
    const float *partial = a.partial + first * 2 * a.c + column;
    Floats<V> sum = x_load<V, float>(partial + a.c);
#pragma unroll 8
    for (int64_t k = 1; k <= chunks; k++) add_to<V>(&sum, x_load<V, float>(partial + k * 2 * a.c));
    Floats<V> x = x_load<V, TX>(a.x + row * a.c + column);
    add_to<V>(&x, sum);
    x_store<V, TX>(a.x + row * a.c + column, x);
  }
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
  a.places = cuda_row_order(d, rows_R, x_NC, scratch);
  const int64_t strips = cuda_ceil(c, SCATTER_THREADS * V);
  const int64_t crossing_strips = cuda_ceil(c, SCATTER_THREADS * VC);
  require(crossing_strips <= UINT16_MAX);
  launch_behind(d, dim3(grid_of(chunks), grid_of(strips)), SCATTER_THREADS, 0,
                scatter_kernel<TY, TX, V>, a);
  launch_behind(d, dim3(grid_of(cuda_ceil(chunks, 32)), grid_of(crossing_strips)), SCATTER_THREADS,
                0, crossing_kernel<TY, TX, VC>, a, chunks);
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
