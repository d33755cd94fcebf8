/* A row of token ids spread over the registers of a cluster of blocks: passes over it, sums across
 * the cluster in a fixed order, and the id at which a running sum passes a point. For sample.cu. */
#ifndef KERNELS_CUDA_SAMPLE_ROW_H
#define KERNELS_CUDA_SAMPLE_ROW_H

#include "kernels/cuda/cluster.h"
#include "kernels/cuda/mma.h"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / 32, TILE = 128, PACK_IDS = 4 * THREADS;
constexpr int MAX_CLUSTER = 8, MAX_PACKS = 256; /* of a thread, in scratch */

struct Sample {
  SampleParams p;
  float inv_temp;
  int64_t v;
  int cluster, packs; /* blocks of a row; packs of a thread */
  bool aligned;       /* rows allow 16-byte accesses */
  const float *logits, *u;
  const uint8_t *banned; /* may be NULL */
  uint8_t *seen;         /* [slots, seen_width] bits; NULL: no repetition penalty */
  int seen_width, slots;
  const int32_t *slot, *newest;
  uint8_t *kept; /* [steps, B, (V + 7) / 8] bits; may be NULL */
  const int32_t *step;
  int steps;
  float4 *weights; /* [B, cluster, packs, THREADS]; only where registers do not hold them */
  int32_t *token;
  float *logprob;
};

/* Of some of the row's ids: how many, and what they weigh. */
struct alignas(16) Measure {
  int count;
  double mass;
};

/* What a block shares with itself and its cluster. */
struct Shared {
  uint64_t full[2]; /* for exchange: barriers, and what the blocks of the cluster sent */
  Measure in[2][MAX_CLUSTER];
  Measure part[WARPS];
  uint64_t key[WARPS];
  int32_t found;
};

/* A thread's share of its row. PACKS: in registers, the rest of which weigh nothing; 0: in scratch.
 */
template <int PACKS>
struct Row {
  const Sample &a;
  const float *logits;
  uint8_t *seen; /* the row's bits; NULL: it has had no ids, or there is no penalty */
  int newest;
  Shared *shared;
  double *cum;    /* [packs * WARPS]: sums of the block's tiles, each with all before it */
  double base;    /* the same of the blocks before this one */
  double of_rank; /* lane k: of block k */
  int rank, lane, warp, turn;
  float4 *memory;
  float4 pack[PACKS > 0 ? PACKS : 1];

  /* The first id of a pack; v where there is none. */
  __device__ int id(int i) const {
    if (i >= a.packs) return static_cast<int>(a.v);
    return (rank * a.packs + i) * PACK_IDS + warp * TILE + 4 * lane;
  }
};

/* Calls f(number, pack) for this thread's packs in order. */
template <int PACKS, class F>
__device__ inline void each_pack(Row<PACKS> &r, F f) {
  if constexpr (PACKS > 0) {
#pragma unroll
    for (int i = 0; i < PACKS; i++) f(i, r.pack[i]);
  } else {
    for (int i = 0; i < r.a.packs; i++) f(i, r.memory[i * THREADS]);
  }
}
/* The same weight by weight. */
template <int PACKS, class F>
__device__ inline void each_weight(Row<PACKS> &r, F f) {
  each_pack(r, [&](int, float4 &w) {
    f(w.x);
    f(w.y);
    f(w.z);
    f(w.w);
  });
}

/* ---- across the cluster ---- */

__device__ inline int cluster_rank(int cluster) { return static_cast<int>(blockIdx.x) % cluster; }
/* Lane k of each warp gets rank k's numbers, which all threads of a block agree on. Two places take
 * turns: who sends to one again has had from the other what this block sent behind a __syncthreads,
 * so all its threads had read. */
template <int PACKS>
__device__ inline Measure exchange(Row<PACKS> &r, Measure mine) {
#if __CUDA_ARCH__ >= 900
  if (r.a.cluster == 1) return mine;
  int place = r.turn % 2, phase = r.turn / 2 % 2, thread = static_cast<int>(threadIdx.x);
  Measure *in = r.shared->in[place], each = {0, 0};
  uint64_t *full = r.shared->full + place;
  r.turn++;
  if (thread < r.a.cluster)
    cluster_send(cluster_at(in + r.rank, thread), cluster_at(full, thread),
                 *reinterpret_cast<const float4 *>(&mine));
  barrier_wait(shared_at(full), phase);
  if (thread == 0) barrier_expect(shared_at(full), r.a.cluster * static_cast<int>(sizeof mine));
  if (r.lane < r.a.cluster) each = in[r.lane];
  return each;
#else
  return mine; /* clusters of one */
#endif
}
/* Before the first exchange; the blocks of a cluster have met behind it. */
__device__ inline void open_exchange(const Sample &a, Shared *shared) {
#if __CUDA_ARCH__ >= 900
  if (a.cluster == 1) return;
  cluster_open(shared->full, 2, a.cluster * static_cast<int>(sizeof(Measure)));
  cluster_meet();
#endif
}

/* Over the row, in a fixed order; all threads get it. The mass only where it is asked for. */
template <bool MASS, int PACKS>
__device__ inline Measure row_sum(Row<PACKS> &r, Measure x) {
  x.count = __reduce_add_sync(0xffffffffu, x.count);
  if (MASS) x.mass = warp_sum(x.mass);
  __syncthreads();
  if (r.lane == 0) r.shared->part[r.warp] = x;
  __syncthreads();
  x = r.shared->part[r.lane % WARPS];
  x.count = __reduce_add_sync(0xffffffffu, r.lane < WARPS ? x.count : 0);
#pragma unroll
  for (int o = WARPS / 2; MASS && o > 0; o /= 2) x.mass += __shfl_xor_sync(0xffffffffu, x.mass, o);
  Measure each = exchange(r, x), sum = {0, 0};
  for (int k = 0; k < r.a.cluster; k++) {
    sum.count += __shfl_sync(0xffffffffu, each.count, k);
    if (MASS) sum.mass += __shfl_sync(0xffffffffu, each.mass, k);
  }
  return sum;
}

