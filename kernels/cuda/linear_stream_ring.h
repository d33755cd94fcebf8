/* How W and x come to a block of linear_stream.h: rings of places in shared memory that the copy
 * engine fills, with barriers that say when. */
#ifndef KERNELS_CUDA_LINEAR_STREAM_RING_H
#define KERNELS_CUDA_LINEAR_STREAM_RING_H

#include "kernels/cuda/linear_stream.h"
#include "kernels/cuda/wgmma.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* A place in a ring and the parity of its turn. */
template <int STAGES>
struct RingPlace {
  int at = 0, turn = 0;
  __device__ void next() {
    at = at + 1 == STAGES ? 0 : at + 1;
    turn ^= at == 0 ? 1 : 0;
  }
};

/* The units of a block: [start(block), start(block + 1)). */
__device__ inline int stream_start(const Stream &a, int block) {
  return block * a.each + min(block, a.longer);
}
__device__ inline int stream_block_of(const Stream &a, int unit) {
  unsigned u = static_cast<unsigned>(unit), each = static_cast<unsigned>(a.each);
  unsigned longer = static_cast<unsigned>(a.longer), in_longer = longer * (each + 1);
  return static_cast<int>(u < in_longer ? u / (each + 1) : longer + (u - in_longer) / each);
}

/* arrivals: of those who fill a place for W. */
template <class Shared, int W_STAGES, int X_STAGES>
__device__ inline void stream_start_rings(Shared *sh, int arrivals) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < W_STAGES; i++) {
      barrier_init(shared_at(&sh->w_full[i]), arrivals);
      barrier_init(shared_at(&sh->w_empty[i]), STREAM_WORKERS / 32);
    }
    for (int i = 0; i < X_STAGES; i++) {
      barrier_init(shared_at(&sh->x_full[i]), 1);
      barrier_init(shared_at(&sh->x_empty[i]), STREAM_WORKERS / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
}

__device__ inline void map_fetch(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* W is read once: it must not push x and the cache out of L2. */
constexpr uint64_t STREAM_READ_ONCE = 0x12F0000000000000ull;

/* 64 rows of W from `row` on, to shared memory. */
__device__ inline void stream_copy_w(const Stream &a, uint32_t to, const CUtensorMap *map,
                                     int column, int row, uint32_t barrier) {
  if (a.paired)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(row / 16), "r"(barrier), "l"(STREAM_READ_ONCE)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(STREAM_READ_ONCE)
        : "memory");
}
/* BYTES: of 64 rows of a unit, UNIT_K columns wide. At most FLIGHT units are under way: of more,
 * what the kernels in front still have to read waits in memory's queue behind them. */
template <class Shared, int STAGES, int FLIGHT, int UNIT_K, int BYTES>
__device__ inline void stream_bring_w(const Stream &a, Shared *sh, const CUtensorMap *map) {
  int first = stream_start(a, static_cast<int>(blockIdx.x));
  int end = stream_start(a, static_cast<int>(blockIdx.x) + 1);
  int tile = first / a.chunks, chunk = first % a.chunks;
  RingPlace<STAGES> place, asked;
  for (int u = first; u < end; u++) {
    if (FLIGHT < STAGES && u - first >= FLIGHT) {
      barrier_wait(shared_at(&sh->w_full[asked.at]), asked.turn);
      asked.next();
    }
    if (u - first >= STAGES) barrier_wait(shared_at(&sh->w_empty[place.at]), place.turn ^ 1);
    uint32_t full = shared_at(&sh->w_full[place.at]), to = shared_at(sh->w[place.at]);
    barrier_expect(full, 2 * BYTES);
    stream_copy_w(a, to, map, chunk * UNIT_K, STREAM_TILE * tile, full);
    stream_copy_w(a, to + BYTES, map, chunk * UNIT_K, STREAM_TILE * tile + 64, full);
    place.next();
    if (++chunk == a.chunks) {
      chunk = 0;
      tile++;
    }
  }
}

/* x of a unit: tiles of N rows and 64 columns, one behind the other. The kernel before wrote it by
 * stores, which are ordered with the copy engine's reads by a fence only. */
template <int N, class Shared, int STAGES, int UNIT_K>
__device__ inline void stream_bring_x(const Stream &a, Shared *sh, const CUtensorMap *map) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  int first = stream_start(a, static_cast<int>(blockIdx.x));
  int end = stream_start(a, static_cast<int>(blockIdx.x) + 1);
  int chunk = first % a.chunks;
  RingPlace<STAGES> place;
  for (int u = first; u < end; u++) {
    if (u - first >= STAGES) barrier_wait(shared_at(&sh->x_empty[place.at]), place.turn ^ 1);
    uint32_t full = shared_at(&sh->x_full[place.at]), to = shared_at(sh->x[place.at]);
    barrier_expect(full, N * UNIT_K * 2);
#pragma unroll
    for (int i = 0; i < UNIT_K / 64; i++)
      copy_tile(to + i * N * 128, map, chunk * UNIT_K + 64 * i, 0, full);
    place.next();
    if (++chunk == a.chunks) chunk = 0;
  }
}

#endif
#endif
