/* A model family is a row: what its config.json calls things, what its tensors are called, and
 * which parts of the one trunk it has. Internal to model/. */
#ifndef MODEL_FAMILY_H
#define MODEL_FAMILY_H

#include <stdbool.h>

#include "model/model.h"

/* Keys of config.json; NULL: the family has no such key and the size follows from others. */
typedef struct FamilyKeys {
  const char *hidden, *layers, *heads, *kv_heads, *head_dim, *ffn, *positions;
  const char *norm_eps, *activation, *init_std;
} FamilyKeys;

/* Tensors, without ".weight" and ".bias". Those of a block follow its prefix. Either q, k, v (gate,
 * up) are tensors of their own or `qkv` (`gate_up`) holds them one below the other. */
typedef struct FamilyNames {
  const char *base; /* prefix of the trunk, which published files may leave out: "model." */
  const char *embedding, *positions, *project_in, *project_out, *final_norm;
  const char *block; /* "model.layers.%d." */
  const char *norm1, *q, *k, *v, *qkv, *q_norm, *k_norm, *o;
  const char *norm2, *gate, *up, *gate_up, *down;
  bool in_out;            /* matrices of blocks are stored [in, out] (GPT-2's Conv1D) */
  const char *buffers[2]; /* ends of the names of buffers that old versions saved */
} FamilyNames;

/* A switch of config.json: key NULL means that it is always as `otherwise` says. */
typedef struct FamilyFlag {
  const char *key;
  bool otherwise; /* when the key is absent */
} FamilyFlag;

typedef enum WindowRule {
  WINDOW_NEVER,
  WINDOW_SIZE,   /* sliding_window: a number or null */
  WINDOW_SWITCH, /* only with use_sliding_window; max_window_layers, layer_types */
} WindowRule;

typedef struct Family {
  const char *model_type, *causal, *classifier;
  const FamilyKeys *keys;
  const FamilyNames *names;
  FamilyFlag qkv_bias, o_bias, mlp_bias, tied_head;
  NormKind norm;
  MlpKind mlp;
  const char *activation; /* the only one of a gated MLP, else the default */
  bool qk_norm;
  bool learned_positions; /* a table; otherwise rotary */
  int position_offset;    /* rows of the table in front of position 0 */
  bool partial_rotary;    /* partial_rotary_factor may be below 1 */
  WindowRule window;
  int window_size; /* transformers' default where the key is absent; 0: none */
  /* Rates of dropout that this family's published configs carry. RLHF trains the policy that
   * generates, so no rate is applied; other families' must be 0. */
  const char *dropout[4];
  double norm_eps, rope_theta; /* transformers' defaults where the key is absent */
  int head_dim;                /* likewise; 0: hidden / heads */
  int max_positions;
} Family;

const Family *family_find(const char *model_type); /* NULL: unknown */
const Family *family_of(const ModelConfig *c);     /* dies when unknown */
/* "llama, mistral, ...": for messages. */
const char *family_list(void);

#endif
