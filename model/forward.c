/* The trunk's forward: embedding, blocks of attention and MLP, residual stream.
 *
 * Each unit is gathered before its use and released after (ZeRO-3). The residual stream is never
 * copied: a norm adds the older residual into the buffer of the newest sublayer output. */
#include "model/internal.h"

/* ---- batches ---- */

static void check_batch(const Model *m, Batch b) {
  const ModelConfig *c = &m->config;
  for (int s = 0; s < b.n_seqs; s++) {
    int len = b.offsets[s + 1] - b.offsets[s];
    if (len < 0 || len > c->max_positions)
      die("sequence %d of the batch has %d tokens; the model takes at most %d", s, len,
          c->max_positions);
  }
  int n = b.n_seqs ? b.offsets[b.n_seqs] : 0;
  for (int i = 0; i < n; i++)
    if (b.tokens[i] < 0 || b.tokens[i] >= c->vocab_size)
      die("token %d of the batch is %d; the vocabulary has %d", i, b.tokens[i], c->vocab_size);
}

/* Rows of the learned positions, or of the rotary table, for every token. */
static void fill_places(Model *m, Batch b, int32_t *place) {
  const ModelConfig *c = &m->config;
  int32_t *lengths = mem_alloc((size_t)b.n_seqs, sizeof(int32_t));
  for (int s = 0; s < b.n_seqs; s++) lengths[s] = b.offsets[s + 1] - b.offsets[s];
  if (c->rope != ROPE_NONE) rope_ensure(m, b.n_seqs, lengths, lengths);
  for (int s = 0; s < b.n_seqs; s++) {
    int first = c->rope == ROPE_NONE ? family_of(c)->position_offset : rope_first(m, lengths[s]);
    for (int t = 0; t < lengths[s]; t++) place[b.offsets[s] + t] = first + t;
  }
  free(lengths);
}

Packed packed_upload(Model *m, Batch b) {
  check_batch(m, b);
  Packed p = {.n = b.n_seqs ? b.offsets[b.n_seqs] : 0,
              .seg = {.n_seqs = b.n_seqs, .offsets = b.offsets}};
  int32_t *place = mem_alloc((size_t)p.n, sizeof(int32_t));
  fill_places(m, b, place);
  p.tokens_N = push_i32(m, p.n, b.tokens);
  p.place_N = push_i32(m, p.n, place);
  p.seg.device_offsets = push_i32(m, b.n_seqs ? b.n_seqs + 1 : 0, b.offsets);
  free(place);
  return p;
}

AttnShape model_attn_shape(const Model *m) {
  const ModelConfig *c = &m->config;
  /* 1/sqrt rounded once, from double, as transformers has it. */
  double scale = 1.0 / __builtin_sqrt((double)c->head_dim);
  return (AttnShape){.n_heads = c->n_heads,
                     .n_kv_heads = c->n_kv_heads,
                     .head_dim = c->head_dim,
                     .scale = (float)scale,
                     .window = c->window};
}

/* ---- one block ---- */

/* Buffers of a block are all but x and what the next block enters with: out, or with post-norm
 * norm2. These are cheap to compute again from the others, so that one norm may take the other's
 * place. */
static void push_cheap(Model *m, int n, Keep keep, BlockActs *a) {
  const ModelConfig *c = &m->config;
  a->norm1_NC = push_act(m, n, c->hidden);
  if (!c->post_norm) a->norm2_NC = keep == KEEP_ALL ? push_act(m, n, c->hidden) : a->norm1_NC;
  if (c->qk_norm) a->qkv_NQ = push_act(m, n, qkv_width(c));
  a->act_NF = push_act(m, n, c->ffn);
}

/* Products of matrices and attention; statistics only where a backward reads them. */
static void push_products(Model *m, int n, bool backward_follows, BlockActs *a) {
  const ModelConfig *c = &m->config;
  a->raw_NQ = push_act(m, n, qkv_width(c));
  if (!c->qk_norm) a->qkv_NQ = a->raw_NQ;
  a->att_NA = push_act(m, n, attn_width(c));
  if (c->post_norm) a->out_NC = push_act(m, n, c->hidden);
  a->up_NU = push_act(m, n, up_width(c));
  if (!backward_follows) return;
  a->stats1 = norm_stats_push(m, n);
  a->stats2 = norm_stats_push(m, n);
  a->lse_NH = push_f32(m, n, c->n_heads);
  if (c->qk_norm) a->qk_rstd_NH = push_f32(m, n, c->n_heads + c->n_kv_heads);
}

