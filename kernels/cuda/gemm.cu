/* Matrix products by cuBLASLt, in row-major order without a transpose in memory.
 *
 * cuBLASLt counts columns first: a row-major [r, c] is its [c, r]. So C = op(A) op(B) is asked for
 * as C^T = op(B)^T op(A)^T, with the operands exchanged: an NT product becomes its TN, the order
 * that tensor cores like best.
 *
 * A plan (layouts and algorithm) is made when a shape first occurs and kept. The algorithm is the
 * one that cuBLASLt's heuristic ranks first for the shape, types and alignment, none of which
 * depends on when or where a run happens: same shapes on the same kind of GPU, same bits. Choosing
 * by a stopwatch would not give that, since algorithms differ in the order of their sums. */
#include "kernels/cuda/gemm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/lib_cublaslt.h"
#include "kernels/cuda/ops.h"

/* What a plan depends on. Compared as bytes: zeroed first, no padding holds anything. */
struct GemmKey {
  int64_t m, n, k;
  int32_t kind, type, c_type;
  int32_t bias;
  int32_t align[4]; /* of a, b, c, bias: bytes, at most ALIGN_MOST */
};

struct GemmPlan {
  GemmKey key;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t a, b, c; /* of the tensors of these names */
  cublasLtMatmulAlgo_t algo;
  bool made, possible; /* a bias may not go with every shape */
};

/* Batches of many lengths pass by in a run; a plan gives its place to a later one of the same hash.
 */
enum { PLANS = 1024, ALIGN_MOST = 16 };

struct CudaGemm {
  CublasLt lt;
  cublasLtHandle_t handle;
  cublasLtMatmulPreference_t preference;
  GemmPlan plan[PLANS];
};

static void check_at(const CudaGemm *g, cublasStatus_t s, const char *call, int line) {
  if (s != CUBLAS_STATUS_SUCCESS)
    die_at(__FILE__, line, "%s: %s", call, g->lt.cublasLtGetStatusString(s));
}
#define LT(g, function, ...) check_at(g, (g)->lt.function(__VA_ARGS__), #function, __LINE__)

CudaGemm *gemm_open(Error *err) {
  CudaGemm *g = static_cast<CudaGemm *>(mem_zalloc(1, sizeof *g));
  if (cublaslt_open(&g->lt, err)) {
    free(g);
    return nullptr;
  }
  LT(g, cublasLtCreate, &g->handle);
  LT(g, cublasLtMatmulPreferenceCreate, &g->preference);
  LT(g, cublasLtMatmulPreferenceSetAttribute, g->preference,
     CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &GEMM_WORKSPACE, sizeof GEMM_WORKSPACE);
  return g;
}

static void forget(CudaGemm *g, GemmPlan *p) {
  if (!p->made) return;
  LT(g, cublasLtMatmulDescDestroy, p->desc);
  LT(g, cublasLtMatrixLayoutDestroy, p->a);
  LT(g, cublasLtMatrixLayoutDestroy, p->b);
  LT(g, cublasLtMatrixLayoutDestroy, p->c);
  memset(p, 0, sizeof *p);
}

void gemm_close(CudaGemm *g) {
  if (!g) return;
  for (GemmPlan &p : g->plan) forget(g, &p);
  LT(g, cublasLtMatmulPreferenceDestroy, g->preference);
  LT(g, cublasLtDestroy, g->handle);
  free(g);
}

size_t gemm_version(const CudaGemm *g) { return g->lt.cublasLtGetVersion(); }

/* ---- plans ---- */

