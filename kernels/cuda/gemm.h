/* What device.cu needs of gemm.cu. */
#ifndef KERNELS_CUDA_GEMM_H
#define KERNELS_CUDA_GEMM_H

#include "kernels/cuda/cuda.h"

/* Of every product, from cuda_scratch. NVIDIA asks for 32 MiB on Hopper. */
static const size_t GEMM_WORKSPACE = 64u << 20;

CudaGemm *gemm_open(Error *err); /* NULL where cuBLASLt does not open */
void gemm_close(CudaGemm *g);
/* From here on NCCL's kernels may hold multiprocessors beside products. */
void gemm_in_company(CudaGemm *g);
size_t gemm_version(const CudaGemm *g); /* 130100: 13.1.0 */

#endif
