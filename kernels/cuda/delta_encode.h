/* What the two kernels that encode a delta share. Internal to kernels/cuda/delta*.
 *
 * Where a block of the stream goes depends on all before it. So the first kernel, the finder, reads
 * the weights at the speed of memory and leaves what every block says in scratch, some hundredths
 * of what it read. The second, the writer, adds up lengths and moves it to its place. */
#ifndef KERNELS_CUDA_DELTA_ENCODE_H
#define KERNELS_CUDA_DELTA_ENCODE_H

#include "kernels/cuda/delta.h"

enum {
  FIND_WARPS = 4,    /* of a thread block, each with a block of the stream */
  FIND_RESIDENT = 5, /* thread blocks of a multiprocessor, by registers */
  /* Shared memory of no use but that the fifth has no room then: four are a tenth faster. */
  FIND_SPARE = 9000,
  WRITE_WARPS = 8,
  WRITE_BLOCKS = 32, /* blocks of the stream of a thread block that writes */
  MAP_WORDS = DELTA_BITMAP_BYTES / 4,
  CODE_WORDS = DELTA_BLOCK / 8,
  LIST_MOST = 341, /* changes of a block that says them as a list */
  NOTE_WORDS = MAP_WORDS + CODE_WORDS,
  NOTE_BLOCKS = 24576 /* that are noted at a time, at most */
};
static_assert(WRITE_BLOCKS % FIND_WARPS == 0, "whole groups");

/* Bytes / 4 of blocks in the stream, and their changes: of up to NOTE_BLOCKS. */
struct Length {
  uint32_t words, changes;
};

/* What is noted of the blocks first to end - 1 of a launch. */
struct Notes {
  int64_t first, end;
  uint32_t (*said)[NOTE_WORDS]; /* a list, or a map and codes, without values */
  Length *groups;               /* of FIND_WARPS blocks next to each other */
  uint32_t *counts;             /* changes, and escapes times 65536 */
};

__device__ inline Length length_of(uint32_t counts) {
  const int changes = static_cast<int>(counts & 0xffff), escapes = static_cast<int>(counts >> 16);
  return {delta_block_bytes(changes, escapes) / 4, static_cast<uint32_t>(changes)};
}

/* Sum of x over the lanes up to this one. */
__device__ inline int warp_up_to(int x) {
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, x, o);
    if (threadIdx.x % 32 >= static_cast<unsigned>(o)) x += below;
  }
  return x;
}

#endif
