/* The trunk in a tensor-parallel rollout: every rank of a node has some rows of each matrix, and
 * all take a step together, each for its own sequences.
 *
 * A rank multiplies the rows of x of the whole node by its rows of W, which gives some columns of
 * y, each with the bits that the whole matrix would give: no sum is cut. So what travels is
 * activations, within the node: columns of queries, keys and values to the rank whose sequences
 * they are of, which attends to its own cache; what it found to all; and columns of what o, the
 * activation and down made, to all. The residual stream is whole on every rank, and so is
 * everything elementwise. Logits go to their rank.
 *
 * Rows of the node lie by rank: those of rank r are tokens_of[r] rows behind those before it. */
#include <stdlib.h>
#include <string.h>

#include "model/internal.h"

/* Rows of all ranks of the node. */
typedef struct NodeRows {
  const int *of; /* [ranks] */
  int ranks;
  int64_t own, first, all; /* this rank's, where they start, all */
} NodeRows;

typedef struct Sliced {
  Model *m;
  NodeRows rows;
  bool open; /* units are gathered: full weights out of codes */
} Sliced;

static NodeRows node_rows(const Model *m, const int *of) {
  NodeRows r = {.of = of, .ranks = m->grid->local, .own = of[m->grid->local_rank]};
  for (int i = 0; i < r.ranks; i++) {
    if (i == m->grid->local_rank) r.first = r.all;
    r.all += of[i];
  }
  return r;
}

void model_step_rows(Model *m, const int *tokens_of, const int *heads_of) {
  size_t n = (size_t)m->grid->local;
  free(m->tokens_of);
  m->tokens_of = mem_alloc(2 * n, sizeof *m->tokens_of);
  m->heads_all = !heads_of;
  memcpy(m->tokens_of, tokens_of, n * sizeof *tokens_of);
  memcpy(m->tokens_of + n, heads_of ? heads_of : tokens_of, n * sizeof *tokens_of);
}

/* ---- columns of the ranks ---- */

/* Columns that a rank has of n joined parameters. */
static int64_t columns_of(const Model *m, int param, int n, int rank) {
  int64_t sum = 0, first, count;
  for (int p = param; p < param + n; p++) {
    zeropp_slice_rows(m->zero, p, rank, &first, &count);
    sum += count;
  }
  return sum;
}

/* blocks: of rank after rank, [rows of y, its columns]. */
static void join(const Model *m, int param, int n, Tensor blocks, Tensor y, bool add) {
  int ranks = m->grid->local, k = 0;
  int64_t rows = y.dim[0], at = 0;
  ColumnPart *part = mem_alloc((size_t)ranks * (size_t)n, sizeof *part);
  for (int r = 0; r < ranks; r++) {
    int64_t stride = columns_of(m, param, n, r), from = at, to = 0;
    for (int p = param; p < param + n; p++) {
      int64_t first, count;
      zeropp_slice_rows(m->zero, p, r, &first, &count);
      part[k++] = (ColumnPart){from, stride, count, to + first};
      from += count;
      to += zeropp_spec(m->zero, p)->dim[0];
    }
    at += rows * stride;
  }
  m->ops->join_columns(m->device, k, part, blocks, y, add);
  free(part);
}

static size_t bytes_of(Tensor like, int64_t n) { return (size_t)n * dtype_size(like.dtype); }

static Tensor push_like(Model *m, Tensor like, int64_t n) {
  Tensor x = tensor_1d(NULL, like.dtype, n);
  x.data = arena_push(m->arena, tensor_bytes(x));
  return x;
}

/* Rows of every rank to every rank. */
static void gather_rows_of_node(Model *m, NodeRows rows, Tensor own, Tensor all) {
  size_t *bytes = mem_alloc((size_t)rows.ranks, sizeof *bytes);
  for (int r = 0; r < rows.ranks; r++) bytes[r] = bytes_of(own, rows.of[r] * own.dim[1]);
  comm_all_gather(m->grid->dev_intra, own.data, all.data, bytes);
  free(bytes);
}

