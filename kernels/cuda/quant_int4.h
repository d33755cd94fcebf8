/* Sums of int4 blocks and back to int4 in integers, as kernels.h has it and
 * kernels/cpu/quant_int4.h does it. Internal to kernels/cuda/quant*.cu.
 *
 * Codes are multiplied as they lie on the wire, 0..15: then two sums of 16 bits lie in a word and
 * never carry, and what they are too large, 8 times all weights, is taken off in the end. */
#ifndef KERNELS_CUDA_QUANT_INT4_H
#define KERNELS_CUDA_QUANT_INT4_H

#include "kernels/cuda/quant_codes.h"

enum { INT4_SOURCES = 16, INT4_LEAST = 2048 };

__device__ inline bool int4_takes(const QuantJob &job, const QuantPart &p) {
  return job.from == WIRE_INT4 && job.to == WIRE_INT4 && !p.error && p.n >= 2 &&
         p.n <= INT4_SOURCES;
}

/* What a block's sums count; 0 where they must be in floats. */
__device__ inline float int4_unit(const QuantJob &job, const QuantPart &p, int64_t block) {
  float sum = 0;
  uint32_t signs = 0;
  for (int r = 0; r < p.n; r++) {
    float scale = scale_get(job.from_scale, p.from_scales + r * p.stride, block);
    sum = __fadd_rn(sum, scale);
    signs |= __float_as_uint(scale);
  }
  bool fits = sum >= 0x1p-100f && sum < 0x1p100f && signs >> 31 == 0;
  return fits ? __uint_as_float((__float_as_uint(sum) & 0x7f800000u) - (11u << 23)) : 0.0f;
}

/* A source's scale in units of its block. */
__device__ inline uint32_t int4_weight(float scale, float unit) {
  float inverse = __uint_as_float((254u << 23) - __float_as_uint(unit));
  return __float_as_uint(__fmaf_rn(scale, inverse, QUANT_MAGIC)) - __float_as_uint(QUANT_MAGIC);
}

/* The new scale and the codes' multiplier of a block whose largest sum is `most` units. */
struct Int4Result {
  float scale;
  uint32_t multiplier;
};
__device__ inline Int4Result int4_result(DType type, float unit, uint32_t most) {
  float s = __fdiv_rn(__fmul_rn(static_cast<float>(most), unit), 7.0f);
  if (type == DT_BF16) s = float_of_bf16(bf16_of_float(s));
  float quotient = __fdiv_rn(__fmul_rn(0x1p23f, unit), s);
  return {s, static_cast<uint32_t>(static_cast<int>(ceilf(quotient)) - 1)};
}

/* The code of a sum of codes that are 8 too large, in the four highest bits; bias: 8 times all
 * weights. Modulo 2^32, in which what lies above these bits is lost. */
__device__ inline uint32_t int4_code_high(uint32_t sum, uint32_t bias, uint32_t multiplier) {
  return ((sum - bias) * multiplier + (17u << 22)) << 5;
}

#endif
