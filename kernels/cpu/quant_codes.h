/* One block of numbers to and from each wire format. Internal to kernels/cpu.
 *
 * Loops have no branches and no calls, so that they vectorize; rounding is by adding a constant
 * whose last bit counts ones. Everything but the loops is in quant.c. */
#ifndef KERNELS_CPU_QUANT_CODES_H
#define KERNELS_CPU_QUANT_CODES_H

#include "kernels/cpu/vecmath.h"
#include "kernels/wire.h"

/* Codes of a block from x, given 1 / scale (0 where the scale is). */
typedef void EncodeBlock(const float *x, int64_t n, float inverse, void *out);
/* And back: y = code * scale, or y += (one rounding). */
typedef void DecodeBlock(const void *in, int64_t n, float scale, bool add, float *y);
/* y += the blocks of four ranks, in order: four times DecodeBlock, but y is loaded once. */
enum { FOUR = 4 };
typedef void DecodeFour(const uint8_t *const *in, int64_t n, const float *scale, float *y);

static inline int32_t clamp(int32_t i, int32_t most) {
  i = i < most ? i : most;
  return i > -most ? i : -most;
}

/* x * y rounded to nearest even, once; |x * y| < 2^22. */
static inline int32_t nearest_product(float x, float y) {
  const float magic = 12582912.0f; /* 1.5 * 2^23 */
  return (int32_t)(bits_of_float(fmaf(x, y, magic)) - bits_of_float(magic));
}

/* NaN stays NaN; overflow gives infinity. */
static inline uint16_t bf16_of_float(float x) {
  uint32_t u = bits_of_float(x);
  uint32_t rounded = (u + 0x7fffU + ((u >> 16) & 1U)) >> 16;
  uint32_t quiet = (u >> 16) | 0x40U;
  return (uint16_t)((u & 0x7fffffffU) > 0x7f800000U ? quiet : rounded);
}
static inline float float_of_bf16(uint16_t b) { return float_of_bits((uint32_t)b << 16); }

/* e4m3 without infinities: 4 bits of exponent with bias 7, 3 of mantissa; beyond 448, 448. A
 * float's exponent has bias 127; below 2^-6 codes count in steps of 2^-9. */
static inline uint8_t fp8_of_float(float x) {
  uint32_t u = bits_of_float(x), magnitude = u & 0x7fffffffU, most = bits_of_float(448.0f);
  magnitude = magnitude < most ? magnitude : most;
  uint32_t normal = ((magnitude + 0x7ffffU + ((magnitude >> 20) & 1U)) >> 20) - (120U << 3);
  uint32_t small = (uint32_t)nearest_product(float_of_bits(magnitude), 512.0f);
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

/* ---- scales on the wire ---- */

static inline void put_scale(WireFormat f, void *scales, int64_t i, float s) {
  if (f.scale == DT_BF16)
    ((uint16_t *)scales)[i] = bf16_of_float(s);
  else
    ((float *)scales)[i] = s;
}

static inline float get_scale(WireFormat f, const void *scales, int64_t i) {
  return f.scale == DT_BF16 ? float_of_bf16(((const uint16_t *)scales)[i])
                            : ((const float *)scales)[i];
}

/* ---- blocks ---- */

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

static void four_f32(const uint8_t *const *in, int64_t n, const float *scale, float *y) {
  const float *a = (const void *)in[0], *b = (const void *)in[1], *c = (const void *)in[2],
              *d = (const void *)in[3];
  (void)scale;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) y[i] = (((y[i] + a[i]) + b[i]) + c[i]) + d[i];
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

static void four_bf16(const uint8_t *const *in, int64_t n, const float *scale, float *y) {
  const uint16_t *a = (const void *)in[0], *b = (const void *)in[1], *c = (const void *)in[2],
                 *d = (const void *)in[3];
  (void)scale;
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    y[i] = (((y[i] + float_of_bf16(a[i])) + float_of_bf16(b[i])) + float_of_bf16(c[i])) +
           float_of_bf16(d[i]);
}

static void encode_int8(const float *x, int64_t n, float inverse, void *out) {
  int8_t *b = out;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) b[i] = (int8_t)clamp(nearest_product(x[i], inverse), 127);
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

static void four_int8(const uint8_t *const *in, int64_t n, const float *scale, float *y) {
  const int8_t *a = (const void *)in[0], *b = (const void *)in[1], *c = (const void *)in[2],
               *d = (const void *)in[3];
  float s = scale[0], t = scale[1], u = scale[2], v = scale[3];
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float sum = fmaf((float)b[i], t, fmaf((float)a[i], s, y[i]));
    y[i] = fmaf((float)d[i], v, fmaf((float)c[i], u, sum));
  }
}

/* Codes -7..7 are stored as 1..15; 8 stands where there is no element. */
static inline uint32_t int4_code(float x, float inverse) {
  return (uint32_t)(clamp(nearest_product(x, inverse), 7) + 8);
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

static void four_int4(const uint8_t *const *in, int64_t n, const float *scale, float *y) {
  const uint8_t *a = in[0], *b = in[1], *c = in[2], *d = in[3];
  float s = scale[0], t = scale[1], u = scale[2], v = scale[3], *upper = y + (n + 1) / 2;
#pragma omp simd
  for (int64_t i = 0; i < (n + 1) / 2; i++) {
    float sum = fmaf((float)((a[i] & 15) - 8), s, y[i]);
    sum = fmaf((float)((b[i] & 15) - 8), t, sum);
    sum = fmaf((float)((c[i] & 15) - 8), u, sum);
    y[i] = fmaf((float)((d[i] & 15) - 8), v, sum);
  }
#pragma omp simd
  for (int64_t i = 0; i < n / 2; i++) {
    float sum = fmaf((float)((a[i] >> 4) - 8), s, upper[i]);
    sum = fmaf((float)((b[i] >> 4) - 8), t, sum);
    sum = fmaf((float)((c[i] >> 4) - 8), u, sum);
    upper[i] = fmaf((float)((d[i] >> 4) - 8), v, sum);
  }
}

static void encode_fp8(const float *x, int64_t n, float inverse, void *out) {
  uint8_t *b = out;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) b[i] = fp8_of_float(x[i] * inverse);
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
static void four_fp8(const uint8_t *const *in, int64_t n, const float *scale, float *y) {
  const uint8_t *a = in[0], *b = in[1], *c = in[2], *d = in[3];
  float s = scale[0], t = scale[1], u = scale[2], v = scale[3];
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float sum = fmaf(float_of_fp8(b[i]), t, fmaf(float_of_fp8(a[i]), s, y[i]));
    y[i] = fmaf(float_of_fp8(d[i]), v, fmaf(float_of_fp8(c[i]), u, sum));
  }
}

#endif
