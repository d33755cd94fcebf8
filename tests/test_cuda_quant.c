/* Wire formats on the GPU: byte for byte what the CPU sends, and the same floats back; its speed
 * beside that of a copy. Only a NaN that was computed may be another NaN. */
#include "tests/twin.h"

#include "kernels/wire.h"

enum { SOURCES = 6 /* at most */, LISTED = 70, FEWER = 7 /* cases where a checker looks on */ };

static const int blocks[] = {2, 24, 64, 128, 256, 512, 1024, 4096};
static const int64_t widths[] = {1, 7, 64, 104, 256, 576, 1000, 1024, 4104, 6143};
enum { BLOCKS = 8, WIDTHS = 10 };

/* One parameter: spans on the wire in two formats, numbers and errors, on both devices. */
typedef struct Case {
  WireSpan span;
  size_t stride; /* of the sources */
  size_t shift;  /* bytes between scales and payload, so that it lies badly */
  Pair x, error; /* error: its bits */
  Pair from, to; /* bytes */
} Case;

/* Random numbers with blocks of zeros, ties, tiny and huge numbers, and some that are none; a fifth
 * are zeros of any seed. */
static float *numbers(uint64_t seed, int64_t n, bool finite) {
  float *x = mem_alloc((size_t)n + 1, sizeof *x);
  for (int64_t i = 0; i < n; i++) {
    uint64_t kind = (uint64_t)(rng_uniform(seed, 3, (uint64_t)(i / 300)) * 10);
    x[i] = rng_normal(seed, 1, (uint64_t)i);
    if (kind == 1) x[i] = (float)(i % 15 - 7) * 0.5f;
    if (kind == 2) x[i] = i % 2 ? 0.0f : -0.0f;
    if (kind == 3) x[i] *= 1e-37f;
    if (kind == 4) x[i] *= 1e-41f;
    if (kind == 5) x[i] *= finite ? 1e30f : 3e38f;
    if (kind == 6 && !finite && i % 97 == 0) x[i] = i % 2 ? NAN : -INFINITY;
    if (i / 1024 % 5 == 1) x[i] = 0;
  }
  return x;
}

/* Where the payload starts: at 16 bytes, which the fastest kernels want, and what it is shifted. */
static size_t payload_at(WireFormat f, const Case *c) {
  return (wire_scale_bytes(f, c->span) + 15) / 16 * 16 + c->shift;
}
static WireData wire_at(WireFormat f, const Case *c, Tensor bytes, int n) {
  char *p = bytes.data;
  return (WireData){p, p + payload_at(f, c), n, c->stride};
}

static size_t wire_bytes(WireFormat f, const Case *c) {
  return payload_at(f, c) + wire_payload_bytes(f, c->span);
}

/* No encoder makes scales below zero, or a zero with a sign; sums of int4 in integers are wrong
 * with them. */
static void turn_scales(WireFormat f, WireSpan s, unsigned char *scales) {
  size_t bytes = dtype_size(f.scale);
  for (int64_t i = 2; i < wire_blocks(f, s); i += 5) {
    unsigned char *top = scales + (size_t)(i + 1) * bytes - 1; /* sign and exponent */
    bool number = (top[0] & 0x7f) != 0x7f || (top[-1] & 0x80) == 0;
    if (number) top[0] ^= 0x80;
  }
}

/* What `sources` ranks would have sent, made by the CPU. */
static Pair sources_of(WireFormat f, Case *c, int n, uint64_t seed, bool finite) {
  Twins *t = twins();
  c->stride = (wire_bytes(f, c) + 15) / 16 * 16 + (c->shift ? 4 : 0);
  unsigned char *bytes = mem_zalloc(c->stride * (size_t)n + 1, 1);
  for (int r = 0; r < n; r++) {
    float *x = numbers(seed + (uint64_t)r, c->span.count, finite);
    Tensor at = tensor_1d(bytes + c->stride * (size_t)r, DT_U8, 0);
    WirePart part = {.span = c->span, .x = tensor_1d(x, DT_F32, c->span.count)};
    part.to = wire_at(f, c, at, 1);
    t->cpu_ops->quantize(t->cpu, f, 1, &part);
    if (f.kind == WIRE_INT4 && !finite && r == n / 2) turn_scales(f, c->span, part.to.scales);
    free(x);
  }
  Pair p = twin_bytes(DT_U8, bytes, (int64_t)c->stride * n);
  free(bytes);
  return p;
}

