/* Matrix products through oneDNN, in our own OpenMP threads. */
#include <dnnl.h>
#include <omp.h>

#include "kernels/cpu/cpu.h"

void cpu_gemm(Device *d, GemmKind kind, float alpha, Tensor a, Tensor b, float beta, Tensor c) {
  require(is_f32(a, 2) && is_f32(b, 2) && is_f32(c, 2));
  int64_t m = kind == GEMM_TN ? a.dim[1] : a.dim[0], k = kind == GEMM_TN ? a.dim[0] : a.dim[1];
  int64_t n = kind == GEMM_NT ? b.dim[0] : b.dim[1];
  require((kind == GEMM_NT ? b.dim[1] : b.dim[0]) == k && c.dim[0] == m && c.dim[1] == n);
  if (m == 0 || n == 0) return;
  if (k == 0) {
    cpu_scale(d, beta, c);
    return;
  }
  omp_set_num_threads(d->threads); /* oneDNN asks OpenMP how many it may use */
  dnnl_status_t status =
      dnnl_sgemm(kind == GEMM_TN ? 'T' : 'N', kind == GEMM_NT ? 'T' : 'N', m, n, k, alpha,
                 tensor_f32(a), a.dim[1], tensor_f32(b), b.dim[1], beta, tensor_f32(c), n);
  if (status != dnnl_success) die("dnnl_sgemm failed with status %d", (int)status);
}
