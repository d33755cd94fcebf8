/* The trunk's backward, block by block from the last to the first.
 *
 * Each block's unit is gathered again, its gradient opened, and reduced to the owners as soon as
 * the block is done. Weight gradients accumulate (beta = 1) straight into the gradient buffers.
 * dx_NC is the gradient of the residual stream: every sublayer adds its part to it in place. */
#include "model/internal.h"

/* dW += dy^T x, db += column sums of dy. */
static void linear_backward_weight(Model *m, Tensor dy, Tensor x, int weight, int bias,
                                   int n_joined) {
  m->ops->gemm(m->device, GEMM_TN, 1, dy, x, 1, zeropp_grad_joined(m->zero, weight, n_joined));
  if (bias >= 0) m->ops->bias_grad(m->device, dy, zeropp_grad_joined(m->zero, bias, n_joined));
}

/* dx = dy W. */
static void linear_backward_input(Model *m, Tensor dy, int weight, int n_joined, Tensor dx) {
  m->ops->gemm(m->device, GEMM_NN, 1, dy, zeropp_weight_joined(m->zero, weight, n_joined), 0, dx);
}

static void mlp_backward(Model *m, const BlockParams *p, const BlockActs *a, Tensor dnorm_NC,
                         Tensor dx_NC) {
  const ModelConfig *c = &m->config;
  int64_t n = dx_NC.dim[0];
  ArenaMark mark = arena_mark(m->arena);
  Tensor dact_NF = push_f32(m, n, c->ffn), dgu_N2F = push_f32(m, n, 2 * (int64_t)c->ffn);
  linear_backward_weight(m, dx_NC, a->act_NF, p->down, p->down_bias, 1);
  linear_backward_input(m, dx_NC, p->down, 1, dact_NF);
  m->ops->swiglu_bwd(m->device, dact_NF, a->gu_N2F, dgu_N2F);
  linear_backward_weight(m, dgu_N2F, a->norm2_NC, p->gate_up, p->gate_up_bias, 2);
  linear_backward_input(m, dgu_N2F, p->gate_up, 2, dnorm_NC);
  m->ops->rmsnorm_bwd(m->device, dnorm_NC, a->mid_NC, zeropp_weight(m->zero, p->norm2), a->rstd2_N,
                      dx_NC, zeropp_grad(m->zero, p->norm2));
  arena_pop(m->arena, mark);
}

static void attention_backward(Model *m, const Packed *b, const BlockParams *p, const BlockActs *a,
                               Tensor dnorm_NC, Tensor dx_NC) {
  const ModelConfig *c = &m->config;
  int64_t n = dx_NC.dim[0];
  AttnShape shape = model_attn_shape(m);
  ArenaMark mark = arena_mark(m->arena);
  Tensor datt_NA = push_f32(m, n, attn_width(c)), dqkv_NQ = push_f32(m, n, qkv_width(c));
  linear_backward_weight(m, dx_NC, a->att_NA, p->o, p->o_bias, 1);
  linear_backward_input(m, dx_NC, p->o, 1, datt_NA);
  m->ops->attention_bwd(m->device, datt_NA, a->qkv_NQ, a->att_NA, a->lse_NH, b->seg, shape,
                        dqkv_NQ);
  m->ops->rope(m->device, dqkv_NQ, b->positions_N, m->rope.cos_Pr, m->rope.sin_Pr, shape, true);
  linear_backward_weight(m, dqkv_NQ, a->norm1_NC, p->qkv, p->qkv_bias, 3);
  linear_backward_input(m, dqkv_NQ, p->qkv, 3, dnorm_NC);
  m->ops->rmsnorm_bwd(m->device, dnorm_NC, a->x_NC, zeropp_weight(m->zero, p->norm1), a->rstd1_N,
                      dx_NC, zeropp_grad(m->zero, p->norm1));
  arena_pop(m->arena, mark);
}

/* A block whose forward kept only x runs it again, in the buffers that all blocks share. x is whole
 * by now, so the first norm has nothing to add; the same operations on the same values give the
 * same bits. */
static void recompute(Model *m, const Packed *b, int layer, BlockActs *a) {
  a->out_NC = absent();
  block_forward(m, layer, b->positions_N, (AttnCall){.seg = b->seg}, absent(), a);
}

void trunk_backward(Model *m, const Packed *b, TrunkActs *t, Tensor dx_NC) {
  for (int l = m->config.n_layers - 1; l >= 0; l--) {
    int unit = unit_of_block(l);
    BlockActs *a = &t->block[l];
    ArenaMark mark = arena_mark(m->arena);
    zeropp_gather(m->zero, unit);
    zeropp_open_grad(m->zero, unit);
    if (t->keep == KEEP_INPUTS) recompute(m, b, l, a);
    Tensor dnorm_NC = push_f32(m, b->n, m->config.hidden);
    mlp_backward(m, &m->params.block[l], a, dnorm_NC, dx_NC);
    attention_backward(m, b, &m->params.block[l], a, dnorm_NC, dx_NC);
    zeropp_reduce(m->zero, unit);
    zeropp_release(m->zero, unit);
    arena_pop(m->arena, mark);
  }
  zeropp_open_grad(m->zero, 0); /* open already where the head is tied */
  m->ops->embedding_bwd(m->device, b->tokens_N, dx_NC, zeropp_grad(m->zero, m->params.embedding));
  zeropp_reduce(m->zero, 0);
}
