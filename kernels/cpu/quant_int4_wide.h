/* quant_int4.h's sums in vectors of 512 bits, for blocks of 128 and 256. Internal to kernels/cpu.
 *
 * A lane is one 16-bit word of the payload, whose four codes are looked up, as products, in a table
 * of 16 that a vector holds twice: looking up takes the low five bits, so nothing is masked. Which
 * element a code belongs to does not matter, as all sources and the result agree. */
#ifndef KERNELS_CPU_QUANT_INT4_WIDE_H
#define KERNELS_CPU_QUANT_INT4_WIDE_H

#include "kernels/cpu/quant_int4.h"
#include "kernels/cpu/quant_wide.h"

enum { INT4_ELEMENTS = 256, INT4_BYTES_AHEAD = 1024 /* asked for before they are needed */ };

/* A block between its sums and its codes. multiplier 0: it cannot be done. */
typedef struct Int4State {
  _Alignas(64) int16_t sum[2][INT4_ELEMENTS];
  float scale[2];
  int16_t multiplier[2];
} Int4State;

ALWAYS __m512i int4_products(int16_t weight) {
  const __m512i codes = _mm512_set_epi16(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8, 7,
                                         6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  return _mm512_mullo_epi16(codes, _mm512_set1_epi16(weight));
}

ALWAYS uint32_t largest_word(__m512i words) {
  __m256i a = _mm256_max_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
  __m128i b = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  __m128i least = _mm_minpos_epu16(_mm_xor_si128(b, _mm_set1_epi32(-1)));
  return 0xffffU - ((uint32_t)_mm_cvtsi128_si32(least) & 0xffffU);
}

ALWAYS void int4_source(const uint8_t *in, int16_t weight, int lines, bool first, __m512i *sum) {
  const __m512i products = int4_products(weight);
  UNROLLED for (int k = 0; k < 4 * lines; k++) {
    __m512i codes = _mm512_srli_epi16(load_bytes(in + k / 4 * 64), (unsigned)k % 4 * 4);
    __m512i product = _mm512_permutexvar_epi16(codes, products);
    if (k % 4 == 0) __builtin_prefetch(in + k / 4 * 64 + INT4_BYTES_AHEAD);
    sum[k] = first ? product : _mm512_add_epi16(sum[k], product);
  }
}

/* The sums of a block; its scale is divided while its neighbours keep the vectors busy. */
ALWAYS void int4_sum(const Int4Run *run, const Int4Weights *w, int lines, int64_t i, Int4State *s) {
  __m512i sum[8], most = _mm512_setzero_si512();
  const uint8_t *in = run->in + i * lines * 64;
  int4_source(in, w->weight[0][i], lines, true, sum);
  for (int r = 1; r < run->n; r++)
    int4_source(in + (size_t)r * run->stride, w->weight[r][i], lines, false, sum);
  UNROLLED for (int k = 0; k < 4 * lines; k++) {
    most = _mm512_max_epu16(most, _mm512_abs_epi16(sum[k]));
    _mm512_store_si512(s->sum[i % 2] + 32 * k, sum[k]);
  }
  int4_finish(run, w->unit[i], largest_word(most), &s->scale[i % 2], &s->multiplier[i % 2]);
}

/* The low bits of a where the mask has ones, else b. */
ALWAYS __m512i below(int mask, __m512i a, __m512i b) {
  enum { MASK_A_ELSE_B = 0xca };
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16((short)mask), a, b, MASK_A_ELSE_B);
}

ALWAYS __m512i int4_words(const int16_t *sum, __m512i by) {
  const __m512i half = _mm512_set1_epi16(64 + 8 * 128); /* a code counts 128 */
  __m512i code[4];
  UNROLLED for (int k = 0; k < 4; k++) code[k] =
      _mm512_add_epi16(_mm512_mulhi_epi16(load_bytes(sum + 32 * k), by), half);
  __m512i low = below(0x000f, _mm512_srli_epi16(code[0], 7), _mm512_srli_epi16(code[1], 3));
  __m512i high = below(0x0fff, _mm512_slli_epi16(code[2], 1), _mm512_slli_epi16(code[3], 5));
  return below(0x00ff, low, high);
}

/* Returns whether the block could be done. */
ALWAYS bool int4_put(const Int4Run *run, int lines, int64_t i, const Int4State *s) {
  const __m512i by = _mm512_set1_epi16(s->multiplier[i % 2]);
  if (s->multiplier[i % 2] == 0) return false;
  UNROLLED for (int k = 0; k < lines; k++) {
    __m512i words = int4_words(s->sum[i % 2] + 128 * k, by);
    uint8_t *out = run->out + (i * lines + k) * 64;
    if (run->past_cache)
      _mm512_stream_si512((void *)out, words);
    else
      _mm512_storeu_si512(out, words);
  }
  put_scale(run->to, run->out_scales, i, s->scale[i % 2]);
  return true;
}

/* While one block is summed, the one before it is coded. */
ALWAYS void int4_lines(const Int4Run *run, const Int4Weights *w, int lines, bool *done) {
  Int4State s;
  int4_sum(run, w, lines, 0, &s);
  for (int64_t i = 1; i < run->blocks; i++) {
    int4_sum(run, w, lines, i, &s);
    done[i - 1] = int4_put(run, lines, i - 1, &s);
  }
  done[run->blocks - 1] = int4_put(run, lines, run->blocks - 1, &s);
  if (run->past_cache) _mm_sfence();
}

static void int4_blocks_wide(const Int4Run *run, const Int4Weights *w, bool *done) {
  if (run->block == 256)
    int4_lines(run, w, 2, done);
  else
    int4_lines(run, w, 1, done);
}

#endif
