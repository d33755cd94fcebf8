/* Matrix products. One rule chooses: y = x W^T goes by the rows of x to gemm_dot (up to dot_most)
 * or gemm_lanes (up to LANES_MOST), all else to oneDNN. Measured in GFLOP/s on one Zen 5 core over
 * the matrices of a 10-million-parameter Llama, 35 MB that fit in no cache (bench/RESULTS.md has
 * more):
 *
 *   rows           1     4     8    16    24    32    48    64   128   256   2048
 *   oneDNN 2.6    15    45    60    55    75    92   116   136   180   195    257
 *   gemm_dot      25    90   146   166   173   169         164
 *   gemm_lanes          28    50   102   130   180   180   204   212   208
 *
 * With matrices of 4096 x 4096 and 11008 x 4096 the order is the same, but at 256 rows oneDNN leads
 * by 15 %.
 */
#include "kernels/cpu/gemm.h"

#include <dnnl.h>
#include <omp.h>

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
  if (kind == GEMM_NT && m <= LANES_MOST) {
    RowsGemm g = {m, n, k, n, alpha, beta, tensor_f32(a), tensor_f32(b), tensor_f32(c)};
    if (m <= dot_most(k))
      gemm_dot(d, &g);
    else
      gemm_lanes(d, &g);
    return;
  }
  omp_set_num_threads(d->threads); /* oneDNN asks OpenMP how many it may use */
  dnnl_status_t status =
      dnnl_sgemm(kind == GEMM_TN ? 'T' : 'N', kind == GEMM_NT ? 'T' : 'N', m, n, k, alpha,
                 tensor_f32(a), a.dim[1], tensor_f32(b), b.dim[1], beta, tensor_f32(c), n);
  if (status != dnnl_success) die("dnnl_sgemm failed with status %d", (int)status);
}
