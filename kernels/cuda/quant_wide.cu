/* quant_wide: blocks of up to 1024 in registers: every number is read once and written once.
 *
 * Some threads hold a block, four groups of eight each; blocks and rows are whole numbers of eights
 * and lie where four elements are read at once. What is done once for a block costs as much as
 * dozens of elements, so few threads share one. Several sources are read at a time and added in
 * order. */
#include "kernels/cuda/quant_int4.h"

enum { GROUPS = 4 }; /* of eight elements, of a thread */

/* One thread's share of one block. */
struct Share {
  QuantPlace b;
  int64_t i; /* the block's number */
  int lane, lanes;
  Eight e[GROUPS];

  __device__ int first(int k) const { return 4 * (lane + lanes * k); }
  __device__ bool has(int k) const { return 2 * first(k) < b.n; } /* if any */

  /* Where group k lies in a payload, and how far its second half is behind the first. */
  template <WireKind KIND>
  __device__ int64_t offset(int k) const {
    int64_t start = KIND == WIRE_INT4 ? b.half_bytes : b.at;
    int64_t at = start + 4 * lane, step = 4 * lanes * k;
    constexpr int bytes = KIND == WIRE_F32 ? 4 : KIND == WIRE_BF16 ? 2 : 1;
    return at * bytes + step * bytes;
  }
  template <WireKind KIND>
  __device__ int apart() const {
    return KIND == WIRE_F32 ? 2 * b.n : KIND == WIRE_BF16 ? b.n : b.n / 2;
  }
};

/* Sources, so that what is read fits in registers. */
__device__ constexpr int together(WireKind from) { return has_blocks(from) ? 2 : 1; }

/* ---- sources ---- */

template <WireKind KIND>
__device__ inline void start_with(Share &s, const char *payload) {
  if (s.b.n == 0) return;
#pragma unroll
  for (int k = 0; k < GROUPS; k++)
    if (s.has(k))
      s.e[k] = raw_decode<KIND>(raw_load<KIND>(payload + s.offset<KIND>(k), s.apart<KIND>()));
}

template <WireKind FROM>
struct Source {
  Raw<FROM> raw[GROUPS];
  float scale;
};

template <WireKind FROM>
__device__ inline void source_load(Source<FROM> &in, const Share &s, const QuantJob &job,
                                   const QuantPart &p, int r) {
  const char *payload = p.from_payload + r * p.stride;
  if (s.b.n == 0) return;
  if (has_blocks(FROM)) in.scale = scale_get(job.from_scale, p.from_scales + r * p.stride, s.i);
#pragma unroll
  for (int k = 0; k < GROUPS; k++)
    if (s.has(k)) in.raw[k] = raw_load<FROM>(payload + s.offset<FROM>(k), s.apart<FROM>());
}

/* FIRST: there is no sum yet. */
template <bool FIRST, WireKind FROM>
__device__ inline void source_add(const Source<FROM> &in, Share &s) {
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    Eight e = raw_decode<FROM>(in.raw[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float *sum = &s.e[k].v[i];
      if constexpr (has_blocks(FROM))
        *sum = FIRST ? __fmul_rn(e.v[i], in.scale) : __fmaf_rn(e.v[i], in.scale, *sum);
      else
        *sum = FIRST ? e.v[i] : __fadd_rn(*sum, e.v[i]);
    }
  }
}

/* N sources from r on, all read before the first is added. */
template <WireKind FROM, int N, bool FIRST>
__device__ inline void sources_add(Share &s, const QuantJob &job, const QuantPart &p, int r) {
  Source<FROM> in[N];
#pragma unroll
  for (int j = 0; j < N; j++) source_load(in[j], s, job, p, r + j);
  source_add<FIRST>(in[0], s);
#pragma unroll
  for (int j = 1; j < N; j++) source_add<false>(in[j], s);
}

/* ---- the sink ---- */

/* The largest |x| of a block that LANES threads hold, as bits. */
__device__ inline uint32_t share_most(const Share &s) {
  float most = 0;
#pragma unroll
  for (int k = 0; k < GROUPS; k++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (s.has(k)) most = largest(most, s.e[k].v[i]);
  return most_of_lanes(__float_as_uint(most), s.lanes);
}

/* Errors are read before and written behind what is sent. */
__device__ inline void errors_add(Share &s, const QuantPart &p, Raw<WIRE_BF16> *old) {
  const char *error = reinterpret_cast<const char *>(p.error);
  if (s.b.n == 0) return;
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    if (!s.has(k)) continue;
    old[k] = raw_load<WIRE_BF16>(error + s.offset<WIRE_BF16>(k), s.apart<WIRE_BF16>());
    Eight e = raw_decode<WIRE_BF16>(old[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) s.e[k].v[i] = __fadd_rn(s.e[k].v[i], e.v[i]);
  }
}

template <WireKind TO>
__device__ inline void error_store(const Share &s, const QuantPart &p, int k, const Raw<TO> &codes,
                                   float scale, const Raw<WIRE_BF16> &old) {
  Eight got = raw_decode<TO>(codes), error = raw_decode<WIRE_BF16>(old);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float value = has_blocks(TO) ? __fmul_rn(got.v[j], scale) : got.v[j];
    error.v[j] = isnan(scale) ? 0.0f : error_left(s.e[k].v[j], value, error.v[j], p.keep);
  }
  raw_store<WIRE_BF16>(reinterpret_cast<char *>(p.error) + s.offset<WIRE_BF16>(k),
                       s.apart<WIRE_BF16>(), raw_encode<WIRE_BF16>(error, 1));
}

