/* The two heads. The language-model head runs over the wanted rows only, in chunks: logits of a
 * chunk, log-softmax, the caller's loss and the gradient follow each other while the chunk is in
 * the cache, so that [N, V] logits never exist at once. */
#include <string.h>

#include "model/internal.h"

/* Rows of a chunk. On the CPU its logits stay near the cores (4 MiB), but the weight gradient,
 * which touches all of [V, C] once per chunk, still has enough rows to be worth it. A GPU waits for
 * the host's loss once per chunk: there the logits are as many as memory has room for without
 * noticing, half as many where it is so short that nearly every block is recomputed. */
int64_t head_chunk_rows(const ModelConfig *c, DeviceKind device, int whole_blocks) {
  enum { CPU_BYTES = 4 << 20, CPU_FEWEST = 128, CPU_MOST = 1024 };
  enum { GPU_BYTES = 1 << 30, GPU_FEWEST = 1024, GPU_MOST = 8192 };
  bool cpu = device == DEVICE_CPU;
  int64_t fewest = cpu ? CPU_FEWEST : GPU_FEWEST, most = cpu ? CPU_MOST : GPU_MOST;
  int64_t row = (int64_t)sizeof(float) * c->vocab_size;
  int64_t rows = (cpu ? CPU_BYTES : GPU_BYTES) / row / 16 * 16;
  rows = rows < fewest ? fewest : rows > most ? most : rows;
  bool is_short = whole_blocks > 0 && whole_blocks >= c->n_layers - 1;
  return cpu || !is_short ? rows : rows / 2;
}

