/* Deltas on the GPU: the CPU's streams to the byte, what they patch, checksums, and speed. */
#include "kernels/delta.h"
#include "tests/twin.h"

typedef struct Case {
  const char *name;
  int64_t n;
  double share; /* of values that change */
  int step;     /* largest change in units of the last place; 0: any bits */
  int shift;    /* of the operands from what is aligned, elements */
} Case;

static Pair vector_of(Case c, uint64_t seed, DType type, bool changed) {
  float *x = mem_alloc((size_t)c.n + 8, sizeof *x);
  uint16_t bits;
#pragma omp parallel for private(bits)
  for (int64_t i = 0; i < c.n; i++) {
    float v = 0.02f * rng_normal(seed, 1, (uint64_t)i);
    convert_from_f32(&v, &bits, DT_BF16, 1);
    if (changed && rng_uniform(seed, 2, (uint64_t)i) < c.share) {
      double u = rng_uniform(seed, 3, (uint64_t)i);
      int step = (int)(u * (2 * c.step + 1)) - c.step;
      bits = c.step ? (uint16_t)(bits + step) : (uint16_t)(u * 0x7f00);
    }
    convert_to_f32(&bits, DT_BF16, &x[i], 1);
  }
  Pair p = twin_floats(type, x, 1, c.n);
  free(x);
  return p;
}

/* The CPU's copy of a BF16 pair is F32: deltas want its bits. */
static uint16_t *bits_of(Pair p) {
  uint16_t *bits = mem_alloc((size_t)tensor_numel(p.cpu) + 1, sizeof *bits);
  convert_from_f32(tensor_f32(p.cpu), bits, DT_BF16, (size_t)tensor_numel(p.cpu));
  return bits;
}

static Tensor from(Tensor t, int64_t first) {
  t.data = (char *)t.data + (size_t)first * dtype_size(t.dtype);
  t.dim[0] -= first;
  return t;
}

static void compare_bytes(const char *name, const char *what, const void *gpu, const void *want,
                          size_t bytes) {
  char text[160];
  char *got = mem_alloc(bytes + 1, 1);
  device_download(twins()->gpu, got, gpu, bytes);
  size_t differ = 0, first = 0;
  for (size_t i = 0; i < bytes; i++)
    if (got[i] != ((const char *)want)[i] && differ++ == 0) first = i;
  if (differ)
    print_message("%s: %s: %zu of %zu bytes, from %zu on\n", name, what, differ, bytes, first);
  snprintf(text, sizeof text, "%s: %s", name, what);
  twin_check(text, differ == 0);
  free(got);
}

static void check(Case c, DType type, size_t room) {
  Twins *t = twins();
  Pair now = vector_of(c, 5, type, true), last = vector_of(c, 5, DT_BF16, false);
  uint16_t *bits = bits_of(last), *before = bits_of(last);
  char *wire = mem_zalloc(room + 16, 1), *gpu_wire = device_alloc(t->gpu, room + 16);
  char *aligned = wire + (16 - (uintptr_t)wire % 16) % 16;
  DeltaSize want, *size = device_alloc(t->gpu, sizeof want);
  Tensor cpu_last = tensor_1d(bits, DT_BF16, c.n);
  DeltaPart cpu = {from(now.cpu, c.shift), from(cpu_last, c.shift), aligned, room};
  DeltaPart gpu = {from(now.gpu, c.shift), from(last.gpu, c.shift), gpu_wire, room};
  t->cpu_ops->delta_encode(t->cpu, 1, &cpu, &want);
  t->gpu_ops->delta_encode(t->gpu, 1, &gpu, size);
  compare_bytes(c.name, "size", size, &want, sizeof want);
  compare_bytes(c.name, "kept", last.gpu.data, bits, 2 * (size_t)c.n);
  if (want.bytes <= room) {
    compare_bytes(c.name, "stream", gpu_wire, aligned, want.bytes);
    device_upload(t->gpu, last.gpu.data, before, 2 * (size_t)c.n);
    gpu.room = want.bytes;
    t->gpu_ops->delta_apply(t->gpu, 1, &gpu);
    compare_bytes(c.name, "patched", last.gpu.data, bits, 2 * (size_t)c.n);
  }
  uint64_t sum[2], *gpu_sum = device_alloc(t->gpu, sizeof sum);
  Tensor cpu_x[2] = {cpu_last, from(cpu_last, c.shift)};
  Tensor gpu_x[2] = {last.gpu, from(last.gpu, c.shift)};
  t->cpu_ops->checksum(t->cpu, 2, cpu_x, sum);
  t->gpu_ops->checksum(t->gpu, 2, gpu_x, gpu_sum);
  compare_bytes(c.name, "checksums", gpu_sum, sum, sizeof sum);
  device_free(t->gpu, gpu_sum);
  device_free(t->gpu, size);
  device_free(t->gpu, gpu_wire);
  free(wire);
  free(bits);
  free(before);
}