/* From raw to qkv: norms of heads and rotation, in place without norms. */
static void place_heads(Model *m, const BlockParams *p, Tensor place_N, BlockActs *a) {
  AttnShape shape = model_attn_shape(m);
  if (m->config.qk_norm)
    m->ops->qk_norm_fwd(m->device, a->raw_NQ, zeropp_weight(m->zero, p->q_norm),
                        zeropp_weight(m->zero, p->k_norm), m->config.norm_eps, shape, a->qkv_NQ,
                        a->qk_rstd_NH);
  if (m->config.rope != ROPE_NONE)
    m->ops->rope(m->device, a->qkv_NQ, place_N, m->rope.cos_Pr, m->rope.sin_Pr, shape, false);
}

static void attend(Model *m, int layer, Tensor in_NC, Tensor place_N, AttnCall call, BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  AttnShape shape = model_attn_shape(m);
  linear(m, in_NC, p->qkv, p->qkv_bias, 3, a->raw_NQ);
  place_heads(m, p, place_N, a);
  if (call.attend)
    call.attend(call.ctx, layer, a->qkv_NQ, a->att_NA);
  else
    m->ops->attention_fwd(m->device, a->qkv_NQ, call.seg, shape, a->att_NA, a->lse_NH);
}

static void attention_forward(Model *m, int layer, Tensor in_NC, Tensor place_N, AttnCall call,
                              BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  attend(m, layer, in_NC, place_N, call, a);
  linear(m, a->att_NA, p->o, p->o_bias, 1, a->mid_NC);
}

static void activate(Model *m, BlockActs *a) {
  if (m->config.mlp == MLP_SWIGLU)
    m->ops->swiglu_fwd(m->device, a->up_NU, a->act_NF);
  else
    m->ops->act_fwd(m->device, m->config.activation, a->up_NU, a->act_NF);
}

/* For a backward: SwiGLU's makes its output itself. */
static void activate_again(Model *m, BlockActs *a) {
  if (m->config.mlp != MLP_SWIGLU) activate(m, a);
}

static void mlp_forward(Model *m, int layer, Tensor in_NC, BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  linear(m, in_NC, p->up, p->up_bias, up_joined(&m->config), a->up_NU);
  if (!a->out_NC.data) {
    activate_again(m, a);
    return;
  }
  activate(m, a);
  linear(m, a->act_NF, p->down, p->down_bias, 1, a->out_NC);
}

/* delta_NC: the older residual that the first norm adds to x; absent where x is whole already. */
void block_forward(Model *m, int layer, Tensor place_N, AttnCall call, Tensor delta_NC,
                   BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  if (m->config.post_norm) {
    attention_forward(m, layer, a->x_NC, place_N, call, a);
    norm_forward(m, p->norm1, a->mid_NC, a->x_NC, a->norm1_NC, a->stats1);
    mlp_forward(m, layer, a->norm1_NC, a);
    norm_forward(m, p->norm2, a->out_NC, a->norm1_NC, a->norm2_NC, a->stats2);
    return;
  }
  norm_forward(m, p->norm1, a->x_NC, delta_NC, a->norm1_NC, a->stats1);
  attention_forward(m, layer, a->norm1_NC, place_N, call, a);
  norm_forward(m, p->norm2, a->mid_NC, a->x_NC, a->norm2_NC, a->stats2);
  mlp_forward(m, layer, a->norm2_NC, a);
}

/* Residuals are whole by now, so that the norms have nothing to add, and neither o nor (but for
 * post-norm, whose second norm reads it) down is multiplied again. The same operations on the same
 * values give the same bits; post-norm also writes the next block's x once more. */
