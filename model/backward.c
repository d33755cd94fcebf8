/* The trunk's backward, block by block from the last to the first.
 *
 * Each block's unit is gathered again, its gradient opened, and reduced to the owners as soon as
 * the block is done. dx_NC is the gradient of the residual stream: every sublayer adds its part to
 * it in place. */
#include "model/internal.h"

/* From dy_NC, the gradient of the MLP's output: weight gradients, and din = .. + beta din. din may
 * be dy. SwiGLU's gradient takes the place of what it read, and its output comes with it where the
 * forward's was not kept. */
static void mlp_backward(Model *m, const BlockParams *p, Keep kept, const BlockActs *a,
                         Tensor in_NC, Tensor dy_NC, float beta, Tensor din_NC) {
  const ModelConfig *c = &m->config;
  int64_t n = dy_NC.dim[0];
  int joined = up_joined(c);
  ArenaMark mark = arena_mark(m->arena);
  bool in_place = c->mlp == MLP_SWIGLU;
  Tensor dact_NF = push_act(m, n, c->ffn);
  Tensor dup_NU = in_place ? a->up_NU : push_act(m, n, up_width(c));
  linear_backward_input(m, dy_NC, p->down, 1, 0, dact_NF);
  if (in_place)
    m->ops->swiglu_bwd(m->device, dact_NF, a->up_NU, dup_NU,
                       kept == KEEP_ALL ? absent() : a->act_NF);
  else
    m->ops->act_bwd(m->device, c->activation, dact_NF, a->up_NU, dup_NU);
  linear_backward_weight(m, dy_NC, a->act_NF, p->down, p->down_bias, 1);
  linear_backward_weight(m, dup_NU, in_NC, p->up, p->up_bias, joined);
  linear_backward_input(m, dup_NU, p->up, joined, beta, din_NC);
  arena_pop(m->arena, mark);
}

/* The same for attention. */
static void attention_backward(Model *m, const Packed *b, const BlockParams *p, const BlockActs *a,
                               Tensor in_NC, Tensor dy_NC, float beta, Tensor din_NC) {
  const ModelConfig *c = &m->config;
  int64_t n = dy_NC.dim[0];
  AttnShape shape = model_attn_shape(m);
  ArenaMark mark = arena_mark(m->arena);
  Tensor datt_NA = push_act(m, n, attn_width(c)), dqkv_NQ = push_act(m, n, qkv_width(c));
  linear_backward_weight(m, dy_NC, a->att_NA, p->o, p->o_bias, 1);
  linear_backward_input(m, dy_NC, p->o, 1, 0, datt_NA);
  Rotation rotation = {.cos_Pr = {.data = NULL}};
  if (c->rope != ROPE_NONE) rotation = (Rotation){b->place_N, m->rope.cos_Pr, m->rope.sin_Pr};
  m->ops->attention_bwd(m->device, datt_NA, a->qkv_NQ, a->att_NA, a->lse_NH, b->seg, shape,
                        rotation, dqkv_NQ);
  if (c->qk_norm)
    m->ops->qk_norm_bwd(m->device, a->raw_NQ, zeropp_weight(m->zero, p->q_norm),
                        zeropp_weight(m->zero, p->k_norm), a->qk_rstd_NH, shape, dqkv_NQ,
                        zeropp_grad(m->zero, p->q_norm), zeropp_grad(m->zero, p->k_norm));
  linear_backward_weight(m, dqkv_NQ, in_NC, p->qkv, p->qkv_bias, 3);
  linear_backward_input(m, dqkv_NQ, p->qkv, 3, beta, din_NC);
  arena_pop(m->arena, mark);
}

