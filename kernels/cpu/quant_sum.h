/* Sums of quantized blocks and back to codes of the same kind, all in registers: quant_codes.h's
 * arithmetic in vectors of 512 bits, bit for bit, for blocks of 128 and 256. Internal to
 * kernels/cpu.
 *
 * A lane of fp8 is one 32-bit word of the payload and holds the words' codes one after another, so
 * that codes are taken out and put back by shifts; which element a code belongs to does not matter,
 * as all sources and the result agree. int8 is spread out in order and gathered at the end. int4
 * is in quant_int4_wide.h. */
#ifndef KERNELS_CPU_QUANT_SUM_H
#define KERNELS_CPU_QUANT_SUM_H

#include <float.h>

#include "kernels/cpu/quant_wide.h"

enum { BYTES_AHEAD = 512 }; /* of a source, asked for before they are needed */

ALWAYS float code_most(WireKind kind) { return kind == WIRE_INT8 ? 127 : 448; }

enum { LINE_VECTORS = 4 }; /* of 16 sums, which 64 bytes of payload make */

/* What a code is scaled by: an e4m3's bits in the places of a float are 2^-120 of it. */
static inline float code_unit(WireKind kind) { return kind == WIRE_FP8 ? 0x1p120f : 1; }

ALWAYS __m512 add_code(__m512 code, __m512 scale, bool first, __m512 sum) {
  return first ? _mm512_mul_ps(code, scale) : _mm512_fmadd_ps(code, scale, sum);
}

ALWAYS void add_int8(const uint8_t *in, __m512 scale, bool first, __m512 *sum) {
  UNROLLED for (int k = 0; k < 4; k++) {
    __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(in + 16 * k)));
    sum[k] = add_code(code, scale, first, sum[k]);
  }
}

/* Sign, exponent and mantissa into the places of a float, first of two bytes in a word's upper
 * half. */
ALWAYS void add_fp8(const uint8_t *in, bool behind, __m512 scale, bool first, __m512 *sum) {
  const __m512i places = _mm512_set1_epi16((short)0x87f0), upper = _mm512_set1_epi32(-65536);
  __m512i x = load_bytes(in);
  __m512i even = _mm512_srai_epi16(behind ? load_bytes(in - 1) : _mm512_slli_epi16(x, 8), 4),
          odd = _mm512_srai_epi16(x, 4);
  even = _mm512_and_si512(even, places);
  odd = _mm512_and_si512(odd, places);
  __m512i code[4] = {_mm512_slli_epi32(even, 16), _mm512_slli_epi32(odd, 16),
                     _mm512_and_si512(even, upper), _mm512_and_si512(odd, upper)};
  UNROLLED for (int k = 0; k < 4; k++) sum[k] =
      add_code(_mm512_castsi512_ps(code[k]), scale, first, sum[k]);
}

/* The same by way of 16-bit floats: codes below the smallest normal e4m3 are none of those below
 * the smallest normal float, which cost a multiplication 80 cycles. */
ALWAYS void add_small_fp8(const uint8_t *in, __m512 scale, bool first, __m512 *sum) {
  const __m512i places = _mm512_set1_epi16((short)0xbf80);
  const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                         30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  __m512i x = load_bytes(in), half[2] = {_mm512_slli_epi16(x, 8), x};
  scale = _mm512_mul_ps(scale, _mm512_set1_ps(0x1p-112f));
  UNROLLED for (int k = 0; k < 2; k++) {
    __m512i words = _mm512_and_si512(_mm512_srai_epi16(half[k], 1), places);
    words = _mm512_permutexvar_epi16(order, words);
    __m512 lower = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    __m512 upper = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
    sum[k] = add_code(lower, scale, first, sum[k]);
    sum[k + 2] = add_code(upper, scale, first, sum[k + 2]);
  }
}

/* small: fp8's by way of 16-bit floats. */
ALWAYS void add_source(WireKind kind, int lines, const uint8_t *in, float scale, bool small,
                       bool first, __m512 *sum) {
  const __m512 s = _mm512_set1_ps(scale);
  UNROLLED for (int i = 0; i < lines; i++) {
    __m512 *here = sum + i * LINE_VECTORS;
    __builtin_prefetch(in + 64 * i + BYTES_AHEAD);
    if (kind == WIRE_INT8) add_int8(in + 64 * i, s, first, here);
    if (kind == WIRE_FP8 && !small) add_fp8(in + 64 * i, i > 0, s, first, here);
    if (kind == WIRE_FP8 && small) add_small_fp8(in + 64 * i, s, first, here);
  }
}

