/* Sampling one token per row. The CPU's algorithm (cpu/sample.c): what a filter keeps is a Cut,
 * found by bisecting the weights' bit patterns; nothing is sorted. Weights are the CPU's to the
 * bit, sums of them are doubles in a fixed order.
 *
 * A row belongs to a cluster of blocks, whose number follows from V alone (one where the card has
 * no clusters), and each thread keeps its weights in registers: packs of four ids, pack i of a warp
 * being TILE ids in a row. A pass over the row then costs little more than adding up across the
 * cluster. Only rows beyond what registers hold keep their weights in scratch. */
#include "kernels/cuda/ops.h"
#include "kernels/cuda/sample_row.h"

namespace {

/* Keeps every id whose weight is above the threshold, and the first `ties` of those that equal it.
 */
struct Cut {
  float threshold;
  int64_t ties;
};

/* exp_f32 of cpu/vecmath.h, operation by operation, for x up to 0 and a rounding. */
__device__ inline float exp_f32(float x) {
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

/* Orders as logit, then lowest id, do; NaN is as low as -infinity, no key is 0. */
__device__ inline uint64_t key_of(float x, int id) {
  x = x == x ? x + 0.0f : -INFINITY; /* -0 becomes 0 */
  uint32_t bits = __float_as_uint(x);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ inline int32_t id_of(uint64_t key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

__device__ inline float logit_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

/* ---- weights ---- */

/* Ids from v on are as low as can be. */
template <int PACKS>
__device__ inline float4 logits_at(const Row<PACKS> &r, int j) {
  int v = static_cast<int>(r.a.v);
  if (r.a.aligned && j + 4 <= v) return *reinterpret_cast<const float4 *>(r.logits + j);
  return make_float4(j < v ? r.logits[j] : -INFINITY, j + 1 < v ? r.logits[j + 1] : -INFINITY,
                     j + 2 < v ? r.logits[j + 2] : -INFINITY,
                     j + 3 < v ? r.logits[j + 3] : -INFINITY);
}

/* Whether an id is one at all, and may be drawn. */
__device__ inline bool allowed(const Sample &a, const uint8_t *banned, int id) {
  return id < static_cast<int>(a.v) && !(banned && banned[id]);
}

__device__ inline float penalized(float x, bool seen, float penalty) {
  return !seen ? x : x < 0 ? x * penalty : x / penalty;
}

/* A multiple of four ids: their bits lie in one byte. */
template <int PACKS>
__device__ inline void penalize_pack(const Row<PACKS> &r, int id, float4 &w) {
  if (id >= static_cast<int>(r.a.v)) return;
  unsigned bits = r.seen[id / 8] >> id % 8 & 15u;
  if (r.newest / 4 == id / 4) bits |= 1u << r.newest % 4;
  float penalty = r.a.p.repetition_penalty;
  w.x = penalized(w.x, bits & 1, penalty);
  w.y = penalized(w.y, bits & 2, penalty);
  w.z = penalized(w.z, bits & 4, penalty);
  w.w = penalized(w.w, bits & 8, penalty);
}

template <int PACKS>
__device__ inline float logit_of_id(const Row<PACKS> &r, int32_t id) {
  float x = r.logits[id];
  if (!r.seen) return x;
  return penalized(x, id == r.newest || (r.seen[id / 8] >> id % 8 & 1), r.a.p.repetition_penalty);
}

/* Logits to the packs; the key of the best id that may be drawn, and the largest logit of all. */
template <int PACKS>
__device__ inline uint64_t read_row(Row<PACKS> &r, float *largest) {
  float most = -INFINITY, all = -INFINITY;
  int best = -1;
  each_pack(r, [&](int i, float4 &w) { w = logits_at(r, r.id(i)); });
  if (r.seen) each_pack(r, [&](int i, float4 &w) { penalize_pack(r, r.id(i), w); });
  each_pack(r, [&](int i, float4 &w) {
    const float x[4] = {w.x, w.y, w.z, w.w};
    int id = r.id(i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      all = fmaxf(all, x[e]);
      bool better = x[e] > most || best < 0; /* ids ascend: of equals the first stays */
      if (!better || !allowed(r.a, r.a.banned, id + e)) continue;
      best = id + e;
      most = x[e] > most ? x[e] : most;
    }
  });
  uint64_t key = row_max(r, best < 0 ? 0 : key_of(most, best));
  if (key == 0) __trap(); /* every token id is banned */
  *largest = logit_of(r.a.banned ? row_max(r, key_of(all, 0)) : key);
  return key;
}

/* Logits become weights exp(logit / temperature - max), 0 where banned. */
template <int PACKS>
__device__ inline void fill_weights(Row<PACKS> &r, float max, const uint8_t *banned) {
  float t = r.a.inv_temp;
  each_pack(r, [&](int i, float4 &w) {
    int id = r.id(i);
    w.x = allowed(r.a, banned, id) ? exp_f32(fmaf(w.x, t, -max)) : 0;
    w.y = allowed(r.a, banned, id + 1) ? exp_f32(fmaf(w.y, t, -max)) : 0;
    w.z = allowed(r.a, banned, id + 2) ? exp_f32(fmaf(w.z, t, -max)) : 0;
    w.w = allowed(r.a, banned, id + 3) ? exp_f32(fmaf(w.w, t, -max)) : 0;
  });
}

/* ---- cuts ---- */

__device__ inline float next_above(float x) { return __uint_as_float(__float_as_uint(x) + 1); }

/* Of the weights in [low, high], low above 0; their mass only where it is asked for. */
template <bool MASS, int PACKS>
__device__ inline Measure measure(Row<PACKS> &r, float low, float high) {
  Measure m = {0, 0};
  each_weight(r, [&](float w) {
    bool in = w >= low && w <= high;
    m.count += in;
    if (MASS && in) m.mass += static_cast<double>(w);
  });
  return row_sum<MASS>(r, m);
}

/* The largest threshold in [low, 1] whose ids measure enough, `low_weight` if none. Those above the
 * interval that is left are measured already; a single id in it is the answer. */
template <bool MASS, int PACKS, class Enough>
__device__ inline float bisect(Row<PACKS> &r, float low_weight, Enough enough) {
  uint32_t low = __float_as_uint(low_weight), high = __float_as_uint(1.0f);
  float top = INFINITY; /* of the interval; a weight can be 1 and a rounding */
  Measure above = {0, 0};
  int from_low = INT32_MAX; /* ids from low on */
  while (low < high && from_low - above.count != 1) {
    uint32_t mid = low + (high - low + 1) / 2;
    Measure m = measure<MASS>(r, __uint_as_float(mid), top);
    m = {above.count + m.count, above.mass + m.mass};
    if (enough(m)) {
      low = mid;
      from_low = m.count;
    } else {
      high = mid - 1;
      top = __uint_as_float(high);
      above = m;
    }
  }
  if (low >= high) return __uint_as_float(low);
  float only = 0;
  each_weight(r, [&](float w) {
    if (w >= __uint_as_float(low) && w <= top) only = w;
  });
  return logit_of(row_max(r, key_of(only, 0)));
}

/* The k heaviest ids. */
template <int PACKS>
__device__ inline Cut cut_by_count(Row<PACKS> &r, int k) {
  float threshold = bisect<false>(r, 0, [&](Measure m) { return m.count >= k; });
  return {threshold, k - measure<false>(r, next_above(threshold), INFINITY).count};
}

/* The fewest of the heaviest ids of `from` whose share of it reaches p. */
template <int PACKS>
__device__ inline Cut cut_by_mass(Row<PACKS> &r, Cut from, double p) {
  double whole = measure<true>(r, next_above(from.threshold), INFINITY).mass;
  double wanted =
      p * (whole + static_cast<double>(from.ties) * static_cast<double>(from.threshold));
  float threshold = bisect<true>(r, from.threshold, [&](Measure m) { return m.mass >= wanted; });
  int64_t ties =
      threshold == from.threshold ? from.ties : measure<false>(r, threshold, threshold).count;
  double above = measure<true>(r, next_above(threshold), INFINITY).mass;
  double missing = (wanted - above) / static_cast<double>(threshold);
  if (missing < static_cast<double>(ties))
    ties = missing > 0 ? static_cast<int64_t>(ceil(missing)) : 0;
  return {threshold, ties};
}

/* Weights become 0 where the filters cut; NaN stays. heaviest: of all weights. */
template <int PACKS>
__device__ inline void filter_weights(Row<PACKS> &r, float heaviest) {
  const SampleParams &p = r.a.p;
  Cut c = {0, 0}; /* ids of weight 0 cannot be drawn anyway */
  if (p.top_k > 0 && p.top_k < measure<false>(r, next_above(0), INFINITY).count)
    c = cut_by_count(r, p.top_k);
  if (p.top_p < 1) c = cut_by_mass(r, c, static_cast<double>(p.top_p));
  int32_t last_tie = INT32_MAX; /* the last id of those at the threshold that is kept */
  if (c.ties <= 0) {
    last_tie = -1;
  } else if (c.ties < measure<false>(r, c.threshold, c.threshold).count) {
    auto tie = [&](float w) { return w == c.threshold ? 1.0 : 0.0; };
    add_up(r, tie);
    last_tie = place_of(r, static_cast<double>(c.ties) - 0.5, tie);
  }
  float least = p.min_p > 0 ? p.min_p * heaviest : 0;
  each_pack(r, [&](int i, float4 &w) {
    int id = r.id(i);
    auto cut = [&](float x, int at) {
      return x < c.threshold || (x == c.threshold && at > last_tie) || x < least ? 0 : x;
    };
    w = make_float4(cut(w.x, id), cut(w.y, id + 1), cut(w.z, id + 2), cut(w.w, id + 3));
  });
}

/* Two lanes have a byte's ids between them. */
template <int PACKS>
__device__ inline void write_kept(Row<PACKS> &r, int64_t b, int64_t batch) {
  int step = r.a.step ? *r.a.step : 0;
  int64_t width = (r.a.v + 7) / 8;
  if (step < 0 || step >= r.a.steps) __trap();
  uint8_t *bits = r.a.kept + (step * batch + b) * width;
  each_pack(r, [&](int i, float4 &w) {
    int id = r.id(i);
    unsigned four = (w.x > 0) | (w.y > 0) << 1 | (w.z > 0) << 2 | (w.w > 0) << 3;
    four |= __shfl_down_sync(0xffffffffu, four, 1) << 4;
    if (r.lane % 2 == 0 && id < static_cast<int>(r.a.v)) bits[id / 8] = static_cast<uint8_t>(four);
  });
}

template <int PACKS>
__device__ inline void find_seen(Row<PACKS> &r, int64_t b) {
  int slot = r.a.seen ? r.a.slot[b] : -1;
  if (slot < 0) return;
  r.newest = r.a.newest[b];
  if (slot >= r.a.slots || r.newest < 0 || r.newest >= r.a.v) __trap();
  r.seen = r.a.seen + static_cast<int64_t>(slot) * r.a.seen_width;
}

template <int PACKS>
__global__ __launch_bounds__(THREADS,
                             PACKS == 4 ? 2
                                        : 1) void sample_kernel(const __grid_constant__ Sample a) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ Shared shared;
  int rank = cluster_rank(a.cluster), thread = static_cast<int>(threadIdx.x);
  int64_t b = blockIdx.x / static_cast<unsigned>(a.cluster);
  Row<PACKS> r = {.a = a,
                  .logits = a.logits + b * a.v,
                  .seen = nullptr,
                  .newest = 0,
                  .shared = &shared,
                  .cum = reinterpret_cast<double *>(dynamic),
                  .base = 0,
                  .of_rank = 0,
                  .rank = rank,
                  .lane = thread % 32,
                  .warp = thread / 32,
                  .turn = 0,
                  .memory = nullptr,
                  .pack = {}};
  if (PACKS == 0)
    r.memory = a.weights + static_cast<int64_t>(blockIdx.x) * a.packs * THREADS + thread;
  find_seen(r, b);
  float largest;
  int32_t token = id_of(read_row(r, &largest));
  auto weight = [](float w) { return static_cast<double>(w); };
  float best = logit_of_id(r, token), max = a.p.greedy ? largest : best * a.inv_temp;
  fill_weights(r, max, a.p.greedy ? nullptr : a.banned);
  if (!a.p.greedy && (a.p.top_k > 0 || a.p.top_p < 1 || a.p.min_p > 0))
    filter_weights(r, exp_f32(fmaf(best, a.inv_temp, -max)));
  if (a.kept) write_kept(r, b, gridDim.x / static_cast<unsigned>(a.cluster));
  double sum = add_up(r, weight);
  if (!a.p.greedy) {
    int32_t drawn = place_of(r, static_cast<double>(a.u[b]) * sum, weight);
    if (drawn >= 0) token = drawn; /* else weights are NaN */
  }
  if (a.cluster > 1) cluster_barrier(); /* nobody reads the others' memory any more */
  if (rank != 0 || thread != 0) return;
  float x = logit_of_id(r, token);
  if (r.seen) r.seen[r.newest / 8] |= static_cast<uint8_t>(1u << r.newest % 8); /* all have read */
  double z = a.p.greedy ? static_cast<double>(x) - static_cast<double>(max)
                        : static_cast<double>(fmaf(x, a.inv_temp, -max));
  a.token[b] = token;
  a.logprob[b] = static_cast<float>(z - log(sum));
}

template <int PACKS>
void launch(cudaStream_t stream, const Sample &a, int64_t batch) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(a.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(batch * a.cluster));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = sizeof(double) * WARPS * static_cast<size_t>(a.packs);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = a.cluster > 1 ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, sample_kernel<PACKS>, a));
}

