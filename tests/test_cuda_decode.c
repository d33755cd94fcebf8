/* What decoding adds to the ops, on the GPU against the CPU: linear with its fronts, rope_write,
 * decode_attend, decode_advance; and how fast a chain of products of few rows goes in a captured
 * step. */
#include "tests/twin.h"

/* Frees all pairs; returns what failed, which goes on counting. */
static int release(void) {
  int failures = twin_state.failures;
  twin_state.failures = 0;
  twin_done();
  return failures;
}

static void as_matrix(Pair *p, int64_t rows, int64_t columns) {
  p->cpu = tensor_2d(p->cpu.data, p->cpu.dtype, rows, columns);
  p->gpu = tensor_2d(p->gpu.data, p->gpu.dtype, rows, columns);
}

/* ---- linear ---- */

typedef struct Case {
  int64_t m, n, k;
  Front front;
  bool bias, add, logits; /* logits: y is F32 whatever x is */
} Case;

static const Case cases[] = {
    {1, 16, 64, FRONT_NONE, false, false, false},
    {3, 20, 24, FRONT_NONE, true, false, false},
    {5, 7, 13, FRONT_RMSNORM, false, false, false},
    {8, 300, 200, FRONT_RMSNORM, false, false, false},
    {1, 2560, 2048, FRONT_RMSNORM, false, false, false},
    {9, 2048, 2048, FRONT_NONE, false, true, false},
    {16, 1111, 1000, FRONT_RMSNORM, true, false, false},
    {17, 640, 704, FRONT_SWIGLU, false, true, false},
    {33, 130, 5632, FRONT_SWIGLU, false, true, false},
    {64, 2048, 5632, FRONT_SWIGLU, false, true, false},
    {64, 2560, 2048, FRONT_RMSNORM, true, false, false},
    {63, 129, 520, FRONT_SWIGLU, false, false, false},
    {40, 4000, 512, FRONT_RMSNORM, false, false, true},
    {7, 513, 11008, FRONT_SWIGLU, false, true, false},
    {65, 200, 300, FRONT_RMSNORM, false, false, false},
    {130, 96, 136, FRONT_SWIGLU, true, false, false},
    {2, 300, 20000, FRONT_NONE, false, false, false},
    {0, 32, 64, FRONT_RMSNORM, false, false, false},
    {16, 6208, 4096, FRONT_RMSNORM, true, true, false}, /* large W */
    {3, 6131, 4168, FRONT_SWIGLU, false, false, true},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

typedef struct Product {
  Pair x, norm, w, bias, front, y;
  Linear on_cpu, on_gpu;
} Product;

static Product product(const Case *c, DType type, uint64_t seed) {
  Product p = {.norm = twin_absent(), .bias = twin_absent(), .front = twin_absent()};
  p.x = twin_random(type, seed, 1, 2, c->m, c->front == FRONT_SWIGLU ? 2 * c->k : c->k);
  p.w = twin_random(type, seed + 1, 0.05F, 2, c->n, c->k);
  p.y = twin_random(c->logits ? DT_F32 : type, seed + 2, 1, 2, c->m, c->n);
  if (c->bias) p.bias = twin_random(type, seed + 3, 1, 1, c->n);
  if (c->front == FRONT_RMSNORM) p.norm = twin_random(type, seed + 4, 1, 1, c->k);
  if (c->front != FRONT_NONE) p.front = twin_unwritten(type, 2, c->m, c->k);
  Linear l = {.front = c->front, .eps = 1e-5F, .add = c->add};
  p.on_cpu = p.on_gpu = l;
  p.on_cpu.norm_K = p.norm.cpu;
  p.on_cpu.w_OK = p.w.cpu;
  p.on_cpu.bias_O = p.bias.cpu;
  p.on_cpu.front_MK = p.front.cpu;
  p.on_gpu.norm_K = p.norm.gpu;
  p.on_gpu.w_OK = p.w.gpu;
  p.on_gpu.bias_O = p.bias.gpu;
  p.on_gpu.front_MK = p.front.gpu;
  return p;
}

/* In parts of the largest number. F32: sums of thousands of terms. BF16: y's last rounding is up to
 * 2^-8 of it. What a front makes is rounded too, where it is made by itself or for tensor cores,
 * each number by 2^-8 at most, 2^-9.3 in the mean square; so is the sum, of its deviation, and the
 * worst of ten thousand, 4 times that, is as much of the largest, 4 deviations: 2^-9 with room. */
static double tolerance_of(const Case *c, DType type) {
  if (type == DT_F32) return 1e-5;
  return c->front == FRONT_NONE ? 1.0 / 256 : 1.0 / 256 + 1.0 / 512;
}

static void linear_agrees(void **state) {
  (void)state;
  Twins *t = twins();
  int failures = 0;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_CASES; i++) {
      const Case *c = cases + i;
      DType type = k ? DT_BF16 : DT_F32;
      if (test_is_watched() && type == DT_F32 && c->n * c->k > 1 << 20) continue;
      Product p = product(c, type, (uint64_t)i + 1);
      t->gpu_ops->linear(t->gpu, p.on_gpu, p.x.gpu, p.y.gpu);
      t->cpu_ops->linear(t->cpu, p.on_cpu, p.x.cpu, p.y.cpu);
      char name[96];
      snprintf(name, sizeof name, "linear %s m %d n %d k %d front %d%s%s%s", dtype_name(type),
               (int)c->m, (int)c->n, (int)c->k, (int)c->front, c->bias ? " bias" : "",
               c->add ? " add" : "", c->logits ? " to F32" : "");
      if (c->m > 0) twin_compare(name, p.y, tolerance_of(c, type));
      failures += release();
    }
  twin_state.failures = failures;
  twin_done();
}