/* Finite numbers only. */
ALWAYS __m512 largest_sums(const __m512 *sum, int n) {
  enum { CLEAR_SIGN = 2 << 2, LARGER_MAGNITUDE = 3 };
  __m512 most[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  UNROLLED for (int i = 0; i < n; i++) most[i % 2] =
      _mm512_range_ps(most[i % 2], sum[i], CLEAR_SIGN | LARGER_MAGNITUDE);
  return _mm512_max_ps(most[0], most[1]);
}

/* ---- codes in the low bits of words ---- */

/* No code is beyond the largest: the scale is at most 2^-8 too small, and 127 / 127.5 is less. */
ALWAYS __m512i integer_wide(__m512 x, __m512 inverse) {
  return _mm512_castps_si512(_mm512_fmadd_ps(x, inverse, _mm512_set1_ps(12582912.0f)));
}

ALWAYS __m512i sum_code(WireKind kind, __m512 x, __m512 inverse) {
  __m512 y = _mm512_mul_ps(x, inverse);
  if (kind == WIRE_FP8) return fp8_wide(y);
  return integer_wide(x, inverse);
}

/* Words of codes: each vector's low bits are pushed in from above. */
ALWAYS __m512i push_codes(WireKind kind, const __m512 *sum, __m512 inverse) {
  __m512i words = _mm512_setzero_si512();
  UNROLLED for (int k = 0; k < LINE_VECTORS; k++) {
    __m512i code = sum_code(kind, sum[k], inverse);
#ifdef __AVX512VBMI2__
    words = _mm512_shrdi_epi32(words, code, 8);
#else
    words = _mm512_or_si512(_mm512_srli_epi32(words, 8), _mm512_slli_epi32(code, 24));
#endif
  }
  return words;
}

/* past_cache: out is read much later, if here at all; lines are written without being read. */
ALWAYS void store_sums(WireKind kind, int lines, const __m512 *sum, float inverse, bool past_cache,
                       uint8_t *out) {
  const __m512 by = _mm512_set1_ps(inverse);
  UNROLLED for (int i = 0; i < lines; i++) {
    __m512i words = push_codes(kind, sum + i * LINE_VECTORS, by);
    if (kind == WIRE_INT8) words = in_order(words);
    if (past_cache)
      _mm512_stream_si512((void *)(out + 64 * i), words);
    else
      _mm512_storeu_si512(out + 64 * i, words);
  }
}

/* ---- a run of blocks ----
 *
 * A block's codes wait for its scale, which waits for all its sums; so while one block is summed,
 * the one before it is coded. Whole groups of blocks apart were slower: reading came to a stop. */

enum { SUM_ELEMENTS = 256, SUM_BLOCKS = 128, SUM_SOURCES = 16 /* at most */ };

typedef struct SumRun {
  WireFormat from, to;
  const uint8_t *in; /* payloads and scales of the first of n sources */
  const char *scales;
  size_t stride; /* between sources */
  int n;
  uint8_t *out;
  char *out_scales;
  bool past_cache;       /* out is whole lines */
  int64_t block, blocks; /* elements, how many */
} SumRun;

/* Scales of a run as floats (of the sources, as codes want them), and the block between its sum and
 * its codes. */
typedef struct SumState {
  _Alignas(64) float sum[2][SUM_ELEMENTS];
  float inverse[2];
  float from[SUM_SOURCES][SUM_BLOCKS], to[SUM_BLOCKS];
} SumState;

/* n scales as floats; returns whether one is so large, or none, that the tricks above may fail. */
static bool read_scales(WireFormat f, const char *scales, int64_t n, float *out) {
  const uint16_t *half = (const void *)scales;
  int wild = 0;
  if (f.scale == DT_BF16)
    for (int64_t i = 0; i < n; i++) out[i] = float_of_bf16(half[i]);
  else
    memcpy(out, scales, (size_t)n * sizeof *out);
  for (int64_t i = 0; i < n; i++) wild |= !(out[i] < 128);
  return wild;
}

/* Reads the sources' scales; returns the blocks before the first with a wild one. */
static int64_t tame_blocks(const SumRun *run, SumState *s) {
  int64_t tame = run->blocks < SUM_BLOCKS ? run->blocks : SUM_BLOCKS;
  for (int r = 0; r < run->n; r++) {
    if (!read_scales(run->from, run->scales + (size_t)r * run->stride, tame, s->from[r])) continue;
    int64_t first = 0;
    while (s->from[r][first] < 128) first++;
    tame = first;
  }
  for (int r = 0; r < run->n; r++)
    for (int64_t i = 0; i < tame; i++) s->from[r][i] *= code_unit(run->from.kind);
  return tame;
}

/* A scale below the smallest normal number becomes zero, and so do its codes. */
ALWAYS void finish_scale(const SumRun *run, float scale, int64_t i, SumState *s) {
  if (run->to.scale == DT_BF16) scale = float_of_bf16(bf16_of_float(scale));
  scale = scale < FLT_MIN ? 0 : scale;
  s->to[i] = scale;
  s->inverse[i % 2] = scale > 0 ? 1 / scale : 0;
}

ALWAYS void add_sources(WireKind kind, int lines, const SumRun *run, int64_t i, bool small,
                        const SumState *s, __m512 *sum) {
  const uint8_t *in = run->in + i * lines * 64;
  add_source(kind, lines, in, s->from[0][i], small, true, sum);
  for (int r = 1; r < run->n; r++)
    add_source(kind, lines, in + (size_t)r * run->stride, s->from[r][i], small, false, sum);
}

/* Whether the sources' first lines have codes below the smallest normal e4m3: then there are more.
 * Zeros are fine. */
ALWAYS bool has_small_fp8(const SumRun *run, const uint8_t *in) {
  const __m512i exponent = _mm512_set1_epi8(0x78), mantissa = _mm512_set1_epi8(0x07);
  __mmask64 normal = ~(__mmask64)0;
  for (int r = 0; r < run->n; r++)
    normal = _mm512_mask_test_epi8_mask(normal, load_bytes(in + (size_t)r * run->stride), exponent);
  if (__builtin_expect(normal == ~(__mmask64)0, true)) return false;
  __mmask64 small = 0;
  for (int r = 0; r < run->n; r++) {
    __m512i x = load_bytes(in + (size_t)r * run->stride);
    small |= _mm512_mask_test_epi8_mask(_mm512_testn_epi8_mask(x, exponent), x, mantissa);
  }
  return small != 0;
}

ALWAYS void sum_block(WireKind kind, int lines, const SumRun *run, int64_t i, SumState *s) {
  __m512 sum[16];
  int vectors = lines * LINE_VECTORS;
  if (kind == WIRE_FP8 && __builtin_expect(has_small_fp8(run, run->in + i * lines * 64), false))
    add_sources(kind, lines, run, i, true, s, sum);
  else
    add_sources(kind, lines, run, i, false, s, sum);
  finish_scale(run, _mm512_reduce_max_ps(largest_sums(sum, vectors)) / code_most(kind), i, s);
  UNROLLED for (int k = 0; k < vectors; k++) _mm512_store_ps(s->sum[i % 2] + 16 * k, sum[k]);
}

ALWAYS void code_block(WireKind kind, int lines, const SumRun *run, int64_t i, SumState *s) {
  __m512 sum[16];
  UNROLLED for (int k = 0; k < lines * LINE_VECTORS; k++) sum[k] =
      _mm512_load_ps(s->sum[i % 2] + 16 * k);
  store_sums(kind, lines, sum, s->inverse[i % 2], run->past_cache, run->out + i * lines * 64);
}

ALWAYS void sum_lines(WireKind kind, int lines, const SumRun *run, int64_t blocks, SumState *s) {
  sum_block(kind, lines, run, 0, s);
  for (int64_t i = 1; i < blocks; i++) {
    sum_block(kind, lines, run, i, s);
    code_block(kind, lines, run, i - 1, s);
  }
  code_block(kind, lines, run, blocks - 1, s);
}

ALWAYS void sum_kind(WireKind kind, const SumRun *run, int64_t blocks, SumState *s) {
  if (run->block == 256)
    sum_lines(kind, 4, run, blocks, s);
  else
    sum_lines(kind, 2, run, blocks, s);
}

static inline bool sum_takes(WireKind kind, int64_t block, int n) {
  return (block == 128 || block == 256) && n <= SUM_SOURCES &&
         (kind == WIRE_INT8 || kind == WIRE_FP8);
}

/* Returns how many blocks it did: at most SUM_BLOCKS, and none that may not be finite. */
static int64_t sum_run(WireKind kind, const SumRun *run) {
  SumState s;
  int64_t blocks = tame_blocks(run, &s);
  if (blocks == 0) return 0;
  if (kind == WIRE_INT8) sum_kind(WIRE_INT8, run, blocks, &s);
  if (kind == WIRE_FP8) sum_kind(WIRE_FP8, run, blocks, &s);
  if (run->past_cache) _mm_sfence();
  for (int64_t i = 0; i < blocks; i++) put_scale(run->to, run->out_scales, i, s.to[i]);
  return blocks;
}

#endif
