/* The trunk's forward: embedding, blocks of attention and gated MLP, residual stream.
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

Packed packed_upload(Model *m, Batch b) {
  check_batch(m, b);
  Packed p = {.n = b.n_seqs ? b.offsets[b.n_seqs] : 0,
              .seg = {.n_seqs = b.n_seqs, .offsets = b.offsets}};
  int32_t *positions = mem_alloc((size_t)p.n, sizeof(int32_t));
  int longest = 0;
  for (int s = 0; s < b.n_seqs; s++) {
    int first = b.offsets[s], len = b.offsets[s + 1] - first;
    for (int t = 0; t < len; t++) positions[first + t] = t;
    if (len > longest) longest = len;
  }
  rope_ensure(m, longest);
  p.tokens_N = push_i32(m, p.n, b.tokens);
  p.positions_N = push_i32(m, p.n, positions);
  free(positions);
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

/* All buffers but x and out. Row statistics only where a backward reads them. */
static void block_acts_push(Model *m, int n, bool backward_follows, BlockActs *a) {
  const ModelConfig *c = &m->config;
  a->norm1_NC = push_f32(m, n, c->hidden);
  a->qkv_NQ = push_f32(m, n, qkv_width(c));
  a->att_NA = push_f32(m, n, attn_width(c));
  a->mid_NC = push_f32(m, n, c->hidden);
  a->norm2_NC = push_f32(m, n, c->hidden);
  a->gu_N2F = push_f32(m, n, 2 * (int64_t)c->ffn);
  a->act_NF = push_f32(m, n, c->ffn);
  a->rstd1_N = a->rstd2_N = a->lse_NH = absent();
  if (!backward_follows) return;
  a->rstd1_N = push_f32_1d(m, n);
  a->rstd2_N = push_f32_1d(m, n);
  a->lse_NH = push_f32(m, n, c->n_heads);
}

/* y = x W^T + b; n_joined parameters stand for one matrix. bias < 0: none. */
static void linear(Model *m, Tensor x, int weight, int bias, int n_joined, Tensor y) {
  m->ops->gemm(m->device, GEMM_NT, 1, x, zeropp_weight_joined(m->zero, weight, n_joined), 0, y);
  if (bias >= 0) m->ops->bias_add(m->device, y, zeropp_weight_joined(m->zero, bias, n_joined));
}

static void attention_forward(Model *m, int layer, Tensor positions_N, AttnCall call,
                              BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  AttnShape shape = model_attn_shape(m);
  linear(m, a->norm1_NC, p->qkv, p->qkv_bias, 3, a->qkv_NQ);
  m->ops->rope(m->device, a->qkv_NQ, positions_N, m->rope.cos_Pr, m->rope.sin_Pr, shape, false);
  if (call.attend)
    call.attend(call.ctx, layer, a->qkv_NQ, a->att_NA);
  else
    m->ops->attention_fwd(m->device, a->qkv_NQ, call.seg, shape, a->att_NA, a->lse_NH);
  linear(m, a->att_NA, p->o, p->o_bias, 1, a->mid_NC);
}

/* delta_NC: the older residual that the first norm adds to x; absent where x is whole already. */
void block_forward(Model *m, int layer, Tensor positions_N, AttnCall call, Tensor delta_NC,
                   BlockActs *a) {
  const BlockParams *p = &m->params.block[layer];
  float eps = m->config.norm_eps;
  m->ops->rmsnorm_fwd(m->device, a->x_NC, delta_NC, zeropp_weight(m->zero, p->norm1), eps,
                      a->norm1_NC, a->rstd1_N);
  attention_forward(m, layer, positions_N, call, a);
  m->ops->rmsnorm_fwd(m->device, a->mid_NC, a->x_NC, zeropp_weight(m->zero, p->norm2), eps,
                      a->norm2_NC, a->rstd2_N);
  linear(m, a->norm2_NC, p->gate_up, p->gate_up_bias, 2, a->gu_N2F);
  m->ops->swiglu_fwd(m->device, a->gu_N2F, a->act_NF);
  if (a->out_NC.data) linear(m, a->act_NF, p->down, p->down_bias, 1, a->out_NC);
}

/* ---- all blocks ---- */

static Tensor embed(Model *m, const Packed *p) {
  Tensor x_NC = push_f32(m, p->n, m->config.hidden);
  zeropp_gather(m->zero, 0);
  m->ops->embedding_fwd(m->device, p->tokens_N, zeropp_weight(m->zero, m->params.embedding), x_NC);
  zeropp_release(m->zero, 0);
  return x_NC;
}

/* What is kept decides which buffers are fresh in each block and which all blocks share:
 *   KEEP_ALL     everything fresh;
 *   KEEP_INPUTS  out fresh, since it becomes the next block's x, the rest shared;
 *   KEEP_NOTHING out overwrites x, which is dead once mid holds the residual. */
void trunk_forward(Model *m, const Packed *p, AttnCall call, Keep keep, TrunkActs *t) {
  int n_layers = m->config.n_layers;
  t->keep = keep;
  t->block = mem_zalloc((size_t)n_layers, sizeof(BlockActs));
  t->x_NC = embed(m, p);
  t->delta_NC = absent();
  for (int l = 0; l < n_layers; l++) {
    BlockActs *a = &t->block[l];
    if (l == 0 || keep == KEEP_ALL)
      block_acts_push(m, p->n, keep != KEEP_NOTHING, a);
    else
      *a = t->block[l - 1];
    a->x_NC = t->x_NC;
    a->out_NC = keep == KEEP_NOTHING ? a->x_NC : push_f32(m, p->n, m->config.hidden);
    zeropp_gather(m->zero, unit_of_block(l));
    block_forward(m, l, p->positions_N, call, t->delta_NC, a);
    zeropp_release(m->zero, unit_of_block(l));
    t->x_NC = a->out_NC;
    t->delta_NC = a->mid_NC;
  }
}

void trunk_free(TrunkActs *t) { free(t->block); }
