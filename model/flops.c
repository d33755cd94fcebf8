/* Arithmetic and memory of a pass, from the real config and real lengths. */
#include "model/internal.h"

double block_matrix_flops(const ModelConfig *c) {
  double mlp = (double)(up_width(c) + c->ffn);
  double weights = (double)c->hidden * ((double)(qkv_width(c) + attn_width(c)) + mlp);
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

/* Between the width of the embedding and that of the blocks, in each direction. */
static double projection_flops(const ModelConfig *c) {
  return embed_width(c) == c->hidden ? 0 : 2.0 * (double)embed_width(c) * c->hidden;
}

double embed_flops(const ModelConfig *c, double tokens) { return tokens * projection_flops(c); }

double head_flops(const ModelConfig *c, HeadKind head, int64_t n_rows) {
  double outputs = head == HEAD_LM ? c->vocab_size : 1;
  return (2.0 * (double)embed_width(c) * outputs + projection_flops(c)) * (double)n_rows;
}

double model_forward_flops(const ModelConfig *c, HeadKind head, int n_seqs, const int32_t *lengths,
                           int64_t n_rows) {
  double tokens = 0, keys = 0;
  for (int s = 0; s < n_seqs; s++) {
    tokens += lengths[s];
    keys += keys_seen(lengths[s], c->window);
  }
  double block = tokens * block_matrix_flops(c) + attention_flops(c, keys);
  return embed_flops(c, tokens) + c->n_layers * block + head_flops(c, head, n_rows);
}

/* ---- memory: what forward.c, backward.c and head.c push, at the moment when most is alive ---- */

typedef struct Widths { /* floats per token */
  double block, block_stats, mlp_scratch, attn_scratch;
  double embed, final, final_stats; /* beside the residual */
  double embed_scratch, final_scratch;
} Widths;

static Widths widths(const ModelConfig *c) {
  double hidden = c->hidden, q = (double)qkv_width(c), att = (double)attn_width(c);
  double up = (double)up_width(c), ffn = c->ffn, stats = c->norm == NORM_LAYER ? 2 : 1;
  double width = (double)embed_width(c);
  bool projects = embed_width(c) != c->hidden, norm = has_final_norm(c);
  Widths w = {.block = 3 * hidden + q + att + up + ffn, /* norms, qkv, att, mid, up, act */
              .block_stats = 2 * stats + (double)c->n_heads,
              .mlp_scratch = up + ffn,
              .attn_scratch = att + q,
              .embed = projects ? width : 0,
              .final = (norm ? hidden : 0) + (projects ? width : 0),
              .final_stats = norm ? stats : 0,
              .embed_scratch = projects ? width : 0,
              .final_scratch = projects && norm ? hidden : 0};
  if (c->qk_norm) {
    w.block += q;
    w.block_stats += (double)(c->n_heads + c->n_kv_heads);
  }
  return w;
}

static double head_floats(const ModelConfig *c, HeadKind head, double n_rows, bool train) {
  double width = (double)embed_width(c);
  double per_row = width + 1.0 + (train ? width + 1.0 : 0); /* h, value; dh, dvalue */
  if (head == HEAD_SCALAR) return n_rows * (per_row + 1);
  double chunk = (double)head_chunk_rows(c);
  if (chunk > n_rows) chunk = n_rows;
  return chunk * (per_row + c->vocab_size + 6);
}

static double most(double a, double b) { return a > b ? a : b; }

uint64_t model_activation_bytes(const ModelConfig *c, HeadKind head, int64_t n_tokens, bool train,
                                bool recompute) {
  Widths w = widths(c);
  double n = (double)n_tokens, hidden = c->hidden, layers = c->n_layers;
  double before = n * (hidden + w.embed + 2), after, backward = 0; /* x and the ids; the final's */
  double learned = c->rope == ROPE_NONE ? n * hidden : 0;          /* rows of the positions */
  double blocks = n * w.block;
  if (!train) {
    after = n * w.final;
  } else {
    double full_blocks = recompute ? 1 : layers;
    blocks = n * (layers * hidden + full_blocks * (w.block + w.block_stats));
    after = n * (w.final + w.final_stats + (double)embed_width(c)); /* and the head's gradient */
    double scratch = hidden + most(w.mlp_scratch, w.attn_scratch);  /* of a block, in backward */
    backward = n * (hidden + most(most(scratch, w.embed_scratch), w.final_scratch));
  }
  double at_head = head_floats(c, head, n, train);
  double floats = before + most(learned, blocks + after + most(at_head, backward));
  enum { TENSORS_PER_BLOCK = 20, ALIGNMENT = 64 };
  return (uint64_t)(floats * sizeof(float)) +
         (uint64_t)(c->n_layers + 2) * TENSORS_PER_BLOCK * ALIGNMENT;
}
