/* The kernels of the loss, of the optimizer, of biases, of deltas, and of a rollout's cache. */
#include "orchestrator/cli_bench_kernels.h"

/* ---- the loss, the optimizer ---- */

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
  device_ops(d)->sample(d, t[0], p, t[1], tensor_1d(NULL, DT_U8, 0), (SeenTokens){0},
                        (KeptTokens){0}, t[2], t[3]);
}
static void run_adamw(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k;
  AdamW p = {1e-4F, 0.9F, 0.95F, 1e-8F, 0.1F, 1, 10};
  bool copies = s->act == DT_BF16, host = device_kind(d) == DEVICE_CPU;
  Tensor none = tensor_1d(NULL, DT_F32, 0);
  device_ops(d)->adamw(d, p, t[0], t[1], t[2], t[3], copies && !host ? t[4] : none);
  if (copies && host) device_copy(d, t[4].data, t[0].data, tensor_bytes(t[0]));
}
static void run_sum_squares(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->sum_squares(d, t[0]);
}
static void run_axpy(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->axpy(d, 1e-3F, t[0], t[1]);
}

void kernels_add_loss(KernelList *l) {
  const KernelShape *s = l->s;
  int64_t r = s->vocab_rows, v = s->config->vocab_size;
  Kernel *k = kernel_add(l, run_logprob, 0, "log-probabilities");
  k->calls = (double)s->n / (double)s->vocab_rows;
  kernel_operand(k, DT_F32, FILL_NORMAL, 1, r, v);
  kernel_operand(k, DT_I32, FILL_IDS, 1, r, 0)->limit = v;
  for (int i = 0; i < 3; i++) kernel_output(k, DT_F32, 1, r, 0);
  k = kernel_add(l, run_logprob_bwd, 0, "log-probabilities, backward");
  k->calls = (double)s->n / (double)s->vocab_rows;
  kernel_operand(k, DT_F32, FILL_NORMAL, 1, r, v);
  kernel_operand(k, DT_I32, FILL_IDS, 1, r, 0)->limit = v;
  kernel_operand(k, DT_F32, FILL_ONES, 1, r, 0);
  kernel_operand(k, DT_F32, FILL_ONES, 1, r, 0);
  kernel_output(k, s->act, 1, r, v);
  int64_t rows = r < 64 ? r : 64;
  k = kernel_add(l, run_sample, 0, "sample, %lld rows", (long long)rows);
  kernel_operand(k, DT_F32, FILL_NORMAL, 1, rows, v);
  kernel_operand(k, DT_F32, FILL_SMALL, 1, rows, 0);
  kernel_output(k, DT_I32, 1, rows, 0);
  kernel_output(k, DT_F32, 1, rows, 0);
}

void kernels_add_flat(KernelList *l) {
  const KernelShape *s = l->s;
  Kernel *k = kernel_add(l, run_adamw, 0, "adamw");
  double params = (double)model_config_params(s->config, HEAD_LM) / (double)s->flat;
  k->calls = params;
  kernel_operand(k, DT_F32, FILL_NORMAL, 2, s->flat, 0)->out = true;
  kernel_operand(k, DT_F32, FILL_NORMAL, 1, s->flat, 0);
  kernel_operand(k, DT_F32, FILL_SMALL, 2, s->flat, 0)->out = true;
  kernel_operand(k, DT_F32, FILL_ONES, 2, s->flat, 0)->out = true;
  if (s->act == DT_BF16) kernel_output(k, DT_BF16, 1, s->flat, 0);
  k = kernel_add(l, run_sum_squares, 0, "sum of squares");
  k->calls = params;
  kernel_operand(k, DT_F32, FILL_NORMAL, 1, s->flat, 0);
  k = kernel_add(l, run_axpy, 0, "axpy");
  kernel_operand(k, DT_F32, FILL_NORMAL, 1, s->flat, 0);
  kernel_operand(k, DT_F32, FILL_NORMAL, 2, s->flat, 0)->out = true;
}

