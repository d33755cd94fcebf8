/* y = x W^T where W is codes and scales: some rows of W at a time become numbers, in a cache, and
 * are multiplied there by the kernel that takes as many rows of x, so that memory is read by the
 * byte. Beyond LANES_MOST rows arithmetic is all that counts, and W becomes numbers whole. */
#include <stdlib.h>

#include "kernels/cpu/gemm.h"

enum {
  CHUNK_BYTES = 128 << 10, /* of W as numbers: a part of a second-level cache */
  CHUNK_STEP = 8           /* rows: a multiple of what the kernels take at a time */
};

static int64_t chunk_rows(int64_t k) {
  int64_t rows = CHUNK_BYTES / (int64_t)sizeof(float) / k / CHUNK_STEP * CHUNK_STEP;
  return max_i64(rows, CHUNK_STEP);
}

/* Rows [first, first + n) of W. */
static void decode_rows(Device *d, const Linear *l, int64_t first, int64_t n, float *w) {
  int64_t k = l->w_OK.dim[1];
  WireSpan before = {k, 0, first * k};
  WireData from = {(char *)l->codes.scales + wire_scale_bytes(l->format, before),
                   (char *)l->codes.payload + wire_payload_bytes(l->format, before), 1, 0};
  WirePart part = {.span = {k, 0, n * k}, .x = tensor_1d(w, DT_F32, n * k), .from = from};
  cpu_dequantize(d, l->format, 1, &part, false);
}

static void multiply_chunks(Device *d, const Linear *l, const RowsGemm *all) {
  int64_t rows = chunk_rows(all->k), chunks = (all->n + rows - 1) / rows;
  int64_t work = all->m * all->n * all->k / 16;
#pragma omp parallel num_threads(d->threads) if (work >= PARALLEL_MIN)
  {
    Device one = *d; /* this thread alone */
    one.threads = 1;
    float *w = scratch_alloc(rows * all->k);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
      RowsGemm g = *all;
      g.n = min_i64(rows, all->n - c * rows);
      g.w = w;
      g.y = all->y + c * rows;
      decode_rows(&one, l, c * rows, g.n, w);
      if (g.m <= dot_most(g.k))
        gemm_dot(&one, &g);
      else
        gemm_lanes(&one, &g);
    }
    free(w);
  }
}

void gemm_codes(Device *d, const Linear *l, Tensor x, Tensor y_MO) {
  int64_t m = x.dim[0], n = l->w_OK.dim[0], k = l->w_OK.dim[1];
  require(linear_codes_fit(l->format, k) && l->codes.n == 1);
  require(is_f32_2d(x, m, k) && is_f32_2d(y_MO, m, n));
  if (m == 0 || n == 0) return;
  float beta = l->add ? 1 : 0;
  if (m <= LANES_MOST) {
    RowsGemm g = {m, n, k, n, 1, beta, tensor_f32(x), NULL, tensor_f32(y_MO)};
    multiply_chunks(d, l, &g);
    return;
  }
  float *w = scratch_alloc(n * k);
  decode_rows(d, l, 0, n, w);
  cpu_gemm(d, GEMM_NT, 1, x, tensor_2d(w, DT_F32, n, k), beta, y_MO);
  free(w);
}
