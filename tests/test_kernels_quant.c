/* Wire formats, one span: the ops against their readable twin bit for bit, rounding, what is not a
 * number, tiny and huge blocks, error feedback, and what blocks are worth. */
#include <float.h>

#include "tests/quant_test.h"

/* ---- against the reference ---- */

static void check_reference(Device *d, WireFormat f, WireSpan s) {
  float *x = random_floats((uint64_t)s.width, s.count, 3);
  for (int64_t i = 0; i < s.count; i += 5) x[i] = (float)(i % 15 - 7) * 0.5f; /* ties and zeros */
  for (int64_t i = 0; s.width > 2 && i < s.count && i < s.width / 2; i++) x[i] = 0;
  WireData a = wire_take(f, s, 1), b = wire_take(f, s, 1);
  float *y = filled_floats(s.count, -1), *want = filled_floats(s.count, -2);
  quantize(d, f, s, x, a);
  quant_reference_encode(f, s, x, b);
  assert_same_wire(f, s, a, b);
  dequantize(d, f, s, a, false, y);
  quant_reference_decode(f, s, b, want);
  for (int64_t i = 0; i < s.count; i++) assert_true(y[i] == want[i]);
  free(x);
  free(y);
  free(want);
  free(a.scales);
  free(b.scales);
}

static void ops_equal_the_reference(void **state) {
  (void)state;
  static const int64_t widths[] = {1, 2, 5, 16, 64, 100, 300, 1025, 9000};
  static const int blocks[] = {2, 16, 64, 256, 4096};
  Device *d = open_cpu(2);
  for (int k = 0; k < 3; k++)
    for (int b = 0; b < 5; b++)
      for (int w = 0; w < 9; w++)
        for (int part = 0; part < 3 && (w < 8 || b == 4); part++) {
          WireFormat f = {quantized[k], blocks[b], part == 1 ? DT_BF16 : DT_F32};
          int64_t width = widths[w], lead = width > f.block ? f.block : 0;
          WireSpan s = {width, 0, 3 * width};
          if (part == 1) s = (WireSpan){width, 2 * width + lead, 2 * width - lead};
          if (part == 2) s = (WireSpan){width, lead, lead ? lead : width};
          if (part == 2 && (s.first + s.count) % width % f.block) s.count = width - lead;
          check_reference(d, f, s);
        }
  device_close(d);
}

static void sizes_add_up(void **state) {
  (void)state;
  WireFormat f = {WIRE_INT4, 4, DT_BF16};
  WireSpan whole = {7, 0, 21}; /* rows of a block of 4 and one of 3 */
  assert_int_equal(wire_blocks(f, whole), 6);
  assert_int_equal(wire_scale_bytes(f, whole), 12);
  assert_int_equal(wire_payload_bytes(f, whole), 3 * (2 + 2));
  WireSpan head = {7, 0, 11}, tail = {7, 11, 10}; /* cut between the blocks of row 1 */
  assert_int_equal(wire_blocks(f, head), 3);
  assert_int_equal(wire_blocks(f, tail), 3);
  assert_int_equal(wire_payload_bytes(f, head) + wire_payload_bytes(f, tail), 12);
  assert_int_equal(wire_payload_bytes((WireFormat){WIRE_BF16, 0, DT_F32}, head), 22);
  assert_int_equal(wire_payload_bytes((WireFormat){WIRE_F32, 0, DT_F32}, head), 44);
  assert_int_equal(wire_blocks((WireFormat){WIRE_F32, 0, DT_F32}, head), 0);
  WireFormat huge = {WIRE_INT8, 256, DT_F32};
  WireSpan many = {1 << 20, 0, (int64_t)1 << 40};
  assert_int_equal(wire_blocks(huge, many), (int64_t)1 << 32);
}

static void empty_spans_are_fine(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++) {
    WireFormat f = {k, 16, DT_F32};
    WireSpan s = {5, 10, 0};
    WireData a = {NULL, NULL, 1, 0};
    quantize(d, f, s, NULL, a);
    dequantize(d, f, s, a, true, NULL);
  }
  device_close(d);
}

