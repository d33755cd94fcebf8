/* cuDNN's functions that attention uses: dnn.cudnnBackendFinalize(...). */
#ifndef KERNELS_CUDA_LIB_CUDNN_H
#define KERNELS_CUDA_LIB_CUDNN_H

#include <cudnn.h>

#include "kernels/cuda/lib.h"

#define CUDNN_FUNCTIONS(F)         \
  F(cudnnGetVersion)               \
  F(cudnnCreate)                   \
  F(cudnnDestroy)                  \
  F(cudnnSetStream)                \
  F(cudnnGetErrorString)           \
  F(cudnnGetLastErrorString)       \
  F(cudnnBackendCreateDescriptor)  \
  F(cudnnBackendDestroyDescriptor) \
  F(cudnnBackendSetAttribute)      \
  F(cudnnBackendGetAttribute)      \
  F(cudnnBackendFinalize)          \
  F(cudnnBackendExecute)

struct Cudnn {
#define MEMBER(name) decltype(&::name) name;
  CUDNN_FUNCTIONS(MEMBER)
#undef MEMBER
};

int cudnn_open(Cudnn *dnn, Error *err);

#endif
