/* Wire formats, sums of several spans and back to the wire: their order, the rule of int4's
 * integers, small codes, and spans that no cache holds. */
#include "tests/quant_test.h"

static void check_sums(Device *d, WireFormat f, WireSpan s, WireFormat to) {
  enum { N = 5 };
  WireData from = wire_take(f, s, N), a = wire_take(to, s, 1), b = wire_take(to, s, 1);
  float *y = random_floats(3, s.count, 1), *want = random_floats(3, s.count, 1);
  float *one = filled_floats(s.count, 0), *sum = filled_floats(s.count, 0);
  double *exact = widen(y, s.count);
  for (int r = 0; r < N; r++) {
    float *x = random_floats((uint64_t)r + 50, s.count, 1);
    quantize(d, f, s, x, wire_nth(from, r));
    dequantize(d, f, s, wire_nth(from, r), false, one);
    for (int64_t i = 0; i < s.count; i++) exact[i] += (double)one[i];
    dequantize(d, f, s, wire_nth(from, r), r > 0, sum); /* one after another: the same bits */
    dequantize(d, f, s, wire_nth(from, r), true, want);
    free(x);
  }
  dequantize(d, f, s, from, true, y);
  assert_same_bits("added", y, want, s.count);
  assert_close("sum", y, exact, s.count, 1e-6, 1); /* six roundings at 6e-8 */
  dequantize(d, f, s, from, false, y);
  assert_same_bits("sum alone", y, sum, s.count);
  requantize(d, f, s, from, to, a);
  if (f.kind == WIRE_INT4 && to.kind == WIRE_INT4) /* in integers */
    quant_reference_requantize(f, to, s, from, b);
  else
    quantize(d, to, s, sum, b);
  assert_same_wire(to, s, a, b);
  free(from.scales);
  free(a.scales);
  free(b.scales);
  free(y);
  free(want);
  free(one);
  free(sum);
  free(exact);
}

static void sums_are_in_order_and_one_pass_is_two(void **state) {
  (void)state;
  Device *d = open_cpu(2);
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++)
    for (WireKind t = WIRE_F32; t <= WIRE_FP8; t++) {
      check_sums(d, (WireFormat){k, 32, DT_F32}, (WireSpan){77, 32, 77 * 3 - 32},
                 (WireFormat){t, 32, DT_BF16});
      check_sums(d, (WireFormat){k, 256, DT_F32}, (WireSpan){1000, 0, 20000},
                 (WireFormat){t, 256, DT_F32});
    }
  device_close(d);
}

/* Codes of four ranks whose scales are powers of two, the largest first in every block: sums that
 * lie half way between two codes are common. One code in `rare` is below the smallest normal one.
 */
static void fill_fp8(WireFormat f, WireSpan s, uint64_t rare, WireData from) {
  static const float scales[] = {1, 0.5f, 0.25f, 0.25f};
  for (int r = 0; r < from.n; r++) {
    WireData here = wire_nth(from, r);
    uint8_t *codes = here.payload;
    for (int64_t i = 0; i < wire_blocks(f, s); i++) ((float *)here.scales)[i] = scales[r];
    for (int64_t i = 0; i < s.count; i++) {
      uint32_t u = (uint32_t)(rng_uniform(7, (uint64_t)r, (uint64_t)i) * 0x1p24f);
      uint32_t code = u / 256 % rare == 0 ? u % 8 : u % 16 == 0 ? 0 : 8 + u % 119;
      codes[i] = (uint8_t)(i % f.block == 0 ? 0x7e : code | (u >> 16 & 0x80));
    }
  }
}

static void fp8_sums_round_ties_and_small_codes(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  WireSpan s = {1024, 0, 16384};
  float *sum = filled_floats(s.count, 0);
  for (int block = 128; block <= 512; block *= 2)
    for (uint64_t rare = 1; rare <= 1000; rare *= 10) {
      WireFormat f = {WIRE_FP8, block, DT_F32};
      WireData from = wire_take(f, s, 4), a = wire_take(f, s, 1), b = wire_take(f, s, 1);
      fill_fp8(f, s, rare, from);
      dequantize(d, f, s, from, false, sum);
      for (int64_t i = 0; i < s.count; i += block) assert_true(sum[i] == 896);
      requantize(d, f, s, from, f, a);
      quant_reference_encode(f, s, sum, b);
      assert_same_wire(f, s, a, b);
      quantize(d, f, s, sum, a);
      assert_same_wire(f, s, a, b);
      free(from.scales);
      free(a.scales);
      free(b.scales);
    }
  free(sum);
  device_close(d);
}