/* ---- rounding ---- */

static void exact_numbers_stay_exact(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  for (int k = 0; k < 3; k++) {
    float most = quantized[k] == WIRE_INT8 ? 127 : quantized[k] == WIRE_INT4 ? 7 : 448;
    for (int e = -100; e <= 100; e += 20)
      for (int bf16 = 0; bf16 < 2; bf16++) {
        WireFormat f = {quantized[k], 16, bf16 ? DT_BF16 : DT_F32};
        WireSpan s = {16, 0, 16};
        float x[16], y[16];
        for (int i = 0; i < 16; i++) x[i] = ldexpf((float)(i - 8), e); /* fits into four bits */
        x[0] = ldexpf(-most, e);
        WireData a = wire_take(f, s, 1);
        quantize(d, f, s, x, a);
        dequantize(d, f, s, a, false, y);
        for (int i = 1; i < 16; i++) assert_true(y[i] == x[i]);
        assert_true(y[0] == x[0]); /* the largest is 7 / 7 of itself, not 7 / 8 */
        free(a.scales);
      }
  }
  device_close(d);
}

static void ties_go_to_even(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  WireSpan s = {8, 0, 8};
  float x[8] = {7, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 6.5f}, y[8];
  static const float want[8] = {7, 0, 2, 2, 0, -2, -2, 6};
  WireFormat f = {WIRE_INT4, 8, DT_F32};
  WireData a = wire_take(f, s, 1);
  quantize(d, f, s, x, a);
  dequantize(d, f, s, a, false, y);
  for (int i = 0; i < 8; i++) assert_true(y[i] == want[i]);
  x[0] = 127;
  f.kind = WIRE_INT8;
  free(a.scales);
  a = wire_take(f, s, 1);
  quantize(d, f, s, x, a);
  dequantize(d, f, s, a, false, y);
  for (int i = 1; i < 8; i++) assert_true(y[i] == want[i]);
  float z[8] = {448, 17, 19, 0.0009765625f, 0.0029296875f, 0.001953125f, 460.0f / 1024, -448};
  static const float fp8[8] = {448, 16, 20, 0, 0.00390625f, 0.001953125f, 0.4375f, -448};
  f.kind = WIRE_FP8; /* 17 lies between 16 and 18, 19 between 18 and 20: the even mantissa wins */
  quantize(d, f, s, z, a);
  dequantize(d, f, s, a, false, y);
  for (int i = 0; i < 8; i++) assert_true(y[i] == fp8[i]);
  free(a.scales);
  device_close(d);
}

/* An integer code is off by half a step at most, where a step is the block's largest / most, and a
 * 16-bit scale may clip the largest by 2^-8 of it; e4m3 by 2^-4 of the number or half of 2^-9. */
static void errors_are_bounded(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  for (int k = 0; k < 3; k++)
    for (int bf16 = 0; bf16 < 2; bf16++) {
      WireFormat f = {quantized[k], 64, bf16 ? DT_BF16 : DT_F32};
      WireSpan s = {200, 0, 20000};
      float *x = random_floats(9, s.count, 1), *y = filled_floats(s.count, 0);
      WireData a = wire_take(f, s, 1);
      quantize(d, f, s, x, a);
      dequantize(d, f, s, a, false, y);
      for (int64_t at = 0, n; at < s.count; at += n) {
        n = at % 200 == 192 ? 8 : 64;
        double largest = 0, slack = bf16 ? 1.01 : 1.0001;
        for (int64_t i = at; i < at + n; i++) largest = fmax(largest, fabs((double)x[i]));
        for (int64_t i = at; i < at + n; i++) {
          double error = fabs((double)x[i] - (double)y[i]);
          double bound = quantized[k] == WIRE_FP8
                             ? fmax(fabs((double)x[i]) / 16, largest / 448 / 1024)
                             : largest / (quantized[k] == WIRE_INT8 ? 254 : 14);
          assert_true(error <= slack * bound);
        }
      }
      free(x);
      free(y);
      free(a.scales);
    }
  device_close(d);
}

