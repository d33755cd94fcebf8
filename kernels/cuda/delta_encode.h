/* What the halves of encoding a delta share. Internal to kernels/cuda/delta*.
 *
 * Thread blocks that stay take one block of the stream after the other, by numbers that they draw
 * in order. Eight warps, the finders, find the changes and write what the block says into an image
 * in shared memory. Where that goes depends on all before it: a ninth warp, the writer, finds the
 * place and copies the image out, while the others are at the next block. */
#ifndef KERNELS_CUDA_DELTA_ENCODE_H
#define KERNELS_CUDA_DELTA_ENCODE_H

#include "kernels/cuda/delta.h"

enum {
  ENCODE_WARPS = 8,
  FINDERS = 32 * ENCODE_WARPS, /* threads; the writer's warp comes behind them */
  ENCODE_THREADS = FINDERS + 32,
  STRIP = DELTA_BLOCK / ENCODE_WARPS, /* elements of a warp */
  LANE = STRIP / 32,                  /* of a thread, next to each other */
  QUAD = 4,
  STAGES = 2, /* blocks of the stream read or on their way */
  IMAGES = 2,
  IMAGE_WORDS = (DELTA_BITMAP_BYTES + DELTA_BLOCK / 2 + 2 * DELTA_BLOCK) / 4,
  LOOK = 8 /* words of a lane that are asked for at once when looking back */
};
static_assert(LANE == 16, "a thread's changes are 16 bits of the map");

/* What a block says of its length: nothing yet, its own, or up to its end. */
constexpr uint64_t OWN = 1ull << 62, UP_TO = 2ull << 62, LENGTH = OWN - 1;

/* What the finders leave to the writer. */
struct Found {
  int64_t number; /* -1: no more */
  int changes, escapes;
};

struct EncodeShared {
  alignas(16) float now[STAGES][DELTA_BLOCK]; /* or BF16, in the first half */
  alignas(16) uint16_t last[STAGES][DELTA_BLOCK];
  alignas(16) uint32_t image[IMAGES][IMAGE_WORDS]; /* zero when the finders get it */
  int64_t number[STAGES + 1];
  Found found[IMAGES];
  uint32_t sums[2][ENCODE_WARPS];
};

/* Named barriers: among the finders; between them and the writer: an image is full, or empty. Their
 * numbers are constants, or the kernel would take all there are. */
enum { FINDERS_MEET = 1, IMAGE_FULL = 2, IMAGE_EMPTY = 2 + IMAGES };
static_assert(IMAGES == 2, "meet and report choose between two");
template <int FIRST>
__device__ inline void meet(int of, int threads) {
  __syncwarp();
  if (of == 0)
    asm volatile("bar.sync %0, %1;" : : "n"(FIRST), "r"(threads) : "memory");
  else
    asm volatile("bar.sync %0, %1;" : : "n"(FIRST + 1), "r"(threads) : "memory");
}
template <int FIRST>
__device__ inline void report(int of, int threads) {
  __syncwarp();
  if (of == 0)
    asm volatile("bar.arrive %0, %1;" : : "n"(FIRST), "r"(threads) : "memory");
  else
    asm volatile("bar.arrive %0, %1;" : : "n"(FIRST + 1), "r"(threads) : "memory");
}

#endif