template <WireKind TO>
__device__ inline void share_store(Share &s, const QuantJob &job, const QuantPart &p) {
  float scale = 1, inverse = 1;
  bool wild = false;
  const bool fed = p.error != nullptr;
  Raw<WIRE_BF16> old[GROUPS];
  if (fed) errors_add(s, p, old);
  if constexpr (has_blocks(TO)) {
    uint32_t most = share_most(s);
    scale = quant_scale(TO, job.to_scale, most);
    inverse = quant_inverse(scale);
    if (s.lane == 0 && s.b.n > 0) scale_put(job.to_scale, p.to_scales, s.i, scale);
    wild = most >= QUANT_WILD;
  }
  if (s.b.n == 0) return;
#pragma unroll
  for (int k = 0; k < GROUPS; k++) {
    if (!s.has(k)) continue;
    Raw<TO> codes = raw_encode<TO>(wild ? eight_tamed(s.e[k], TO, scale) : s.e[k], inverse);
    raw_store<TO>(p.to_payload + s.offset<TO>(k), s.apart<TO>(), codes);
    if (fed) error_store<TO>(s, p, k, codes, scale, old[k]);
  }
}

/* Calls f with the kind of the sink as a constant. Plain formats go to blocks here. */
template <WireKind KIND>
struct Kind {
  static constexpr WireKind value = KIND;
};
template <WireKind FROM, class F>
__device__ inline void by_kind(WireKind kind, F f) {
  if constexpr (has_blocks(FROM)) {
    if (kind == WIRE_F32) f(Kind<WIRE_F32>());
    if (kind == WIRE_BF16) f(Kind<WIRE_BF16>());
  }
  if (kind == WIRE_INT8) f(Kind<WIRE_INT8>());
  if (kind == WIRE_INT4) f(Kind<WIRE_INT4>());
  if (kind == WIRE_FP8) f(Kind<WIRE_FP8>());
}

/* ---- sums of int4 in integers, that quant_int4.cu does not take ---- */

/* Of eight elements: word j holds those of the nibbles j and j + 4. */
struct Int4Sums {
  uint32_t w[4];
};

template <bool FIRST>
__device__ inline void int4_add(Int4Sums &sum, uint32_t codes, uint32_t weight) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint32_t products = (codes >> 4 * j & 0x000f000fu) * weight;
    sum.w[j] = FIRST ? products : sum.w[j] + products;
  }
}

/* N sources from r on; returns their weights' sum. */
template <int N, bool FIRST>
__device__ inline uint32_t int4_sources(Int4Sums *sum, const Share &s, const QuantJob &job,
                                        const QuantPart &p, int r, float unit) {
  Source<WIRE_INT4> in[N];
  uint32_t all = 0;
#pragma unroll
  for (int j = 0; j < N; j++) source_load(in[j], s, job, p, r + j);
#pragma unroll
  for (int j = 0; j < N; j++) {
    uint32_t weight = int4_weight(in[j].scale, unit);
    all += weight;
#pragma unroll
    for (int k = 0; k < GROUPS; k++) {
      if (FIRST && j == 0)
        int4_add<true>(sum[k], in[j].raw[k].w[0], weight);
      else
        int4_add<false>(sum[k], in[j].raw[k].w[0], weight);
    }
  }
  return all;
}

