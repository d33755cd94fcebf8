/* What the files of model/ share. Nobody else includes it.
 *
 * Activations come from the arena and are popped before a public call returns. A rank whose batch
 * is empty runs the same code on zero rows, so that its gathers and reductions match the others'.
 */
#ifndef MODEL_INTERNAL_H
#define MODEL_INTERNAL_H

#include "model/model.h"

/* ---- parameters by place in the table (specs.c); -1: the model has none ---- */
typedef struct BlockParams {
  int norm1, qkv, qkv_bias, o, o_bias, norm2, gate_up, gate_up_bias, down, down_bias;
} BlockParams; /* qkv: q, joined with k and v; gate_up: gate, joined with up */
typedef struct HeadParams {
  int norm, weight, bias; /* weight: lm_head, the tied embedding, or score */
} HeadParams;
typedef struct ModelParams {
  int embedding;
  BlockParams *block; /* [n_layers] */
  HeadParams head;
} ModelParams;
/* The table and the places of its rows; both are malloc'ed. */
int params_list(const ModelConfig *c, HeadKind head, ParamSpec **specs, ModelParams *places);

/* cos and sin of every position up to the longest sequence seen; grows, never shrinks (rope.c). */
typedef struct RopeTable {
  int positions;
  Tensor cos_Pr, sin_Pr;
} RopeTable;

struct Model {
  ModelConfig config;
  HeadKind head;
  bool trainable, recompute;
  Device *device;
  const Ops *ops;
  Grid *grid;
  Arena *arena;
  ZeroPP *zero;
  ModelParams params;
  RopeTable rope;
  double flops;
  json_t *source_config, *source_generation; /* the loaded folder's files, or NULL */
};

/* Everything but the values of the weights. */
Model *model_new(Device *d, Grid *g, Arena *arena, const ModelConfig *c, const ModelOptions *o);
/* N(0, init_std), ones or zeros for one parameter, keyed like zeropp_init_random. */
void model_init_param(Model *m, int param, uint64_t seed);

static inline int unit_of_block(int layer) { return 1 + layer; }
static inline int unit_of_head(const Model *m) { return 1 + m->config.n_layers; }
static inline bool head_is_tied(const Model *m) {
  return m->head == HEAD_LM && m->config.tied_head;
}
static inline int64_t attn_width(const ModelConfig *c) { return (int64_t)c->n_heads * c->head_dim; }
static inline int64_t qkv_width(const ModelConfig *c) {
  return (int64_t)(c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
}

/* ---- arena tensors ---- */
Tensor push_f32(Model *m, int64_t rows, int64_t cols);
Tensor push_f32_1d(Model *m, int64_t n);
Tensor push_i32(Model *m, int64_t n, const int32_t *host); /* uploaded */
static inline Tensor absent(void) { return (Tensor){0}; }
static inline Tensor rows_of(Tensor x, int64_t first, int64_t n) { /* rows of a matrix */
  float *at = tensor_f32(x) + first * x.dim[1];
  return tensor_2d(at, x.dtype, n, x.dim[1]);
}

/* ---- the trunk (forward.c, backward.c) ---- */

/* A packed batch on the device. */
typedef struct Packed {
  int n; /* tokens */
  Segments seg;
  Tensor tokens_N, positions_N;
} Packed;
Packed packed_upload(Model *m, Batch b); /* dies on an id or a length the model cannot take */

/* One block's activations. The residual stream is never copied: a norm adds the previous residual
 * to the newest sublayer output, in the output's buffer, which so becomes the residual. */
typedef struct BlockActs {
  Tensor x_NC; /* the residual that enters */
  Tensor norm1_NC, rstd1_N, qkv_NQ, att_NA, lse_NH;
  Tensor mid_NC; /* the residual after attention */
  Tensor norm2_NC, rstd2_N, gu_N2F, act_NF;
  Tensor out_NC; /* of the MLP; the next norm adds mid to it. Absent: not computed */
} BlockActs;

typedef enum Keep {
  KEEP_NOTHING, /* inference: one set of buffers for all blocks */
  KEEP_INPUTS,  /* recomputation: each block's x only */
  KEEP_ALL
} Keep;
typedef struct TrunkActs {
  Keep keep;
  BlockActs *block; /* [n_layers]; malloc'ed; trunk_free */
  Tensor x_NC;      /* what the final norm adds delta to */
  Tensor delta_NC;
} TrunkActs;

/* Who computes attention: packed sequences, or the caller of model_step with its KV cache. */
typedef struct AttnCall {
  Segments seg;
  Attend attend; /* NULL: the packed kernel */
  void *ctx;
} AttnCall;

void block_forward(Model *m, int layer, Tensor positions_N, AttnCall call, Tensor delta_NC,
                   BlockActs *a);
void trunk_forward(Model *m, const Packed *p, AttnCall call, Keep keep, TrunkActs *t);
void trunk_free(TrunkActs *t);
/* dx_NC: gradient of the last block's residual output; overwritten. Reduces units 0 .. n_layers. */
void trunk_backward(Model *m, const Packed *p, TrunkActs *t, Tensor dx_NC);

void rope_ensure(Model *m, int positions);

/* ---- the heads (head.c) ---- */
/* The head's units: its own, and the embedding where the head is tied to it. */
void head_gather(Model *m);
void head_release(Model *m);
/* The rest needs them FULL. */
int64_t head_chunk_rows(const ModelConfig *c);
Tensor head_weight(const Model *m);

/* Wanted rows of the packed batch and what they are for. */
typedef struct LmRows {
  int n;
  const int32_t *rows, *targets;
  float temperature;
} LmRows;
void head_logprobs(Model *m, Tensor norm_NC, LmRows r, float *logprobs, float *entropy);
/* Adds to dnorm_NC and to the head's gradients. */
void head_train_lm(Model *m, Tensor norm_NC, LmRows r, bool want_entropy, LmLoss loss, void *ctx,
                   Tensor dnorm_NC);
void head_values(Model *m, Tensor norm_NC, int n_rows, const int32_t *rows, float *values);
void head_train_values(Model *m, Tensor norm_NC, int n_rows, const int32_t *rows, ValueLoss loss,
                       void *ctx, Tensor dnorm_NC);

/* ---- model FLOPs (flops.c) ---- */
double block_matrix_flops(const ModelConfig *c); /* of one token in one block */
double attention_flops(const ModelConfig *c,
                       double keys); /* of one block; keys summed over queries */
double head_flops(const ModelConfig *c, HeadKind head, int64_t n_rows);

/* ---- Hugging Face config files (config.c, config_rope.c, config_write.c) ---- */
int config_read_rope(const json_t *root, const char *file, double default_theta, ModelConfig *c,
                     Error *err);
int config_from_json(const json_t *root, const char *file, ModelConfig *out, Error *err);
/* New references; what config.json and generation_config.json of a saved model hold. */
json_t *config_to_json(const Model *m, DType dtype, const json_t *extra);
json_t *generation_to_json(const Model *m);
/* The architecture name of a head in a family, "LlamaForCausalLM". */
const char *family_architecture(const char *family, HeadKind head);

#endif
