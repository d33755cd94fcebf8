/* What the files of model/ share. Nobody else includes it.
 *
 * Activations come from the arena and are popped before a public call returns. A rank whose batch
 * is empty runs the same code on zero rows, so that its gathers and reductions match the others'.
 */
#ifndef MODEL_INTERNAL_H
#define MODEL_INTERNAL_H

#include "model/family.h"
#include "model/model.h"

/* ---- parameters by place in the table (specs.c); -1: the model has none ---- */
typedef struct NormParams {
  int weight, bias;
} NormParams;
typedef struct BlockParams {
  NormParams norm1, norm2;
  int qkv, qkv_bias, q_norm, k_norm, o, o_bias, up, up_bias, down, down_bias;
} BlockParams; /* qkv: q, joined with k and v; up: gate, joined with up, or up alone */
typedef struct HeadParams {
  NormParams norm;
  int project_out, weight, bias; /* weight: lm_head, the tied embedding, or score */
} HeadParams;
typedef struct ModelParams {
  int embedding, positions, project_in;
  BlockParams *block; /* [n_layers] */
  HeadParams head;
} ModelParams;
/* The table and the places of its rows; both are malloc'ed. */
int params_list(const ModelConfig *c, HeadKind head, ParamSpec **specs, ModelParams *places);
/* "model.layers.3." */
void block_prefix(const FamilyNames *names, int layer, char out[48]);

/* Elements [start, start + count) of a parameter as runs of its tensor (places.c). Calls run(ctx,
 * at, n, x) for each: n elements of the tensor from `at` on are the floats of x; reading fills x,
 * writing finds it filled. Stops at the first run that does not return 0, and returns that. */
typedef int (*TensorRun)(void *ctx, int64_t at, int64_t n, float *x);
int place_read(const TensorPlace *p, const ParamSpec *s, int64_t start, int64_t count, float *w,
               TensorRun run, void *ctx);
int place_write(const TensorPlace *p, const ParamSpec *s, int64_t start, int64_t count,
                const float *w, TensorRun run, void *ctx);

/* cos and sin: rows of positions 0 .. for each set of frequencies in use (rope.c). One set serves
 * all lengths, but for dynamic and longrope. */
typedef struct RopeSet {
  int key;              /* what the frequencies depend on beside the config */
  int first, positions; /* rows of the table */
} RopeSet;
typedef struct RopeTable {
  int n;
  RopeSet *set; /* [n], malloc'ed */
  Tensor cos_Pr, sin_Pr;
} RopeTable;

struct Model {
  ModelConfig config;
  HeadKind head;
  bool trainable;
  Recompute recompute;
  int whole_blocks; /* the first so many keep their residuals only */
  DType compute;    /* of weights and activations */
  Device *device;
  const Ops *ops;
  Grid *grid;
  Arena *arena;
  ZeroPP *zero;
  ModelParams params;
  RopeTable rope;
  const uint8_t *restrict_RW; /* the caller's; NULL: the whole vocabulary counts */
  int rope_fixed; /* every sequence is rotated as if it were this long; 0: by its own length */
  double flops;
  int *tokens_of; /* of model_step_rows, [local], and behind it the rows with a head; or NULL */
  bool heads_all; /* every token has a head */
  json_t *source_config, *source_generation; /* the loaded folder's files, or NULL */
};