/* Fills what is not there yet: the wire in format f, and room in f_to. */
static Case case_of(WireSpan s, WireFormat f, WireFormat f_to, DType type, int n, uint64_t seed,
                    size_t shift, bool finite) {
  Case c = {.span = s, .shift = shift};
  float *x = numbers(seed + 100, s.count, finite);
  c.x = twin_take(type, x, 1, &s.count);
  uint16_t *error = mem_alloc((size_t)s.count + 1, sizeof *error);
  float *e = numbers(seed + 200, s.count, true);
  for (int64_t i = 0; i < s.count; i++) e[i] *= 0.1f;
  convert_from_f32(e, error, DT_BF16, (size_t)s.count);
  c.error = twin_bytes(DT_BF16, error, s.count);
  c.from = sources_of(f, &c, n, seed, finite);
  unsigned char *zeros = mem_zalloc(wire_bytes(f_to, &c) + 1, 1);
  c.to = twin_bytes(DT_U8, zeros, (int64_t)wire_bytes(f_to, &c));
  free(zeros);
  free(error);
  free(e);
  return c;
}

/* The part of a case on one device. */
static WirePart part_of(const Case *c, WireFormat f, WireFormat f_to, bool gpu, int n, bool fed) {
  WirePart part = {.span = c->span, .x = gpu ? c->x.gpu : c->x.cpu};
  part.from = wire_at(f, c, gpu ? c->from.gpu : c->from.cpu, n);
  part.to = wire_at(f_to, c, gpu ? c->to.gpu : c->to.cpu, 1);
  if (fed) part.e = (WireFeedback){gpu ? c->error.gpu : c->error.cpu, 0.8f};
  return part;
}

static const char *const names[] = {"f32", "bf16", "int8", "int4", "fp8"};
static const char *describe(const char *op, WireFormat f, WireFormat to, WireSpan s) {
  static char text[160];
  snprintf(text, sizeof text, "%s %s to %s, blocks of %d, width %lld, [%lld + %lld)", op,
           names[f.kind], names[to.kind], f.block, (long long)s.width, (long long)s.first,
           (long long)s.count);
  return text;
}

static uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

/* Floats of a dequantization: the same bits after rounding to the GPU's type. */
static void compare_floats(const char *what, Pair x) {
  float *got = twin_back(x), *want = tensor_f32(x.cpu);
  int64_t n = tensor_numel(x.cpu), differ = 0, first = 0;
  uint16_t *typed = mem_alloc((size_t)n + 1, sizeof *typed);
  if (x.gpu.dtype == DT_BF16) {
    convert_from_f32(want, typed, DT_BF16, (size_t)n);
    convert_to_f32(typed, DT_BF16, want, (size_t)n);
  }
  for (int64_t i = 0; i < n; i++)
    if (bits_of(got[i]) != bits_of(want[i]) && !(isnan(got[i]) && isnan(want[i])) && differ++ == 0)
      first = i;
  if (differ)
    print_message("FAILED %s: %lld of %lld differ, first at %lld: gpu %.9g, cpu %.9g\n", what,
                  (long long)differ, (long long)n, (long long)first, (double)got[first],
                  (double)want[first]);
  twin_state.failures += differ > 0;
  twin_check_guard(what, x);
  free(typed);
  free(got);
}