bool is_row(Tensor t, DType type, int64_t n) {
  return t.dtype == type && t.ndim == 1 && t.dim[0] == n;
}

/* Enough blocks for four packs to a thread. */
void cut_row(Sample *a, int arch) {
  a->cluster = 1;
  while (arch >= 90 && a->cluster < MAX_CLUSTER && a->cluster * 4 * PACK_IDS < a->v)
    a->cluster *= 2;
  a->packs = static_cast<int>(cuda_ceil(a->v, a->cluster * PACK_IDS));
}

void give_seen(Sample *a, SeenTokens s, int64_t batch) {
  Tensor bits = s.bits_SW;
  require(bits.dtype == DT_U8 && bits.ndim == 2 && bits.dim[1] == (a->v + 7) / 8);
  require(is_row(s.slot_B, DT_I32, batch) && is_row(s.newest_B, DT_I32, batch));
  require(bits.dim[0] <= INT32_MAX);
  a->seen = cuda_data<uint8_t>(bits);
  a->seen_width = static_cast<int>(bits.dim[1]);
  a->slots = static_cast<int>(bits.dim[0]);
  a->slot = cuda_data<const int32_t>(s.slot_B);
  a->newest = cuda_data<const int32_t>(s.newest_B);
}

void give_kept(Sample *a, KeptTokens k, int64_t batch) {
  Tensor bits = k.bits_TBW;
  require(!a->p.greedy && bits.dtype == DT_U8 && bits.ndim == 3 && bits.dim[1] == batch);
  require(bits.dim[2] == (a->v + 7) / 8 && bits.dim[0] <= INT32_MAX);
  a->kept = cuda_data<uint8_t>(bits);
  a->step = cuda_data<const int32_t>(k.step_1);
  a->steps = static_cast<int>(bits.dim[0]);
}

