#include "kernels/cuda/tensor_map.h"

static decltype(&cuTensorMapEncodeTiled) find_encode() {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult status;
  CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                              cudaEnableDefault, &status));
  require(status == cudaDriverEntryPointSuccess);
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

CUtensorMap tensor_map(const void *data, const TensorMap &m) {
  static const decltype(&cuTensorMapEncodeTiled) encode = find_encode();
  const cuuint32_t step[] = {1, 1, 1, 1};
  CUtensorMap map;
  /* uint64_t and cuuint64_t may be two types of one size */
  CUresult r = encode(&map, m.type, static_cast<cuuint32_t>(m.dims), const_cast<void *>(data),
                      reinterpret_cast<const cuuint64_t *>(m.size),
                      reinterpret_cast<const cuuint64_t *>(m.stride), m.box, step,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, m.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) die("cuTensorMapEncodeTiled: error %d", static_cast<int>(r));
  return map;
}
