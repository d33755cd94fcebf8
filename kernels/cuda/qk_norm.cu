/* RMSNorm of each query and key head by itself, in front of the rotary embedding (Qwen3).
 *
 * A head is as many lanes of a warp as it has 16-byte accesses, rounded up to a power of two. Heads
 * lie next to each other over all rows: head u of the tensor begins at element u * dim. Heads that
 * are too wide or not aligned go through kernels that take a warp per head and read it twice. */
#include "kernels/cuda/columns.h"

template <class T>
struct QkNorm {
  int n, q_heads, k_heads, dim, lanes;
  float eps;
  const T *raw, *wq, *wk;
  T *out; /* forward: qkv; backward: dqkv */
  float *rstd;
  __host__ __device__ int heads() const { return q_heads + 2 * k_heads; }
  __host__ __device__ int normed() const { return q_heads + k_heads; }
  __device__ int64_t head(int64_t row, int h) const { return row * heads() + h; }
  __device__ float *rstd_of(int64_t row, int h) const { return rstd + row * normed() + h; }
};

enum { QK_THREADS = 256, QK_UNROLL = 4 };

/* Over 2^n neighbouring lanes; every lane of the warp calls it. */
__device__ inline float lanes_sum(float x, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}

/* Where a head is: walking by a fixed number of heads needs no division. */
struct HeadAt {
  int row, h; /* head h of the `per_row` of a row */
  __device__ HeadAt(int64_t head, int per_row)
      : row(static_cast<int>(head / per_row)),
        h(static_cast<int>(head - head / per_row * per_row)) {}
  __device__ void walk(const HeadAt &by, int per_row) {
    row += by.row;
    h += by.h;
    if (h < per_row) return;
    h -= per_row;
    row++;
  }
};

template <int V>
__device__ inline float dot(const Floats<V> &x, const Floats<V> &y) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < V; k++) sum += x.v[k] * y.v[k];
  return sum;
}

template <class T, int V>
__global__ void __launch_bounds__(QK_THREADS) qk_norm_fwd_kernel(QkNorm<T> a) {
  const int groups = QK_THREADS / a.lanes, group = static_cast<int>(threadIdx.x) / a.lanes;
  const int at = (static_cast<int>(threadIdx.x) - group * a.lanes) * V;
  const int64_t all = static_cast<int64_t>(a.n) * a.heads();
  const int64_t turn = static_cast<int64_t>(groups) * QK_UNROLL, all_turns = gridDim.x * turn;
  Floats<V> wq = {}, wk = {};
  if (at < a.dim) {
    wq = floats_load<T, V>(a.wq + at);
    wk = floats_load<T, V>(a.wk + at);
  }
  HeadAt here(blockIdx.x * turn + group, a.heads());
  const HeadAt step(groups, a.heads()), jump(all_turns - turn, a.heads());
  const float over_dim = 1.0f / static_cast<float>(a.dim);
  for (int64_t base = blockIdx.x * turn; base < all; base += all_turns) {
    Raw<T, V> x[QK_UNROLL];
#pragma unroll
    for (int u = 0; u < QK_UNROLL; u++) {
      const int64_t head = base + u * groups + group;
      x[u] = {};
      if (head < all && at < a.dim) x[u] = raw_load<T, V>(a.raw + head * a.dim + at);
    }
#pragma unroll
    for (int u = 0; u < QK_UNROLL; u++, here.walk(step, a.heads())) {
      Floats<V> xf = floats_of<T, V>(x[u]);
      const float sum = lanes_sum(dot<V>(xf, xf), a.lanes);
      if (here.row >= a.n || at >= a.dim) continue;
      if (here.h < a.normed()) {
        const float rstd = rsqrtf(sum * over_dim + a.eps);
        const bool is_query = here.h < a.q_heads;
        if (at == 0 && a.rstd) *a.rstd_of(here.row, here.h) = rstd;
#pragma unroll
        for (int k = 0; k < V; k++) xf.v[k] *= rstd * (is_query ? wq.v[k] : wk.v[k]);
        x[u] = raw_of<T, V>(xf);
      }
      raw_store<T, V>(a.out + (base + u * groups + group) * a.dim + at, x[u]);
    }
    here.walk(jump, a.heads());
  }
}

