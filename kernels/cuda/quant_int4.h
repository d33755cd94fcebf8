/* Sums of int4 blocks and back to int4 in integers, as kernels.h has it and
 * kernels/cpu/quant_int4.h does it. Internal to kernels/cuda/quant*.cu.
 *
 * Codes are multiplied as they lie on the wire, 0..15: then two sums of 16 bits lie in a word and
 * never carry, and what they are too large, 8 times all weights, is taken off in the end. */
#ifndef KERNELS_CUDA_QUANT_INT4_H
#define KERNELS_CUDA_QUANT_INT4_H

#include "kernels/cuda/quant_codes.h"

enum { INT4_SOURCES = 16, INT4_LEAST = 2048 };

__host__ __device__ inline bool int4_takes(const QuantJob &job, const QuantPart &p) {
  return job.from == WIRE_INT4 && job.to == WIRE_INT4 && !p.error && p.n >= 2 &&
         p.n <= INT4_SOURCES;
}

/* The scales of a block: their sum, in order, and whether one is negative. */
struct Int4Scales {
  float sum;
  uint32_t signs;
};
__device__ inline void int4_scale_add(Int4Scales &s, float scale) {
  s.sum = __fadd_rn(s.sum, scale);
  s.signs |= __float_as_uint(scale);
}
/* All are zeros: so are the elements, whatever the codes. */
__device__ inline bool int4_is_zero(const Int4Scales &s) { return s.sum == 0 && s.signs == 0; }

/* What a block's sums count; 0 where they must be in floats. */
__device__ inline float int4_unit(const Int4Scales &s) {
  bool fits = s.sum >= 0x1p-100f && s.sum < 0x1p100f && s.signs >> 31 == 0;
  return fits ? __uint_as_float((__float_as_uint(s.sum) & 0x7f800000u) - (11u << 23)) : 0.0f;
}
__device__ inline float int4_unit(const QuantJob &job, const QuantPart &p, int64_t block) {
  Int4Scales s = {};
  for (int r = 0; r < p.n; r++)
    int4_scale_add(s, scale_get(job.from_scale, p.from_scales + r * p.stride, block));
  return int4_unit(s);
}

/* A source's scale in units of its block. */
__device__ inline uint32_t int4_weight(float scale, float unit) {
  float inverse = __uint_as_float((254u << 23) - __float_as_uint(unit));
  return __float_as_uint(__fmaf_rn(scale, inverse, QUANT_MAGIC)) - __float_as_uint(QUANT_MAGIC);
}

/* The new scale and the codes' multiplier of a block whose largest sum is `most` units. Units are
 * powers of two, so both are computed in units. The quotients are corrected by what is left of
 * them; every `most` from INT4_LEAST to 2^17 was compared with the divisions in the rule, with
 * reciprocals 3 units in the last place off to either side (the instruction's is 1 off). */
struct Int4Result {
  float scale;
  uint32_t multiplier;
};
__device__ inline Int4Result int4_result(DType type, float unit, float most) {
  constexpr float seventh = 1.0f / 7;
  float s = __fmul_rn(most, seventh), inverse;
  s = __fmaf_rn(__fmaf_rn(-7.0f, s, most), seventh, s);
  if (type == DT_BF16) s = float_of_bf16(bf16_of_float(s));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(s));
  float quotient = __fmul_rn(0x1p23f, inverse);
  quotient = __fmaf_rn(__fmaf_rn(-s, quotient, 0x1p23f), inverse, quotient);
  return {__fmul_rn(s, unit), static_cast<uint32_t>(__float2int_ru(quotient) - 1)};
}

/* The code of a sum of codes that are 8 too large, in the four highest bits; bias: 8 times all
 * weights. Modulo 2^32, in which what lies above these bits is lost. */
__device__ inline uint32_t int4_code_high(uint32_t sum, uint32_t bias, uint32_t multiplier) {
  return ((sum - bias) * multiplier + (17u << 22)) << 5;
}

#endif
