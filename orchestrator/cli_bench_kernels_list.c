/* The kernels of a training step and of a rollout, with a model's shapes. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "orchestrator/cli_bench_kernels.h"

typedef struct List {
  const KernelShape *s;
  Kernel *k;
  int n;
} List;

static Kernel *add(List *l,
                   void (*run)(const Kernel *, const KernelShape *, Device *, const Tensor *),
                   double flops, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static Kernel *add(List *l,
                   void (*run)(const Kernel *, const KernelShape *, Device *, const Tensor *),
                   double flops, const char *fmt, ...) {
  require(l->n < MOST_KERNELS);
  Kernel *k = &l->k[l->n++];
  *k = (Kernel){.run = run, .flops = flops};
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(k->name, sizeof k->name, fmt, ap);
  va_end(ap);
  return k;
}

static double operand_bytes(const Operand *o) {
  double n = (double)dtype_size(o->type);
  for (int i = 0; i < o->ndim; i++) n *= (double)o->dim[i];
  return n;
}

/* passes: how often the call has to read or write it. */
static Operand *operand(Kernel *k, DType type, Fill fill, double passes, int64_t rows,
                        int64_t cols) {
  require(k->n_operands < MOST_OPERANDS);
  Operand *o = &k->operand[k->n_operands++];
  *o = (Operand){
      .type = type, .ndim = cols ? 2 : 1, .dim = {rows, cols ? cols : 1, 1, 1}, .fill = fill};
  k->bytes += passes * operand_bytes(o);
  return o;
}

static void output(Kernel *k, DType type, double passes, int64_t rows, int64_t cols) {
  operand(k, type, FILL_ZERO, passes, rows, cols)->out = true;
}

/* ---- matrix products ---- */

static void run_gemm(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)s;
  device_ops(d)->gemm(d, (GemmKind)k->which, 1, t[0], t[1], 0, t[2]);
}

/* y = x W^T, dx = dy W, dW = dy^T x of a matrix [out, in]; y of the head and dW are F32. */
static void add_matrix(List *l, const char *name, int64_t out, int64_t in, int64_t rows, DType y,
                       double calls) {
  DType act = l->s->act;
  double flops = 2.0 * (double)rows * (double)out * (double)in;
  Kernel *k = add(l, run_gemm, flops, "%s", name);
  k->which = GEMM_NT;
  k->calls = calls;
  operand(k, act, FILL_NORMAL, 1, rows, in);
  operand(k, act, FILL_SMALL, 1, out, in);
  output(k, y, 1, rows, out);
  k = add(l, run_gemm, flops, "%s, input gradient", name);
  k->which = GEMM_NN;
  k->calls = calls;
  operand(k, act, FILL_NORMAL, 1, rows, out);
  operand(k, act, FILL_SMALL, 1, out, in);
  output(k, act, 1, rows, in);
  k = add(l, run_gemm, flops, "%s, weight gradient", name);
  k->which = GEMM_TN;
  k->calls = calls;
  operand(k, act, FILL_NORMAL, 1, rows, out);
  operand(k, act, FILL_NORMAL, 1, rows, in);
  output(k, DT_F32, 1, out, in);
}

/* ---- rows ---- */

static void run_embedding(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->embedding_fwd(d, t[0], t[1], t[2]);
}
static void run_embedding_bwd(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->embedding_bwd(d, t[0], t[1], t[2]);
}
static void run_norm(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  if (s->config->norm == NORM_RMS)
    device_ops(d)->rmsnorm_fwd(d, t[0], t[1], t[2], 1e-5F, t[3], t[4]);
  else
    device_ops(d)->layernorm_fwd(d, t[0], t[1], t[2], t[5], 1e-5F, t[3], t[6], t[4]);
}
static void run_norm_bwd(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  if (s->config->norm == NORM_RMS)
    device_ops(d)->rmsnorm_bwd(d, t[0], t[1], t[2], t[3], t[4], t[5]);
  else
    device_ops(d)->layernorm_bwd(d, t[0], t[1], t[2], t[6], t[3], t[4], t[5], t[7]);
}
static void run_rope(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  device_ops(d)->rope(d, t[0], t[1], t[2], t[3], s->attn, false);
}
static void run_qk_norm(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  device_ops(d)->qk_norm_fwd(d, t[0], t[1], t[2], 1e-5F, s->attn, t[3], t[4]);
}
static void run_activation(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  if (s->config->mlp == MLP_SWIGLU)
    device_ops(d)->swiglu_fwd(d, t[0], t[1]);
  else
    device_ops(d)->act_fwd(d, s->config->activation, t[0], t[1]);
}
static void run_activation_bwd(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  if (s->config->mlp == MLP_SWIGLU)
    device_ops(d)->swiglu_bwd(d, t[0], t[1], t[2]);
  else
    device_ops(d)->act_bwd(d, s->config->activation, t[0], t[1], t[2]);
}
static void run_gather(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->gather_rows(d, t[0], t[1], t[2]);
}
static void run_scatter(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->scatter_add_rows(d, t[0], t[1], t[2]);
}

