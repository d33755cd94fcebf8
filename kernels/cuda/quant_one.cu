/* quant_one: one span to or from a plain format in whole blocks, nothing added and no errors. What
 * a thread read stays as it was until it is needed, so that many threads fit beside each other. */
#include "kernels/cuda/quant_codes.h"

/* How threads share blocks of size B, or 0: known when it runs. Between 16-bit numbers and codes a
 * thread has two eights side by side, read and written as one; float32 is 16 bytes of four anyway.
 */
template <WireKind F, WireKind T, int B>
struct One {
  static constexpr WireKind FROM = F, TO = T;
  static constexpr bool WORDS = F == WIRE_F32 || T == WIRE_F32;
  static constexpr int BLOCK = B, EIGHTS = T == WIRE_BF16 ? 2 : 4, EACH = 8 * EIGHTS;
  static constexpr int GROUP = WORDS ? 1 : 2;
  static constexpr int RESIDENT = WORDS ? 4 : T == WIRE_BF16 ? 8 : 6;
};

/* A thread's part of a block. */
template <class S>
struct Share {
  int64_t block;
  int of_size, lane;
  __device__ int size() const { return S::BLOCK ? S::BLOCK : of_size; }
  __device__ int lanes() const { return size() / S::EACH; }

  /* Where eight k (the first of its group) lies, and how far its second half is behind. */
  template <WireKind KIND>
  __device__ int64_t offset(int k) const {
    constexpr int bytes = KIND == WIRE_F32 ? 4 : KIND == WIRE_BF16 ? 2 : 1;
    const int64_t start = block * (KIND == WIRE_INT4 ? size() / 2 : size());
    return (start + 4 * (S::GROUP * lane + lanes() * k)) * bytes;
  }
  template <WireKind KIND>
  __device__ int apart() const {
    return KIND == WIRE_F32 ? 2 * size() : KIND == WIRE_BF16 ? size() : size() / 2;
  }
};

/* ---- a group ---- */

template <WireKind KIND, int GROUP>
__device__ inline void group_load(Raw<KIND> *r, const char *p, int apart) {
  if constexpr (GROUP == 1) {
    r[0] = raw_load<KIND>(p, apart);
  } else if constexpr (KIND == WIRE_BF16) {
    uint4 a = *reinterpret_cast<const uint4 *>(p), b = *reinterpret_cast<const uint4 *>(p + apart);
    r[0].w[0] = a.x, r[0].w[1] = a.y, r[0].w[2] = b.x, r[0].w[3] = b.y;
    r[1].w[0] = a.z, r[1].w[1] = a.w, r[1].w[2] = b.z, r[1].w[3] = b.w;
  } else {
    uint2 a = *reinterpret_cast<const uint2 *>(p);
    r[0].w[0] = a.x, r[1].w[0] = a.y;
    if constexpr (KIND != WIRE_INT4) {
      uint2 b = *reinterpret_cast<const uint2 *>(p + apart);
      r[0].w[1] = b.x, r[1].w[1] = b.y;
    }
  }
}

template <WireKind KIND, int GROUP>
__device__ inline void group_store(char *p, int apart, const Raw<KIND> *r) {
  if constexpr (GROUP == 1) {
    raw_store<KIND>(p, apart, r[0]);
  } else if constexpr (KIND == WIRE_BF16) {
    *reinterpret_cast<uint4 *>(p) = {r[0].w[0], r[0].w[1], r[1].w[0], r[1].w[1]};
    *reinterpret_cast<uint4 *>(p + apart) = {r[0].w[2], r[0].w[3], r[1].w[2], r[1].w[3]};
  } else {
    *reinterpret_cast<uint2 *>(p) = {r[0].w[0], r[1].w[0]};
    if constexpr (KIND != WIRE_INT4) *reinterpret_cast<uint2 *>(p + apart) = {r[0].w[1], r[1].w[1]};
  }
}

/* ---- a block ---- */

/* The bits of the largest |x|. As integers magnitudes sort like numbers, with NaN above all. */
template <class S>
__device__ inline uint32_t one_most(const Raw<S::FROM> *in, const Share<S> &share) {
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
  return most_of_lanes(most, share.lanes());
}

template <class S>
__device__ inline void quantize_one(const Raw<S::FROM> *in, const QuantJob &job, const QuantPart &p,
                                    const Share<S> &share, bool mine) {
  uint32_t most = one_most(in, share);
  float scale = quant_scale(S::TO, job.to_scale, most), inverse = quant_inverse(scale);
  if (!mine) return;
  if (share.lane == 0) scale_put(job.to_scale, p.to_scales, share.block, scale);
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k += S::GROUP) {
    Raw<S::TO> out[S::GROUP];
#pragma unroll
    for (int g = 0; g < S::GROUP; g++) {
      Eight e = raw_decode<S::FROM>(in[k + g]);
      out[g] = raw_encode<S::TO>(most >= QUANT_WILD ? eight_tamed(e, S::TO, scale) : e, inverse);
    }
    group_store<S::TO, S::GROUP>(p.to_payload + share.template offset<S::TO>(k),
                                 share.template apart<S::TO>(), out);
  }
}