/* The product's W as codes of a format: the same on both. */
static void code(Product *p, WireFormat f) {
  Twins *t = twins();
  int64_t n = p->w.cpu.dim[0], k = p->w.cpu.dim[1];
  WireSpan span = {k, 0, n * k};
  size_t scales = wire_scale_bytes(f, span), payload = wire_payload_bytes(f, span);
  WireData to = {mem_alloc(scales, 1), mem_alloc(payload, 1), 1, 0};
  WirePart part = {.span = span, .x = tensor_1d(p->w.cpu.data, DT_F32, span.count), .to = to};
  t->cpu_ops->quantize(t->cpu, f, 1, &part);
  Pair on_scales = twin_bytes(DT_U8, to.scales, (int64_t)scales);
  Pair on_payload = twin_bytes(DT_U8, to.payload, (int64_t)payload);
  free(to.scales);
  free(to.payload);
  p->on_cpu.format = p->on_gpu.format = f;
  p->on_cpu.codes = (WireData){on_scales.cpu.data, on_payload.cpu.data, 1, 0};
  p->on_gpu.codes = (WireData){on_scales.gpu.data, on_payload.gpu.data, 1, 0};
}

/* The first rows of 16 have the bits that they have by themselves, for any number of them. */
static void rows_of_case_do_not_meet(const Case *all, WireFormat format) {
  Twins *t = twins();
  static const int some[] = {1, 3, 5, 7, 8, 9, 12, 15, 16};
  Product p = product(all, DT_BF16, 3);
  if (format.kind != WIRE_BF16) code(&p, format);
  t->gpu_ops->linear(t->gpu, p.on_gpu, p.x.gpu, p.y.gpu);
  float *want = twin_back(p.y);
  for (int i = 0; i < 9; i++) {
    if (test_is_watched() && i % (test_is_watched_closely() ? 8 : 4) != 0) continue;
    Pair y = twin_unwritten(DT_BF16, 2, some[i], all->n);
    Tensor x = p.x.gpu;
    Linear l = p.on_gpu;
    x.dim[0] = l.front_MK.dim[0] = some[i];
    t->gpu_ops->linear(t->gpu, l, x, y.gpu);
    float *got = twin_back(y);
    size_t bytes = (size_t)(some[i] * all->n) * sizeof *got;
    twin_check("a row's bits change with the number of rows", memcmp(got, want, bytes) == 0);
    free(got);
  }
  free(want);
}

