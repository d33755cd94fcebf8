/* Fills cuBLASLt's table. The major version is the one that rlhf was built for. */
#include "kernels/cuda/lib_cublaslt.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

int cublaslt_open(CublasLt *lt, Error *err) {
  static const char soname[] = "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR);
  void *lib = cuda_lib_open(soname, err);
  int rc = lib ? 0 : -1;
#define FIND(name) \
  if (!rc) rc = cuda_lib_function(lib, soname, #name, &lt->name, err);
  CUBLASLT_FUNCTIONS(FIND)
#undef FIND
  return rc;
}