/* The largest sum of a block that LANES threads hold. */
__device__ inline uint32_t int4_most(const Share &s, const Int4Sums *sum, uint32_t bias) {
  uint32_t high = bias | bias << 16, low = high;
#pragma unroll
  for (int k = 0; k < GROUPS; k++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (s.has(k)) high = __vmaxu2(high, sum[k].w[j]), low = __vminu2(low, sum[k].w[j]);
  uint32_t most = max(max(high & 0xffffu, high >> 16) - bias, bias - min(low & 0xffffu, low >> 16));
  return most_of_lanes(most, s.lanes);
}

/* Eight codes, the last first, each pushed in from below. */
__device__ inline Raw<WIRE_INT4> int4_encode(const Int4Sums &sum, uint32_t bias,
                                             uint32_t multiplier) {
  Raw<WIRE_INT4> r = {{0}};
#pragma unroll
  for (int i = 7; i >= 0; i--) {
    uint32_t one = i < 4 ? sum.w[i] & 0xffffu : sum.w[i - 4] >> 16;
    r.w[0] = __funnelshift_l(int4_code_high(one, bias, multiplier), r.w[0], 4);
  }
  return r;
}

/* Returns whether the block is done; sums in floats are for those that are not. */
__device__ inline bool int4_share(const Share &s, const QuantJob &job, const QuantPart &p) {
  float unit = s.b.n > 0 ? int4_unit(job, p, s.i) : 0;
  Int4Sums sum[GROUPS];
  uint32_t bias;
  int r = 0;
  if (p.n >= 4)
    bias = int4_sources<4, true>(sum, s, job, p, r, unit), r = 4;
  else
    bias = int4_sources<2, true>(sum, s, job, p, r, unit), r = 2;
  for (; r < p.n; r++) bias += int4_sources<1, false>(sum, s, job, p, r, unit);
  bias *= 8;
  uint32_t most = int4_most(s, sum, bias);
  if (unit == 0 || most < INT4_LEAST) return false;
  Int4Result result = int4_result(job.to_scale, unit, static_cast<float>(most));
  if (s.lane == 0) scale_put(job.to_scale, p.to_scales, s.i, result.scale);
#pragma unroll
  for (int k = 0; k < GROUPS; k++)
    if (s.has(k))
      raw_store<WIRE_INT4>(p.to_payload + s.offset<WIRE_INT4>(k), 0,
                           int4_encode(sum[k], bias, result.multiplier));
  return true;
}

/* ---- kernel ---- */

template <WireKind FROM>
__device__ inline void sum_sources(Share &s, const QuantJob &job, const QuantPart &p) {
  constexpr int N = together(FROM);
  int r = 0;
  if (has_blocks(FROM) && job.add && job.to == WIRE_F32) {
    start_with<WIRE_F32>(s, p.to_payload);
  } else if (has_blocks(FROM) && job.add) {
    start_with<WIRE_BF16>(s, p.to_payload);
  } else if (p.n >= N) {
    sources_add<FROM, N, true>(s, job, p, r);
    r = N;
  } else {
    sources_add<FROM, 1, true>(s, job, p, r);
    r = 1;
  }
  for (; r + N <= p.n; r += N) sources_add<FROM, N, false>(s, job, p, r);
  for (; N > 1 && r < p.n; r++) sources_add<FROM, 1, false>(s, job, p, r);
}

template <WireKind FROM>
__global__ void __launch_bounds__(QUANT_THREADS, 3)
    wide_kernel(const __grid_constant__ QuantJob job, int lane_bits) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  Share s = {};
  s.lanes = 1 << lane_bits;
  s.i = (blockIdx.x - p.first_chunk) * (QUANT_THREADS >> lane_bits) + (threadIdx.x >> lane_bits);
  s.b = quant_place(p, job.block, s.i);
  s.lane = static_cast<int>(threadIdx.x) & (s.lanes - 1);
  if constexpr (FROM == WIRE_INT4) {
    if (int4_takes(job, p)) {
      if (int4_share(s, job, p)) s.b.n = 0; /* nothing is left of it */
      if (__all_sync(0xffffffffu, s.b.n == 0)) return;
    }
  }
  sum_sources<FROM>(s, job, p);
  by_kind<FROM>(job.to, [&](auto kind) { share_store<kind.value>(s, job, p); });
}

/* ---- launch ---- */

bool quant_wide_takes(const QuantJob &job, const QuantPart &p) {
  static const int bytes[] = {16, 8, 4, 4, 4}; /* of four elements (int4: of eight) */
  if (job.block > 1024 || job.block % 8 != 0 || p.width % 8 != 0) return false;
  return quant_alignment(p.from_payload, p.stride) >= bytes[job.from] &&
         quant_alignment(p.to_payload, 0) >= bytes[job.to] && quant_alignment(p.error, 0) >= 8;
}

int64_t quant_wide_chunks(const QuantJob &job, const QuantPart &p) {
  return cuda_ceil(p.blocks, QUANT_THREADS >> quant_lane_bits(job.block, 8 * GROUPS));
}

template <WireKind FROM>
static void launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  const int bits = quant_lane_bits(job.block, 8 * GROUPS);
  wide_kernel<FROM><<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job, bits);
  CUDA_LAUNCHED();
}

void quant_wide_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  switch (job.from) {
    case WIRE_F32:
      return launch<WIRE_F32>(stream, job, chunks);
    case WIRE_BF16:
      return launch<WIRE_BF16>(stream, job, chunks);
    case WIRE_INT8:
      return launch<WIRE_INT8>(stream, job, chunks);
    case WIRE_INT4:
      return launch<WIRE_INT4>(stream, job, chunks);
    case WIRE_FP8:
      return launch<WIRE_FP8>(stream, job, chunks);
  }
}
