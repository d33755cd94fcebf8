/* quant_int4: sums of int4 spans and back to int4 in whole blocks at addresses of 16 bytes, as
 * quant_int4.h has it: a thread has 16 bytes of each source and of the result.
 *
 * Bytes of two sources are laid side by side, so that one product of two bytes with two weights
 * adds an element of both. High nibbles stay where they are: their sums are 16 times as large, and
 * end 4 bits higher. Sums start at the bits of 1.5 * 2^23: as floats they are then that much too
 * large, and the magnitude of a difference costs nothing. */
#include "kernels/cuda/quant_int4.h"

enum { TOGETHER = 4, WORDS = 4, EACH = 32 }; /* sources read at a time; a thread's elements */
constexpr uint32_t MAGIC_BITS = 0x4b400000u;
constexpr uint32_t LOW = 0x0f0f0f0fu;

/* A thread's part of a block; at: its first byte in a payload. */
struct Share {
  int64_t block, at;
  int lane, lanes;
};

/* What a thread reads of some sources; zeros of those that there are not. */
struct Sources {
  float scale[TOGETHER];
  uint4 bytes[TOGETHER];
};

template <class T>
__device__ inline void scales_load(T *scale, const QuantPart &p, int r, int64_t block) {
#pragma unroll
  for (int j = 0; j < TOGETHER; j++)
    scale[j] =
        r + j < p.n ? reinterpret_cast<const T *>(p.from_scales + (r + j) * p.stride)[block] : T(0);
}

__device__ inline Sources sources_load(const QuantJob &job, const QuantPart &p, int r,
                                       const Share &share) {
  Sources in = {};
#pragma unroll
  for (int j = 0; j < TOGETHER; j++)
    if (r + j < p.n)
      in.bytes[j] =
          *reinterpret_cast<const uint4 *>(p.from_payload + (r + j) * p.stride + share.at);
  if (job.from_scale == DT_BF16) {
    uint16_t scale[TOGETHER];
    scales_load(scale, p, r, share.block);
#pragma unroll
    for (int j = 0; j < TOGETHER; j++) in.scale[j] = float_of_bf16(scale[j]);
  } else {
    scales_load(in.scale, p, r, share.block);
  }
  return in;
}

__device__ inline uint32_t word_of(const uint4 &v, int k) {
  return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
}

/* ---- sums ---- */

/* Of a thread's words: of the low and of the high nibbles of each byte, in order. */
struct Sums {
  uint32_t low[WORDS][4], high[WORDS][4];
};

/* sum + the products of bytes 0 and 1 (HALF 0) or 2 and 3 with the halves of weights. */
template <int HALF>
__device__ inline uint32_t dot(uint32_t weights, uint32_t bytes, uint32_t sum) {
  uint32_t r;
  if constexpr (HALF == 0)
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(weights), "r"(bytes), "r"(sum));
  else
    asm("dp2a.hi.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(weights), "r"(bytes), "r"(sum));
  return r;
}

/* Two sources, a and b, on top of the sums of a word. */
__device__ inline void pair_add(uint32_t *low, uint32_t *high, uint32_t a, uint32_t b,
                                uint32_t weights) {
  uint32_t first = __byte_perm(a, b, 0x5140), last = __byte_perm(a, b, 0x7362);
  low[0] = dot<0>(weights, first & LOW, low[0]), low[1] = dot<1>(weights, first & LOW, low[1]);
  low[2] = dot<0>(weights, last & LOW, low[2]), low[3] = dot<1>(weights, last & LOW, low[3]);
  high[0] = dot<0>(weights, first & ~LOW, high[0]),
  high[1] = dot<1>(weights, first & ~LOW, high[1]);
  high[2] = dot<0>(weights, last & ~LOW, high[2]), high[3] = dot<1>(weights, last & ~LOW, high[3]);
}

/* Returns the weights' sum. */
__device__ inline uint32_t sources_add(Sums &s, const Sources &in, float unit) {
  uint32_t all = 0;
#pragma unroll
  for (int j = 0; j < TOGETHER; j += 2) {
    uint32_t a = int4_weight(in.scale[j], unit), b = int4_weight(in.scale[j + 1], unit);
    all += a + b;
#pragma unroll
    for (int k = 0; k < WORDS; k++)
      pair_add(s.low[k], s.high[k], word_of(in.bytes[j], k), word_of(in.bytes[j + 1], k),
               a | b << 16);
  }
  return all;
}

__device__ inline float distance(uint32_t sum, float bias) {
  return fabsf(__fsub_rn(__uint_as_float(sum), bias));
}

/* The largest magnitude of a block. */
__device__ inline float sums_most(const Sums &s, uint32_t bias, int lanes) {
  float low = 0, high = 0, ones = static_cast<float>(bias);
#pragma unroll
  for (int k = 0; k < WORDS; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      low = fmaxf(low, distance(s.low[k][j], QUANT_MAGIC + ones));
      high = fmaxf(high, distance(s.high[k][j], QUANT_MAGIC + 16 * ones));
    }
  return __uint_as_float(most_of_lanes(__float_as_uint(fmaxf(low, high * 0.0625f)), lanes));
}

/* Codes of low nibbles come out at bit 24, those of high ones at bit 28 (int4_code_high has the
 * formula); what lies above them is masked, modulo 2^32. */
__device__ inline uint4 sums_encode(const Sums &s, uint32_t bias, uint32_t multiplier) {
  uint32_t m = multiplier << 1, words[WORDS];
  uint32_t low = (17u << 23) - (MAGIC_BITS + bias) * m;
  uint32_t high = (17u << 27) - (MAGIC_BITS + 16 * bias) * m;
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    uint32_t b[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      b[j] = ((s.low[k][j] * m + low) & LOW) | ((s.high[k][j] * m + high) & ~LOW);
    words[k] =
        __byte_perm(__byte_perm(b[0], b[1], 0x0073), __byte_perm(b[2], b[3], 0x0073), 0x5410);
  }
  return {words[0], words[1], words[2], words[3]};
}