/* Any shape: a warp per head. */
template <class T>
__global__ void __launch_bounds__(QK_THREADS) qk_norm_fwd_any_kernel(QkNorm<T> a) {
  const int lane = threadIdx.x % 32;
  const int64_t head = static_cast<int64_t>(blockIdx.x) * (QK_THREADS / 32) + threadIdx.x / 32;
  if (head >= static_cast<int64_t>(a.n) * a.heads()) return;
  const int64_t row = head / a.heads();
  const int h = static_cast<int>(head - row * a.heads());
  const T *x = a.raw + head * a.dim, *w = h < a.q_heads ? a.wq : a.wk;
  float sum = 0;
  for (int j = lane; j < a.dim; j += 32) sum += to_float(x[j]) * to_float(x[j]);
  const float rstd = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(a.dim) + a.eps);
  const bool is_value = h >= a.normed();
  if (lane == 0 && a.rstd && !is_value) *a.rstd_of(row, h) = rstd;
  for (int j = lane; j < a.dim; j += 32)
    a.out[head * a.dim + j] =
        is_value ? x[j] : from_float<T>(to_float(x[j]) * rstd * to_float(w[j]));
}

/* As in rmsnorm_bwd, with xhat = x rstd: dx = rstd (w dy - xhat mean(w dy xhat)), over dy. The
 * first q_blocks blocks work on queries, the others on keys, so that a thread's part of dw is of
 * one of them. partial is [gridDim.x, dim]. */
template <class T, int V>
__global__ void __launch_bounds__(QK_THREADS)
    qk_norm_bwd_kernel(QkNorm<T> a, unsigned q_blocks, float *partial) {
  constexpr int UNROLL = 2;
  __shared__ float part[QK_THREADS * V];
  const bool keys = blockIdx.x >= q_blocks;
  const int groups = QK_THREADS / a.lanes, group = static_cast<int>(threadIdx.x) / a.lanes;
  const int at = (static_cast<int>(threadIdx.x) - group * a.lanes) * V;
  const int per_row = keys ? a.k_heads : a.q_heads, before = keys ? a.q_heads : 0;
  const int64_t step = (keys ? gridDim.x - q_blocks : q_blocks) * static_cast<int64_t>(groups);
  const int64_t start = (keys ? blockIdx.x - q_blocks : blockIdx.x) * static_cast<int64_t>(groups);
  const float over_dim = 1.0f / static_cast<float>(a.dim);
  Floats<V> w = {}, dw = {};
  if (at < a.dim) w = floats_load<T, V>((keys ? a.wk : a.wq) + at);
  HeadAt here(start + group, per_row);
  const HeadAt by(step, per_row);
  for (int64_t base = start; base < static_cast<int64_t>(a.n) * per_row; base += UNROLL * step) {
    Raw<T, V> x[UNROLL], dy[UNROLL];
    float rstd[UNROLL];
    int64_t to[UNROLL]; /* element of dqkv, or -1 */
#pragma unroll
    for (int u = 0; u < UNROLL; u++, here.walk(by, per_row)) {
      x[u] = {};
      dy[u] = {};
      rstd[u] = 0;
      to[u] = -1;
      if (here.row >= a.n || at >= a.dim) continue;
      to[u] = a.head(here.row, before + here.h) * a.dim + at;
      x[u] = raw_load<T, V>(a.raw + to[u]);
      dy[u] = raw_load<T, V>(a.out + to[u]);
      rstd[u] = *a.rstd_of(here.row, before + here.h);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      Floats<V> xhat = floats_of<T, V>(x[u]), g = floats_of<T, V>(dy[u]);
#pragma unroll
      for (int k = 0; k < V; k++) {
        xhat.v[k] *= rstd[u];
        dw.v[k] += g.v[k] * xhat.v[k];
        g.v[k] *= w.v[k];
      }
      const float slope = lanes_sum(dot<V>(g, xhat), a.lanes) * over_dim;
#pragma unroll
      for (int k = 0; k < V; k++) g.v[k] = rstd[u] * (g.v[k] - slope * xhat.v[k]);
      if (to[u] >= 0) floats_store<T, V>(a.out + to[u], g);
    }
  }
  const int width = a.lanes * V;
#pragma unroll
  for (int k = 0; k < V; k++) part[group * width + at + k] = dw.v[k];
  __syncthreads();
  for (int j = threadIdx.x; j < a.dim; j += QK_THREADS) {
    float sum = 0;
    for (int g = 0; g < groups; g++) sum += part[g * width + j];
    partial[blockIdx.x * static_cast<int64_t>(a.dim) + j] = sum;
  }
}

