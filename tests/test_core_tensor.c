/* core/tensor.h: the table of types, and 16-bit conversions checked against their definition. */
#include "core/tensor.h"

#include <math.h>
#include <stdio.h>

#include "tests/test.h"

static void names_round_trip(void **state) {
  (void)state;
  for (int t = 0; t < DT_COUNT; t++) {
    assert_int_equal(dtype_parse(dtype_name((DType)t)), t);
    assert_true(dtype_size((DType)t) >= 1 && dtype_size((DType)t) <= 8);
  }
  assert_int_equal(dtype_parse("F8"), -1);
  assert_int_equal(dtype_parse(""), -1);
  assert_int_equal(dtype_parse("f32"), -1);
  assert_int_equal(dtype_size(DT_BF16), 2);
}

static void shapes(void **state) {
  (void)state;
  float x[24];
  Tensor t = tensor_3d(x, DT_F32, 2, 3, 4);
  assert_int_equal(tensor_numel(t), 24);
  assert_int_equal(tensor_bytes(t), 96);
  assert_ptr_equal(tensor_f32(t), x);
  assert_int_equal(tensor_numel(tensor_1d(NULL, DT_F16, 5)), 5);
  assert_int_equal(tensor_bytes(tensor_2d(NULL, DT_BF16, 0, 7)), 0);
}

/* The value of a 16-bit float by its definition. */
static double half_value(unsigned h, int exponent_bits) {
  int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  int e = (int)(h & 0x7fff) >> mantissa_bits, m = (int)h & ((1 << mantissa_bits) - 1);
  double sign = h & 0x8000 ? -1 : 1;
  if (e == 2 * bias + 1) return m ? NAN : sign * INFINITY;
  if (e == 0) return sign * ldexp(m, 1 - bias - mantissa_bits);
  return sign * ldexp(m + (1 << mantissa_bits), e - bias - mantissa_bits);
}

static float widen(uint16_t h, DType t) {
  float x;
  assert_int_equal(convert_to_f32(&h, t, &x, 1), 0);
  return x;
}

static uint16_t narrow(float x, DType t) {
  uint16_t h;
  assert_int_equal(convert_from_f32(&x, &h, t, 1), 0);
  return h;
}

static void every_half(DType t, int exponent_bits) {
  for (unsigned h = 0; h < 0x10000; h++) {
    double want = half_value(h, exponent_bits);
    float x = widen((uint16_t)h, t);
    if (isnan(want)) {
      assert_true(isnan(x));
      assert_true(isnan(widen(narrow(x, t), t)));
      continue;
    }
    assert_true((double)x == want && !signbit(x) == !signbit(want));
    assert_int_equal(narrow(x, t), h);
  }
}

/* Between each pair of neighbours: below the middle goes down, above goes up, the middle goes to
 * the even one. The last pair is the largest number and infinity, whose middle is half a step
 * above. */
static void every_rounding(DType t, int exponent_bits) {
  int mantissa_bits = 15 - exponent_bits;
  unsigned infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  for (unsigned h = 0; h < infinity; h++) {
    double low = half_value(h, exponent_bits), high = half_value(h + 1, exponent_bits);
    if (h + 1 == infinity) high = 2 * low - half_value(h - 1, exponent_bits);
    float middle = (float)((low + high) / 2);
    assert_true((double)middle == (low + high) / 2);
    unsigned even = h % 2 ? h + 1 : h;
    assert_int_equal(narrow(middle, t), even);
    assert_int_equal(narrow(nextafterf(middle, 0), t), h);
    assert_int_equal(narrow(nextafterf(middle, INFINITY), t), h + 1);
    assert_int_equal(narrow(-middle, t), even | 0x8000);
  }
  assert_int_equal(narrow(3e38f, DT_F16), 0x7c00);
  assert_int_equal(narrow(INFINITY, t), infinity);
}

static void f16(void **state) {
  (void)state;
  every_half(DT_F16, 5);
  every_rounding(DT_F16, 5);
}

static void bf16(void **state) {
  (void)state;
  every_half(DT_BF16, 8);
  every_rounding(DT_BF16, 8);
}

static void low_payload_nan_stays_nan(void **state) {
  (void)state;
  const uint32_t bits[] = {0x7f800001u, 0xff800001u, 0x7fffffffu, 0x7fc00000u};
  for (size_t i = 0; i < 4; i++) {
    float x;
    memcpy(&x, &bits[i], sizeof x);
    assert_true(isnan(widen(narrow(x, DT_BF16), DT_BF16)));
    assert_true(isnan(widen(narrow(x, DT_F16), DT_F16)));
  }
}

static void other_types(void **state) {
  (void)state;
  double wide[3] = {1e300, -2.5, 0x1p-149};
  float x[3];
  assert_int_equal(convert_to_f32(wide, DT_F64, x, 3), 0);
  assert_true(isinf(x[0]) && x[1] == -2.5f && x[2] == 0x1p-149f);
  assert_int_equal(convert_from_f32(x, wide, DT_F64, 3), 0);
  assert_true(isinf(wide[0]) && wide[1] == -2.5 && wide[2] == 0x1p-149);
  assert_int_equal(convert_to_f32(wide, DT_F32, x, 0), 0);
  assert_int_equal(convert_to_f32(wide, DT_I32, x, 1), -1);
  assert_int_equal(convert_from_f32(x, wide, DT_F8_E4M3, 1), -1);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(names_round_trip),
    cmocka_unit_test(shapes),
    cmocka_unit_test(f16),
    cmocka_unit_test(bf16),
    cmocka_unit_test(other_types),
    cmocka_unit_test(low_payload_nan_stays_nan),
};
TEST_MAIN(tests)
