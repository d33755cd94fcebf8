/* quant_reference: the quantized formats one element at a time, without tricks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/quant.h"

/* ---- e4m3: all 127 magnitudes, the nearest one, ties to the even code ---- */

static float fp8_magnitude(int code) {
  int exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf((float)(8 + mantissa), exponent - 10);
}

static uint8_t fp8_nearest(float x) {
  int best = 0;
  float magnitude = fabsf(x);
  for (int c = 1; c <= 0x7e; c++) {
    float here = fabsf(fp8_magnitude(c) - magnitude),
          there = fabsf(fp8_magnitude(best) - magnitude);
    if (here < there || (here == there && c % 2 == 0)) best = c;
  }
  return (uint8_t)(best | (signbit(x) ? 0x80 : 0));
}

/* ---- one element ---- */

static float code_limit(WireKind kind) {
  return kind == WIRE_INT4 ? 7 : kind == WIRE_INT8 ? 127 : 448;
}

/* The code of x: an integer, or the bits of an e4m3. */
static int element_code(WireKind kind, float x, float scale) {
  double most = (double)code_limit(kind);
  float inverse = scale > 0 ? 1 / scale : 0;
  if (isnan(scale)) x = inverse = 0;
  if (kind == WIRE_FP8) return fp8_nearest(x * inverse);
  return (int)nearbyint(fmin(fmax((double)x * (double)inverse, -most), most));
}

static float element_value(WireKind kind, int code, float scale) {
  if (kind != WIRE_FP8) return (float)code * scale;
  float magnitude = fp8_magnitude(code & 0x7f);
  return (code & 0x80 ? -magnitude : magnitude) * scale;
}

/* Element i of a block of n, in the block's bytes. */
static void put_code(WireKind kind, uint8_t *bytes, int64_t n, int64_t i, int code) {
  int64_t half = (n + 1) / 2;
  if (kind != WIRE_INT4)
    bytes[i] = (uint8_t)code;
  else if (i < half)
    bytes[i] = (uint8_t)((bytes[i] & 0xf0) | (code + 8));
  else
    bytes[i - half] = (uint8_t)((bytes[i - half] & 0x0f) | (code + 8) << 4);
}

static int get_code(WireKind kind, const uint8_t *bytes, int64_t n, int64_t i) {
  int64_t half = (n + 1) / 2;
  if (kind == WIRE_INT8) return (int8_t)bytes[i];
  if (kind == WIRE_FP8) return bytes[i];
  return i < half ? (bytes[i] & 15) - 8 : (bytes[i - half] >> 4) - 8;
}

/* ---- blocks ---- */

/* The size of the block that starts at element `at` of the span. */
static int64_t block_size(WireFormat f, WireSpan s, int64_t at) {
  int64_t left = s.width - (s.first + at) % s.width;
  return left < f.block ? left : f.block;
}

static float scale_at(WireFormat f, const void *scales, int64_t i) {
  float x;
  if (f.scale == DT_F32) return ((const float *)scales)[i];
  convert_to_f32((const char *)scales + 2 * i, DT_BF16, &x, 1);
  return x;
}

void quant_reference_encode(WireFormat f, WireSpan s, const float *x, WireData to) {
  uint8_t *bytes = to.payload;
  int64_t index = 0;
  for (int64_t at = 0, n; at < s.count; at += n, index++) {
    n = block_size(f, s, at);
    float largest = 0;
    uint32_t magnitude;
    for (int64_t i = 0; i < n; i++)
      if (!(fabsf(x[at + i]) <= largest))
        largest = isfinite(x[at + i]) ? fabsf(x[at + i]) : INFINITY;
    memcpy(&magnitude, &largest, sizeof magnitude);
    float scale = quant_scale(f, magnitude);
    convert_from_f32(&scale, (char *)to.scales + (size_t)index * dtype_size(f.scale), f.scale, 1);
    int64_t size = f.kind == WIRE_INT4 ? (n + 1) / 2 : n;
    memset(bytes, f.kind == WIRE_INT4 ? 0x88 : 0, (size_t)size);
    for (int64_t i = 0; i < n; i++)
      put_code(f.kind, bytes, n, i, element_code(f.kind, x[at + i], scale));
    bytes += size;
  }
}

