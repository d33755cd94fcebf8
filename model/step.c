/* The trunk for generation: no activations kept, attention by the caller, who owns the KV cache. */
#include "model/internal.h"

/* Every token attends to all before it in its sequence, whose count its position tells. */
static double step_flops(const Model *m, int n, const int32_t *positions, int n_rows) {
  const ModelConfig *c = &m->config;
  double keys = 0;
  for (int i = 0; i < n; i++) {
    int seen = positions[i] + 1;
    keys += c->window && seen > c->window ? c->window : seen;
  }
  double block = n * block_matrix_flops(c) + attention_flops(c, keys);
  return embed_flops(c, n) + c->n_layers * block + head_flops(c, HEAD_LM, n_rows);
}

static void check_step(const Model *m, int n, const int32_t *tokens, const int32_t *positions) {
  for (int i = 0; i < n; i++) {
    if (tokens[i] < 0 || tokens[i] >= m->config.vocab_size)
      die("token %d of the step is %d; the vocabulary has %d", i, tokens[i], m->config.vocab_size);
    if (positions[i] < 0 || positions[i] >= m->config.max_positions)
      die("position %d of the step is %d; the model takes %d", i, positions[i],
          m->config.max_positions);
  }
}

/* When decoding, every row is wanted. */
static bool is_every_row(const int32_t *rows, int n, int64_t all) {
  int i = 0;
  while (i < n && rows[i] == i) i++;
  return i == all;
}

/* Final norm and head over the wanted rows only: after a prefill that is one row per sequence. */
static void step_head(Model *m, const TrunkActs *t, int n_rows, const int32_t *rows,
                      Tensor logits_RV) {
  const Ops *op = m->ops;
  int hidden = m->config.hidden;
  if (is_every_row(rows, n_rows, t->x_NC.dim[0])) {
    Tensor h_NE = final_forward(m, t->x_NC, t->delta_NC, false).h_NE;
    op->gemm(m->device, GEMM_NT, 1, h_NE, head_weight(m), 0, logits_RV);
    return;
  }
  Tensor rows_R = push_i32(m, n_rows, rows), x_RC = push_act(m, n_rows, hidden);
  Tensor delta_RC = t->delta_NC.data ? push_act(m, n_rows, hidden) : absent();
  op->gather_rows(m->device, t->x_NC, rows_R, x_RC);
  if (delta_RC.data) op->gather_rows(m->device, t->delta_NC, rows_R, delta_RC);
  Tensor h_RE = final_forward(m, x_RC, delta_RC, false).h_NE;
  op->gemm(m->device, GEMM_NT, 1, h_RE, head_weight(m), 0, logits_RV);
}

/* All sequences of a cache are rotated alike, since a token's sequence is not told apart here. */
int model_place_first(Model *m, int longest) {
  const ModelConfig *c = &m->config;
  if (model_rope_varies(c) && !m->rope_fixed)
    die("rotary positions depend on the length of a sequence, and none is fixed for generation");
  if (c->rope == ROPE_NONE) return family_of(c)->position_offset;
  int32_t length = longest;
  rope_ensure(m, 1, &length, &length);
  return rope_first(m, length);
}

static void step_places(Model *m, int n, const int32_t *positions, int32_t *place) {
  int longest = 0;
  for (int i = 0; i < n; i++)
    if (positions[i] >= longest) longest = positions[i] + 1;
  int first = model_place_first(m, longest);
  for (int i = 0; i < n; i++) place[i] = first + positions[i];
}

void model_count_decode(Model *m, int n, const int32_t *positions) {
  m->flops += step_flops(m, n, positions, n);
}

/* In tensor parallel queries and keys arrive as they were multiplied, to be rotated. */
typedef struct RotateFirst {
  Model *m;
  Tensor place_N;
  Attend attend;
  void *ctx;
} RotateFirst;

static void rotate_and_attend(void *ctx, int layer, Tensor qkv_NQ, Tensor cos_Pr, Tensor sin_Pr,
                              Tensor out_NHD) {
  const RotateFirst *r = ctx;
  Model *m = r->m;
  if (cos_Pr.data)
    m->ops->rope(m->device, qkv_NQ, r->place_N, cos_Pr, sin_Pr, model_attn_shape(m), false);
  r->attend(r->ctx, layer, qkv_NQ, out_NHD);
}

static void step_sliced(Model *m, const Packed *p, Attend attend, void *ctx, int n_rows,
                        const int32_t *rows, Tensor logits_RV) {
  RotateFirst r = {m, p->place_N, attend, ctx};
  SlicedStep s = {.token_B = p->tokens_N,
                  .place_B = p->place_N,
                  .attend = rotate_and_attend,
                  .ctx = &r,
                  .open = true,
                  .wanted_R = push_i32(m, n_rows, rows),
                  .logits_RV = logits_RV};
  sliced_step(m, &s);
}

static void step_trunk(Model *m, const Packed *p, Attend attend, void *ctx, int n_rows,
                       const int32_t *rows, Tensor logits_RV) {
  TrunkActs t;
  trunk_forward(m, p, (AttnCall){.attend = attend, .ctx = ctx}, KEEP_NOTHING, 0, &t);
  head_gather(m);
  if (n_rows > 0) step_head(m, &t, n_rows, rows, logits_RV);
  head_release(m);
  trunk_free(&t);
}

void model_step(Model *m, int n, const int32_t *tokens, const int32_t *positions, Attend attend,
                void *ctx, int n_rows, const int32_t *rows, Tensor logits_RV) {
  require(m->head == HEAD_LM);
  check_step(m, n, tokens, positions);
  ArenaMark mark = arena_mark(m->arena);
  int32_t *place = mem_alloc((size_t)n, sizeof(int32_t));
  step_places(m, n, positions, place);
  Packed p = {.n = n, .tokens_N = push_i32(m, n, tokens), .place_N = push_i32(m, n, place)};
  free(place);
  if (zeropp_in_rollout(m->zero, ROLLOUT_TENSOR_PARALLEL))
    step_sliced(m, &p, attend, ctx, n_rows, rows, logits_RV);
  else
    step_trunk(m, &p, attend, ctx, n_rows, rows, logits_RV);
  m->flops += step_flops(m, n, positions, n_rows);
  arena_pop(m->arena, mark);
}