static void sixteen_bits_are_those_of_convert(void **state) {
  (void)state;
  enum { N = 1 << 17 };
  Device *d = open_cpu(2);
  WireFormat f = {WIRE_BF16, 0, DT_F32};
  WireSpan s = {N, 0, N};
  float *x = filled_floats(N, 0), *y = filled_floats(N, 0), *z = filled_floats(N, 0);
  uint16_t *want = mem_alloc(N, sizeof *want);
  for (uint32_t i = 0; i < N; i++) { /* all exponents, NaN, infinities; halves, above, below */
    uint32_t bits = (i >> 1) << 16 | (i & 1 ? 0x8000U : 0x7fffU + (i >> 2 & 2));
    memcpy(&x[i], &bits, 4);
  }
  WireData a = wire_take(f, s, 1);
  quantize(d, f, s, x, a);
  convert_from_f32(x, want, DT_BF16, N);
  for (int i = 0; i < N; i++) {
    if (isnan(x[i])) continue;
    assert_int_equal(((uint16_t *)a.payload)[i], want[i]);
  }
  dequantize(d, f, s, a, false, y);
  convert_to_f32(want, DT_BF16, z, N);
  for (int i = 0; i < N; i++) assert_true(isnan(x[i]) ? isnan(y[i]) : y[i] == z[i]);
  free(x);
  free(y);
  free(z);
  free(want);
  free(a.scales);
  device_close(d);
}

/* ---- what is not a number, nothing, tiny, huge ---- */

static void not_a_number_is_never_laundered(void **state) {
  (void)state;
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  Device *d = open_cpu(1);
  WireSpan s = {48, 0, 96}; /* blocks of 32 and 16 in each row */
  for (WireKind k = WIRE_BF16; k <= WIRE_FP8; k++)
    for (int at = 0; at < 96; at++)
      for (int b = 0; b < 3; b++) {
        WireFormat f = {k, 32, at % 2 ? DT_BF16 : DT_F32};
        float *x = filled_floats(96, 1), *y = filled_floats(96, 0);
        x[at] = bad[b];
        WireData a = wire_take(f, s, 1), again = wire_take(f, s, 1);
        quantize(d, f, s, x, a);
        dequantize(d, f, s, a, false, y);
        int block = at / 48 * 2 + (at % 48 >= 32);
        for (int i = 0; i < 96; i++) {
          bool same = k == WIRE_BF16 ? i == at : i / 48 * 2 + (i % 48 >= 32) == block;
          /* Its block, and no other: those are off by what a scale in bf16 is, 2^-8. */
          assert_true(same ? !isfinite(y[i]) : fabsf(y[i] - 1) <= 0.00390625f);
        }
        requantize(d, f, s, a, f, again);
        dequantize(d, f, s, again, false, y);
        assert_true(!isfinite(y[at]));
        free(x);
        free(y);
        free(a.scales);
        free(again.scales);
      }
  device_close(d);
}

static void zero_tiny_and_huge(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  for (int k = 0; k < 3; k++)
    for (int bf16 = 0; bf16 < 2; bf16++) {
      WireFormat f = {quantized[k], 4, bf16 ? DT_BF16 : DT_F32};
      WireSpan s = {4, 0, 16};
      float x[16] = {0,      -0.0f, 0, 0, 1e-44f,  -1e-40f, 0,        0,
                     1e-34f, 0,     0, 0, FLT_MAX, 1,       -FLT_MAX, 0};
      float y[16];
      WireData a = wire_take(f, s, 1);
      quantize(d, f, s, x, a);
      dequantize(d, f, s, a, false, y);
      for (int i = 0; i < 8; i++) assert_true(y[i] == 0);
      double step = quantized[k] == WIRE_INT4 ? 1.0 / 14 : 1.0 / 128;
      assert_true(fabs((double)y[8] - 1e-34) <= 1e-34 * step);
      assert_true(isfinite(y[12]) && (double)y[12] >= (1 - step) * (double)FLT_MAX);
      assert_true(y[14] == -y[12] && y[13] == 0 && y[15] == 0);
      free(a.scales);
    }
  device_close(d);
}