void quant_reference_decode(WireFormat f, WireSpan s, WireData from, float *y) {
  const uint8_t *bytes = from.payload;
  int64_t index = 0;
  for (int64_t at = 0, n; at < s.count; at += n, index++) {
    n = block_size(f, s, at);
    float scale = scale_at(f, from.scales, index);
    for (int64_t i = 0; i < n; i++)
      y[at + i] = element_value(f.kind, get_code(f.kind, bytes, n, i), scale);
    bytes += f.kind == WIRE_INT4 ? (n + 1) / 2 : n;
  }
}

/* ---- sums of int4 ---- */

enum { MOST = 17 /* sources; one more than integers are summed of */ };

/* One block from several ranks. */
typedef struct Sum4 {
  const uint8_t *bytes[MOST];
  float scale[MOST];
  int n;
} Sum4;

static float sum4_float(const Sum4 *in, int64_t n, int64_t i) {
  float sum = -0.0f;
  for (int r = 0; r < in->n; r++)
    sum = fmaf((float)get_code(WIRE_INT4, in->bytes[r], n, i), in->scale[r], sum);
  return sum;
}

/* What sums are counted in, or 0: they must be floats. */
static float sum4_unit(const Sum4 *in) {
  float all = 0;
  for (int r = 0; r < in->n; r++) {
    if (signbit(in->scale[r])) return 0;
    all += in->scale[r];
  }
  if (in->n < 2 || in->n > 16 || !(all >= 0x1p-100f && all < 0x1p100f)) return 0;
  return ldexpf(1, ilogbf(all) - 11);
}

static int sum4_integer(const Sum4 *in, float unit, int64_t n, int64_t i) {
  int sum = 0;
  for (int r = 0; r < in->n; r++)
    sum += get_code(WIRE_INT4, in->bytes[r], n, i) * (int)nearbyintf(in->scale[r] / unit);
  return sum;
}

static float sum4_scale(WireFormat f, float unit, int most, void *out) {
  float scale = (float)most * unit / 7;
  convert_from_f32(&scale, out, f.scale, 1);
  convert_to_f32(out, f.scale, &scale, 1);
  return scale;
}

/* A block and its scale. */
static void sum4_block(WireFormat f, const Sum4 *in, int64_t n, void *out_scale, uint8_t *out) {
  float unit = sum4_unit(in), x[WIRE_MAX_BLOCK];
  int most = 0;
  for (int64_t i = 0; i < n && unit > 0; i++) {
    int sum = abs(sum4_integer(in, unit, n, i));
    most = sum > most ? sum : most;
  }
  if (most < 2048) {
    for (int64_t i = 0; i < n; i++) x[i] = sum4_float(in, n, i);
    f.block = WIRE_MAX_BLOCK;
    quant_reference_encode(f, (WireSpan){n, 0, n}, x, (WireData){out_scale, out, 1, 0});
    return;
  }
  double codes = ceil((double)(0x1p23f * unit / sum4_scale(f, unit, most, out_scale))) - 1;
  memset(out, 0x88, (size_t)(n + 1) / 2);
  for (int64_t i = 0; i < n; i++) {
    double code = sum4_integer(in, unit, n, i) * codes / 0x1p23;
    put_code(WIRE_INT4, out, n, i, (int)floor(code + 0.5));
  }
}

void quant_reference_requantize(WireFormat f, WireFormat f_to, WireSpan s, WireData from,
                                WireData to) {
  const uint8_t *bytes = from.payload;
  char *scales = to.scales;
  uint8_t *out = to.payload;
  int64_t index = 0;
  for (int64_t at = 0, n; at < s.count; at += n, index++) {
    Sum4 in = {.n = from.n};
    n = block_size(f, s, at);
    for (int r = 0; r < from.n; r++) {
      in.bytes[r] = bytes + (size_t)r * from.stride;
      in.scale[r] = scale_at(f, (const char *)from.scales + (size_t)r * from.stride, index);
    }
    sum4_block(f_to, &in, n, scales + (size_t)index * dtype_size(f_to.scale), out);
    bytes += (n + 1) / 2;
    out += (n + 1) / 2;
  }
}
