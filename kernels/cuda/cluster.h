/* Clusters of blocks, which see each other's shared memory (compute capability 9.0).
 *
 * Blocks send each other numbers, of which the receiver knows how many bytes come: its barrier says
 * when all are there. So a block waits for what it needs alone, and who has sent may leave. */
#ifndef KERNELS_CUDA_CLUSTER_H
#define KERNELS_CUDA_CLUSTER_H

#include "kernels/cuda/barrier.h"

#if __CUDA_ARCH__ >= 900

/* A block opens n barriers for what is sent to it, so many bytes each; when cluster_meet has
 * returned, all have. All threads call both. */
__device__ inline void cluster_open(uint64_t *barriers, int n, int bytes) {
  for (int i = 0; threadIdx.x == 0 && i < n; i++) barrier_init(shared_at(barriers + i), 1);
  if (threadIdx.x == 0) barrier_init_done();
  for (int i = 0; threadIdx.x == 0 && i < n; i++) barrier_expect(shared_at(barriers + i), bytes);
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_meet() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* What is written before it in shared memory is seen behind it by all blocks of the cluster. */
__device__ inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

/* Where p lies in the block of that rank. */
__device__ inline uint32_t cluster_at(const void *p, int rank) {
  uint32_t at = shared_at(p);
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  return at;
}

/* To a place and a barrier that cluster_at gave. */
__device__ inline void cluster_send(uint32_t to, uint32_t barrier, float x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
      "f"(x), "r"(barrier)
      : "memory");
}
__device__ inline void cluster_send(uint32_t to, uint32_t barrier, float4 x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
      : "memory");
}

#endif
#endif
