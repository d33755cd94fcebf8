/* model: one decoder trunk for every family, two heads (language model, scalar). Hand-written
 * forward and backward; Hugging Face folders in and out.
 *
 * Batches are packed: token-major, never padded, so a token's result does not depend on its company
 * (to rounding) and there is no mask. Callers name the rows they want (usually response positions):
 * the head runs over those rows only, in chunks, and [N, V] logits never exist at once.
 */
#ifndef MODEL_H
#define MODEL_H

#include "core/arena.h"
#include "core/json.h"
#include "core/rollout.h"
#include "zeropp/zeropp.h"

typedef enum HeadKind { HEAD_LM, HEAD_SCALAR } HeadKind;
typedef enum RopeKind {
  ROPE_DEFAULT,
  ROPE_LINEAR,
  ROPE_DYNAMIC, /* NTK: the base grows with a sequence that is longer than the original positions */
  ROPE_LLAMA3,
  ROPE_LONGROPE, /* short or long factors, by the length of the sequence */
  ROPE_NONE      /* learned positions instead */
} RopeKind;
typedef enum NormKind { NORM_RMS, NORM_LAYER } NormKind; /* NORM_LAYER has a bias */
typedef enum MlpKind { MLP_SWIGLU, MLP_PLAIN } MlpKind;  /* MLP_PLAIN: down(act(up x)) */
#define MODEL_MAX_EOS 16
#define MODEL_MAX_ROPE_PAIRS 256

/* Feature flags: a new family is a row in a table (model/families.c), not a file. All zero but the
 * sizes is a plain Llama. */
typedef struct ModelConfig {
  char family[32]; /* model_type, "llama" */
  int vocab_size, hidden, n_layers, n_heads, n_kv_heads, head_dim, ffn, max_positions;
  int embed_dim; /* of the token embedding and the head, projected to hidden and back; 0: hidden */
  NormKind norm;
  float norm_eps;
  bool post_norm;     /* a norm behind each residual sum instead of in front of each sublayer */
  bool no_final_norm; /* always so with post_norm */
  bool qk_norm;       /* RMSNorm of each query and key head */
  MlpKind mlp;
  Activation activation; /* MLP_PLAIN */
  bool tied_head;
  bool qkv_bias, o_bias, mlp_bias;
  int window; /* 0: none */
  RopeKind rope;
  int rotary_dim; /* channels of a head that turn; 0: all */
  double rope_theta;
  double rope_factor; /* linear, dynamic, llama3; longrope: 0 or what config.json gives */
  double rope_low_freq, rope_high_freq; /* llama3 */
  int rope_original_positions;          /* dynamic, llama3, longrope */
  double rope_attention_factor;         /* longrope: 0 or what config.json gives */
  float rope_short[MODEL_MAX_ROPE_PAIRS], rope_long[MODEL_MAX_ROPE_PAIRS]; /* longrope */
  float init_std;                                                          /* initializer_range */
  int bos_id, pad_id;                                                      /* -1: none */
  int n_eos, eos_ids[MODEL_MAX_EOS]; /* generation_config.json's, else config.json's */
  HeadKind head;                     /* what the checkpoint's architecture says */
  bool score_bias;                   /* the scalar head has a bias; its tensors tell, not config */
  DType dtype; /* of the checkpoint's tensors as config says; F32 when it does not */
} ModelConfig;

/* Reads DIR/config.json (older and newer spelling) and generation_config.json. Refuses, by name, an
 * architecture or a flag that is not supported; never guesses. */
int model_config_read(const char *dir, ModelConfig *out, Error *err);
/* From one file, whatever its name. */
int model_config_read_file(const char *file, ModelConfig *out, Error *err);
int model_config_check(const ModelConfig *c,
                       Error *err); /* consistency: heads divide, sizes positive... */
int64_t model_config_params(const ModelConfig *c, HeadKind head);
/* The parameter table of a model. Returns the count; *specs is malloc'ed. Parameters that lie in
 * one tensor of the checkpoint (fused) are rows of their own here, "...qkv_proj.q.weight". */
int model_specs(const ModelConfig *c, HeadKind head, ParamSpec **specs);

/* Where a parameter lies in the checkpoint: rows [first, first + dim[0]) of a tensor of `rows`
 * rows; in_out: the tensor is stored transposed, [in, rows], and those are columns. */
typedef struct TensorPlace {
  char name[96];
  int64_t first, rows;
  bool in_out;
} TensorPlace;
TensorPlace model_place(const ModelConfig *c, const ParamSpec *s);

typedef struct Model Model;
/* What a training forward leaves out of its memory, to be computed again in the backward pass. The
 * results are the same bits in all modes. */