static void add_norms(List *l) {
  const KernelShape *s = l->s;
  int64_t n = s->n, c = s->config->hidden;
  bool mean = s->config->norm == NORM_LAYER;
  Kernel *k = add(l, run_norm, 0, "norm with residual");
  k->calls = 2.0 * l->s->config->n_layers + 1;
  operand(k, s->act, FILL_NORMAL, 2, n, c)->out = true;
  operand(k, s->act, FILL_SMALL, 1, n, c);
  operand(k, s->act, FILL_ONES, 1, c, 0);
  output(k, s->act, 1, n, c);
  output(k, DT_F32, 1, n, 0);
  if (mean) operand(k, s->act, FILL_SMALL, 1, c, 0);
  if (mean) output(k, DT_F32, 1, n, 0);
  k = add(l, run_norm_bwd, 0, "norm, backward");
  k->calls = 2.0 * l->s->config->n_layers + 1;
  operand(k, s->act, FILL_NORMAL, 1, n, c);
  operand(k, s->act, FILL_NORMAL, 1, n, c);
  operand(k, s->act, FILL_ONES, 1, c, 0);
  operand(k, DT_F32, FILL_ONES, 1, n, 0);
  operand(k, s->act, FILL_NORMAL, 2, n, c)->out = true;
  output(k, DT_F32, 2, c, 0);
  if (mean) operand(k, DT_F32, FILL_ZERO, 1, n, 0);
  if (mean) output(k, DT_F32, 2, c, 0);
}

static void add_heads(List *l) {
  const KernelShape *s = l->s;
  const ModelConfig *c = s->config;
  int64_t n = s->n, rotary = (c->rotary_dim ? c->rotary_dim : c->head_dim) / 2;
  if (c->qk_norm) {
    Kernel *k = add(l, run_qk_norm, 0, "norms of heads");
    k->calls = c->n_layers;
    operand(k, s->act, FILL_NORMAL, 1, n, s->qkv);
    operand(k, s->act, FILL_ONES, 1, c->head_dim, 0);
    operand(k, s->act, FILL_ONES, 1, c->head_dim, 0);
    output(k, s->act, 1, n, s->qkv);
    output(k, DT_F32, 1, n, c->n_heads + c->n_kv_heads);
  }
  if (c->rope == ROPE_NONE) return;
  Kernel *k = add(l, run_rope, 0, "rope");
  k->calls = 2.0 * c->n_layers;
  double turned = (double)(c->n_heads + c->n_kv_heads) * c->head_dim / (double)s->qkv;
  operand(k, s->act, FILL_NORMAL, 2 * turned, n, s->qkv)->out = true;
  operand(k, DT_I32, FILL_PLACES, 1, n, 0);
  operand(k, DT_F32, FILL_ONES, 1, s->length, rotary);
  operand(k, DT_F32, FILL_SMALL, 1, s->length, rotary);
}