template <class S>
__device__ inline void dequantize_one(const Raw<S::FROM> *in, const QuantJob &job,
                                      const QuantPart &p, const Share<S> &share, bool mine) {
  const float scale = scale_get(job.from_scale, p.from_scales, share.block);
  if (!mine) return;
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k += S::GROUP) {
    Raw<S::TO> out[S::GROUP];
#pragma unroll
    for (int g = 0; g < S::GROUP; g++) {
      Eight e = raw_decode<S::FROM>(in[k + g]);
#pragma unroll
      for (int i = 0; i < 8; i++) e.v[i] = __fmul_rn(e.v[i], scale);
      out[g] = raw_encode<S::TO>(e, 1);
    }
    group_store<S::TO, S::GROUP>(p.to_payload + share.template offset<S::TO>(k),
                                 share.template apart<S::TO>(), out);
  }
}

template <class S>
__global__ void __launch_bounds__(QUANT_THREADS, S::RESIDENT)
    one_kernel(const __grid_constant__ QuantJob job, int lane_bits) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  const int64_t chunk = blockIdx.x - p.first_chunk;
  Share<S> share;
  share.of_size = job.block;
  share.lane = static_cast<int>(threadIdx.x) & (share.lanes() - 1);
  share.block = chunk * (QUANT_THREADS >> lane_bits) + (threadIdx.x >> lane_bits);
  bool mine = share.block < p.blocks;
  if (!mine) share.block = p.blocks - 1; /* once more, for nothing */
  Raw<S::FROM> in[S::EIGHTS];
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k += S::GROUP)
    group_load<S::FROM, S::GROUP>(in + k, p.from_payload + share.template offset<S::FROM>(k),
                                  share.template apart<S::FROM>());
  if constexpr (has_blocks(S::TO))
    quantize_one(in, job, p, share, mine);
  else
    dequantize_one(in, job, p, share, mine);
}

/* ---- launch ---- */

template <WireKind FROM, WireKind TO, class F>
static void by_block(int block, F f) {
  if (block == QUANT_USUAL_BLOCK)
    f(One<FROM, TO, QUANT_USUAL_BLOCK>());
  else
    f(One<FROM, TO, 0>());
}
template <WireKind PLAIN, class F>
static void by_codes(const QuantJob &job, F f) {
  bool to = job.from == PLAIN;
  WireKind codes = to ? job.to : job.from;
  if (codes == WIRE_INT8 && to) by_block<PLAIN, WIRE_INT8>(job.block, f);
  if (codes == WIRE_INT4 && to) by_block<PLAIN, WIRE_INT4>(job.block, f);
  if (codes == WIRE_FP8 && to) by_block<PLAIN, WIRE_FP8>(job.block, f);
  if (codes == WIRE_INT8 && !to) by_block<WIRE_INT8, PLAIN>(job.block, f);
  if (codes == WIRE_INT4 && !to) by_block<WIRE_INT4, PLAIN>(job.block, f);
  if (codes == WIRE_FP8 && !to) by_block<WIRE_FP8, PLAIN>(job.block, f);
}
template <class F>
static void by_job(const QuantJob &job, F f) {
  if (job.from == WIRE_F32 || job.to == WIRE_F32)
    by_codes<WIRE_F32>(job, f);
  else
    by_codes<WIRE_BF16>(job, f);
}

bool quant_one_takes(const QuantJob &job, const QuantPart &p) {
  bool plain = !has_blocks(job.from) || !has_blocks(job.to);
  if (!plain || job.add || p.n != 1 || p.error || !quant_wide_takes(job, p)) return false;
  if (!quant_is_whole(job, p)) return false;
  bool pairs = job.from != WIRE_F32 && job.to != WIRE_F32;
  int64_t from = job.from == WIRE_BF16 ? 16 : 8, to = job.to == WIRE_BF16 ? 16 : 8;
  return !pairs ||
         (quant_alignment(p.from_payload, 0) >= from && quant_alignment(p.to_payload, 0) >= to);
}

int64_t quant_one_chunks(const QuantJob &job, const QuantPart &p) {
  int64_t chunks = 0;
  by_job(job, [&](auto s) {
    chunks = cuda_ceil(p.blocks, QUANT_THREADS >> quant_lane_bits(job.block, s.EACH));
  });
  return chunks;
}

void quant_one_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  by_job(job, [&](auto s) {
    const int bits = quant_lane_bits(job.block, s.EACH);
    one_kernel<decltype(s)><<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job, bits);
  });
  CUDA_LAUNCHED();
}
