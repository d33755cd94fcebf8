/* Log-softmax over the vocabulary with the chosen token picked out, its entropy, and the gradient
 * of both. Per row and with z = logits * inv_temp: log p_v = z_v - lse, H = lse - sum p_v z_v.
 *
 * A block takes a row and reads it once: every thread keeps its own maximum so far, and its sums
 * relative to it. A row of an odd vocabulary starts anywhere: the elements before the first that is
 * aligned and behind the last go one by one. */
#include <cassert>
#include <cfloat>

#include "kernels/cuda/math.h"
#include "kernels/cuda/rows.h"

enum { ROW_THREADS = 512, ROW_UNROLL = 4, QUAD = 4 };

/* sum of exp(z - max), and of exp(z - max) (z - max). The first maximum is finite, so that rows may
 * begin with -infinity. */
struct RowSums {
  float max = -FLT_MAX, sum = 0, mean = 0;
  __device__ void raise(float to) {
    if (to <= max) return;
    float by = max - to, factor = exp_f32(by);
    mean = factor > 0 ? factor * (mean + by * sum) : 0.0f * sum; /* NaN stays */
    sum *= factor;
    max = to;
  }
  template <bool MEAN>
  __device__ void add(float z) {
    float e = exp_f32(z - max);
    sum += e;
    if constexpr (MEAN) mean += e > 0 ? e * (z - max) : e; /* 0 x -inf must not be NaN */
  }
};

template <bool MEAN, int N>
__device__ inline void add_all(RowSums *s, const float (&z)[N]) {
  float max = z[0];
#pragma unroll
  for (int i = 1; i < N; i++) max = fmaxf(max, z[i]);
  s->raise(max);
#pragma unroll
  for (int i = 0; i < N; i++) s->add<MEAN>(z[i]);
}

/* All threads get the sums of the row. */
__device__ inline RowSums block_rows(RowSums s) {
  __shared__ float part[ROW_THREADS / 32];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float max = warp_max(s.max);
  if (lane == 0) part[warp] = max;
  __syncthreads();
  s.raise(warp_max(lane < ROW_THREADS / 32 ? part[lane] : -FLT_MAX));
  s.sum = block_sum(s.sum);
  s.mean = block_sum(s.mean);
  return s;
}

/* Elements before the first that begins a cache line, where the tensor itself begins one, so that
 * the accesses of a warp are whole lines; elements before the rest that is no whole access; all.
 * Counted from the tensor's start, not by the address: the order of a sum must not depend on where
 * a tensor happens to lie. */
struct RowSpan {
  int64_t head, body, v;
};
__device__ inline RowSpan span_of(bool aligned, int64_t row, int64_t v) {
  if (!aligned) return {0, 0, v};
  constexpr int64_t LINE = 128 / sizeof(float);
  int64_t head = (LINE - row * v % LINE) % LINE;
  head = head < v ? head : v;
  return {head, head + (v - head) / QUAD * QUAD, v};
}

struct LogprobFwd {
  int64_t v;
  bool aligned;
  float inv_temp;
  const float *logits;
  const int32_t *target;
  float *logprob, *lse, *entropy;
};

template <bool ENTROPY>
__global__ void __launch_bounds__(ROW_THREADS) logprob_fwd_kernel(LogprobFwd a) {
  const float *x = a.logits + blockIdx.x * a.v;
  const RowSpan span = span_of(a.aligned, blockIdx.x, a.v);
  RowSums s;
  int64_t j = span.head + threadIdx.x * QUAD;
  constexpr int64_t STEP = ROW_THREADS * QUAD;
  for (; j + (ROW_UNROLL - 1) * STEP < span.body; j += ROW_UNROLL * STEP) {
    float z[ROW_UNROLL * QUAD];
#pragma unroll
    for (int u = 0; u < ROW_UNROLL; u++) {
      Floats<QUAD> few = floats_load<float, QUAD>(x + j + u * STEP);
#pragma unroll
      for (int k = 0; k < QUAD; k++) z[u * QUAD + k] = few.v[k] * a.inv_temp;
    }
    add_all<ENTROPY>(&s, z);
  }
  for (; j < span.body; j += STEP) {
    Floats<QUAD> few = floats_load<float, QUAD>(x + j);
#pragma unroll
    for (int k = 0; k < QUAD; k++) few.v[k] *= a.inv_temp;
    add_all<ENTROPY>(&s, few.v);
  }
  if (threadIdx.x < span.head) add_all<ENTROPY>(&s, {x[threadIdx.x] * a.inv_temp});
  for (j = span.body + threadIdx.x; j < a.v; j += ROW_THREADS)
    add_all<ENTROPY>(&s, {x[j] * a.inv_temp});
  s = block_rows(s);
  if (threadIdx.x > 0) return;
  const int32_t target = a.target[blockIdx.x];
  assert(target >= 0 && target < a.v);
  const float log_sum = logf(s.sum);
  a.lse[blockIdx.x] = s.max + log_sum;
  a.logprob[blockIdx.x] = x[target] * a.inv_temp - s.max - log_sum;
  if constexpr (ENTROPY) a.entropy[blockIdx.x] = log_sum - s.mean / s.sum;
}

void cuda_logprob_fwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp,
                      Tensor logprob_R, Tensor lse_R, Tensor entropy_R) {
  int64_t r = logits_RV.dim[0], v = logits_RV.dim[1];
  require(is_2d(logits_RV, DT_F32, r, v) && is_i32_1d(target_R, r) && is_f32_1d(logprob_R, r));
  require(is_f32_1d(lse_R, r) && (!entropy_R.data || is_f32_1d(entropy_R, r)) && inv_temp > 0);
  if (r == 0) return;
  LogprobFwd a = {v,
                  are_aligned(logits_RV),
                  inv_temp,
                  tensor_f32(logits_RV),
                  tensor_i32(target_R),
                  tensor_f32(logprob_R),
                  tensor_f32(lse_R),
                  tensor_f32(entropy_R)};
  auto kernel = entropy_R.data ? logprob_fwd_kernel<true> : logprob_fwd_kernel<false>;
  kernel<<<grid_of(r), ROW_THREADS, 0, cuda_stream(d)>>>(a);
  CUDA_LAUNCHED();
}

