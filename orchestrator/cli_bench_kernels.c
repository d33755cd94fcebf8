/* rlhf bench kernels: every kernel of a training step with a model's shapes: time, rate, share of
 * what bounds it, and on a small slice the difference from the CPU's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "orchestrator/cli_bench_kernels.h"

enum { SLICE_SEQS = 2, SLICE_LENGTH = 48, SLICE_FLAT = 1 << 16, FLAT = 1 << 27, NORMALS = 65521 };

typedef struct Rig {
  Device *device, *cpu;
  DeviceRates rates;
  float *normal; /* [NORMALS] */
} Rig;

/* ---- operands ---- */

static KernelShape shape_of(const ModelConfig *c, DType act, int n_seqs, int64_t length,
                            int64_t flat, int32_t *offsets) {
  int64_t n = n_seqs * length, most_rows = 8192;
  for (int i = 0; i <= n_seqs; i++) offsets[i] = (int32_t)(i * length);
  double scale = 1 / sqrt((double)c->head_dim);
  return (KernelShape){.config = c,
                       .act = act,
                       .n = n,
                       .length = length,
                       .vocab_rows = n < most_rows ? n : most_rows,
                       .flat = flat,
                       .attn = {c->n_heads, c->n_kv_heads, c->head_dim, (float)scale, c->window},
                       .qkv = (int64_t)(c->n_heads + 2 * c->n_kv_heads) * c->head_dim,
                       .heads_out = (int64_t)c->n_heads * c->head_dim,
                       .up = (int64_t)c->ffn * (c->mlp == MLP_SWIGLU ? 2 : 1),
                       .seg = {.n_seqs = n_seqs, .offsets = offsets}};
}

static int32_t id_of(const Operand *o, const KernelShape *s, int64_t i) {
  if (o->limit == -2) return (int32_t)(s->length < 16 ? s->length : s->length / 16 * 16);
  if (o->limit < 0) return s->seg.offsets[i];
  if (o->fill == FILL_PLACES) return (int32_t)(o->limit ? i : i % s->length);
  uint32_t bits = rng_block(7, 1, (uint64_t)i).v[0];
  if (o->fill == FILL_CODES) return (int32_t)((bits & 0xf7f7f7f7U) | 0x11111111U);
  return (int32_t)(bits % (uint64_t)o->limit);
}

static float number_of(const Rig *r, const Operand *o, int64_t i, int place) {
  if (o->fill == FILL_SENT || o->fill == FILL_CHANGED) {
    bool changed = o->fill == FILL_CHANGED && rng_block(11, 1, (uint64_t)i).v[0] % 50 == 0;
    return r->normal[i % NORMALS] * (changed ? 0.0201F : 0.02F); /* about a step of BF16 */
  }
  float normal = r->normal[(i + 7919 * place) % NORMALS];
  if (o->fill == FILL_NORMAL) return normal;
  if (o->fill == FILL_SMALL) return 0.02F * normal * normal + 0.001F; /* positive: uniforms, too */
  if (o->fill == FILL_WEIGHTS) return 0.02F * normal;
  return o->fill == FILL_ONES ? 1.0F : 0.0F;
}

/* The same numbers on every device; BF16 ones are rounded everywhere, so that the CPU computes from
 * what the GPU sees. */
static Tensor operand_make(const Rig *r, Device *d, const Operand *o, const KernelShape *s,
                           int place) {
  Tensor t = {.dtype = o->type, .ndim = o->ndim, .dim = {o->dim[0], o->dim[1], 1, 1}};
  if (o->ndim > 2) memcpy(t.dim, o->dim, sizeof t.dim);
  bool rounded = o->type == DT_BF16, host = device_kind(d) == DEVICE_CPU && !o->bits;
  if (rounded && host) t.dtype = DT_F32;
  int64_t n = tensor_numel(t);
  t.data = device_alloc(d, tensor_bytes(t) + 64);
  float *x = mem_alloc((size_t)n, sizeof *x);
  int32_t *ids = (int32_t *)x;
#pragma omp parallel for
  for (int64_t i = 0; i < n; i++) {
    if (o->type == DT_I32)
      ids[i] = o->fill == FILL_ZERO ? 0 : id_of(o, s, i);
    else
      x[i] = number_of(r, o, i, place);
  }
  void *typed = x;
  if (rounded) {
    typed = mem_alloc((size_t)n, 2);
    if (convert_from_f32(x, typed, DT_BF16, (size_t)n)) die("operands are F32, BF16 or I32");
    if (host && convert_to_f32(typed, DT_BF16, x, (size_t)n)) die("operands are F32, BF16 or I32");
  }
  device_upload(d, t.data, rounded && host ? x : typed, tensor_bytes(t));
  if (typed != x) free(typed);
  free(x);
  return t;
}

