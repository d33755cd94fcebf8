/* wire: sizes of wire formats. Pure arithmetic, the same for every back end. */
#include "kernels/wire.h"

int64_t wire_row_blocks(WireFormat f, int64_t width) { return (width + f.block - 1) / f.block; }

/* Bytes of the payload of `n` elements that start a row. */
static size_t row_bytes(WireFormat f, int64_t n) {
  return (size_t)(f.kind == WIRE_INT4 ? (n + 1) / 2 : n);
}

/* Bytes from the start of the matrix to element `at`, which starts a block (or a row). */
static size_t bytes_before(WireFormat f, int64_t width, int64_t at) {
  return (size_t)(at / width) * row_bytes(f, width) + row_bytes(f, at % width);
}

static int64_t blocks_before(WireFormat f, int64_t width, int64_t at) {
  return at / width * wire_row_blocks(f, width) + wire_row_blocks(f, at % width);
}

void wire_check(WireFormat f, WireSpan s) {
  int64_t end = s.first + s.count;
  require(s.first >= 0 && s.count >= 0 && s.width >= 1);
  if (!wire_has_blocks(f)) return;
  require(f.block >= 2 && f.block <= WIRE_MAX_BLOCK && f.block % 2 == 0);
  require(f.scale == DT_F32 || f.scale == DT_BF16);
  require(s.first % s.width % f.block == 0 && end % s.width % f.block == 0);
}

int64_t wire_blocks(WireFormat f, WireSpan s) {
  if (!wire_has_blocks(f)) return 0;
  return blocks_before(f, s.width, s.first + s.count) - blocks_before(f, s.width, s.first);
}

size_t wire_scale_bytes(WireFormat f, WireSpan s) {
  return (size_t)wire_blocks(f, s) * dtype_size(f.scale);
}

size_t wire_payload_bytes(WireFormat f, WireSpan s) {
  if (f.kind == WIRE_F32) return 4 * (size_t)s.count;
  if (f.kind == WIRE_BF16) return 2 * (size_t)s.count;
  return bytes_before(f, s.width, s.first + s.count) - bytes_before(f, s.width, s.first);
}

/* A GPU reads 16 codes at a time, takes them 64 at a time to its tensor cores, and holds a row of x
 * in shared memory. */
bool linear_codes_fit(WireFormat f, int64_t width) {
  if (f.kind != WIRE_INT8 && f.kind != WIRE_FP8) return false;
  return f.block % 64 == 0 && width % 16 == 0 && width <= LINEAR_CODES_MOST;
}
