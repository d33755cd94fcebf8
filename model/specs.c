/* The parameter table: one row per parameter, in memory order. It drives allocation, sharding,
 * files and messages. Unit 0 is the embeddings, 1 .. L the blocks, L + 1 the final norm and the
 * head. q, k, v (and gate, up) are joined, their biases alike, so that each group is one GEMM; they
 * are rows of their own also where a checkpoint holds them in one tensor, so that each is cut by
 * its own rows (model_place knows the tensor). A tied head has no row of its own. */
#include <stdio.h>
#include <string.h>

#include "model/internal.h"

typedef struct SpecList {
  ParamSpec *v;
  int n, unit;
  float init_std;
} SpecList;

static int spec_add(SpecList *l, ParamSpec s, const char *name) {
  snprintf(s.name, sizeof s.name, "%s", name);
  s.unit = l->unit;
  s.init_std = l->init_std;
  l->v[l->n] = s;
  return l->n++;
}

static int add_matrix(SpecList *l, const char *name, int64_t out, int64_t in, bool joined) {
  return spec_add(
      l,
      (ParamSpec){
          .ndim = 2, .dim = {out, in}, .decay = true, .joined = joined, .init = INIT_NORMAL},
      name);
}

static int add_vector(SpecList *l, const char *name, int64_t n, bool joined, ParamInit init) {
  return spec_add(l, (ParamSpec){.ndim = 1, .dim = {n, 1}, .joined = joined, .init = init}, name);
}

static int add_named(SpecList *l, const char *name, const char *end, int64_t out, int64_t in) {
  char full[96];
  snprintf(full, sizeof full, "%s.%s", name, end);
  return add_matrix(l, full, out, in, false);
}

/* Several projections that are one GEMM: rows "PREFIX NAME.weight" (or .bias), where NAME is the
 * member's tensor or its part of a fused one. The place of the first. */
typedef struct Group {
  int n;
  const char *fused, *names[3], *parts[3]; /* fused: NULL where each has its tensor */
  int64_t out[3], in;
} Group;

static int add_group(SpecList *l, const char *prefix, const Group *g, bool bias) {
  const char *end = bias ? "bias" : "weight";
  int first = l->n;
  for (int i = 0; i < g->n; i++) {
    char name[96];
    if (g->fused)
      snprintf(name, sizeof name, "%s%s.%s.%s", prefix, g->fused, g->parts[i], end);
    else
      snprintf(name, sizeof name, "%s%s.%s", prefix, g->names[i], end);
    if (bias)
      add_vector(l, name, g->out[i], i > 0, INIT_ZEROS);
    else
      add_matrix(l, name, g->out[i], g->in, i > 0);
  }
  return first;
}

/* A projection back to the residual stream. */
static void add_output(SpecList *l, const char *prefix, const char *name, int64_t out, int64_t in,
                       bool bias, int *weight_at, int *bias_at) {
  char full[96];
  snprintf(full, sizeof full, "%s%s.weight", prefix, name);
  *weight_at = add_matrix(l, full, out, in, false);
  snprintf(full, sizeof full, "%s%s.bias", prefix, name);
  *bias_at = bias ? add_vector(l, full, out, false, INIT_ZEROS) : -1;
}

static NormParams add_norm(SpecList *l, const char *prefix, const char *name, int64_t n,
                           NormKind kind) {
  NormParams p = {.bias = -1};
  char full[96];
  snprintf(full, sizeof full, "%s%s.weight", prefix, name);
  p.weight = add_vector(l, full, n, false, INIT_ONES);
  snprintf(full, sizeof full, "%s%s.bias", prefix, name);
  if (kind == NORM_LAYER) p.bias = add_vector(l, full, n, false, INIT_ZEROS);
  return p;
}

