/* Tensor values, the table of element types, and conversions of 16- and 64-bit floats. */
#include "core/tensor.h"

#include <string.h>

#include "core/error.h"

static const struct {
  const char *name;
  size_t size;
} dtypes[DT_COUNT] = {
    [DT_F32] = {"F32", 4},   [DT_BF16] = {"BF16", 2},       [DT_F16] = {"F16", 2},
    [DT_F64] = {"F64", 8},   [DT_I8] = {"I8", 1},           [DT_U8] = {"U8", 1},
    [DT_I16] = {"I16", 2},   [DT_I32] = {"I32", 4},         [DT_I64] = {"I64", 8},
    [DT_BOOL] = {"BOOL", 1}, [DT_F8_E4M3] = {"F8_E4M3", 1}, [DT_F8_E5M2] = {"F8_E5M2", 1},
};

size_t dtype_size(DType t) {
  require((unsigned)t < DT_COUNT);
  return dtypes[t].size;
}

const char *dtype_name(DType t) {
  require((unsigned)t < DT_COUNT);
  return dtypes[t].name;
}

int dtype_parse(const char *name) {
  for (int t = 0; t < DT_COUNT; t++)
    if (!strcmp(dtypes[t].name, name)) return t;
  return -1;
}

Tensor tensor_1d(void *data, DType t, int64_t d0) { return (Tensor){data, t, 1, {d0, 1, 1, 1}}; }

Tensor tensor_2d(void *data, DType t, int64_t d0, int64_t d1) {
  return (Tensor){data, t, 2, {d0, d1, 1, 1}};
}

Tensor tensor_3d(void *data, DType t, int64_t d0, int64_t d1, int64_t d2) {
  return (Tensor){data, t, 3, {d0, d1, d2, 1}};
}

int64_t tensor_numel(Tensor t) { return t.dim[0] * t.dim[1] * t.dim[2] * t.dim[3]; }

size_t tensor_bytes(Tensor t) { return (size_t)tensor_numel(t) * dtype_size(t.dtype); }

static float bits_to_f32(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

static uint32_t f32_to_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static float bf16_to_f32(uint16_t h) { return bits_to_f32((uint32_t)h << 16); }

static uint16_t f32_to_bf16(float x) {
  uint32_t u = f32_to_bits(x);
  /* A NaN whose payload sits in the low bits alone would round to infinity: set the quiet bit. */
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return bits_to_f32(sign | 0x7f800000u | mantissa << 13);
  if (exponent > 0) return bits_to_f32(sign | (exponent + 112u) << 23 | mantissa << 13);
  float x = (float)mantissa * 0x1p-24f; /* denormal: exact in float */
  return sign ? -x : x;
}

static uint16_t f32_to_f16(float x) {
  uint32_t u = f32_to_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (a >> 13 & 0x3ffu));
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
  if (a < 0x38800000u) { /* below 2^-14: a multiple of 2^-24, rounded by one float addition */
    float scaled = bits_to_f32(a) + 0.5f; /* ulp of [0.5, 1) is 2^-24 */
    return (uint16_t)(sign | (f32_to_bits(scaled) - 0x3f000000u));
  }
  a += 0xfffu + (a >> 13 & 1u);
  return (uint16_t)(sign | (a - 0x38000000u) >> 13);
}

int convert_to_f32(const void *src, DType from, float *dst, size_t n) {
  const uint16_t *half = src;
  const double *wide = src;
  switch (from) {
    case DT_F32:
      if (n) memcpy(dst, src, n * sizeof *dst);
      return 0;
    case DT_BF16:
      for (size_t i = 0; i < n; i++) dst[i] = bf16_to_f32(half[i]);
      return 0;
    case DT_F16:
      for (size_t i = 0; i < n; i++) dst[i] = f16_to_f32(half[i]);
      return 0;
    case DT_F64:
      for (size_t i = 0; i < n; i++) dst[i] = (float)wide[i];
      return 0;
    default:
      return -1;
  }
}

int convert_from_f32(const float *src, void *dst, DType to, size_t n) {
  uint16_t *half = dst;
  double *wide = dst;
  switch (to) {
    case DT_F32:
      if (n) memcpy(dst, src, n * sizeof *src);
      return 0;
    case DT_BF16:
      for (size_t i = 0; i < n; i++) half[i] = f32_to_bf16(src[i]);
      return 0;
    case DT_F16:
      for (size_t i = 0; i < n; i++) half[i] = f32_to_f16(src[i]);
      return 0;
    case DT_F64:
      for (size_t i = 0; i < n; i++) wide[i] = (double)src[i];
      return 0;
    default:
      return -1;
  }
}