static WireSpan span_of(int which, int64_t width, int block) {
  int64_t lead = width > block ? block : 0;
  WireSpan s = {width, 0, 3 * width};
  if (which == 1) s = (WireSpan){width, width + lead, 2 * width - lead};
  if (which == 2) s = (WireSpan){width, lead, lead ? lead : width};
  if (which == 2 && (s.first + s.count) % width % block) s.count = width - lead;
  return s;
}

/* Frees a case's pairs; its failures are counted till the end of the test. */
static int failures;
static void case_done(void) {
  failures += twin_state.failures;
  twin_state.failures = 0;
  twin_done();
}
static void cases_done(void) {
  twin_state.failures += failures;
  failures = 0;
  twin_done();
}

/* ---- the three ops on one part ---- */

static void check_quantize(WireFormat f, WireSpan s, DType type, bool fed, size_t shift) {
  Twins *t = twins();
  if (twin_leaves_out(FEWER, FEWER)) return;
  Case c = case_of(s, f, f, type, 1, (uint64_t)s.width, shift, fed);
  WirePart cpu = part_of(&c, f, f, false, 1, fed), gpu = part_of(&c, f, f, true, 1, fed);
  for (int step = 0; step < (fed ? 3 : 1); step++) {
    t->cpu_ops->quantize(t->cpu, f, 1, &cpu);
    t->gpu_ops->quantize(t->gpu, f, 1, &gpu);
  }
  twin_compare_bytes(describe(fed ? "quantize with errors" : "quantize", f, f, s), c.to);
  twin_compare_bytes(describe("its errors", f, f, s), c.error);
  case_done();
}

static void check_dequantize(WireFormat f, WireSpan s, DType type, int n, bool add, size_t shift) {
  Twins *t = twins();
  if (twin_leaves_out(FEWER, FEWER)) return;
  Case c = case_of(s, f, f, type, n, (uint64_t)s.width + 7, shift, false);
  WirePart cpu = part_of(&c, f, f, false, n, false), gpu = part_of(&c, f, f, true, n, false);
  t->cpu_ops->dequantize(t->cpu, f, 1, &cpu, add);
  t->gpu_ops->dequantize(t->gpu, f, 1, &gpu, add);
  compare_floats(describe(add ? "dequantize and add" : "dequantize", f, f, s), c.x);
  case_done();
}

static void check_requantize(WireFormat f, WireFormat to, WireSpan s, int n, bool fed, size_t shift,
                             bool finite) {
  Twins *t = twins();
  if (twin_leaves_out(FEWER, FEWER)) return;
  Case c = case_of(s, f, to, DT_F32, n, (uint64_t)s.width + 13, shift, finite);
  WirePart cpu = part_of(&c, f, to, false, n, fed), gpu = part_of(&c, f, to, true, n, fed);
  t->cpu_ops->requantize(t->cpu, f, to, 1, &cpu);
  t->gpu_ops->requantize(t->gpu, f, to, 1, &gpu);
  twin_compare_bytes(describe(fed ? "requantize with errors" : "requantize", f, to, s), c.to);
  twin_compare_bytes(describe("its errors", f, to, s), c.error);
  case_done();
}

static WireFormat format_of(WireKind kind, int block, int which) {
  return (WireFormat){kind, block, which % 2 ? DT_BF16 : DT_F32};
}

static void quantize_gives_the_same_bytes(void **state) {
  (void)state;
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++)
    for (int b = 0; b < BLOCKS; b++)
      for (int w = 0; w < WIDTHS; w++) {
        int which = (b + w) % 3;
        WireFormat f = format_of(k, blocks[b], w);
        WireSpan s = span_of(which, widths[w], blocks[b]);
        check_quantize(f, s, w % 4 == 1 ? DT_BF16 : DT_F32, false, which == 2 ? 4 : 0);
        check_quantize(f, s, w % 4 == 3 ? DT_BF16 : DT_F32, true, 0);
      }
  cases_done();
}

