/* Sums of int4 blocks and back to int4 in integers of 16 bits, as kernels.h has it: one block of
 * any size by loops, runs of blocks of 128 and 256 by vectors of 512 bits, the same bits. Internal
 * to kernels/cpu. */
#ifndef KERNELS_CPU_QUANT_INT4_H
#define KERNELS_CPU_QUANT_INT4_H

#include "kernels/cpu/quant_codes.h"

enum {
  INT4_SOURCES = 16, /* at most, and 2 at least */
  INT4_LEAST = 2048, /* largest sum that is still exact enough */
  INT4_RUN = 128     /* blocks */
};

static inline bool int4_takes(WireFormat from, WireFormat to, int n) {
  return from.kind == WIRE_INT4 && to.kind == WIRE_INT4 && n >= 2 && n <= INT4_SOURCES;
}

/* Blocks in a row, from `n` sources that lie `stride` bytes apart. */
typedef struct Int4Run {
  WireFormat from, to;
  const uint8_t *in;
  const char *scales;
  size_t stride;
  int n;
  uint8_t *out;
  char *out_scales;
  bool past_cache;       /* out is read much later, and whole lines */
  int64_t block, blocks; /* elements, how many: at most INT4_RUN */
} Int4Run;

/* What the scales of a run are in units of their block's. */
typedef struct Int4Weights {
  int16_t weight[INT4_SOURCES][INT4_RUN];
  float unit[INT4_RUN]; /* 0: sums in integers would be wrong */
} Int4Weights;

static void int4_weights(const Int4Run *run, Int4Weights *w) {
  float scale[INT4_SOURCES][INT4_RUN], sum[INT4_RUN] = {0};
  uint32_t negative[INT4_RUN] = {0};
  for (int r = 0; r < run->n; r++) {
    const char *scales = run->scales + (size_t)r * run->stride;
    for (int64_t i = 0; i < run->blocks; i++) {
      scale[r][i] = get_scale(run->from, scales, i);
      sum[i] += scale[r][i];
      negative[i] |= bits_of_float(scale[r][i]) >> 31;
    }
  }
  for (int64_t i = 0; i < run->blocks; i++) {
    bool fits = sum[i] >= 0x1p-100f && sum[i] < 0x1p100f && !negative[i];
    uint32_t unit = (bits_of_float(sum[i]) & 0x7f800000U) - (11U << 23);
    w->unit[i] = fits ? float_of_bits(unit) : 0;
    sum[i] = fits ? float_of_bits((254U << 23) - unit) : 0; /* 1 / unit */
  }
  for (int r = 0; r < run->n; r++)
    for (int64_t i = 0; i < run->blocks; i++)
      w->weight[r][i] = (int16_t)nearest_product(sum[i] > 0 ? scale[r][i] : 0, sum[i]);
}

/* The scale of a block whose largest sum is `most` units, and what a unit counts in codes, times
 * 2^23: the largest integer below. 0 where sums in floats must do. */
static inline void int4_finish(const Int4Run *run, float unit, uint32_t most, float *scale,
                               int16_t *multiplier) {
  float s = (float)(int32_t)most * unit / 7;
  if (run->to.scale == DT_BF16) s = float_of_bf16(bf16_of_float(s));
  bool fits = unit > 0 && most >= INT4_LEAST;
  *scale = s;
  *multiplier = (int16_t)(fits ? (int32_t)ceilf(0x1p23f * unit / s) - 1 : 0);
}

/* In the low four bits. */
static inline uint32_t int4_code_of_sum(int16_t sum, int16_t multiplier) {
  return (uint32_t)(((sum * multiplier >> 16) + 64 + 8 * 128) >> 7);
}

/* ---- one block, any size ---- */

/* sum += weight * the low and the high halves of `half` bytes. */
static inline void int4_add(const uint8_t *in, int64_t half, int16_t weight, int16_t *sum) {
  int16_t *high = sum + half;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) sum[i] = (int16_t)(sum[i] + ((in[i] & 15) - 8) * weight);
#pragma omp simd
  for (int64_t i = 0; i < half; i++) high[i] = (int16_t)(high[i] + ((in[i] >> 4) - 8) * weight);
}

/* Block i of a run whose blocks have the bytes of `n` elements; returns whether it did it. */
static bool int4_block(const Int4Run *run, const Int4Weights *w, int64_t i) {
  int16_t sum[WIRE_MAX_BLOCK];
  int64_t half = (run->block + 1) / 2;
  uint32_t most = 0;
  if (w->unit[i] == 0) return false;
  memset(sum, 0, (size_t)half * 2 * sizeof *sum);
  for (int r = 0; r < run->n; r++)
    int4_add(run->in + (size_t)r * run->stride + i * half, half, w->weight[r][i], sum);
#pragma omp simd reduction(max : most)
  for (int64_t k = 0; k < 2 * half; k++) {
    uint32_t magnitude = (uint32_t)(sum[k] < 0 ? -sum[k] : sum[k]);
    most = magnitude > most ? magnitude : most;
  }
  float scale;
  int16_t by;
  int4_finish(run, w->unit[i], most, &scale, &by);
  if (by == 0) return false;
  uint8_t *out = run->out + i * half;
#pragma omp simd
  for (int64_t k = 0; k < half; k++)
    out[k] = (uint8_t)(int4_code_of_sum(sum[k], by) | int4_code_of_sum(sum[half + k], by) << 4);
  put_scale(run->to, run->out_scales, i, scale);
  return true;
}

#endif
