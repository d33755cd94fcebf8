/* The best algorithm for a shape, found by the stopwatch once the shape has been seen often enough
 * to be worth it, without changing a bit of any result.
 *
 * Algorithms differ in tiles, clusters and stages, which does not change the order of a sum, and in
 * how they split it, which does. Only those of the favourite's kind that split nothing are tried,
 * and each must first give the favourite's bits on the operands at hand. So neither the noise of
 * the clock, nor when a run comes here, nor which rank it is, shows in a result. (On an H200 all
 * unsplit algorithms of Hopper's kind gave the same bits in 60 shapes; up to 20 % are between them
 * in products of few rows.)
 *
 * Large products run at the card's power limit, where the fastest is the one that spends the least
 * energy and not the one that wins at full clock: of 7B's q, k and v, 823 TFLOP/s by itself became
 * 610 in a row, and 802 became 693. They are timed over so many runs that the clock settles, and in
 * turns: one and the same took 2.14 ms in a row and 2.22 a second later. That takes 60 ms each
 * time, so that only those are timed of which experience says that they spend little.
 *
 * Products of few rows find their weights in memory in a step, and not where the run before left
 * them: what the second cache holds is read out of it in front of each, which also gives the host
 * the time to queue what is measured. */
#include <cfloat>
#include <cmath>

#include "kernels/cuda/gemm_plan.h"

enum { MOST = 8, ROUNDS = 3, COLD_ROUNDS = 9, TURNS = 2, COLD_ROWS = 512 };
static const float SETTLE_MS = 40, RUN_MS = 20; /* the clock follows within about 50 ms */
static const float NEVER = FLT_MAX;
static const float SLOWER = 1.25f; /* than the fastest by itself: not tried at length */
static const float BEHIND = 1.05f; /* in a row: not tried again */

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

/* Tiles of 128 x 256 and 128 x 160, either way, and of 128 x 128: on H200s at their power limit one
 * of these was the fastest of eight in 21 of 24 products of Llamas of 1.1B and 7B, and behind it by
 * 0.1, 0.4 and 1.8 % in the others. */
static bool spends_little(const CudaGemm *g, const cublasLtMatmulAlgo_t *algo) {
  uint32_t tile = 0;
  size_t wrote;
  LT(g, cublasLtMatmulAlgoConfigGetAttribute, algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile,
     sizeof tile, &wrote);
  return tile == CUBLASLT_MATMUL_TILE_128x256 || tile == CUBLASLT_MATMUL_TILE_256x128 ||
         tile == CUBLASLT_MATMUL_TILE_128x160 || tile == CUBLASLT_MATMUL_TILE_160x128 ||
         tile == CUBLASLT_MATMUL_TILE_128x128;
}

/* Which are tried: those that spend little where the product is heavy, or else all. */
static void choose(const CudaGemm *g, const GemmPlan *p,
                   const cublasLtMatmulHeuristicResult_t *found, int n, bool *tried) {
  bool some = false;
  for (int i = 0; i < n; i++) {
    tried[i] = gemm_is_heavy(&p->key) && spends_little(g, &found[i].algo);
    some = some || tried[i];
  }
  for (int i = 0; i < n; i++) tried[i] = tried[i] || !some;
}

static __global__ void compare(const uint16_t *a, const uint16_t *b, size_t n, int *differ) {
  size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    if (a[i] != b[i]) *differ = 1;
}

/* Two results, a flag, and what fills the second cache (NULL: it stays as it is), for as long as it
 * takes. */
struct Trial {
  void *first, *other;
  int *differ;
  uint16_t *filling;
  size_t filling_bytes;
  cudaEvent_t start, stop;
};

