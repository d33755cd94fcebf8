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

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Eights __attribute__((vector_size(32)));

/* Rows become columns. */
static inline __attribute__((always_inline)) void turn_eight(Eight x[8]) {
  const Eights low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
  const Eights left = {0, 1, 8, 9, 4, 5, 12, 13}, right = {2, 3, 10, 11, 6, 7, 14, 15};
  const Eights front = {0, 1, 2, 3, 8, 9, 10, 11}, back = {4, 5, 6, 7, 12, 13, 14, 15};
  Eight pair[8], four[8];
  for (int i = 0; i < 8; i += 2) {
    pair[i] = __builtin_shuffle(x[i], x[i + 1], low);
    pair[i + 1] = __builtin_shuffle(x[i], x[i + 1], high);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      four[i + 2 * j] = __builtin_shuffle(pair[i + j], pair[i + j + 2], left);
      four[i + 2 * j + 1] = __builtin_shuffle(pair[i + j], pair[i + j + 2], right);
    }
  for (int j = 0; j < 4; j++) {
    x[j] = __builtin_shuffle(four[j], four[j + 4], front);
    x[j + 4] = __builtin_shuffle(four[j], four[j + 4], back);
  }
}

/* Eight rows of x at eight depths. */
static void transpose_eight(const float *x, int64_t k, float *xt, int64_t lanes) {
  Eight v[8];
  for (int i = 0; i < 8; i++) v[i] = *(const Eight *)(x + i * k);
  turn_eight(v);
  for (int q = 0; q < 8; q++) *(Eight *)(xt + q * lanes) = v[q];
}

/* Lanes [c, c + lanes) of x at depth [p, p + depth), zero beyond x's rows: xt[depth, lanes]. */
static void transpose_x(const RowsGemm *g, int64_t c, int64_t p, int64_t depth, float *xt) {
  int64_t rows = min_i64(LANES, g->m - c), lanes = round_up(rows, VEC);
  int64_t rows8 = rows / 8 * 8, depth8 = depth / 8 * 8;
  const float *x = g->x + c * g->k + p;
  for (int64_t i = 0; i < rows8; i += 8)
    for (int64_t q = 0; q < depth8; q += 8)
      transpose_eight(x + i * g->k + q, g->k, xt + q * lanes + i, lanes);
  for (int64_t q = 0; q < depth; q++) {
    for (int64_t i = q < depth8 ? rows8 : 0; i < rows; i++) xt[q * lanes + i] = x[i * g->k + q];
    for (int64_t i = rows; i < lanes; i++) xt[q * lanes + i] = 0;
  }
}

/* Eight lanes of eight rows of yt to rows of y. */
static void store_eight(const RowsGemm *g, const float *yt, int64_t lanes, float *y, float beta) {
  Eight x[8];
  for (int r = 0; r < 8; r++) x[r] = *(const Eight *)(yt + r * lanes);
  turn_eight(x);
  for (int i = 0; i < 8; i++) {
    Eight *to = (Eight *)(y + i * g->stride);
    Eight old = {0}; /* what is not wanted may be NaN */
    if (beta > 0 || beta < 0) old = beta * *to;
    *to = g->alpha * x[i] + old;
  }
}

/* yt[w_rows, lanes] goes to rows c.. and columns j.. of y; passes after the first add. */
static void store_turned(const RowsGemm *g, const float *yt, int64_t lanes, int64_t c, int64_t j,
                         bool add) {
  int64_t rows = min_i64(LANES, g->m - c), columns = min_i64(TILE_ROWS, g->n - j), i = 0;
  float beta = add ? 1 : g->beta;
  for (; columns == 8 && i + 8 <= rows; i += 8)
    store_eight(g, yt + i, lanes, g->y + (c + i) * g->stride + j, beta);
  for (; i < rows; i++) {
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

static void lanes_alone(const RowsGemm *g, float *xt) {
  for (int64_t p = 0; p < g->k; p += DEPTH) {
    int64_t depth = min_i64(DEPTH, g->k - p);
    for (int64_t c = 0; c < g->m; c += LANES) transpose_x(g, c, p, depth, xt + c * depth);
#pragma omp for schedule(static) nowait /* the same rows of W in every pass */
    for (int64_t j = 0; j < g->n; j += TILE_ROWS) lanes_rows(g, xt, j, p, depth);
  }
}

static void lanes_together(const RowsGemm *g, float *xt) {
  for (int64_t p = 0; p < g->k; p += DEPTH) {
    int64_t depth = min_i64(DEPTH, g->k - p);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < g->m; c += LANES) transpose_x(g, c, p, depth, xt + c * depth);
#pragma omp for schedule(static)
    for (int64_t j = 0; j < g->n; j += TILE_ROWS) lanes_rows(g, xt, j, p, depth);
  }
}

/* A small x is turned by every thread for itself, which takes less than to wait for each other. */
void gemm_lanes(Device *d, const RowsGemm *g) {
  enum { SMALL = 16384 };
  int64_t size = min_i64(DEPTH, g->k) * round_up(g->m, LANES);
  int64_t work = g->m * g->n * g->k / 16; /* of an element-wise op of the same length */
  bool small = g->m * g->k <= SMALL;
  float *shared = small ? NULL : scratch_alloc(size);
#pragma omp parallel num_threads(d->threads) if (work >= PARALLEL_MIN)
  if (small) {
    float *own = scratch_alloc(size);
    lanes_alone(g, own);
    free(own);
  } else {
    lanes_together(g, shared);
  }
  free(shared);
}
