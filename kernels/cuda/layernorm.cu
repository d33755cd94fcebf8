/* LayerNorm (Ba, Kiros & Hinton 2016), with the residual add in front fused in. The variance comes
 * from the differences to the mean: E[x^2] - E[x]^2 would cancel. */
#include "kernels/cuda/norm_bwd.h"
#include "kernels/cuda/norm_fwd.h"

void cuda_layernorm_fwd(Device *d, Tensor x_NC, Tensor delta_NC, Tensor w_C, Tensor b_C, float eps,
                        Tensor y_NC, Tensor mean_N, Tensor rstd_N) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  DType t = x_NC.dtype;
  require(x_NC.ndim == 2 && (!delta_NC.data || is_2d(delta_NC, t, n, c)));
  require(!y_NC.data || (is_2d(y_NC, t, n, c) && is_1d(w_C, t, c) && is_1d(b_C, t, c)));
  require(!mean_N.data == !rstd_N.data);
  require(!rstd_N.data || (is_f32_1d(rstd_N, n) && is_f32_1d(mean_N, n)));
  if (n == 0 || c == 0) return;
  bool aligned = are_aligned(x_NC, delta_NC, w_C, b_C, y_NC);
  cuda_by_type(t, [&]<class T>(T) {
    NormFwd<T> a = {n,
                    c,
                    eps,
                    cuda_data<T>(x_NC),
                    cuda_data<T>(delta_NC),
                    cuda_data<T>(w_C),
                    cuda_data<T>(b_C),
                    cuda_data<T>(y_NC),
                    tensor_f32(mean_N),
                    tensor_f32(rstd_N)};
    norm_fwd_launch<T, true>(d, a, aligned);
  });
}

void cuda_layernorm_bwd(Device *d, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor mean_N,
                        Tensor rstd_N, Tensor dx_NC, Tensor dw_C, Tensor db_C) {
  int64_t n = x_NC.dim[0], c = x_NC.dim[1];
  DType t = x_NC.dtype;
  require(x_NC.ndim == 2 && is_2d(dy_NC, t, n, c) && is_2d(dx_NC, t, n, c));
  require(is_1d(w_C, t, c) && is_f32_1d(dw_C, c) && is_f32_1d(db_C, c));
  require(is_f32_1d(mean_N, n) && is_f32_1d(rstd_N, n));
  if (n == 0 || c == 0) return;
  bool aligned = are_aligned(dy_NC, x_NC, w_C, dx_NC);
  cuda_by_type(t, [&]<class T>(T) {
    NormBwd<T> a = {n,
                    c,
                    cuda_data<T>(dy_NC),
                    cuda_data<T>(x_NC),
                    cuda_data<T>(w_C),
                    tensor_f32(mean_N),
                    tensor_f32(rstd_N),
                    cuda_data<T>(dx_NC)};
    norm_bwd_launch<T, true>(d, a, aligned, tensor_f32(dw_C), tensor_f32(db_C));
  });
}