/* A norm in front of each sublayer: dx passes both residual sums as it is. */
static void pre_norm_backward(Model *m, const Packed *b, int layer, Keep kept, BlockActs *a,
                              Tensor dnorm_NC, Tensor dx_NC) {
  const BlockParams *p = &m->params.block[layer];
  mlp_backward(m, p, kept, a, a->norm2_NC, dx_NC, 0, dnorm_NC);
  norm_backward(m, p->norm2, dnorm_NC, a->mid_NC, a->stats2, dx_NC);
  if (kept != KEEP_ALL) block_redo_attention(m, layer, b, kept, a);
  attention_backward(m, b, p, a, a->norm1_NC, dx_NC, 0, dnorm_NC);
  norm_backward(m, p->norm1, dnorm_NC, a->x_NC, a->stats1, dx_NC);
}

/* A norm behind each residual sum: the sum's gradient goes to both of its terms. */
static void post_norm_backward(Model *m, const Packed *b, int layer, Keep kept, BlockActs *a,
                               Tensor dsum_NC, Tensor dx_NC) {
  const BlockParams *p = &m->params.block[layer];
  device_zero(m->device, dsum_NC.data, tensor_bytes(dsum_NC));
  norm_backward(m, p->norm2, dx_NC, a->out_NC, a->stats2, dsum_NC);
  mlp_backward(m, p, kept, a, a->norm1_NC, dsum_NC, 1, dsum_NC);
  device_zero(m->device, dx_NC.data, tensor_bytes(dx_NC));
  norm_backward(m, p->norm1, dsum_NC, a->mid_NC, a->stats1, dx_NC);
  if (kept != KEEP_ALL) block_redo_attention(m, layer, b, kept, a);
  attention_backward(m, b, p, a, a->x_NC, dx_NC, 1, dx_NC);
}

/* Unit 0: the token embedding, its projection, and the learned positions. */
static void embed_backward(Model *m, const Packed *b, const TrunkActs *t, Tensor dx_NC) {
  const ModelParams *at = &m->params;
  Tensor dembed_NE = dx_NC;
  ArenaMark mark = arena_mark(m->arena);
  zeropp_open_grad(m->zero, 0); /* open already where the head is tied */
  if (at->positions >= 0)
    m->ops->embedding_bwd(m->device, b->place_N, dx_NC, zeropp_grad(m->zero, at->positions));
  if (at->project_in >= 0) {
    dembed_NE = push_act(m, b->n, embed_width(&m->config));
    zeropp_gather(m->zero, 0);
    linear_backward_weight(m, dx_NC, t->embed_NE, at->project_in, -1, 1);
    linear_backward_input(m, dx_NC, at->project_in, 1, 0, dembed_NE);
    zeropp_release(m->zero, 0);
  }
  m->ops->embedding_bwd(m->device, b->tokens_N, dembed_NE, zeropp_grad(m->zero, at->embedding));
  zeropp_reduce(m->zero, 0);
  arena_pop(m->arena, mark);
}

/* Of the blocks that share buffers, the last one's products are as forward left them. */
static Keep what_is_left(const TrunkActs *t, int layer) {
  if (layer >= t->whole) return t->keep;
  return layer == t->whole - 1 ? KEEP_PRODUCTS : KEEP_RESIDUALS;
}

void trunk_backward(Model *m, const Packed *b, TrunkActs *t, Tensor dx_NC) {
  for (int l = m->config.n_layers - 1; l >= 0; l--) {
    int unit = unit_of_block(l);
    BlockActs *a = &t->block[l];
    ArenaMark mark = arena_mark(m->arena);
    gather_downwards(m, unit);
    zeropp_open_grad(m->zero, unit);
    Keep kept = what_is_left(t, l);
    Tensor spare_NC = push_act(m, b->n, m->config.hidden);
    if (kept != KEEP_ALL) block_redo_mlp(m, l, kept, a);
    if (m->config.post_norm)
      post_norm_backward(m, b, l, kept, a, spare_NC, dx_NC);
    else
      pre_norm_backward(m, b, l, kept, a, spare_NC, dx_NC);
    zeropp_reduce(m->zero, unit);
    zeropp_release(m->zero, unit);
    arena_pop(m->arena, mark);
  }
  embed_backward(m, b, t, dx_NC);
}