static void rows_do_not_meet(void **state) {
  (void)state;
  static const Case all[] = {{16, 700, 2048, FRONT_RMSNORM, false, false, false},
                             {16, 300, 5632, FRONT_SWIGLU, true, false, false},
                             {16, 3000, 1000, FRONT_NONE, false, false, false},
                             {16, 6208, 4096, FRONT_NONE, false, false, false}}; /* large W */
  static const WireFormat formats[] = {
      {.kind = WIRE_BF16}, {WIRE_INT8, 256, DT_F32}, {WIRE_FP8, 256, DT_F32}};
  int failures = 0;
  for (int i = 0; i < 4; i++)
    for (int f = 0; f < 3; f++) {
      if (all[i].k % 16 != 0 && formats[f].kind != WIRE_BF16) continue;
      if (test_is_watched_closely() && i < 3 && f != i) continue;
      rows_of_case_do_not_meet(all + i, formats[f]);
      failures += release();
    }
  twin_state.failures = failures;
  twin_done();
}

/* Weights in codes: the numbers that they stand for are the same on both, exactly; what differs is
 * that of BF16. */
static void codes_agree(void **state) {
  (void)state;
  Twins *t = twins();
  static const Case shapes[] = {
      {1, 300, 512, FRONT_RMSNORM, true, false, false},
      {16, 2048, 1040, FRONT_NONE, false, true, false},
      {33, 257, 704, FRONT_SWIGLU, false, false, false},
      {64, 640, 2048, FRONT_RMSNORM, false, false, true},
      {150, 130, 5632, FRONT_SWIGLU, false, true, false},
      {16, 4099, 4112, FRONT_RMSNORM, true, false, false}, /* large W */
      {75, 4112, 4096, FRONT_SWIGLU, false, true, false},
  };
  static const WireFormat formats[] = {{WIRE_INT8, 256, DT_F32},
                                       {WIRE_INT8, 64, DT_BF16},
                                       {WIRE_FP8, 128, DT_F32},
                                       {WIRE_FP8, 256, DT_BF16}};
  int failures = 0;
  for (int i = 0; i < (int)(sizeof shapes / sizeof shapes[0]); i++)
    for (int f = 0; f < 4; f++) {
      const Case *c = shapes + i;
      if (test_is_watched() && f != i % 4) continue;
      Product p = product(c, DT_BF16, (uint64_t)i + 1);
      code(&p, formats[f]);
      t->gpu_ops->linear(t->gpu, p.on_gpu, p.x.gpu, p.y.gpu);
      t->cpu_ops->linear(t->cpu, p.on_cpu, p.x.cpu, p.y.cpu);
      char name[96];
      snprintf(name, sizeof name, "codes %d of %d, m %d n %d k %d front %d", formats[f].kind,
               formats[f].block, (int)c->m, (int)c->n, (int)c->k, (int)c->front);
      twin_compare(name, p.y, tolerance_of(c, DT_BF16));
      failures += release();
    }
  twin_state.failures = failures;
  twin_done();
}

/* ---- rope_write ---- */

/* In place as rope does, and in the pages what decoding then reads; rows without a slot and
 * sequences of no tokens included. */
