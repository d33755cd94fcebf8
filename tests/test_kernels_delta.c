/* Deltas: what is applied is what was sent, bit for bit, whatever changed; sizes; checksums. */
#include <math.h>

#include "core/rng.h"
#include "kernels/delta.h"
#include "tests/test.h"

enum { MOST = 3 * DELTA_BLOCK + 77 };

typedef struct Case {
  double share; /* of values that change */
  int step;     /* largest change in units of the last place; 0: any bits */
} Case;

static float now[MOST];
static uint16_t last[MOST], there[MOST], want[MOST];

static void make(int64_t n, Case c, uint64_t seed) {
  for (int64_t i = 0; i < n; i++) {
    float x = rng_normal(seed, 1, (uint64_t)i);
    convert_from_f32(&x, &last[i], DT_BF16, 1);
    uint16_t bits = last[i];
    if (rng_uniform(seed, 2, (uint64_t)i) < c.share) {
      double u = rng_uniform(seed, 3, (uint64_t)i);
      int step = (int)(u * (2 * c.step + 1)) - c.step;
      bits = c.step ? (uint16_t)(bits + step) : (uint16_t)(u * 0x7f00);
    }
    convert_to_f32(&bits, DT_BF16, &now[i], 1);
    want[i] = bits;
    there[i] = last[i];
  }
}

static DeltaSize send(Device *d, int64_t n, char *wire, size_t room) {
  DeltaSize size;
  DeltaPart part = {tensor_1d(now, DT_F32, n), tensor_1d(last, DT_BF16, n), wire, room};
  device_ops(d)->delta_encode(d, 1, &part, &size);
  return size;
}

static int64_t changes(int64_t n) {
  int64_t k = 0;
  for (int64_t i = 0; i < n; i++) k += want[i] != there[i];
  return k;
}

static void check_size(DeltaSize size, int64_t n, Case c) {
  double bits = 8.0 * (double)size.bytes, k = (double)size.changed;
  double most = 64.0 * (double)delta_blocks(n) + 32.0 * (double)delta_blocks(n) + 128;
  double list = 16 * k, bitmap = 4.0 * k + DELTA_BLOCK * (double)delta_blocks(n);
  most += list < bitmap ? list : bitmap; /* a block has the cheaper of both */
  if (c.step == 0 || c.step > 7) most += 16 * k;
  assert_true(bits <= most + 16);
}

static void check(Device *d, int64_t n, Case c, uint64_t seed) {
  static _Alignas(16) char wire[8 * MOST];
  make(n, c, seed);
  int64_t changed = changes(n);
  memset(wire, 0xee, sizeof wire);
  DeltaSize size = send(d, n, wire, sizeof wire);
  assert_int_equal(size.changed, changed);
  assert_int_equal(size.bytes % 16, 0);
  check_size(size, n, c);
  assert_memory_equal(last, want, (size_t)n * sizeof *last);
  for (size_t i = size.bytes; i < sizeof wire; i++) assert_int_equal((unsigned char)wire[i], 0xee);
  DeltaPart part = {.last = tensor_1d(there, DT_BF16, n), .wire = wire, .room = size.bytes};
  device_ops(d)->delta_apply(d, 1, &part);
  assert_memory_equal(there, want, (size_t)n * sizeof *there);
  if (size.bytes == 0) return;
  make(n, c, seed); /* without room: its size, and what was sent last is up to date all the same */
  memset(wire, 0xee, sizeof wire);
  DeltaSize again = send(d, n, wire, size.bytes - 1);
  assert_memory_equal(&again, &size, sizeof size);
  assert_memory_equal(last, want, (size_t)n * sizeof *last);
  for (size_t i = size.bytes - 1; i < sizeof wire; i++)
    assert_int_equal((unsigned char)wire[i], 0xee);
}

static void what_is_applied_is_what_was_sent(void **state) {
  (void)state;
  static const Case cases[] = {{0, 1}, {0.001, 1}, {0.04, 1}, {0.09, 1}, {0.3, 7},
                               {1, 1}, {0.5, 0},   {1, 0},    {0.01, 9}, {0.0001, 0}};
  static const int64_t sizes[] = {0, 1, 3, 63, 4095, 4096, 4097, MOST};
  Device *d = device_open(DEVICE_CPU, 1, NULL);
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
      for (uint64_t seed = 1; seed < 4; seed++) check(d, sizes[s], cases[c], seed);
  device_close(d);
}

/* NaNs of all payloads, infinities, denormals, both zeros. A NaN keeps the upper half of its bits
 * and becomes quiet. */
