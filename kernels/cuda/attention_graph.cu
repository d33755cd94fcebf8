/* Attention as graphs of cuDNN. */
#include "kernels/cuda/attention_graph.h"

#include <math.h>

/* What both directions are made from. Tensors are [sequences, heads, tokens, size]. */
typedef struct AttnTensors {
  CudnnGraph *g;
  AttnGraphKey key;
  GraphTensor len_q, len_kv, at_qkv, at_out, at_stats; /* absent where sequences are not packed */
  GraphTensor scale, minus_infinity;
} AttnTensors;

static const cudnnDataType_t F32 = CUDNN_DATA_FLOAT, BF16 = CUDNN_DATA_BFLOAT16,
                             BOOL = CUDNN_DATA_BOOLEAN, I32 = CUDNN_DATA_INT32;

static AttnTensors attn_start(CudnnGraph *g, AttnGraphKey key) {
  AttnTensors t = {g, key, {}, {}, {}, {}, {}, graph_scalar(g, 1), graph_scalar(g, -INFINITY)};
  if (!key.packed) return t;
  GraphShape one = graph_packed(key.n_seqs, 1, 1, 1), ends = graph_packed(key.n_seqs + 1, 1, 1, 1);
  t.len_q = graph_tensor(g, ATTN_LEN_Q, I32, one, {});
  t.len_kv = graph_tensor(g, ATTN_LEN_KV, I32, one, {});
  t.at_qkv = graph_tensor(g, ATTN_AT_QKV, CUDNN_DATA_INT64, ends, {});
  t.at_out = graph_tensor(g, ATTN_AT_OUT, CUDNN_DATA_INT64, ends, {});
  t.at_stats = graph_tensor(g, ATTN_AT_STATS, CUDNN_DATA_INT64, ends, {});
  return t;
}

/* Heads of `size` within rows of `row` elements. */
static GraphShape heads_in_rows(const AttnTensors *t, int64_t heads, int64_t size, int64_t row) {
  int64_t len = t->key.len;
  return {{t->key.n_seqs, heads, len, size}, {len * row, size, row, 1}};
}
static int64_t qkv_row(const AttnTensors *t) {
  return static_cast<int64_t>(t->key.n_heads + 2 * t->key.n_kv_heads) * t->key.head_dim;
}
static GraphShape q_shape(const AttnTensors *t) {
  return heads_in_rows(t, t->key.n_heads, t->key.head_dim, qkv_row(t));
}
static GraphShape kv_shape(const AttnTensors *t) {
  return heads_in_rows(t, t->key.n_kv_heads, t->key.head_dim, qkv_row(t));
}
static GraphShape out_shape(const AttnTensors *t) {
  int64_t D = t->key.head_dim;
  return heads_in_rows(t, t->key.n_heads, D, t->key.n_heads * D);
}
static GraphShape row_shape(const AttnTensors *t) { /* a number per query, packed by head */
  return graph_packed(t->key.n_seqs, t->key.n_heads, t->key.len, 1);
}

static GraphTensor stats_tensor(const AttnTensors *t) {
  bool by_token = t->key.packed || !t->key.backward;
  GraphShape s = by_token ? heads_in_rows(t, t->key.n_heads, 1, t->key.n_heads) : row_shape(t);
  return graph_tensor(t->g, ATTN_STATS, F32, s, t->at_stats);
}

static GraphTensor scores(const AttnTensors *t, GraphTensor q, GraphTensor kt) {
  GraphShape s = graph_packed(t->key.n_seqs, t->key.n_heads, t->key.len, t->key.len);
  GraphTensor x = graph_virtual(t->g, F32, s);
  graph_matmul_to(t->g, q, kt, x, {t->len_q, t->len_kv, {}});
  return x;
}

static GraphTensor keep_where(const AttnTensors *t, GraphTensor x, GraphTensor mask) {
  return graph_pointwise(t->g, CUDNN_POINTWISE_BINARY_SELECT, F32, x, t->minus_infinity, mask);
}

