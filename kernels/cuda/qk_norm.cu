/* RMSNorm of each query and key head by itself, in front of the rotary embedding (Qwen3).
 *
 * A head is as many lanes of a warp as it has 16-byte accesses, rounded up to a power of two. Heads
 * lie next to each other over all rows: head u of the tensor begins at element u * dim. Heads that
 * are too wide or not aligned go through kernels that take a warp per head and read it twice. */
#include <type_traits>

#include "kernels/cuda/columns.h"

template <class T>
struct QkNorm {
  int n, q_heads, k_heads, dim;
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

/* Over LANES neighbouring lanes, a power of two; every lane of the warp calls it. */
template <int LANES>
__device__ inline float lanes_sum(float x) {
#pragma unroll
  for (int o = LANES / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}

/* Calls f with the lanes of a head of so many accesses, as a constant. */
template <class F>
static void by_lanes(int64_t accesses, F f) {
  if (accesses <= 4)
    f(std::integral_constant<int, 4>());
  else if (accesses <= 8)
    f(std::integral_constant<int, 8>());
  else if (accesses <= 16)
    f(std::integral_constant<int, 16>());
  else
    f(std::integral_constant<int, 32>());
}

/* The heads of one group of lanes: head h of the rows row, row + step, and so on, `mine` of them.
 * The groups of all blocks share out the `per_row` heads of a row; those that are left over have
 * none. h stays, so its weight does. Lanes of a warp go on together, for `turns`. */
struct HeadWalk {
  int h, step, mine, turns;
  int64_t row;
  __device__ HeadWalk(int n, int per_row, int groups, int group) {
    const int64_t all = static_cast<int64_t>(gridDim.x) * groups;
    const int64_t me = static_cast<int64_t>(blockIdx.x) * groups + group;
    row = me / per_row;
    h = static_cast<int>(me - row * per_row);
    step = static_cast<int>(all / per_row);
    turns = (n + step - 1) / step;
    mine = row < step && row < n ? static_cast<int>((n - row + step - 1) / step) : 0;
  }
};
/* Blocks for that: as many as are resident, and at least a group for each head of a row. */
template <class Kernel>
static int64_t walk_blocks(Device *d, Kernel kernel, int64_t n, int per_row, int groups,
                           int unroll) {
  const int64_t fewest = cuda_ceil(per_row, groups);
  const int64_t blocks = resident_blocks(
      d, kernel, QK_THREADS, 0, cuda_ceil(n * per_row, static_cast<int64_t>(groups) * unroll));
  return blocks > fewest ? blocks : fewest;
}

template <int V>
__device__ inline float dot(const Floats<V> &x, const Floats<V> &y) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < V; k++) sum += x.v[k] * y.v[k];
  return sum;
}

