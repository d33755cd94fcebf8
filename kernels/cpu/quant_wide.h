/* quant_codes.h's blocks in vectors of 512 bits, bit for bit; for blocks of whole steps of 32
 * numbers, others take the loops there. Internal to kernels/cpu.
 *
 * A step reads or writes a pair of vectors: 16 neighbours each, the second right behind the first,
 * or for int4 half a block further, where its codes are the high halves of the same bytes. `kind`
 * is a constant wherever these functions are inlined. */
#ifndef KERNELS_CPU_QUANT_WIDE_H
#define KERNELS_CPU_QUANT_WIDE_H

#include <immintrin.h>

#include "kernels/cpu/quant_codes.h"

#define ALWAYS static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

enum { STEP = 32, SOURCE_AHEAD = 1024 /* bytes that are asked for before they are needed */ };
typedef struct Pair {
  __m512 low, high;
} Pair;

/* How a kind's steps lie in a block of n. */
ALWAYS int64_t step_bytes(WireKind kind) {
  return kind == WIRE_INT4   ? STEP / 2
         : kind == WIRE_F32  ? 4 * STEP
         : kind == WIRE_BF16 ? 2 * STEP
                             : STEP;
}
ALWAYS int64_t step_floats(WireKind kind) { return kind == WIRE_INT4 ? STEP / 2 : STEP; }
ALWAYS int64_t pair_apart(WireKind kind, int64_t n) { return kind == WIRE_INT4 ? n / 2 : 16; }

ALWAYS __m512i load_bytes(const void *in) { return _mm512_loadu_si512(in); }
ALWAYS __m128i load_16(const uint8_t *in) { return _mm_loadu_si128((const void *)in); }
ALWAYS __m256i load_32(const uint8_t *in) { return _mm256_loadu_si256((const void *)in); }

ALWAYS __m512 floats_of_bf16(const void *in) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32(in)), 16));
}

/* ---- decoding ---- */

/* An e4m3 with its bits in the places of a 16-bit float is 2^-8 of itself; the scale makes up. */
ALWAYS float pair_scale(WireKind kind, float scale) {
  return kind == WIRE_FP8 ? scale * 256 : scale;
}

ALWAYS Pair load_pair(WireKind kind, const uint8_t *in) {
  if (kind == WIRE_INT8)
    return (Pair){_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(in))),
                  _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(in + 16)))};
  if (kind == WIRE_INT4) { /* looking up takes the low four bits */
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512i codes = _mm512_cvtepu8_epi32(load_16(in));
    return (Pair){_mm512_permutexvar_ps(codes, values),
                  _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), values)};
  }
  if (kind == WIRE_BF16) return (Pair){floats_of_bf16(in), floats_of_bf16(in + STEP)};
  if (kind == WIRE_F32) return (Pair){_mm512_loadu_ps(in), _mm512_loadu_ps(in + 2 * STEP)};
  __m512i halves = _mm512_slli_epi16(_mm512_cvtepi8_epi16(load_32(in)), 7);
  halves = _mm512_and_si512(halves, _mm512_set1_epi16((short)0xbfff));
  return (Pair){_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
}

ALWAYS __m512 decode_one(__m512 code, __m512 scale, bool add, const float *y) {
  return add ? _mm512_fmadd_ps(code, scale, _mm512_loadu_ps(y)) : _mm512_mul_ps(code, scale);
}

/* past_cache: a whole line that is written without being read. */
ALWAYS void put_floats(float *y, __m512 x, bool past_cache) {
  if (past_cache)
    _mm512_stream_ps(y, x);
  else
    _mm512_storeu_ps(y, x);
}

/* The halves of an int4 block come one after the other, so that y is written in order: two streams
 * of whole lines take twice the time of one. */
ALWAYS void decode_wide(WireKind kind, const uint8_t *in, int64_t n, float scale, bool add,
                        bool past_cache, float *y) {
  const __m512 s = _mm512_set1_ps(pair_scale(kind, scale));
  int64_t bytes = step_bytes(kind), floats = step_floats(kind), apart = pair_apart(kind, n);
  for (int64_t i = 0; i < n / STEP; i++) {
    float *low = y + i * floats;
    Pair p = load_pair(kind, in + i * bytes);
    put_floats(low, decode_one(p.low, s, add, low), past_cache);
    if (kind != WIRE_INT4)
      put_floats(low + apart, decode_one(p.high, s, add, low + apart), past_cache);
  }
  for (int64_t i = 0; kind == WIRE_INT4 && i < n / STEP; i++) {
    float *high = y + apart + i * floats;
    Pair p = load_pair(kind, in + i * bytes);
    put_floats(high, decode_one(p.high, s, add, high), past_cache);
  }
}

