/* Plans of matrix products: what gemm.cu and gemm_tune.cu share. */
#ifndef KERNELS_CUDA_GEMM_PLAN_H
#define KERNELS_CUDA_GEMM_PLAN_H

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/lib_cublaslt.h"

/* What a plan depends on. Compared as bytes: it has no padding. */
struct GemmKey {
  int64_t m, n, k;
  int32_t kind, type, c_type;
  int32_t bias;
  int32_t align[4]; /* of a, b, c, bias: bytes, at most 16 */
};

struct GemmPlan {
  GemmKey key;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t a, b, c; /* of the tensors of these names */
  cublasLtMatmulAlgo_t algo;
  bool made, possible; /* a bias may not go with every shape */
  int uses;            /* counted until it is tuned */
  int64_t seen;        /* of a heavy product: all uses */
};

/* Products that keep all tensor cores busy for long, and come one after another in training. */
static inline bool gemm_is_heavy(const GemmKey *k) {
  return 2.0 * static_cast<double>(k->m) * static_cast<double>(k->n) * static_cast<double>(k->k) >
         5e10;
}

/* Batches of many lengths pass by in a run; a plan gives its place to a later one of its hash. */
enum { GEMM_PLANS = 1024, GEMM_FAMILIES = 64 };

struct CudaGemm {
  CublasLt lt;
  cublasLtHandle_t handle;
  cublasLtMatmulPreference_t preference;
  bool in_company;
  GemmPlan plan[GEMM_PLANS];
  int64_t seen[GEMM_FAMILIES]; /* uses of heavy products by the hash of all but m */
};

/* The operands of one product. */
struct GemmCall {
  float alpha, beta;
  Tensor a, b, c, bias;
};

void gemm_check_at(const CudaGemm *g, cublasStatus_t s, const char *call, const char *file,
                   int line);
#define LT(g, function, ...) \
  gemm_check_at(g, (g)->lt.function(__VA_ARGS__), #function, __FILE__, __LINE__)

/* Up to `most` algorithms, the heuristic's favourite first; returns how many. */
int gemm_algorithms(CudaGemm *g, const GemmPlan *p, cublasLtMatmulHeuristicResult_t *found,
                    int most);
/* Queues the product into `to`, of c's shape. */
void gemm_run(Device *d, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, const GemmCall *x,
              void *to);
/* Takes the fastest of the algorithms that give the same bits as the plan's. */
void gemm_tune(Device *d, GemmPlan *p, const GemmCall *x);

#endif
