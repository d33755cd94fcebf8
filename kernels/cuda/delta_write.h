/* The writer: where a block of the stream goes, by decoupled look-back (Merrill & Garland 2016),
 * and its bytes. Sums are of whole numbers: the stream does not depend on the order. */
#ifndef KERNELS_CUDA_DELTA_WRITE_H
#define KERNELS_CUDA_DELTA_WRITE_H

#include "kernels/cuda/delta_encode.h"

/* Bytes of all blocks of the part before this one. Words nearer than the first that says the sum
 * up to it are waited for; several are asked for at once, as each answer takes long. */
__device__ inline uint64_t look_back(const uint64_t *said, int64_t block) {
  const int lane = threadIdx.x % 32;
  uint64_t sum = 0;
  for (int64_t at = block - 1;; at -= 32 * LOOK) {
    uint64_t word[LOOK];
#pragma unroll
    for (int j = 0; j < LOOK; j++) {
      const int64_t i = at - 32 * j - lane; /* before the first: nothing */
      word[j] = i < 0 ? UP_TO : *static_cast<const volatile uint64_t *>(said + i);
    }
#pragma unroll
    for (int j = 0; j < LOOK; j++) {
      const int64_t i = at - 32 * j - lane;
      for (;;) {
        const unsigned known = __ballot_sync(0xffffffffu, word[j] != 0);
        const unsigned up_to = __ballot_sync(0xffffffffu, (word[j] & UP_TO) != 0);
        const unsigned nearer = up_to ^ (up_to - 1); /* with the nearest; none: all */
        if ((known & nearer) == nearer) {
          if (nearer >> lane & 1) sum += word[j] & LENGTH;
          if (up_to) return warp_sum(sum);
          break;
        }
        if (word[j] == 0) word[j] = *static_cast<const volatile uint64_t *>(said + i);
      }
    }
  }
}

/* The last block of a part knows the stream's size, and fills it up. */
__device__ inline void finish_part(const DeltaSpan &p, uint64_t end, DeltaSize *size) {
  uint64_t bytes = (end + 15) / 16 * 16;
  size->bytes = bytes;
  if (bytes > p.room) return;
  for (uint64_t at = end; at < bytes; at += 4) *reinterpret_cast<uint32_t *>(p.wire + at) = 0;
}

__device__ inline void write_blocks(const DeltaJob &job, EncodeShared &sh, uint64_t *said,
                                    DeltaSize *sizes) {
  const int lane = threadIdx.x % 32;
  int k = 0;
  for (int turn = 0;; turn++) {
    const int of = turn % IMAGES;
    meet<IMAGE_FULL>(of, ENCODE_THREADS);
    const Found f = sh.found[of];
    if (f.number < 0) return;
    while (k + 1 < job.n && job.part[k + 1].first_block <= f.number) k++;
    const DeltaSpan p = job.part[k];
    const int64_t block = f.number - p.first_block, blocks = delta_blocks(p.n);
    const uint32_t own = delta_block_bytes(f.changes, f.escapes);
    const uint64_t heads = static_cast<uint64_t>(blocks) * sizeof(DeltaHead);
    const uint64_t start = heads + look_back(said + p.first_block, block), end = start + own;
    if (lane == 0) {
      *static_cast<volatile uint64_t *>(said + f.number) = UP_TO | (end - heads);
      atomicAdd(reinterpret_cast<unsigned long long *>(&sizes[k].changed),
                static_cast<unsigned long long>(f.changes));
      if (block == blocks - 1) finish_part(p, end, &sizes[k]);
      if (end <= p.room)
        reinterpret_cast<DeltaHead *>(p.wire)[block] = {static_cast<uint32_t>(start / 4),
                                                        static_cast<uint16_t>(f.changes),
                                                        static_cast<uint16_t>(f.escapes)};
    }
    uint32_t *out = reinterpret_cast<uint32_t *>(p.wire + start);
#pragma unroll 4
    for (uint32_t i = static_cast<uint32_t>(lane); i < own / 4; i += 32) {
      if (end <= p.room) out[i] = sh.image[of][i];
      sh.image[of][i] = 0;
    }
    report<IMAGE_EMPTY>(of, ENCODE_THREADS);
  }
}

#endif