/* Minus infinity beyond each sequence's end. */
static GraphTensor mask_padding(const AttnTensors *t, GraphTensor x) {
  if (!t->key.packed) return x;
  CudnnGraph *g = t->g;
  GraphTensor row = graph_index(g, x, 2), column = graph_index(g, x, 3);
  GraphTensor row_in = graph_pointwise(g, CUDNN_POINTWISE_CMP_LT, BOOL, row, t->len_q);
  GraphTensor column_in = graph_pointwise(g, CUDNN_POINTWISE_CMP_LT, BOOL, column, t->len_kv);
  return keep_where(t, x, graph_pointwise(g, CUDNN_POINTWISE_LOGICAL_AND, BOOL, row_in, column_in));
}

/* Token t sees (t - window, t]. */
static GraphTensor mask_causal(const AttnTensors *t, GraphTensor x) {
  CudnnGraph *g = t->g;
  GraphTensor row = graph_index(g, x, 2), column = graph_index(g, x, 3);
  x = keep_where(t, x, graph_pointwise(g, CUDNN_POINTWISE_CMP_GE, BOOL, row, column));
  if (t->key.window == 0) return x;
  row = graph_index(g, x, 2);
  GraphTensor window = graph_scalar(g, static_cast<float>(t->key.window));
  GraphTensor reach = graph_pointwise(g, CUDNN_POINTWISE_ADD, F32, graph_index(g, x, 3), window);
  return keep_where(t, x, graph_pointwise(g, CUDNN_POINTWISE_CMP_GT, BOOL, reach, row));
}

/* p = softmax(x), and its log-sum-exp to stats. */
static GraphTensor softmax(const AttnTensors *t, GraphTensor x, GraphTensor stats) {
  CudnnGraph *g = t->g;
  GraphTensor max = graph_virtual(g, F32, row_shape(t)), sum = graph_virtual(g, F32, row_shape(t));
  graph_reduce_to(g, CUDNN_REDUCE_TENSOR_MAX, x, max);
  GraphTensor e = graph_pointwise(g, CUDNN_POINTWISE_EXP, F32,
                                  graph_pointwise(g, CUDNN_POINTWISE_SUB, F32, x, max));
  graph_reduce_to(g, CUDNN_REDUCE_TENSOR_ADD, e, sum);
  GraphTensor log_sum = graph_pointwise(g, CUDNN_POINTWISE_LOG, F32, sum);
  graph_pointwise_to(g, CUDNN_POINTWISE_ADD, max, log_sum, stats);
  GraphTensor p = graph_virtual(g, BF16, x.shape);
  graph_pointwise_to(g, CUDNN_POINTWISE_DIV, e, sum, p);
  return p;
}

static void build_forward(const AttnTensors *t) {
  CudnnGraph *g = t->g;
  GraphTensor q = graph_tensor(g, ATTN_Q, BF16, q_shape(t), t->at_qkv);
  GraphTensor kt = graph_tensor(g, ATTN_K, BF16, graph_transposed(kv_shape(t)), t->at_qkv);
  GraphTensor v = graph_tensor(g, ATTN_V, BF16, kv_shape(t), t->at_qkv);
  GraphTensor out = graph_tensor(g, ATTN_OUT, BF16, out_shape(t), t->at_out);
  GraphTensor x = graph_pointwise(g, CUDNN_POINTWISE_MUL, F32, scores(t, q, kt), t->scale);
  x = mask_causal(t, mask_padding(t, x));
  graph_matmul_to(g, softmax(t, x, stats_tensor(t)), v, out, {t->len_q, {}, t->len_kv});
}

/* The transpose of scores, rounded for a product. */
static GraphTensor transposed(const AttnTensors *t, GraphTensor x) {
  GraphTensor y = graph_virtual(t->g, BF16, graph_transposed(x.shape));
  graph_reshape_to(t->g, x, y);
  return y;
}

/* out = wt b, where all query heads of a group add to the same kv head. */
static void kv_gradient(const AttnTensors *t, GraphTensor wt, GraphTensor b, AttnUid uid) {
  CudnnGraph *g = t->g;
  GraphTensor out = graph_tensor(g, uid, BF16, kv_shape(t), t->at_qkv);
  GraphLengths len = {t->len_kv, {}, t->len_q};
  if (t->key.n_heads == t->key.n_kv_heads) {
    graph_matmul_to(g, wt, b, out, len);
    return;
  }
  GraphShape every = graph_packed(t->key.n_seqs, t->key.n_heads, t->key.len, t->key.head_dim);
  GraphTensor by_head = graph_virtual(g, BF16, every);
  graph_matmul_to(g, wt, b, by_head, len);
  graph_reduce_to(g, CUDNN_REDUCE_TENSOR_ADD, by_head, out);
}

