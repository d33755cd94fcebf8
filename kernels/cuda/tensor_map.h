/* Descriptions of tensors for Hopper's copy engine. */
#ifndef KERNELS_CUDA_TENSOR_MAP_H
#define KERNELS_CUDA_TENSOR_MAP_H

#include <cuda.h>

#include "kernels/cuda/cuda.h"

/* Dimensions from the innermost on; strides, in bytes, of all but that; what a copy takes. */
struct TensorMap {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  int dims;
  uint64_t size[4], stride[3];
  uint32_t box[4];
};
CUtensorMap tensor_map(const void *data, const TensorMap &m);

#endif