static void rope_write_agrees(void **state) {
  (void)state;
  Twins *t = twins();
  enum { N = 6, PAGE = 4, PAGES = 5 };
  static const AttnShape shapes[] = {
      {4, 2, 16, 0.25F, 0}, {8, 1, 64, 0.125F, 0}, {3, 3, 6, 0.4F, 0}, {2, 1, 20, 0.2F, 0}};
  static const int32_t positions[N] = {0, 1, 2, 7, 3, 5}, slots[N] = {8, 9, 10, -1, 3, 17};
  static const int32_t table[N] = {2, 1, 2, 1, 0, 1}, lens[3] = {3, 0, 0};
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k++) {
      DType type = k % 2 ? DT_BF16 : DT_F32;
      AttnShape s = shapes[i];
      int64_t half = i == 3 ? 5 : s.head_dim / 2, hd = (int64_t)s.n_heads * s.head_dim;
      Pair qkv = twin_random(type, 1, 1, 2, N, hd + 2L * s.n_kv_heads * s.head_dim);
      Pair at = twin_ints(positions, N), slot = twin_ints(slots, N), len = twin_ints(lens, 3);
      Pair cos = k < 2 ? twin_random(DT_F32, 2, 1, 2, 8, half) : twin_absent();
      Pair sin = k < 2 ? twin_random(DT_F32, 3, 1, 2, 8, half) : twin_absent();
      Pair keys = twin_unwritten(type, 4, PAGES, PAGE, s.n_kv_heads, s.head_dim);
      Pair values = twin_unwritten(type, 4, PAGES, PAGE, s.n_kv_heads, s.head_dim);
      Pair pages = twin_ints(table, N), out = twin_unwritten(type, 2, 3, hd);
      pages.cpu = tensor_2d(pages.cpu.data, DT_I32, 3, 2);
      pages.gpu = tensor_2d(pages.gpu.data, DT_I32, 3, 2);
      t->gpu_ops->rope_write(t->gpu, qkv.gpu, at.gpu, cos.gpu, sin.gpu, s, slot.gpu, keys.gpu,
                             values.gpu);
      t->cpu_ops->rope_write(t->cpu, qkv.cpu, at.cpu, cos.cpu, sin.cpu, s, slot.cpu, keys.cpu,
                             values.cpu);
      double tolerance = type == DT_F32 ? 1e-6 : 1.0 / 256; /* a product, a sum, a rounding */
      twin_compare("rope_write, qkv", qkv, tolerance);
      Tensor q_gpu = qkv.gpu, q_cpu = qkv.cpu;
      q_gpu.dim[0] = q_cpu.dim[0] = 3;
      t->gpu_ops->attention_decode(t->gpu, q_gpu, pages.gpu, len.gpu, s, keys.gpu, values.gpu,
                                   out.gpu);
      t->cpu_ops->attention_decode(t->cpu, q_cpu, pages.cpu, len.cpu, s, keys.cpu, values.cpu,
                                   out.cpu);
      twin_compare("rope_write, decoded", out, type == DT_F32 ? 1e-5 : 1.0 / 64);
    }
  twin_done();
}

/* ---- decode_attend ---- */

enum { AT_ROWS = 5, AT_PAGE = 16, AT_WIDTH = 72, AT_PAGES = AT_ROWS * AT_WIDTH };
typedef struct Attend {
  Pair len, table, slot, position, cos, sin, k, v;
} Attend;

/* Rows of 0 to 1,100 tokens, whose pages hold all but the newest. */
static Attend attend_rows(DType type, AttnShape s, int64_t half) {
  static const int32_t lens[AT_ROWS] = {1, 0, 33, 600, 1100};
  static int32_t table[AT_PAGES], slots[AT_ROWS], positions[AT_ROWS], old[AT_ROWS * 1100];
  int64_t width = (s.n_heads + 2L * s.n_kv_heads) * s.head_dim, n = 0;
  rng_permute(5, 1, table, AT_PAGES);
  for (int b = 0; b < AT_ROWS; b++) {
    for (int t = 0; t < lens[b]; t++) {
      int32_t slot = table[b * AT_WIDTH + t / AT_PAGE] * AT_PAGE + t % AT_PAGE;
      if (t + 1 < lens[b])
        old[n++] = slot;
      else
        slots[b] = slot;
    }
    if (lens[b] == 0) slots[b] = -1;
    positions[b] = lens[b] > 0 ? lens[b] - 1 : 0;
  }
  Attend a = {.len = twin_ints(lens, AT_ROWS),
              .table = twin_ints(table, AT_PAGES),
              .slot = twin_ints(slots, AT_ROWS),
              .position = twin_ints(positions, AT_ROWS),
              .cos = half ? twin_random(DT_F32, 2, 1, 2, 1100, half) : twin_absent(),
              .sin = half ? twin_random(DT_F32, 3, 1, 2, 1100, half) : twin_absent(),
              .k = twin_unwritten(type, 4, AT_PAGES, AT_PAGE, s.n_kv_heads, s.head_dim),
              .v = twin_unwritten(type, 4, AT_PAGES, AT_PAGE, s.n_kv_heads, s.head_dim)};
  Pair rows = twin_random(type, 4, 1, 2, n, width), to = twin_ints(old, n);
  twin_state.gpu_ops->kv_write(twin_state.gpu, rows.gpu, to.gpu, s, a.k.gpu, a.v.gpu);
  twin_state.cpu_ops->kv_write(twin_state.cpu, rows.cpu, to.cpu, s, a.k.cpu, a.v.cpu);
  as_matrix(&a.table, AT_ROWS, AT_WIDTH);
  return a;
}

