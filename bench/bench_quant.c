/* Rates of the wire formats beside the machine's copy rate, bytes read and written counted alike,
 * and of deltas: encode by the bytes that it reads, apply by its stream and the lines of the
 * weights that it must read and write back. usage: bench_quant [threads [block [width]]]. Figures
 * are the best of several runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "kernels/kernels.h"

enum { COUNT = 1 << 24, SOURCES = 4 };

typedef struct Bench {
  Device *d;
  const Ops *ops;
  double copy_bytes;
  WireSpan span;
  WireFormat format;
  Tensor x, error;
  WireData in, out; /* in: several sources */
  size_t bytes;     /* of one span on the wire */
} Bench;

typedef void (*Work)(Bench *);

static WirePart part_of(const Bench *b) {
  return (WirePart){.span = b->span, .x = b->x, .from = b->in, .to = b->out};
}
static void quantize(Bench *b) {
  WirePart part = part_of(b);
  b->ops->quantize(b->d, b->format, 1, &part);
}
static void quantize_with_error(Bench *b) {
  WirePart part = part_of(b);
  part.e = (WireFeedback){b->error, 0.8f};
  b->ops->quantize(b->d, b->format, 1, &part);
}
static void dequantize(Bench *b) {
  WirePart part = part_of(b);
  part.from.n = 1;
  b->ops->dequantize(b->d, b->format, 1, &part, false);
}
static void dequantize_sum(Bench *b) {
  WirePart part = part_of(b);
  b->ops->dequantize(b->d, b->format, 1, &part, true);
}
static void requantize(Bench *b) {
  WirePart part = part_of(b);
  b->ops->requantize(b->d, b->format, b->format, 1, &part);
}

static void report(Bench *b, const char *format, const char *what, Work work, double bytes) {
  double best = 1e9, end = clock_seconds() + 0.3;
  for (int i = 0; i < 3 || clock_seconds() < end; i++) {
    double t = clock_seconds();
    work(b);
    t = clock_seconds() - t;
    if (t < best) best = t;
  }
  printf("%-5s %-28s %8.1f us %7.1f GB/s %6.1f %% of copy\n", format, what, best * 1e6,
         bytes / best * 1e-9, 100 * bytes / best / b->copy_bytes);
}

static WireData take(Bench *b, int n) {
  size_t scales = wire_scale_bytes(b->format, b->span), payload = 0;
  payload = wire_payload_bytes(b->format, b->span);
  b->bytes = scales + payload;
  size_t stride = (b->bytes + 63) / 64 * 64;
  char *p = device_alloc(b->d, stride * (size_t)n);
  device_zero(b->d, p, stride * (size_t)n);
  return (WireData){p, p + scales, n, stride};
}

static void fill_x(Bench *b, uint64_t seed) {
  enum { PERIOD = 10007 };
  float *x = tensor_f32(b->x);
  for (int i = 0; i < COUNT; i++)
    x[i] = i < PERIOD ? rng_normal(seed, 2, (uint64_t)i) : x[i - PERIOD];
}

/* What the ranks sent. */
static void fill_sources(Bench *b) {
  for (int r = 0; r < SOURCES; r++) {
    size_t skip = (size_t)r * b->in.stride;
    b->out = (WireData){(char *)b->in.scales + skip, (char *)b->in.payload + skip, 1, 0};
    fill_x(b, (uint64_t)r);
    quantize(b);
  }
}

static void bench_format(Bench *b, const char *name) {
  double x = 4.0 * COUNT;
  b->in = take(b, SOURCES);
  fill_sources(b);
  b->out = take(b, 1);
  double wire = (double)b->bytes;
  report(b, name, "quantize", quantize, x + wire);
  report(b, name, "  with error feedback", quantize_with_error, x + wire + 4.0 * COUNT);
  report(b, name, "dequantize", dequantize, x + wire);
  report(b, name, "dequantize and sum 4", dequantize_sum, 2 * x + SOURCES * wire);
  report(b, name, "sum 4 and requantize", requantize, (SOURCES + 1) * wire);
  device_free(b->d, b->in.scales);
  device_free(b->d, b->out.scales);
}