static void run_bias_add(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->bias_add(d, t[0], t[1]);
}
static void run_bias_grad(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->bias_grad(d, t[0], t[1]);
}

void kernels_add_biases(KernelList *l) {
  const KernelShape *s = l->s;
  Kernel *k = kernel_add(l, run_bias_add, 0, "bias");
  kernel_operand(k, s->act, FILL_NORMAL, 2, s->n, s->config->hidden)->out = true;
  kernel_operand(k, s->act, FILL_NORMAL, 1, s->config->hidden, 0);
  k = kernel_add(l, run_bias_grad, 0, "bias, gradient");
  kernel_operand(k, s->act, FILL_NORMAL, 1, s->n, s->config->hidden);
  kernel_output(k, DT_F32, 2, s->config->hidden, 0);
}

/* ---- deltas: one weight in 50 changes ---- */

/* There and back again, so that every call finds as many changes. */
static void run_deltas(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  DeltaPart there = {t[0], t[1], t[3].data, tensor_bytes(t[3])}, back = there;
  back.now = t[2];
  device_ops(d)->delta_encode(d, 1, &there, t[4].data);
  device_ops(d)->delta_encode(d, 1, &back, t[4].data);
}
static void run_checksum(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  (void)k, (void)s;
  device_ops(d)->checksum(d, 1, &t[0], t[1].data);
}

/* Bytes read; what is written is little. */
void kernels_add_deltas(KernelList *l) {
  const KernelShape *s = l->s;
  Kernel *k = kernel_add(l, run_deltas, 0, "deltas from float32 and from bfloat16");
  kernel_operand(k, DT_F32, FILL_CHANGED, 1, s->flat, 0);
  kernel_operand(k, DT_BF16, FILL_SENT, 2, s->flat, 0)->bits = true;
  kernel_operand(k, DT_BF16, FILL_SENT, 1, s->flat, 0)->bits = true;
  kernel_output(k, DT_I32, 0, s->flat / 2, 0);
  kernel_output(k, DT_I32, 0, 4, 0);
  k = kernel_add(l, run_checksum, 0, "checksum");
  kernel_operand(k, DT_BF16, FILL_SENT, 1, s->flat, 0)->bits = true;
  kernel_output(k, DT_I32, 0, 2, 0);
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
    Operand *o = kernel_operand(k, s->act, FILL_NORMAL, 0, pages, PAGE);
    *o = (Operand){.type = s->act,
                   .ndim = 4,
                   .dim = {pages, PAGE, s->attn.n_kv_heads, s->attn.head_dim},
                   .fill = FILL_NORMAL};
    k->bytes += passes * operand_bytes(o);
  }
}

void kernels_add_cache(KernelList *l) {
  const KernelShape *s = l->s;
  int64_t pages = (s->n + PAGE - 1) / PAGE;
  Kernel *k = kernel_add(l, run_kv_write, 0, "write to the cache");
  double cached = 2.0 * s->attn.n_kv_heads * s->attn.head_dim / (double)s->qkv;
  kernel_operand(k, s->act, FILL_NORMAL, 2 * cached, s->n, s->qkv);
  kernel_operand(k, DT_I32, FILL_PLACES, 1, s->n, 0)->limit = s->n;
  push_pages(k, s, 0, pages);
  for (int many = 1; many >= 0; many--) {
    int64_t rows = many ? 64 : 1, width = s->length / PAGE > 0 ? s->length / PAGE : 1;
    int64_t tokens = width * PAGE;
    k = kernel_add(l, run_decode, 0, "decode, %lld x %lld tokens", (long long)rows,
                   (long long)tokens);
    kernel_operand(k, s->act, FILL_NORMAL, 1, rows, s->qkv);
    kernel_operand(k, DT_I32, FILL_PLACES, 1, rows, width)->limit = rows * width;
    kernel_operand(k, DT_I32, FILL_IDS, 1, rows, 0)->limit = -2; /* whole pages */
    push_pages(k, s, 1, rows * width);
    kernel_operand(k, s->act, FILL_ZERO, 1, rows, s->heads_out);
  }
}