/* ---- blocks that are summed in floats ---- */

/* A thread's share, as the other kernels do it. */
__device__ inline void floats_add(Eight *sum, const QuantJob &job, const QuantPart &p,
                                  int64_t block, int64_t at) {
  for (int r = 0; r < p.n; r++) {
    float scale = scale_get(job.from_scale, p.from_scales + r * p.stride, block);
    uint4 bytes = *reinterpret_cast<const uint4 *>(p.from_payload + r * p.stride + at);
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
      Eight e = raw_decode<WIRE_INT4>({{word_of(bytes, k)}});
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float *x = &sum[k].v[i];
        *x = r == 0 ? __fmul_rn(e.v[i], scale) : __fmaf_rn(e.v[i], scale, *x);
      }
    }
  }
}

/* All threads of a warp; what is not `mine` is done. */
__device__ inline void floats_block(const QuantJob &job, const QuantPart &p, const Share &share,
                                    bool mine) {
  const int64_t block = share.block, at = share.at;
  Eight sum[WORDS] = {};
  float most = 0;
  uint32_t words[WORDS];
  if (mine) floats_add(sum, job, p, block, at);
#pragma unroll
  for (int k = 0; k < WORDS; k++)
#pragma unroll
    for (int i = 0; i < 8; i++) most = largest(most, sum[k].v[i]);
  uint32_t bits = most_of_lanes(__float_as_uint(most), share.lanes);
  float scale = quant_scale(WIRE_INT4, job.to_scale, bits), inverse = quant_inverse(scale);
  if (!mine) return;
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    Eight e = bits >= QUANT_WILD ? eight_tamed(sum[k], WIRE_INT4, scale) : sum[k];
    words[k] = raw_encode<WIRE_INT4>(e, inverse).w[0];
  }
  if (share.lane == 0) scale_put(job.to_scale, p.to_scales, block, scale);
  *reinterpret_cast<uint4 *>(p.to_payload + at) = {words[0], words[1], words[2], words[3]};
}

/* ---- kernel ---- */

/* Returns whether the block is done. MANY: of more than TOGETHER sources. */
template <bool MANY>
__device__ inline bool integers_block(const QuantJob &job, const QuantPart &p, const Share &share,
                                      bool mine) {
  Sources in = sources_load(job, p, 0, share);
  Int4Scales scales = {};
#pragma unroll
  for (int j = 0; j < TOGETHER; j++) int4_scale_add(scales, in.scale[j]);
  for (int r = TOGETHER; MANY && r < p.n; r++)
    int4_scale_add(scales, scale_get(job.from_scale, p.from_scales + r * p.stride, share.block));
  float unit = int4_unit(scales);
  Sums s;
#pragma unroll
  for (int k = 0; k < WORDS; k++)
#pragma unroll
    for (int j = 0; j < 4; j++) s.low[k][j] = s.high[k][j] = MAGIC_BITS;
  uint32_t bias = sources_add(s, in, unit);
  for (int r = TOGETHER; MANY && r < p.n; r += TOGETHER)
    bias += sources_add(s, sources_load(job, p, r, share), unit);
  bias *= 8;
  float most = sums_most(s, bias, share.lanes);
  bool zero = int4_is_zero(scales);
  if (!mine) return true;
  if (!zero && (unit == 0 || most < INT4_LEAST)) return false;
  Int4Result result = {};
  uint4 codes = {0x88888888u, 0x88888888u, 0x88888888u, 0x88888888u};
  if (!zero) {
    result = int4_result(job.to_scale, unit, most);
    codes = sums_encode(s, bias, result.multiplier);
  }
  if (share.lane == 0) scale_put(job.to_scale, p.to_scales, share.block, result.scale);
  *reinterpret_cast<uint4 *>(p.to_payload + share.at) = codes;
  return true;
}

template <bool MANY>
__global__ void __launch_bounds__(QUANT_THREADS, MANY ? 3 : 4)
    int4_kernel(const __grid_constant__ QuantJob job, int lane_bits) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  const int64_t chunk = blockIdx.x - p.first_chunk;
  Share share;
  share.lanes = 1 << lane_bits;
  share.lane = static_cast<int>(threadIdx.x) & (share.lanes - 1);
  share.block = chunk * (QUANT_THREADS >> lane_bits) + (threadIdx.x >> lane_bits);
  bool mine = share.block < p.blocks;
  if (!mine) share.block = p.blocks - 1; /* once more, for nothing */
  share.at = (share.block * share.lanes + share.lane) * (EACH / 2);
  bool done = integers_block<MANY>(job, p, share, mine);
  if (!__all_sync(0xffffffffu, done)) floats_block(job, p, share, !done);
}

/* ---- launch ---- */

bool quant_int4_takes(const QuantJob &job, const QuantPart &p) {
  return int4_takes(job, p) && quant_is_whole(job, p) &&
         quant_alignment(p.from_payload, p.stride) >= 16 && quant_alignment(p.to_payload, 0) >= 16;
}

int64_t quant_int4_chunks(const QuantJob &job, const QuantPart &p) {
  return cuda_ceil(p.blocks, QUANT_THREADS >> quant_lane_bits(job.block, EACH));
}

void quant_int4_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  bool many = false;
  for (int i = 0; i < job.n; i++) many = many || job.part[i].n > TOGETHER;
  auto *kernel = many ? int4_kernel<true> : int4_kernel<false>;
  const int bits = quant_lane_bits(job.block, EACH);
  kernel<<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job, bits);
  CUDA_LAUNCHED();
}