static void any_bits_arrive(void **state) {
  (void)state;
  static _Alignas(16) char wire[8 * MOST];
  static float odd[MOST];
  Device *d = device_open(DEVICE_CPU, 1, NULL);
  for (int i = 0; i < MOST; i++) {
    RngBlock r = rng_block(21, 1, (uint64_t)i);
    uint32_t nan = (r.v[1] % 8 == 0 ? 1 : r.v[1] % 0x7fffff + 1) | (r.v[2] & 1) << 31 | 0x7f800000u;
    uint32_t tiny = (r.v[1] & 0x807fffffu) >> r.v[2] % 24, bits = r.v[0] % 4 == 0 ? tiny : r.v[1];
    if (i % 2) bits = nan;
    memcpy(&odd[i], &bits, sizeof bits);
    convert_from_f32(&odd[i], &want[i], DT_BF16, 1);
    if ((bits & 0x7fffffffu) > 0x7f800000u) assert_int_equal(want[i], bits >> 16 | 0x40u);
    there[i] = last[i] = r.v[0] % 3 == 0   ? want[i]
                         : r.v[3] % 3 == 0 ? (uint16_t)(want[i] + r.v[3] % 5)
                                           : (uint16_t)(r.v[3] >> 16);
  }
  DeltaSize size;
  DeltaPart part = {tensor_1d(odd, DT_F32, MOST), tensor_1d(last, DT_BF16, MOST), wire,
                    sizeof wire};
  device_ops(d)->delta_encode(d, 1, &part, &size);
  assert_memory_equal(last, want, sizeof want);
  DeltaPart patch = {.last = tensor_1d(there, DT_BF16, MOST), .wire = wire, .room = size.bytes};
  device_ops(d)->delta_apply(d, 1, &patch);
  assert_memory_equal(there, want, sizeof want);
  device_close(d);
}

/* A BF16 step near 0.02 is 1.2e-4 (2^-13); a learning rate of 1e-6 changes about one weight in a
 * hundred: each costs 16 bits, and a block 12 bytes at most. */
static void few_changes_cost_little(void **state) {
  (void)state;
  enum { N = 1 << 20 };
  Device *d = device_open(DEVICE_CPU, 2, NULL);
  float *x = mem_alloc(N, sizeof *x);
  uint16_t *old = mem_alloc(N, sizeof *old);
  for (int i = 0; i < N; i++) x[i] = 0.02f * rng_normal(5, 0, (uint64_t)i);
  convert_from_f32(x, old, DT_BF16, N);
  for (int i = 0; i < N; i++) x[i] += rng_normal(5, 1, (uint64_t)i) > 0 ? 1e-6f : -1e-6f;
  char *wire = device_alloc(d, N);
  DeltaSize size;
  DeltaPart part = {tensor_1d(x, DT_F32, N), tensor_1d(old, DT_BF16, N), wire, N};
  device_ops(d)->delta_encode(d, 1, &part, &size);
  double share = (double)size.changed / N;
  print_message("%.2f %% changed, %.4f bytes each weight\n", 100 * share, (double)size.bytes / N);
  assert_true(share > 0.005 && share < 0.06);
  /* Values near zero take larger steps: one change in ten may need its new bits. */
  assert_true((double)size.bytes <= 2.2 * (double)size.changed + 12.0 * N / DELTA_BLOCK + 16);
  device_free(d, wire);
  free(old);
  free(x);
  device_close(d);
}

static void checksums_see_bits_and_places(void **state) {
  (void)state;
  enum { N = 100001 };
  Device *one = device_open(DEVICE_CPU, 1, NULL), *two = device_open(DEVICE_CPU, 2, NULL);
  uint16_t *x = mem_alloc(N, sizeof *x);
  for (int i = 0; i < N; i++) x[i] = (uint16_t)(rng_uniform(7, 0, (uint64_t)i) * 65536);
  Tensor t[2] = {tensor_1d(x, DT_BF16, N), tensor_1d(x, DT_BF16, N - 1)};
  uint64_t a[2], b[2];
  device_ops(one)->checksum(one, 2, t, a);
  device_ops(two)->checksum(two, 2, t, b);
  assert_memory_equal(a, b, sizeof a);
  assert_true(a[0] != a[1]);
  x[77] ^= 1;
  device_ops(one)->checksum(one, 2, t, b);
  assert_true(b[0] != a[0] && b[1] != a[1]);
  x[77] ^= 1;
  uint16_t kept = x[5];
  x[5] = x[9000];
  x[9000] = kept;
  device_ops(one)->checksum(one, 2, t, b);
  assert_true(x[5] == kept || b[0] != a[0]);
  free(x);
  device_close(one);
  device_close(two);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(what_is_applied_is_what_was_sent),
    cmocka_unit_test(any_bits_arrive),
    cmocka_unit_test(few_changes_cost_little),
    cmocka_unit_test(checksums_see_bits_and_places),
};
TEST_MAIN(tests)
