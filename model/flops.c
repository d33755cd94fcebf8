/* Arithmetic and memory of a pass, from the real config and real lengths. */
#include "model/internal.h"

double block_matrix_flops(const ModelConfig *c) {
  double weights =
      (double)c->hidden * (double)(qkv_width(c) + attn_width(c)) + 3.0 * (double)c->hidden * c->ffn;
  return 2 * weights;
}

/* Keys that the tokens of one sequence see, summed: causal, at most `window` each. */
static double keys_seen(double len, int window) {
  if (!window || len <= window) return len * (len + 1) / 2;
  return (double)window * (window + 1) / 2 + (len - window) * window;
}

double attention_flops(const ModelConfig *c, double keys) {
  return 4 * keys * (double)attn_width(c); /* q.k and p.v, 2 per multiply-add */
}

double head_flops(const ModelConfig *c, HeadKind head, int64_t n_rows) {
  return 2.0 * c->hidden * (head == HEAD_LM ? c->vocab_size : 1) * (double)n_rows;
}

double model_forward_flops(const ModelConfig *c, HeadKind head, int n_seqs, const int32_t *lengths,
                           int64_t n_rows) {
  double tokens = 0, keys = 0;
  for (int s = 0; s < n_seqs; s++) {
    tokens += lengths[s];
    keys += keys_seen(lengths[s], c->window);
  }
  double block = tokens * block_matrix_flops(c) + attention_flops(c, keys);
  return c->n_layers * block + head_flops(c, head, n_rows);
}

/* ---- memory: what forward.c, backward.c and head.c push, at the moment when most is alive ---- */

typedef struct Widths { /* floats per token */
  double block, block_stats, mlp_scratch, attn_scratch;
} Widths;

static Widths widths(const ModelConfig *c) {
  double hidden = c->hidden, q = (double)qkv_width(c), att = (double)attn_width(c);
  double ffn = c->ffn;
  return (Widths){
      .block = 3 * hidden + q + att + 3 * ffn, /* norm1, qkv, att, mid, norm2, gu, act */
      .block_stats = 2 + (double)c->n_heads,
      .mlp_scratch = 3 * ffn,
      .attn_scratch = att + q};
}

static double head_floats(const ModelConfig *c, HeadKind head, double n_rows, bool train) {
  double per_row = c->hidden + 1.0 + (train ? c->hidden + 1.0 : 0); /* h, value; dh, dvalue */
  if (head == HEAD_SCALAR) return n_rows * (per_row + 1);
  double chunk = (double)head_chunk_rows(c);
  if (chunk > n_rows) chunk = n_rows;
  return chunk * (per_row + c->vocab_size + 6);
}

uint64_t model_activation_bytes(const ModelConfig *c, HeadKind head, int64_t n_tokens, bool train,
                                bool recompute) {
  Widths w = widths(c);
  double n = (double)n_tokens, hidden = c->hidden, layers = c->n_layers;
  double ids = 2 * n, trunk, backward = 0;
  double scratch = w.mlp_scratch > w.attn_scratch ? w.mlp_scratch : w.attn_scratch;
  if (!train) {
    trunk = n * (hidden + w.block + hidden); /* x, one block, the final norm */
  } else {
    double full_blocks = recompute ? 1 : layers;
    double kept = layers * hidden + full_blocks * (w.block + w.block_stats);
    trunk = n * (hidden + kept + 2 * hidden + 1); /* x, blocks, final norm and its gradient */
    backward = n * (hidden + hidden + scratch);   /* dx, dnorm, a block's scratch */
  }
  double at_head = head_floats(c, head, n, train);
  double most = ids + trunk + (at_head > backward ? at_head : backward);
  enum { TENSORS_PER_BLOCK = 16, ALIGNMENT = 64 };
  return (uint64_t)(most * sizeof(float)) +
         (uint64_t)(c->n_layers + 2) * TENSORS_PER_BLOCK * ALIGNMENT;
}