__device__ inline uint64_t warp_max(uint64_t x) {
  for (int o = 16; o > 0; o /= 2) {
    uint64_t other = __shfl_xor_sync(0xffffffffu, x, o);
    x = other > x ? other : x;
  }
  return x;
}
template <int PACKS>
__device__ inline uint64_t row_max(Row<PACKS> &r, uint64_t x) {
  x = warp_max(x);
  __syncthreads();
  if (r.lane == 0) r.shared->key[r.warp] = x;
  __syncthreads();
  x = warp_max(r.shared->key[r.lane % WARPS]);
  Measure each = exchange(r, {0, __longlong_as_double(static_cast<long long>(x))});
  return warp_max(static_cast<uint64_t>(__double_as_longlong(each.mass)));
}

/* ---- places ---- */

template <class Value>
__device__ inline double pack_sum(const float4 &w, Value value) {
  return (value(w.x) + value(w.y)) + (value(w.z) + value(w.w));
}

/* r.cum becomes what it says of itself, from the sums of tiles that are in it; returns the block's
 * sum. */
template <int PACKS>
__device__ inline double add_tiles(Row<PACKS> &r) {
  int tiles = r.a.packs * WARPS;
  __syncthreads();
  if (r.warp == 0) {
    int each = (tiles + 31) / 32, begin = min(r.lane * each, tiles), end = min(begin + each, tiles);
    double sum = 0;
    for (int g = begin; g < end; g++) sum += r.cum[g];
    for (int o = 1; o < 32; o *= 2) {
      double up = __shfl_up_sync(0xffffffffu, sum, o);
      if (r.lane >= o) sum += up;
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1);
    if (r.lane == 0) before = 0;
    for (int g = begin; g < end; g++) r.cum[g] = before += r.cum[g];
  }
  __syncthreads();
  return r.cum[tiles - 1];
}

/* Sums of value(weight), which place_of looks into; returns that of the row. */
template <int PACKS, class Value>
__device__ inline double add_up(Row<PACKS> &r, Value value) {
  __syncthreads();
  each_pack(r, [&](int i, float4 &w) {
    if (i >= r.a.packs) return;
    double sum = warp_sum(pack_sum(w, value));
    if (r.lane == 0) r.cum[i * WARPS + r.warp] = sum;
  });
  r.of_rank = exchange(r, {0, add_tiles(r)}).mass;
  double run = 0;
  for (int k = 0; k < r.a.cluster; k++) {
    if (k == r.rank) r.base = run;
    run += __shfl_sync(0xffffffffu, r.of_rank, k);
  }
  return run;
}

/* The id of a tile at which values, added in order of id to `run`, pass the point: or the last with
 * a value where rounding puts the point behind its end. */
template <class Value>
__device__ inline int32_t place_in_tile(float4 w, int first_id, int lane, double run, double point,
                                        Value value) {
  const double x[4] = {value(w.x), value(w.y), value(w.z), value(w.w)};
  double own = pack_sum(w, value), to_here = own;
  for (int o = 1; o < 32; o *= 2) {
    double up = __shfl_up_sync(0xffffffffu, to_here, o);
    if (lane >= o) to_here += up;
  }
  double at = run + (to_here - own);
  int hit = -1, last = -1;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    at += x[e];
    if (!(x[e] > 0)) continue;
    last = first_id + e;
    if (hit < 0 && at > point) hit = last;
  }
  unsigned hits = __ballot_sync(0xffffffffu, hit >= 0);
  unsigned lasts = __ballot_sync(0xffffffffu, last >= 0);
  if (hits) return __shfl_sync(0xffffffffu, hit, __ffs(static_cast<int>(hits)) - 1);
  return lasts ? __shfl_sync(0xffffffffu, last, 31 - __clz(static_cast<int>(lasts))) : -1;
}

/* The id at which values, added in order of id after add_up, pass the point; -1 where sums are NaN.
 */
template <int PACKS, class Value>
__device__ inline int32_t place_of(Row<PACKS> &r, double point, Value value) {
  int owner = -1;
  double run = 0;
  for (int k = 0; k < r.a.cluster && owner < 0; k++) {
    run += __shfl_sync(0xffffffffu, r.of_rank, k);
    if (run > point) owner = k;
  }
  if (owner < 0) return -1;
  if (r.rank == owner) {
    int tiles = r.a.packs * WARPS, tile = -1;
    for (int g0 = 0; g0 < tiles && tile < 0; g0 += 32) {
      int g = g0 + r.lane;
      unsigned passes = __ballot_sync(0xffffffffu, g < tiles && r.base + r.cum[g] > point);
      if (passes) tile = g0 + __ffs(static_cast<int>(passes)) - 1;
    }
    each_pack(r, [&](int i, float4 &w) {
      if (i * WARPS + r.warp != tile) return;
      double before = tile > 0 ? r.base + r.cum[tile - 1] : r.base;
      int32_t id = place_in_tile(w, r.id(i), r.lane, before, point, value);
      if (r.lane == 0) r.shared->found = id;
    });
  }
  __syncthreads();
  return __shfl_sync(0xffffffffu, exchange(r, {r.shared->found, 0}).count, owner);
}

}  // namespace

#endif