/* ---- deltas of weights of which one in a hundred changes, there and back ---- */

typedef struct DeltaBench {
  Tensor now[2], last;
  DeltaPart part;
  DeltaSize size;
  int turn;
} DeltaBench;

static DeltaBench delta;

static void encode(Bench *b) {
  delta.turn = 1 - delta.turn;
  delta.part.now = delta.now[delta.turn];
  b->ops->delta_encode(b->d, 1, &delta.part, &delta.size);
}
static void apply(Bench *b) { b->ops->delta_apply(b->d, 1, &delta.part); }

/* Bytes of the cache lines of what was sent last that have a change. */
static double touched_lines(void) {
  enum { LINE = 64, VALUES = LINE / 2 };
  double lines = 0;
  for (int i = 0; i < COUNT; i += VALUES)
    lines += memcmp((const char *)(tensor_f32(delta.now[0]) + i),
                    (const char *)(tensor_f32(delta.now[1]) + i), VALUES * sizeof(float)) != 0;
  return LINE * lines;
}

static void bench_delta(Bench *b) {
  enum { SHARE = 100 };
  size_t room = 2UL * COUNT;
  float *other = device_alloc(b->d, 4UL * COUNT);
  fill_x(b, 1);
  for (int i = 0; i < COUNT; i++) {
    bool changes = rng_uniform(3, 0, (uint64_t)i) * SHARE < 1;
    other[i] = tensor_f32(b->x)[i] * (changes ? 1.008f : 1); /* a step of BF16, or two */
  }
  delta = (DeltaBench){.now = {b->x, tensor_1d(other, DT_F32, COUNT)}};
  delta.last = tensor_1d(device_alloc(b->d, 2UL * COUNT), DT_BF16, COUNT);
  device_zero(b->d, delta.last.data, 2UL * COUNT);
  delta.part = (DeltaPart){.last = delta.last, .wire = device_alloc(b->d, room), .room = room};
  encode(b); /* the first has everything to say */
  encode(b);
  double wire = (double)delta.size.bytes;
  report(b, "delta", "encode, 1 % changes", encode, 6.0 * COUNT);
  delta.part.room = delta.size.bytes;
  report(b, "delta", "apply (touched lines, twice)", apply, 2 * touched_lines() + wire);
  device_free(b->d, other);
  device_free(b->d, delta.last.data);
  device_free(b->d, delta.part.wire);
}

int main(int argc, char **argv) {
  static const char *const names[] = {"f32", "bf16", "int8", "int4", "fp8"};
  Error err = {""};
  Bench b = {.d = device_open(DEVICE_CPU, argc > 1 ? atoi(argv[1]) : 1, &err)};
  if (!b.d) die("%s", err.msg);
  int block = argc > 2 ? atoi(argv[2]) : 256, width = argc > 3 ? atoi(argv[3]) : 4096;
  b.ops = device_ops(b.d);
  b.copy_bytes = device_measure(b.d).copy_bytes;
  b.span = (WireSpan){width, 0, COUNT};
  b.x = tensor_1d(device_alloc(b.d, 4UL * COUNT), DT_F32, COUNT);
  b.error = tensor_1d(device_alloc(b.d, 2UL * COUNT), DT_BF16, COUNT);
  device_zero(b.d, b.error.data, 2UL * COUNT);
  printf("%s; copy %.1f GB/s; blocks of %d in rows of %d\n", device_describe(b.d),
         b.copy_bytes * 1e-9, block, width);
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++) {
    b.format = (WireFormat){k, block, DT_F32};
    bench_format(&b, names[k]);
  }
  bench_delta(&b);
  device_free(b.d, b.x.data);
  device_free(b.d, b.error.data);
  device_close(b.d);
  return 0;
}
