/* Deltas in vectors of 32 values, bit for bit what delta.c's loops do. Internal to kernels/cpu. */
#ifndef KERNELS_CPU_DELTA_WIDE_H
#define KERNELS_CPU_DELTA_WIDE_H

#include <immintrin.h>

#include "kernels/cpu/delta.h"

enum { DELTA_WIDTH = 32, BYTES_AHEAD = 4096 /* of floats, asked for before they are needed */ };

/* Round to nearest even; NaN stays NaN. */
static inline __m256i delta_bf16(__m512 x) {
  __m512i u = _mm512_castps_si512(x), top = _mm512_srli_epi32(u, 16);
  __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  __m512i bits = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  bits = _mm512_srli_epi32(bits, 16);
  bits = _mm512_mask_or_epi32(bits, nan, top, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(bits);
}

static inline __m512i delta_bits_of_floats(const float *x) {
  __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
#ifdef __AVX512BF16__
  /* One instruction, but to it denormals are zeros. */
  enum { DENORMAL = 0x20 };
  __mmask16 some = _mm512_fpclass_ps_mask(first, DENORMAL);
  __mmask16 more = _mm512_fpclass_ps_mask(second, DENORMAL);
  if (__builtin_expect(_kortestz_mask16_u8(some, more), 1))
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
#endif
  __m512i low = _mm512_castsi256_si512(delta_bf16(first));
  return _mm512_inserti64x4(low, delta_bf16(second), 1);
}

static inline void ask_ahead(const float *x) {
  _mm_prefetch((const char *)x + BYTES_AHEAD, _MM_HINT_T0);
  _mm_prefetch((const char *)x + BYTES_AHEAD + 64, _MM_HINT_T0);
}

/* Where the next entry and the next value of a list go. */
typedef struct DeltaEnds {
  uint16_t *entry, *value;
} DeltaEnds;

/* Looks at 32 values from place `at` of a block on; returns which changed. No branch depends on
 * them: it would be guessed wrong every second time. */
static inline __mmask32 delta_scan_32(DeltaEnds *ends, int at, __m512i now, uint16_t *last) {
  const __m512i places =
      _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13,
                       12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  _mm_prefetch((const char *)last + BYTES_AHEAD / 2, _MM_HINT_T0);
  __m512i old = _mm512_loadu_si512(last);
  __mmask32 changed = _mm512_cmpneq_epi16_mask(now, old);
  __m512i apart = _mm512_sub_epi16(_mm512_max_epu16(now, old), _mm512_min_epu16(now, old));
  __mmask32 near = _mm512_cmple_epu16_mask(apart, _mm512_set1_epi16(7)), far = changed & ~near;
  __m512i code = _mm512_set1_epi16(DELTA_ESCAPE);
  code = _mm512_mask_add_epi16(code, near, code, _mm512_sub_epi16(now, old));
  __m512i place = _mm512_add_epi16(places, _mm512_set1_epi16((short)at));
  __m512i entry = _mm512_add_epi16(_mm512_slli_epi16(place, 4), code);
  _mm512_storeu_si512(ends->entry, _mm512_maskz_compress_epi16(changed, entry));
  ends->entry += __builtin_popcount(changed);
  if (far) {
    _mm512_storeu_si512(ends->value, _mm512_maskz_compress_epi16(far, now));
    ends->value += __builtin_popcount(far);
  }
  _mm512_storeu_si512(last, now); /* a masked store takes several times as long from memory */
  return changed;
}

static inline __m512i delta_now(DType type, const void *x, int at) {
  if (type == DT_BF16) return _mm512_loadu_si512((const uint16_t *)x + at);
  ask_ahead((const float *)x + at);
  return delta_bits_of_floats((const float *)x + at);
}

/* The whole vectors of a block; returns how many values those are. */
static int delta_scan_wide(DeltaScan *s, DType type, const void *now, uint16_t *last, int n) {
  DeltaEnds ends = {s->entry, s->value};
  int at = 0;
  for (; at + DELTA_WIDTH <= n; at += DELTA_WIDTH)
    s->bitmap[at / DELTA_WIDTH] = delta_scan_32(&ends, at, delta_now(type, now, at), last + at);
  s->changes = (int)(ends.entry - s->entry);
  s->escapes = (int)(ends.value - s->value);
  return at;
}

/* Changes 32 values by a word of the bitmap; codes: those of its changes, a byte each, and some.
 * Returns how many of them were escapes. */
static inline int delta_change_32(uint16_t *x, uint32_t changed, const uint8_t *codes,
                                  const uint16_t *value) {
  const __m512i escape = _mm512_set1_epi16(DELTA_ESCAPE);
  __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)codes));
  code = _mm512_mask_expand_epi16(escape, changed, code);
  __mmask32 far = changed & _mm512_cmpeq_epi16_mask(code, escape);
  int escapes = __builtin_popcount(far);
  __m512i old = _mm512_loadu_si512(x);
  __m512i now = _mm512_add_epi16(old, _mm512_sub_epi16(code, escape));
  if (far) {
    __m512i values = _mm512_maskz_loadu_epi16((__mmask32)((1ULL << escapes) - 1), value);
    now = _mm512_mask_expand_epi16(now, far, values);
  }
  _mm512_storeu_si512(x, now);
  return escapes;
}

#endif