/* A thread has the eight ids of a byte. */
__global__ void keep_only_kernel(int64_t v, int64_t bytes, const uint8_t *bits, float *logits) {
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  int64_t width = (v + 7) / 8, row = i / width, first = i % width * 8;
  if (i >= bytes) return;
  unsigned byte = bits[i];
  float *x = logits + row * v + first;
  for (int e = 0; e < 8; e++)
    if (first + e < v && !(byte >> e & 1)) x[e] = -INFINITY;
}

}  // namespace

void cuda_keep_only(Device *d, Tensor bits_RW, Tensor logits_RV) {
  int64_t r = logits_RV.dim[0], v = logits_RV.dim[1], bytes = r * ((v + 7) / 8);
  require(logits_RV.dtype == DT_F32 && logits_RV.ndim == 2 && bits_RW.dtype == DT_U8);
  require(bits_RW.ndim == 2 && bits_RW.dim[0] == r && tensor_numel(bits_RW) == bytes);
  if (bytes == 0) return;
  keep_only_kernel<<<static_cast<unsigned>(cuda_ceil(bytes, 256)), 256, 0, cuda_stream(d)>>>(
      v, bytes, cuda_data<const uint8_t>(bits_RW), cuda_data<float>(logits_RV));
  CUDA_LAUNCHED();
}

