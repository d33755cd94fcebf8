/* y = x W^T for very few rows of x, by dot products: vectors run along the depth, so W is read as
 * it lies, once, and nothing is turned around. A block is up to 4 rows of x against 4 of W; a
 * little ahead the next rows of W are fetched. Every element is summed in the same order whatever
 * the other rows and the number of threads. */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/tile.h"

enum { W_ROWS = 4 };

static void store_dot(const RowsGemm *g, int64_t i, int64_t j, float dot) {
  float *y = g->y + i * g->stride + j;
  *y = g->alpha * dot + (g->beta == 0 ? 0 : g->beta * *y); /* what is not wanted may be NaN */
}

/* Rows [i, i + x_rows) of x against rows [j, j + w_rows) of W. Inlined with both constant. ahead:
 * rows of W to fetch, or NULL. */
static inline __attribute__((always_inline)) void dot_block(const RowsGemm *g, int x_rows,
                                                            int w_rows, int64_t i, int64_t j,
                                                            const float *ahead) {
  int64_t k = g->k, whole = k / VEC * VEC;
  const float *x = g->x + i * k, *w = g->w + j * k;
  Vec sum[4][W_ROWS];
  for (int a = 0; a < x_rows; a++)
    for (int b = 0; b < w_rows; b++) sum[a][b] = (Vec){0};
  for (int64_t p = 0; p < whole; p += VEC) {
    Vec wv[W_ROWS];
    for (int b = 0; b < w_rows; b++) {
      wv[b] = vec_keep(vec_load(w + b * k + p));
      if (ahead) __builtin_prefetch(ahead + b * k + p);
    }
    for (int a = 0; a < x_rows; a++) {
      Vec xv = vec_keep(vec_load(x + a * k + p));
      for (int b = 0; b < w_rows; b++) sum[a][b] += xv * wv[b];
    }
  }
  for (int a = 0; a < x_rows; a++)
    for (int b = 0; b < w_rows; b++) {
      float dot = vec_sum(sum[a][b]);
      for (int64_t p = whole; p < k; p++) dot += x[a * k + p] * w[b * k + p];
      store_dot(g, i + a, j + b, dot);
    }
}

static void dot_rows(const RowsGemm *g, int64_t j) {
  enum { AHEAD = 2 * W_ROWS };
  const float *ahead = j + AHEAD + W_ROWS <= g->n ? g->w + (j + AHEAD) * g->k : NULL;
  int64_t i = 0;
  for (; i + 4 <= g->m; i += 4, ahead = NULL) dot_block(g, 4, W_ROWS, i, j, ahead);
  for (; i + 2 <= g->m; i += 2, ahead = NULL) dot_block(g, 2, W_ROWS, i, j, ahead);
  for (; i < g->m; i++) dot_block(g, 1, W_ROWS, i, j, ahead);
}

void gemm_dot(Device *d, const RowsGemm *g) {
  int64_t work = g->m * g->n * g->k / 16, whole = g->n / W_ROWS * W_ROWS;
#pragma omp parallel for num_threads(d->threads) schedule(static) if (work >= PARALLEL_MIN)
  for (int64_t j = 0; j < whole; j += W_ROWS) dot_rows(g, j);
  for (int64_t j = whole; j < g->n; j++)
    for (int64_t i = 0; i < g->m; i++) dot_block(g, 1, 1, i, j, NULL);
}
