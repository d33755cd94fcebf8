/* Codes and scales in registers: the arithmetic of kernels/cpu/quant_codes.h, bit for bit. Every
 * product, sum and quotient is named with its rounding, so that the compiler fuses none. Internal
 * to kernels/cuda/quant*.cu. */
#ifndef KERNELS_CUDA_QUANT_CODES_H
#define KERNELS_CUDA_QUANT_CODES_H

#include <cfloat>

#include <cuda_fp8.h>

#include "kernels/cuda/quant_parts.h"

__host__ __device__ constexpr bool has_blocks(WireKind kind) {
  return kind != WIRE_F32 && kind != WIRE_BF16;
}

/* ---- scales ---- */

__device__ inline float float_of_bf16(uint32_t b) { return __uint_as_float(b << 16); }
/* NaN stays NaN, with its payload; overflow gives infinity. */
__device__ inline uint32_t bf16_of_float(float x) {
  uint32_t u = __float_as_uint(x), rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40u : rounded;
}

__device__ inline float quant_most(WireKind kind) {
  return kind == WIRE_INT8 ? 127.0f : kind == WIRE_INT4 ? 7.0f : 448.0f;
}

/* The scale of a block whose largest |x| has these bits. */
__device__ inline float quant_scale(WireKind kind, DType type, uint32_t magnitude) {
  float most = quant_most(kind);
  if (magnitude >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  float s = __fdiv_rn(__uint_as_float(magnitude), most);
  if (type == DT_BF16) s = float_of_bf16(bf16_of_float(s));
  if (s < FLT_MIN) return 0;
  while (isinf(__fmul_rn(s, most)))
    s = __uint_as_float(__float_as_uint(s) - (type == DT_BF16 ? 1u << 16 : 1u));
  return s;
}

/* What x is multiplied by. A block that is not finite has codes of zeros: see quant_codes. */
__device__ inline float quant_inverse(float scale) { return scale > 0 ? __frcp_rn(scale) : 0.0f; }

__device__ inline float scale_get(DType type, const char *scales, int64_t i) {
  if (type == DT_BF16) return float_of_bf16(reinterpret_cast<const uint16_t *>(scales)[i]);
  return reinterpret_cast<const float *>(scales)[i];
}
__device__ inline void scale_put(DType type, char *scales, int64_t i, float s) {
  if (type == DT_BF16)
    reinterpret_cast<uint16_t *>(scales)[i] = static_cast<uint16_t>(bf16_of_float(s));
  else
    reinterpret_cast<float *>(scales)[i] = s;
}

/* The larger |x|; NaN is the largest. Its bits sort as an unsigned integer. */
__device__ inline float largest(float most, float x) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(most), "f"(fabsf(x)));
  return r;
}

/* Where the largest |x| has these bits or more, its block is not finite, and is sent as zeros, or
 * its scale may have to be so small that the largest code is sent for what lies beyond it. */
constexpr uint32_t QUANT_WILD = 0x7f000000u;
__device__ inline float tamed(float x, float scale, float code_most) {
  float most = __fmul_rn(scale, code_most);
  return isnan(scale) ? 0.0f : fminf(fmaxf(x, -most), most);
}

/* ---- one element to its code ---- */

constexpr float QUANT_MAGIC = 12582912.0f; /* 1.5 * 2^23: what is added to it counts ones */

/* x * inverse to the nearest integer, plus bias (even), in the low byte of what comes back. No code
 * is beyond the largest: the scale is at most 2^-8 too small, and 127 / 127.5 is less. */
__device__ inline uint32_t integer_code(float x, float inverse, float bias) {
  return __float_as_uint(__fmaf_rn(x, inverse, QUANT_MAGIC + bias));
}
__device__ inline uint32_t int8_code(float x, float inverse) { return integer_code(x, inverse, 0); }
/* -7..7 as 1..15. */
__device__ inline uint32_t int4_code(float x, float inverse) { return integer_code(x, inverse, 8); }
__device__ inline uint32_t fp8_code(float x, float inverse) {
  return __nv_cvt_float_to_fp8(__fmul_rn(x, inverse), __NV_SATFINITE, __NV_E4M3);
}
__device__ inline float float_of_fp8(uint32_t code) {
  __half_raw h = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3);
  return __half2float(__half(h));
}

/* ---- eight elements: two groups of four neighbours, half a block apart ----
 *
 * The groups are the low and the high halves of the same bytes of an int4 payload. */

struct Eight {
  float v[8];
};

/* What a thread reads of one source, before it is decoded. */
template <WireKind KIND>
struct Raw {
  uint32_t w[KIND == WIRE_F32 ? 8 : KIND == WIRE_BF16 ? 4 : KIND == WIRE_INT4 ? 1 : 2];
};

template <WireKind KIND>
__device__ inline Raw<KIND> raw_load(const char *p, int apart) {
  Raw<KIND> r;
  if constexpr (KIND == WIRE_F32) {
    uint4 a = *reinterpret_cast<const uint4 *>(p), b = *reinterpret_cast<const uint4 *>(p + apart);
    r.w[0] = a.x, r.w[1] = a.y, r.w[2] = a.z, r.w[3] = a.w;
    r.w[4] = b.x, r.w[5] = b.y, r.w[6] = b.z, r.w[7] = b.w;
  } else if constexpr (KIND == WIRE_BF16) {
    uint2 a = *reinterpret_cast<const uint2 *>(p), b = *reinterpret_cast<const uint2 *>(p + apart);
    r.w[0] = a.x, r.w[1] = a.y, r.w[2] = b.x, r.w[3] = b.y;
  } else {
    r.w[0] = *reinterpret_cast<const uint32_t *>(p);
    if constexpr (KIND != WIRE_INT4) r.w[1] = *reinterpret_cast<const uint32_t *>(p + apart);
  }
  return r;
}