template <class T, int LANES>
__global__ void __launch_bounds__(QK_THREADS, 4) qk_norm_fwd_kernel(QkNorm<T> a) {
  constexpr int V = wide<T>, groups = QK_THREADS / LANES;
  const int group = static_cast<int>(threadIdx.x) / LANES;
  const int at = static_cast<int>(threadIdx.x) % LANES * V;
  const HeadWalk walk(a.n, a.heads(), groups, group);
  const int mine = at < a.dim ? walk.mine : 0;
  const bool is_value = walk.h >= a.normed();
  const float over_dim = 1.0f / static_cast<float>(a.dim);
  const int64_t first = a.head(walk.row, walk.h) * a.dim + at;
  const int64_t stride = walk.step * static_cast<int64_t>(a.heads()) * a.dim;
  const T *from = a.raw + first;
  T *to = a.out + first;
  float *stat = is_value || at > 0 || !a.rstd ? nullptr : a.rstd_of(walk.row, walk.h);
  Floats<V> w = {};
  if (mine > 0 && !is_value) w = floats_load<T, V>((walk.h < a.q_heads ? a.wq : a.wk) + at);
  for (int t = 0; t < walk.turns; t += QK_UNROLL) {
    Raw<T, V> x[QK_UNROLL];
#pragma unroll
    for (int u = 0; u < QK_UNROLL; u++, from += stride) {
      x[u] = {};
      if (t + u < mine) x[u] = raw_load<T, V>(from);
    }
#pragma unroll
    for (int u = 0; u < QK_UNROLL; u++, to += stride) {
      Floats<V> xf = floats_of<T, V>(x[u]);
      const float rstd = rsqrtf(lanes_sum<LANES>(dot<V>(xf, xf)) * over_dim + a.eps);
#pragma unroll
      for (int k = 0; k < V; k++) xf.v[k] *= rstd * w.v[k];
      if (!is_value) x[u] = raw_of<T, V>(xf);
      if (t + u < mine) raw_store<T, V>(to, x[u]);
      if (t + u < mine && stat) stat[(t + u) * static_cast<int64_t>(walk.step) * a.normed()] = rstd;
    }
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

/* As in rmsnorm_bwd, with xhat = x rstd: dx = rstd (w dy - xhat mean(w dy xhat)), over dy. A
 * thread's part of dw is of the one head that it walks. partial is [gridDim.x, 2, dim]: of the
 * block's queries, and of its keys. */
template <class T, int LANES>
__global__ void __launch_bounds__(QK_THREADS, 3) qk_norm_bwd_kernel(QkNorm<T> a, float *partial) {
  constexpr int UNROLL = 2, V = wide<T>, groups = QK_THREADS / LANES, padded = LANES * V;
  __shared__ float part[QK_THREADS * V];
  __shared__ bool is_key[groups];
  const int group = static_cast<int>(threadIdx.x) / LANES;
  const int at = static_cast<int>(threadIdx.x) % LANES * V;
  const HeadWalk walk(a.n, a.normed(), groups, group);
  const int mine = at < a.dim ? walk.mine : 0;
  const float over_dim = 1.0f / static_cast<float>(a.dim);
  const int64_t first = a.head(walk.row, walk.h) * a.dim + at;
  const int64_t stride = walk.step * static_cast<int64_t>(a.heads()) * a.dim;
  const T *from = a.raw + first;
  const float *stat = a.rstd_of(walk.row, walk.h);
  T *from_dy = a.out + first, *to = from_dy;
  Floats<V> w = {}, dw = {};
  let_next_kernel_start();
  if (at == 0) is_key[group] = walk.h >= a.q_heads;
  if (mine > 0) w = floats_load<T, V>((walk.h < a.q_heads ? a.wq : a.wk) + at);
  for (int t = 0; t < walk.turns; t += UNROLL) {
    Raw<T, V> x[UNROLL], dy[UNROLL];
    float rstd[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++, from += stride, from_dy += stride) {
      x[u] = {};
      dy[u] = {};
      rstd[u] = 0;
      if (t + u >= mine) continue;
      x[u] = raw_load<T, V>(from);
      dy[u] = raw_load<T, V>(from_dy);
      rstd[u] = stat[(t + u) * static_cast<int64_t>(walk.step) * a.normed()];
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++, to += stride) {
      Floats<V> xhat = floats_of<T, V>(x[u]), g = floats_of<T, V>(dy[u]);
#pragma unroll
      for (int k = 0; k < V; k++) {
        xhat.v[k] *= rstd[u];
        dw.v[k] += g.v[k] * xhat.v[k];
        g.v[k] *= w.v[k];
      }
      const float slope = lanes_sum<LANES>(dot<V>(g, xhat)) * over_dim;
#pragma unroll
      for (int k = 0; k < V; k++) g.v[k] = rstd[u] * (g.v[k] - slope * xhat.v[k]);
      if (t + u < mine) floats_store<T, V>(to, g);
    }
  }
#pragma unroll
  for (int k = 0; k < V; k++) part[group * padded + at + k] = dw.v[k];
  __syncthreads();
  for (int j = threadIdx.x; j < a.dim; j += QK_THREADS) {
    float of_q = 0, of_k = 0;
    for (int g = 0; g < groups; g++) (is_key[g] ? of_k : of_q) += part[g * padded + j];
    partial[blockIdx.x * 2 * static_cast<int64_t>(a.dim) + j] = of_q;
    partial[(blockIdx.x * 2 + 1) * static_cast<int64_t>(a.dim) + j] = of_k;
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
  const int n = static_cast<int>(raw.dim[0]);
  return {n,
          s.n_heads,
          s.n_kv_heads,
          s.head_dim,
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

template <class T>
static void qk_norm_fwd(Device *d, QkNorm<T> a) {
  by_lanes(a.dim / wide<T>, [&]<int LANES>(std::integral_constant<int, LANES>) {
    auto kernel = qk_norm_fwd_kernel<T, LANES>;
    int64_t blocks = walk_blocks(d, kernel, a.n, a.heads(), QK_THREADS / LANES, QK_UNROLL);
    kernel<<<grid_of(blocks), QK_THREADS, 0, cuda_stream(d)>>>(a);
    CUDA_LAUNCHED();
  });
}

template <class T>
static void qk_norm_fwd_any(Device *d, QkNorm<T> a) {
  const int64_t blocks = cuda_ceil(static_cast<int64_t>(a.n) * a.heads(), QK_THREADS / 32);
  qk_norm_fwd_any_kernel<T><<<grid_of(blocks), QK_THREADS, 0, cuda_stream(d)>>>(a);
  CUDA_LAUNCHED();
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
    fits ? qk_norm_fwd<T>(d, a) : qk_norm_fwd_any<T>(d, a);
  });
}

template <class T>
static void qk_norm_bwd(Device *d, QkNorm<T> a, float *dwq, float *dwk) {
  constexpr int FEWEST_TURNS = 16;
  const int64_t stride = 2 * a.dim;
  by_lanes(a.dim / wide<T>, [&]<int LANES>(std::integral_constant<int, LANES>) {
    auto kernel = qk_norm_bwd_kernel<T, LANES>;
    int64_t blocks = walk_blocks(d, kernel, a.n, a.normed(), QK_THREADS / LANES, FEWEST_TURNS);
    float *partial =
        static_cast<float *>(cuda_scratch(d, sizeof(float) * static_cast<size_t>(blocks * stride)));
    kernel<<<grid_of(blocks), QK_THREADS, 0, cuda_stream(d)>>>(a, partial);
    CUDA_LAUNCHED();
    cuda_sum_partials(d, a.dim, {partial, blocks, stride, dwq},
                      {partial + a.dim, blocks, stride, dwk});
  });
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