static void dequantize_gives_the_same_floats(void **state) {
  (void)state;
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++)
    for (int b = 0; b < BLOCKS; b++)
      for (int w = 0; w < WIDTHS; w++) {
        int which = (b + w) % 3;
        WireFormat f = format_of(k, blocks[b], w);
        WireSpan s = span_of(which, widths[w], blocks[b]);
        check_dequantize(f, s, w % 2 ? DT_BF16 : DT_F32, 1, false, which == 1 ? 4 : 0);
        check_dequantize(f, s, w % 3 ? DT_F32 : DT_BF16, 1 + (b + w) % SOURCES, w % 2, 0);
      }
  cases_done();
}

static void requantize_gives_the_same_bytes(void **state) {
  (void)state;
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++)
    for (WireKind to = WIRE_F32; to <= WIRE_FP8; to++)
      for (int w = 0; w < WIDTHS; w++)
        for (int j = 0; j < 2; j++) {
          int b = (w * 3 + j * 5 + (int)k) % BLOCKS, which = (b + w) % 3;
          WireSpan s = span_of(which, widths[w], blocks[b]);
          check_requantize(format_of(k, blocks[b], w), format_of(to, blocks[b], w + 1), s,
                           1 + (w + (int)to) % SOURCES, j == 1, which == 2 ? 4 : 0,
                           j == 1 || to <= WIRE_BF16);
        }
  cases_done();
}

/* Integers and floats side by side in a warp: blocks that are nothing, tiny or no numbers. */
static void sums_of_int4_give_the_same_bytes(void **state) {
  (void)state;
  static const int sources[] = {2, 3, 4, 5, 8, 16, 17};
  for (int n = 0; n < 7; n++)
    for (int b = 0; b < BLOCKS; b++)
      for (int w = n % 2; w < WIDTHS; w += 2) {
        WireSpan s = span_of((b + n) % 3, widths[w], blocks[b]);
        check_requantize(format_of(WIRE_INT4, blocks[b], w / 2), format_of(WIRE_INT4, blocks[b], n),
                         s, sources[n], false, w % 4 == 3 ? 4 : 0, false);
      }
  cases_done();
}

/* Rows that blocks divide, at addresses of 16 bytes, have kernels of their own. */
static void whole_blocks_give_the_same_bytes(void **state) {
  (void)state;
  static const int sources[] = {2, 3, 4, 7, 16};
  WireSpan s = {3072, 3072, 4 * 3072};
  for (int b = 64; b <= 1024; b *= 2) {
    for (int n = 0; n < 5; n++)
      check_requantize(format_of(WIRE_INT4, b, n), format_of(WIRE_INT4, b, n / 2), s, sources[n],
                       false, 0, n % 2 == 0);
    for (WireKind k = WIRE_INT8; k <= WIRE_FP8; k++)
      for (int half = 0; half < 2; half++) {
        WireFormat f = format_of(k, b, half);
        DType type = half ? DT_BF16 : DT_F32;
        for (int fed = 0; fed < 2; fed++) check_quantize(f, s, type, fed, 0);
        for (int n = 1; n <= 5; n += 2) check_dequantize(f, s, type, n, n == 3, 0);
        check_dequantize(f, s, type, 1 + half, true, 0);
        check_requantize(f, f, s, 4 + half, false, 0, half);
      }
  }
  cases_done();
}

/* ---- lists ---- */

