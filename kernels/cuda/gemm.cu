/* Matrix products by cuBLASLt. */
#include "kernels/cuda/gemm.h"

#include <stdlib.h>

#include "kernels/cuda/lib_cublaslt.h"

struct CudaGemm {
  CublasLt lt;
  cublasLtHandle_t handle;
};

CudaGemm *gemm_open(Error *err) {
  CudaGemm *g = static_cast<CudaGemm *>(mem_zalloc(1, sizeof *g));
  if (cublaslt_open(&g->lt, err)) {
    free(g);
    return nullptr;
  }
  cublasStatus_t s = g->lt.cublasLtCreate(&g->handle);
  if (s != CUBLAS_STATUS_SUCCESS) die("cublasLtCreate: %s", g->lt.cublasLtGetStatusString(s));
  return g;
}

void gemm_close(CudaGemm *g) {
  if (!g) return;
  g->lt.cublasLtDestroy(g->handle);
  free(g);
}

size_t gemm_version(const CudaGemm *g) { return g->lt.cublasLtGetVersion(); }
