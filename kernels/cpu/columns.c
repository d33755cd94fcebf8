/* Columns of several matrices side by side in one. */
#include <string.h>

#include "kernels/cpu/cpu.h"

static void join_row(const ColumnPart *part, int n_parts, const float *x, int64_t row, float *y,
                     bool add) {
  for (int p = 0; p < n_parts; p++) {
    const float *from = x + part[p].from + row * part[p].stride;
    float *to = y + part[p].to;
    if (!add)
      memcpy(to, from, (size_t)part[p].width * sizeof *to);
    else
      for (int64_t c = 0; c < part[p].width; c++) to[c] += from[c];
  }
}

void cpu_join_columns(Device *d, int n_parts, const ColumnPart *part, Tensor x, Tensor y_NC,
                      bool add) {
  int64_t n = y_NC.dim[0], width = y_NC.dim[1], numel = tensor_numel(x);
  require(x.dtype == DT_F32 && is_f32(y_NC, 2));
  for (int p = 0; p < n_parts && n > 0; p++) {
    require(part[p].width >= 0 && part[p].to >= 0 && part[p].to + part[p].width <= width);
    require(part[p].width <= part[p].stride && part[p].from >= 0);
    require(part[p].width == 0 || part[p].from + (n - 1) * part[p].stride + part[p].width <= numel);
  }
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * width >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++)
    join_row(part, n_parts, tensor_f32(x), i, tensor_f32(y_NC) + i * width, add);
}