/* Any shape: a warp per head. */
template <class T>
__global__ void __launch_bounds__(QK_THREADS) qk_norm_bwd_any_kernel(QkNorm<T> a) {
  const int lane = threadIdx.x % 32;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (QK_THREADS / 32) + threadIdx.x / 32;
  if (i >= static_cast<int64_t>(a.n) * a.normed()) return;
  const int64_t row = i / a.normed();
  const int h = static_cast<int>(i - row * a.normed());
  const T *x = a.raw + a.head(row, h) * a.dim, *w = h < a.q_heads ? a.wq : a.wk;
  T *dy = a.out + a.head(row, h) * a.dim;
  float dot = 0;
  for (int j = lane; j < a.dim; j += 32) dot += to_float(dy[j]) * to_float(w[j]) * to_float(x[j]);
  const float rstd = a.rstd[i];
  const float slope = warp_sum(dot) * rstd * rstd / static_cast<float>(a.dim);
  for (int j = lane; j < a.dim; j += 32)
    dy[j] = from_float<T>(rstd * (to_float(dy[j]) * to_float(w[j]) - slope * to_float(x[j])));
}

/* Terms of dw: rows are the heads from `before` on, per_row in each token's row. */
template <class T>
struct QkTerms {
  QkNorm<T> a;
  int per_row, before;
  using Read = Floats<1>;
  __device__ Read read(int64_t i, int64_t j) const {
    const int64_t row = i / per_row;
    const int h = before + static_cast<int>(i - row * per_row);
    const int64_t at = a.head(row, h) * a.dim + j;
    return {{to_float(a.out[at]) * to_float(a.raw[at]) * *a.rstd_of(row, h)}};
  }
  __device__ Floats<1> terms(Read r) const { return r; }
};

static void check_shapes(Tensor raw_NQ, Tensor wq_D, Tensor wk_D, AttnShape s) {
  DType t = raw_NQ.dtype;
  require(raw_NQ.ndim == 2 && is_1d(wq_D, t, s.head_dim) && is_1d(wk_D, t, s.head_dim));
  require(raw_NQ.dim[0] <= INT32_MAX);
  require(raw_NQ.dim[1] == static_cast<int64_t>(s.n_heads + 2 * s.n_kv_heads) * s.head_dim);
}

template <class T>
static QkNorm<T> norm_of(Tensor raw, Tensor wq, Tensor wk, AttnShape s, Tensor out, Tensor rstd) {
  int lanes = 1;
  while (lanes * wide<T> < s.head_dim) lanes *= 2;
  return {static_cast<int>(raw.dim[0]),
          s.n_heads,
          s.n_kv_heads,
          s.head_dim,
          lanes,
          0,
          cuda_data<T>(raw),
          cuda_data<T>(wq),
          cuda_data<T>(wk),
          cuda_data<T>(out),
          tensor_f32(rstd)};
}

/* 32 lanes, at most, hold a head. */
static bool fits_lanes(DType t, int head_dim) {
  return is_wide(t, head_dim) && static_cast<size_t>(head_dim) * dtype_size(t) <= 32 * 16;
}