/* What lies behind a row's end, or behind an odd block's last code, sets no scale. */
static void padding_never_sets_a_scale(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  WireFormat f = {WIRE_INT4, 4, DT_F32};
  WireSpan s = {5, 0, 10};
  float x[10] = {1, 1, 1, 1, 0.001f, 100, 100, 100, 100, 0.002f}, y[10];
  WireData a = wire_take(f, s, 1);
  quantize(d, f, s, x, a);
  dequantize(d, f, s, a, false, y);
  for (int i = 0; i < 10; i++) assert_true(fabsf(y[i] - x[i]) <= 1e-6f * x[i]);
  free(a.scales);
  device_close(d);
}

static void threads_change_no_bit(void **state) {
  (void)state;
  enum { N = 3 * 16411 };
  WireSpan s = {16411, 0, N};
  float *x = random_floats(4, N, 1), *first = filled_floats(N, 0), *y = filled_floats(N, 0);
  for (WireKind k = WIRE_F32; k <= WIRE_FP8; k++) {
    WireFormat f = {k, 64, DT_F32};
    for (int threads = 1; threads <= 3; threads++) {
      Device *d = open_cpu(threads);
      WireData a = wire_take(f, s, 1);
      quantize(d, f, s, x, a);
      dequantize(d, f, s, a, false, threads == 1 ? first : y);
      if (threads > 1) assert_same_bits("threads", first, y, N);
      free(a.scales);
      device_close(d);
    }
  }
  free(x);
  free(first);
  free(y);
}

/* ---- error feedback ---- */

/* With e = decay e + (1 - decay) (h - got), the sum of what arrived is the sum of what was put in,
 * but for the last e / (1 - decay): nothing is lost for good. */
static void check_feedback(Device *d, WireFormat f, float decay) {
  enum { N = 100, STEPS = 300 };
  WireSpan s = {50, 0, N};
  uint16_t error[N] = {0};
  WireFeedback e = {tensor_1d(error, DT_BF16, N), decay};
  double lost[N] = {0}, worst = 0, plain = 0;
  float y[N], *x = random_floats(8, N, 1);
  WireData a = wire_take(f, s, 1);
  for (int step = 0; step < STEPS; step++) {
    quantize_fed(d, f, s, x, e, a);
    dequantize(d, f, s, a, false, y);
    for (int i = 0; i < N; i++) lost[i] += (double)x[i] - (double)y[i];
  }
  quantize(d, f, s, x, a);
  dequantize(d, f, s, a, false, y);
  for (int i = 0; i < N; i++) {
    worst = fmax(worst, fabs(lost[i]));
    plain = fmax(plain, STEPS * fabs((double)x[i] - (double)y[i]));
  }
  assert_true(worst < plain / 10);
  /* The error is rounded to bf16 at each step: 2^-9 of half a step, which may add up. */
  double step = 3.5 / (f.kind == WIRE_INT8 ? 127 : 7);
  assert_true(worst <= step * (1 / (1 - (double)decay) + STEPS / 512.0));
  free(x);
  free(a.scales);
}

static void feedback_gives_back_what_was_lost(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  check_feedback(d, (WireFormat){WIRE_INT4, 16, DT_F32}, 0);
  check_feedback(d, (WireFormat){WIRE_INT4, 16, DT_F32}, 0.8f);
  check_feedback(d, (WireFormat){WIRE_INT8, 16, DT_BF16}, 0.5f);
  device_close(d);
}

