/* The pieces that blocks are made of: linear maps and norms, forward and backward. Weight gradients
 * accumulate straight into the gradient buffers. */
#include "model/internal.h"

void grad_gemm(Model *m, Tensor a, Tensor b, int param, int n_joined) {
  float beta;
  Tensor g = zeropp_grad_into(m->zero, param, n_joined, &beta);
  m->ops->gemm(m->device, GEMM_TN, 1, a, b, beta, g);
}

void linear(Model *m, Tensor x, int weight, int bias, int n_joined, Tensor y) {
  Tensor w = zeropp_weight_joined(m->zero, weight, n_joined);
  if (bias >= 0)
    m->ops->linear_bias(m->device, x, w, zeropp_weight_joined(m->zero, bias, n_joined), y);
  else
    m->ops->gemm(m->device, GEMM_NT, 1, x, w, 0, y);
}

void linear_backward_weight(Model *m, Tensor dy, Tensor x, int weight, int bias, int n_joined) {
  grad_gemm(m, dy, x, weight, n_joined);
  if (bias >= 0) m->ops->bias_grad(m->device, dy, zeropp_grad_joined(m->zero, bias, n_joined));
}

void linear_backward_input(Model *m, Tensor dy, int weight, int n_joined, float beta, Tensor dx) {
  m->ops->gemm(m->device, GEMM_NN, 1, dy, zeropp_weight_joined(m->zero, weight, n_joined), beta,
               dx);
}

NormStats norm_stats_push(Model *m, int64_t n) {
  NormStats s = {.mean_N = absent(), .rstd_N = push_f32_1d(m, n)};
  if (m->config.norm == NORM_LAYER) s.mean_N = push_f32_1d(m, n);
  return s;
}

void norm_forward(Model *m, NormParams p, Tensor x_NC, Tensor delta_NC, Tensor y_NC, NormStats s) {
  float eps = m->config.norm_eps;
  Tensor w_C = zeropp_weight(m->zero, p.weight);
  if (m->config.norm == NORM_LAYER)
    m->ops->layernorm_fwd(m->device, x_NC, delta_NC, w_C, zeropp_weight(m->zero, p.bias), eps, y_NC,
                          s.mean_N, s.rstd_N);
  else
    m->ops->rmsnorm_fwd(m->device, x_NC, delta_NC, w_C, eps, y_NC, s.rstd_N);
}

void norm_backward(Model *m, NormParams p, Tensor dy_NC, Tensor x_NC, NormStats s, Tensor dx_NC) {
  Tensor w_C = zeropp_weight(m->zero, p.weight), dw_C = zeropp_grad(m->zero, p.weight);
  if (m->config.norm == NORM_LAYER)
    m->ops->layernorm_bwd(m->device, dy_NC, x_NC, w_C, s.mean_N, s.rstd_N, dx_NC, dw_C,
                          zeropp_grad(m->zero, p.bias));
  else
    m->ops->rmsnorm_bwd(m->device, dy_NC, x_NC, w_C, s.rstd_N, dx_NC, dw_C);
}
