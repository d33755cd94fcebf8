/* The stream of delta_encode, the same for every back end. Internal to kernels/.
 *
 * One DeltaHead for each block of DELTA_BLOCK elements (the last may be shorter), then what the
 * blocks say, each from a multiple of 4 bytes on:
 *   changes as a list, where that is shorter: 16 bits each, the place times 16 plus a code;
 *   or else a bitmap of DELTA_BLOCK bits, the lowest first, and the codes, two to a byte, the lower
 *   half first;
 *   then, for every change with the code DELTA_ESCAPE, the new value, 16 bits.
 * Another code c is a step of c - DELTA_ESCAPE, -7 to 7, to the value's bits: most changes are one
 * unit in the last place. The stream ends at a multiple of 16 bytes. */
#ifndef KERNELS_DELTA_H
#define KERNELS_DELTA_H

#include "kernels/kernels.h"

#ifdef __CUDACC__
#define DELTA_INLINE static __host__ __device__ inline
#else
#define DELTA_INLINE static inline
#endif

enum { DELTA_ESCAPE = 8, DELTA_BITMAP_BYTES = DELTA_BLOCK / 8 };

typedef struct DeltaHead {
  uint32_t at; /* where what the block says starts in the stream, in units of 4 bytes */
  uint16_t changes, escapes;
} DeltaHead;

DELTA_INLINE int64_t delta_blocks(int64_t n) { return (n + DELTA_BLOCK - 1) / DELTA_BLOCK; }
DELTA_INLINE bool delta_is_list(int changes) {
  return 2 * changes <= DELTA_BITMAP_BYTES + (changes + 1) / 2;
}
DELTA_INLINE uint32_t delta_codes_bytes(int changes) {
  int bitmap = DELTA_BITMAP_BYTES + (changes + 1) / 2;
  if (!delta_is_list(changes)) return (uint32_t)(bitmap + 1) / 2 * 2; /* values are aligned */
  return (uint32_t)(2 * changes);
}
DELTA_INLINE uint32_t delta_block_bytes(int changes, int escapes) {
  return (delta_codes_bytes(changes) + 2 * (uint32_t)escapes + 3) / 4 * 4;
}
/* Of the change from one value's bits to another's. */
DELTA_INLINE int delta_code(uint16_t from, uint16_t to) {
  int step = (int)to - (int)from;
  return step >= -7 && step <= 7 ? step + DELTA_ESCAPE : DELTA_ESCAPE;
}
/* A term of a checksum: the bits of element i of the tensor. */
DELTA_INLINE uint64_t checksum_term(uint64_t i, uint16_t bits) {
  return ((uint64_t)bits + 1) * ((2 * i + 1) * 0x9E3779B97F4A7C15U);
}

#endif
