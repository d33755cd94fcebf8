/* Pinned host memory between the caller's pages and the GPU's copy engines. */
#ifndef KERNELS_CUDA_STAGING_H
#define KERNELS_CUDA_STAGING_H

#include "kernels/cuda/cuda.h"

struct CudaStaging;
CudaStaging *staging_create(int threads); /* that copy */
void staging_free(CudaStaging *s);

/* Queued on the stream; src is free at return. Waits only when all of the ring is under way. */
void staging_upload(CudaStaging *s, cudaStream_t stream, void *dst, const void *src, size_t bytes);
/* Waits for the stream, and has the bytes in dst at return. */
void staging_download(CudaStaging *s, cudaStream_t stream, void *dst, const void *src,
                      size_t bytes);

#endif