static void feedback_forgets_what_is_not_a_number(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  WireFormat f = {WIRE_INT4, 4, DT_F32};
  WireSpan s = {8, 0, 8};
  uint16_t error[8] = {0};
  float x[8] = {7, 0.3f, 0.3f, 0.3f, 7, 0.3f, 0.3f, 0.3f};
  WireData a = wire_take(f, s, 1);
  WireFeedback e = {tensor_1d(error, DT_BF16, 8), 0};
  quantize_fed(d, f, s, x, e, a);
  for (int i = 0; i < 8; i++) assert_int_equal(error[i] != 0, i % 4 != 0);
  x[1] = NAN;
  quantize_fed(d, f, s, x, e, a);
  for (int i = 0; i < 8; i++) assert_int_equal(error[i] != 0, i > 4);
  free(a.scales);
  device_close(d);
}

/* -0 arrives as the -0 that it is, so nothing was lost; in blocks of vectors and of single numbers.
 */
static void feedback_keeps_the_sign_of_zero(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  for (int width = 64; width >= 10; width -= 54) {
    WireFormat f = {WIRE_FP8, 64, DT_F32};
    WireSpan s = {width, 0, width};
    uint16_t error[64];
    float x[64];
    for (int i = 0; i < width; i++) x[i] = -0.0f, error[i] = 0x8000;
    WireData a = wire_take(f, s, 1);
    quantize_fed(d, f, s, x, (WireFeedback){tensor_1d(error, DT_BF16, width), 0.5f}, a);
    for (int i = 0; i < width; i++) {
      assert_int_equal(((uint8_t *)a.payload)[i], 0x80);
      assert_int_equal(error[i], 0);
    }
    free(a.scales);
  }
  device_close(d);
}

/* ---- what blocks are worth ---- */

/* Weights whose channels differ in size, as trained ones do: root mean square error of int8 with
 * blocks of 256 against one scale for all. Published: about three times smaller. */
static void blocks_beat_one_scale_per_tensor(void **state) {
  (void)state;
  enum { ROWS = 64, WIDTH = 4096 /* = WIRE_MAX_BLOCK, so a row may be one block */ };
  Device *d = open_cpu(1);
  float *x = random_floats(5, ROWS * WIDTH, 0.02f), *y = filled_floats(ROWS * WIDTH, 0);
  for (int i = 0; i < ROWS * WIDTH; i++) x[i] *= expf(0.7f * rng_normal(6, 1, (uint64_t)i / 256));
  WireFormat f = {WIRE_INT8, 256, DT_F32};
  WireSpan s = {WIDTH, 0, ROWS * WIDTH};
  WireData a = wire_take(f, s, 1);
  quantize(d, f, s, x, a);
  dequantize(d, f, s, a, false, y);
  double blocks = 0, whole = 0, largest = 0;
  for (int i = 0; i < ROWS * WIDTH; i++) largest = fmax(largest, fabs((double)x[i]));
  for (int i = 0; i < ROWS * WIDTH; i++) {
    double step = largest / 127, rounded = step * nearbyint((double)x[i] / step);
    blocks += pow((double)y[i] - (double)x[i], 2);
    whole += pow(rounded - (double)x[i], 2);
  }
  double ratio = sqrt(whole / blocks);
  print_message("# one scale per tensor: %.1f times the error of blocks of 256\n", ratio);
  assert_true(ratio > 3);
  free(x);
  free(y);
  free(a.scales);
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(ops_equal_the_reference),
    cmocka_unit_test(sizes_add_up),
    cmocka_unit_test(empty_spans_are_fine),
    cmocka_unit_test(exact_numbers_stay_exact),
    cmocka_unit_test(ties_go_to_even),
    cmocka_unit_test(errors_are_bounded),
    cmocka_unit_test(sixteen_bits_are_those_of_convert),
    cmocka_unit_test(not_a_number_is_never_laundered),
    cmocka_unit_test(zero_tiny_and_huge),
    cmocka_unit_test(padding_never_sets_a_scale),
    cmocka_unit_test(threads_change_no_bit),
    cmocka_unit_test(feedback_gives_back_what_was_lost),
    cmocka_unit_test(feedback_forgets_what_is_not_a_number),
    cmocka_unit_test(feedback_keeps_the_sign_of_zero),
    cmocka_unit_test(blocks_beat_one_scale_per_tensor),
};
TEST_MAIN(tests)