static void add_rows(List *l) {
  const KernelShape *s = l->s;
  int64_t n = s->n, c = s->config->hidden, ffn = s->config->ffn, v = s->config->vocab_size;
  Kernel *k = add(l, run_embedding, 0, "embedding");
  k->calls = 1;
  operand(k, DT_I32, FILL_IDS, 1, n, 0)->limit = v;
  operand(k, s->act, FILL_NORMAL, 0, v, c);
  output(k, s->act, 2, n, c);
  k = add(l, run_embedding_bwd, 0, "embedding, gradient");
  k->calls = 1;
  operand(k, DT_I32, FILL_IDS, 1, n, 0)->limit = v;
  operand(k, s->act, FILL_NORMAL, 1, n, c);
  output(k, DT_F32, 0, v, c);
  k->bytes += 2.0 * sizeof(float) * (double)(n * c); /* at most so many rows are read and written */
  add_norms(l);
  add_heads(l);
  k = add(l, run_activation, 0, s->config->mlp == MLP_SWIGLU ? "swiglu" : "activation");
  k->calls = s->config->n_layers;
  operand(k, s->act, FILL_NORMAL, 1, n, s->up);
  output(k, s->act, 1, n, ffn);
  k = add(l, run_activation_bwd, 0, "%s, backward", k->name);
  k->calls = s->config->n_layers;
  operand(k, s->act, FILL_NORMAL, 1, n, ffn);
  operand(k, s->act, FILL_NORMAL, 1, n, s->up);
  output(k, s->act, 1, n, s->up);
  k = add(l, run_gather, 0, "gather rows");
  operand(k, s->act, FILL_NORMAL, 1, n, c);
  operand(k, DT_I32, FILL_IDS, 1, n, 0)->limit = n;
  output(k, s->act, 1, n, c);
  k = add(l, run_scatter, 0, "scatter rows");
  operand(k, s->act, FILL_NORMAL, 1, n, c);
  operand(k, DT_I32, FILL_PLACES, 1, n, 0)->limit = n;
  output(k, s->act, 2, n, c);
}

/* ---- attention ---- */

static void run_attention(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  Segments seg = s->seg;
  seg.device_offsets = t[3];
  device_ops(d)->attention_fwd(d, t[0], seg, s->attn, t[1], t[2]);
}
static void run_attention_bwd(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  Segments seg = s->seg;
  seg.device_offsets = t[5];
  device_ops(d)->attention_fwd(d, t[1], seg, s->attn, t[2], t[3]);
  device_ops(d)->attention_bwd(d, t[0], t[1], t[2], t[3], seg, s->attn, t[4]);
}

static void add_attention(List *l) {
  const KernelShape *s = l->s;
  double keys = (double)s->n * ((double)s->length + 1) / 2, width = (double)s->heads_out;
  Kernel *k = add(l, run_attention, 4 * keys * width, "attention");
  operand(k, s->act, FILL_NORMAL, 1, s->n, s->qkv);
  output(k, s->act, 1, s->n, s->heads_out);
  output(k, DT_F32, 1, s->n, s->attn.n_heads);
  operand(k, DT_I32, FILL_PLACES, 1, s->seg.n_seqs + 1, 0)->limit = -1;
  k = add(l, run_attention_bwd, 12 * keys * width, "attention, both passes");
  k->calls = s->config->n_layers;
  operand(k, s->act, FILL_NORMAL, 1, s->n, s->heads_out);
  operand(k, s->act, FILL_NORMAL, 1, s->n, s->qkv);
  output(k, s->act, 1, s->n, s->heads_out);
  output(k, DT_F32, 1, s->n, s->attn.n_heads);
  output(k, s->act, 1, s->n, s->qkv);
  operand(k, DT_I32, FILL_PLACES, 1, s->seg.n_seqs + 1, 0)->limit = -1;
}

/* ---- the loss, the optimizer, the wire ---- */

static void run_logprob(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->logprob_fwd(d, t[0], t[1], 1, t[2], t[3], t[4]);
}
static void run_logprob_bwd(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->logprob_bwd(d, t[0], t[1], 1, t[2], tensor_1d(NULL, DT_F32, 0), t[3],
                             tensor_1d(NULL, DT_F32, 0), t[4]);
}
static void run_sample(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  SampleParams p = {.temperature = 1, .top_p = 1};
  device_ops(d)->sample(d, t[0], p, t[1], tensor_1d(NULL, DT_U8, 0), t[2], t[3]);
}
static void run_adamw(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  AdamW p = {1e-4F, 0.9F, 0.95F, 1e-8F, 0.1F, 1, 10};
  Tensor out = s->act == DT_BF16 ? t[4] : tensor_1d(NULL, DT_F32, 0);
  device_ops(d)->adamw(d, p, t[0], t[1], t[2], t[3], out);
}
static void run_sum_squares(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->sum_squares(d, t[0]);
}
static void run_axpy(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->axpy(d, 1e-3F, t[0], t[1]);
}