static int64_t chunk_rows(const Model *m) {
  return head_chunk_rows(&m->config, device_kind(m->device), m->whole_blocks);
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

/* Rows of h and where they are in it. Neighbours are read where they lie. */
typedef struct Gathered {
  Tensor rows_R; /* absent: rows first .. first + n of h themselves */
  int64_t first;
  Tensor h_RE;
} Gathered;

static Gathered gather(Model *m, Tensor h_NE, int64_t n, const int32_t *rows) {
  int64_t i = 1;
  while (i < n && rows[i] == rows[0] + i) i++;
  if (i == n)
    return (Gathered){.rows_R = absent(), .first = rows[0], .h_RE = rows_of(h_NE, rows[0], n)};
  Gathered g = {.rows_R = push_i32(m, n, rows), .h_RE = push_act(m, n, h_NE.dim[1])};
  m->ops->gather_rows(m->device, h_NE, g.rows_R, g.h_RE);
  return g;
}

/* dh_NE += dy W, to the rows that were gathered. */
static void scatter(Model *m, const Gathered *g, Tensor dy_RV, Tensor dh_NE) {
  if (!g->rows_R.data) {
    Tensor dh_RE = rows_of(dh_NE, g->first, g->h_RE.dim[0]);
    m->ops->gemm(m->device, GEMM_NN, 1, dy_RV, head_weight(m), 1, dh_RE);
    return;
  }
  Tensor dh_RE = push_act(m, g->h_RE.dim[0], g->h_RE.dim[1]);
  m->ops->gemm(m->device, GEMM_NN, 1, dy_RV, head_weight(m), 0, dh_RE);
  m->ops->scatter_add_rows(m->device, dh_RE, g->rows_R, dh_NE);
}

void model_restrict(Model *m, const uint8_t *bits_RW) { m->restrict_RW = bits_RW; }

/* Logits of ids that do not count have no part in anything that follows. */
static void restrict_chunk(Model *m, int64_t first, Tensor logits_RV) {
  int64_t n = logits_RV.dim[0], width = (logits_RV.dim[1] + 7) / 8;
  if (!m->restrict_RW) return;
  Tensor bits_RW = tensor_2d(NULL, DT_U8, n, width);
  bits_RW.data = arena_push(m->arena, tensor_bytes(bits_RW));
  device_upload(m->device, bits_RW.data, m->restrict_RW + first * width, tensor_bytes(bits_RW));
  m->ops->keep_only(m->device, bits_RW, logits_RV);
}

/* One chunk's device buffers; host copies of what a loss sees lie beside. */
typedef struct Chunk {
  int64_t first, n;
  Gathered in;
  Tensor target_R, logits_RV, logprob_R, lse_R, entropy_R;
} Chunk;

static Chunk chunk_push(Model *m, Tensor h_NE, const LmRows *r, int64_t first, bool entropy) {
  int64_t n = chunk_rows(m);
  if (n > r->n - first) n = r->n - first;
  Chunk k = {.first = first, .n = n, .in = gather(m, h_NE, n, r->rows + first)};
  k.target_R = push_i32(m, n, r->targets + first);
  k.logits_RV = push_f32(m, n, m->config.vocab_size);
  k.logprob_R = push_f32_1d(m, n);
  k.lse_R = push_f32_1d(m, n);
  k.entropy_R = entropy ? push_f32_1d(m, n) : absent();
  m->ops->gemm(m->device, GEMM_NT, 1, k.in.h_RE, head_weight(m), 0, k.logits_RV);
  restrict_chunk(m, first, k.logits_RV);
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
  size_t most = (size_t)chunk_rows(m);
  float *host_4R = mem_alloc(4 * most, sizeof(float));
  for (int64_t first = 0; first < r.n;) {
    ArenaMark mark = arena_mark(m->arena);
    Chunk k = chunk_push(m, h_NE, &r, first, want_entropy);
    Tensor dlogprob_R = push_f32_1d(m, k.n);
    Tensor dentropy_R = want_entropy ? push_f32_1d(m, k.n) : absent();
    Tensor dlogits_RV = k.logits_RV; /* in place where types allow */
    if (m->compute != DT_F32) dlogits_RV = push_act(m, k.n, m->config.vocab_size);
    chunk_loss(m, &k, loss, ctx, host_4R, dlogprob_R, dentropy_R);
    m->ops->logprob_bwd(m->device, k.logits_RV, k.target_R, 1 / r.temperature, k.lse_R, k.entropy_R,
                        dlogprob_R, dentropy_R, dlogits_RV);
    grad_gemm(m, dlogits_RV, k.in.h_RE, m->params.head.weight, 1);
    scatter(m, &k.in, dlogits_RV, dh_NE);
    first += k.n;
    arena_pop(m->arena, mark);
  }
  free(host_4R);
}

/* ---- the scalar head ---- */

/* Values are F32, as logits are; the bias has the compute type and is added on the host. */
static float scalar_bias(Model *m) {
  if (m->params.head.bias < 0) return 0;
  float bias;
  char raw[sizeof bias];
  Tensor b = zeropp_weight(m->zero, m->params.head.bias);
  device_download(m->device, raw, b.data, tensor_bytes(b));
  if (convert_to_f32(raw, b.dtype, &bias, 1)) die("a bias of type %s", dtype_name(b.dtype));
  return bias;
}

static Gathered values_forward(Model *m, Tensor h_NE, int n, const int32_t *rows, float *values) {
  check_rows(m, h_NE, n, rows, NULL);
  Gathered g = gather(m, h_NE, n, rows);
  Tensor value_R1 = push_f32(m, n, 1);
  m->ops->gemm(m->device, GEMM_NT, 1, g.h_RE, head_weight(m), 0, value_R1);
  download(m, values, value_R1);
  float bias = scalar_bias(m);
  for (int i = 0; i < n; i++) values[i] += bias;
  return g;
}

void head_values(Model *m, Tensor h_NE, int n_rows, const int32_t *rows, float *values) {
  if (n_rows == 0) return;
  ArenaMark mark = arena_mark(m->arena);
  values_forward(m, h_NE, n_rows, rows, values);
  arena_pop(m->arena, mark);
}

static Tensor push_dvalues(Model *m, int n, const float *dvalues) {
  Tensor dvalue_R1 = push_act(m, n, 1);
  void *host = mem_alloc((size_t)n, dtype_size(m->compute));
  if (convert_from_f32(dvalues, host, m->compute, (size_t)n))
    die("values of type %s", dtype_name(m->compute));
  device_upload(m->device, dvalue_R1.data, host, tensor_bytes(dvalue_R1));
  free(host);
  return dvalue_R1;
}

void head_train_values(Model *m, Tensor h_NE, int n_rows, const int32_t *rows, ValueLoss loss,
                       void *ctx, Tensor dh_NE) {
  if (n_rows == 0) return;
  const HeadParams *p = &m->params.head;
  ArenaMark mark = arena_mark(m->arena);
  float *values = mem_alloc((size_t)n_rows, sizeof(float));
  float *dvalues = mem_zalloc((size_t)n_rows, sizeof(float));
  Gathered g = values_forward(m, h_NE, n_rows, rows, values);
  loss(ctx, n_rows, values, dvalues);
  Tensor dvalue_R1 = push_dvalues(m, n_rows, dvalues);
  grad_gemm(m, dvalue_R1, g.h_RE, p->weight, 1);
  if (p->bias >= 0) m->ops->bias_grad(m->device, dvalue_R1, zeropp_grad(m->zero, p->bias));
  scatter(m, &g, dvalue_R1, dh_NE);
  arena_pop(m->arena, mark);
  free(values);
  free(dvalues);
}
