/* One token of every sequence, for decoding without the host: all tensors are on the device
 * already, nothing is uploaded, downloaded or allocated there, so that a device can capture it.
 *
 * The same arithmetic as the trunk's forward, cut otherwise: a norm (RMSNorm) or an activation
 * (SwiGLU) belongs to the linear map behind it, a residual sum to the one in front of it. Weights
 * must be FULL, since a gather would be the host's work. */
#include "model/internal.h"

/* One set of buffers for all blocks. */
typedef struct DecodeActs {
  Tensor x_BC;           /* the residual stream */
  Tensor norm_BC;        /* post-norm: the residual within a block */
  Tensor raw_BQ, qkv_BQ; /* one tensor without q and k norms */
  Tensor att_BA, up_BU, act_BF;
} DecodeActs;

static DecodeActs acts_push(Model *m, int64_t n) {
  const ModelConfig *c = &m->config;
  DecodeActs a = {.x_BC = push_act(m, n, c->hidden), .norm_BC = push_act(m, n, c->hidden)};
  a.raw_BQ = a.qkv_BQ = push_act(m, n, qkv_width(c));
  if (c->qk_norm) a.qkv_BQ = push_act(m, n, qkv_width(c));
  a.att_BA = push_act(m, n, attn_width(c));
  a.up_BU = push_act(m, n, up_width(c));
  a.act_BF = push_act(m, n, c->ffn);
  return a;
}

static Linear linear_of(const Model *m, int weight, int bias, int n_joined) {
  Linear l = {.w_OK = zeropp_weight_joined(m->zero, weight, n_joined)};
  if (bias >= 0) l.bias_O = zeropp_weight_joined(m->zero, bias, n_joined);
  return l;
}

/* y = norm(x) W^T + b. */
static void norm_linear(Model *m, NormParams norm, Linear l, Tensor x_BC, Tensor norm_BC,
                        Tensor y) {
  if (m->config.norm == NORM_RMS) {
    l.front = FRONT_RMSNORM;
    l.norm_K = zeropp_weight(m->zero, norm.weight);
    l.eps = m->config.norm_eps;
    l.front_MK = norm_BC;
    m->ops->linear(m->device, l, x_BC, y);
    return;
  }
  norm_forward(m, norm, x_BC, absent(), norm_BC, (NormStats){0});
  m->ops->linear(m->device, l, norm_BC, y);
}

/* The caller's attention over qkv, added to the residual. */
static void decode_attention(Model *m, int layer, DecodeAttend attend, void *ctx,
                             const DecodeActs *a) {
  const BlockParams *p = &m->params.block[layer];
  if (m->config.qk_norm)
    m->ops->qk_norm_fwd(m->device, a->raw_BQ, zeropp_weight(m->zero, p->q_norm),
                        zeropp_weight(m->zero, p->k_norm), m->config.norm_eps, model_attn_shape(m),
                        a->qkv_BQ, absent());
  bool turns = m->config.rope != ROPE_NONE;
  attend(ctx, layer, a->qkv_BQ, turns ? m->rope.cos_Pr : absent(),
         turns ? m->rope.sin_Pr : absent(), a->att_BA);
  Linear o = linear_of(m, p->o, p->o_bias, 1);
  o.add = true;
  m->ops->linear(m->device, o, a->att_BA, a->x_BC);
}

/* From up to the residual. */
static void decode_down(Model *m, int layer, const DecodeActs *a, Tensor x_BC) {
  const BlockParams *p = &m->params.block[layer];
  Linear down = linear_of(m, p->down, p->down_bias, 1);
  down.add = true;
  if (m->config.mlp == MLP_SWIGLU) {
    down.front = FRONT_SWIGLU;
    down.front_MK = a->act_BF;
    m->ops->linear(m->device, down, a->up_BU, x_BC);
    return;
  }
  m->ops->act_fwd(m->device, m->config.activation, a->up_BU, a->act_BF);
  m->ops->linear(m->device, down, a->act_BF, x_BC);
}

static void decode_block(Model *m, int layer, DecodeAttend attend, void *ctx, const DecodeActs *a) {
  const BlockParams *p = &m->params.block[layer];
  Linear qkv = linear_of(m, p->qkv, p->qkv_bias, 3);
  Linear up = linear_of(m, p->up, p->up_bias, up_joined(&m->config));
  if (m->config.post_norm) {
    m->ops->linear(m->device, qkv, a->x_BC, a->raw_BQ);
    decode_attention(m, layer, attend, ctx, a);
    norm_forward(m, p->norm1, a->x_BC, absent(), a->norm_BC, (NormStats){0});
    m->ops->linear(m->device, up, a->norm_BC, a->up_BU);
    decode_down(m, layer, a, a->norm_BC);
    norm_forward(m, p->norm2, a->norm_BC, absent(), a->x_BC, (NormStats){0});
    return;
  }
  norm_linear(m, p->norm1, qkv, a->x_BC, a->norm_BC, a->raw_BQ);
  decode_attention(m, layer, attend, ctx, a);
  norm_linear(m, p->norm2, up, a->x_BC, a->norm_BC, a->up_BU);
  decode_down(m, layer, a, a->x_BC);
}

static void decode_embed(Model *m, Tensor token_B, Tensor place_B, const DecodeActs *a) {
  const ModelParams *at = &m->params;
  Tensor table = zeropp_weight(m->zero, at->embedding);
  if (at->project_in >= 0) {
    Tensor embed_BE = push_act(m, token_B.dim[0], embed_width(&m->config));
    m->ops->embedding_fwd(m->device, token_B, table, embed_BE);
    m->ops->linear(m->device, linear_of(m, at->project_in, -1, 1), embed_BE, a->x_BC);
  } else {
    m->ops->embedding_fwd(m->device, token_B, table, a->x_BC);
  }
  if (at->positions < 0) return;
  m->ops->embedding_fwd(m->device, place_B, zeropp_weight(m->zero, at->positions), a->norm_BC);
  m->ops->axpy(m->device, 1, a->norm_BC, a->x_BC);
}

static void decode_head(Model *m, const DecodeActs *a, Tensor logits_BV) {
  const HeadParams *p = &m->params.head;
  Linear head = linear_of(m, p->weight, -1, 1), first = head;
  Tensor out = logits_BV;
  if (p->project_out >= 0) {
    first = linear_of(m, p->project_out, -1, 1);
    out = push_act(m, a->x_BC.dim[0], embed_width(&m->config));
  }
  if (p->norm.weight >= 0)
    norm_linear(m, p->norm, first, a->x_BC, a->norm_BC, out);
  else
    m->ops->linear(m->device, first, a->x_BC, out);
  if (p->project_out >= 0) m->ops->linear(m->device, head, out, logits_BV);
}

void model_decode(Model *m, Tensor token_B, Tensor place_B, DecodeAttend attend, void *ctx,
                  Tensor logits_BV) {
  require(m->head == HEAD_LM);
  ArenaMark mark = arena_mark(m->arena);
  DecodeActs a = acts_push(m, token_B.dim[0]);
  decode_embed(m, token_B, place_B, &a);
  for (int l = 0; l < m->config.n_layers; l++) decode_block(m, l, attend, ctx, &a);
  decode_head(m, &a, logits_BV);
  arena_pop(m->arena, mark);
}