static cudaDataType_t lt_type(int32_t t) { return t == DT_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

static int32_t alignment(Tensor t) {
  uintptr_t p = reinterpret_cast<uintptr_t>(t.data);
  int32_t a = ALIGN_MOST;
  while (p % static_cast<uintptr_t>(a)) a /= 2;
  return a;
}

static void describe_product(CudaGemm *g, GemmPlan *p) {
  const GemmKey *k = &p->key;
  LT(g, cublasLtMatmulDescCreate, &p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  /* of the first operand, which is B, and the second, A */
  cublasOperation_t first = k->kind == GEMM_NT ? CUBLAS_OP_T : CUBLAS_OP_N;
  cublasOperation_t second = k->kind == GEMM_TN ? CUBLAS_OP_T : CUBLAS_OP_N;
  LT(g, cublasLtMatmulDescSetAttribute, p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
  LT(g, cublasLtMatmulDescSetAttribute, p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &second,
     sizeof second);
  if (k->bias) {
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cudaDataType_t type = lt_type(k->c_type);
    LT(g, cublasLtMatmulDescSetAttribute, p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
       sizeof epilogue);
    LT(g, cublasLtMatmulDescSetAttribute, p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type,
       sizeof type);
  }
}

static void layout(CudaGemm *g, cublasLtMatrixLayout_t *l, int32_t type, int64_t rows,
                   int64_t cols) {
  LT(g, cublasLtMatrixLayoutCreate, l, lt_type(type), static_cast<uint64_t>(cols),
     static_cast<uint64_t>(rows), cols);
}

static void describe_operands(CudaGemm *g, GemmPlan *p) {
  const GemmKey *k = &p->key;
  bool a_turned = k->kind == GEMM_TN, b_turned = k->kind == GEMM_NT;
  layout(g, &p->a, k->type, a_turned ? k->k : k->m, a_turned ? k->m : k->k);
  layout(g, &p->b, k->type, b_turned ? k->n : k->k, b_turned ? k->k : k->n);
  layout(g, &p->c, k->c_type, k->m, k->n);
}

static void prefer_alignment(CudaGemm *g, const GemmKey *k) {
  const uint32_t a = static_cast<uint32_t>(k->align[0]), b = static_cast<uint32_t>(k->align[1]),
                 c = static_cast<uint32_t>(k->align[2]);
  LT(g, cublasLtMatmulPreferenceSetAttribute, g->preference,
     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b, sizeof b);
  LT(g, cublasLtMatmulPreferenceSetAttribute, g->preference,
     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a, sizeof a);
  LT(g, cublasLtMatmulPreferenceSetAttribute, g->preference,
     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c, sizeof c);
  LT(g, cublasLtMatmulPreferenceSetAttribute, g->preference,
     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c, sizeof c);
}

static void make_plan(CudaGemm *g, GemmPlan *p, const GemmKey *key) {
  forget(g, p);
  p->key = *key;
  p->made = true;
  describe_product(g, p);
  describe_operands(g, p);
  prefer_alignment(g, key);
  cublasLtMatmulHeuristicResult_t found;
  int n = 0;
  cublasStatus_t s = g->lt.cublasLtMatmulAlgoGetHeuristic(g->handle, p->desc, p->b, p->a, p->c,
                                                          p->c, g->preference, 1, &found, &n);
  if (s != CUBLAS_STATUS_NOT_SUPPORTED) check_at(g, s, "cublasLtMatmulAlgoGetHeuristic", __LINE__);
  p->possible = s == CUBLAS_STATUS_SUCCESS && n > 0;
  if (p->possible) p->algo = found.algo;
}

static uint64_t hash_of(const GemmKey *key) {
  uint64_t words[sizeof *key / 8], h = 0;
  memcpy(words, key, sizeof words);
  for (uint64_t w : words) {
    h = (h ^ w) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return h;
}

static GemmPlan *plan_of(CudaGemm *g, const GemmKey *key) {
  static_assert(sizeof *key % 8 == 0 && sizeof *key == 3 * 8 + 8 * 4, "no padding");
  GemmPlan *p = &g->plan[hash_of(key) % PLANS];
  if (!p->made || memcmp(&p->key, key, sizeof *key) != 0) make_plan(g, p, key);
  return p;
}

/* ---- products ---- */

static GemmKey key_of(GemmKind kind, Tensor a, Tensor b, Tensor c, Tensor bias) {
  GemmKey key = {};
  key.m = c.dim[0];
  key.n = c.dim[1];
  key.k = kind == GEMM_TN ? a.dim[0] : a.dim[1];
  key.kind = kind;
  key.type = a.dtype;
  key.c_type = c.dtype;
  key.bias = bias.data != nullptr;
  const Tensor all[] = {a, b, c, bias};
  for (int i = 0; i < 4; i++) key.align[i] = alignment(all[i]);
  return key;
}

/* C = alpha op(A) op(B) + beta C, + bias in every row where there is one. False: not with a bias.
 */
static void explore(Device *d, CudaGemm *g, GemmPlan *p, float alpha, Tensor a, Tensor b,
                    float beta, Tensor c, Tensor bias);
static bool multiply(Device *d, GemmKind kind, float alpha, Tensor a, Tensor b, float beta,
                     Tensor c, Tensor bias) {
  CudaGemm *g = cuda_of(d)->gemm;
  GemmKey key = key_of(kind, a, b, c, bias);
  GemmPlan *p = &g->plan[hash_of(&key) % PLANS];
  bool fresh = !p->made || memcmp(&p->key, &key, sizeof key) != 0;
  p = plan_of(g, &key);
  if (fresh && p->possible && getenv("RLHF_GEMM_EXPLORE") && key.m * key.n * key.k > 100000000)
    explore(d, g, p, alpha, a, b, beta, c, bias);
  if (!p->possible && key.bias) return false;
  if (!p->possible)
    die("cuBLASLt has no algorithm for a product of [%lld, %lld, %lld], kind %d, %s to %s",
        static_cast<long long>(key.m), static_cast<long long>(key.n), static_cast<long long>(key.k),
        kind, dtype_name(a.dtype), dtype_name(c.dtype));
  if (key.bias)
    LT(g, cublasLtMatmulDescSetAttribute, p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.data,
       sizeof bias.data);
  void *workspace = cuda_scratch(d, GEMM_WORKSPACE);
  LT(g, cublasLtMatmul, g->handle, p->desc, &alpha, b.data, p->b, a.data, p->a, &beta, c.data, p->c,
     c.data, p->c, &p->algo, workspace, GEMM_WORKSPACE, cuda_stream(d));
  return true;
}

/* ---- explore ---- */
static __global__ void count_differences(const uint16_t *a, const uint16_t *b, size_t n,
                                         unsigned long long *count) {
  size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  unsigned long long c = 0;
  for (; i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x) c += a[i] != b[i];
  if (c) atomicAdd(count, c);
}

static void explore(Device *d, CudaGemm *g, GemmPlan *p, float alpha, Tensor a, Tensor b,
                    float beta, Tensor c, Tensor bias) {
  const GemmKey *k = &p->key;
  double flops = 2.0 * static_cast<double>(k->m) * static_cast<double>(k->n) *
                 static_cast<double>(k->k);
  cublasLtMatmulHeuristicResult_t found[24];
  int n = 0;
  prefer_alignment(g, k);
  g->lt.cublasLtMatmulAlgoGetHeuristic(g->handle, p->desc, p->b, p->a, p->c, p->c, g->preference,
                                       24, found, &n);
  size_t bytes = tensor_bytes(c);
  char *out[2];
  unsigned long long *count, host = 0;
  CUDA_CHECK(cudaMalloc(&out[0], bytes));
  CUDA_CHECK(cudaMalloc(&out[1], bytes));
  CUDA_CHECK(cudaMalloc(&count, 8));
  cudaEvent_t e[2];
  CUDA_CHECK(cudaEventCreate(&e[0]));
  CUDA_CHECK(cudaEventCreate(&e[1]));
  printf("EXPLORE kind %d m %lld n %lld k %lld %s>%s beta %g bias %d align %d %d %d\n", k->kind,
         (long long)k->m, (long long)k->n, (long long)k->k, dtype_name(a.dtype),
         dtype_name(c.dtype), beta, bias.data != nullptr, k->align[0], k->align[1], k->align[2]);
  void *workspace = cuda_scratch(d, GEMM_WORKSPACE);
  cudaStream_t s = cuda_stream(d);
  for (int i = 0; i < n; i++) {
    char *to = out[i > 0];
    float ms = 0, best = 1e9f;
    int reps = flops > 1e12 ? 4 : 20;
    for (int r = 0; r < 4; r++) {
      CUDA_CHECK(cudaEventRecord(e[0], s));
      for (int j = 0; j < (r ? reps : 2); j++)
        LT(g, cublasLtMatmul, g->handle, p->desc, &alpha, b.data, p->b, a.data, p->a, &beta,
           c.data, p->c, to, p->c, &found[i].algo, workspace, GEMM_WORKSPACE, s);
      CUDA_CHECK(cudaEventRecord(e[1], s));
      CUDA_CHECK(cudaEventSynchronize(e[1]));
      CUDA_CHECK(cudaEventElapsedTime(&ms, e[0], e[1]));
      if (r && ms / (float)reps < best) best = ms / (float)reps;
    }
    CUDA_CHECK(cudaMemsetAsync(count, 0, 8, s));
    count_differences<<<1024, 256, 0, s>>>((uint16_t *)out[0], (uint16_t *)to, bytes / 2, count);
    CUDA_CHECK(cudaMemcpyAsync(&host, count, 8, cudaMemcpyDeviceToHost, s));
    CUDA_CHECK(cudaStreamSynchronize(s));
    int v[9] = {};
    const cublasLtMatmulAlgoConfigAttributes_t attr[] = {
        CUBLASLT_ALGO_CONFIG_ID,          CUBLASLT_ALGO_CONFIG_TILE_ID,
        CUBLASLT_ALGO_CONFIG_STAGES_ID,   CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
        CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
        CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID,
        CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID};
    for (int j = 0; j < 9; j++) {
      size_t wrote;
      int size = j == 7 || j == 8 ? 2 : 4;
      g->lt.cublasLtMatmulAlgoConfigGetAttribute(&found[i].algo, attr[j], &v[j], (size_t)size,
                                                 &wrote);
    }
    printf("  %2d id %d tile %d stages %d splitk %d red %d swizzle %d custom %d inner %d cluster %d "
           "ws %zu waves %.2f: %.1f us %.1f TFLOP/s, %.0f GB/s, %llu differ\n",
           i, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], found[i].workspaceSize,
           found[i].wavesCount, 1e3 * best, 1e-9 * flops / best,
           1e-6 * (double)(tensor_bytes(a) + tensor_bytes(b) + bytes) / best, host);
  }
  CUDA_CHECK(cudaFree(out[0]));
  CUDA_CHECK(cudaFree(out[1]));
  CUDA_CHECK(cudaFree(count));
}

static bool is_float(DType t) { return t == DT_F32 || t == DT_BF16; }

void cuda_gemm(Device *d, GemmKind kind, float alpha, Tensor a, Tensor b, float beta, Tensor c) {
  require(is_float(a.dtype) && b.dtype == a.dtype && (c.dtype == a.dtype || c.dtype == DT_F32));
  require(a.ndim == 2 && b.ndim == 2 && c.ndim == 2);
  int64_t m = kind == GEMM_TN ? a.dim[1] : a.dim[0], k = kind == GEMM_TN ? a.dim[0] : a.dim[1];
  int64_t n = kind == GEMM_NT ? b.dim[0] : b.dim[1];
  require((kind == GEMM_NT ? b.dim[1] : b.dim[0]) == k && c.dim[0] == m && c.dim[1] == n);
  if (m == 0 || n == 0) return;
  if (k == 0)
    cuda_scale(d, beta, c);
  else
    multiply(d, kind, alpha, a, b, beta, c, Tensor{});
}

void cuda_linear_bias(Device *d, Tensor x_NC, Tensor w_OC, Tensor b_O, Tensor y_NO) {
  require(b_O.ndim == 1 && b_O.dim[0] == y_NO.dim[1] && b_O.dtype == y_NO.dtype);
  require(x_NC.ndim == 2 && w_OC.ndim == 2 && y_NO.ndim == 2 && is_float(x_NC.dtype));
  require(w_OC.dtype == x_NC.dtype && y_NO.dtype == x_NC.dtype && x_NC.dim[1] == w_OC.dim[1]);
  require(y_NO.dim[0] == x_NC.dim[0] && y_NO.dim[1] == w_OC.dim[0]);
  if (y_NO.dim[0] > 0 && y_NO.dim[1] > 0 && x_NC.dim[1] > 0 &&
      multiply(d, GEMM_NT, 1, x_NC, w_OC, 0, y_NO, b_O))
    return;
  cuda_gemm(d, GEMM_NT, 1, x_NC, w_OC, 0, y_NO);
  cuda_bias_add(d, y_NO, b_O);
}
