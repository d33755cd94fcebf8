/* The parameter table: one row per tensor of the checkpoint, in memory order. It drives allocation,
 * sharding, files and messages. Unit 0 is the embedding, 1 .. L the blocks, L + 1 the final norm
 * and the head. q, k, v (and gate, up) are joined, their biases alike, so that each group is one
 * GEMM. A tied head has no row of its own. */
#include <stdio.h>
#include <string.h>

#include "model/internal.h"

typedef struct SpecList {
  ParamSpec *v;
  int n, unit;
  float init_std;
} SpecList;

enum { ROWS = 0, COLUMNS = 1, REPLICATED = -1 };

static int spec_add(SpecList *l, ParamSpec s, const char *name) {
  snprintf(s.name, sizeof s.name, "%s", name);
  s.unit = l->unit;
  s.init_std = l->init_std;
  l->v[l->n] = s;
  return l->n++;
}

static int add_matrix(SpecList *l, const char *name, int64_t out, int64_t in, int tp, bool joined) {
  return spec_add(l,
                  (ParamSpec){.ndim = 2,
                              .dim = {out, in},
                              .tp_axis = tp,
                              .decay = true,
                              .joined = joined,
                              .init = INIT_NORMAL},
                  name);
}

static int add_vector(SpecList *l, const char *name, int64_t n, int tp, bool joined,
                      ParamInit init) {
  return spec_add(
      l, (ParamSpec){.ndim = 1, .dim = {n, 1}, .tp_axis = tp, .joined = joined, .init = init},
      name);
}

/* Rows "PREFIX.NAME.weight" (or .bias) of several joined projections; the place of the first. */
static int add_group(SpecList *l, const char *prefix, int n, const char *const *names,
                     const int64_t *out, int64_t in, bool bias) {
  int first = l->n;
  for (int i = 0; i < n; i++) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s.%s", prefix, names[i], bias ? "bias" : "weight");
    if (bias)
      add_vector(l, name, out[i], ROWS, i > 0, INIT_ZEROS);
    else
      add_matrix(l, name, out[i], in, ROWS, i > 0);
  }
  return first;
}

/* A projection back to the residual stream: cut by columns, so its bias is replicated. */
static void add_output(SpecList *l, const char *prefix, const char *name, int64_t out, int64_t in,
                       bool bias, int *weight_at, int *bias_at) {
  char full[96];
  snprintf(full, sizeof full, "%s.%s.weight", prefix, name);
  *weight_at = add_matrix(l, full, out, in, COLUMNS, false);
  snprintf(full, sizeof full, "%s.%s.bias", prefix, name);
  *bias_at = bias ? add_vector(l, full, out, REPLICATED, false, INIT_ZEROS) : -1;
}

static void add_block(SpecList *l, const ModelConfig *c, int layer, BlockParams *p) {
  static const char *const qkv[] = {"q_proj", "k_proj", "v_proj"};
  static const char *const gate_up[] = {"gate_proj", "up_proj"};
  int64_t q = attn_width(c), kv = (int64_t)c->n_kv_heads * c->head_dim;
  int64_t qkv_out[] = {q, kv, kv}, gate_up_out[] = {c->ffn, c->ffn};
  char block[48], attn[64], mlp[64], name[96];
  snprintf(block, sizeof block, "model.layers.%d", layer);
  snprintf(attn, sizeof attn, "%s.self_attn", block);
  snprintf(mlp, sizeof mlp, "%s.mlp", block);

  l->unit = unit_of_block(layer);
  snprintf(name, sizeof name, "%s.input_layernorm.weight", block);
  p->norm1 = add_vector(l, name, c->hidden, REPLICATED, false, INIT_ONES);
  p->qkv = add_group(l, attn, 3, qkv, qkv_out, c->hidden, false);
  p->qkv_bias = c->qkv_bias ? add_group(l, attn, 3, qkv, qkv_out, c->hidden, true) : -1;
  add_output(l, attn, "o_proj", c->hidden, q, c->o_bias, &p->o, &p->o_bias);
  snprintf(name, sizeof name, "%s.post_attention_layernorm.weight", block);
  p->norm2 = add_vector(l, name, c->hidden, REPLICATED, false, INIT_ONES);
  p->gate_up = add_group(l, mlp, 2, gate_up, gate_up_out, c->hidden, false);
  p->gate_up_bias = c->mlp_bias ? add_group(l, mlp, 2, gate_up, gate_up_out, c->hidden, true) : -1;
  add_output(l, mlp, "down_proj", c->hidden, c->ffn, c->mlp_bias, &p->down, &p->down_bias);
}

static void add_head(SpecList *l, const ModelConfig *c, HeadKind head, ModelParams *p) {
  l->unit = 1 + c->n_layers;
  p->head.norm = add_vector(l, "model.norm.weight", c->hidden, REPLICATED, false, INIT_ONES);
  p->head.bias = -1;
  if (head == HEAD_SCALAR) {
    p->head.weight = add_matrix(l, "score.weight", 1, c->hidden, REPLICATED, false);
    if (c->score_bias) p->head.bias = add_vector(l, "score.bias", 1, REPLICATED, false, INIT_ZEROS);
  } else if (c->tied_head) {
    p->head.weight = p->embedding;
  } else {
    p->head.weight = add_matrix(l, "lm_head.weight", c->vocab_size, c->hidden, ROWS, false);
  }
}

int params_list(const ModelConfig *c, HeadKind head, ParamSpec **specs, ModelParams *places) {
  enum { MOST_PER_BLOCK = 16, MOST_OUTSIDE = 4 };
  size_t most = (size_t)c->n_layers * MOST_PER_BLOCK + MOST_OUTSIDE;
  SpecList l = {.v = mem_zalloc(most, sizeof(ParamSpec)), .init_std = c->init_std};
  places->block = mem_zalloc((size_t)c->n_layers, sizeof(BlockParams));
  places->embedding =
      add_matrix(&l, "model.embed_tokens.weight", c->vocab_size, c->hidden, ROWS, false);
  for (int i = 0; i < c->n_layers; i++) add_block(&l, c, i, &places->block[i]);
  add_head(&l, c, head, places);
  *specs = l.v;
  return l.n;
}

int model_specs(const ModelConfig *c, HeadKind head, ParamSpec **specs) {
  ModelParams places;
  int n = params_list(c, head, specs, &places);
  free(places.block);
  return n;
}

int64_t model_config_params(const ModelConfig *c, HeadKind head) {
  ParamSpec *specs;
  int n = model_specs(c, head, &specs);
  int64_t sum = 0;
  for (int i = 0; i < n; i++) sum += specs[i].dim[0] * specs[i].dim[1];
  free(specs);
  return sum;
}
