/* Launches that overlap, for the short kernels of decoding: one may start while the kernel before
 * it ends, and waits for that one's results only when it needs them. Of code for cards before
 * Hopper they run one after the other as ever.
 *
 * A kernel of a chain calls wait_for_kernel_before before it reads or writes what others have to do
 * with, in every block, so it ends after all that was queued before: whoever has waited for it has
 * waited for them. Before that it reads only what was there before the chain began: several kernels
 * of it may be waiting at a time, where each calls next_kernel_may_start early. */
#ifndef KERNELS_CUDA_CHAIN_H
#define KERNELS_CUDA_CHAIN_H

#include "kernels/cuda/cuda.h"

/* When all blocks have called it, or ended, the kernel behind this one may start. */
__device__ inline void next_kernel_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Returns when all of the kernel before is done and seen. */
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* More shared memory than a kernel gets unasked. */
template <class Kernel>
static inline void chain_allow_shared(Kernel kernel, size_t shared) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared)));
}

/* Of clusters of `cluster` blocks along x. */
template <class... Args>
static inline void chain_launch(cudaStream_t stream, void (*kernel)(Args...), dim3 grid,
                                int threads, size_t shared, int cluster, Args... args) {
  cudaLaunchAttribute attribute[2] = {};
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  attribute[1].id = cudaLaunchAttributeClusterDimension;
  attribute[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute[1].val.clusterDim.y = attribute[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = !cuda_overlaps ? 0 : cluster > 1 ? 2 : 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

#endif