/* More parts than a launch takes, of all alignments and types; a case's pairs are five. */
static void a_list_is_its_parts(void **state) {
  (void)state;
  Twins *t = twins();
  enum { CASES = 40 };
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++) {
    WireFormat f = format_of(k, 256, 0);
    Case c[CASES];
    WirePart cpu[CASES], gpu[CASES];
    size_t shift = k == WIRE_F32 ? 4 : 2; /* whole elements, but no more */
    for (int i = 0; i < CASES; i++) {
      WireSpan s = span_of(i % 3, widths[i % WIDTHS], f.block);
      if (i % 7 == 6) s.count = 0;
      c[i] = case_of(s, f, f, i % 5 == 4 ? DT_BF16 : DT_F32, 4, (uint64_t)i, i % 4 == 3 ? shift : 0,
                     true);
      cpu[i] = part_of(&c[i], f, f, false, 4, i % 2);
      gpu[i] = part_of(&c[i], f, f, true, 4, i % 2);
    }
    t->cpu_ops->requantize(t->cpu, f, f, CASES, cpu);
    t->gpu_ops->requantize(t->gpu, f, f, CASES, gpu);
    t->cpu_ops->dequantize(t->cpu, f, CASES, cpu, true);
    t->gpu_ops->dequantize(t->gpu, f, CASES, gpu, true);
    for (int i = 0; i < CASES; i++) {
      twin_compare_bytes(describe("requantize in a list", f, f, c[i].span), c[i].to);
      twin_compare_bytes(describe("errors in a list", f, f, c[i].span), c[i].error);
      compare_floats(describe("dequantize in a list", f, f, c[i].span), c[i].x);
    }
    case_done();
  }
  cases_done();
}

/* Parts of one block each that lie side by side in one buffer: more than a launch's table. */
static void many_parts_are_one_span(void **state) {
  (void)state;
  Twins *t = twins();
  WireFormat f = {WIRE_INT8, 64, DT_F32};
  WireSpan whole = {64, 0, 64 * LISTED};
  Case c = case_of(whole, f, f, DT_F32, 1, 5, 0, false);
  WirePart cpu = part_of(&c, f, f, false, 1, false), all = part_of(&c, f, f, true, 1, false);
  WirePart gpu[LISTED];
  for (int i = 0; i < LISTED; i++) {
    float *x = tensor_f32(all.x) + 64 * (int64_t)i;
    gpu[i] = (WirePart){.span = {64, 64 * (int64_t)i, 64}, .x = tensor_1d(x, DT_F32, 64)};
    gpu[i].to.scales = (char *)all.to.scales + 4 * i;
    gpu[i].to.payload = (char *)all.to.payload + 64 * i;
    gpu[i].to.n = 1;
  }
  t->cpu_ops->quantize(t->cpu, f, 1, &cpu);
  t->gpu_ops->quantize(t->gpu, f, LISTED, gpu);
  twin_compare_bytes("many parts", c.to);
  twin_done();
}

/* ---- speed ---- */

typedef struct Speed {
  Device *d;
  const Ops *ops;
  WireFormat f;
  WirePart part;
  size_t copied;
  void *x, *y, *error;
} Speed;

enum { LARGE = 1 << 26, SEED = 1 << 22 };

static void run_quantize(void *p) {
  Speed *s = p;
  s->ops->quantize(s->d, s->f, 1, &s->part);
}
static void run_quantize_fed(void *p) {
  Speed *s = p;
  WirePart part = s->part;
  part.e = (WireFeedback){tensor_1d(s->error, DT_BF16, LARGE), 0.8f};
  s->ops->quantize(s->d, s->f, 1, &part);
}
static void run_dequantize(void *p) {
  Speed *s = p;
  WirePart part = s->part;
  part.from.n = 1;
  s->ops->dequantize(s->d, s->f, 1, &part, false);
}
static void run_dequantize_sum(void *p) {
  Speed *s = p;
  s->ops->dequantize(s->d, s->f, 1, &s->part, true);
}
static void run_requantize(void *p) {
  Speed *s = p;
  s->ops->requantize(s->d, s->f, s->f, 1, &s->part);
}
static void run_copy(void *p) {
  Speed *s = p;
  device_copy(s->d, s->y, s->x, s->copied);
}

static void time_op(Speed *s, const char *op, void (*run)(void *), double bytes, double copy) {
  char what[80];
  snprintf(what, sizeof what, "%s %s, x %s", op, names[s->f.kind], dtype_name(s->part.x.dtype));
  double rate = bytes / twin_time(what, run, s, bytes, 0);
  print_message("         = %.0f %% of copy\n", 100 * rate / copy);
}

