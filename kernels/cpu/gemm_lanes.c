/* y = x W^T for some dozens of rows of x: the matrices of a decode step, where W is read once and
 * from far away.
 *
 * Rows of x become the lanes of vectors: x is transposed and stays in cache, and each element of W
 * is loaded once and broadcast against the lanes. A few rows of W at a time are done for all of x
 * while the next ones are fetched. The result comes out transposed and is turned on its way out.
 * Every element is summed in order of depth, whatever the other rows of x and the number of
 * threads. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/tile.h"

enum {
  DEPTH = 1024, /* of x in one pass: LANES_MOST lanes of it are half a second-level cache */
  LANES = 64    /* of one product: as wide as tile_gemm's widest block */
};

/* Lanes [c, c + lanes) of x at depth [p, p + depth), zero beyond x's rows: xt[depth, lanes]. */
static void transpose_x(const RowsGemm *g, int64_t c, int64_t p, int64_t depth, float *xt) {
  int64_t rows = min_i64(LANES, g->m - c), lanes = round_up(rows, VEC);
  for (int64_t q = 0; q < depth; q++) {
    for (int64_t i = 0; i < rows; i++) xt[q * lanes + i] = g->x[(c + i) * g->k + p + q];
    for (int64_t i = rows; i < lanes; i++) xt[q * lanes + i] = 0;
  }
}

/* yt[w_rows, lanes] goes to rows c.. and columns j.. of y; passes after the first add. */
static void store_turned(const RowsGemm *g, const float *yt, int64_t lanes, int64_t c, int64_t j,
                         bool add) {
  int64_t rows = min_i64(LANES, g->m - c), columns = min_i64(TILE_ROWS, g->n - j);
  float beta = add ? 1 : g->beta;
  for (int64_t i = 0; i < rows; i++) {
    float *y = g->y + (c + i) * g->stride + j;
    for (int64_t r = 0; r < columns; r++) {
      float old = beta == 0 ? 0 : beta * y[r]; /* what is not wanted may be NaN */
      y[r] = g->alpha * yt[r * lanes + i] + old;
    }
  }
}

/* The last rows of W with rows of zeros behind them. */
static TileA pad_rows(TileA a, int64_t rows, int64_t depth, float *copy) {
  memset(copy, 0, sizeof(float) * (size_t)(TILE_ROWS * depth));
  for (int64_t r = 0; r < rows; r++)
    memcpy(copy + r * depth, a.p + r * a.by_row, sizeof(float) * (size_t)depth);
  return (TileA){copy, depth, 1};
}

/* Rows [j, j + TILE_ROWS) of W, or those that are left, against all of x. */
static void lanes_rows(const RowsGemm *g, const float *xt, int64_t j, int64_t p, int64_t depth) {
  float yt[TILE_ROWS * LANES], last[TILE_ROWS * DEPTH];
  TileA a = {g->w + j * g->k + p, g->k, 1};
  for (int64_t r = TILE_ROWS; r < 2 * TILE_ROWS && j + r < g->n; r++)
    for (int64_t q = 0; q < depth; q += 16) __builtin_prefetch(a.p + r * g->k + q);
  if (j + TILE_ROWS > g->n) a = pad_rows(a, g->n - j, depth, last);
  for (int64_t c = 0; c < g->m; c += LANES) {
    int64_t lanes = round_up(min_i64(LANES, g->m - c), VEC);
    require(lanes > 0 && lanes <= LANES);
    const float *x = xt + c * depth;
    tile_gemm(TILE_ROWS, lanes, depth, a, x, lanes, yt, lanes, false);
    store_turned(g, yt, lanes, c, j, p > 0);
  }
}

void gemm_lanes(Device *d, const RowsGemm *g) {
  float *xt = scratch_alloc(min_i64(DEPTH, g->k) * round_up(g->m, LANES));
  int64_t work = g->m * g->n * g->k / 16; /* of an element-wise op of the same length */
#pragma omp parallel num_threads(d->threads) if (work >= PARALLEL_MIN)
  for (int64_t p = 0; p < g->k; p += DEPTH) {
    int64_t depth = min_i64(DEPTH, g->k - p);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < g->m; c += LANES) transpose_x(g, c, p, depth, xt + c * depth);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < g->n; j += TILE_ROWS) lanes_rows(g, xt, j, p, depth);
  }
  free(xt);
}
