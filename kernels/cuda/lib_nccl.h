/* NCCL's functions: nccl.ncclAllGather(...). */
#ifndef KERNELS_CUDA_LIB_NCCL_H
#define KERNELS_CUDA_LIB_NCCL_H

#include <nccl.h>

#include "kernels/cuda/lib.h"

#define NCCL_FUNCTIONS(F)   \
  F(ncclGetVersion)         \
  F(ncclGetErrorString)     \
  F(ncclGetLastError)       \
  F(ncclGetUniqueId)        \
  F(ncclCommInitRankConfig) \
  F(ncclCommGetAsyncError)  \
  F(ncclCommFinalize)       \
  F(ncclCommDestroy)        \
  F(ncclCommAbort)          \
  F(ncclGroupStart)         \
  F(ncclGroupEnd)           \
  F(ncclSend)               \
  F(ncclRecv)               \
  F(ncclAllGather)

struct Nccl {
#define MEMBER(name) decltype(&::name) name;
  NCCL_FUNCTIONS(MEMBER)
#undef MEMBER
};

int nccl_open(Nccl *nccl, Error *err);

#endif
