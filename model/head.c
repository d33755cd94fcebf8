/* The two heads. The language-model head runs over the wanted rows only, in chunks: logits of a
 * chunk, log-softmax, the caller's loss and the gradient follow each other while the chunk is in
 * the cache, so that [N, V] logits never exist at once. */
#include <string.h>

#include "model/internal.h"

/* Rows of a chunk: its logits stay near the cores (4 MiB), but the weight gradient, which touches
 * all of [V, C] once per chunk, still has enough rows to be worth it. */
int64_t head_chunk_rows(const ModelConfig *c) {
  enum { LOGIT_BYTES = 4 << 20, FEWEST = 128, MOST = 1024 };
  int64_t rows = LOGIT_BYTES / ((int64_t)sizeof(float) * c->vocab_size) / 16 * 16;
  return rows < FEWEST ? FEWEST : rows > MOST ? MOST : rows;
}

void head_gather(Model *m) {
  if (head_has_unit(m)) zeropp_gather(m->zero, unit_of_head(m));
  if (head_is_tied(m)) zeropp_gather(m->zero, 0);
}

void head_release(Model *m) {
  if (head_is_tied(m)) zeropp_release(m->zero, 0);
  if (head_has_unit(m)) zeropp_release(m->zero, unit_of_head(m));
}

Tensor head_weight(const Model *m) { return zeropp_weight(m->zero, m->params.head.weight); }

/* One chunk's device buffers; host copies of what a loss sees lie beside. */
typedef struct Chunk {
  int64_t first, n;
  Tensor rows_R, target_R, h_RE, logits_RV, logprob_R, lse_R, entropy_R;
} Chunk;

static Chunk chunk_push(Model *m, Tensor h_NE, const LmRows *r, int64_t first, bool entropy) {
  int64_t n = head_chunk_rows(&m->config);
  if (n > r->n - first) n = r->n - first;
  Chunk k = {.first = first, .n = n};
  k.rows_R = push_i32(m, n, r->rows + first);
  k.target_R = push_i32(m, n, r->targets + first);
  k.h_RE = push_f32(m, n, embed_width(&m->config));
  k.logits_RV = push_f32(m, n, m->config.vocab_size);
  k.logprob_R = push_f32_1d(m, n);
  k.lse_R = push_f32_1d(m, n);
  k.entropy_R = entropy ? push_f32_1d(m, n) : absent();
  m->ops->gather_rows(m->device, h_NE, k.rows_R, k.h_RE);
  m->ops->gemm(m->device, GEMM_NT, 1, k.h_RE, head_weight(m), 0, k.logits_RV);
  m->ops->logprob_fwd(m->device, k.logits_RV, k.target_R, 1 / r->temperature, k.logprob_R, k.lse_R,
                      k.entropy_R);
  return k;
}

static void check_rows(const Model *m, Tensor h_NE, int n, const int32_t *rows,
                       const int32_t *targets) {
  for (int i = 0; i < n; i++) {
    if (rows[i] < 0 || rows[i] >= h_NE.dim[0])
      die("row %d is %d; the batch has %lld tokens", i, rows[i], (long long)h_NE.dim[0]);
    if (targets && (targets[i] < 0 || targets[i] >= m->config.vocab_size))
      die("target %d is %d; the vocabulary has %d", i, targets[i], m->config.vocab_size);
  }
}

static void download(Model *m, float *host, Tensor x) {
  if (host) device_download(m->device, host, x.data, tensor_bytes(x));
}

void head_logprobs(Model *m, Tensor h_NE, LmRows r, float *logprobs, float *entropy) {
  require(r.temperature > 0);
  check_rows(m, h_NE, r.n, r.rows, r.targets);
  for (int64_t first = 0; first < r.n;) {
    ArenaMark mark = arena_mark(m->arena);
    Chunk k = chunk_push(m, h_NE, &r, first, entropy != NULL);
    download(m, logprobs + first, k.logprob_R);
    download(m, entropy ? entropy + first : NULL, k.entropy_R);
    first += k.n;
    arena_pop(m->arena, mark);
  }
}

/* The loss of one chunk on the host, its derivatives back on the device. dentropy_R stays absent
 * without entropy. */
static void chunk_loss(Model *m, const Chunk *k, LmLoss loss, void *ctx, float *host_4R,
                       Tensor dlogprob_R, Tensor dentropy_R) {
  size_t n = (size_t)k->n, bytes = n * sizeof(float);
  float *logprob = host_4R, *dlogprob = logprob + n;
  float *entropy = NULL, *dentropy = NULL;
  memset(host_4R, 0, 4 * bytes);
  download(m, logprob, k->logprob_R);
  if (k->entropy_R.data) {
    entropy = dlogprob + n;
    dentropy = entropy + n;
    download(m, entropy, k->entropy_R);
  }
  loss(ctx, (int)k->first, (int)k->n, logprob, entropy, dlogprob, dentropy);
  device_upload(m->device, dlogprob_R.data, dlogprob, bytes);
  if (dentropy) device_upload(m->device, dentropy_R.data, dentropy, bytes);
}