static void streams_are_the_cpus(void **state) {
  (void)state;
  twins();
  static const Case cases[] = {
      {"nothing", 5000, 0, 1, 0},           {"empty", 1, 0.5, 1, 1},
      {"very few", 100003, 0.003, 0, 0},    {"a few", 100003, 0.01, 1, 0},
      {"unaligned", 100003, 0.03, 1, 3},    {"lists and maps", 300001, 0.085, 2, 0},
      {"maps", 70001, 0.3, 7, 0},           {"far", 50021, 0.02, 0, 0},
      {"far, maps", 50021, 0.4, 0, 5},      {"all", 9001, 1, 1, 0},
      {"all, far", 9001, 1, 0, 0},          {"one block", 4096, 0.1, 9, 0},
      {"many blocks", 3000017, 0.02, 1, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    Case c = cases[i];
    if (test_is_watched() && c.n > 40003) c.n = 40003;
    size_t room = 8 * (size_t)c.n + 64;
    check(c, DT_F32, room);
    check(c, DT_BF16, room);
    check(c, DT_F32, 1024); /* too little, mostly */
    twin_release();
  }
  twin_done();
}

/* Parts of one call, more than a launch takes. */
static void many_parts_at_once(void **state) {
  (void)state;
  enum { PARTS = 150 };
  Twins *t = twins();
  static DeltaPart cpu[PARTS], gpu[PARTS];
  static DeltaSize want[PARTS];
  const int parts = test_is_watched() ? 70 : PARTS;
  DeltaSize *size = device_alloc(t->gpu, sizeof want);
  Case c = {"parts", PARTS * 5000, 0.02, 1, 0};
  size_t room = 4096;
  Pair now = vector_of(c, 9, DT_F32, true), last = vector_of(c, 9, DT_BF16, false);
  uint16_t *bits = bits_of(last), *before = bits_of(last);
  char *wire = device_alloc(t->cpu, PARTS * room), *gpu_wire = device_alloc(t->gpu, PARTS * room);
  memset(wire, 0, PARTS * room);
  device_zero(t->gpu, gpu_wire, PARTS * room);
  int64_t at = 0;
  for (int i = 0; i < parts; i++) {
    int64_t n = i % 7 == 3 ? 0 : 4000 + i * 7 % 900;
    cpu[i] = (DeltaPart){tensor_1d(tensor_f32(now.cpu) + at, DT_F32, n),
                         tensor_1d(bits + at, DT_BF16, n), wire + (size_t)i * room, room};
    gpu[i] = (DeltaPart){tensor_1d(tensor_f32(now.gpu) + at, DT_F32, n),
                         tensor_1d((uint16_t *)last.gpu.data + at, DT_BF16, n),
                         gpu_wire + (size_t)i * room, room};
    at += n;
  }
  t->cpu_ops->delta_encode(t->cpu, parts, cpu, want);
  t->gpu_ops->delta_encode(t->gpu, parts, gpu, size);
  compare_bytes("parts", "sizes", size, want, (size_t)parts * sizeof *want);
  compare_bytes("parts", "streams", gpu_wire, wire, PARTS * room);
  device_upload(t->gpu, last.gpu.data, before, 2 * (size_t)c.n);
  t->gpu_ops->delta_apply(t->gpu, parts, gpu);
  compare_bytes("parts", "patched", last.gpu.data, bits, 2 * (size_t)at);
  device_free(t->cpu, wire);
  device_free(t->gpu, gpu_wire);
  device_free(t->gpu, size);
  free(bits);
  free(before);
  twin_done();
}

/* Any bits at all: NaNs of all payloads, infinities, denormals, both zeros; every other one is a
 * NaN whose BF16 keeps the upper half of its bits, made quiet. They arrive as they were sent. */
static void any_bits_arrive(void **state) {
  (void)state;
  enum { N = 5 * DELTA_BLOCK + 77, ROOM = 8 * N };
  Twins *t = twins();
  static uint32_t now[N];
  static uint16_t last[N], want[N];
  for (int i = 0; i < N; i++) {
    RngBlock r = rng_block(21, 1, (uint64_t)i);
    uint32_t nan = (r.v[1] % 8 == 0 ? 1 : r.v[1] % 0x7fffff + 1) | (r.v[2] & 1) << 31 | 0x7f800000u;
    uint32_t tiny = (r.v[1] & 0x807fffffu) >> r.v[2] % 24;
    now[i] = i % 2 ? nan : r.v[0] % 4 == 0 ? tiny : r.v[1];
    bool is_nan = (now[i] & 0x7fffffffu) > 0x7f800000u;
    float x;
    memcpy(&x, &now[i], sizeof x);
    convert_from_f32(&x, &want[i], DT_BF16, 1);
    if (is_nan) assert_int_equal(want[i], now[i] >> 16 | 0x40u);
    last[i] = r.v[3] % 3 == 0 ? (uint16_t)(want[i] + r.v[3] % 5) : (uint16_t)(r.v[3] >> 16);
    if (r.v[0] % 3 == 0) last[i] = want[i];
  }
  Pair a = twin_bytes(DT_F32, now, N), b = twin_bytes(DT_BF16, last, N);
  char *wire = device_alloc(t->cpu, ROOM), *gpu_wire = device_alloc(t->gpu, ROOM);
  DeltaSize size, *gpu_size = device_alloc(t->gpu, sizeof size);
  DeltaPart cpu = {a.cpu, b.cpu, wire, ROOM}, gpu = {a.gpu, b.gpu, gpu_wire, ROOM};
  t->cpu_ops->delta_encode(t->cpu, 1, &cpu, &size);
  t->gpu_ops->delta_encode(t->gpu, 1, &gpu, gpu_size);
  assert_memory_equal(b.cpu.data, want, sizeof want);
  compare_bytes("any bits", "size", gpu_size, &size, sizeof size);
  compare_bytes("any bits", "stream", gpu_wire, wire, size.bytes);
  compare_bytes("any bits", "kept", b.gpu.data, want, sizeof want);
  device_upload(t->gpu, b.gpu.data, last, sizeof last);
  gpu.room = size.bytes;
  t->gpu_ops->delta_apply(t->gpu, 1, &gpu);
  compare_bytes("any bits", "patched", b.gpu.data, want, sizeof want);
  device_free(t->cpu, wire);
  device_free(t->gpu, gpu_wire);
  device_free(t->gpu, gpu_size);
  twin_done();
}

/* Blocks that say little, and among them a list and a bitmap. */
static void much_among_little(void **state) {
  (void)state;
  enum { BLOCKS = 61, N = BLOCKS * DELTA_BLOCK - 100, ROOM = 8 * N };
  Twins *t = twins();
  static uint16_t now[N], last[N];
  for (int i = 0; i < N; i++) {
    RngBlock r = rng_block(22, 1, (uint64_t)i);
    const int block = i / DELTA_BLOCK;
    const uint32_t share = block == 17 ? 200 : block == 42 ? 50 : 2; /* of 1000 */
    last[i] = (uint16_t)r.v[0];
    now[i] = r.v[1] % 1000 >= share ? last[i] : (uint16_t)(last[i] + 5 + r.v[2] % 5);
  }
  Pair a = twin_bytes(DT_BF16, now, N), b = twin_bytes(DT_BF16, last, N);
  char *wire = device_alloc(t->gpu, ROOM);
  DeltaSize size, *gpu_size = device_alloc(t->gpu, sizeof size);
  DeltaPart part = {a.gpu, b.gpu, wire, ROOM};
  t->gpu_ops->delta_encode(t->gpu, 1, &part, gpu_size);
  device_download(t->gpu, &size, gpu_size, sizeof size);
  device_upload(t->gpu, b.gpu.data, last, sizeof last);
  part.room = size.bytes;
  t->gpu_ops->delta_apply(t->gpu, 1, &part);
  compare_bytes("much among little", "patched", b.gpu.data, now, sizeof now);
  device_free(t->gpu, wire);
  device_free(t->gpu, gpu_size);
  twin_done();
}

/* ---- speed ---- */

/* Weights go from the first of two values to the other and back, so that each encode finds the same
 * changes. */
typedef struct Run {
  Tensor now[2];
  DeltaPart part;
  DeltaSize *size;
} Run;

static void encode_both_ways(void *arg) {
  Run *r = arg;
  for (int i = 0; i < 2; i++) {
    r->part.now = r->now[i];
    twins()->gpu_ops->delta_encode(twins()->gpu, 1, &r->part, r->size);
  }
}
static void apply(void *arg) {
  twins()->gpu_ops->delta_apply(twins()->gpu, 1, &((Run *)arg)->part);
}
static void sum(void *arg) {
  Run *r = arg;
  twins()->gpu_ops->checksum(twins()->gpu, 1, &r->part.last, (uint64_t *)r->size);
}

/* Bytes of the 64-byte lines that have a change, as on the CPU (bench/bench_quant.c): what memory
 * moves each way to patch them. (Counted by ncu on an H200, 3.3 % changed: 92.95 MB read; these
 * lines and the stream are 92.9.) */
static double touched_lines(Tensor a, Tensor b) {
  enum { LINE = 64, VALUES = LINE / 2 };
  int64_t touched = 0;
  for (int64_t i = 0; i < tensor_numel(a); i += VALUES)
    touched += memcmp((const char *)(tensor_f32(a) + i), (const char *)(tensor_f32(b) + i),
                      VALUES * sizeof(float)) != 0;
  return LINE * (double)touched;
}

static void print_share(double bytes, double seconds, double copy) {
  print_message("       that is %.0f %% of the copy rate\n", 100 * bytes / seconds / copy);
}

static void time_share(Case c, DType type, double copy) {
  Twins *t = twins();
  Pair now = vector_of(c, 5, type, true), before = vector_of(c, 5, type, false);
  Pair last = vector_of(c, 5, DT_BF16, false);
  size_t room = 3 * (size_t)c.n;
  Run r = {{now.gpu, before.gpu}, .size = device_alloc(t->gpu, sizeof *r.size)};
  r.part = (DeltaPart){now.gpu, last.gpu, device_alloc(t->gpu, room), room};
  double read = (double)c.n * (double)(dtype_size(type) + 2), bytes = (double)c.n * 2;
  print_message("%lld of %s, %.2f %% change\n", (long long)c.n, dtype_name(type), 100 * c.share);
  double both = twin_time("encode twice (of what is read)", encode_both_ways, &r, 2 * read, 0);
  print_share(2 * read, both, copy);
  DeltaSize size;
  device_download(t->gpu, &size, r.size, sizeof size);
  double patch = (double)size.bytes + 2 * touched_lines(now.cpu, before.cpu);
  double once = twin_time("apply (the stream, and lines both ways)", apply, &r, patch, 0);
  print_share(patch, once, copy);
  print_share(bytes, twin_time("checksum", sum, &r, bytes, 0), copy);
  device_free(t->gpu, r.part.wire);
  device_free(t->gpu, r.size);
  twin_release();
}

static void speed(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  double copy = device_measure(twins()->gpu).copy_bytes;
  static const Case cases[] = {{"", 1 << 26, 0.0002, 1, 0},
                               {"", 1 << 26, 0.002, 1, 0},
                               {"", 1 << 26, 0.02, 1, 0},
                               {"", 1 << 26, 0.3, 7, 0},
                               {"", 1 << 22, 0.02, 1, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    time_share(cases[i], DT_F32, copy);
    time_share(cases[i], DT_BF16, copy);
  }
  twin_done();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(streams_are_the_cpus),
    cmocka_unit_test(many_parts_at_once),
    cmocka_unit_test(any_bits_arrive),
    cmocka_unit_test(much_among_little),
    cmocka_unit_test(speed),
};
TEST_MAIN(tests)