static inline int unit_of_block(int layer) { return 1 + layer; }
static inline int unit_of_head(const Model *m) { return 1 + m->config.n_layers; }
/* A tied head without norm and projection has no parameters, and the engine no unit of its own. */
static inline bool head_has_unit(const Model *m) {
  const HeadParams *p = &m->params.head;
  return p->norm.weight >= 0 || p->project_out >= 0 || p->weight != m->params.embedding;
}
static inline bool head_is_tied(const Model *m) {
  return m->head == HEAD_LM && m->config.tied_head;
}
static inline int64_t embed_width(const ModelConfig *c) {
  return c->embed_dim ? c->embed_dim : c->hidden;
}
static inline bool has_final_norm(const ModelConfig *c) {
  return !c->post_norm && !c->no_final_norm;
}
static inline int rotary_width(const ModelConfig *c) {
  return c->rotary_dim ? c->rotary_dim : c->head_dim;
}
/* Width of what the activation reads: gate and up side by side, or up. */
static inline int64_t up_width(const ModelConfig *c) {
  return (int64_t)c->ffn * (c->mlp == MLP_SWIGLU ? 2 : 1);
}
static inline int up_joined(const ModelConfig *c) { return c->mlp == MLP_SWIGLU ? 2 : 1; }
static inline int64_t attn_width(const ModelConfig *c) { return (int64_t)c->n_heads * c->head_dim; }
static inline int64_t qkv_width(const ModelConfig *c) {
  return (int64_t)(c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
}

/* ---- gathers ahead of their use (ahead.c) ---- */
void gather_upwards(Model *m, int unit); /* gathers it, and starts those that forward needs next */
void gather_downwards(Model *m, int unit); /* the same for backward */
void prefetch_last_blocks(Model *m);       /* those that backward begins with */

/* ---- arena tensors ---- */
Tensor push_act(Model *m, int64_t rows, int64_t cols); /* of the compute type */
Tensor push_f32(Model *m, int64_t rows, int64_t cols);
Tensor push_f32_1d(Model *m, int64_t n);
Tensor push_i32(Model *m, int64_t n, const int32_t *host); /* uploaded */
static inline Tensor absent(void) { return (Tensor){0}; }
static inline Tensor rows_of(Tensor x, int64_t first, int64_t n) { /* rows of a matrix */
  char *at = (char *)x.data + (size_t)(first * x.dim[1]) * dtype_size(x.dtype);
  return tensor_2d(at, x.dtype, n, x.dim[1]);
}

/* ---- pieces of a block (layers.c) ---- */

/* C += a^T b, for the gradient C of a matrix. */
void grad_gemm(Model *m, Tensor a, Tensor b, int param, int n_joined);

/* y = x W^T + b; n_joined parameters stand for one matrix. bias < 0: none. */
void linear(Model *m, Tensor x, int weight, int bias, int n_joined, Tensor y);
/* dW += dy^T x, db += column sums of dy. */
void linear_backward_weight(Model *m, Tensor dy, Tensor x, int weight, int bias, int n_joined);
/* dx = dy W + beta dx. */
void linear_backward_input(Model *m, Tensor dy, int weight, int n_joined, float beta, Tensor dx);

/* What a norm's backward needs; mean_N is absent for RMSNorm, both where no backward follows. */
typedef struct NormStats {
  Tensor mean_N, rstd_N;
} NormStats;
NormStats norm_stats_push(Model *m, int64_t n);
/* x += delta (may be absent); y = norm(x). y is not x. */
void norm_forward(Model *m, NormParams p, Tensor x_NC, Tensor delta_NC, Tensor y_NC, NormStats s);
/* dx += gradient through the norm. */
void norm_backward(Model *m, NormParams p, Tensor dy_NC, Tensor x_NC, NormStats s, Tensor dx_NC);

/* ---- the trunk (forward.c, backward.c) ---- */

/* A packed batch on the device. place_N: each token's row in the table of learned positions, or in
 * the rotary one. */
typedef struct Packed {
  int n; /* tokens */
  Segments seg;
  Tensor tokens_N, place_N;
} Packed;
Packed packed_upload(Model *m, Batch b); /* dies on an id or a length the model cannot take */

/* One block's activations. The residual stream is never copied: a norm adds the previous residual
 * to the newest sublayer output, in the output's buffer, which so becomes the residual.
 *   pre-norm:  norm1(x) -> qkv .. mid; norm2(mid += x) -> .. out, to which the next norm adds mid
 *   post-norm: x -> qkv .. mid; norm1(mid += x) -> .. out; norm2(out += norm1) is the next x */
typedef struct BlockActs {
  Tensor x_NC;                             /* the residual that enters */
  Tensor norm1_NC, raw_NQ, qkv_NQ, att_NA; /* raw: in front of the q and k norms; else qkv */
  Tensor mid_NC;                           /* the residual after attention */
  Tensor norm2_NC, up_NU, act_NF;
  Tensor out_NC; /* of the MLP. Absent: not computed */
  NormStats stats1, stats2;
  Tensor qk_rstd_NH, lse_NH;
} BlockActs;

typedef enum Keep {
  KEEP_NOTHING,   /* inference: one set of buffers for all blocks */
  KEEP_RESIDUALS, /* full recomputation: what enters each block, and its MLP's side (x, mid) */
  KEEP_PRODUCTS,  /* selective: what matrix products and attention made, and residuals */
  KEEP_ALL
} Keep;
typedef struct TrunkActs {
  Keep keep; /* of the blocks from number `whole` on; those before keep residuals */
  int whole;
  BlockActs *block; /* [n_layers]; malloc'ed; trunk_free */
  Tensor embed_NE;  /* in front of project_in; absent without one */
  Tensor x_NC;      /* what the final norm adds delta to */
  Tensor delta_NC;  /* absent with post_norm */
} TrunkActs;

/* Who computes attention: packed sequences, or the caller of model_step with its KV cache. */
typedef struct AttnCall {
  Segments seg;
  Attend attend; /* NULL: the packed kernel */
  void *ctx;
} AttnCall;

void block_forward(Model *m, int layer, Tensor place_N, AttnCall call, Tensor delta_NC,
                   BlockActs *a);
/* What KEEP_PRODUCTS or KEEP_RESIDUALS left out: first the MLP's side of the block, then
 * attention's. */
void block_redo_mlp(Model *m, int layer, Keep kept, BlockActs *a);
void block_redo_attention(Model *m, int layer, const Packed *p, Keep kept, BlockActs *a);
void trunk_forward(Model *m, const Packed *p, AttnCall call, Keep keep, int whole, TrunkActs *t);
/* Blocks of a model that keep their residuals only. The last of them is left in the buffers that
 * they share, so that backward, which begins at the other end, recomputes one less. */
int recomputed_blocks(const ModelConfig *c, Recompute r, int blocks);
void trunk_free(TrunkActs *t);
/* dx_NC: gradient of the last block's residual output; overwritten. Reduces units 0 .. n_layers. */
void trunk_backward(Model *m, const Packed *p, TrunkActs *t, Tensor dx_NC);

/* Makes the table hold positions 0 .. positions[i] - 1 of sequences of these lengths. Rows that
 * rope_first told before are void. */
void rope_ensure(Model *m, int n, const int32_t *lengths, const int32_t *positions);
/* The row of position 0 of a sequence of this length. */
int rope_first(const Model *m, int length);
void rope_free(Model *m);

/* ---- generation (decode.c, slices.c) ---- */
/* Token embedding, projected to the width of the blocks, plus learned positions. */
void embed_tokens(Model *m, Tensor token_B, Tensor place_B, Tensor x_BC);
/* A step of this rank's tokens in tensor parallel, with those of model_step_rows. open: weights out
 * of codes, unit by unit, for many rows. wanted_R: the rows with a head, where those are not all.
 */
typedef struct SlicedStep {
  Tensor token_B, place_B;
  DecodeAttend attend;
  void *ctx;
  bool open;
  Tensor wanted_R, logits_RV;
} SlicedStep;
void sliced_step(Model *m, const SlicedStep *s);
/* At least the longest block that two ranks exchange in a step of so many rows of each. */
size_t sliced_block_bytes(const Model *m, int rows);

/* ---- the final norm and projection (final.c) ---- */
typedef struct FinalActs {
  Tensor norm_NC; /* x + delta itself where the model has no final norm */
  NormStats stats;
  Tensor h_NE; /* what the head reads; norm itself without project_out */
} FinalActs;
/* The head's unit must be FULL. x becomes x + delta. */
FinalActs final_forward(Model *m, Tensor x_NC, Tensor delta_NC, bool backward_follows);
/* dx_NC = gradient of x + delta, written whole. */
void final_backward(Model *m, const FinalActs *f, Tensor x_NC, Tensor dh_NE, Tensor dx_NC);

/* ---- the heads (head.c) ---- */
/* The head's units: its own, and the embedding where the head is tied to it. */
void head_gather(Model *m);
void head_release(Model *m);
/* The rest needs them FULL. */
int64_t head_chunk_rows(const ModelConfig *c, DeviceKind device, int whole_blocks);
Tensor head_weight(const Model *m);

/* Wanted rows of the packed batch and what they are for. */
typedef struct LmRows {
  int n;
  const int32_t *rows, *targets;
  float temperature;
} LmRows;
void head_logprobs(Model *m, Tensor h_NE, LmRows r, float *logprobs, float *entropy);
/* Adds to dh_NE and to the head's gradients. */
void head_train_lm(Model *m, Tensor h_NE, LmRows r, bool want_entropy, LmLoss loss, void *ctx,
                   Tensor dh_NE);
void head_values(Model *m, Tensor h_NE, int n_rows, const int32_t *rows, float *values);
void head_train_values(Model *m, Tensor h_NE, int n_rows, const int32_t *rows, ValueLoss loss,
                       void *ctx, Tensor dh_NE);

/* ---- model FLOPs (flops.c) ---- */
double block_matrix_flops(const ModelConfig *c); /* of one token in one block */
double attention_flops(const ModelConfig *c,
                       double keys); /* of one block; keys summed over queries */
double embed_flops(const ModelConfig *c, double tokens);
double head_flops(const ModelConfig *c, HeadKind head, int64_t n_rows); /* with project_out */

/* ---- Hugging Face config files (config.c, config_flags.c, config_rope.c, config_write.c) ---- */
int config_read_flags(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                      Error *err);
int config_read_rope(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                     Error *err);
const char *activation_name(Activation a); /* "gelu_new" */
int config_from_json(const json_t *root, const char *file, ModelConfig *out, Error *err);
/* New references; what config.json and generation_config.json of a saved model hold. */
json_t *config_to_json(const Model *m, DType dtype, const json_t *extra);
json_t *generation_to_json(const Model *m);
/* The architecture name of a head in a family, "LlamaForCausalLM". */
const char *family_architecture(const char *family, HeadKind head);

#endif