/* Columns of every rank, of all rows, to every rank. */
static void gather_columns(Model *m, int param, int n, Tensor own, Tensor y, bool add) {
  int ranks = m->grid->local;
  ArenaMark mark = arena_mark(m->arena);
  Tensor blocks = push_like(m, own, tensor_numel(y));
  size_t *bytes = mem_alloc((size_t)ranks, sizeof *bytes);
  for (int r = 0; r < ranks; r++) bytes[r] = bytes_of(own, y.dim[0] * columns_of(m, param, n, r));
  comm_all_gather(m->grid->dev_intra, own.data, blocks.data, bytes);
  join(m, param, n, blocks, y, add);
  free(bytes);
  arena_pop(m->arena, mark);
}

/* Columns of every rank, of each one's rows to it: y has this rank's rows. */
static void columns_to_rows(Model *m, NodeRows rows, int param, int n, Tensor own, Tensor y) {
  ArenaMark mark = arena_mark(m->arena);
  Tensor blocks = push_like(m, own, tensor_numel(y));
  size_t *send = mem_alloc(2 * (size_t)rows.ranks, sizeof *send), *recv = send + rows.ranks;
  for (int r = 0; r < rows.ranks; r++) {
    send[r] = bytes_of(own, rows.of[r] * own.dim[1]);
    recv[r] = bytes_of(own, rows.own * columns_of(m, param, n, r));
  }
  comm_all_to_all(m->grid->dev_intra, own.data, send, blocks.data, recv);
  join(m, param, n, blocks, y, false);
  free(send);
  arena_pop(m->arena, mark);
}

/* ---- a block ---- */

/* x W^T with this rank's rows of W. Where those were made just now, a kernel that reads ahead of
 * what is queued before it would come too early. */
static void multiply(const Sliced *s, Linear l, Tensor x, Tensor y) {
  Model *m = s->m;
  if (tensor_numel(y) == 0) return;
  if (s->open)
    m->ops->gemm(m->device, GEMM_NT, 1, x, l.w_OK, 0, y);
  else
    m->ops->linear(m->device, l, x, y);
}

static Tensor project(const Sliced *s, int param, int n, Tensor x) {
  Linear l = zeropp_linear(s->m->zero, param, n);
  Tensor y = push_act(s->m, x.dim[0], l.w_OK.dim[0]);
  multiply(s, l, x, y);
  return y;
}

static void add_bias(Model *m, Tensor y, int bias, int n) {
  if (bias >= 0) m->ops->bias_add(m->device, y, zeropp_weight_joined(m->zero, bias, n));
}

/* This rank's part of the biases of n joined parameters. */
static void add_bias_slice(Model *m, Tensor y, int bias, int n) {
  if (bias < 0) return;
  Tensor slice = push_like(m, y, y.dim[1]);
  int64_t at = 0, first, count;
  for (int p = bias; p < bias + n; p++) {
    zeropp_slice_rows(m->zero, p, m->grid->local_rank, &first, &count);
    const char *from = zeropp_weight(m->zero, p).data;
    device_copy(m->device, (char *)slice.data + bytes_of(y, at), from + bytes_of(y, first),
                bytes_of(y, count));
    at += count;
  }
  m->ops->bias_add(m->device, y, slice);
}