/* And the newest is in its page afterwards: another query sees it. */
static void attend_agrees(void **state) {
  (void)state;
  Twins *t = twins();
  int failures = 0;
  static const struct {
    AttnShape s;
    int half;
  } shapes[] = {{{32, 4, 64, 0.125F, 0}, 32},  {{4, 4, 128, 0.09F, 0}, 64},
                {{6, 2, 64, 0.125F, 40}, 32},  {{20, 1, 96, 0.1F, 600}, 24},
                {{4, 2, 64, 0.125F, 0}, 0},    {{2, 1, 20, 0.2F, 0}, 10},
                {{16, 16, 64, 0.125F, 0}, 32}, {{32, 32, 64, 0.125F, 0}, 8}};
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 2; k++) {
      if (test_is_watched_closely() && k == 0 && i % 5 != 0) continue;
      DType type = k ? DT_BF16 : DT_F32;
      AttnShape s = shapes[i].s;
      int64_t width = (s.n_heads + 2L * s.n_kv_heads) * s.head_dim;
      int64_t hd = (int64_t)s.n_heads * s.head_dim;
      Attend a = attend_rows(type, s, shapes[i].half);
      Pair qkv = twin_random(type, 9, 1, 2, AT_ROWS, width);
      Pair again = twin_random(type, 10, 1, 2, AT_ROWS, width);
      Pair out = twin_unwritten(type, 2, AT_ROWS, hd), other = twin_unwritten(type, 2, AT_ROWS, hd);
      DecodeRows cpu = {.position_B = a.position.cpu,
                        .len_B = a.len.cpu,
                        .slot_B = a.slot.cpu,
                        .table_BP = a.table.cpu};
      DecodeRows gpu = {.position_B = a.position.gpu,
                        .len_B = a.len.gpu,
                        .slot_B = a.slot.gpu,
                        .table_BP = a.table.gpu};
      t->gpu_ops->decode_attend(t->gpu, gpu, qkv.gpu, a.cos.gpu, a.sin.gpu, s, a.k.gpu, a.v.gpu,
                                out.gpu);
      t->cpu_ops->decode_attend(t->cpu, cpu, qkv.cpu, a.cos.cpu, a.sin.cpu, s, a.k.cpu, a.v.cpu,
                                out.cpu);
      t->gpu_ops->attention_decode(t->gpu, again.gpu, a.table.gpu, a.len.gpu, s, a.k.gpu, a.v.gpu,
                                   other.gpu);
      t->cpu_ops->attention_decode(t->cpu, again.cpu, a.table.cpu, a.len.cpu, s, a.k.cpu, a.v.cpu,
                                   other.cpu);
      char name[96];
      snprintf(name, sizeof name, "decode_attend %s H %d K %d D %d window %d half %d",
               dtype_name(type), s.n_heads, s.n_kv_heads, s.head_dim, s.window, shapes[i].half);
      twin_compare(name, out, k ? 1.0 / 64 : 1e-5);
      twin_compare("  and the pages", other, k ? 1.0 / 64 : 1e-5);
      failures += release();
    }
  twin_state.failures = failures;
  twin_done();
}

/* ---- decode_advance ---- */