static void add_loss(List *l) {
  const KernelShape *s = l->s;
  int64_t r = s->vocab_rows, v = s->config->vocab_size;
  Kernel *k = add(l, run_logprob, 0, "log-probabilities");
  k->calls = (double)s->n / (double)s->vocab_rows;
  operand(k, DT_F32, FILL_NORMAL, 1, r, v);
  operand(k, DT_I32, FILL_IDS, 1, r, 0)->limit = v;
  for (int i = 0; i < 3; i++) output(k, DT_F32, 1, r, 0);
  k = add(l, run_logprob_bwd, 0, "log-probabilities, backward");
  k->calls = (double)s->n / (double)s->vocab_rows;
  operand(k, DT_F32, FILL_NORMAL, 1, r, v);
  operand(k, DT_I32, FILL_IDS, 1, r, 0)->limit = v;
  operand(k, DT_F32, FILL_ONES, 1, r, 0);
  operand(k, DT_F32, FILL_ONES, 1, r, 0);
  output(k, s->act, 1, r, v);
  int64_t rows = r < 64 ? r : 64;
  k = add(l, run_sample, 0, "sample, %lld rows", (long long)rows);
  operand(k, DT_F32, FILL_NORMAL, 1, rows, v);
  operand(k, DT_F32, FILL_SMALL, 1, rows, 0);
  output(k, DT_I32, 1, rows, 0);
  output(k, DT_F32, 1, rows, 0);
}

static void add_flat(List *l) {
  const KernelShape *s = l->s;
  Kernel *k = add(l, run_adamw, 0, "adamw");
  double params = (double)model_config_params(s->config, HEAD_LM) / (double)s->flat;
  k->calls = params;
  operand(k, DT_F32, FILL_NORMAL, 2, s->flat, 0)->out = true;
  operand(k, DT_F32, FILL_NORMAL, 1, s->flat, 0);
  operand(k, DT_F32, FILL_SMALL, 2, s->flat, 0)->out = true;
  operand(k, DT_F32, FILL_ONES, 2, s->flat, 0)->out = true;
  if (s->act == DT_BF16) output(k, DT_BF16, 1, s->flat, 0);
  k = add(l, run_sum_squares, 0, "sum of squares");
  k->calls = params;
  operand(k, DT_F32, FILL_NORMAL, 1, s->flat, 0);
  k = add(l, run_axpy, 0, "axpy");
  operand(k, DT_F32, FILL_NORMAL, 1, s->flat, 0);
  operand(k, DT_F32, FILL_NORMAL, 2, s->flat, 0)->out = true;
}

static void run_bias_add(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->bias_add(d, t[0], t[1]);
}
static void run_bias_grad(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->bias_grad(d, t[0], t[1]);
}

static void add_biases(List *l) {
  const KernelShape *s = l->s;
  Kernel *k = add(l, run_bias_add, 0, "bias");
  operand(k, s->act, FILL_NORMAL, 2, s->n, s->config->hidden)->out = true;
  operand(k, s->act, FILL_NORMAL, 1, s->config->hidden, 0);
  k = add(l, run_bias_grad, 0, "bias, gradient");
  operand(k, s->act, FILL_NORMAL, 1, s->n, s->config->hidden);
  output(k, DT_F32, 2, s->config->hidden, 0);
}

/* ---- the wire ---- */

enum { WIRE_BLOCK = 256, WIRE_ROW = 2048 };

static WirePart wire_part(const KernelShape *s, Tensor x, Tensor scales, Tensor payload) {
  WireData data = {.scales = scales.data, .payload = payload.data, .n = 1};
  return (WirePart){
      .span = {.width = WIRE_ROW, .count = s->flat}, .x = x, .from = data, .to = data};
}
static void run_quantize(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  WireFormat f = {(WireKind)k->which, WIRE_BLOCK, DT_F32};
  WirePart part = wire_part(s, t[0], t[1], t[2]);
  device_ops(d)->quantize(d, f, 1, &part);
}
/* There and back, so that what comes back can be compared. */
static void run_dequantize(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  WireFormat f = {(WireKind)k->which, WIRE_BLOCK, DT_F32};
  run_quantize(k, s, d, t);
  WirePart part = wire_part(s, t[3], t[1], t[2]);
  device_ops(d)->dequantize(d, f, 1, &part, false);
}