/* ---- sums of int4 ---- */

typedef struct Int4Case {
  WireFormat f, to;
  WireSpan s;
  int n;
  float apart; /* how much the ranks' sizes differ: exp of so many deviations */
} Int4Case;

/* What ranks send; every third block of it cancels or is nothing, every seventh is tiny. */
static WireData int4_sources(Device *d, const Int4Case *c) {
  WireData from = wire_take(c->f, c->s, c->n);
  for (int r = 0; r < c->n; r++) {
    float *x = random_floats((uint64_t)r + 70, c->s.count, 1);
    for (int64_t i = 0; i < c->s.count; i++) {
      int64_t block = i / 300;
      x[i] *= expf(c->apart * rng_normal(8, (uint64_t)r, (uint64_t)block));
      if (block % 7 == 6) x[i] *= 1e-33f;
      if (block % 3 == 2) x[i] = (float)(i * 5 % 15 - 7) * (r % 2 ? -1.0f : 1.0f);
      if (block % 6 == 5) x[i] = 0;
    }
    quantize(d, c->f, c->s, x, wire_nth(from, r));
    free(x);
  }
  return from;
}

/* An element arrives within half a step, its scales' rounding and what its code's is. */
static void check_int4_error(Device *d, const Int4Case *c, WireData from, WireData to) {
  float *y = filled_floats(c->s.count, 0), *one = filled_floats(c->s.count, 0);
  double *sum = widen(y, c->s.count);
  for (int r = 0; r < c->n; r++) {
    dequantize(d, c->f, c->s, wire_nth(from, r), false, one);
    for (int64_t i = 0; i < c->s.count; i++) sum[i] += (double)one[i];
  }
  dequantize(d, c->to, c->s, to, false, y);
  int64_t row = wire_blocks(c->to, (WireSpan){c->s.width, 0, c->s.width});
  for (int64_t i = 0; i < c->s.count; i++) {
    int64_t at = c->s.first + i, column = at % c->s.width;
    int64_t block = at / c->s.width * row + column / c->to.block;
    block -= c->s.first / c->s.width * row + c->s.first % c->s.width / c->to.block;
    size_t bytes = dtype_size(c->to.scale);
    float step;
    convert_to_f32((char *)to.scales + (size_t)block * bytes, c->to.scale, &step, 1);
    double clipped = c->to.scale == DT_F32 ? 0 : 7.0 / 256; /* by a scale that was rounded down */
    assert_true(fabs((double)y[i] - sum[i]) <= (double)step * (0.505 + clipped + c->n / 80.0));
  }
  free(y);
  free(one);
  free(sum);
}

/* No encoder makes such: scales below zero, and a zero with a sign, in some blocks of a rank. */
static void turn_scales(const Int4Case *c, WireData from) {
  size_t bytes = dtype_size(c->f.scale);
  char *scales = wire_nth(from, c->n / 2).scales;
  for (int64_t i = 0; i < wire_blocks(c->f, c->s); i += 3)
    scales[(size_t)(i + 1) * bytes - 1] = (char)(scales[(size_t)(i + 1) * bytes - 1] ^ 0x80);
}

static void int4_sums_are_the_references(void **state) {
  (void)state;
  static const int sources[] = {1, 2, 3, 4, 8, 16, 17};
  static const WireSpan spans[] = {{77, 32, 77 * 3 - 32}, {1000, 0, 4000}, {4096, 256, 7936}};
  Device *d = open_cpu(2);
  for (int n = 0; n < 7; n++)
    for (int block = 32; block <= 512; block *= 2)
      for (int s = block > 32 ? 1 : 0; s < (block > 256 ? 2 : 3); s++) {
        Int4Case c = {{WIRE_INT4, block, n % 2 ? DT_BF16 : DT_F32},
                      {WIRE_INT4, block, s % 2 ? DT_F32 : DT_BF16},
                      spans[s],
                      sources[n],
                      (float)(n % 3)};
        WireData from = int4_sources(d, &c), a = wire_take(c.to, c.s, 1);
        WireData b = wire_take(c.to, c.s, 1);
        requantize(d, c.f, c.s, from, c.to, a);
        quant_reference_requantize(c.f, c.to, c.s, from, b);
        assert_same_wire(c.to, c.s, a, b);
        check_int4_error(d, &c, from, a);
        turn_scales(&c, from);
        requantize(d, c.f, c.s, from, c.to, a);
        quant_reference_requantize(c.f, c.to, c.s, from, b);
        assert_same_wire(c.to, c.s, a, b);
        check_int4_error(d, &c, from, a);
        free(from.scales);
        free(a.scales);
        free(b.scales);
      }
  device_close(d);
}