typedef enum Recompute {
  RECOMPUTE_NONE,
  RECOMPUTE_FULL,     /* all but the residual stream, in front of each block and of each MLP, and
                         the last two blocks, where backward begins: a quarter more arithmetic */
  RECOMPUTE_SELECTIVE /* what memory bounds: norms, activations, rotated queries and keys that were
                         normalized. Products of matrices and attention are kept, but for the first
                         `recompute_blocks` blocks, of which only the residual stream is */
} Recompute;
typedef struct ModelOptions {
  HeadKind head;
  bool trainable;
  Recompute recompute;
  int recompute_blocks;
  bool init_head; /* HEAD_SCALAR on a checkpoint without one: start it at random instead of refusing
                   */
  uint64_t seed;  /* for init */
  ZeroPPConfig zero; /* trainable is taken from above */
} ModelOptions;

/* Loads a Hugging Face folder; each rank reads only its own pieces. Every tensor of the table must
 * be there with its shape; unknown extra tensors are an error naming the first (rotary inv_freq
 * buffers and a redundant tied lm_head are fine). A causal checkpoint loads as HEAD_SCALAR only
 * with init_head. Scalar heads found: score, v_head, value_head, reward_head, classifier (with
 * .weight or .summary.weight, [1, C] or [C]; a bias when there). Collective. */
Model *model_load(Device *d, Grid *g, Arena *arena, const char *dir, const ModelOptions *o,
                  Error *err);
/* All that model_load checks before it reads a weight: config, head, every tensor's name, shape and
 * type. Fills *out as the model's config would be. Not collective. */
int model_check(const char *dir, const ModelOptions *o, ModelConfig *out, Error *err);
Model *model_create(Device *d, Grid *g, Arena *arena, const ModelConfig *c,
                    const ModelOptions *o); /* random */
/* All but the values of the weights: for a caller that writes them (zeropp_shard). */
Model *model_new(Device *d, Grid *g, Arena *arena, const ModelConfig *c, const ModelOptions *o);
void model_free(Model *m);

/* Writes a Hugging Face folder (config.json, generation_config.json, model.safetensors or shards
 * with an index, tokenizer files copied from tokenizer_dir when not NULL) atomically: DIR appears
 * whole or not at all. kind: STATE_MASTER or STATE_EMA. extra: keys to merge into config.json
 * (reward mean and std), may be NULL. Tied heads are written once. Loads in transformers and here
 * with identical results. Collective. */
typedef struct SaveOptions {
  DType dtype;
  StateKind kind;
  uint64_t max_shard_bytes;
  const char *tokenizer_dir;
  const char *chat_template; /* text of chat_template.jinja; NULL: the tokenizer folder's, if any */
  const json_t *extra;
} SaveOptions;
int model_save(Model *m, const char *dir, const SaveOptions *o, Error *err);

const ModelConfig *model_config(const Model *m);
/* One more token that ends generation, here and in what is saved; nothing changes where the config
 * has it. -1: the config has no room for it, or the vocabulary no such id. */
int model_add_eos(Model *m, int id, Error *err);
HeadKind model_head(const Model *m);
ZeroPP *model_zero(Model *m);
Device *model_device(Model *m);
Grid *model_grid(Model *m);
Arena *model_arena(Model *m);
DType model_compute(const Model *m); /* of weights and activations: F32 or BF16 */
double model_flops_done(
    const Model *m); /* model FLOPs since creation, this rank: 2 per multiply-add of
the matrices and causal attention from real lengths, backward twice, no recomputation counted */

/* A Batch with n_seqs = 0 only takes part in the collectives (ranks with fewer micro-batches). */

/* Dynamic and longrope rotate a whole sequence by frequencies that depend on its length. Each
 * sequence of a batch is rotated by its own (as transformers' forward of that sequence alone),
 * until the length is fixed here: then all are rotated as if they were that long. While text is
 * generated its length is not known, so keys in the cache would belong to another length than the
 * one that the finished sequence is scored with. PPO therefore fixes the length, for rollout,
 * scoring and update alike, to the longest that prompt and answer may reach: the log-probabilities
 * agree, and a token's never depend on what follows it. (transformers' generate changes frequencies
 * on the way.) 0: each its own, which model_step cannot know: it dies. Other kinds of rotation do
 * not depend on it. */
void model_rope_fix(Model *m, int length);
int model_rope_fixed(const Model *m);
bool model_rope_varies(const ModelConfig *c); /* dynamic, longrope */

/* ---- inference: rows_R are positions in the packed batch (any order), results in host memory ----
 */

/* From the next call on, log-probabilities, entropies and their gradients are over a part of the
 * vocabulary: bits_RW (host memory, borrowed) has a row for each of a call's rows, W = (V + 7) / 8,
 * bit id % 8 of byte id / 8 being 1 where the id counts; the target must be one of them. NULL: over
 * the whole again. */
void model_restrict(Model *m, const uint8_t *bits_RW);
/* logprobs_R[i] = log softmax(logits[rows[i]] / temperature)[targets[i]]; entropy_R may be NULL. */
void model_logprobs(Model *m, Batch b, int n_rows, const int32_t *rows, const int32_t *targets,
                    float temperature, float *logprobs, float *entropy);
void model_values(Model *m, Batch b, int n_rows, const int32_t *rows,
                  float *values); /* HEAD_SCALAR */
void model_logits(Model *m, Batch b, int n_rows, const int32_t *rows,
                  float *logits_RV); /* small cases: tests, parity */