static void add_attention(SpecList *l, const ModelConfig *c, const char *prefix, BlockParams *p) {
  const FamilyNames *t = family_of(c)->names;
  int64_t q = attn_width(c), kv = (int64_t)c->n_kv_heads * c->head_dim;
  Group qkv = {3, t->qkv, {t->q, t->k, t->v}, {"q", "k", "v"}, {q, kv, kv}, c->hidden};
  p->qkv = add_group(l, prefix, &qkv, false);
  p->qkv_bias = c->qkv_bias ? add_group(l, prefix, &qkv, true) : -1;
  p->q_norm = p->k_norm = -1;
  if (c->qk_norm) {
    p->q_norm = add_norm(l, prefix, t->q_norm, c->head_dim, NORM_RMS).weight;
    p->k_norm = add_norm(l, prefix, t->k_norm, c->head_dim, NORM_RMS).weight;
  }
  add_output(l, prefix, t->o, c->hidden, q, c->o_bias, &p->o, &p->o_bias);
}

static void add_mlp(SpecList *l, const ModelConfig *c, const char *prefix, BlockParams *p) {
  const FamilyNames *t = family_of(c)->names;
  Group up = {1, NULL, {t->up}, {NULL}, {c->ffn}, c->hidden};
  if (c->mlp == MLP_SWIGLU)
    up = (Group){2, t->gate_up, {t->gate, t->up}, {"gate", "up"}, {c->ffn, c->ffn}, c->hidden};
  p->up = add_group(l, prefix, &up, false);
  p->up_bias = c->mlp_bias ? add_group(l, prefix, &up, true) : -1;
  add_output(l, prefix, t->down, c->hidden, c->ffn, c->mlp_bias, &p->down, &p->down_bias);
}

static void add_block(SpecList *l, const ModelConfig *c, int layer, BlockParams *p) {
  const FamilyNames *t = family_of(c)->names;
  char prefix[48];
  block_prefix(t, layer, prefix);
  l->unit = unit_of_block(layer);
  p->norm1 = add_norm(l, prefix, t->norm1, c->hidden, c->norm);
  add_attention(l, c, prefix, p);
  p->norm2 = add_norm(l, prefix, t->norm2, c->hidden, c->norm);
  add_mlp(l, c, prefix, p);
}

static void add_embeddings(SpecList *l, const ModelConfig *c, ModelParams *p) {
  const Family *f = family_of(c);
  int64_t width = embed_width(c), rows = (int64_t)c->max_positions + f->position_offset;
  p->embedding = add_named(l, f->names->embedding, "weight", c->vocab_size, width);
  p->positions = p->project_in = -1;
  if (c->rope == ROPE_NONE)
    p->positions = add_named(l, f->names->positions, "weight", rows, c->hidden);
  if (width != c->hidden)
    p->project_in = add_named(l, f->names->project_in, "weight", c->hidden, width);
}

static void add_head(SpecList *l, const ModelConfig *c, HeadKind head, ModelParams *p) {
  const FamilyNames *t = family_of(c)->names;
  int64_t width = embed_width(c);
  l->unit = 1 + c->n_layers;
  p->head = (HeadParams){.norm = {-1, -1}, .project_out = -1, .bias = -1};
  if (has_final_norm(c)) p->head.norm = add_norm(l, "", t->final_norm, c->hidden, c->norm);
  if (width != c->hidden)
    p->head.project_out = add_named(l, t->project_out, "weight", width, c->hidden);
  if (head == HEAD_SCALAR) {
    p->head.weight = add_matrix(l, "score.weight", 1, width, false);
    if (c->score_bias) p->head.bias = add_vector(l, "score.bias", 1, false, INIT_ZEROS);
  } else if (c->tied_head) {
    p->head.weight = p->embedding;
  } else {
    p->head.weight = add_matrix(l, "lm_head.weight", c->vocab_size, width, false);
  }
}

int params_list(const ModelConfig *c, HeadKind head, ParamSpec **specs, ModelParams *places) {
  enum { MOST_PER_BLOCK = 20, MOST_OUTSIDE = 8 };
  size_t most = (size_t)c->n_layers * MOST_PER_BLOCK + MOST_OUTSIDE;
  SpecList l = {.v = mem_zalloc(most, sizeof(ParamSpec)), .init_std = c->init_std};
  places->block = mem_zalloc((size_t)c->n_layers, sizeof(BlockParams));
  add_embeddings(&l, c, places);
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
