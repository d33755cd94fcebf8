/* The best algorithm for a shape, found by the stopwatch once the shape has been seen often enough
 * to be worth it, without changing a bit of any result.
 *
 * Algorithms differ in tiles, clusters and stages, which does not change the order of a sum, and in
 * how they split it, which does. Only those of the favourite's kind that split nothing are tried,
 * and each must first give the favourite's bits on the operands at hand. So neither the noise of
 * the clock, nor when a run comes here, nor which rank it is, shows in a result. (On an H200 all
 * unsplit algorithms of Hopper's kind gave the same bits in 60 shapes; the fastest of them was 1 %
 * ahead of the favourite over a training step, up to 20 % in products of few rows.) */
#include "kernels/cuda/gemm_plan.h"

enum { MOST = 8, ROUNDS = 3 };

struct AlgoKind {
  int32_t id, split;
  uint32_t reduction;
};

static AlgoKind kind_of(const CudaGemm *g, const cublasLtMatmulAlgo_t *algo) {
  AlgoKind k = {};
  size_t wrote;
  LT(g, cublasLtMatmulAlgoConfigGetAttribute, algo, CUBLASLT_ALGO_CONFIG_ID, &k.id, sizeof k.id,
     &wrote);
  LT(g, cublasLtMatmulAlgoConfigGetAttribute, algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &k.split,
     sizeof k.split, &wrote);
  LT(g, cublasLtMatmulAlgoConfigGetAttribute, algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
     &k.reduction, sizeof k.reduction, &wrote);
  return k;
}

static __global__ void compare(const uint16_t *a, const uint16_t *b, size_t n, int *differ) {
  size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    if (a[i] != b[i]) *differ = 1;
}

/* Two results and a flag, for as long as it takes. */
struct Trial {
  void *first, *other;
  int *differ;
  cudaEvent_t start, stop;
};

static bool trial_open(Trial *t, size_t bytes) {
  *t = {};
  if (cudaMalloc(&t->first, bytes) != cudaSuccess || cudaMalloc(&t->other, bytes) != cudaSuccess ||
      cudaMalloc(&t->differ, sizeof *t->differ) != cudaSuccess) {
    (void)cudaGetLastError(); /* no room: the favourite stays */
    return false;
  }
  CUDA_CHECK(cudaEventCreate(&t->start));
  CUDA_CHECK(cudaEventCreate(&t->stop));
  return true;
}

static void trial_close(Trial *t) {
  for (void *p : {t->first, t->other, static_cast<void *>(t->differ)}) CUDA_CHECK(cudaFree(p));
  if (t->start) CUDA_CHECK(cudaEventDestroy(t->start));
  if (t->stop) CUDA_CHECK(cudaEventDestroy(t->stop));
}

static bool same_bits(Device *d, Trial *t, size_t bytes) {
  int differ = 0;
  CUDA_CHECK(cudaMemsetAsync(t->differ, 0, sizeof differ, cuda_stream(d)));
  compare<<<1024, 256, 0, cuda_stream(d)>>>(
      static_cast<uint16_t *>(t->first), static_cast<uint16_t *>(t->other), bytes / 2, t->differ);
  CUDA_LAUNCHED();
  device_download(d, &differ, t->differ, sizeof differ);
  return !differ;
}

/* Milliseconds of one run, the best of a few. */
static float time_of(Device *d, Trial *t, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo,
                     const GemmCall *x, void *to) {
  float best = 0;
  for (int i = 0; i <= ROUNDS; i++) {
    float ms;
    CUDA_CHECK(cudaEventRecord(t->start, cuda_stream(d)));
    gemm_run(d, p, algo, x, to);
    CUDA_CHECK(cudaEventRecord(t->stop, cuda_stream(d)));
    CUDA_CHECK(cudaEventSynchronize(t->stop));
    CUDA_CHECK(cudaEventElapsedTime(&ms, t->start, t->stop));
    if (i == 1 || (i > 1 && ms < best)) best = ms; /* the first run loads the kernel */
  }
  return best;
}

void gemm_tune(Device *d, GemmPlan *p, const GemmCall *x) {
  CudaGemm *g = cuda_of(d)->gemm;
  AlgoKind kind = kind_of(g, &p->algo);
  if (kind.split > 1) return;
  cublasLtMatmulHeuristicResult_t found[MOST];
  int n = gemm_algorithms(g, p, found, MOST);
  size_t bytes = tensor_bytes(x->c);
  Trial t;
  if (n > 1 && trial_open(&t, bytes)) {
    float least = time_of(d, &t, p, &p->algo, x, t.first);
    for (int i = 1; i < n; i++) {
      AlgoKind other = kind_of(g, &found[i].algo);
      if (other.id != kind.id || other.split != kind.split || other.reduction != kind.reduction)
        continue;
      float ms = time_of(d, &t, p, &found[i].algo, x, t.other);
      if (ms >= 0.99f * least || !same_bits(d, &t, bytes)) continue;
      least = ms;
      p->algo = found[i].algo;
    }
  }
  trial_close(&t);
}
