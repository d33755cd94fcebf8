/* What forward, backward and decoding share of attention. Internal to kernels/cpu. */
#ifndef KERNELS_CPU_ATTENTION_H
#define KERNELS_CPU_ATTENTION_H

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/tile.h"
#include "kernels/cpu/vecmath.h"

/* Scores are computed in tiles of this many queries and keys. Fewer queries, since half of the
 * tiles on the diagonal is wasted; more keys, since a key tile is what is transposed. */
enum { TILE_Q = 32, TILE_K = 64 };

/* One head of one packed sequence. Rows of q, k, v (and their gradients) lie qkv_stride floats
 * apart, rows of out and dout out_stride, lse lse_stride. */
typedef struct AttnHead {
  AttnShape s;
  int64_t len, dim, dim_pad; /* dim_pad: head size rounded up to whole vectors */
  int64_t qkv_stride, out_stride, lse_stride;
  const float *q, *k, *v;
  float *out, *lse;
} AttnHead;

/* The keys that queries [t, t + 1) see are [first_key, t]. */
static inline int64_t first_key(AttnShape s, int64_t t) {
  return s.window > 0 ? max_i64(0, t + 1 - s.window) : 0;
}

void attention_check(Tensor qkv_NQ, Tensor out_NHD, Segments seg, AttnShape s);
/* The head h of sequence b; out and lse are offset likewise (lse may be NULL). */
AttnHead attention_head(const float *qkv, float *out, float *lse, Segments seg, AttnShape s, int b,
                        int64_t h);

/* dst[rows, dim_pad] = scale * src, `pad_rows` rows in all, zero beyond the source. */
void tile_pack(float *dst, int64_t dim_pad, int64_t pad_rows, const float *src, int64_t stride,
               int64_t rows, int64_t dim, float scale);
/* dst[dim, TILE_K] = src transposed; columns from `rows` up to pad_rows are zero. */
void tile_pack_transposed(float *dst, int64_t pad_rows, const float *src, int64_t stride,
                          int64_t rows, int64_t dim);

#endif