/* Rows of several lengths, one inert from the start, over more steps than some have left. */
static void advance_agrees(void **state) {
  (void)state;
  Twins *t = twins();
  enum { B = 300, PAGE = 4, WIDTH = 10, STEPS = 12 };
  int32_t token[B], position[B], len[B], slot[B], end[B], drawn[B], table[B * WIDTH], step = 0;
  int32_t none[STEPS * B];
  int64_t stream[B];
  for (int b = 0; b < B; b++) {
    len[b] = b == 5 ? 0 : 1 + b % 20;
    end[b] = len[b] + 3 + b % 17;
    token[b] = position[b] = 0;
    slot[b] = b == 5 ? -1 : 0;
    drawn[b] = 1000 + b;
    stream[b] = (int64_t)rng_mix(77, (uint64_t)b);
  }
  rng_permute(3, 1, table, B * WIDTH);
  for (int i = 0; i < STEPS * B; i++) none[i] = -9;
  Pair p[] = {twin_ints(token, B),
              twin_ints(position, B),
              twin_ints(len, B),
              twin_ints(slot, B),
              twin_ints(table, B * WIDTH),
              twin_ints(end, B),
              twin_bytes(DT_I64, stream, B),
              twin_random(DT_F32, 1, 1, 1, B),
              twin_ints(drawn, B),
              twin_random(DT_F32, 2, 1, 1, B),
              twin_ints(&step, 1),
              twin_ints(none, STEPS * B),
              twin_unwritten(DT_F32, 2, STEPS, B)};
  as_matrix(p + 4, B, WIDTH);
  as_matrix(p + 11, STEPS, B);
  DecodeRows cpu = {PAGE,     2,         1234567890123ULL, p[0].cpu, p[1].cpu, p[2].cpu,
                    p[3].cpu, p[4].cpu,  p[5].cpu,         p[6].cpu, p[7].cpu, p[8].cpu,
                    p[9].cpu, p[10].cpu, p[11].cpu,        p[12].cpu};
  DecodeRows gpu = {PAGE,     2,         1234567890123ULL, p[0].gpu, p[1].gpu, p[2].gpu,
                    p[3].gpu, p[4].gpu,  p[5].gpu,         p[6].gpu, p[7].gpu, p[8].gpu,
                    p[9].gpu, p[10].gpu, p[11].gpu,        p[12].gpu};
  for (int i = 0; i < STEPS; i++) {
    t->gpu_ops->decode_advance(t->gpu, gpu);
    t->cpu_ops->decode_advance(t->cpu, cpu);
  }
  static const char *names[] = {"token",
                                "position",
                                "len",
                                "slot",
                                "table",
                                "end",
                                "stream",
                                "u",
                                "drawn",
                                "logprob",
                                "step",
                                "history of tokens",
                                "history of log-probabilities"};
  for (int i = 0; i < 13; i++) {
    if (i == 7 || i == 9 || i == 12)
      twin_compare(names[i], p[i], 0); /* the same numbers */
    else
      twin_compare_bytes(names[i], p[i]);
  }
  /* The next random number of a row is the one that the host would take. */
  float u = (float)rng_uniform(1234567890123ULL, (uint64_t)stream[16], (uint64_t)len[16] + STEPS);
  twin_check("u is the host's", tensor_i32(p[2].cpu)[16] == len[16] + STEPS &&
                                    fabsf(tensor_f32(p[7].cpu)[16] - u) <= 0);
  twin_done();
}

/* ---- time ---- */

enum { LAYERS = 8 };
typedef struct Chain {
  WireFormat format; /* BF16: weights are numbers; else their bytes are taken for codes */
  void *scales;
  Tensor qkv[LAYERS], o[LAYERS], gu[LAYERS], down[LAYERS], norm;
  Tensor x, a, b, att, front_MF;
  DeviceGraph *graph;
} Chain;

static Tensor filled(int64_t rows, int64_t columns, const Pair *block) {
  Tensor t = tensor_2d(NULL, DT_BF16, rows, columns);
  size_t bytes = tensor_bytes(t), step = tensor_bytes(block->gpu);
  t.data = device_alloc(twin_state.gpu, bytes);
  for (size_t at = 0; at < bytes; at += step)
    device_copy(twin_state.gpu, (char *)t.data + at, block->gpu.data,
                bytes - at < step ? bytes - at : step);
  return t;
}

static Linear with_weights(const Chain *c, Linear l, Tensor w) {
  l.w_OK = w;
  if (c->format.kind == WIRE_BF16) return l;
  l.format = c->format;
  l.codes = (WireData){c->scales, w.data, 1, 0};
  return l;
}

