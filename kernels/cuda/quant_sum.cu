/* quant_sum: sums of several spans of codes in whole blocks, added to a plain one, put into one, or
 * coded again; no errors. Sums of int4 back to int4 are in integers: quant_int4.cu. */
#include "kernels/cuda/quant_whole.h"

enum { TOGETHER = 2 }; /* sources that are read before the first of them is added */
enum { EIGHTS = 4, EACH = 8 * EIGHTS }; /* of a thread */

template <WireKind F, WireKind T>
struct Sum {
  static constexpr WireKind FROM = F, TO = T;
  static constexpr int EIGHTS = ::EIGHTS, GROUP = T == WIRE_F32 ? 1 : 2;
};

template <class S>
struct Source {
  Raw<S::FROM> raw[EIGHTS];
  float scale;
};
template <class S>
__device__ inline void source_load(Source<S> &in, const QuantJob &job, const QuantPart &p,
                                   const Whole<S> &w, int r) {
  in.scale = scale_get(job.from_scale, p.from_scales + r * p.stride, w.block);
  all_load(in.raw, w, p.from_payload + r * p.stride);
}

/* FIRST: there is no sum yet. */
template <bool FIRST, class S>
__device__ inline void source_add(Eight *sum, const Source<S> &in) {
#pragma unroll
  for (int k = 0; k < EIGHTS; k++) {
    Eight e = raw_decode<S::FROM>(in.raw[k]);
#pragma unroll
    for (int i = 0; i < 8; i++)
      sum[k].v[i] = FIRST ? __fmul_rn(e.v[i], in.scale) : __fmaf_rn(e.v[i], in.scale, sum[k].v[i]);
  }
}

/* N sources from r on. */
template <int N, bool FIRST, class S>
__device__ inline void sources_add(Eight *sum, const QuantJob &job, const QuantPart &p,
                                   const Whole<S> &w, int r) {
  Source<S> in[N];
#pragma unroll
  for (int j = 0; j < N; j++) source_load(in[j], job, p, w, r + j);
  source_add<FIRST>(sum, in[0]);
#pragma unroll
  for (int j = 1; j < N; j++) source_add<false>(sum, in[j]);
}

template <class S>
__device__ inline void sum_all(Eight *sum, const QuantJob &job, const QuantPart &p,
                               const Whole<S> &w) {
  int r = 0;
  if (!has_blocks(S::TO) && job.add) {
    Raw<S::TO> old[EIGHTS];
    all_load(old, w, p.to_payload);
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) sum[k] = raw_decode<S::TO>(old[k]);
  } else {
    sources_add<TOGETHER, true>(sum, job, p, w, 0);
    r = TOGETHER;
  }
  for (; r + TOGETHER <= p.n; r += TOGETHER) sources_add<TOGETHER, false>(sum, job, p, w, r);
  for (; r < p.n; r++) sources_add<1, false>(sum, job, p, w, r);
}

template <class S>
__global__ void __launch_bounds__(QUANT_THREADS, 3)
    sum_kernel(const __grid_constant__ QuantJob job, int lane_bits) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  const Whole<S> w = whole_of<S>(job, p, lane_bits);
  Eight sum[EIGHTS];
  sum_all(sum, job, p, w);
  float scale = 1, inverse = 1;
  bool wild = false;
  if constexpr (has_blocks(S::TO)) {
    float most = 0;
#pragma unroll
    for (int k = 0; k < EIGHTS; k++)
#pragma unroll
      for (int i = 0; i < 8; i++) most = largest(most, sum[k].v[i]);
    const uint32_t bits = most_of_lanes(__float_as_uint(most), w.lanes());
    scale = quant_scale(S::TO, job.to_scale, bits);
    inverse = quant_inverse(scale);
    wild = bits >= QUANT_WILD;
    if (w.lane == 0 && w.mine) scale_put(job.to_scale, p.to_scales, w.block, scale);
  }
  if (!w.mine) return;
  Raw<S::TO> out[EIGHTS];
#pragma unroll
  for (int k = 0; k < EIGHTS; k++)
    out[k] = raw_encode<S::TO>(wild ? eight_tamed(sum[k], S::TO, scale) : sum[k], inverse);
  all_store(out, w, p.to_payload);
}

/* ---- launch ---- */

bool quant_sum_takes(const QuantJob &job, const QuantPart &p) {
  if (!has_blocks(job.from) || p.error || p.n < (job.add ? 1 : TOGETHER)) return false;
  if (has_blocks(job.to) && (job.to != job.from || job.to == WIRE_INT4)) return false;
  return quant_is_whole(job, p) && quant_is_paired(job, p);
}

int64_t quant_sum_chunks(const QuantJob &job, const QuantPart &p) {
  return cuda_ceil(p.blocks, QUANT_THREADS >> quant_lane_bits(job.block, EACH));
}

template <WireKind FROM, WireKind TO>
static void launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  const int bits = quant_lane_bits(job.block, EACH);
  sum_kernel<Sum<FROM, TO>><<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job, bits);
  CUDA_LAUNCHED();
}

template <WireKind FROM>
static void launch_from(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  if (job.to == WIRE_F32)
    launch<FROM, WIRE_F32>(stream, job, chunks);
  else if (job.to == WIRE_BF16)
    launch<FROM, WIRE_BF16>(stream, job, chunks);
  else if constexpr (FROM != WIRE_INT4)
    launch<FROM, FROM>(stream, job, chunks);
}

void quant_sum_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  if (job.from == WIRE_INT8) launch_from<WIRE_INT8>(stream, job, chunks);
  if (job.from == WIRE_INT4) launch_from<WIRE_INT4>(stream, job, chunks);
  if (job.from == WIRE_FP8) launch_from<WIRE_FP8>(stream, job, chunks);
}
