/* The CUDA back end's ops: what ops.cu puts into the table. Contracts are in kernels.h; each is in
 * the .cu file named as the CPU's .c file. */
#ifndef KERNELS_CUDA_OPS_H
#define KERNELS_CUDA_OPS_H

#include "kernels/cuda/cuda.h"

void cuda_gemm(Device *d, GemmKind kind, float alpha, Tensor a, Tensor b, float beta, Tensor c);
void cuda_embedding_fwd(Device *d, Tensor tokens_N, Tensor table_VC, Tensor y_NC);
void cuda_embedding_bwd(Device *d, Tensor tokens_N, Tensor dy_NC, Tensor dtable_VC);
void cuda_gather_rows(Device *d, Tensor x_NC, Tensor rows_R, Tensor y_RC);
void cuda_scatter_add_rows(Device *d, Tensor y_RC, Tensor rows_R, Tensor x_NC);
void cuda_rmsnorm_fwd(Device *d, Tensor x_NC, Tensor delta_NC, Tensor w_C, float eps, Tensor y_NC,
                      Tensor rstd_N);
void cuda_rmsnorm_bwd(Device *d, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor rstd_N, Tensor dx_NC,
                      Tensor dw_C);
void cuda_layernorm_fwd(Device *d, Tensor x_NC, Tensor delta_NC, Tensor w_C, Tensor b_C, float eps,
                        Tensor y_NC, Tensor mean_N, Tensor rstd_N);
void cuda_layernorm_bwd(Device *d, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor mean_N,
                        Tensor rstd_N, Tensor dx_NC, Tensor dw_C, Tensor db_C);
void cuda_qk_norm_fwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, float eps, AttnShape s,
                      Tensor qkv_NQ, Tensor rstd_NH);
void cuda_qk_norm_bwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, Tensor rstd_NH,
                      AttnShape s, Tensor dqkv_NQ, Tensor dwq_D, Tensor dwk_D);
void cuda_rope(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
               AttnShape s, bool inverse);
void cuda_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                        Tensor lse_NH);
void cuda_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                        Segments seg, AttnShape s, Rotation rotation, Tensor dqkv_NQ);
void cuda_kv_write(Device *d, Tensor qkv_NQ, Tensor slot_N, AttnShape s, Tensor k_pages,
                   Tensor v_pages);
void cuda_attention_decode(Device *d, Tensor qkv_BQ, Tensor page_table_BP, Tensor len_B,
                           AttnShape s, Tensor k_pages, Tensor v_pages, Tensor out_BHD);
void cuda_rope_write(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
                     AttnShape s, Tensor slot_N, Tensor k_pages, Tensor v_pages);
void cuda_linear(Device *d, Linear l, Tensor x, Tensor y_MO);
void cuda_decode_attend(Device *d, DecodeRows r, Tensor qkv_BQ, Tensor cos_Pr, Tensor sin_Pr,
                        AttnShape s, Tensor k_pages, Tensor v_pages, Tensor out_BHD);
void cuda_decode_advance(Device *d, DecodeRows r);
void cuda_join_columns(Device *d, int n_parts, const ColumnPart *part, Tensor x, Tensor y_NC,
                       bool add);
void cuda_swiglu_fwd(Device *d, Tensor gu_N2F, Tensor y_NF);
void cuda_swiglu_bwd(Device *d, Tensor dy_NF, Tensor gu_N2F, Tensor dgu_N2F, Tensor y_NF);
void cuda_act_fwd(Device *d, Activation kind, Tensor x_NF, Tensor y_NF);
void cuda_act_bwd(Device *d, Activation kind, Tensor dy_NF, Tensor x_NF, Tensor dx_NF);
void cuda_bias_add(Device *d, Tensor x_NC, Tensor b_C);
void cuda_bias_grad(Device *d, Tensor dy_NC, Tensor db_C);
void cuda_logprob_fwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp,
                      Tensor logprob_R, Tensor lse_R, Tensor entropy_R);
void cuda_logprob_bwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor lse_R,
                      Tensor entropy_R, Tensor dlogprob_R, Tensor dentropy_R, Tensor dlogits_RV);
void cuda_sample(Device *d, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                 SeenTokens seen, KeptTokens kept, Tensor token_B, Tensor logprob_B);
void cuda_keep_only(Device *d, Tensor bits_RW, Tensor logits_RV);
void cuda_linear_bias(Device *d, Tensor x_NC, Tensor w_OC, Tensor b_O, Tensor y_NO);
void cuda_adamw(Device *d, AdamW p, Tensor w, Tensor g, Tensor m, Tensor v, Tensor out);
double cuda_sum_squares(Device *d, Tensor x);
void cuda_axpy(Device *d, float alpha, Tensor x, Tensor y);
void cuda_scale(Device *d, float alpha, Tensor x);
void cuda_lerp(Device *d, float w, Tensor x, Tensor y);
void cuda_quantize(Device *d, WireFormat f, int n, const WirePart *parts);
void cuda_dequantize(Device *d, WireFormat f, int n, const WirePart *parts, bool add);
void cuda_requantize(Device *d, WireFormat f, WireFormat f_to, int n, const WirePart *parts);
void cuda_delta_encode(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes);
void cuda_delta_apply(Device *d, int n, const DeltaPart *parts);
void cuda_checksum(Device *d, int n, const Tensor *x, uint64_t *sums);

extern const Ops cuda_ops;

#endif