ALWAYS Pair add_four(WireKind kind, const uint8_t *const *in, int64_t at, const __m512 *scale,
                     Pair sum) {
  for (int k = 0; k < FOUR; k++) {
    Pair p = load_pair(kind, in[k] + at);
    if (at % 64 == 0) __builtin_prefetch(in[k] + at + SOURCE_AHEAD);
    if (kind == WIRE_F32) __builtin_prefetch(in[k] + at + 64 + SOURCE_AHEAD);
    sum.low = _mm512_fmadd_ps(p.low, scale[k], sum.low);
    sum.high = _mm512_fmadd_ps(p.high, scale[k], sum.high);
  }
  return sum;
}

/* -0 plus x is x, also where x is -0. */
ALWAYS __m512 start_sum(bool add, const float *y) {
  return add ? _mm512_loadu_ps(y) : _mm512_set1_ps(-0.0f);
}

ALWAYS void four_wide(WireKind kind, const uint8_t *const *in, int64_t n, const float *scale,
                      bool add, float *y) {
  int64_t bytes = step_bytes(kind), floats = step_floats(kind), apart = pair_apart(kind, n);
  __m512 s[FOUR], none = _mm512_setzero_ps();
  for (int k = 0; k < FOUR; k++) s[k] = _mm512_set1_ps(pair_scale(kind, scale[k]));
  for (int64_t i = 0; i < n / STEP; i++) {
    float *low = y + i * floats, *high = low + apart;
    Pair sum = {start_sum(add, low), kind == WIRE_INT4 ? none : start_sum(add, high)};
    sum = add_four(kind, in, i * bytes, s, sum);
    _mm512_storeu_ps(low, sum.low);
    if (kind != WIRE_INT4) _mm512_storeu_ps(high, sum.high);
  }
  for (int64_t i = 0; kind == WIRE_INT4 && i < n / STEP; i++) {
    float *high = y + apart + i * floats;
    Pair sum = add_four(kind, in, i * bytes, s, (Pair){none, start_sum(add, high)});
    _mm512_storeu_ps(high, sum.high);
  }
}

/* ---- encoding ---- */

ALWAYS uint32_t largest_wide(const float *x, int64_t n) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i a = _mm512_setzero_si512(), b = a;
  for (int64_t i = 0; i < n; i += STEP) {
    a = _mm512_max_epu32(a, _mm512_and_si512(load_bytes(x + i), magnitude));
    b = _mm512_max_epu32(b, _mm512_and_si512(load_bytes(x + i + 16), magnitude));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}

/* x * inverse to the nearest integer of at most `most`. */
ALWAYS __m512i nearest_wide(const float *x, __m512 inverse, int most) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  __m512i t = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_loadu_ps(x), inverse, magic));
  t = _mm512_sub_epi32(t, _mm512_castps_si512(magic));
  return _mm512_max_epi32(_mm512_min_epi32(t, _mm512_set1_epi32(most)), _mm512_set1_epi32(-most));
}

/* x in eighths of its power of two (at least 2^-6), to the nearest: they are counted by the last
 * bits of x / 2^20 + that power, with the power's exponent and the sign of x above. 56 in front
 * makes up for the exponent's bias, modulo 256. |x| is at most 448 once rounded. */
enum { EIGHTHS_BIAS = 56 };
ALWAYS __m512 power_with_bias(__m512 x) {
  enum { A_AND_B_OR_C = 0xea, SIGN_OF_A = 0 << 2, LARGER_MAGNITUDE = 3 };
  const __m512i top = _mm512_set1_epi32(-0x800000), bias = _mm512_set1_epi32(EIGHTHS_BIAS);
  const __m512i least = _mm512_or_si512(_mm512_castps_si512(_mm512_set1_ps(0.015625f)), bias);
  __m512i power = _mm512_ternarylogic_epi32(_mm512_castps_si512(x), top, bias, A_AND_B_OR_C);
  return _mm512_range_ps(_mm512_castsi512_ps(power), _mm512_castsi512_ps(least),
                         SIGN_OF_A | LARGER_MAGNITUDE);
}
ALWAYS __m512 eighths_of(__m512 x, __m512 power) {
  return _mm512_fmadd_ps(x, _mm512_set1_ps(0x1p-20f), power);
}

/* The e4m3 in the low byte: last bits + 8 exponents + 128 signs. */
ALWAYS __m512i fp8_code(__m512 eighths) {
  __m512i e = _mm512_castps_si512(eighths);
#if defined __AVX512VBMI__ && defined __AVX512VNNI__
  /* Bytes that start with the exponent's 8, the sign, and one of no use. */
  const __m512i starts =
      _mm512_set1_epi64(20 | 31 << 8 | (int64_t)(32 + 20) << 32 | (int64_t)(32 + 31) << 40);
  const __m512i weights = _mm512_set1_epi32(1 | 0x80 << 8);
  return _mm512_dpbusd_epi32(e, _mm512_multishift_epi64_epi8(starts, e), weights);
#else
  enum { A_OR_B_AND_C = 0xf8 };
  __m512i code = _mm512_add_epi32(e, _mm512_srli_epi32(e, 20));
  code = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
  return _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(e, 24), _mm512_set1_epi32(0x80),
                                   A_OR_B_AND_C);
