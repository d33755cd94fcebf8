/* The kernels of what travels: to codes and back, and sums of what ranks sent. */
#include "orchestrator/cli_bench_kernels.h"

enum { WIRE_BLOCK = 256, WIRE_ROW = 2048, RANKS = 4 };

static const struct {
  WireKind kind;
  const char *name;
  int bits;
} formats[] = {{WIRE_INT8, "int8", 8}, {WIRE_INT4, "int4", 4}, {WIRE_FP8, "fp8", 8}};

static WireFormat format_of(const Kernel *k) {
  return (WireFormat){(WireKind)k->which, WIRE_BLOCK, DT_F32};
}
static WireSpan span_of(int64_t n) { return (WireSpan){.width = WIRE_ROW, .count = n}; }
static WireData data_of(const Tensor *scales, const Tensor *payload) {
  return (WireData){.scales = scales->data, .payload = payload->data, .n = 1};
}

/* ---- calls ---- */

/* x, scales, codes, and with error feedback the errors. */
static void run_quantize(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  WirePart part = {.span = span_of(s->flat), .x = t[0], .to = data_of(&t[1], &t[2])};
  if (k->n_operands > 3) part.e = (WireFeedback){t[3], 0.8F};
  device_ops(d)->quantize(d, format_of(k), 1, &part);
}
static void run_dequantize(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  WirePart part = {.span = span_of(s->flat), .x = t[2], .from = data_of(&t[0], &t[1])};
  device_ops(d)->dequantize(d, format_of(k), 1, &part, false);
}
/* The ranks' scales and codes, then their sum's: a rank's scales lie as far from the next one's as
 * its codes do. */
static void run_sum(const Kernel *k, const KernelShape *s, Device *d, const Tensor *t) {
  WireData from = data_of(&t[0], &t[1]), to = data_of(&t[2], &t[3]);
  from.n = RANKS;
  from.stride = tensor_bytes(t[1]) / RANKS;
  WirePart part = {.span = span_of(s->flat / RANKS), .from = from, .to = to};
  device_ops(d)->requantize(d, format_of(k), format_of(k), 1, &part);
}

/* ---- the list ---- */

static void add_codes(KernelList *l, int i, DType type) {
  const char *with = type == DT_BF16 ? ", bfloat16" : ", float32";
  int64_t n = l->s->flat, blocks = n / WIRE_BLOCK, words = n * formats[i].bits / 32;
  for (int fed = 0; fed < 2; fed++) {
    Kernel *k = kernel_add(l, run_quantize, 0, "to %s%s%s", formats[i].name, with,
                           fed ? ", with errors" : "");
    k->which = (int)formats[i].kind;
    kernel_operand(k, type, FILL_NORMAL, 1, n, 0);
    kernel_output(k, DT_F32, 1, blocks, 0);
    kernel_output(k, DT_I32, 1, words, 0);
    if (!fed) continue;
    Operand *errors = kernel_operand(k, DT_BF16, FILL_WEIGHTS, 2, n, 0);
    errors->bits = errors->out = true;
  }
  Kernel *k = kernel_add(l, run_dequantize, 0, "from %s%s", formats[i].name, with);
  k->which = (int)formats[i].kind;
  kernel_operand(k, DT_F32, FILL_SMALL, 1, blocks, 0);
  kernel_operand(k, DT_I32, FILL_CODES, 1, words, 0);
  kernel_output(k, type, 1, n, 0);
}

static void add_sum(KernelList *l, int i) {
  int64_t n = l->s->flat / RANKS, blocks = n / WIRE_BLOCK, words = n * formats[i].bits / 32;
  Kernel *k = kernel_add(l, run_sum, 0, "sum of %d, %s", RANKS, formats[i].name);
  k->which = (int)formats[i].kind;
  kernel_operand(k, DT_F32, FILL_SMALL, (double)blocks / (double)words, RANKS * words, 0);
  kernel_operand(k, DT_I32, FILL_CODES, 1, RANKS * words, 0);
  kernel_output(k, DT_F32, 1, blocks, 0);
  kernel_output(k, DT_I32, 1, words, 0);
}

static void add_plain_sum(KernelList *l, DType type) {
  int64_t n = l->s->flat / RANKS;
  bool half = type == DT_BF16;
  Kernel *k = kernel_add(l, run_sum, 0, "sum of %d, %s", RANKS, half ? "bfloat16" : "float32");
  k->which = half ? WIRE_BF16 : WIRE_F32;
  kernel_operand(k, DT_I32, FILL_ZERO, 0, 1, 0); /* no scales */
  kernel_operand(k, type, FILL_NORMAL, 1, RANKS * n, 0)->bits = half;
  kernel_output(k, DT_I32, 0, 1, 0);
  Operand *sum = kernel_operand(k, type, FILL_ZERO, 1, n, 0);
  sum->bits = half;
  sum->out = true;
}

void kernels_add_wire(KernelList *l) {
  bool halves = l->s->act == DT_BF16;
  for (int i = 0; i < 3; i++) {
    add_codes(l, i, DT_F32);
    if (halves) add_codes(l, i, DT_BF16);
    add_sum(l, i);
  }
  add_plain_sum(l, DT_F32);
  add_plain_sum(l, DT_BF16);
}
