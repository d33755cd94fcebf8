/* What tests of the wire formats are made of: spans on the wire, and the ops over one part. */
#ifndef TESTS_QUANT_TEST_H
#define TESTS_QUANT_TEST_H

#include "kernels/cpu/quant.h"
#include "tests/kernels_test.h"

static const WireKind quantized[] = {WIRE_INT8, WIRE_INT4, WIRE_FP8};

/* A span on the wire in memory of exactly its size, several times over. */
static inline WireData wire_take(WireFormat f, WireSpan s, int n) {
  size_t scales = wire_scale_bytes(f, s), payload = wire_payload_bytes(f, s);
  size_t stride = (scales + payload + 3) / 4 * 4;
  char *p = mem_zalloc(1, stride * (size_t)(n - 1) + scales + payload + (stride == 0));
  return (WireData){p, p + scales, n, stride};
}

static inline WireData wire_nth(WireData d, int r) {
  return (WireData){(char *)d.scales + (size_t)r * d.stride,
                    (char *)d.payload + (size_t)r * d.stride, 1, d.stride};
}

static inline void assert_same_wire(WireFormat f, WireSpan s, WireData a, WireData b) {
  assert_memory_equal(a.scales, b.scales, wire_scale_bytes(f, s));
  assert_memory_equal(a.payload, b.payload, wire_payload_bytes(f, s));
}

static inline void quantize_fed(Device *d, WireFormat f, WireSpan s, float *x, WireFeedback e,
                                WireData to) {
  WirePart part = {.span = s, .x = f32_1d(x, s.count), .e = e, .to = to};
  device_ops(d)->quantize(d, f, 1, &part);
}

static inline void requantize(Device *d, WireFormat f, WireSpan s, WireData from, WireFormat f_to,
                              WireData to) {
  WirePart part = {.span = s, .from = from, .to = to};
  device_ops(d)->requantize(d, f, f_to, 1, &part);
}

static inline void quantize(Device *d, WireFormat f, WireSpan s, float *x, WireData to) {
  quantize_fed(d, f, s, x, (WireFeedback){absent(), 0}, to);
}

static inline void dequantize(Device *d, WireFormat f, WireSpan s, WireData from, bool add,
                              float *y) {
  WirePart part = {.span = s, .x = f32_1d(y, s.count), .from = from};
  device_ops(d)->dequantize(d, f, 1, &part, add);
}

#endif