static void queue_chain(const Chain *c) {
  Device *d = twin_state.gpu;
  const Ops *op = twin_state.gpu_ops;
  Tensor front_MC = c->front_MF;
  front_MC.dim[1] = c->x.dim[1]; /* room for either front */
  for (int i = 0; i < LAYERS; i++) {
    Linear norm = {.front = FRONT_RMSNORM, .norm_K = c->norm, .eps = 1e-5F, .front_MK = front_MC};
    Linear add = {.add = true};
    Linear gated = {.front = FRONT_SWIGLU, .add = true, .front_MK = c->front_MF};
    op->linear(d, with_weights(c, norm, c->qkv[i]), c->x, c->a);
    op->linear(d, with_weights(c, add, c->o[i]), c->att, c->x);
    op->linear(d, with_weights(c, norm, c->gu[i]), c->x, c->b);
    op->linear(d, with_weights(c, gated, c->down[i]), c->b, c->x);
  }
}
static void launch_chain(void *arg) { device_graph_launch(twin_state.gpu, ((Chain *)arg)->graph); }

/* The products of layers of a 1.1B Llama, one behind the other, in a captured step. */
static void rates(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  Twins *t = twins();
  const int64_t C = 2048, F = 5632, Q = 2560;
  Pair block = twin_random(DT_BF16, 1, 0.02F, 1, 1 << 20);
  Chain c = {.norm = twin_filled(DT_BF16, 1, 1, C).gpu};
  for (int i = 0; i < LAYERS; i++) {
    c.qkv[i] = filled(Q, C, &block);
    c.o[i] = filled(C, C, &block);
    c.gu[i] = filled(2 * F, C, &block);
    c.down[i] = filled(C, F, &block);
  }
  c.scales = twin_filled(DT_F32, 1e-3F, 1, 2 * F * C / 256).gpu.data;
  static const struct {
    int64_t m;
    WireFormat format;
    const char *name;
  } runs[] = {
      {1, {.kind = WIRE_BF16}, "bf16"},       {16, {.kind = WIRE_BF16}, "bf16"},
      {32, {.kind = WIRE_BF16}, "bf16"},      {64, {.kind = WIRE_BF16}, "bf16"},
      {128, {.kind = WIRE_BF16}, "bf16"},     {1, {WIRE_INT8, 256, DT_F32}, "int8"},
      {16, {WIRE_INT8, 256, DT_F32}, "int8"}, {64, {WIRE_INT8, 256, DT_F32}, "int8"},
      {16, {WIRE_FP8, 256, DT_F32}, "fp8"},
  };
  for (size_t i = 0; i < sizeof runs / sizeof runs[0]; i++) {
    int64_t m = runs[i].m;
    c.format = runs[i].format;
    c.x = twin_random(DT_BF16, 2, 1, 2, m, C).gpu;
    c.att = twin_random(DT_BF16, 3, 1, 2, m, C).gpu;
    c.a = twin_unwritten(DT_BF16, 2, m, Q).gpu;
    c.b = twin_unwritten(DT_BF16, 2, m, 2 * F).gpu;
    c.front_MF = twin_unwritten(DT_BF16, 2, m, F).gpu;
    queue_chain(&c); /* scratch and plans exist before what is captured */
    twin_check("a GPU captures", device_capture_begin(t->gpu));
    queue_chain(&c);
    c.graph = device_capture_end(t->gpu);
    char name[96];
    snprintf(name, sizeof name, "8 layers' products of %d rows, %s", (int)m, runs[i].name);
    double numbers = LAYERS * (double)(Q * C + C * C + 3 * F * C);
    double bytes = numbers * (c.format.kind == WIRE_BF16 ? 2 : 1 + 4.0 / 256);
    twin_time(name, launch_chain, &c, bytes, 2 * (double)m * numbers);
    device_graph_free(t->gpu, c.graph);
  }
  for (int i = 0; i < LAYERS; i++) {
    device_free(t->gpu, c.qkv[i].data);
    device_free(t->gpu, c.o[i].data);
    device_free(t->gpu, c.gu[i].data);
    device_free(t->gpu, c.down[i].data);
  }
  twin_done();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(linear_agrees),
    cmocka_unit_test(codes_agree),
    cmocka_unit_test(rows_do_not_meet),
    cmocka_unit_test(rope_write_agrees),
    cmocka_unit_test(attend_agrees),
    cmocka_unit_test(advance_agrees),
    cmocka_unit_test(rates),
};
TEST_MAIN(tests)