/* ---- training: forward, loss, backward, reduction of one micro-batch ---- */

/* Called once or more over disjoint ranges that cover [0, n_rows): given log-probs and entropies of
 * rows [first, first + n), writes d loss / d logprob and d loss / d entropy (both pre-zeroed). Host
 * memory. */
typedef void (*LmLoss)(void *ctx, int first, int n, const float *logprob, const float *entropy,
                       float *dlogprob, float *dentropy);
/* entropy is computed (and dentropy used) only if want_entropy; else both are NULL. */
void model_train_lm(Model *m, Batch b, int n_rows, const int32_t *rows, const int32_t *targets,
                    float temperature, bool want_entropy, LmLoss loss, void *ctx);
/* Called once with all rows. */
typedef void (*ValueLoss)(void *ctx, int n, const float *values, float *dvalues);
void model_train_values(Model *m, Batch b, int n_rows, const int32_t *rows, ValueLoss loss,
                        void *ctx);

/* ---- the trunk for generation ---- */

/* The weights of generation, from begin to end (begins nest), during which they are not written:
 * zeropp.h has the kinds. check: refuses what this model or device does not do. bytes: what they
 * take beside what training holds. Collective. */
int model_rollout_check(const Model *m, RolloutWeights weights, WireKind format, Error *err);
/* The same from a config; and how many matrices would be in codes. */
int model_rollout_plan(const Device *d, const ModelConfig *c, const ZeroPPConfig *zero,
                       RolloutWeights weights, WireKind format, int *coded, int *matrices,
                       Error *err);
void model_rollout_begin(Model *m, RolloutWeights weights, WireKind format);
void model_rollout_end(Model *m);
uint64_t model_rollout_bytes(const ModelConfig *c, const ZeroPPConfig *zero, int nodes, int local,
                             RolloutWeights weights, WireKind format);
/* The ranks that take every step together, with no tokens where a rank has none; NULL: each steps
 * alone. */
Comm *model_rollout_group(const Model *m, RolloutWeights weights);
/* In tensor parallel, before a step (of model_step or model_decode): the tokens, and the rows with
 * a head (NULL: all), that each rank of the node has in it. [local], copied. */
void model_step_rows(Model *m, const int *tokens_of, const int *heads_of);
/* Whether model_decode of so many rows (of each rank of the node, in tensor parallel) can be
 * captured: it can not in a stream, nor where a captured step has no such exchanges. */
bool model_decode_captures(const Model *m, int rows);

/* Runs the trunk over n tokens (host ids and positions) without keeping activations. For each layer
 * it calls attend(ctx, layer, qkv_NQ after rope, out_NHD), which must fill out (device memory): the
 * caller owns the KV cache. Then the final norm; the LM head over the given rows gives logits_RV
 * (device memory). */
typedef void (*Attend)(void *ctx, int layer, Tensor qkv_NQ, Tensor out_NHD);
void model_step(Model *m, int n, const int32_t *tokens, const int32_t *positions, Attend attend,
                void *ctx, int n_rows, const int32_t *rows, Tensor logits_RV);
/* The same for one token of every sequence, with a head for each: all tensors are on the device,
 * and nothing is uploaded, downloaded or allocated there, so that a device can capture it. For each
 * layer attend gets qkv in front of the rotation, with the tables for it (absent where the model
 * has none); place_B: rows of those, or of learned positions, model_place_first plus the position.
 * Within model_rollout_begin and _end; in a stream, or in tensor parallel, a step is collective. */
typedef void (*DecodeAttend)(void *ctx, int layer, Tensor qkv_BQ, Tensor cos_Pr, Tensor sin_Pr,
                             Tensor out_BHD);
void model_decode(Model *m, Tensor token_B, Tensor place_B, DecodeAttend attend, void *ctx,
                  Tensor logits_BV);
/* The place of position 0, for sequences of at most `longest` tokens; the rotary table is then long
 * enough for them and stays where it is. */
int model_place_first(Model *m, int longest);
/* Counts model_decode's FLOPs: of n tokens at these positions. */
void model_count_decode(Model *m, int n, const int32_t *positions);
AttnShape model_attn_shape(const Model *m);

/* Model FLOPs of a forward over sequences of these lengths with n_rows head rows. */
double model_forward_flops(const ModelConfig *c, HeadKind head, int n_seqs, const int32_t *lengths,
                           int64_t n_rows);
/* Of that, what attention takes: causal, from the lengths. */
double model_attention_flops(const ModelConfig *c, int n_seqs, const int32_t *lengths);
/* Activation bytes of one micro-batch of n_tokens (the memory plan). */
typedef struct PassPlan {
  DeviceKind device;
  DType compute;
  bool train;
  Recompute recompute; /* counts in training */
  int recompute_blocks;
  bool restricted; /* rows of bits beside the logits: model_restrict */
} PassPlan;
uint64_t model_activation_bytes(const ModelConfig *c, HeadKind head, int64_t n_tokens, PassPlan p);

#endif
