/* The table of the CUDA back end's ops. */
#include "kernels/cuda/ops.h"

/* What is not yet written is NULL in the table. */
__attribute__((weak)) decltype(cuda_gemm) cuda_gemm;
__attribute__((weak)) decltype(cuda_linear_bias) cuda_linear_bias;
__attribute__((weak)) decltype(cuda_embedding_fwd) cuda_embedding_fwd;
__attribute__((weak)) decltype(cuda_embedding_bwd) cuda_embedding_bwd;
__attribute__((weak)) decltype(cuda_rmsnorm_fwd) cuda_rmsnorm_fwd;
__attribute__((weak)) decltype(cuda_rmsnorm_bwd) cuda_rmsnorm_bwd;
__attribute__((weak)) decltype(cuda_layernorm_fwd) cuda_layernorm_fwd;
__attribute__((weak)) decltype(cuda_layernorm_bwd) cuda_layernorm_bwd;
__attribute__((weak)) decltype(cuda_qk_norm_fwd) cuda_qk_norm_fwd;
__attribute__((weak)) decltype(cuda_qk_norm_bwd) cuda_qk_norm_bwd;
__attribute__((weak)) decltype(cuda_rope) cuda_rope;
__attribute__((weak)) decltype(cuda_attention_fwd) cuda_attention_fwd;
__attribute__((weak)) decltype(cuda_attention_bwd) cuda_attention_bwd;
__attribute__((weak)) decltype(cuda_kv_write) cuda_kv_write;
__attribute__((weak)) decltype(cuda_attention_decode) cuda_attention_decode;
__attribute__((weak)) decltype(cuda_swiglu_fwd) cuda_swiglu_fwd;
__attribute__((weak)) decltype(cuda_swiglu_bwd) cuda_swiglu_bwd;
__attribute__((weak)) decltype(cuda_act_fwd) cuda_act_fwd;
__attribute__((weak)) decltype(cuda_act_bwd) cuda_act_bwd;
__attribute__((weak)) decltype(cuda_bias_add) cuda_bias_add;
__attribute__((weak)) decltype(cuda_bias_grad) cuda_bias_grad;
__attribute__((weak)) decltype(cuda_logprob_fwd) cuda_logprob_fwd;
__attribute__((weak)) decltype(cuda_logprob_bwd) cuda_logprob_bwd;
__attribute__((weak)) decltype(cuda_gather_rows) cuda_gather_rows;
__attribute__((weak)) decltype(cuda_scatter_add_rows) cuda_scatter_add_rows;
__attribute__((weak)) decltype(cuda_sample) cuda_sample;
__attribute__((weak)) decltype(cuda_adamw) cuda_adamw;
__attribute__((weak)) decltype(cuda_sum_squares) cuda_sum_squares;
__attribute__((weak)) decltype(cuda_axpy) cuda_axpy;
__attribute__((weak)) decltype(cuda_scale) cuda_scale;
__attribute__((weak)) decltype(cuda_lerp) cuda_lerp;
__attribute__((weak)) decltype(cuda_quantize) cuda_quantize;
__attribute__((weak)) decltype(cuda_dequantize) cuda_dequantize;
__attribute__((weak)) decltype(cuda_requantize) cuda_requantize;

const Ops cuda_ops = {
    .gemm = cuda_gemm,
    .linear_bias = cuda_linear_bias,
    .embedding_fwd = cuda_embedding_fwd,
    .embedding_bwd = cuda_embedding_bwd,
    .rmsnorm_fwd = cuda_rmsnorm_fwd,
    .rmsnorm_bwd = cuda_rmsnorm_bwd,
    .layernorm_fwd = cuda_layernorm_fwd,
    .layernorm_bwd = cuda_layernorm_bwd,
    .qk_norm_fwd = cuda_qk_norm_fwd,
    .qk_norm_bwd = cuda_qk_norm_bwd,
    .rope = cuda_rope,
    .attention_fwd = cuda_attention_fwd,
    .attention_bwd = cuda_attention_bwd,
    .kv_write = cuda_kv_write,
    .attention_decode = cuda_attention_decode,
    .swiglu_fwd = cuda_swiglu_fwd,
    .swiglu_bwd = cuda_swiglu_bwd,
    .act_fwd = cuda_act_fwd,
    .act_bwd = cuda_act_bwd,
    .bias_add = cuda_bias_add,
    .bias_grad = cuda_bias_grad,
    .logprob_fwd = cuda_logprob_fwd,
    .logprob_bwd = cuda_logprob_bwd,
    .gather_rows = cuda_gather_rows,
    .scatter_add_rows = cuda_scatter_add_rows,
    .sample = cuda_sample,
    .adamw = cuda_adamw,
    .sum_squares = cuda_sum_squares,
    .axpy = cuda_axpy,
    .scale = cuda_scale,
    .lerp = cuda_lerp,
    .quantize = cuda_quantize,
    .dequantize = cuda_dequantize,
    .requantize = cuda_requantize,
};
