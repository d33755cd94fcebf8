/* The kernels of a training step and of a rollout, with a model's shapes. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "orchestrator/cli_bench_kernels.h"

Kernel *kernel_add(KernelList *l, KernelRun run, double flops, const char *fmt, ...) {
  require(l->n < MOST_KERNELS);
  Kernel *k = &l->k[l->n++];
  *k = (Kernel){.run = run, .flops = flops};
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(k->name, sizeof k->name, fmt, ap);
  va_end(ap);
  return k;
}

double operand_bytes(const Operand *o) {
  double n = (double)dtype_size(o->type);
  for (int i = 0; i < o->ndim; i++) n *= (double)o->dim[i];
  return n;
}

Operand *kernel_operand(Kernel *k, DType type, Fill fill, double passes, int64_t rows,
                        int64_t cols) {
  require(k->n_operands < MOST_OPERANDS);
  Operand *o = &k->operand[k->n_operands++];
  *o = (Operand){
      .type = type, .ndim = cols ? 2 : 1, .dim = {rows, cols ? cols : 1, 1, 1}, .fill = fill};
  k->bytes += passes * operand_bytes(o);
  return o;
}

void kernel_output(Kernel *k, DType type, double passes, int64_t rows, int64_t cols) {
  kernel_operand(k, type, FILL_ZERO, passes, rows, cols)->out = true;
}

/* ---- matrix products ---- */

static void run_gemm(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)s;
  device_ops(d)->gemm(d, (GemmKind)k->which, 1, t[0], t[1], 0, t[2]);
}

/* y = x W^T, dx = dy W, dW = dy^T x of a matrix [out, in]; y of the head and dW are F32. */
static void add_matrix(KernelList *l, const char *name, int64_t out, int64_t in, int64_t rows,
                       DType y, double calls) {
  DType act = l->s->act;
  double flops = 2.0 * (double)rows * (double)out * (double)in;
  Kernel *k = kernel_add(l, run_gemm, flops, "%s", name);
  k->which = GEMM_NT;
  k->calls = calls;
  kernel_operand(k, act, FILL_NORMAL, 1, rows, in);
  kernel_operand(k, act, FILL_WEIGHTS, 1, out, in);
  kernel_output(k, y, 1, rows, out);
  k = kernel_add(l, run_gemm, flops, "%s, input gradient", name);
  k->which = GEMM_NN;
  k->calls = calls;
  kernel_operand(k, act, FILL_NORMAL, 1, rows, out);
  kernel_operand(k, act, FILL_WEIGHTS, 1, out, in);
  kernel_output(k, act, 1, rows, in);
  k = kernel_add(l, run_gemm, flops, "%s, weight gradient", name);
  k->which = GEMM_TN;
  k->calls = calls;
  kernel_operand(k, act, FILL_NORMAL, 1, rows, out);
  kernel_operand(k, act, FILL_NORMAL, 1, rows, in);
  kernel_output(k, DT_F32, 1, out, in);
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
    device_ops(d)->swiglu_bwd(d, t[0], t[1], t[2], (Tensor){0});
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

static void add_norms(KernelList *l) {
  const KernelShape *s = l->s;
  int64_t n = s->n, c = s->config->hidden;
  bool mean = s->config->norm == NORM_LAYER;
  Kernel *k = kernel_add(l, run_norm, 0, "norm with residual");
  k->calls = 2.0 * l->s->config->n_layers + 1;
  kernel_operand(k, s->act, FILL_NORMAL, 2, n, c)->out = true;
  kernel_operand(k, s->act, FILL_SMALL, 1, n, c);
  kernel_operand(k, s->act, FILL_ONES, 1, c, 0);
  kernel_output(k, s->act, 1, n, c);
  kernel_output(k, DT_F32, 1, n, 0);
  if (mean) kernel_operand(k, s->act, FILL_SMALL, 1, c, 0);
  if (mean) kernel_output(k, DT_F32, 1, n, 0);
  k = kernel_add(l, run_norm_bwd, 0, "norm, backward");
  k->calls = 2.0 * l->s->config->n_layers + 1;
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, c);
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, c);
  kernel_operand(k, s->act, FILL_ONES, 1, c, 0);
  kernel_operand(k, DT_F32, FILL_ONES, 1, n, 0);
  kernel_operand(k, s->act, FILL_NORMAL, 2, n, c)->out = true;
  kernel_output(k, DT_F32, 2, c, 0);
  if (mean) kernel_operand(k, DT_F32, FILL_ZERO, 1, n, 0);
  if (mean) kernel_output(k, DT_F32, 2, c, 0);
}