static void operands_make(const Rig *r, Device *d, const Kernel *k, const KernelShape *s,
                          Tensor *t) {
  memset(t, 0, MOST_OPERANDS * sizeof *t);
  for (int i = 0; i < k->n_operands; i++) t[i] = operand_make(r, d, &k->operand[i], s, i);
}

static void operands_free(Device *d, const Kernel *k, Tensor *t) {
  for (int i = 0; i < k->n_operands; i++) device_free(d, t[i].data);
}

static float *as_floats(Device *d, Tensor t) {
  size_t n = (size_t)tensor_numel(t);
  void *raw = mem_alloc(n, dtype_size(t.dtype));
  float *x = mem_alloc(n, sizeof *x);
  device_download(d, raw, t.data, tensor_bytes(t));
  if (t.dtype == DT_I32)
    for (size_t i = 0; i < n; i++) x[i] = (float)((int32_t *)raw)[i];
  else if (convert_to_f32(raw, t.dtype, x, n))
    die("operands are F32, BF16 or I32");
  free(raw);
  return x;
}

/* ---- what is measured ---- */

/* Largest difference over the largest magnitude, of all outputs. */
static double kernel_error(const Rig *r, const Kernel *k, const KernelShape *s) {
  Tensor own[MOST_OPERANDS], reference[MOST_OPERANDS];
  double worst = 0;
  operands_make(r, r->device, k, s, own);
  operands_make(r, r->cpu, k, s, reference);
  k->run(k, s, r->device, own);
  k->run(k, s, r->cpu, reference);
  for (int i = 0; i < k->n_operands; i++) {
    if (!k->operand[i].out) continue;
    float *got = as_floats(r->device, own[i]), *want = as_floats(r->cpu, reference[i]);
    double most = 0, difference = 0;
    for (int64_t e = 0; e < tensor_numel(own[i]); e++) {
      double x = fabs((double)got[e] - (double)want[e]);
      if (!(x <= difference)) difference = x;
      if (fabs((double)want[e]) > most) most = fabs((double)want[e]);
    }
    if (most > 0) difference /= most;
    if (!(difference <= worst)) worst = difference;
    free(got);
    free(want);
  }
  operands_free(r->device, k, own);
  operands_free(r->cpu, k, reference);
  return worst;
}

/* Seconds of a call: several are queued and waited for together; the best of three times. */
static double kernel_seconds(const Rig *r, const Kernel *k, const KernelShape *s) {
  Tensor t[MOST_OPERANDS];
  operands_make(r, r->device, k, s, t);
  double once = 0, best = INFINITY;
  for (int i = 0; i < 2; i++) {
    double start = clock_seconds();
    k->run(k, s, r->device, t);
    device_sync(r->device);
    once = clock_seconds() - start;
  }
  int calls = once > 0.02 ? 1 : (int)(0.02 / once) + 1;
  if (calls > 200) calls = 200;
  for (int i = 0; i < 3; i++) {
    double start = clock_seconds();
    for (int c = 0; c < calls; c++) k->run(k, s, r->device, t);
    device_sync(r->device);
    double each = (clock_seconds() - start) / calls;
    if (each < best) best = each;
  }
  operands_free(r->device, k, t);
  return best;
}

