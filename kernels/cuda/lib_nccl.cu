/* Fills NCCL's table. 2.14 is the first with communicators that do not block. */
#include "kernels/cuda/lib_nccl.h"

int nccl_open(Nccl *nccl, Error *err) {
  static const char soname[] = "libnccl.so.2";
  void *lib = cuda_lib_open(soname, err);
  int rc = lib ? 0 : -1;
#define FIND(name) \
  if (!rc) rc = cuda_lib_function(lib, soname, #name, &nccl->name, err);
  NCCL_FUNCTIONS(FIND)
#undef FIND
  return rc;
}
