/* Libraries that the program opens when it opens a GPU: cuBLASLt, cuDNN and NCCL. It is linked with
 * none of them, so it starts where they are not.
 *
 * Each has a table of its functions under their own names (lib_cublaslt.h), filled by one call.
 * Looked for in the folders that RLHF_CUDA_LIBS lists (as PATH does), then where the system looks
 * (LD_LIBRARY_PATH, ldconfig), then in /usr/local/cuda. A folder may be the one that holds the file
 * or the top of pip's packages (site-packages/nvidia). */
#ifndef KERNELS_CUDA_LIB_H
#define KERNELS_CUDA_LIB_H

#include "kernels/cuda/cuda.h"

/* soname: "libcudnn.so.9". Returns a handle that stays open, or NULL with an error that names it.
 */
void *cuda_lib_open(const char *soname, Error *err);

/* A function of an open library; -1 with an error that names both where it has none. */
int cuda_lib_find(void *lib, const char *soname, const char *function, void **found, Error *err);

template <class F>
static inline int cuda_lib_function(void *lib, const char *soname, const char *name, F **function,
                                    Error *err) {
  void *found = nullptr;
  int rc = cuda_lib_find(lib, soname, name, &found, err);
  *function = reinterpret_cast<F *>(found);
  return rc;
}

#endif
