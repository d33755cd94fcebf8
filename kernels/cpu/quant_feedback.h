/* Error feedback in vectors of 512 bits, quant_codes.h's arithmetic bit for bit; for blocks of
 * whole steps of 64 numbers. Internal to kernels/cpu.
 *
 * What arrives is not decoded: it is at hand as a float while its code is made. A step is four
 * vectors, in order, or for int4 two of the lower and two of the upper half of the block. `kind` is
 * a constant wherever these functions are inlined. */
#ifndef KERNELS_CPU_QUANT_FEEDBACK_H
#define KERNELS_CPU_QUANT_FEEDBACK_H

#include "kernels/cpu/quant_wide.h"

enum { FED_STEP = 64, ERRORS_AHEAD = 1024 /* asked for before they are needed */ };

/* Where vector k of step i is in a block of n. */
ALWAYS int64_t fed_at(WireKind kind, int64_t n, int64_t i, int k) {
  return kind == WIRE_INT4 ? k / 2 * (n / 2) + 32 * i + k % 2 * 16 : FED_STEP * i + 16 * k;
}

ALWAYS Pair pair_of_bf16(const uint16_t *in) {
  const __m512i low = _mm512_setr_epi32(0 << 16, 1 << 16, 2 << 16, 3 << 16, 4 << 16, 5 << 16,
                                        6 << 16, 7 << 16, 8 << 16, 9 << 16, 10 << 16, 11 << 16,
                                        12 << 16, 13 << 16, 14 << 16, 15 << 16);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16));
  const __mmask32 upper = 0xaaaaaaaa;
  __m512i x = load_bytes(in);
  return (Pair){_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, low, x)),
                _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(upper, high, x))};
}

/* x to BF16 in the upper halves; what is below them is of no use. Not for NaN. */
ALWAYS __m512i upper_bf16(__m512 x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
}

/* The upper halves of a, then those of b. */
ALWAYS __m512i upper_halves(__m512i a, __m512i b) {
  enum { MASK_A_ELSE_B = 0xca };
  const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                         30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  __m512i words = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xffff), _mm512_srli_epi32(a, 16), b,
                                            MASK_A_ELSE_B);
  return _mm512_permutexvar_epi16(order, words);
}

/* a, then b. */
ALWAYS __m512i bf16_line(__m512 a, __m512 b) {
  if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q))
    return _mm512_inserti64x4(_mm512_castsi256_si512(bf16_wide(a)), bf16_wide(b), 1);
  return upper_halves(upper_bf16(a), upper_bf16(b));
}

ALWAYS void put_bf16_pair(uint16_t *out, __m512 a, __m512 b, bool tame) {
  __m512i line = tame ? upper_halves(upper_bf16(a), upper_bf16(b)) : bf16_line(a, b);
  _mm512_storeu_si512(out, line);
}

/* ---- a block with its errors, and its largest magnitude ---- */

static uint32_t add_error_wide(const float *x, const uint16_t *error, int64_t n, float *sent) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i a = _mm512_setzero_si512(), b = a;
  for (int64_t i = 0; i < n; i += 32) {
    Pair e = pair_of_bf16(error + i);
    __m512 low = _mm512_add_ps(_mm512_loadu_ps(x + i), e.low);
    __m512 high = _mm512_add_ps(_mm512_loadu_ps(x + i + 16), e.high);
    __builtin_prefetch(error + i + ERRORS_AHEAD);
    a = _mm512_max_epu32(a, _mm512_and_si512(_mm512_castps_si512(low), magnitude));
    b = _mm512_max_epu32(b, _mm512_and_si512(_mm512_castps_si512(high), magnitude));
    _mm512_storeu_ps(sent + i, low);
    _mm512_storeu_ps(sent + i + 16, high);
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}

/* ---- codes ---- */

/* What is coded and what arrives. Codes are in the low bits of words, int4's less 8. */
typedef struct Coded {
  __m512i code;
  __m512 value;
} Coded;

ALWAYS Coded coded_integer(__m512 x, __m512 inverse, float most) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  __m512 t = _mm512_fmadd_ps(x, inverse, magic);
  t = _mm512_min_ps(t, _mm512_set1_ps(12582912.0f + most));
  t = _mm512_max_ps(t, _mm512_set1_ps(12582912.0f - most));
  return (Coded){_mm512_castps_si512(t), _mm512_sub_ps(t, magic)};
}