static void sliced_attention(const Sliced *s, int layer, DecodeAttend attend, void *ctx,
                             Tensor h_NC, Tensor x_NC) {
  Model *m = s->m;
  const ModelConfig *c = &m->config;
  const BlockParams *p = &m->params.block[layer];
  Tensor raw_BQ = push_act(m, s->rows.own, qkv_width(c)), qkv_BQ = raw_BQ;
  Tensor att_BA = push_act(m, s->rows.own, attn_width(c));
  Tensor att_NA = push_act(m, s->rows.all, attn_width(c));
  columns_to_rows(m, s->rows, p->qkv, 3, project(s, p->qkv, 3, h_NC), raw_BQ);
  add_bias(m, raw_BQ, p->qkv_bias, 3);
  if (c->qk_norm) {
    qkv_BQ = push_act(m, s->rows.own, qkv_width(c));
    m->ops->qk_norm_fwd(m->device, raw_BQ, zeropp_weight(m->zero, p->q_norm),
                        zeropp_weight(m->zero, p->k_norm), c->norm_eps, model_attn_shape(m), qkv_BQ,
                        absent());
  }
  bool turns = c->rope != ROPE_NONE;
  attend(ctx, layer, qkv_BQ, turns ? m->rope.cos_Pr : absent(), turns ? m->rope.sin_Pr : absent(),
         att_BA);
  gather_rows_of_node(m, s->rows, att_BA, att_NA);
  gather_columns(m, p->o, 1, project(s, p->o, 1, att_NA), x_NC, true);
  add_bias(m, x_NC, p->o_bias, 1);
}

static void sliced_mlp(const Sliced *s, int layer, Tensor h_NC, Tensor x_NC) {
  Model *m = s->m;
  const ModelConfig *c = &m->config;
  const BlockParams *p = &m->params.block[layer];
  int64_t own = columns_of(m, p->up, 1, m->grid->local_rank);
  Tensor up_NU = project(s, p->up, up_joined(c), h_NC);
  Tensor slice_NF = push_act(m, s->rows.all, own), act_NF = push_act(m, s->rows.all, c->ffn);
  add_bias_slice(m, up_NU, p->up_bias, up_joined(c));
  if (c->mlp == MLP_SWIGLU)
    m->ops->swiglu_fwd(m->device, up_NU, slice_NF);
  else
    m->ops->act_fwd(m->device, c->activation, up_NU, slice_NF);
  gather_columns(m, p->up, 1, slice_NF, act_NF, false);
  gather_columns(m, p->down, 1, project(s, p->down, 1, act_NF), x_NC, true);
  add_bias(m, x_NC, p->down_bias, 1);
}

static void sliced_block(const Sliced *s, int layer, DecodeAttend attend, void *ctx, Tensor x_NC) {
  Model *m = s->m;
  const BlockParams *p = &m->params.block[layer];
  ArenaMark mark = arena_mark(m->arena);
  Tensor h_NC = push_act(m, s->rows.all, m->config.hidden);
  if (m->config.post_norm) {
    sliced_attention(s, layer, attend, ctx, x_NC, x_NC);
    norm_forward(m, p->norm1, x_NC, absent(), h_NC, (NormStats){0});
    Tensor in_NC = push_act(m, s->rows.all, m->config.hidden);
    device_copy(m->device, in_NC.data, h_NC.data, tensor_bytes(h_NC));
    sliced_mlp(s, layer, in_NC, h_NC);
    norm_forward(m, p->norm2, h_NC, absent(), x_NC, (NormStats){0});
  } else {
    norm_forward(m, p->norm1, x_NC, absent(), h_NC, (NormStats){0});
    sliced_attention(s, layer, attend, ctx, h_NC, x_NC);
    norm_forward(m, p->norm2, x_NC, absent(), h_NC, (NormStats){0});
    sliced_mlp(s, layer, h_NC, x_NC);
  }
  arena_pop(m->arena, mark);
}

size_t sliced_block_bytes(const Model *m, int rows) {
  const ModelConfig *c = &m->config;
  enum { JOINED = 3 }; /* a rank may have one column more of each matrix */
  int64_t ranks = m->grid->local, widest = c->hidden, vocab = c->vocab_size / ranks + 1;
  const int64_t widths[] = {qkv_width(c), attn_width(c), c->ffn, embed_width(c)};
  for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
    if (widths[i] > widest) widest = widths[i];
  size_t acts = (size_t)(rows * (widest + JOINED * ranks)) * dtype_size(m->compute);
  size_t logits = (size_t)(rows * vocab) * sizeof(float);
  return acts > logits ? acts : logits;
}

