/* The public passes over a packed batch: inference (log-probabilities, values, logits) and training
 * (forward, loss, backward, reduction). Everything pushed on the arena is popped at the end. */
#include "model/internal.h"

static double batch_flops(const Model *m, Batch b, int n_rows) {
  int32_t *lengths = mem_alloc((size_t)b.n_seqs, sizeof(int32_t));
  for (int s = 0; s < b.n_seqs; s++) lengths[s] = b.offsets[s + 1] - b.offsets[s];
  double flops = model_forward_flops(&m->config, m->head, b.n_seqs, lengths, n_rows);
  free(lengths);
  return flops;
}

/* ---- inference ---- */

typedef struct Inference {
  ArenaMark mark;
  Tensor h_NE;
} Inference;

/* Trunk and final norm; the head is gathered and stays so until inference_end. */
static Inference inference_begin(Model *m, Batch b, int n_rows) {
  Inference f = {.mark = arena_mark(m->arena)};
  m->flops += batch_flops(m, b, n_rows);
  Packed p = packed_upload(m, b);
  TrunkActs t;
  trunk_forward(m, &p, (AttnCall){.seg = p.seg}, KEEP_NOTHING, 0, &t);
  head_gather(m);
  f.h_NE = final_forward(m, t.x_NC, t.delta_NC, false).h_NE;
  trunk_free(&t);
  return f;
}

static void inference_end(Model *m, Inference f) {
  head_release(m);
  arena_pop(m->arena, f.mark);
}

void model_logprobs(Model *m, Batch b, int n_rows, const int32_t *rows, const int32_t *targets,
                    float temperature, float *logprobs, float *entropy) {
  require(m->head == HEAD_LM);
  Inference f = inference_begin(m, b, n_rows);
  head_logprobs(m, f.h_NE, (LmRows){n_rows, rows, targets, temperature}, logprobs, entropy);
  inference_end(m, f);
}

void model_values(Model *m, Batch b, int n_rows, const int32_t *rows, float *values) {
  require(m->head == HEAD_SCALAR);
  Inference f = inference_begin(m, b, n_rows);
  head_values(m, f.h_NE, n_rows, rows, values);
  inference_end(m, f);
}

void model_logits(Model *m, Batch b, int n_rows, const int32_t *rows, float *logits_RV) {
  require(m->head == HEAD_LM);
  Inference f = inference_begin(m, b, n_rows);
  if (n_rows > 0) {
    Tensor rows_R = push_i32(m, n_rows, rows), h_RE = push_act(m, n_rows, embed_width(&m->config));
    Tensor out_RV = push_f32(m, n_rows, m->config.vocab_size);
    m->ops->gather_rows(m->device, f.h_NE, rows_R, h_RE);
    m->ops->gemm(m->device, GEMM_NT, 1, h_RE, head_weight(m), 0, out_RV);
    device_download(m->device, logits_RV, out_RV.data, tensor_bytes(out_RV));
  }
  inference_end(m, f);
}

/* ---- training ---- */

typedef struct Training {
  ArenaMark mark;
  Packed batch;
  TrunkActs trunk;
  FinalActs final;
  Tensor dh_NE; /* starts at zero: the head adds to wanted rows */
} Training;

static Keep what_to_keep(const Model *m) {
  static const Keep keep[] = {[RECOMPUTE_NONE] = KEEP_ALL,
                              [RECOMPUTE_FULL] = KEEP_PRODUCTS, /* of no block */
                              [RECOMPUTE_SELECTIVE] = KEEP_PRODUCTS};
  return keep[m->recompute];
}

/* Forward up to the head, whose units are then FULL with open gradients. */
static Training training_begin(Model *m, Batch b, int n_rows) {
  require(m->trainable);
  Training t = {.mark = arena_mark(m->arena)};
  m->flops += 3 * batch_flops(m, b, n_rows);
  t.batch = packed_upload(m, b);
  trunk_forward(m, &t.batch, (AttnCall){.seg = t.batch.seg}, what_to_keep(m), m->whole_blocks,
                &t.trunk);
  t.dh_NE = push_act(m, t.batch.n, embed_width(&m->config));
  device_zero(m->device, t.dh_NE.data, tensor_bytes(t.dh_NE));
  head_gather(m);
  prefetch_last_blocks(m);
  if (head_has_unit(m)) zeropp_open_grad(m->zero, unit_of_head(m));
  if (head_is_tied(m)) zeropp_open_grad(m->zero, 0);
  t.final = final_forward(m, t.trunk.x_NC, t.trunk.delta_NC, true);
  return t;
}

/* The final norm's backward, then the trunk's. A tied embedding's gradient stays open for both. */
static void training_end(Model *m, Training *t) {
  Tensor dx_NC = push_act(m, t->batch.n, m->config.hidden);
  final_backward(m, &t->final, t->trunk.x_NC, t->dh_NE, dx_NC);
  if (head_has_unit(m)) zeropp_reduce(m->zero, unit_of_head(m));
  head_release(m);
  trunk_backward(m, &t->batch, &t->trunk, dx_NC);
  trunk_free(&t->trunk);
  arena_pop(m->arena, t->mark);
}

void model_train_lm(Model *m, Batch b, int n_rows, const int32_t *rows, const int32_t *targets,
                    float temperature, bool want_entropy, LmLoss loss, void *ctx) {
  require(m->head == HEAD_LM);
  Training t = training_begin(m, b, n_rows);
  head_train_lm(m, t.final.h_NE, (LmRows){n_rows, rows, targets, temperature}, want_entropy, loss,
                ctx, t.dh_NE);
  training_end(m, &t);
}

void model_train_values(Model *m, Batch b, int n_rows, const int32_t *rows, ValueLoss loss,
                        void *ctx) {
  require(m->head == HEAD_SCALAR);
  Training t = training_begin(m, b, n_rows);
  head_train_values(m, t.final.h_NE, n_rows, rows, loss, ctx, t.dh_NE);
  training_end(m, &t);
}
