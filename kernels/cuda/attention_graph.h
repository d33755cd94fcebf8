/* Attention as graphs of cuDNN, in the form that its fused engines recognise: products, pointwise
 * operations and reductions around scores that never reach memory. Nothing here runs. */
#ifndef KERNELS_CUDA_ATTENTION_GRAPH_H
#define KERNELS_CUDA_ATTENTION_GRAPH_H

#include "kernels/cuda/cudnn_graph.h"

/* Everything that makes one graph different from another. */
typedef struct AttnGraphKey {
  int n_heads, n_kv_heads, head_dim, window;
  int n_seqs, len; /* packed: upper bounds; else every sequence has this length */
  bool packed;     /* lengths and places of sequences are read from device memory */
  bool backward;
} AttnGraphKey;

/* What the caller gives. Rows are those of the fused q, k, v; ATTN_STATS is the log-sum-exp. */
enum AttnUid {
  ATTN_Q = 1,
  ATTN_K,
  ATTN_V,
  ATTN_OUT,
  ATTN_STATS,  /* packed: rows of [N, H]; else forward [N, H], backward [B, H, len] */
  ATTN_LEN_Q,  /* I32 [n_seqs]; packed only, as the next four */
  ATTN_LEN_KV, /* the same again */
  ATTN_AT_QKV, /* I64 [n_seqs + 1]: first element of each sequence in q, k and v */
  ATTN_AT_OUT, /* in out */
  ATTN_AT_STATS,
  ATTN_DOUT, /* backward only, as the rest */
  ATTN_DQ,
  ATTN_DK,
  ATTN_DV,
  ATTN_DELTA, /* scratch: F32 [B, H, len] */
  ATTN_UIDS
};

/* Builds the graph and its plan, which is NULL where error says why. scalar[0] is the scale of
 * scores, to be set before a run. */
CudnnGraph *attention_graph(const Cudnn *dnn, cudnnHandle_t handle, AttnGraphKey key);

#endif
