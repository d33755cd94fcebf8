/* Sampling one token per row: a block is a row. The CPU's algorithm (cpu/sample.c): what a filter
 * keeps is a Cut, found by bisecting the weights' bit patterns; nothing is sorted. Weights are the
 * CPU's to the bit, sums of them are doubles in a fixed order.
 *
 * The row's weights lie in shared memory, in groups of packs of four; a row too long for it has
 * them in scratch. A group belongs to one warp, and a thread always meets the same packs. */
#include "kernels/cuda/ops.h"

namespace {

enum { THREADS = 1024, WARPS = THREADS / 32, TILE = 128, MAX_GROUPS = 1024 };

struct Sample {
  SampleParams p;
  float inv_temp;
  int64_t v;
  int groups, tiles; /* a group is `tiles` times TILE ids; groups cover v */
  bool packs;        /* rows allow 16-byte accesses */
  const float *logits, *u;
  const uint8_t *banned; /* may be NULL */
  float *weights;        /* [B, groups * tiles * TILE]; NULL: shared memory */
  int32_t *token;
  float *logprob;
};

/* What a block knows of its row. */
struct Row {
  const Sample *a;
  const float *logits;
  float *w;    /* [groups * tiles * TILE]; first logits, then weights */
  double *cum; /* [groups]: sums of groups, each with all before it */
  int32_t *found;
  int lane, warp;
};

/* Keeps every id whose weight is above the threshold, and the first `ties` of those that equal it.
 */
struct Cut {
  float threshold;
  int64_t ties;
};

/* exp_f32 of cpu/vecmath.h, operation by operation. */
__device__ inline float exp_f32(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -105.0f ? -105.0f : x;
  const float magic = 12582912.0f;
  float t = fmaf(x, 1.44269504f, magic), n = t - magic;
  float r = fmaf(-n, 1.42860677e-06f, fmaf(-n, 0.693145752f, x)), p = 1.98412698e-4f;
  p = fmaf(p, r, 1.38888889e-3f);
  p = fmaf(p, r, 8.33333333e-3f);
  p = fmaf(p, r, 4.16666667e-2f);
  p = fmaf(p, r, 1.66666667e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  uint32_t i = __float_as_uint(t) - __float_as_uint(magic);
  uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(i) >> 1);
  return p * __uint_as_float((half + 127u) << 23) * __uint_as_float((i - half + 127u) << 23);
}

/* Calls f(first id, pack) for this thread's packs in order. */
template <class F>
__device__ inline void each_pack(const Row &r, F f) {
  int tiles = r.a->groups * r.a->tiles;
  for (int g = r.warp; g < r.a->groups; g += WARPS)
    for (int t = g * r.a->tiles; t < (g + 1) * r.a->tiles && t < tiles; t++) {
      int64_t j = static_cast<int64_t>(t) * TILE + 4 * r.lane;
      f(j, *reinterpret_cast<float4 *>(r.w + j));
    }
}
/* The same weight by weight. */
template <class F>
__device__ inline void each_weight(const Row &r, F f) {
  each_pack(r, [&](int64_t, float4 &w) {
    f(w.x);
    f(w.y);
    f(w.z);
    f(w.w);
  });
}

__device__ inline uint64_t block_max(uint64_t x) {
  __shared__ uint64_t part[WARPS];
  for (int o = 16; o > 0; o /= 2) {
    uint64_t other = __shfl_xor_sync(0xffffffffu, x, o);
    x = other > x ? other : x;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  x = part[threadIdx.x % 32];
  for (int o = 16; o > 0; o /= 2) {
    uint64_t other = __shfl_xor_sync(0xffffffffu, x, o);
    x = other > x ? other : x;
  }
  return x;
}

/* Orders as logit, then lowest id, do; NaN is as low as -infinity, no key is 0. */
__device__ inline uint64_t key_of(float x, int64_t id) {
  x = x == x ? x + 0.0f : -INFINITY; /* -0 becomes 0 */
  uint32_t bits = __float_as_uint(x);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ inline int32_t id_of(uint64_t key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

__device__ inline float4 logits_at(const Row &r, int64_t j) {
  int64_t v = r.a->v;
  if (r.a->packs && j + 4 <= v) return *reinterpret_cast<const float4 *>(r.logits + j);
  float4 x;
  x.x = j < v ? r.logits[j] : -INFINITY;
  x.y = j + 1 < v ? r.logits[j + 1] : -INFINITY;
  x.z = j + 2 < v ? r.logits[j + 2] : -INFINITY;
  x.w = j + 3 < v ? r.logits[j + 3] : -INFINITY;
  return x;
}

/* Four flags, of ids [j, j + 4), in the low bits: may be drawn. Ids from v on may not. */
__device__ inline uint32_t allowed_at(const Row &r, int64_t j, const uint8_t *banned) {
  uint32_t allowed = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (j + i < r.a->v && !(banned && banned[j + i])) allowed |= 1u << i;
  return allowed;
}

/* Logits to r.w; the largest key of those that may be drawn, and of all. */
__device__ inline void read_row(const Row &r, uint64_t *best, uint64_t *best_of_all) {
  uint64_t most = 0, all = 0;
  each_pack(r, [&](int64_t j, float4 &w) {
    w = logits_at(r, j);
    uint32_t allowed = allowed_at(r, j, r.a->banned);
    const float x[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint64_t key = j + i < r.a->v ? key_of(x[i], j + i) : 0;
      if (key > all) all = key;
      if (allowed >> i & 1 && key > most) most = key;
    }
  });
  *best = block_max(most);
  *best_of_all = r.a->banned ? block_max(all) : *best;
  if (*best == 0) __trap(); /* every token id is banned */
}

/* Logits become weights exp(logit / temperature - max), 0 where banned. */
__device__ inline void fill_weights(const Row &r, float max, const uint8_t *banned) {
  float t = r.a->inv_temp;
  each_pack(r, [&](int64_t j, float4 &w) {
    uint32_t allowed = allowed_at(r, j, banned);
    w.x = allowed & 1 ? exp_f32(fmaf(w.x, t, -max)) : 0;
    w.y = allowed & 2 ? exp_f32(fmaf(w.y, t, -max)) : 0;
    w.z = allowed & 4 ? exp_f32(fmaf(w.z, t, -max)) : 0;
    w.w = allowed & 8 ? exp_f32(fmaf(w.w, t, -max)) : 0;
  });
}

/* ---- cuts ---- */

__device__ inline float next_above(float x) { return __uint_as_float(__float_as_uint(x) + 1); }

/* Of the weights in [low, high]. */
__device__ inline int count_between(const Row &r, float low, float high) {
  int n = 0;
  each_weight(r, [&](float w) { n += w >= low && w <= high; });
  return block_sum(n);
}
__device__ inline double mass_between(const Row &r, float low, float high) {
  double sum = 0;
  each_weight(r, [&](float w) {
    if (w >= low && w <= high) sum += static_cast<double>(w);
  });
  return block_sum(sum);
}

/* The largest threshold in [low, 1] whose ids measure `wanted` or more, `low` if none. Those above
 * the interval that is left are measured already. */
template <class N, class Measure>
__device__ inline float bisect(float low_weight, N wanted, Measure measure) {
  uint32_t low = __float_as_uint(low_weight), high = __float_as_uint(1.0f);
  float top = INFINITY; /* of the interval; a weight can be 1 and a rounding */
  N above = 0;
  while (low < high) {
    uint32_t mid = low + (high - low + 1) / 2;
    N from_mid = above + measure(__uint_as_float(mid), top);
    if (from_mid >= wanted) {
      low = mid;
    } else {
      high = mid - 1;
      top = __uint_as_float(high);
      above = from_mid;
    }
  }
  return __uint_as_float(low);
}

/* The k heaviest ids. */
__device__ inline Cut cut_by_count(const Row &r, int k) {
  auto count = [&](float low, float high) { return count_between(r, low, high); };
  float threshold = bisect(0.0f, k, count);
  return {threshold, k - count(next_above(threshold), INFINITY)};
}

/* The fewest of the heaviest ids of `from` whose share of it reaches p. */
__device__ inline Cut cut_by_mass(const Row &r, Cut from, double p) {
  auto mass = [&](float low, float high) { return mass_between(r, low, high); };
  double whole = mass(next_above(from.threshold), INFINITY);
  double wanted =
      p * (whole + static_cast<double>(from.ties) * static_cast<double>(from.threshold));
  float threshold = bisect(from.threshold, wanted, mass);
  int64_t ties = threshold == from.threshold ? from.ties : count_between(r, threshold, threshold);
  double missing =
      (wanted - mass(next_above(threshold), INFINITY)) / static_cast<double>(threshold);
  if (missing < static_cast<double>(ties))
    ties = missing > 0 ? static_cast<int64_t>(ceil(missing)) : 0;
  return {threshold, ties};
}

/* ---- places ---- */

/* r.cum from value(weight) of every id; returns the sum of all. */
template <class Value>
__device__ inline double add_up(const Row &r, Value value) {
  int groups = r.a->groups;
  __syncthreads();
  for (int g = r.warp; g < groups; g += WARPS) {
    double sum = 0;
    for (int t = 0; t < r.a->tiles; t++) {
      int64_t j = static_cast<int64_t>(g * r.a->tiles + t) * TILE + 4 * r.lane;
      float4 w = *reinterpret_cast<const float4 *>(r.w + j);
      sum += (value(w.x) + value(w.y)) + (value(w.z) + value(w.w));
    }
    sum = warp_sum(sum);
    if (r.lane == 0) r.cum[g] = sum;
  }
  __syncthreads();
  if (r.warp == 0) {
    int each = (groups + 31) / 32, begin = min(r.lane * each, groups);
    int end = min(begin + each, groups);
    double sum = 0;
    for (int g = begin; g < end; g++) sum += r.cum[g];
    double before = sum;
    for (int o = 1; o < 32; o *= 2) {
      double up = __shfl_up_sync(0xffffffffu, before, o);
      if (r.lane >= o) before += up;
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (r.lane == 0) before = 0;
    for (int g = begin; g < end; g++) r.cum[g] = before += r.cum[g];
  }
  __syncthreads();
  return r.cum[groups - 1];
}

/* The id at which values, added in order of id after add_up, pass the point: of the first group
 * that does, or the last id of it with a value where rounding puts the point behind its end. -1
 * where sums are NaN. */
template <class Value>
__device__ inline int32_t place_of(const Row &r, double point, Value value) {
  if (r.warp == 0) {
    int group = -1;
    for (int g0 = 0; g0 < r.a->groups && group < 0; g0 += 32) {
      int g = g0 + r.lane;
      unsigned passes = __ballot_sync(0xffffffffu, g < r.a->groups && r.cum[g] > point);
      if (passes) group = g0 + __ffs(static_cast<int>(passes)) - 1;
    }
    double run = group > 0 ? r.cum[group - 1] : 0;
    int id = -1;
    for (int t = 0; group >= 0 && t < r.a->tiles; t++) {
      int64_t j = static_cast<int64_t>(group * r.a->tiles + t) * TILE + 4 * r.lane;
      float4 w = *reinterpret_cast<const float4 *>(r.w + j);
      const double x[4] = {value(w.x), value(w.y), value(w.z), value(w.w)};
      double to_here = (x[0] + x[1]) + (x[2] + x[3]), own = to_here;
      for (int o = 1; o < 32; o *= 2) {
        double up = __shfl_up_sync(0xffffffffu, to_here, o);
        if (r.lane >= o) to_here += up;
      }
      double at = run + (to_here - own);
      int hit = -1, last = -1;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        at += x[i];
        if (!(x[i] > 0)) continue;
        last = static_cast<int>(j) + i;
        if (hit < 0 && at > point) hit = last;
      }
      unsigned hits = __ballot_sync(0xffffffffu, hit >= 0);
      unsigned lasts = __ballot_sync(0xffffffffu, last >= 0);
      if (lasts) id = __shfl_sync(0xffffffffu, last, 31 - __clz(static_cast<int>(lasts)));
      if (hits) {
        id = __shfl_sync(0xffffffffu, hit, __ffs(static_cast<int>(hits)) - 1);
        break;
      }
      run += __shfl_sync(0xffffffffu, to_here, 31);
    }
    if (r.lane == 0) *r.found = id;
  }
  __syncthreads();
  return *r.found;
}

/* Weights become 0 where the filters cut; NaN stays. */
__device__ inline void filter_weights(const Row &r) {
  const SampleParams &p = r.a->p;
  Cut c = {0, 0}; /* ids of weight 0 cannot be drawn anyway */
  if (p.top_k > 0 && p.top_k < count_between(r, next_above(0), INFINITY))
    c = cut_by_count(r, p.top_k);
  if (p.top_p < 1) c = cut_by_mass(r, c, static_cast<double>(p.top_p));
  int32_t last_tie = INT32_MAX; /* the last id of those at the threshold that is kept */
  if (c.ties <= 0) {
    last_tie = -1;
  } else if (c.ties < count_between(r, c.threshold, c.threshold)) {
    auto tie = [&](float w) { return w == c.threshold ? 1.0 : 0.0; };
    add_up(r, tie);
    last_tie = place_of(r, static_cast<double>(c.ties) - 0.5, tie);
  }
  each_pack(r, [&](int64_t j, float4 &w) {
    auto cut = [&](float x, int64_t id) {
      return x < c.threshold || (x == c.threshold && id > last_tie) ? 0 : x;
    };
    w = make_float4(cut(w.x, j), cut(w.y, j + 1), cut(w.z, j + 2), cut(w.w, j + 3));
  });
}

template <bool SHARED>
__global__ __launch_bounds__(THREADS, 1) void sample_kernel(const __grid_constant__ Sample a) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int32_t found;
  int64_t b = blockIdx.x, padded = static_cast<int64_t>(a.groups) * a.tiles * TILE;
  Row r = {&a,
           a.logits + b * a.v,
           nullptr,
           reinterpret_cast<double *>(shared),
           &found,
           static_cast<int>(threadIdx.x % 32),
           static_cast<int>(threadIdx.x / 32)};
  r.w = SHARED ? reinterpret_cast<float *>(shared + sizeof(double) * MAX_GROUPS)
               : a.weights + b * padded;
  uint64_t best, best_of_all;
  read_row(r, &best, &best_of_all);
  int32_t token = id_of(best);
  auto weight = [](float w) { return static_cast<double>(w); };
  float max = r.logits[a.p.greedy ? id_of(best_of_all) : token] * a.inv_temp;
  fill_weights(r, max, a.p.greedy ? nullptr : a.banned);
  if (!a.p.greedy && (a.p.top_k > 0 || a.p.top_p < 1)) filter_weights(r);
  double sum = add_up(r, weight);
  if (!a.p.greedy) {
    int32_t drawn = place_of(r, static_cast<double>(a.u[b]) * sum, weight);
    if (drawn >= 0) token = drawn; /* else weights are NaN */
  }
  if (threadIdx.x != 0) return;
  float x = r.logits[token];
  double z = a.p.greedy ? static_cast<double>(x) - static_cast<double>(max)
                        : static_cast<double>(fmaf(x, a.inv_temp, -max));
  a.token[b] = token;
  a.logprob[b] = static_cast<float>(z - log(sum));
}

size_t shared_limit(Device *d) {
  int bytes = 0;
  CUDA_CHECK(
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda_of(d)->gpu));
  return static_cast<size_t>(bytes);
}

bool is_row(Tensor t, DType type, int64_t n) {
  return t.dtype == type && t.ndim == 1 && t.dim[0] == n;
}

}  // namespace

void cuda_sample(Device *d, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                 Tensor token_B, Tensor logprob_B) {
  int64_t batch = logits_BV.dim[0], v = logits_BV.dim[1];
  require(logits_BV.dtype == DT_F32 && logits_BV.ndim == 2 && is_row(token_B, DT_I32, batch));
  require(is_row(logprob_B, DT_F32, batch));
  require(p.greedy || (is_row(u_B, DT_F32, batch) && p.temperature > 0 && p.top_p > 0));
  require(!banned_V.data || (banned_V.dtype == DT_U8 && tensor_numel(banned_V) == v));
  require(v > 0 && v <= INT32_MAX - TILE * MAX_GROUPS);
  if (batch == 0) return;
  Sample a = {};
  a.p = p;
  a.inv_temp = p.greedy ? 1 : 1 / p.temperature;
  a.v = v;
  a.tiles = static_cast<int>(cuda_ceil(v, TILE * MAX_GROUPS));
  a.groups = static_cast<int>(cuda_ceil(v, TILE * a.tiles));
  a.packs = v % 4 == 0 && reinterpret_cast<uintptr_t>(logits_BV.data) % 16 == 0;
  a.logits = cuda_data<const float>(logits_BV);
  a.u = cuda_data<const float>(u_B);
  a.banned = cuda_data<const uint8_t>(banned_V);
  a.token = cuda_data<int32_t>(token_B);
  a.logprob = cuda_data<float>(logprob_B);
  size_t weights =
      sizeof(float) * static_cast<size_t>(a.groups) * static_cast<size_t>(a.tiles) * TILE;
  size_t shared = sizeof(double) * MAX_GROUPS;
  unsigned blocks = static_cast<unsigned>(batch);
  if (shared + weights + 1024 <= shared_limit(d)) { /* 1024: what the kernel has besides */
    shared += weights;
    CUDA_CHECK(cudaFuncSetAttribute(sample_kernel<true>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)));
    sample_kernel<true><<<blocks, THREADS, shared, cuda_stream(d)>>>(a);
  } else {
    a.weights = static_cast<float *>(cuda_scratch(d, weights * static_cast<size_t>(batch)));
    sample_kernel<false><<<blocks, THREADS, shared, cuda_stream(d)>>>(a);
  }
  CUDA_LAUNCHED();
}
