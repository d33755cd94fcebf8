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

double model_attention_flops(const ModelConfig *c, int n_seqs, const int32_t *lengths) {
  double keys = 0;
  for (int s = 0; s < n_seqs; s++) keys += keys_seen(lengths[s], c->window);
  return c->n_layers * attention_flops(c, keys);
}

double model_forward_flops(const ModelConfig *c, HeadKind head, int n_seqs, const int32_t *lengths,
                           int64_t n_rows) {
  double tokens = 0;
  for (int s = 0; s < n_seqs; s++) tokens += lengths[s];
  return embed_flops(c, tokens) + c->n_layers * tokens * block_matrix_flops(c) +
         model_attention_flops(c, n_seqs, lengths) + head_flops(c, head, n_rows);
}

/* ---- memory: what forward.c, backward.c and head.c push, at the moment when most is alive ---- */

typedef struct Widths {             /* elements per token */
  double cheap, products, stats;    /* of a block, beside its residuals */
  double second_norm;               /* where all is kept */
  double mlp_scratch, attn_scratch; /* of a block's backward */
  double embed, final, final_stats; /* beside the residual */
  double embed_scratch, final_scratch;
} Widths;

static Widths widths(const ModelConfig *c) {
  double hidden = c->hidden, q = (double)qkv_width(c), att = (double)attn_width(c);
  double up = (double)up_width(c), ffn = c->ffn, stats = c->norm == NORM_LAYER ? 2 : 1;
  double width = (double)embed_width(c);
  bool projects = embed_width(c) != c->hidden, norm = has_final_norm(c);
  Widths w = {.cheap = hidden + ffn,
              .second_norm = c->post_norm ? 0 : hidden,
              .products = (c->post_norm ? hidden : 0) + q + att + up,
              .stats = 2 * stats + (double)c->n_heads,
              .mlp_scratch = ffn + (c->mlp == MLP_SWIGLU ? 0 : up),
              .attn_scratch = att + q,
              .embed = projects ? width : 0,
              .final = (norm ? hidden : 0) + (projects ? width : 0),
              .final_stats = norm ? stats : 0,
              .embed_scratch = projects ? width : 0,
              .final_scratch = projects && norm ? hidden : 0};
  if (c->qk_norm) {
    w.cheap += q;
    w.stats += (double)(c->n_heads + c->n_kv_heads);
  }
  return w;
}

/* Elements of the compute type take `act` bytes, the others four. */
static double head_bytes(const ModelConfig *c, HeadKind head, double n_rows, const PassPlan *p,
                         double act) {
  const double f32 = sizeof(float);
  double width = (double)embed_width(c);
  double h = act * width * (p->train ? 2 : 1); /* and its gradient */
  if (head == HEAD_SCALAR)
    return n_rows * (h + f32 * 2 + (p->train ? act : 0)); /* row, value, its gradient */
  int whole = p->train ? recomputed_blocks(c, p->recompute, p->recompute_blocks) : 0;
  double chunk = (double)head_chunk_rows(c, p->device, whole), logits = f32 * c->vocab_size;
  if (chunk > n_rows) chunk = n_rows;
  if (p->train && p->compute != DT_F32) logits += act * c->vocab_size;
  int64_t kept = c->vocab_size / 8 + 1; /* bytes of a row's bits */
  if (p->restricted) logits += (double)kept;
  return chunk * (h + logits + f32 * (p->train ? 7 : 5));
}

static double most(double a, double b) { return a > b ? a : b; }

int recomputed_blocks(const ModelConfig *c, Recompute r, int blocks) {
  int n = c->n_layers;
  if (r == RECOMPUTE_NONE) return 0;
  if (r == RECOMPUTE_FULL) return n > 1 ? n - 1 : n;
  return blocks > n ? n : blocks;
}

/* Blocks whose buffers are alive together. */
static double block_bytes(const ModelConfig *c, const Widths *w, const PassPlan *p, double act) {
  double layers = c->n_layers, f32 = sizeof(float);
  if (!p->train) return act * (c->hidden + w->cheap + w->products);
  double whole = recomputed_blocks(c, p->recompute, p->recompute_blocks);
  double cheap = p->recompute == RECOMPUTE_NONE ? layers * (w->cheap + w->second_norm) : w->cheap;
  double products = layers - whole + (whole > 0 ? 1 : 0);
  return act * (2 * layers * c->hidden + cheap + products * w->products) +
         f32 * products * w->stats;
}

uint64_t model_activation_bytes(const ModelConfig *c, HeadKind head, int64_t n_tokens, PassPlan p) {
  Widths w = widths(c);
  const double f32 = sizeof(float);
  double n = (double)n_tokens, hidden = c->hidden, act = (double)dtype_size(p.compute);
  double before = n * (act * (hidden + w.embed) + 3 * f32);     /* x; ids, places and offsets */
  double learned = c->rope == ROPE_NONE ? n * act * hidden : 0; /* rows of the positions */
  double blocks = n * block_bytes(c, &w, &p, act), after = n * act * w.final, backward = 0;
  if (p.train) {
    after += n * (f32 * w.final_stats + act * (double)embed_width(c)); /* and the head's gradient */
    double scratch = hidden + most(w.mlp_scratch, w.attn_scratch);
    backward = n * act * (hidden + most(most(scratch, w.embed_scratch), w.final_scratch));
  }
  double at_head = head_bytes(c, head, n, &p, act);
  double bytes = before + most(learned, blocks + after + most(at_head, backward));
  enum { TENSORS_PER_BLOCK = 20, ALIGNMENT = 64 };
  return (uint64_t)bytes + (uint64_t)(c->n_layers + 2) * TENSORS_PER_BLOCK * ALIGNMENT;
}