static bool trial_open(Trial *t, size_t bytes, size_t filling_bytes) {
  *t = {};
  if (filling_bytes > 0 && cudaMalloc(&t->filling, filling_bytes) == cudaSuccess) {
    t->filling_bytes = filling_bytes;
    CUDA_CHECK(cudaMemset(t->filling, 0, filling_bytes));
  }
  (void)cudaGetLastError(); /* no room: the cache stays as it is */
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
  for (void *p :
       {t->first, t->other, static_cast<void *>(t->differ), static_cast<void *>(t->filling)})
    CUDA_CHECK(cudaFree(p));
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

/* Milliseconds of `runs` in a row. */
static float time_of(Device *d, Trial *t, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo,
                     const GemmCall *x, void *to, int runs) {
  float ms;
  CUDA_CHECK(cudaEventRecord(t->start, cuda_stream(d)));
  for (int i = 0; i < runs; i++) gemm_run(d, p, algo, x, to);
  CUDA_CHECK(cudaEventRecord(t->stop, cuda_stream(d)));
  CUDA_CHECK(cudaEventSynchronize(t->stop));
  CUDA_CHECK(cudaEventElapsedTime(&ms, t->start, t->stop));
  return ms;
}

static void fill_cache(Device *d, const Trial *t) {
  size_t n = t->filling_bytes / sizeof(uint16_t) / 2; /* of each of two */
  if (n == 0) return;
  compare<<<1024, 256, 0, cuda_stream(d)>>>(t->filling, t->filling + n, n, t->differ);
  CUDA_LAUNCHED();
}

/* Milliseconds of one run by itself, the best of a few. */
static float single_time(Device *d, Trial *t, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo,
                         const GemmCall *x, void *to) {
  time_of(d, t, p, algo, x, to, 1); /* the first run loads the kernel */
  float best = NEVER;
  for (int i = 0; i < (t->filling ? COLD_ROUNDS : ROUNDS); i++) {
    fill_cache(d, t);
    best = fminf(best, time_of(d, t, p, algo, x, to, 1));
  }
  return best;
}

/* Milliseconds of one run of many: as single_time, but at the clock that the algorithm's power
 * leaves once the card is at its limit. */
static float steady_time(Device *d, Trial *t, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo,
                         const GemmCall *x, void *to, float single) {
  int settle = 1 + static_cast<int>(SETTLE_MS / single),
      runs = 1 + static_cast<int>(RUN_MS / single);
  time_of(d, t, p, algo, x, to, settle);
  return time_of(d, t, p, algo, x, to, runs) / static_cast<float>(runs);
}

/* Milliseconds of each by itself; NEVER where it is not tried, of another kind than the favourite,
 * found[0], or gives other bits. */
static void single_times(Device *d, Trial *t, const GemmPlan *p,
                         const cublasLtMatmulHeuristicResult_t *found, int n, const GemmCall *x,
                         float *single) {
  const CudaGemm *g = cuda_of(d)->gemm;
  const AlgoKind kind = kind_of(g, &p->algo);
  bool tried[MOST];
  choose(g, p, found, n, tried);
  if (!tried[0]) gemm_run(d, p, &p->algo, x, t->first);
  for (int i = 0; i < n; i++) {
    const AlgoKind k = kind_of(g, &found[i].algo);
    single[i] = NEVER;
    if (!tried[i] || k.id != kind.id || k.split != kind.split || k.reduction != kind.reduction)
      continue;
    single[i] = single_time(d, t, p, &found[i].algo, x, i == 0 ? t->first : t->other);
    if (i > 0 && !same_bits(d, t, tensor_bytes(x->c))) single[i] = NEVER;
  }
}

static float least_of(const float *ms, int n) {
  float least = NEVER;
  for (int i = 0; i < n; i++) least = fminf(least, ms[i]);
  return least;
}

/* From milliseconds by itself to those of one run of many, in the mean over turns up and down the
 * list: between turns the card's clock drifts by more than the best differ. Those that are far
 * behind become NEVER. */
static void steady_times(Device *d, Trial *t, const GemmPlan *p,
                         const cublasLtMatmulHeuristicResult_t *found, int n, const GemmCall *x,
                         float *ms) {
  float sum[MOST] = {}, single[MOST];
  int first = n, rivals = 0;
  for (int i = n - 1; i >= 0; i--)
    if (ms[i] < NEVER) first = i, rivals++;
  if (rivals < 2) return;
  for (int i = 0; i < n; i++) single[i] = ms[i];
  steady_time(d, t, p, &found[first].algo, x, t->other, single[first] / 2); /* warms the card up */
  for (int turn = 0; turn < TURNS; turn++) {
    const float most = (turn == 0 ? SLOWER : BEHIND) * least_of(ms, n);
    for (int k = 0; k < n; k++) {
      int i = turn % 2 ? n - 1 - k : k;
      if (ms[i] > most) {
        ms[i] = NEVER;
        continue;
      }
      sum[i] += steady_time(d, t, p, &found[i].algo, x, t->other, single[i]);
    }
    for (int i = 0; i < n; i++)
      if (ms[i] < NEVER) ms[i] = sum[i] / static_cast<float>(turn + 1);
  }
}

/* The favourite, unless another is faster by more than the clock's noise. */
static void take_fastest(Device *d, Trial *t, GemmPlan *p,
                         const cublasLtMatmulHeuristicResult_t *found, int n, const GemmCall *x) {
  float ms[MOST], best = NEVER;
  single_times(d, t, p, found, n, x, ms);
  if (gemm_is_heavy(&p->key)) steady_times(d, t, p, found, n, x, ms);
  for (int i = 0; i < n; i++) {
    if (ms[i] == NEVER || (best < NEVER && ms[i] >= 0.99f * best)) continue;
    best = ms[i];
    p->algo = found[i].algo;
  }
}

void gemm_tune(Device *d, GemmPlan *p, const GemmCall *x) {
  CudaGemm *g = cuda_of(d)->gemm;
  if (kind_of(g, &p->algo).split > 1) return;
  cublasLtMatmulHeuristicResult_t found[MOST];
  int n = gemm_algorithms(g, p, found, MOST);
  Trial t = {};
  size_t filling = p->key.m <= COLD_ROWS ? 2 * cuda_of(d)->l2_bytes : 0;
  if (n > 1 && trial_open(&t, tensor_bytes(x->c), filling)) take_fastest(d, &t, p, found, n, x);
  trial_close(&t);
}