static void print_kernel(const Rig *r, const Kernel *k, double seconds, double error) {
  double moved = k->bytes / r->rates.copy_bytes, computed = k->flops / r->rates.gemm_flops;
  bool arithmetic = computed > moved;
  char difference[16] = "-";
  bool compared = false;
  for (int i = 0; i < k->n_operands; i++) compared = compared || k->operand[i].out;
  if (compared) snprintf(difference, sizeof difference, "%.1e", error);
  printf("%-36s %10.1f %8.2f %9.1f %-7s %5.1f %% of %-4s %9s\n", k->name, seconds * 1e6,
         k->calls * seconds * 1e3,
         arithmetic ? k->flops / seconds / 1e12 : k->bytes / seconds / 1e9,
         arithmetic ? "TFLOP/s" : "GB/s", 100 * (arithmetic ? computed : moved) / seconds,
         arithmetic ? "GEMM" : "copy", difference);
}

static void run_all(const Rig *r, const KernelShape *whole, const KernelShape *slice) {
  Kernel *k = mem_alloc((size_t)2 * MOST_KERNELS, sizeof *k), *small = k + MOST_KERNELS;
  int n = kernels_list(whole, k);
  require(kernels_list(slice, small) == n);
  double step = 0;
  printf("\n%-36s %10s %8s %17s %15s %9s\n", "kernel", "us", "ms/step", "rate", "share of bound",
         "error");
  for (int i = 0; i < n; i++) {
    double seconds = kernel_seconds(r, &k[i], whole);
    step += k[i].calls * seconds;
    print_kernel(r, &k[i], seconds, kernel_error(r, &small[i], slice));
    fflush(stdout);
  }
  printf("%-36s %10s %8.2f\n", "a training step, one by one", "", step * 1e3);
  printf(
      "\nms/step: of all calls in a training step. Bound: the larger of bytes over the rate of a "
      "copy and FLOPs over that of a large "
      "product. "
      "error: of the largest\noutput, against the CPU from the same numbers, on %d x %d tokens.\n",
      SLICE_SEQS, SLICE_LENGTH);
  free(k);
}

static int measure(const BenchRig *rig, const Args *a, Error *err) {
  ModelConfig c;
  const char *name;
  int n_seqs = (int)args_int(a, "--seqs");
  int64_t length = args_int(a, "--length");
  if (bench_model(args_text(a, "--model"), &name, &c, err)) return -1;
  if (length > c.max_positions) length = c.max_positions;
  Rig r = {.device = rig->device, .cpu = device_open(DEVICE_CPU, 0, err)};
  if (!r.cpu) return -1;
  r.rates = device_measure(r.device);
  r.normal = mem_alloc(NORMALS, sizeof *r.normal);
  for (uint64_t i = 0; i < NORMALS; i++) r.normal[i] = rng_normal(3, 0, i);
  printf("%s, %d x %lld tokens, %s; %s: GEMM %.1f TFLOP/s, copy %.1f GB/s\n", name, n_seqs,
         (long long)length, dtype_name(rig->compute), device_describe(r.device),
         r.rates.gemm_flops / 1e12, r.rates.copy_bytes / 1e9);
  int32_t *offsets = mem_alloc((size_t)n_seqs + 1, sizeof *offsets), slice_offsets[SLICE_SEQS + 1];
  bool cpu = device_kind(r.device) == DEVICE_CPU;
  KernelShape whole = shape_of(&c, rig->compute, n_seqs, length, cpu ? FLAT / 16 : FLAT, offsets);
  int64_t slice_length = length < SLICE_LENGTH ? length : SLICE_LENGTH;
  KernelShape slice =
      shape_of(&c, rig->compute, SLICE_SEQS, slice_length, SLICE_FLAT, slice_offsets);
  run_all(&r, &whole, &slice);
  free(offsets);
  free(r.normal);
  device_close(r.cpu);
  return 0;
}

CliResult bench_kernels(const Args *a, Error *err) {
  BenchRig rig;
  CliResult rc = bench_rig_open(&rig, a, err);
  if (rc == CLI_OK) {
    int one = rig.grid->rank == 0 ? measure(&rig, a, err) : 0;
    if (comm_agree(rig.grid->all, one, err)) rc = CLI_FAILED;
  }
  bench_rig_close(&rig);
  return rc;
}
