/* One block of numbers to and from each wire format. Internal to kernels/cpu.
 *
 * Loops have no branches and no calls, so that they vectorize; rounding is by adding a constant
 * whose last bit counts ones. Everything but the loops is in quant.c. */
#ifndef KERNELS_CPU_QUANT_CODES_H
#define KERNELS_CPU_QUANT_CODES_H

#include "kernels/cpu/vecmath.h"
#include "kernels/wire.h"

/* Codes of a block from x, given 1 / scale (0 where the scale is), and back: y = code * scale, or
 * y += (one rounding). */
typedef void EncodeBlock(const float *x, int64_t n, float inverse, void *out);
typedef void DecodeBlock(const void *in, int64_t n, float scale, bool add, float *y);

static inline float clamp(float x, float most) {
  x = x > most ? most : x;
  return x < -most ? -most : x;
}

/* Rounded to nearest even, |x| < 2^22. */
static inline int32_t nearest_i32(float x) {
  const float magic = 12582912.0f; /* 1.5 * 2^23 */
  return (int32_t)(bits_of_float(x + magic) - bits_of_float(magic));
}

/* NaN stays NaN; overflow gives infinity. */
static inline uint16_t bf16_of_float(float x) {
  uint32_t u = bits_of_float(x);
  uint32_t rounded = (u + 0x7fffU + ((u >> 16) & 1U)) >> 16;
  uint32_t quiet = (u >> 16) | 0x40U;
  return (uint16_t)((u & 0x7fffffffU) > 0x7f800000U ? quiet : rounded);
}
static inline float float_of_bf16(uint16_t b) { return float_of_bits((uint32_t)b << 16); }

/* e4m3 without infinities: 4 bits of exponent with bias 7, 3 of mantissa; |x| <= 448. A float's
 * exponent has bias 127; below 2^-6 codes count in steps of 2^-9. */
static inline uint8_t fp8_of_float(float x) {
  uint32_t u = bits_of_float(x), magnitude = u & 0x7fffffffU;
  uint32_t normal = ((magnitude + 0x7ffffU + ((magnitude >> 20) & 1U)) >> 20) - (120U << 3);
  uint32_t small = (uint32_t)nearest_i32(float_of_bits(magnitude) * 512.0f);
  uint32_t code = magnitude < bits_of_float(0.015625f) ? small : normal;
  return (uint8_t)(code | (u >> 24 & 0x80U));
}
static inline float float_of_fp8(uint8_t b) {
  uint32_t magnitude = b & 0x7fU;
  float normal = float_of_bits((magnitude << 20) + (120U << 23));
  float small = (float)(int32_t)magnitude * 0.001953125f;
  float x = magnitude < 8 ? small : normal;
  return float_of_bits(bits_of_float(x) | (uint32_t)(b & 0x80U) << 24);
}

static void encode_f32(const float *x, int64_t n, float inverse, void *out) {
  (void)inverse;
  memcpy(out, x, (size_t)n * sizeof(float));
}
static void decode_f32(const void *in, int64_t n, float scale, bool add, float *y) {
  const float *x = in;
  (void)scale;
  if (add)
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
  else
    memcpy(y, x, (size_t)n * sizeof(float));
}

static void encode_bf16(const float *x, int64_t n, float inverse, void *out) {
  uint16_t *b = out;
  (void)inverse;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) b[i] = bf16_of_float(x[i]);
}
static void decode_bf16(const void *in, int64_t n, float scale, bool add, float *y) {
  const uint16_t *b = in;
  (void)scale;
  if (add)
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] += float_of_bf16(b[i]);
  else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = float_of_bf16(b[i]);
}

static void encode_int8(const float *x, int64_t n, float inverse, void *out) {
  int8_t *b = out;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) b[i] = (int8_t)nearest_i32(clamp(x[i] * inverse, 127));
}
static void decode_int8(const void *in, int64_t n, float scale, bool add, float *y) {
  const int8_t *b = in;
  if (add)
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = fmaf((float)b[i], scale, y[i]);
  else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = (float)b[i] * scale;
}

/* Codes -7..7 are stored as 1..15; 8 stands where there is no element. */
static inline uint32_t int4_code(float x, float inverse) {
  return (uint32_t)(nearest_i32(clamp(x * inverse, 7)) + 8);
}
static void encode_int4(const float *x, int64_t n, float inverse, void *out) {
  uint8_t *b = out;
  int64_t half = (n + 1) / 2;
  const float *upper = x + half;
#pragma omp simd
  for (int64_t i = 0; i < n / 2; i++)
    b[i] = (uint8_t)(int4_code(x[i], inverse) | int4_code(upper[i], inverse) << 4);
  if (half > n / 2) b[half - 1] = (uint8_t)(int4_code(x[half - 1], inverse) | 8U << 4);
}
static void decode_int4(const void *in, int64_t n, float scale, bool add, float *y) {
  const uint8_t *b = in;
  int64_t half = (n + 1) / 2;
  float *upper = y + half;
  if (add) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) y[i] = fmaf((float)((b[i] & 15) - 8), scale, y[i]);
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) upper[i] = fmaf((float)((b[i] >> 4) - 8), scale, upper[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) y[i] = (float)((b[i] & 15) - 8) * scale;
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) upper[i] = (float)((b[i] >> 4) - 8) * scale;
  }
}

static void encode_fp8(const float *x, int64_t n, float inverse, void *out) {
  uint8_t *b = out;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) b[i] = fp8_of_float(clamp(x[i] * inverse, 448));
}
static void decode_fp8(const void *in, int64_t n, float scale, bool add, float *y) {
  const uint8_t *b = in;
  if (add)
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = fmaf(float_of_fp8(b[i]), scale, y[i]);
  else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = float_of_fp8(b[i]) * scale;
}

#endif