/* ---- backward ---- */

template <class T>
struct LogprobBwd {
  int64_t v;
  float inv_temp;
  const float *logits;
  const int32_t *target;
  const float *lse, *entropy, *dlogprob, *dentropy;
  T *dlogits;
};

/* What a row's elements have in common. */
struct RowSlope {
  float inv_temp, lse, dlogprob, entropy, dentropy;
};

/* d logprob / dz_v = [v = target] - p_v;  dH / dz_v = -p_v (log p_v + H). */
template <bool ENTROPY>
__device__ inline float slope_of(const RowSlope &s, float x, bool is_target) {
  float lp = x * s.inv_temp - s.lse, p = exp_f32(lp), slope = s.dlogprob;
  if constexpr (ENTROPY) slope = p > 0 ? slope + s.dentropy * (lp + s.entropy) : slope;
  return (is_target ? s.dlogprob : 0.0f) - p * slope;
}

/* Four elements, of which the first has the number j. dlogits may be logits. */
template <class T, bool ENTROPY, int V>
__device__ inline void slope_store(const RowSlope &s, Floats<V> x, int64_t j, int64_t target,
                                   T *to) {
#pragma unroll
  for (int k = 0; k < V; k++) x.v[k] = slope_of<ENTROPY>(s, x.v[k], j + k == target);
  floats_store<T, V>(to + j, x);
}

/* QUADS: rows of logits and of dlogits are aligned in the same places. */
template <class T, bool ENTROPY, bool QUADS>
__global__ void __launch_bounds__(ROW_THREADS) logprob_bwd_kernel(LogprobBwd<T> a) {
  const float *x = a.logits + blockIdx.x * a.v;
  T *dx = a.dlogits + blockIdx.x * a.v;
  const int64_t target = a.target[blockIdx.x];
  assert(target >= 0 && target < a.v);
  RowSlope s = {a.inv_temp, a.lse[blockIdx.x], a.dlogprob[blockIdx.x] * a.inv_temp, 0, 0};
  if constexpr (ENTROPY) {
    s.entropy = a.entropy[blockIdx.x];
    s.dentropy = a.dentropy[blockIdx.x] * a.inv_temp;
  }
  const RowSpan span = span_of(QUADS, blockIdx.x, a.v);
  int64_t j = span.head + threadIdx.x * QUAD;
  constexpr int64_t STEP = ROW_THREADS * QUAD;
  for (; j + (ROW_UNROLL - 1) * STEP < span.body; j += ROW_UNROLL * STEP) {
    Floats<QUAD> few[ROW_UNROLL];
#pragma unroll
    for (int u = 0; u < ROW_UNROLL; u++) few[u] = floats_load<float, QUAD>(x + j + u * STEP);
#pragma unroll
    for (int u = 0; u < ROW_UNROLL; u++)
      slope_store<T, ENTROPY>(s, few[u], j + u * STEP, target, dx);
  }
  for (; j < span.body; j += STEP)
    slope_store<T, ENTROPY>(s, floats_load<float, QUAD>(x + j), j, target, dx);
  if (threadIdx.x < span.head)
    slope_store<T, ENTROPY>(s, floats_load<float, 1>(x + threadIdx.x), threadIdx.x, target, dx);
  for (j = span.body + threadIdx.x; j < a.v; j += ROW_THREADS)
    slope_store<T, ENTROPY>(s, floats_load<float, 1>(x + j), j, target, dx);
}

void cuda_logprob_bwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor lse_R,
                      Tensor entropy_R, Tensor dlogprob_R, Tensor dentropy_R, Tensor dlogits_RV) {
  int64_t r = logits_RV.dim[0], v = logits_RV.dim[1];
  require(is_2d(logits_RV, DT_F32, r, v) && is_i32_1d(target_R, r) && is_f32_1d(dlogprob_R, r));
  require(is_f32_1d(lse_R, r) && inv_temp > 0 && is_2d(dlogits_RV, dlogits_RV.dtype, r, v));
  require(!dentropy_R.data || (is_f32_1d(dentropy_R, r) && is_f32_1d(entropy_R, r)));
  require(dlogits_RV.data != logits_RV.data || dlogits_RV.dtype == DT_F32);
  if (r == 0) return;
  bool quads = are_aligned(logits_RV, dlogits_RV), entropy = dentropy_R.data != nullptr;
  cuda_by_type(dlogits_RV.dtype, [&]<class T>(T) {
    LogprobBwd<T> a = {v,
                       inv_temp,
                       tensor_f32(logits_RV),
                       tensor_i32(target_R),
                       tensor_f32(lse_R),
                       tensor_f32(entropy_R),
                       tensor_f32(dlogprob_R),
                       tensor_f32(dentropy_R),
                       cuda_data<T>(dlogits_RV)};
    auto kernel =
        entropy
            ? (quads ? logprob_bwd_kernel<T, true, true> : logprob_bwd_kernel<T, true, false>)
            : (quads ? logprob_bwd_kernel<T, false, true> : logprob_bwd_kernel<T, false, false>);
    kernel<<<grid_of(r), ROW_THREADS, 0, cuda_stream(d)>>>(a);
    CUDA_LAUNCHED();
  });
}