/* ---- all of it ---- */

/* This rank's rows of the head; of a tied one, of the embedding, which is whole. */
static Linear head_slice(const Model *m) {
  const HeadParams *p = &m->params.head;
  if (p->weight != m->params.embedding) return zeropp_linear(m->zero, p->weight, 1);
  int64_t first, count;
  zeropp_slice_rows(m->zero, p->weight, m->grid->local_rank, &first, &count);
  return (Linear){.w_OK = rows_of(zeropp_weight(m->zero, p->weight), first, count)};
}

/* The residual of the rows whose logits are wanted, of the whole node. */
static Tensor wanted_rows(const Sliced *s, NodeRows heads, Tensor wanted_R, Tensor x_NC) {
  Model *m = s->m;
  if (m->heads_all) return x_NC;
  Tensor own_RC = push_act(m, heads.own, x_NC.dim[1]);
  Tensor all_RC = push_act(m, heads.all, x_NC.dim[1]);
  m->ops->gather_rows(m->device, rows_of(x_NC, s->rows.first, s->rows.own), wanted_R, own_RC);
  gather_rows_of_node(m, heads, own_RC, all_RC);
  return all_RC;
}

static void sliced_head(const Sliced *s, Tensor wanted_R, Tensor x_NC, Tensor logits_RV) {
  Model *m = s->m;
  const HeadParams *p = &m->params.head;
  NodeRows heads = node_rows(m, m->tokens_of + m->grid->local);
  Tensor h_RE = wanted_rows(s, heads, wanted_R, x_NC);
  require(logits_RV.dim[0] == heads.own && h_RE.dim[0] == heads.all);
  if (p->norm.weight >= 0) {
    Tensor norm_RC = push_act(m, heads.all, m->config.hidden);
    norm_forward(m, p->norm, h_RE, absent(), norm_RC, (NormStats){0});
    h_RE = norm_RC;
  }
  if (p->project_out >= 0) {
    Tensor out_RE = push_act(m, heads.all, embed_width(&m->config));
    gather_columns(m, p->project_out, 1, project(s, p->project_out, 1, h_RE), out_RE, false);
    h_RE = out_RE;
  }
  Linear head = head_slice(m);
  Tensor slice_RV = push_f32(m, heads.all, head.w_OK.dim[0]);
  multiply(s, head, h_RE, slice_RV);
  columns_to_rows(m, heads, p->weight, 1, slice_RV, logits_RV);
}

void sliced_step(Model *m, const SlicedStep *step) {
  Sliced s = {m, node_rows(m, m->tokens_of), step->open};
  ArenaMark mark = arena_mark(m->arena);
  Tensor own_BC = push_act(m, s.rows.own, m->config.hidden);
  Tensor x_NC = push_act(m, s.rows.all, m->config.hidden);
  require(step->token_B.dim[0] == s.rows.own);
  embed_tokens(m, step->token_B, step->place_B, own_BC);
  gather_rows_of_node(m, s.rows, own_BC, x_NC);
  for (int l = 0; l < m->config.n_layers; l++) {
    if (s.open) zeropp_gather(m->zero, unit_of_block(l));
    sliced_block(&s, l, step->attend, step->ctx, x_NC);
    if (s.open) zeropp_release(m->zero, unit_of_block(l));
  }
  if (s.open && head_has_unit(m)) zeropp_gather(m->zero, unit_of_head(m));
  sliced_head(&s, step->wanted_R, x_NC, step->logits_RV);
  if (s.open && head_has_unit(m)) zeropp_release(m->zero, unit_of_head(m));
  arena_pop(m->arena, mark);
}
