/* Products with what lies in front of them: y = front(x) W^T + b. Few rows of BF16 go through one
 * kernel (linear_few.cu); all others op by op. */
#include "kernels/cuda/linear_few.h"
#include "kernels/cuda/ops.h"

void cuda_linear(Device *d, Linear l, Tensor x, Tensor y_MO) {
  const Tensor none = {};
  Tensor in = x;
  require(x.ndim == 2 && l.w_OK.ndim == 2 && y_MO.ndim == 2 && y_MO.dim[0] == x.dim[0]);
  require(l.w_OK.dtype == x.dtype && y_MO.dim[1] == l.w_OK.dim[0]);
  require(x.dim[1] == (l.front == FRONT_SWIGLU ? 2 : 1) * l.w_OK.dim[1]);
  if (l.front != FRONT_NONE) {
    in = l.front_MK;
    require(in.dtype == x.dtype && in.ndim == 2 && in.dim[0] == x.dim[0]);
    require(in.dim[1] == l.w_OK.dim[1]);
  }
  if (linear_few(d, l, x, y_MO)) return;
  if (l.front == FRONT_RMSNORM) cuda_rmsnorm_fwd(d, x, none, l.norm_K, l.eps, in, none);
  if (l.front == FRONT_SWIGLU) cuda_swiglu_fwd(d, x, in);
  if (l.bias_O.data && !l.add && y_MO.dtype == x.dtype) {
    cuda_linear_bias(d, in, l.w_OK, l.bias_O, y_MO);
    return;
  }
  cuda_gemm(d, GEMM_NT, 1, in, l.w_OK, l.add ? 1 : 0, y_MO);
  if (l.bias_O.data) cuda_bias_add(d, y_MO, l.bias_O);
}
