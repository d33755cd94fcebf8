/* Embedding and row selection. The scattered sums are split by columns, so that every element is
 * added to by one thread only, in row order. */
#include <string.h>

#include "kernels/cpu/cpu.h"

void cpu_gather_rows(Device *d, Tensor x_NC, Tensor rows_R, Tensor y_RC) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1], r = rows_R.dim[0];
  require(is_f32(x_NC, 2) && is_i32_1d(rows_R, r) && is_f32_2d(y_RC, r, c));
  const float *x = tensor_f32(x_NC);
  const int32_t *rows = tensor_i32(rows_R);
  float *y = tensor_f32(y_RC);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (r * c >= PARALLEL_MIN)
  for (int64_t i = 0; i < r; i++) {
    if (rows[i] < 0 || rows[i] >= n)
      die("row or token id %d is outside [0, %lld)", rows[i], (long long)n);
    memcpy(y + i * c, x + rows[i] * c, sizeof(float) * (size_t)c);
  }
}

void cpu_scatter_add_rows(Device *d, Tensor y_RC, Tensor rows_R, Tensor x_NC) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1], r = rows_R.dim[0];
  require(is_f32(x_NC, 2) && is_i32_1d(rows_R, r) && is_f32_2d(y_RC, r, c));
  enum { COLUMNS = 64 };
  const int32_t *rows = tensor_i32(rows_R);
  for (int64_t i = 0; i < r; i++)
    if (rows[i] < 0 || rows[i] >= n)
      die("row or token id %d is outside [0, %lld)", rows[i], (long long)n);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (r * c >= PARALLEL_MIN)
  for (int64_t c0 = 0; c0 < c; c0 += COLUMNS) {
    int64_t width = min_i64(COLUMNS, c - c0);
    for (int64_t i = 0; i < r; i++) {
      const float *y = tensor_f32(y_RC) + i * c + c0;
      float *x = tensor_f32(x_NC) + rows[i] * c + c0;
      for (int64_t j = 0; j < width; j++) x[j] += y[j];
    }
  }
}

void cpu_embedding_fwd(Device *d, Tensor tokens_N, Tensor table_VC, Tensor y_NC) {
  cpu_gather_rows(d, table_VC, tokens_N, y_NC);
}

void cpu_embedding_bwd(Device *d, Tensor tokens_N, Tensor dy_NC, Tensor dtable_VC) {
  cpu_scatter_add_rows(d, dy_NC, tokens_N, dtable_VC);
}