/* Four bits at bit 4 k (k < 4) of w, less 8: they are put behind the exponent that makes them
 * count ones. */
template <int K>
__device__ inline float nibble(uint32_t w) {
  constexpr float one = static_cast<float>(1 << (23 - 4 * K)); /* 2^23, 2^19, ... */
  constexpr uint32_t exponent = 0x4b000000u - (static_cast<uint32_t>(K) << 25);
  return __fsub_rn(__uint_as_float((w & 0xfu << 4 * K) | exponent), one + 8);
}

template <WireKind KIND>
__device__ inline Eight raw_decode(const Raw<KIND> &r) {
  Eight e;
  if constexpr (KIND == WIRE_F32) {
#pragma unroll
    for (int i = 0; i < 8; i++) e.v[i] = __uint_as_float(r.w[i]);
  } else if constexpr (KIND == WIRE_BF16) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      e.v[i] = __uint_as_float(i % 2 ? r.w[i / 2] & 0xffff0000u : r.w[i / 2] << 16);
  } else if constexpr (KIND == WIRE_INT8) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      uint32_t biased = __byte_perm(r.w[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7650u | i % 4);
      e.v[i] = __fsub_rn(__uint_as_float(biased), 8388608.0f + 128);
    }
  } else if constexpr (KIND == WIRE_INT4) {
    uint32_t a = r.w[0], b = r.w[0] >> 16;
    e.v[0] = nibble<0>(a), e.v[1] = nibble<2>(a), e.v[2] = nibble<0>(b), e.v[3] = nibble<2>(b);
    e.v[4] = nibble<1>(a), e.v[5] = nibble<3>(a), e.v[6] = nibble<1>(b), e.v[7] = nibble<3>(b);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      auto pair = static_cast<__nv_fp8x2_storage_t>(r.w[i / 4] >> 8 * (i % 4));
      float2 f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      e.v[i] = f.x, e.v[i + 1] = f.y;
    }
  }
  return e;
}

/* Low bytes of four words. */
__device__ inline uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
/* Any NaN becomes one NaN. */
__device__ inline uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&pair);
}
__device__ inline uint32_t pack_fp8(const float *v, float inverse) {
  float2 a = {__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse)};
  float2 b = {__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse)};
  uint32_t low = __nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_E4M3);
  return low | static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(b, __NV_SATFINITE, __NV_E4M3)) << 16;
}

template <WireKind KIND>
__device__ inline Raw<KIND> raw_encode(const Eight &e, float inverse) {
  Raw<KIND> r;
  const float *v = e.v;
  if constexpr (KIND == WIRE_F32) {
#pragma unroll
    for (int i = 0; i < 8; i++) r.w[i] = __float_as_uint(v[i]);
  } else if constexpr (KIND == WIRE_BF16) {
#pragma unroll
    for (int i = 0; i < 4; i++) r.w[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
  } else if constexpr (KIND == WIRE_INT8) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      r.w[i] = pack_bytes(int8_code(v[4 * i], inverse), int8_code(v[4 * i + 1], inverse),
                          int8_code(v[4 * i + 2], inverse), int8_code(v[4 * i + 3], inverse));
  } else if constexpr (KIND == WIRE_INT4) {
    uint32_t b[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      b[i] = int4_code(v[i], inverse) + (int4_code(v[4 + i], inverse) << 4);
    r.w[0] = pack_bytes(b[0], b[1], b[2], b[3]);
  } else {
    r.w[0] = pack_fp8(v, inverse);
    r.w[1] = pack_fp8(v + 4, inverse);
  }
  return r;
}

template <WireKind KIND>
__device__ inline void raw_store(char *p, int apart, const Raw<KIND> &r) {
  if constexpr (KIND == WIRE_F32) {
    *reinterpret_cast<uint4 *>(p) = {r.w[0], r.w[1], r.w[2], r.w[3]};
    *reinterpret_cast<uint4 *>(p + apart) = {r.w[4], r.w[5], r.w[6], r.w[7]};
  } else if constexpr (KIND == WIRE_BF16) {
    *reinterpret_cast<uint2 *>(p) = {r.w[0], r.w[1]};
    *reinterpret_cast<uint2 *>(p + apart) = {r.w[2], r.w[3]};
  } else {
    *reinterpret_cast<uint32_t *>(p) = r.w[0];
    if constexpr (KIND != WIRE_INT4) *reinterpret_cast<uint32_t *>(p + apart) = r.w[1];
  }
}

/* What is coded of a block with such a scale. */
__device__ inline Eight eight_tamed(Eight e, WireKind kind, float scale) {
#pragma unroll
  for (int i = 0; i < 8; i++) e.v[i] = tamed(e.v[i], scale, quant_most(kind));
  return e;
}

/* The largest of neighbouring threads' numbers, to all of a warp. lanes: a power of two. */
__device__ inline uint32_t most_of_lanes(uint32_t most, int lanes) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2)
    if (o < lanes) most = max(most, __shfl_xor_sync(0xffffffffu, most, o));
  return most;
}

/* ---- error feedback ---- */

/* keep * error + (1 - keep) * (sent - got), got a product that was rounded by itself. */
__device__ inline float error_left(float sent, float got, float error, float keep) {
  float lost = __fmul_rn(__fsub_rn(1.0f, keep), __fsub_rn(sent, got));
  return __fmaf_rn(keep, error, lost);
}

#endif