void block_redo_mlp(Model *m, int layer, Keep kept, BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  bool post = m->config.post_norm;
  if (post)
    norm_forward(m, p->norm1, a->mid_NC, absent(), a->norm1_NC, a->stats1);
  else
    norm_forward(m, p->norm2, a->mid_NC, absent(), a->norm2_NC, a->stats2);
  if (kept == KEEP_PRODUCTS) {
    activate_again(m, a);
    return;
  }
  if (!post) a->out_NC = absent();
  mlp_forward(m, layer, post ? a->norm1_NC : a->norm2_NC, a);
  if (post) norm_forward(m, p->norm2, a->out_NC, a->norm1_NC, a->norm2_NC, a->stats2);
}

void block_redo_attention(Model *m, int layer, const Packed *b, Keep kept, BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  bool post = m->config.post_norm;
  if (!post) norm_forward(m, p->norm1, a->x_NC, absent(), a->norm1_NC, a->stats1);
  if (kept == KEEP_RESIDUALS)
    attend(m, layer, post ? a->x_NC : a->norm1_NC, b->place_N, (AttnCall){.seg = b->seg}, a);
  else if (m->config.qk_norm)
    place_heads(m, p, b->place_N, a); /* else raw is rotated in place */
}

/* ---- all blocks ---- */

/* Token embedding, projected to the width of the blocks, plus learned positions. */
static void embed(Model *m, const Packed *p, TrunkActs *t) {
  const ModelParams *at = &m->params;
  t->x_NC = push_act(m, p->n, m->config.hidden);
  t->embed_NE = absent();
  if (at->project_in >= 0) t->embed_NE = push_act(m, p->n, embed_width(&m->config));
  gather_upwards(m, 0);
  m->ops->embedding_fwd(m->device, p->tokens_N, zeropp_weight(m->zero, at->embedding),
                        at->project_in >= 0 ? t->embed_NE : t->x_NC);
  if (at->project_in >= 0) linear(m, t->embed_NE, at->project_in, -1, 1, t->x_NC);
  if (at->positions >= 0) {
    ArenaMark mark = arena_mark(m->arena);
    Tensor positions_NC = push_act(m, p->n, m->config.hidden);
    m->ops->embedding_fwd(m->device, p->place_N, zeropp_weight(m->zero, at->positions),
                          positions_NC);
    m->ops->axpy(m->device, 1, positions_NC, t->x_NC);
    arena_pop(m->arena, mark);
  }
  zeropp_release(m->zero, 0);
}

/* What is kept decides which buffers are fresh in each block and which all blocks share; the
 * leaving one becomes the next block's x. It is fresh, too, but for KEEP_NOTHING: there it
 * overwrites x, which is dead once mid holds the residual. */
static void block_acts_push(Model *m, int n, Keep keep, int layer, TrunkActs *t) {
  const ModelConfig *c = &m->config;
  BlockActs *a = &t->block[layer];
  if (layer < t->whole) keep = KEEP_RESIDUALS;
  if (layer > 0) *a = t->block[layer - 1];
  if (layer == 0 || keep == KEEP_ALL) push_cheap(m, n, keep, a);
  if (layer == 0 || keep >= KEEP_PRODUCTS) push_products(m, n, keep != KEEP_NOTHING, a);
  if (layer == 0 || keep != KEEP_NOTHING) a->mid_NC = push_act(m, n, c->hidden);
  a->x_NC = t->x_NC;
  Tensor leaving_NC = keep == KEEP_NOTHING ? a->x_NC : push_act(m, n, c->hidden);
  *(c->post_norm ? &a->norm2_NC : &a->out_NC) = leaving_NC;
  t->x_NC = leaving_NC;
}

void trunk_forward(Model *m, const Packed *p, AttnCall call, Keep keep, int whole, TrunkActs *t) {
  const ModelConfig *c = &m->config;
  t->keep = keep;
  t->whole = whole;
  t->block = mem_zalloc((size_t)c->n_layers, sizeof(BlockActs));
  embed(m, p, t);
  t->delta_NC = absent();
  for (int l = 0; l < c->n_layers; l++) {
    BlockActs *a = &t->block[l];
    block_acts_push(m, p->n, keep, l, t);
    gather_upwards(m, unit_of_block(l));
    block_forward(m, l, p->place_N, call, t->delta_NC, a);
    zeropp_release(m->zero, unit_of_block(l));
    t->delta_NC = c->post_norm ? absent() : a->mid_NC;
  }
}

void trunk_free(TrunkActs *t) { free(t->block); }
