/* What the kernels of attention's backward on Hopper share: their job, the ring of tiles in shared
 * memory, and fragments. attention_hopper.cu says how they work. */
#ifndef KERNELS_CUDA_ATTENTION_HOPPER_TILES_H
#define KERNELS_CUDA_ATTENTION_HOPPER_TILES_H

#include "kernels/cuda/wgmma.h"

typedef __nv_bfloat16 bf16;

/* Warpgroups of a block, as registers allow; one more copies, up to HOPPER_RING steps ahead, and
 * leaves them its registers. */
enum {
  HOPPER_D = 64,
  HOPPER_ROWS = 64,
  HOPPER_THREADS = 128,
  HOPPER_RING = 6,
  HOPPER_KEY_GROUPS = 2,
  HOPPER_QUERY_GROUPS = 3,
  HOPPER_TILE_BYTES = 64 * 64 * 2,
  HOPPER_ROW_BYTES = 64 * 4
};
#define HOPPER_LOG2E 1.44269504F

struct HopperShared {
  unsigned char tile[HOPPER_RING][2][HOPPER_TILE_BYTES]; /* first: at a multiple of 1024 bytes */
  unsigned char stays[HOPPER_QUERY_GROUPS][HOPPER_TILE_BYTES]; /* each warpgroup's queries */
  float row[HOPPER_RING][2][HOPPER_ROWS];                      /* lse and delta of the queries */
  uint64_t full[HOPPER_RING], empty[HOPPER_RING], here;
};

struct HopperJob {
  int n_seqs, len, n_heads, n_kv_heads;
  float scale;
  const bf16 *qkv, *dout;
  const float *lse, *delta; /* [B, H, len]; lse in powers of two */
  bf16 *dqkv;
};

/* dk and dv; dq. */
void hopper_keys(const HopperJob &job, const CUtensorMap &qkv_map, const CUtensorMap &dout_map,
                 cudaStream_t stream);
void hopper_queries(const HopperJob &job, const CUtensorMap &qkv_map, cudaStream_t stream);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* Who a thread is, and its first row and column in fragments. */
struct HopperThread {
  int group, row, column;
  __device__ HopperThread()
      : group(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / HOPPER_THREADS, 0)),
        row(static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        column(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

/* groups: warpgroups that read the ring. */
__device__ inline void start_ring(HopperShared *sh, int groups) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < HOPPER_RING; i++) {
      barrier_init(shared_address(&sh->full[i]), 1);
      barrier_init(shared_address(&sh->empty[i]), groups * HOPPER_THREADS / 32);
    }
    barrier_init(shared_address(&sh->here), 1);
    barrier_init_done();
  }
  __syncthreads();
}

/* Before `step` fills its place again: the warpgroups are done with it. */
__device__ inline void wait_for_place(HopperShared *sh, int step) {
  if (step >= HOPPER_RING)
    barrier_wait(shared_address(&sh->empty[step % HOPPER_RING]), (step / HOPPER_RING + 1) & 1);
}
__device__ inline void wait_for_step(HopperShared *sh, int step) {
  barrier_wait(shared_address(&sh->full[step % HOPPER_RING]), step / HOPPER_RING & 1);
}
/* Every warp says when it has read a step's place. */
__device__ inline void release_step(HopperShared *sh, int step) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&sh->empty[step % HOPPER_RING]));
}

/* 64 rows as an A fragment. */
__device__ inline void load_rows(uint32_t (&a)[16], const bf16 *first, int64_t stride,
                                 const HopperThread &me) {
  const bf16 *p = first + me.row * stride + me.column;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    a[2 * j] = *reinterpret_cast<const uint32_t *>(p + 8 * j);
    a[2 * j + 1] = *reinterpret_cast<const uint32_t *>(p + 8 * stride + 8 * j);
  }
}
__device__ inline void store_rows(bf16 *first, int64_t stride, const float (&c)[32], float scale,
                                  const HopperThread &me) {
  bf16 *p = first + me.row * stride + me.column;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    *reinterpret_cast<uint32_t *>(p + 8 * j) = pack_pair(scale * c[4 * j], scale * c[4 * j + 1]);
    *reinterpret_cast<uint32_t *>(p + 8 * stride + 8 * j) =
        pack_pair(scale * c[4 * j + 2], scale * c[4 * j + 3]);
  }
}

/* Never stores, but the compiler cannot know: fragments that stay are alive wherever this stands.
 * ptxas 13.0 otherwise gives their registers to fragments that come later in the same loop. */
__device__ inline void keep_alive(const uint32_t (&a)[16], const uint32_t (&b)[16],
                                  const HopperJob &job) {
  if (job.len < 0)
    for (int i = 0; i < 16; i++) reinterpret_cast<volatile uint32_t *>(job.dqkv)[i] = a[i] + b[i];
}

__device__ inline void clear(float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i++) c[i] = 0;
}

/* c[row, column] of a pair becomes 0 where the key lies behind the query. */
template <bool KEYS_ARE_ROWS>
__device__ inline void mask_diagonal(float (&p)[32], const HopperThread &me) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    int row = me.row + (i & 2 ? 8 : 0), column = i / 4 * 8 + me.column + (i & 1);
    if (KEYS_ARE_ROWS ? row > column : column > row) p[i] = 0;
  }
}

__device__ inline void pack_fragment(uint32_t (&a)[16], const float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 16; i++) a[i] = pack_pair(c[2 * i], c[2 * i + 1]);
}

#endif

#endif
