/* A row's weights, what sampling does to logits before they become weights, and what filters leave
 * of them. For sample.cu. */
#ifndef KERNELS_CUDA_SAMPLE_FILTER_H
#define KERNELS_CUDA_SAMPLE_FILTER_H

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

/* The largest threshold in [low_weight, heaviest] whose ids measure enough, `low_weight` if none.
 * The heaviest weight is 1 but for rounding, or NaN. Those above the interval that is left are
 * measured already; a single id in it is the answer. */
template <bool MASS, int PACKS, class Enough>
__device__ inline float bisect(Row<PACKS> &r, float low_weight, float heaviest, Enough enough) {
  uint32_t low = __float_as_uint(low_weight), high = __float_as_uint(heaviest > 1 ? heaviest : 1);
  float top = INFINITY; /* of the interval */
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
__device__ inline Cut cut_by_count(Row<PACKS> &r, float heaviest, int k) {
  float threshold = bisect<false>(r, 0, heaviest, [&](Measure m) { return m.count >= k; });
  return {threshold, k - measure<false>(r, next_above(threshold), INFINITY).count};
}

/* The fewest of the heaviest ids of `from` whose share of it reaches p. */
template <int PACKS>
__device__ inline Cut cut_by_mass(Row<PACKS> &r, Cut from, float heaviest, double p) {
  double whole = measure<true>(r, next_above(from.threshold), INFINITY).mass;
  double wanted =
      p * (whole + static_cast<double>(from.ties) * static_cast<double>(from.threshold));
  float threshold =
      bisect<true>(r, from.threshold, heaviest, [&](Measure m) { return m.mass >= wanted; });
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
    c = cut_by_count(r, heaviest, p.top_k);
  if (p.top_p < 1) c = cut_by_mass(r, c, heaviest, static_cast<double>(p.top_p));
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

}  // namespace

#endif