void cuda_qk_norm_fwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, float eps, AttnShape s,
                      Tensor qkv_NQ, Tensor rstd_NH) {
  int64_t n = raw_NQ.dim[0], q = raw_NQ.dim[1];
  check_shapes(raw_NQ, wq_D, wk_D, s);
  require(is_2d(qkv_NQ, raw_NQ.dtype, n, q));
  require(!rstd_NH.data || is_2d(rstd_NH, DT_F32, n, s.n_heads + s.n_kv_heads));
  if (n * q == 0) return;
  bool fits = fits_lanes(raw_NQ.dtype, s.head_dim) && are_aligned(raw_NQ, wq_D, wk_D, qkv_NQ);
  cuda_by_type(raw_NQ.dtype, [&]<class T>(T) {
    QkNorm<T> a = norm_of<T>(raw_NQ, wq_D, wk_D, s, qkv_NQ, rstd_NH);
    a.eps = eps;
    auto kernel = fits ? qk_norm_fwd_kernel<T, wide<T>> : qk_norm_fwd_any_kernel<T>;
    int64_t each = fits ? QK_THREADS / a.lanes * QK_UNROLL : QK_THREADS / 32;
    int64_t blocks = cuda_ceil(n * a.heads(), each);
    if (fits) blocks = resident_blocks(d, kernel, QK_THREADS, 0, blocks);
    kernel<<<grid_of(blocks), QK_THREADS, 0, cuda_stream(d)>>>(a);
    CUDA_LAUNCHED();
  });
}

template <class T>
static void qk_norm_bwd(Device *d, QkNorm<T> a, float *dwq, float *dwk) {
  constexpr int64_t FEWEST_TURNS = 16;
  auto kernel = qk_norm_bwd_kernel<T, wide<T>>;
  const int64_t each = QK_THREADS / a.lanes * FEWEST_TURNS;
  const int64_t normed = a.normed();
  int64_t blocks = resident_blocks(d, kernel, QK_THREADS, 0, cuda_ceil(a.n * normed, each));
  int64_t q_blocks = cuda_ceil(blocks * a.q_heads, normed);
  int64_t k_blocks = cuda_ceil(blocks * a.k_heads, normed), all = q_blocks + k_blocks;
  float *partial =
      static_cast<float *>(cuda_scratch(d, sizeof(float) * static_cast<size_t>(all * a.dim)));
  kernel<<<grid_of(all), QK_THREADS, 0, cuda_stream(d)>>>(a, grid_of(q_blocks), partial);
  CUDA_LAUNCHED();
  cuda_sum_partials(d, partial, q_blocks, a.dim, a.dim, dwq);
  cuda_sum_partials(d, partial + q_blocks * a.dim, k_blocks, a.dim, a.dim, dwk);
}

/* dw first: dqkv is overwritten. */
template <class T>
static void qk_norm_bwd_any(Device *d, QkNorm<T> a, float *dwq, float *dwk) {
  const int64_t n = a.n;
  cuda_column_sums<1>(d, n * a.q_heads, a.dim, QkTerms<T>{a, a.q_heads, 0}, dwq);
  cuda_column_sums<1>(d, n * a.k_heads, a.dim, QkTerms<T>{a, a.k_heads, a.q_heads}, dwk);
  qk_norm_bwd_any_kernel<<<grid_of(cuda_ceil(n * a.normed(), QK_THREADS / 32)), QK_THREADS, 0,
                           cuda_stream(d)>>>(a);
  CUDA_LAUNCHED();
}

void cuda_qk_norm_bwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, Tensor rstd_NH,
                      AttnShape s, Tensor dqkv_NQ, Tensor dwq_D, Tensor dwk_D) {
  int64_t n = raw_NQ.dim[0], q = raw_NQ.dim[1], dim = s.head_dim;
  check_shapes(raw_NQ, wq_D, wk_D, s);
  require(is_2d(dqkv_NQ, raw_NQ.dtype, n, q));
  require(is_2d(rstd_NH, DT_F32, n, s.n_heads + s.n_kv_heads));
  require(is_f32_1d(dwq_D, dim) && is_f32_1d(dwk_D, dim) && s.n_heads > 0 && s.n_kv_heads > 0);
  if (n * q == 0) return;
  bool fits = fits_lanes(raw_NQ.dtype, s.head_dim) && are_aligned(raw_NQ, wq_D, wk_D, dqkv_NQ);
  cuda_by_type(raw_NQ.dtype, [&]<class T>(T) {
    QkNorm<T> a = norm_of<T>(raw_NQ, wq_D, wk_D, s, dqkv_NQ, rstd_NH);
    fits ? qk_norm_bwd<T>(d, a, tensor_f32(dwq_D), tensor_f32(dwk_D))
         : qk_norm_bwd_any<T>(d, a, tensor_f32(dwq_D), tensor_f32(dwk_D));
  });
}