static void time_format(Speed *s, DType type, double copy) {
  double x = (double)dtype_size(type) * LARGE, wire;
  size_t scales = wire_scale_bytes(s->f, s->part.span), payload;
  payload = wire_payload_bytes(s->f, s->part.span);
  wire = (double)(scales + payload);
  size_t stride = (scales + payload + 255) / 256 * 256;
  s->part.x = tensor_1d(s->x, type, LARGE);
  char *from = s->y, *to = from + 4 * stride;
  s->part.to = (WireData){to, to + scales, 1, 0};
  for (size_t r = 0; r < 4; r++) { /* four ranks that sent the same */
    s->part.to = (WireData){from + r * stride, from + r * stride + scales, 1, 0};
    s->ops->quantize(s->d, s->f, 1, &s->part);
  }
  s->part.from = (WireData){from, from + scales, 4, stride};
  s->part.to = (WireData){to, to + scales, 1, 0};
  time_op(s, "quantize", run_quantize, x + wire, copy);
  time_op(s, "quantize with errors", run_quantize_fed, x + wire + 4.0 * LARGE, copy);
  time_op(s, "requantize 4", run_requantize, 5 * wire, copy);
  s->part.x = tensor_1d(to + (stride + 255) / 256 * 256, type, LARGE);
  time_op(s, "dequantize", run_dequantize, x + wire, copy);
  time_op(s, "dequantize 4 and add", run_dequantize_sum, 2 * x + 4 * wire, copy);
}

static void speed_is_that_of_memory(void **state) {
  (void)state;
  Twins *t = twins();
  if (test_is_watched()) skip();
  size_t all = 4UL * LARGE, piece = 4UL * SEED;
  Speed s = {.d = t->gpu, .ops = t->gpu_ops, .copied = all};
  s.part.span = (WireSpan){4096, 0, LARGE};
  s.x = device_alloc(t->gpu, all);
  s.y = device_alloc(t->gpu, 6 * all + 4096);
  s.error = device_alloc(t->gpu, all / 2);
  device_zero(t->gpu, s.error, all / 2);
  uint32_t *seed = mem_alloc(SEED, sizeof *seed);
  for (uint64_t i = 0; i < SEED; i++) seed[i] = 0x3f803f80U | (rng_block(1, 2, i).v[0] & 0x7f007fU);
  device_upload(t->gpu, s.x, seed, piece); /* as pairs of BF16, too, numbers from 1 to 2 */
  for (size_t at = piece; at < all; at += piece) device_copy(t->gpu, (char *)s.x + at, s.x, piece);
  double copy = 2.0 * (double)all / twin_time("copy", run_copy, &s, 2.0 * (double)all, 0);
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++)
    for (int type = 0; type < 2; type++) {
      s.f = format_of(k, 256, 0);
      time_format(&s, type ? DT_BF16 : DT_F32, copy);
    }
  for (int b = 64; b <= 1024; b *= 4)
    for (WireKind k = WIRE_INT8; k <= WIRE_INT4 && b != 256; k++) {
      print_message("  blocks of %d\n", b);
      s.f = format_of(k, b, 0);
      time_format(&s, DT_F32, copy);
    }
  free(seed);
  device_free(t->gpu, s.x);
  device_free(t->gpu, s.y);
  device_free(t->gpu, s.error);
  twin_done();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(quantize_gives_the_same_bytes),
    cmocka_unit_test(dequantize_gives_the_same_floats),
    cmocka_unit_test(requantize_gives_the_same_bytes),
    cmocka_unit_test(sums_of_int4_give_the_same_bytes),
    cmocka_unit_test(whole_blocks_give_the_same_bytes),
    cmocka_unit_test(a_list_is_its_parts),
    cmocka_unit_test(many_parts_are_one_span),
    cmocka_unit_test(speed_is_that_of_memory),
};
TEST_MAIN(tests)
