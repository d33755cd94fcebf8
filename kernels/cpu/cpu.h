/* The CPU back end's ops and what they share. Internal to kernels/cpu.
 *
 * Every parallel loop splits work into pieces that do not depend on the number of threads, or whose
 * sums do not, so that results are the same bits with any number of threads (GEMM: with the same
 * number). Contracts are in kernels.h. */
#ifndef KERNELS_CPU_H
#define KERNELS_CPU_H

#include "kernels/backend.h"

void cpu_gemm(Device *d, GemmKind kind, float alpha, Tensor a, Tensor b, float beta, Tensor c);
void cpu_embedding_fwd(Device *d, Tensor tokens_N, Tensor table_VC, Tensor y_NC);
void cpu_embedding_bwd(Device *d, Tensor tokens_N, Tensor dy_NC, Tensor dtable_VC);
void cpu_gather_rows(Device *d, Tensor x_NC, Tensor rows_R, Tensor y_RC);
void cpu_scatter_add_rows(Device *d, Tensor y_RC, Tensor rows_R, Tensor x_NC);
void cpu_rmsnorm_fwd(Device *d, Tensor x_NC, Tensor delta_NC, Tensor w_C, float eps, Tensor y_NC,
                     Tensor rstd_N);
void cpu_rmsnorm_bwd(Device *d, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor rstd_N, Tensor dx_NC,
                     Tensor dw_C);
void cpu_layernorm_fwd(Device *d, Tensor x_NC, Tensor delta_NC, Tensor w_C, Tensor b_C, float eps,
                       Tensor y_NC, Tensor mean_N, Tensor rstd_N);
void cpu_layernorm_bwd(Device *d, Tensor dy_NC, Tensor x_NC, Tensor w_C, Tensor mean_N,
                       Tensor rstd_N, Tensor dx_NC, Tensor dw_C, Tensor db_C);
void cpu_qk_norm_fwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, float eps, AttnShape s,
                     Tensor qkv_NQ, Tensor rstd_NH);
void cpu_qk_norm_bwd(Device *d, Tensor raw_NQ, Tensor wq_D, Tensor wk_D, Tensor rstd_NH,
                     AttnShape s, Tensor dqkv_NQ, Tensor dwq_D, Tensor dwk_D);
void cpu_rope(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
              AttnShape s, bool inverse);
void cpu_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                       Tensor lse_NH);
void cpu_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                       Segments seg, AttnShape s, Rotation rotation, Tensor dqkv_NQ);
void cpu_kv_write(Device *d, Tensor qkv_NQ, Tensor slot_N, AttnShape s, Tensor k_pages,
                  Tensor v_pages);
void cpu_attention_decode(Device *d, Tensor qkv_BQ, Tensor page_table_BP, Tensor len_B, AttnShape s,
                          Tensor k_pages, Tensor v_pages, Tensor out_BHD);
void cpu_rope_write(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
                    AttnShape s, Tensor slot_N, Tensor k_pages, Tensor v_pages);
void cpu_linear(Device *d, Linear l, Tensor x, Tensor y_MO);
void cpu_decode_attend(Device *d, DecodeRows r, Tensor qkv_BQ, Tensor cos_Pr, Tensor sin_Pr,
                       AttnShape s, Tensor k_pages, Tensor v_pages, Tensor out_BHD);
void cpu_decode_advance(Device *d, DecodeRows r);
void cpu_join_columns(Device *d, int n_parts, const ColumnPart *part, Tensor x, Tensor y_NC,
                      bool add);
void cpu_swiglu_fwd(Device *d, Tensor gu_N2F, Tensor y_NF);
void cpu_swiglu_bwd(Device *d, Tensor dy_NF, Tensor gu_N2F, Tensor dgu_N2F, Tensor y_NF);
void cpu_act_fwd(Device *d, Activation kind, Tensor x_NF, Tensor y_NF);
void cpu_act_bwd(Device *d, Activation kind, Tensor dy_NF, Tensor x_NF, Tensor dx_NF);
void cpu_bias_add(Device *d, Tensor x_NC, Tensor b_C);
void cpu_bias_grad(Device *d, Tensor dy_NC, Tensor db_C);
void cpu_logprob_fwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor logprob_R,
                     Tensor lse_R, Tensor entropy_R);
void cpu_logprob_bwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor lse_R,
                     Tensor entropy_R, Tensor dlogprob_R, Tensor dentropy_R, Tensor dlogits_RV);
void cpu_sample(Device *d, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                SeenTokens seen, KeptTokens kept, Tensor token_B, Tensor logprob_B);
void cpu_keep_only(Device *d, Tensor bits_RW, Tensor logits_RV);
void cpu_linear_bias(Device *d, Tensor x_NC, Tensor w_OC, Tensor b_O, Tensor y_NO);
void cpu_adamw(Device *d, AdamW p, Tensor w, Tensor g, Tensor m, Tensor v, Tensor out);
double cpu_sum_squares(Device *d, Tensor x);
void cpu_axpy(Device *d, float alpha, Tensor x, Tensor y);
void cpu_scale(Device *d, float alpha, Tensor x);
void cpu_lerp(Device *d, float w, Tensor x, Tensor y);
void cpu_quantize(Device *d, WireFormat f, int n, const WirePart *parts);
void cpu_dequantize(Device *d, WireFormat f, int n, const WirePart *parts, bool add);
void cpu_requantize(Device *d, WireFormat f, WireFormat f_to, int n, const WirePart *parts);
void cpu_delta_encode(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes);
void cpu_delta_apply(Device *d, int n, const DeltaPart *parts);
void cpu_checksum(Device *d, int n, const Tensor *x, uint64_t *sums);

/* Below this many elements a parallel region costs more than it saves (about 2 us to open one). */
enum { PARALLEL_MIN = 16384 };

/* Uninitialised floats on a cache line boundary, for free(): whole-vector loads that straddle lines
 * cost double. Dies when out of memory. */
float *scratch_alloc(int64_t floats);

static inline bool is_f32(Tensor t, int ndim) { return t.dtype == DT_F32 && t.ndim == ndim; }
static inline bool is_f32_2d(Tensor t, int64_t d0, int64_t d1) {
  return is_f32(t, 2) && t.dim[0] == d0 && t.dim[1] == d1;
}
static inline bool is_f32_1d(Tensor t, int64_t d0) { return is_f32(t, 1) && t.dim[0] == d0; }
static inline bool is_i32_1d(Tensor t, int64_t d0) {
  return t.dtype == DT_I32 && t.ndim == 1 && t.dim[0] == d0;
}
static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
