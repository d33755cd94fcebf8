/* What decoding adds to the other ops: two of them in one, and rows that move on by themselves.
 * Here for the same code on every device; a GPU saves launches and the host by them. */
#include <stdlib.h>

#include "core/rng.h"
#include "kernels/cpu/gemm.h"

void cpu_rope_write(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
                    AttnShape s, Tensor slot_N, Tensor k_pages, Tensor v_pages) {
  if (cos_Pr.data) cpu_rope(d, qkv_NQ, positions_N, cos_Pr, sin_Pr, s, false);
  cpu_kv_write(d, qkv_NQ, slot_N, s, k_pages, v_pages);
}

void cpu_decode_attend(Device *d, DecodeRows r, Tensor qkv_BQ, Tensor cos_Pr, Tensor sin_Pr,
                       AttnShape s, Tensor k_pages, Tensor v_pages, Tensor out_BHD) {
  cpu_rope_write(d, qkv_BQ, r.position_B, cos_Pr, sin_Pr, s, r.slot_B, k_pages, v_pages);
  cpu_attention_decode(d, qkv_BQ, r.table_BP, r.len_B, s, k_pages, v_pages, out_BHD);
}

void cpu_linear(Device *d, Linear l, Tensor x, Tensor y_MO) {
  const Tensor none = {0};
  Tensor in = x;
  if (l.front != FRONT_NONE) {
    in = l.front_MK;
    require(is_f32_2d(in, x.dim[0], l.w_OK.dim[1]));
  }
  if (l.front == FRONT_RMSNORM) cpu_rmsnorm_fwd(d, x, none, l.norm_K, l.eps, in, none);
  if (l.front == FRONT_SWIGLU) cpu_swiglu_fwd(d, x, in);
  if (l.codes.payload)
    gemm_codes(d, &l, in, y_MO);
  else
    cpu_gemm(d, GEMM_NT, 1, in, l.w_OK, l.add ? 1 : 0, y_MO);
  if (l.bias_O.data) cpu_bias_add(d, y_MO, l.bias_O);
}

static void check_rows(DecodeRows r, int64_t batch, int64_t steps) {
  const Tensor ints[] = {r.token_B, r.position_B, r.len_B, r.slot_B, r.end_B, r.drawn_B};
  for (int i = 0; i < 6; i++) require(is_i32_1d(ints[i], batch));
  require(r.table_BP.dtype == DT_I32 && r.table_BP.ndim == 2 && r.table_BP.dim[0] == batch);
  require(r.stream_B.dtype == DT_I64 && tensor_numel(r.stream_B) == batch && r.page_size > 0);
  require(is_f32_1d(r.u_B, batch) && is_f32_1d(r.logprob_B, batch) && is_i32_1d(r.step_1, 1));
  require(r.history_token_TB.dtype == DT_I32 && r.history_token_TB.ndim == 2);
  require(r.history_token_TB.dim[1] == batch && is_f32_2d(r.history_logprob_TB, steps, batch));
}

static void advance_row(const DecodeRows *r, int64_t b) {
  int32_t *len = tensor_i32(r->len_B) + b, number = *len; /* of the token drawn */
  if (number + 1 >= tensor_i32(r->end_B)[b]) {
    *len = 0;
    tensor_i32(r->slot_B)[b] = -1;
    return;
  }
  int64_t page = number / r->page_size, width = r->table_BP.dim[1];
  if (page >= width) die("token %d of row %lld lies behind its page table", number, (long long)b);
  *len = number + 1;
  tensor_i32(r->token_B)[b] = tensor_i32(r->drawn_B)[b];
  tensor_i32(r->position_B)[b] = r->first + number;
  tensor_i32(r->slot_B)[b] =
      tensor_i32(r->table_BP)[b * width + page] * r->page_size + number % r->page_size;
  tensor_f32(r->u_B)[b] = rng_uniform_f32(r->seed, (uint64_t)((const int64_t *)r->stream_B.data)[b],
                                          (uint64_t)number + 1);
}

void cpu_decode_advance(Device *d, DecodeRows r) {
  (void)d;
  int64_t batch = r.token_B.dim[0], steps = r.history_token_TB.dim[0];
  check_rows(r, batch, steps);
  int32_t step = (*tensor_i32(r.step_1))++;
  if (step < 0 || step >= steps) die("step %d of a history of %lld", step, (long long)steps);
  for (int64_t b = 0; b < batch; b++) {
    bool inert = tensor_i32(r.len_B)[b] == 0;
    tensor_i32(r.history_token_TB)[step * batch + b] = inert ? -1 : tensor_i32(r.drawn_B)[b];
    tensor_f32(r.history_logprob_TB)[step * batch + b] = inert ? 0 : tensor_f32(r.logprob_B)[b];
    if (!inert) advance_row(&r, b);
  }
}