/* As fp8_wide; what was added for rounding is taken off again, and zeros keep their sign. */
ALWAYS Coded coded_fp8(__m512 x, __m512 inverse) {
  x = _mm512_mul_ps(x, inverse);
  __m512 power = power_with_bias(x), eighths = eighths_of(x, power);
  __m512 value = _mm512_mul_ps(_mm512_sub_ps(eighths, power), _mm512_set1_ps(0x1p20f));
  value = _mm512_or_ps(value, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
  return (Coded){fp8_code(eighths), value};
}

ALWAYS Coded coded(WireKind kind, __m512 x, __m512 inverse) {
  if (kind == WIRE_FP8) return coded_fp8(x, inverse);
  return coded_integer(x, inverse, kind == WIRE_INT8 ? 127 : 7);
}

ALWAYS void put_codes(WireKind kind, const Coded *c, uint8_t *out) {
  enum { MASK_A_ELSE_B = 0xca };
  if (kind == WIRE_INT4) {
    const __m512i bias = _mm512_set1_epi32(0x88);
    for (int k = 0; k < 2; k++) {
      __m512i high = _mm512_slli_epi32(c[2 + k].code, 4);
      __m512i both = _mm512_add_epi32(_mm512_add_epi32(c[k].code, high), bias);
      _mm_storeu_si128((void *)(out + 16 * k), _mm512_cvtepi32_epi8(both));
    }
    return;
  }
  const __m512i byte = _mm512_set1_epi16(0xff), half = _mm512_set1_epi32(0xffff);
  __m512i a =
      _mm512_ternarylogic_epi32(byte, c[0].code, _mm512_slli_epi32(c[1].code, 8), MASK_A_ELSE_B);
  __m512i b =
      _mm512_ternarylogic_epi32(byte, c[2].code, _mm512_slli_epi32(c[3].code, 8), MASK_A_ELSE_B);
  a = _mm512_ternarylogic_epi32(half, a, _mm512_slli_epi32(b, 16), MASK_A_ELSE_B);
  _mm512_storeu_si512(out, in_order(a));
}

/* ---- errors ---- */

/* got is rounded by itself, as where it is stored: its rounding is named, so that no compiler fuses
 * it into the difference. */
ALWAYS __m512 product(__m512 code, __m512 scale) {
  return _mm512_mul_round_ps(code, scale, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ALWAYS __m512 error_left(__m512 sent, __m512 got, float keep, __m512 error) {
  __m512 lost = _mm512_mul_ps(_mm512_set1_ps(1 - keep), _mm512_sub_ps(sent, got));
  return _mm512_fmadd_ps(_mm512_set1_ps(keep), error, lost);
}

/* Codes of a block whose scale is a number, and the errors behind them. */
ALWAYS void encode_fed(WireKind kind, const float *sent, int64_t n, float scale, float keep,
                       uint16_t *error, uint8_t *out) {
  const __m512 by = _mm512_set1_ps(scale > 0 ? 1 / scale : 0), s = _mm512_set1_ps(scale);
  for (int64_t i = 0; i < n / FED_STEP; i++) {
    Coded c[4];
    UNROLLED for (int k = 0; k < 4; k += 2) {
      int64_t at = fed_at(kind, n, i, k);
      Pair e = pair_of_bf16(error + at);
      __m512 low = _mm512_loadu_ps(sent + at), high = _mm512_loadu_ps(sent + at + 16);
      c[k] = coded(kind, low, by);
      c[k + 1] = coded(kind, high, by);
      low = error_left(low, product(c[k].value, s), keep, e.low);
      high = error_left(high, product(c[k + 1].value, s), keep, e.high);
      put_bf16_pair(error + at, low, high, true);
    }
    put_codes(kind, c, out + i * (kind == WIRE_INT4 ? 32 : 64));
  }
}

static void encode_fed_wide(WireKind kind, const float *sent, int64_t n, float scale, float keep,
                            uint16_t *error, uint8_t *out) {
  if (kind == WIRE_INT8) encode_fed(WIRE_INT8, sent, n, scale, keep, error, out);
  if (kind == WIRE_INT4) encode_fed(WIRE_INT4, sent, n, scale, keep, error, out);
  if (kind == WIRE_FP8) encode_fed(WIRE_FP8, sent, n, scale, keep, error, out);
}

/* ---- formats without blocks: all at once ---- */

/* past_cache: out is whole lines that are read much later. */
static void fed_f32_wide(const float *x, int64_t n, float keep, uint16_t *error, bool past_cache,
                         float *out) {
  for (int64_t i = 0; i < n; i += 32) {
    Pair e = pair_of_bf16(error + i);
    __m512 low = _mm512_add_ps(_mm512_loadu_ps(x + i), e.low);
    __m512 high = _mm512_add_ps(_mm512_loadu_ps(x + i + 16), e.high);
    __builtin_prefetch(error + i + ERRORS_AHEAD);
    put_floats(out + i, low, past_cache);
    put_floats(out + i + 16, high, past_cache);
    low = error_left(low, low, keep, e.low);
    high = error_left(high, high, keep, e.high);
    put_bf16_pair(error + i, low, high, false);
  }
}

static void fed_bf16_wide(const float *x, int64_t n, float keep, uint16_t *error, uint16_t *out) {
  for (int64_t i = 0; i < n; i += 32) {
    Pair e = pair_of_bf16(error + i);
    __m512 low = _mm512_add_ps(_mm512_loadu_ps(x + i), e.low);
    __m512 high = _mm512_add_ps(_mm512_loadu_ps(x + i + 16), e.high);
    __builtin_prefetch(error + i + ERRORS_AHEAD);
    put_bf16_pair(out + i, low, high, false);
    Pair got = pair_of_bf16(out + i);
    low = error_left(low, got.low, keep, e.low);
    high = error_left(high, got.high, keep, e.high);
    put_bf16_pair(error + i, low, high, false);
  }
}

#endif
