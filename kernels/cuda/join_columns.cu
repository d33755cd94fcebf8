/* Columns of several matrices side by side in one: what the ranks of a node computed, each some
 * columns of it. */
#include <algorithm>

#include "kernels/cuda/ops.h"

namespace {

enum { JOIN_PARTS = 32, JOIN_THREADS = 128, JOIN_ROWS = 65535 /* of a launch */ };

struct Parts { /* an argument of the launch */
  int64_t from[JOIN_PARTS], stride[JOIN_PARTS], to[JOIN_PARTS];
  int width[JOIN_PARTS];
};

/* A block has some columns of one part of one row. */
template <class T>
__global__ void __launch_bounds__(JOIN_THREADS)
    join_kernel(Parts parts, int64_t first, int64_t y_width, const T *x, T *y, bool add) {
  int part = static_cast<int>(blockIdx.z);
  int c = static_cast<int>(blockIdx.x * JOIN_THREADS + threadIdx.x);
  if (c >= parts.width[part]) return;
  int64_t row = first + blockIdx.y;
  const T *from = x + parts.from[part] + row * parts.stride[part] + c;
  T *to = y + row * y_width + parts.to[part] + c;
  *to = add ? from_float<T>(to_float(*to) + to_float(*from)) : *from;
}

void join(Device *d, const Parts &parts, int n, int widest, Tensor x, Tensor y, bool add) {
  for (int64_t first = 0; first < y.dim[0]; first += JOIN_ROWS) {
    int64_t rows = std::min<int64_t>(JOIN_ROWS, y.dim[0] - first);
    dim3 grid(static_cast<unsigned>(cuda_ceil(widest, JOIN_THREADS)), static_cast<unsigned>(rows),
              static_cast<unsigned>(n));
    cuda_by_type(y.dtype, [&]<class T>(T) {
      join_kernel<T><<<grid, JOIN_THREADS, 0, cuda_stream(d)>>>(
          parts, first, y.dim[1], cuda_data<T>(x), cuda_data<T>(y), add);
    });
    CUDA_LAUNCHED();
  }
}

void check_part(const ColumnPart &p, Tensor x, Tensor y) {
  require(p.width >= 0 && p.width <= p.stride && p.width < INT32_MAX);
  require(p.from >= 0 && p.to >= 0 && p.to + p.width <= y.dim[1]);
  require(p.width == 0 || p.from + (y.dim[0] - 1) * p.stride + p.width <= tensor_numel(x));
}

}  // namespace

void cuda_join_columns(Device *d, int n_parts, const ColumnPart *part, Tensor x, Tensor y_NC,
                       bool add) {
  require(x.dtype == y_NC.dtype && y_NC.ndim == 2);
  if (y_NC.dim[0] == 0) return;
  Parts parts;
  int n = 0, widest = 0;
  for (int p = 0; p < n_parts; p++) {
    check_part(part[p], x, y_NC);
    parts.from[n] = part[p].from;
    parts.stride[n] = part[p].stride;
    parts.to[n] = part[p].to;
    parts.width[n] = static_cast<int>(part[p].width);
    widest = std::max(widest, parts.width[n]);
    n += part[p].width > 0;
    if (n > 0 && (n == JOIN_PARTS || p == n_parts - 1)) {
      join(d, parts, n, widest, x, y_NC, add);
      n = widest = 0;
    }
  }
}