#endif
}
ALWAYS __m512i fp8_wide(__m512 x) { return fp8_code(eighths_of(x, power_with_bias(x))); }

ALWAYS __m256i bf16_wide(__m512 x) {
  __m512i u = _mm512_castps_si512(x), top = _mm512_srli_epi32(u, 16);
  __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  __m512i code = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
  code = _mm512_srli_epi32(code, 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  code = _mm512_mask_or_epi32(code, nan, top, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(code);
}

/* Byte k of word i becomes byte 16 k + i: a transposition of 4 by 16. */
ALWAYS __m512i in_order(__m512i words) {
  const __m512i within =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8(words, within));
}

/* past_cache: y is whole lines that are read much later. */
ALWAYS void copy_wide(const float *x, int64_t n, bool past_cache, float *y) {
  for (int64_t i = 0; i < n; i += 16) put_floats(y + i, _mm512_loadu_ps(x + i), past_cache);
}

ALWAYS void encode_wide(WireKind kind, const float *x, int64_t n, float inverse, uint8_t *out) {
  const __m512 by = _mm512_set1_ps(inverse);
  const float *upper = x + pair_apart(kind, n);
  for (int64_t i = 0; i < n / STEP; i++) {
    const float *low = x + i * step_floats(kind), *high = upper + i * step_floats(kind);
    __m128i *to = (void *)(out + i * step_bytes(kind));
    if (kind == WIRE_INT8) {
      _mm_storeu_si128(to, _mm512_cvtepi32_epi8(nearest_wide(low, by, 127)));
      _mm_storeu_si128(to + 1, _mm512_cvtepi32_epi8(nearest_wide(high, by, 127)));
    } else if (kind == WIRE_INT4) {
      __m512i code = _mm512_slli_epi32(nearest_wide(high, by, 7), 4);
      code = _mm512_add_epi32(code, nearest_wide(low, by, 7));
      code = _mm512_add_epi32(code, _mm512_set1_epi32(0x88));
      _mm_storeu_si128(to, _mm512_cvtepi32_epi8(code));
    } else if (kind == WIRE_FP8) {
      __m512i a = fp8_wide(_mm512_mul_ps(_mm512_loadu_ps(low), by));
      __m512i b = fp8_wide(_mm512_mul_ps(_mm512_loadu_ps(high), by));
      _mm_storeu_si128(to, _mm512_cvtepi32_epi8(a));
      _mm_storeu_si128(to + 1, _mm512_cvtepi32_epi8(b));
    } else {
      _mm256_storeu_si256((void *)to, bf16_wide(_mm512_loadu_ps(low)));
      _mm256_storeu_si256((void *)(to + 2), bf16_wide(_mm512_loadu_ps(high)));
    }
  }
}

/* ---- of one kind each ---- */

static void encode_block_wide(WireKind kind, const float *x, int64_t n, float inverse,
                              bool past_cache, void *out) {
  if (kind == WIRE_INT8) encode_wide(WIRE_INT8, x, n, inverse, out);
  if (kind == WIRE_INT4) encode_wide(WIRE_INT4, x, n, inverse, out);
  if (kind == WIRE_FP8) encode_wide(WIRE_FP8, x, n, inverse, out);
  if (kind == WIRE_BF16) encode_wide(WIRE_BF16, x, n, inverse, out);
  if (kind == WIRE_F32) copy_wide(x, n, past_cache, out);
}

static void decode_block_wide(WireKind kind, const void *in, int64_t n, float scale, bool add,
                              bool past_cache, float *y) {
  if (kind == WIRE_INT8) decode_wide(WIRE_INT8, in, n, scale, add, past_cache, y);
  if (kind == WIRE_INT4) decode_wide(WIRE_INT4, in, n, scale, add, past_cache, y);
  if (kind == WIRE_FP8) decode_wide(WIRE_FP8, in, n, scale, add, past_cache, y);
  if (kind == WIRE_BF16) decode_wide(WIRE_BF16, in, n, scale, add, past_cache, y);
  if (kind == WIRE_F32 && add) decode_wide(WIRE_F32, in, n, scale, true, past_cache, y);
  if (kind == WIRE_F32 && !add) copy_wide(in, n, past_cache, y);
}

static void decode_four_wide(WireKind kind, const uint8_t *const *in, int64_t n, const float *scale,
                             bool add, float *y) {
  if (kind == WIRE_INT8) four_wide(WIRE_INT8, in, n, scale, add, y);
  if (kind == WIRE_INT4) four_wide(WIRE_INT4, in, n, scale, add, y);
  if (kind == WIRE_FP8) four_wide(WIRE_FP8, in, n, scale, add, y);
  if (kind == WIRE_BF16) four_wide(WIRE_BF16, in, n, scale, add, y);
  if (kind == WIRE_F32) four_wide(WIRE_F32, in, n, scale, add, y);
}

#endif