void cuda_sample(Device *d, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                 SeenTokens seen, KeptTokens kept, Tensor token_B, Tensor logprob_B) {
  int64_t batch = logits_BV.dim[0], v = logits_BV.dim[1];
  require(logits_BV.dtype == DT_F32 && logits_BV.ndim == 2 && is_row(token_B, DT_I32, batch));
  require(is_row(logprob_B, DT_F32, batch));
  require(p.greedy || (is_row(u_B, DT_F32, batch) && p.temperature > 0 && p.top_p > 0));
  require(p.min_p >= 0 && p.min_p <= 1 && p.repetition_penalty >= 0);
  require(!banned_V.data || (banned_V.dtype == DT_U8 && tensor_numel(banned_V) == v));
  require(v > 0 && v <= INT32_MAX - MAX_PACKS * PACK_IDS);
  if (batch == 0) return;
  Sample a = {};
  a.p = p;
  a.inv_temp = p.greedy ? 1 : 1 / p.temperature;
  a.v = v;
  cut_row(&a, cuda_of(d)->arch);
  a.aligned = v % 4 == 0 && reinterpret_cast<uintptr_t>(logits_BV.data) % 16 == 0;
  a.logits = cuda_data<const float>(logits_BV);
  a.u = cuda_data<const float>(u_B);
  a.banned = cuda_data<const uint8_t>(banned_V);
  if (sample_penalizes(p)) give_seen(&a, seen, batch);
  if (kept.bits_TBW.data) give_kept(&a, kept, batch);
  a.token = cuda_data<int32_t>(token_B);
  a.logprob = cuda_data<float>(logprob_B);
  if (a.packs > MAX_PACKS)
    die("sampling takes up to %d token ids here, found %lld", MAX_PACKS * PACK_IDS * a.cluster,
        static_cast<long long>(v));
  if (a.packs <= 4) {
    launch<4>(cuda_stream(d), a, batch);
  } else if (a.packs <= 8) {
    launch<8>(cuda_stream(d), a, batch);
  } else if (a.packs <= 16) {
    launch<16>(cuda_stream(d), a, batch);
  } else {
    size_t packs = static_cast<size_t>(batch * a.cluster * a.packs) * THREADS;
    a.weights = static_cast<float4 *>(cuda_scratch(d, sizeof(float4) * packs));
    launch<0>(cuda_stream(d), a, batch);
  }
}
