/* Functions of one float that vectorize: no branches, no calls, no tables. Internal to kernels/cpu.
 */
#ifndef KERNELS_CPU_VECMATH_H
#define KERNELS_CPU_VECMATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

static inline uint32_t bits_of_float(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

/* e^x, error below 2 ulp, denormal results included; NaN stays NaN, overflow gives infinity and
 * -infinity 0. x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its degree-7 Taylor polynomial
 * (remainder below 6e-9 relative); 2^n is applied in two halves, so that it may be denormal. */
static inline float exp_f32(float x) {
  x = x > 89.0f ? 89.0f : x; /* comparisons are false for NaN, which passes */
  x = x < -105.0f ? -105.0f : x;
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
  float t = x * 1.44269504f + magic;
  float n = t - magic;
  float r = x - n * 0.693145752f; /* ln 2, high part: exact product for |n| < 2^9 */
  r = r - n * 1.42860677e-06f;
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  uint32_t i = bits_of_float(t) - bits_of_float(magic); /* n as two's complement */
  uint32_t half = (uint32_t)((int32_t)i >> 1);
  float s1 = float_of_bits((half + 127U) << 23);
  float s2 = float_of_bits((i - half + 127U) << 23);
  return p * s1 * s2;
}

static inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

#endif
