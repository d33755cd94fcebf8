/* Clusters of blocks, which see each other's shared memory (compute capability 9.0). */
#ifndef KERNELS_CUDA_CLUSTER_H
#define KERNELS_CUDA_CLUSTER_H

#include "kernels/cuda/cuda.h"

/* What is written before it in shared memory is seen behind it by all blocks of the cluster. */
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

/* What lies at p in the block of that rank. */
__device__ inline float cluster_load(const float *p, int rank) {
  float x;
#if __CUDA_ARCH__ >= 900
  uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
#else
  x = *p;
#endif
  return x;
}
__device__ inline float4 cluster_load(const float4 *p, int rank) {
  float4 x;
#if __CUDA_ARCH__ >= 900
  uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(at)
               : "memory");
#else
  x = *p;
#endif
  return x;
}

#endif
