/* Sums of formats without blocks and back to the same format, in registers: a line of each source
 * is read and a line written, so that memory sets the pace. Internal to kernels/cpu. */
#ifndef KERNELS_CPU_QUANT_SUM_PLAIN_H
#define KERNELS_CPU_QUANT_SUM_PLAIN_H

#include "kernels/cpu/quant_feedback.h"
#include "kernels/cpu/quant_sum.h"

enum { PLAIN_AHEAD = 1024 /* bytes of a source, asked for before they are needed */ };

/* Two vectors from place `at` of n sources: -0 plus x is x, also where x is -0. */
ALWAYS Pair plain_sum(WireKind kind, const SumRun *run, const uint8_t *in) {
  const __m512 one = _mm512_set1_ps(1);
  Pair sum = {_mm512_set1_ps(-0.0f), _mm512_set1_ps(-0.0f)};
  for (int r = 0; r < run->n; r++, in += run->stride) {
    Pair p = kind == WIRE_BF16 ? pair_of_bf16((const uint16_t *)(const void *)in)
                               : load_pair(WIRE_F32, in);
    __builtin_prefetch(in + PLAIN_AHEAD);
    if (kind == WIRE_F32) __builtin_prefetch(in + PLAIN_AHEAD + 64);
    sum.low = _mm512_fmadd_ps(p.low, one, sum.low);
    sum.high = _mm512_fmadd_ps(p.high, one, sum.high);
  }
  return sum;
}

ALWAYS void put_line(void *out, __m512i line, bool past_cache) {
  if (past_cache)
    _mm512_stream_si512(out, line);
  else
    _mm512_storeu_si512(out, line);
}

ALWAYS void plain_lines(WireKind kind, const SumRun *run, bool past_cache) {
  const int64_t bytes = step_bytes(kind);
  for (int64_t i = 0; i < run->blocks * run->block / STEP; i++) {
    Pair sum = plain_sum(kind, run, run->in + i * bytes);
    uint8_t *out = run->out + i * bytes;
    if (kind == WIRE_BF16) {
      put_line(out, bf16_line(sum.low, sum.high), past_cache);
    } else {
      put_line(out, _mm512_castps_si512(sum.low), past_cache);
      put_line(out + 64, _mm512_castps_si512(sum.high), past_cache);
    }
  }
}

static inline bool plain_takes(WireKind kind, int64_t block, int n) {
  return (kind == WIRE_F32 || kind == WIRE_BF16) && block % STEP == 0 && n > 1;
}

/* Whole lines that are read much later go past the cache; returns how many blocks it did: all. */
static int64_t plain_run(WireKind kind, const SumRun *run) {
  bool past = run->past_cache;
  if (kind == WIRE_BF16 && past) plain_lines(WIRE_BF16, run, true);
  if (kind == WIRE_BF16 && !past) plain_lines(WIRE_BF16, run, false);
  if (kind == WIRE_F32 && past) plain_lines(WIRE_F32, run, true);
  if (kind == WIRE_F32 && !past) plain_lines(WIRE_F32, run, false);
  return run->blocks;
}

#endif
