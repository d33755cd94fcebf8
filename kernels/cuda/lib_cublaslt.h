/* cuBLASLt's functions: lt.cublasLtMatmul(...). */
#ifndef KERNELS_CUDA_LIB_CUBLASLT_H
#define KERNELS_CUDA_LIB_CUBLASLT_H

#include <cublasLt.h>

#include "kernels/cuda/lib.h"

#define CUBLASLT_FUNCTIONS(F)             \
  F(cublasLtCreate)                       \
  F(cublasLtDestroy)                      \
  F(cublasLtGetVersion)                   \
  F(cublasLtGetStatusString)              \
  F(cublasLtMatmul)                       \
  F(cublasLtMatmulAlgoGetHeuristic)       \
  F(cublasLtMatmulAlgoConfigGetAttribute) \
  F(cublasLtMatmulDescCreate)             \
  F(cublasLtMatmulDescDestroy)            \
  F(cublasLtMatmulDescSetAttribute)       \
  F(cublasLtMatmulPreferenceCreate)       \
  F(cublasLtMatmulPreferenceDestroy)      \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatrixLayoutCreate)           \
  F(cublasLtMatrixLayoutDestroy)

struct CublasLt {
#define MEMBER(name) decltype(&::name) name;
  CUBLASLT_FUNCTIONS(MEMBER)
#undef MEMBER
};

int cublaslt_open(CublasLt *lt, Error *err);

#endif