void head_train_lm(Model *m, Tensor h_NE, LmRows r, bool want_entropy, LmLoss loss, void *ctx,
                   Tensor dh_NE) {
  require(r.temperature > 0);
  check_rows(m, h_NE, r.n, r.rows, r.targets);
  const Ops *op = m->ops;
  Tensor dweight_VC = zeropp_grad(m->zero, m->params.head.weight);
  float *host_4R = mem_alloc(4 * (size_t)head_chunk_rows(&m->config), sizeof(float));
  for (int64_t first = 0; first < r.n;) {
    ArenaMark mark = arena_mark(m->arena);
    Chunk k = chunk_push(m, h_NE, &r, first, want_entropy);
    Tensor dlogprob_R = push_f32_1d(m, k.n), dh_RE = push_f32(m, k.n, embed_width(&m->config));
    Tensor dentropy_R = want_entropy ? push_f32_1d(m, k.n) : absent();
    chunk_loss(m, &k, loss, ctx, host_4R, dlogprob_R, dentropy_R);
    op->logprob_bwd(m->device, k.logits_RV, k.target_R, 1 / r.temperature, k.lse_R, k.entropy_R,
                    dlogprob_R, dentropy_R, k.logits_RV);
    op->gemm(m->device, GEMM_TN, 1, k.logits_RV, k.h_RE, 1, dweight_VC);
    op->gemm(m->device, GEMM_NN, 1, k.logits_RV, head_weight(m), 0, dh_RE);
    op->scatter_add_rows(m->device, dh_RE, k.rows_R, dh_NE);
    first += k.n;
    arena_pop(m->arena, mark);
  }
  free(host_4R);
}

/* ---- the scalar head ---- */

typedef struct Scalars {
  Tensor rows_R, h_RE, value_R1;
} Scalars;

static Scalars scalars_push(Model *m, Tensor h_NE, int n, const int32_t *rows) {
  check_rows(m, h_NE, n, rows, NULL);
  Scalars s = {.rows_R = push_i32(m, n, rows),
               .h_RE = push_f32(m, n, embed_width(&m->config)),
               .value_R1 = push_f32(m, n, 1)};
  m->ops->gather_rows(m->device, h_NE, s.rows_R, s.h_RE);
  m->ops->gemm(m->device, GEMM_NT, 1, s.h_RE, head_weight(m), 0, s.value_R1);
  if (m->params.head.bias >= 0)
    m->ops->bias_add(m->device, s.value_R1, zeropp_weight(m->zero, m->params.head.bias));
  return s;
}

void head_values(Model *m, Tensor h_NE, int n_rows, const int32_t *rows, float *values) {
  if (n_rows == 0) return;
  ArenaMark mark = arena_mark(m->arena);
  Scalars s = scalars_push(m, h_NE, n_rows, rows);
  download(m, values, s.value_R1);
  arena_pop(m->arena, mark);
}

void head_train_values(Model *m, Tensor h_NE, int n_rows, const int32_t *rows, ValueLoss loss,
                       void *ctx, Tensor dh_NE) {
  if (n_rows == 0) return;
  const Ops *op = m->ops;
  ArenaMark mark = arena_mark(m->arena);
  Scalars s = scalars_push(m, h_NE, n_rows, rows);
  float *values = mem_alloc((size_t)n_rows, sizeof(float));
  float *dvalues = mem_zalloc((size_t)n_rows, sizeof(float));
  download(m, values, s.value_R1);
  loss(ctx, n_rows, values, dvalues);
  Tensor dvalue_R1 = push_f32(m, n_rows, 1), dh_RE = push_f32(m, n_rows, embed_width(&m->config));
  device_upload(m->device, dvalue_R1.data, dvalues, (size_t)n_rows * sizeof(float));
  op->gemm(m->device, GEMM_TN, 1, dvalue_R1, s.h_RE, 1,
           zeropp_grad(m->zero, m->params.head.weight));
  if (m->params.head.bias >= 0)
    op->bias_grad(m->device, dvalue_R1, zeropp_grad(m->zero, m->params.head.bias));
  op->gemm(m->device, GEMM_NN, 1, dvalue_R1, head_weight(m), 0, dh_RE);
  op->scatter_add_rows(m->device, dh_RE, s.rows_R, dh_NE);
  arena_pop(m->arena, mark);
  free(values);
  free(dvalues);
}
