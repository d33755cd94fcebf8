/* Hopper's asynchronous instructions (compute capability 9.0a), as the attention kernels use them:
 * products of a warpgroup (128 threads) with A in registers and B in shared memory, tiles that the
 * copy engine brings, and the barriers that say when.
 *
 * A tile is 64 rows of 64 BF16 numbers: rows of 128 bytes whose 16-byte pieces are permuted
 * (128-byte swizzle), at a multiple of 1024 bytes. It serves as B of both kinds: sums along its
 * rows (tile_along_rows), or along its columns (tile_along_columns).
 *
 * Fragments: thread t of a warpgroup holds of C[64, 64] rows 16 (t / 32) + t % 32 / 4 and the 8th
 * behind it, columns 8 j + 2 (t % 4) and the next, as c[4 j .. 4 j + 3]. Of A[64, 64] it holds the
 * same numbers, in pairs: a[2 j], a[2 j + 1]. */
#ifndef KERNELS_CUDA_WGMMA_H
#define KERNELS_CUDA_WGMMA_H

#include <cuda.h>

#include "kernels/cuda/barrier.h"
#include "kernels/cuda/cuda.h"

/* Operands of 4, 16 or 32 registers in a row. */
#define WGMMA_4(mode, c, i) mode(c[i]), mode(c[(i) + 1]), mode(c[(i) + 2]), mode(c[(i) + 3])
#define WGMMA_16(mode, c, i)                                                 \
  WGMMA_4(mode, c, i), WGMMA_4(mode, c, (i) + 4), WGMMA_4(mode, c, (i) + 8), \
      WGMMA_4(mode, c, (i) + 12)
#define WGMMA_32(mode, c, i) WGMMA_16(mode, c, i), WGMMA_16(mode, c, (i) + 16)
#define WGMMA_N64                                           \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "   \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
#define WGMMA_N128                                                   \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "           \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"          \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "

/* C += A B^T, one step of 16 of the sum. COLUMNS: B's sum runs along columns. */
template <bool COLUMNS>
__device__ inline void wgmma_step(float (&c)[32], const uint32_t *a, uint64_t b) {
  asm volatile(WGMMA_N64 "{%32,%33,%34,%35}, %36, 1, 1, 1, %37;\n"
               : WGMMA_32("+f", c, 0)
               : WGMMA_4("r", a, 0), "l"(b), "n"(COLUMNS ? 1 : 0));
}
template <bool COLUMNS>
__device__ inline void wgmma_step(float (&c)[64], const uint32_t *a, uint64_t b) {
  asm volatile(WGMMA_N128 "{%64,%65,%66,%67}, %68, 1, 1, 1, %69;\n"
               : WGMMA_32("+f", c, 0), WGMMA_32("+f", c, 32)
               : WGMMA_4("r", a, 0), "l"(b), "n"(COLUMNS ? 1 : 0));
}
/* C = A B^T: what c held is not read, and need not be kept. */
__device__ inline void wgmma_first(float (&c)[32], const uint32_t *a, uint64_t b) {
  asm volatile(WGMMA_N64 "{%32,%33,%34,%35}, %36, 0, 1, 1, 0;\n"
               : WGMMA_32("=f", c, 0)
               : WGMMA_4("r", a, 0), "l"(b));
}

/* The same with A in shared memory: both sums run along rows. */
__device__ inline void wgmma_shared_step(float (&c)[32], uint64_t a, uint64_t b) {
  asm volatile(WGMMA_N64 "%32, %33, 1, 1, 1, 0, 0;\n" : WGMMA_32("+f", c, 0) : "l"(a), "l"(b));
}
__device__ inline void wgmma_shared_first(float (&c)[32], uint64_t a, uint64_t b) {
  asm volatile(WGMMA_N64 "%32, %33, 0, 1, 1, 0, 0;\n" : WGMMA_32("=f", c, 0) : "l"(a), "l"(b));
}

/* What is read between a wait and the next product must pass through here: the compiler does not
 * see that products end later than they are written. */
template <int N>
__device__ inline void wgmma_hold(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most N of the latest commits are under way. */
template <int N>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Descriptor of a tile: groups of 8 rows lie 1024 bytes apart, 128-byte swizzle. Where products
 * take 128 columns of two tiles side by side, `next` is the bytes from one to the other. */
__device__ inline uint64_t tile_descriptor(uint32_t shared, int next = 16) {
  return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) |
         (static_cast<uint64_t>(next >> 4) << 16) | ((shared & 0x3ffff) >> 4);
}

/* c = a tile^T: each number of c is a row of a times a row of the tile. Committed by the caller. */
__device__ inline void tile_along_rows(float (&c)[32], const uint32_t (&a)[16], uint32_t tile) {
  uint64_t b = tile_descriptor(tile);
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (k == 0)
      wgmma_first(c, a, b);
    else
      wgmma_step<false>(c, a + 4 * k, b + 2 * k);
}
/* c = A B^T with A and B of TILES tiles side by side, a_next and b_next bytes apart. */
template <int TILES>
__device__ inline void tiles_along_rows(float (&c)[32], uint32_t a_tile, int a_next,
                                        uint32_t b_tile, int b_next) {
  uint64_t a = tile_descriptor(a_tile), b = tile_descriptor(b_tile);
#pragma unroll
  for (int k = 0; k < 4 * TILES; k++) {
    uint64_t a_k = a + (k / 4) * (a_next >> 4) + 2 * (k % 4),
             b_k = b + (k / 4) * (b_next >> 4) + 2 * (k % 4);
    if (k == 0)
      wgmma_shared_first(c, a_k, b_k);
    else
      wgmma_shared_step(c, a_k, b_k);
  }
}
/* c += a B, with as many rows of B as a has columns. B is a tile or, where c has 128 columns, two,
 * b_next bytes apart. */
template <int N, int M>
__device__ inline void tile_along_columns(float (&c)[N], const uint32_t (&a)[M], uint32_t b_tile,
                                          int b_next = 16) {
  uint64_t b = tile_descriptor(b_tile, b_next);
#pragma unroll
  for (int k = 0; k < M / 4; k++) wgmma_step<true>(c, a + 4 * k, b + 128 * k);
}

/* A warpgroup gives registers back, another takes them: N for each of its threads from here on. */
template <int N>
__device__ inline void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ inline void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- copies, and barriers that say when (barrier.h) ---- */

__device__ inline void copy_tile(uint32_t to, const CUtensorMap *map, int column, int row,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

/* Behind ordinary writes to shared memory that products or the copy engine read next. */
__device__ inline void shared_written() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Among `threads` threads, a multiple of 32, that use the same of 16 barriers; 0 is
 * __syncthreads's. */
__device__ inline void named_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* ---- arithmetic ---- */

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/* The pair as an A fragment holds it: lo at the lower address. */
__device__ inline uint32_t pack_pair(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
/* Its numbers. */
__device__ inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

#endif