static void add_wire(List *l) {
  static const struct {
    WireKind kind;
    const char *name;
    int bits;
  } formats[] = {{WIRE_INT8, "int8", 8}, {WIRE_INT4, "int4", 4}, {WIRE_FP8, "fp8", 8}};
  const KernelShape *s = l->s;
  for (int i = 0; i < 3; i++)
    for (int back = 0; back < 2; back++) {
      Kernel *k = add(l, back ? run_dequantize : run_quantize, 0, "to %s%s", formats[i].name,
                      back ? " and back" : "");
      double passes = back ? 2 : 1;
      k->which = (int)formats[i].kind;
      operand(k, DT_F32, FILL_NORMAL, 1, s->flat, 0);
      output(k, DT_F32, passes, s->flat / WIRE_BLOCK, 0);
      operand(k, DT_I32, FILL_ZERO, passes, s->flat * formats[i].bits / 32, 0);
      if (back) output(k, DT_F32, 1, s->flat, 0);
    }
}

/* ---- the cache of a rollout: 64 sequences, or one, of as many tokens as in training ---- */

enum { PAGE = 16 };

static void run_kv_write(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  device_ops(d)->kv_write(d, t[0], t[1], s->attn, t[2], t[3]);
}
static void run_decode(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  device_ops(d)->attention_decode(d, t[0], t[1], t[2], s->attn, t[3], t[4], t[5]);
}

/* Pages of random numbers: how a back end lays them out is its own affair, so nothing is compared.
 */
static void push_pages(Kernel *k, const KernelShape *s, double passes, int64_t pages) {
  for (int i = 0; i < 2; i++) {
    Operand *o = operand(k, s->act, FILL_NORMAL, 0, pages, PAGE);
    *o = (Operand){.type = s->act,
                   .ndim = 4,
                   .dim = {pages, PAGE, s->attn.n_kv_heads, s->attn.head_dim},
                   .fill = FILL_NORMAL};
    k->bytes += passes * operand_bytes(o);
  }
}

static void add_cache(List *l) {
  const KernelShape *s = l->s;
  int64_t pages = (s->n + PAGE - 1) / PAGE;
  Kernel *k = add(l, run_kv_write, 0, "write to the cache");
  double cached = 2.0 * s->attn.n_kv_heads * s->attn.head_dim / (double)s->qkv;
  operand(k, s->act, FILL_NORMAL, 2 * cached, s->n, s->qkv);
  operand(k, DT_I32, FILL_PLACES, 1, s->n, 0)->limit = s->n;
  push_pages(k, s, 0, pages);
  for (int many = 1; many >= 0; many--) {
    int64_t rows = many ? 64 : 1, width = s->length / PAGE > 0 ? s->length / PAGE : 1;
    k = add(l, run_decode, 0, "decode, %lld x %lld tokens", (long long)rows,
            (long long)(width * PAGE));
    operand(k, s->act, FILL_NORMAL, 1, rows, s->qkv);
    operand(k, DT_I32, FILL_PLACES, 1, rows, width)->limit = rows * width;
    operand(k, DT_I32, FILL_IDS, 1, rows, 0)->limit = -2; /* whole pages */
    push_pages(k, s, 1, rows * width);
    operand(k, s->act, FILL_ZERO, 1, rows, s->heads_out);
  }
}

int kernels_list(const KernelShape *s, Kernel *k) {
  const ModelConfig *c = s->config;
  List l = {s, k, 0};
  int64_t width = c->embed_dim ? c->embed_dim : c->hidden;
  double layers = c->n_layers, chunks = (double)s->n / (double)s->vocab_rows;
  const char *up = c->mlp == MLP_SWIGLU ? "gate and up" : "up";
  add_matrix(&l, "q, k, v", s->qkv, c->hidden, s->n, s->act, layers);
  add_matrix(&l, "attention's output", c->hidden, s->heads_out, s->n, s->act, layers);
  add_matrix(&l, up, s->up, c->hidden, s->n, s->act, layers);
  add_matrix(&l, "down", c->hidden, c->ffn, s->n, s->act, layers);
  add_matrix(&l, "head", c->vocab_size, width, s->vocab_rows, DT_F32, chunks);
  add_attention(&l);
  add_rows(&l);
  add_loss(&l);
  add_flat(&l);
  add_biases(&l);
  add_wire(&l);
  add_cache(&l);
  return l.n;
}
