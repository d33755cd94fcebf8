/* Opens cuDNN. */
#include "kernels/cuda/lib_cudnn.h"

int cudnn_open(Cudnn *dnn, Error *err) {
  static const char soname[] = "libcudnn.so.9";
  void *lib = cuda_lib_open(soname, err);
  if (!lib) return -1;
#define FIND(name) \
  if (cuda_lib_function(lib, soname, #name, &dnn->name, err)) return -1;
  CUDNN_FUNCTIONS(FIND)
#undef FIND
  return 0;
}
