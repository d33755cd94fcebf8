/* Matrix products through OpenBLAS. OpenBLAS is kept to one thread; the result is cut into one
 * piece per thread of ours and each computes its own, which works the same with OpenBLAS's pthread
 * and OpenMP variants and keeps one pool of threads. */
#include <cblas.h>
#include <limits.h>

#include "kernels/cpu/cpu.h"

typedef struct GemmArgs {
  GemmKind kind;
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
  float alpha, beta;
  const float *a, *b;
  float *c;
} GemmArgs;

/* C[i0.., j0..] of mi x nj. */
static void gemm_piece(const GemmArgs *g, int64_t i0, int64_t mi, int64_t j0, int64_t nj) {
  if (mi <= 0 || nj <= 0) return;
  const float *a = g->kind == GEMM_TN ? g->a + i0 : g->a + i0 * g->lda;
  const float *b = g->kind == GEMM_NT ? g->b + j0 * g->ldb : g->b + j0;
  cblas_sgemm(CblasRowMajor, g->kind == GEMM_TN ? CblasTrans : CblasNoTrans,
              g->kind == GEMM_NT ? CblasTrans : CblasNoTrans, (int)mi, (int)nj, (int)g->k, g->alpha,
              a, (int)g->lda, b, (int)g->ldb, g->beta, g->c + i0 * g->ldc + j0, (int)g->ldc);
}

static void gemm_blas(Device *d, const GemmArgs *g) {
  int threads = 2.0 * (double)g->m * (double)g->n * (double)g->k < 1e6 ? 1 : d->threads;
  bool by_rows = g->m >= g->n;
  int64_t whole = by_rows ? g->m : g->n;
  int64_t piece = ((whole + threads - 1) / threads + 31) / 32 * 32;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int t = 0; t < threads; t++) {
    int64_t start = t * piece, count = min_i64(piece, whole - start);
    if (by_rows)
      gemm_piece(g, start, count, 0, g->n);
    else
      gemm_piece(g, 0, g->m, start, count);
  }
}

void cpu_gemm(Device *d, GemmKind kind, float alpha, Tensor a, Tensor b, float beta, Tensor c) {
  require(is_f32(a, 2) && is_f32(b, 2) && is_f32(c, 2));
  GemmArgs g = {.kind = kind, .alpha = alpha, .beta = beta};
  g.m = kind == GEMM_TN ? a.dim[1] : a.dim[0];
  g.k = kind == GEMM_TN ? a.dim[0] : a.dim[1];
  g.n = kind == GEMM_NT ? b.dim[0] : b.dim[1];
  require((kind == GEMM_NT ? b.dim[1] : b.dim[0]) == g.k && c.dim[0] == g.m && c.dim[1] == g.n);
  require(g.m <= INT_MAX && g.n <= INT_MAX && g.k <= INT_MAX);
  if (g.m == 0 || g.n == 0) return;
  if (g.k == 0) {
    cpu_scale(d, beta, c);
    return;
  }
  g.lda = a.dim[1];
  g.ldb = b.dim[1];
  g.ldc = g.n;
  g.a = tensor_f32(a);
  g.b = tensor_f32(b);
  g.c = tensor_f32(c);
  gemm_blas(d, &g);
}