/* delta = sum of dout * out over a head. */
static GraphTensor build_delta(const AttnTensors *t, GraphTensor dout, GraphTensor out) {
  CudnnGraph *g = t->g;
  GraphTensor product = graph_virtual(
      g, F32, graph_packed(t->key.n_seqs, t->key.n_heads, t->key.len, t->key.head_dim));
  graph_pointwise_to(g, CUDNN_POINTWISE_MUL, dout, out, product);
  GraphTensor sum = graph_virtual(g, F32, row_shape(t));
  graph_reduce_to(g, CUDNN_REDUCE_TENSOR_ADD, product, sum);
  GraphTensor delta = graph_tensor(g, ATTN_DELTA, F32, row_shape(t), {});
  graph_pointwise_to(g, CUDNN_POINTWISE_MUL, sum, graph_scalar(g, 1), delta);
  return delta;
}

/* With p = exp(scale q.k - stats): dv = p^T dout; ds = p (dout.v - delta) scale; dk = ds^T q; dq =
 * ds k. dq is a product of its own behind the others, over ds in memory: the same bits each time,
 * where adding from each tile of keys at once would take them in any order. */
static void build_backward(const AttnTensors *t) {
  CudnnGraph *g = t->g;
  GraphTensor q = graph_tensor(g, ATTN_Q, BF16, q_shape(t), t->at_qkv);
  GraphTensor kt = graph_tensor(g, ATTN_K, BF16, graph_transposed(kv_shape(t)), t->at_qkv);
  GraphTensor vt = graph_tensor(g, ATTN_V, BF16, graph_transposed(kv_shape(t)), t->at_qkv);
  GraphTensor out = graph_tensor(g, ATTN_OUT, BF16, out_shape(t), t->at_out);
  GraphTensor dout = graph_tensor(g, ATTN_DOUT, BF16, out_shape(t), t->at_out);
  GraphTensor dq = graph_tensor(g, ATTN_DQ, BF16, q_shape(t), t->at_qkv);
  GraphTensor delta = build_delta(t, dout, out);
  GraphTensor x = graph_pointwise(g, CUDNN_POINTWISE_MUL, F32, scores(t, q, kt), t->scale);
  x = graph_pointwise(g, CUDNN_POINTWISE_SUB, F32, x, stats_tensor(t));
  x = mask_causal(t, mask_padding(t, x));
  GraphTensor p = graph_pointwise(g, CUDNN_POINTWISE_EXP, F32, x);
  kv_gradient(t, transposed(t, p), dout, ATTN_DV);
  GraphTensor ds = graph_pointwise(g, CUDNN_POINTWISE_SUB, F32, scores(t, dout, vt), delta);
  ds = graph_pointwise(g, CUDNN_POINTWISE_MUL, F32, ds, p);
  ds = graph_pointwise(g, CUDNN_POINTWISE_MUL, F32, ds, t->scale);
  kv_gradient(t, transposed(t, ds), q, ATTN_DK);
  GraphTensor k = graph_virtual(g, BF16, kv_shape(t));
  graph_reshape_to(g, kt, k);
  graph_matmul_to(g, ds, k, dq, {t->len_q, {}, t->len_kv});
}

/* For heads of 64 cuDNN 9.14 puts kernel 32 first, which pays from 2048 tokens on: at 512 kernel 7
 * takes 16 %, at 128 40 % less time. */
static int64_t liked_kernel(AttnGraphKey key) {
  return !key.backward && key.len < 2048 ? 7 : ANY_KERNEL;
}

CudnnGraph *attention_graph(const Cudnn *dnn, cudnnHandle_t handle, AttnGraphKey key) {
  CudnnGraph *g = graph_create(dnn, ATTN_UIDS);
  AttnTensors t = attn_start(g, key);
  if (key.backward)
    build_backward(&t);
  else
    build_forward(&t);
  graph_build(g, handle, liked_kernel(key));
  return g;
}
