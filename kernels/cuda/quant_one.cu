/* quant_one: one span to or from a plain format in whole blocks, nothing added. What a thread read
 * stays as it was until it is needed, so that many threads fit beside each other. */
#include "kernels/cuda/quant_whole.h"

/* How threads share blocks. From codes few elements a thread are fastest; to codes, what is done
 * once for a block wants many. FED: there are errors, and sums with them take registers. */
template <WireKind F, WireKind T, bool E>
struct One {
  static constexpr WireKind FROM = F, TO = T;
  static constexpr bool FED = E;
  static constexpr int EIGHTS = T == WIRE_F32 ? 1 : T == WIRE_BF16 ? 2 : 4;
  static constexpr int GROUP = T == WIRE_F32 ? 1 : 2;
  static constexpr int RESIDENT = !has_blocks(T) ? 8 : FED ? 3 : F == WIRE_F32 ? 4 : 5;
};

/* The bits of the largest |x|. As integers magnitudes sort like numbers, with NaN above all. */
template <class S>
__device__ inline uint32_t one_most(const Raw<S::FROM> *in, const Whole<S> &w) {
  uint32_t most = 0;
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k++) {
    if constexpr (S::FROM == WIRE_BF16) {
#pragma unroll
      for (int j = 0; j < 4; j++) most = __vmaxu2(most, in[k].w[j] & 0x7fff7fffu);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++)
        most = __float_as_uint(largest(__uint_as_float(most), __uint_as_float(in[k].w[j])));
    }
  }
  if (S::FROM == WIRE_BF16) most = max(most & 0xffff0000u, most << 16);
  return most_of_lanes(most, w.lanes());
}

template <class S>
__device__ inline void quantize_one(const Raw<S::FROM> *in, const QuantJob &job, const QuantPart &p,
                                    const Whole<S> &w) {
  uint32_t most = one_most(in, w);
  float scale = quant_scale(S::TO, job.to_scale, most), inverse = quant_inverse(scale);
  if (!w.mine) return;
  if (w.lane == 0) scale_put(job.to_scale, p.to_scales, w.block, scale);
  Raw<S::TO> out[S::EIGHTS];
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k++) {
    Eight e = raw_decode<S::FROM>(in[k]);
    out[k] = raw_encode<S::TO>(most >= QUANT_WILD ? eight_tamed(e, S::TO, scale) : e, inverse);
  }
  all_store(out, w, p.to_payload);
}

/* The same with errors: of the last call, and of this one. */
template <class S>
__device__ inline void quantize_fed(const Raw<S::FROM> *in, const QuantJob &job, const QuantPart &p,
                                    const Whole<S> &w) {
  Raw<WIRE_BF16> error[S::EIGHTS];
  all_load(error, w, p.error);
  Eight sent[S::EIGHTS];
  float most_sent = 0;
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k++) {
    Eight e = raw_decode<WIRE_BF16>(error[k]);
    sent[k] = raw_decode<S::FROM>(in[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      sent[k].v[i] = __fadd_rn(sent[k].v[i], e.v[i]);
      most_sent = largest(most_sent, sent[k].v[i]);
    }
  }
  uint32_t most = most_of_lanes(__float_as_uint(most_sent), w.lanes());
  float scale = quant_scale(S::TO, job.to_scale, most), inverse = quant_inverse(scale);
  if (!w.mine) return;
  if (w.lane == 0) scale_put(job.to_scale, p.to_scales, w.block, scale);
  Raw<S::TO> out[S::EIGHTS];
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k++) {
    out[k] = raw_encode<S::TO>(most >= QUANT_WILD ? eight_tamed(sent[k], S::TO, scale) : sent[k],
                               inverse);
    Eight got = raw_decode<S::TO>(out[k]), e = raw_decode<WIRE_BF16>(error[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float value = __fmul_rn(got.v[i], scale);
      e.v[i] = isnan(scale) ? 0.0f : error_left(sent[k].v[i], value, e.v[i], p.keep);
    }
    error[k] = raw_encode<WIRE_BF16>(e, 1);
  }
  all_store(out, w, p.to_payload);
  all_store(error, w, p.error);
}

template <class S>
__device__ inline void dequantize_one(const Raw<S::FROM> *in, const QuantJob &job,
                                      const QuantPart &p, const Whole<S> &w) {
  const float scale = scale_get(job.from_scale, p.from_scales, w.block);
  if (!w.mine) return;
  Raw<S::TO> out[S::EIGHTS];
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k++) {
    Eight e = raw_decode<S::FROM>(in[k]);
#pragma unroll
    for (int i = 0; i < 8; i++) e.v[i] = __fmul_rn(e.v[i], scale);
    out[k] = raw_encode<S::TO>(e, 1);
  }
  all_store(out, w, p.to_payload);
}

template <class S>
__global__ void __launch_bounds__(QUANT_THREADS, S::RESIDENT)
    one_kernel(const __grid_constant__ QuantJob job, int lane_bits) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  const Whole<S> w = whole_of<S>(job, p, lane_bits);
  Raw<S::FROM> in[S::EIGHTS];
  all_load(in, w, p.from_payload);
  if constexpr (!has_blocks(S::TO))
    dequantize_one(in, job, p, w);
  else if constexpr (S::FED)
    quantize_fed(in, job, p, w);
  else
    quantize_one(in, job, p, w);
}

/* ---- launch ---- */

template <WireKind PLAIN, WireKind CODES, class F>
static void by_way(const QuantJob &job, bool fed, F f) {
  if (job.from != PLAIN)
    f(One<CODES, PLAIN, false>());
  else if (fed)
    f(One<PLAIN, CODES, true>());
  else
    f(One<PLAIN, CODES, false>());
}
template <WireKind PLAIN, class F>
static void by_codes(const QuantJob &job, bool fed, F f) {
  WireKind codes = job.from == PLAIN ? job.to : job.from;
  if (codes == WIRE_INT8) by_way<PLAIN, WIRE_INT8>(job, fed, f);
  if (codes == WIRE_INT4) by_way<PLAIN, WIRE_INT4>(job, fed, f);
  if (codes == WIRE_FP8) by_way<PLAIN, WIRE_FP8>(job, fed, f);
}
template <class F>
static void by_job(const QuantJob &job, bool fed, F f) {
  if (job.from == WIRE_F32 || job.to == WIRE_F32)
    by_codes<WIRE_F32>(job, fed, f);
  else
    by_codes<WIRE_BF16>(job, fed, f);
}

bool quant_one_takes(const QuantJob &job, const QuantPart &p) {
  bool to = !has_blocks(job.from), from = !has_blocks(job.to);
  if (job.add || p.n != 1 || !(to || (from && !p.error))) return false;
  return quant_is_whole(job, p) && quant_is_paired(job, p);
}

int64_t quant_one_chunks(const QuantJob &job, const QuantPart &p) {
  int64_t chunks = 0;
  by_job(job, p.error, [&](auto s) {
    chunks = cuda_ceil(p.blocks, QUANT_THREADS >> quant_lane_bits(job.block, 8 * s.EIGHTS));
  });
  return chunks;
}

void quant_one_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  by_job(job, job.part[0].error, [&](auto s) {
    const int bits = quant_lane_bits(job.block, 8 * s.EIGHTS);
    one_kernel<decltype(s)><<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job, bits);
  });
  CUDA_LAUNCHED();
}