static void add_heads(KernelList *l) {
  const KernelShape *s = l->s;
  const ModelConfig *c = s->config;
  int64_t n = s->n, rotary = (c->rotary_dim ? c->rotary_dim : c->head_dim) / 2;
  if (c->qk_norm) {
    Kernel *k = kernel_add(l, run_qk_norm, 0, "norms of heads");
    k->calls = c->n_layers;
    kernel_operand(k, s->act, FILL_NORMAL, 1, n, s->qkv);
    kernel_operand(k, s->act, FILL_ONES, 1, c->head_dim, 0);
    kernel_operand(k, s->act, FILL_ONES, 1, c->head_dim, 0);
    kernel_output(k, s->act, 1, n, s->qkv);
    kernel_output(k, DT_F32, 1, n, c->n_heads + c->n_kv_heads);
  }
  if (c->rope == ROPE_NONE) return;
  Kernel *k = kernel_add(l, run_rope, 0, "rope");
  k->calls = 2.0 * c->n_layers;
  double turned = (double)(c->n_heads + c->n_kv_heads) * c->head_dim / (double)s->qkv;
  kernel_operand(k, s->act, FILL_NORMAL, 2 * turned, n, s->qkv)->out = true;
  kernel_operand(k, DT_I32, FILL_PLACES, 1, n, 0);
  kernel_operand(k, DT_F32, FILL_ONES, 1, s->length, rotary);
  kernel_operand(k, DT_F32, FILL_SMALL, 1, s->length, rotary);
}

static void add_rows(KernelList *l) {
  const KernelShape *s = l->s;
  int64_t n = s->n, c = s->config->hidden, ffn = s->config->ffn, v = s->config->vocab_size;
  Kernel *k = kernel_add(l, run_embedding, 0, "embedding");
  k->calls = 1;
  kernel_operand(k, DT_I32, FILL_IDS, 1, n, 0)->limit = v;
  kernel_operand(k, s->act, FILL_NORMAL, 0, v, c);
  kernel_output(k, s->act, 2, n, c);
  k = kernel_add(l, run_embedding_bwd, 0, "embedding, gradient");
  k->calls = 1;
  kernel_operand(k, DT_I32, FILL_IDS, 1, n, 0)->limit = v;
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, c);
  kernel_output(k, DT_F32, 0, v, c);
  double rows = -(double)v * expm1((double)n * log1p(-1 / (double)v)); /* that occur, on average */
  k->bytes += 2.0 * sizeof(float) * rows * (double)c;
  add_norms(l);
  add_heads(l);
  k = kernel_add(l, run_activation, 0, s->config->mlp == MLP_SWIGLU ? "swiglu" : "activation");
  k->calls = s->config->n_layers;
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, s->up);
  kernel_output(k, s->act, 1, n, ffn);
  k = kernel_add(l, run_activation_bwd, 0, "%s, backward", k->name);
  k->calls = s->config->n_layers;
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, ffn);
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, s->up);
  kernel_output(k, s->act, 1, n, s->up);
  k = kernel_add(l, run_gather, 0, "gather rows");
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, c);
  kernel_operand(k, DT_I32, FILL_IDS, 1, n, 0)->limit = n;
  kernel_output(k, s->act, 1, n, c);
  k = kernel_add(l, run_scatter, 0, "scatter rows");
  kernel_operand(k, s->act, FILL_NORMAL, 1, n, c);
  kernel_operand(k, DT_I32, FILL_PLACES, 1, n, 0)->limit = n;
  kernel_output(k, s->act, 2, n, c);
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
  device_ops(d)->attention_bwd(d, t[0], t[1], t[2], t[3], seg, s->attn, (Rotation){0}, t[4]);
}

static void add_attention(KernelList *l) {
  const KernelShape *s = l->s;
  double keys = (double)s->n * ((double)s->length + 1) / 2, width = (double)s->heads_out;
  Kernel *k = kernel_add(l, run_attention, 4 * keys * width, "attention");
  kernel_operand(k, s->act, FILL_NORMAL, 1, s->n, s->qkv);
  kernel_output(k, s->act, 1, s->n, s->heads_out);
  kernel_output(k, DT_F32, 1, s->n, s->attn.n_heads);
  kernel_operand(k, DT_I32, FILL_PLACES, 1, s->seg.n_seqs + 1, 0)->limit = -1;
  k = kernel_add(l, run_attention_bwd, 12 * keys * width, "attention, both passes");
  k->calls = s->config->n_layers;
  kernel_operand(k, s->act, FILL_NORMAL, 1, s->n, s->heads_out);
  kernel_operand(k, s->act, FILL_NORMAL, 1, s->n, s->qkv);
  kernel_output(k, s->act, 1, s->n, s->heads_out);
  kernel_output(k, DT_F32, 1, s->n, s->attn.n_heads);
  kernel_output(k, s->act, 1, s->n, s->qkv);
  kernel_operand(k, DT_I32, FILL_PLACES, 1, s->seg.n_seqs + 1, 0)->limit = -1;
}

int kernels_list(const KernelShape *s, Kernel *k) {
  const ModelConfig *c = s->config;
  KernelList l = {s, k, 0};
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
  kernels_add_loss(&l);
  kernels_add_flat(&l);
  kernels_add_biases(&l);
  kernels_add_wire(&l);
  kernels_add_deltas(&l);
  kernels_add_cache(&l);
  return l.n;
}
