/* What attention's forward and backward share. Internal to kernels/cpu.
 *
 * Score tiles are transposed, [keys, queries], with queries in the lanes of vectors: then maximum,
 * sum and mask go lane by lane, and only the queries' tile must be transposed. */
#ifndef KERNELS_CPU_ATTENTION_H
#define KERNELS_CPU_ATTENTION_H

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/tile.h"
#include "kernels/cpu/vecmath.h"

/* Fewer queries than keys in a tile, since half of the tiles on the diagonal is wasted. */
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

/* A score tile: queries [t0, t0 + rows) against keys [key, key + keys). pad_keys is
 * rounded up to what tile_gemm takes; the lanes are always TILE_Q, so that loops over them have a
 * constant length. */
typedef struct ScoreTile {
  int64_t t0, rows;
  int64_t key, keys, pad_keys;
} ScoreTile;

/* The keys that query t sees are [first_key, t]. */
static inline int64_t first_key(AttnShape s, int64_t t) {
  return s.window > 0 ? max_i64(0, t + 1 - s.window) : 0;
}

/* The tile of keys [key, key + TILE_K), cut behind the last query. */
static inline ScoreTile score_tile(int64_t t0, int64_t rows, int64_t key) {
  int64_t keys = min_i64(TILE_K, t0 + rows - key);
  return (ScoreTile){t0, rows, key, keys, round_up(keys, TILE_ROWS)};
}

/* Whether every query of the tile sees every key of it. */
static inline bool tile_is_whole(const ScoreTile *x, AttnShape s) {
  return x->key + x->keys <= x->t0 + 1 && x->key >= first_key(s, x->t0 + x->rows - 1);
}

/* Whether the query in a lane sees key j of the tile. */
static inline bool lane_sees(int32_t lane, int32_t j, int32_t ahead, int32_t window) {
  int32_t back = lane + ahead - j; /* how far the key lies behind the query */
  return back >= 0 && back < window;
}
static inline int32_t window_or_all(AttnShape s) { return s.window > 0 ? s.window : INT32_MAX; }

void attention_check(Tensor qkv_NQ, Tensor out_NHD, Segments seg, AttnShape s);
/* Head h of sequence b; out and lse are offset likewise (lse may be NULL). */
AttnHead attention_head(const float *qkv, float *out, float *lse, Segments seg, AttnShape s, int b,
                        int64_t h);

/* dst[pad_rows, pad_dim] = scale * src[rows, dim], zero beyond. */
void tile_pack(float *dst, int64_t pad_rows, int64_t pad_dim, const float *src, int64_t stride,
               int64_t rows, int64_t dim, float scale);
/* dst[dim, TILE_Q] = scale * src[rows, dim] transposed, zero in lanes from rows on. */
void tile_pack_transposed(float *dst, const float *src, int64_t stride, int64_t rows, int64_t dim,
                          float scale);

#endif
