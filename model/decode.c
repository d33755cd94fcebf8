/* One token of every sequence, for decoding without the host: all tensors are on the device
 * already, nothing is uploaded, downloaded or allocated there, so that a device can capture it.
 *
 * The same arithmetic as the trunk's forward, cut otherwise: a norm (RMSNorm) or an activation
 * (SwiGLU) belongs to the linear map behind it, a residual sum to the one in front of it. Weights
 * lie at hand, but in a stream, where each unit is gathered in its turn. */
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
  Linear l = zeropp_linear(m->zero, weight, n_joined);
  if (bias >= 0) l.bias_O = zeropp_weight_joined(m->zero, bias, n_joined);
  return l;
}

/* In a stream a weight was made just now: a kernel that reads ahead of what is queued before it
 * would come too early, so everything goes op by op. */
static void apply(Model *m, Linear l, Tensor x, Tensor y) {
  if (!zeropp_in_rollout(m->zero, ROLLOUT_STREAM)) {
    m->ops->linear(m->device, l, x, y);
    return;
  }
  Tensor in = l.front == FRONT_NONE ? x : l.front_MK;
  if (l.front == FRONT_RMSNORM)
    m->ops->rmsnorm_fwd(m->device, x, absent(), l.norm_K, l.eps, in, absent());
  if (l.front == FRONT_SWIGLU) m->ops->swiglu_fwd(m->device, x, in);
  m->ops->gemm(m->device, GEMM_NT, 1, in, l.w_OK, l.add ? 1 : 0, y);
  if (l.bias_O.data) m->ops->bias_add(m->device, y, l.bias_O);
}

/* y = norm(x) W^T + b. */
static void norm_linear(Model *m, NormParams norm, Linear l, Tensor x_BC, Tensor norm_BC,
                        Tensor y) {
  if (m->config.norm == NORM_RMS) {
    l.front = FRONT_RMSNORM;
    l.norm_K = zeropp_weight(m->zero, norm.weight);
    l.eps = m->config.norm_eps;
    l.front_MK = norm_BC;
    apply(m, l, x_BC, y);
    return;
  }
  norm_forward(m, norm, x_BC, absent(), norm_BC, (NormStats){0});
  apply(m, l, norm_BC, y);
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
  apply(m, o, a->att_BA, a->x_BC);
}

/* From up to the residual. */
static void decode_down(Model *m, int layer, const DecodeActs *a, Tensor x_BC) {
  const BlockParams *p = &m->params.block[layer];
  Linear down = linear_of(m, p->down, p->down_bias, 1);
  down.add = true;
  if (m->config.mlp == MLP_SWIGLU) {
    down.front = FRONT_SWIGLU;
    down.front_MK = a->act_BF;
    apply(m, down, a->up_BU, x_BC);
    return;
  }
  m->ops->act_fwd(m->device, m->config.activation, a->up_BU, a->act_BF);
  apply(m, down, a->act_BF, x_BC);
}

static void decode_block(Model *m, int layer, DecodeAttend attend, void *ctx, const DecodeActs *a) {
  const BlockParams *p = &m->params.block[layer];
  Linear qkv = linear_of(m, p->qkv, p->qkv_bias, 3);
  Linear up = linear_of(m, p->up, p->up_bias, up_joined(&m->config));
  if (m->config.post_norm) {
    apply(m, qkv, a->x_BC, a->raw_BQ);
    decode_attention(m, layer, attend, ctx, a);
    norm_forward(m, p->norm1, a->x_BC, absent(), a->norm_BC, (NormStats){0});
    apply(m, up, a->norm_BC, a->up_BU);
    decode_down(m, layer, a, a->norm_BC);
    norm_forward(m, p->norm2, a->norm_BC, absent(), a->x_BC, (NormStats){0});
    return;
  }
  norm_linear(m, p->norm1, qkv, a->x_BC, a->norm_BC, a->raw_BQ);
  decode_attention(m, layer, attend, ctx, a);
  norm_linear(m, p->norm2, up, a->x_BC, a->norm_BC, a->up_BU);
  decode_down(m, layer, a, a->x_BC);
}

void embed_tokens(Model *m, Tensor token_B, Tensor place_B, Tensor x_BC) {
  const ModelParams *at = &m->params;
  int64_t n = token_B.dim[0];
  Tensor table = zeropp_weight(m->zero, at->embedding);
  ArenaMark mark = arena_mark(m->arena);
  if (at->project_in >= 0) {
    Tensor embed_BE = push_act(m, n, embed_width(&m->config));
    m->ops->embedding_fwd(m->device, token_B, table, embed_BE);
    apply(m, linear_of(m, at->project_in, -1, 1), embed_BE, x_BC);
  } else {
    m->ops->embedding_fwd(m->device, token_B, table, x_BC);
  }
  if (at->positions >= 0) {
    Tensor positions_BC = push_act(m, n, m->config.hidden);
    m->ops->embedding_fwd(m->device, place_B, zeropp_weight(m->zero, at->positions), positions_BC);
    m->ops->axpy(m->device, 1, positions_BC, x_BC);
  }
  arena_pop(m->arena, mark);
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
    apply(m, first, a->x_BC, out);
  if (p->project_out >= 0) apply(m, head, out, logits_BV);
}

static void decode_trunk(Model *m, Tensor token_B, Tensor place_B, DecodeAttend attend, void *ctx,
                         Tensor logits_BV) {
  bool stream = zeropp_in_rollout(m->zero, ROLLOUT_STREAM);
  ArenaMark mark = arena_mark(m->arena);
  DecodeActs a = acts_push(m, token_B.dim[0]);
  if (stream) gather_upwards(m, 0);
  embed_tokens(m, token_B, place_B, a.x_BC);
  if (stream) zeropp_release(m->zero, 0);
  for (int l = 0; l < m->config.n_layers; l++) {
    if (stream) gather_upwards(m, unit_of_block(l));
    decode_block(m, l, attend, ctx, &a);
    if (stream) zeropp_release(m->zero, unit_of_block(l));
  }
  if (stream) head_gather(m);
  decode_head(m, &a, logits_BV);
  if (stream) head_release(m);
  arena_pop(m->arena, mark);
}

void model_decode(Model *m, Tensor token_B, Tensor place_B, DecodeAttend attend, void *ctx,
                  Tensor logits_BV) {
  require(m->head == HEAD_LM);
  if (zeropp_in_rollout(m->zero, ROLLOUT_TENSOR_PARALLEL))
    sliced_step(m, &(SlicedStep){.token_B = token_B,
                                 .place_B = place_B,
                                 .attend = attend,
                                 .ctx = ctx,
                                 .logits_RV = logits_BV});
  else
    decode_trunk(m, token_B, place_B, attend, ctx, logits_BV);
}