/* Scales of powers of two: codes and scales of the sum are exact. */
static void int4_sums_of_powers_of_two_are_exact(void **state) {
  (void)state;
  enum { N = 256, RANKS = 4 };
  Device *d = open_cpu(1);
  WireFormat f = {WIRE_INT4, N, DT_F32};
  WireSpan s = {N, 0, N};
  float x[N], y[N];
  WireData from = wire_take(f, s, RANKS), to = wire_take(f, s, 1);
  for (int e = -60; e <= 60; e += 12) {
    for (int r = 0; r < RANKS; r++) { /* sums are 7.5 times the code 7, 5, ... of rank 0 */
      static const float part[] = {4, 2, 1, 0.5f};
      for (int i = 0; i < N; i++) x[i] = ldexpf((float)(2 * (i % 8) - 7) * part[r], e);
      quantize(d, f, s, x, wire_nth(from, r));
    }
    requantize(d, f, s, from, f, to);
    dequantize(d, f, s, to, false, y);
    for (int i = 0; i < N; i++) assert_true(y[i] == ldexpf((float)(2 * (i % 8) - 7) * 7.5f, e));
  }
  free(from.scales);
  free(to.scales);
  device_close(d);
}

/* Spans that no cache holds are written past it where lines are whole: the same bits as their
 * parts. Memory of the device starts where a line does. */
static WireData wire_of_lines(Device *d, WireFormat f, WireSpan s, int n) {
  size_t scales = wire_scale_bytes(f, s), stride = scales + wire_payload_bytes(f, s);
  char *p = device_alloc(d, stride * (size_t)n);
  assert_int_equal(scales % 64, 0);
  return (WireData){p, p + scales, n, stride};
}

static void large_spans_are_their_parts(void **state) {
  (void)state;
  enum { WIDTH = 4096, ROWS = 1025, N = WIDTH * ROWS, HALF = WIDTH * (ROWS / 2), SOURCES = 2 };
  Device *d = open_cpu(2);
  float *x = device_alloc(d, N * sizeof *x), *y = device_alloc(d, N * sizeof *y);
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++) {
    WireFormat f = {k, 256, DT_F32};
    WireSpan whole = {WIDTH, 0, N}, first = {WIDTH, 0, HALF}, second = {WIDTH, HALF, N - HALF};
    WireData from = wire_of_lines(d, f, whole, SOURCES), a = wire_of_lines(d, f, whole, 1);
    WireData b = wire_of_lines(d, f, whole, 1), from2 = from, b2 = b;
    for (int r = 0; r < SOURCES; r++) {
      for (int i = 0; i < N; i++)
        x[i] = i < 10007 ? rng_normal((uint64_t)r, 3, (uint64_t)i) : x[i - 10007];
      quantize(d, f, whole, x, wire_nth(from, r));
    }
    size_t scales = wire_scale_bytes(f, first), payload = wire_payload_bytes(f, first);
    from2.scales = (char *)from.scales + scales, from2.payload = (char *)from.payload + payload;
    b2.scales = (char *)b.scales + scales, b2.payload = (char *)b.payload + payload;
    requantize(d, f, whole, from, f, a);
    requantize(d, f, first, from, f, b);
    requantize(d, f, second, from2, f, b2);
    assert_same_wire(f, whole, a, b);
    from.n = from2.n = 1;
    dequantize(d, f, whole, from, false, x);
    dequantize(d, f, first, from, false, y);
    dequantize(d, f, second, from2, false, y + HALF);
    assert_same_bits("large", x, y, N);
    device_free(d, from.scales);
    device_free(d, a.scales);
    device_free(d, b.scales);
  }
  device_free(d, x);
  device_free(d, y);
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(sums_are_in_order_and_one_pass_is_two),
    cmocka_unit_test(fp8_sums_round_ties_and_small_codes),
    cmocka_unit_test(int4_sums_are_the_references),
    cmocka_unit_test(int4_sums_of_powers_of_two_are_exact),
    cmocka_unit_test(large_spans_are_their_parts),
};
TEST_MAIN(tests)
