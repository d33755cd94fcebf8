/* Products with what lies in front of them: y = front(x) W^T + b. Few rows of BF16 go through one
 * kernel (linear_few.cu), or, where W is large, through one behind the front (linear_stream.h);
 * codes always, so many rows at a time. Of plain weights these are at most 16: on an H200 the
 * kernel took 40 us for a layer of 1.1B at one row, 51 at 16, 66 at 32 and 99 at 64, cuBLASLt's
 * four products alone 45 to 50 from 16 to 64. Up to 64 rows fronts are in the chain, and so is a
 * small product behind a norm (linear_cluster.h); all others go op by op. */
#include <algorithm>

#include "kernels/cuda/linear_cluster.h"
#include "kernels/cuda/linear_few.h"
#include "kernels/cuda/linear_front.h"
#include "kernels/cuda/linear_stream.h"
#include "kernels/cuda/ops.h"

enum { FEW_PLAIN_ROWS = 16 };

static Tensor rows_of(Tensor t, int64_t first, int64_t n) {
  t.data =
      static_cast<char *>(t.data) + static_cast<size_t>(first * t.dim[1]) * dtype_size(t.dtype);
  t.dim[0] = n;
  return t;
}

static void linear_codes(Device *d, const Linear &l, Tensor x, Tensor y) {
  require(linear_codes_fit(l.format, l.w_OK.dim[1]));
  for (int64_t i = 0; i < x.dim[0]; i += LINEAR_FEW_ROWS) {
    int64_t n = std::min<int64_t>(LINEAR_FEW_ROWS, x.dim[0] - i);
    if (!linear_few(d, l, rows_of(x, i, n), rows_of(y, i, n)))
      die("weights in codes want BF16, a GPU of compute capability 9.0 and at most %d inputs",
          LINEAR_FEW_MOST_K);
  }
}

void cuda_linear(Device *d, Linear l, Tensor x, Tensor y_MO) {
  const Tensor none = {};
  int64_t m = x.dim[0], n = l.w_OK.dim[0], k = l.w_OK.dim[1];
  require(x.ndim == 2 && l.w_OK.ndim == 2 && x.dim[1] == (l.front == FRONT_SWIGLU ? 2 * k : k));
  require(y_MO.ndim == 2 && y_MO.dim[0] == m && y_MO.dim[1] == n);
  require(y_MO.dtype == x.dtype || y_MO.dtype == DT_F32);
  bool coded = l.codes.payload != nullptr;
  bool streams = (coded || m <= FEW_PLAIN_ROWS) && linear_stream_takes(d, l, x);
  if (coded && !streams) {
    linear_codes(d, l, x, y_MO);
    return;
  }
  require(coded || l.w_OK.dtype == x.dtype);
  if (!streams && m <= FEW_PLAIN_ROWS && linear_few(d, l, x, y_MO)) return;
  Tensor in = l.front == FRONT_NONE ? x : l.front_MK;
  require(in.dtype == x.dtype && in.ndim == 2 && in.dim[0] == m && in.dim[1] == k);
  bool few = streams || m > FEW_PLAIN_ROWS; /* as far as linear_front takes them */
  if (l.front != FRONT_NONE && !(few && linear_front(d, l, x))) {
    if (l.front == FRONT_RMSNORM) cuda_rmsnorm_fwd(d, x, none, l.norm_K, l.eps, in, none);
    if (l.front == FRONT_SWIGLU) cuda_swiglu_fwd(d, x, in);
  }
  if (streams) {
    for (int64_t i = 0; i < m; i += STREAM_MOST) {
      int64_t rows = std::min<int64_t>(STREAM_MOST, m - i);
      linear_stream(d, l, rows_of(in, i, rows), rows_of(y_MO, i, rows));
    }
    return;
  }
  if (linear_cluster_takes(d, l, in, y_MO)) {
    linear_cluster(d, l, in, y_MO);
    return;
  }
  if (l.bias_O.data && !l.add && y_MO.dtype == x.dtype) {
    cuda_linear_bias(d, in, l.w_OK, l.bias_O, y_MO);
    return;
  }
  cuda_gemm(d, GEMM_NT, 1, in, l.w_OK, l.add ? 1 : 0, y_MO);
  if (l.bias_O.data) cuda_bias_add(d, y_MO, l.bias_O);
}
