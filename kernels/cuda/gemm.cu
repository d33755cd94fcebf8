/* Matrix products by cuBLASLt, in row-major order without a transpose in memory.
 *
 * cuBLASLt counts columns first: a row-major [r, c] is its [c, r]. So C = op(A) op(B) is asked for
 * as C^T = op(B)^T op(A)^T, with the operands exchanged: an NT product becomes its TN, the order
 * that tensor cores like best.
 *
 * A plan (layouts and algorithm) is made when a shape first occurs and kept. The algorithm is the
 * one that cuBLASLt's heuristic ranks first for the shape, types and alignment, none of which
 * depends on when or where a run happens: same shapes on the same kind of GPU, same bits. A shape
 * that comes often is tuned (gemm_tune.cu), which keeps the bits too. */
#include "kernels/cuda/gemm.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/gemm_plan.h"
#include "kernels/cuda/gemm_rows.h"
#include "kernels/cuda/ops.h"

enum { ALIGN_MOST = 16 };

void gemm_check_at(const CudaGemm *g, cublasStatus_t s, const char *call, const char *file,
                   int line) {
  if (s != CUBLAS_STATUS_SUCCESS)
    die_at(file, line, "%s: %s", call, g->lt.cublasLtGetStatusString(s));
}

CudaGemm *gemm_open(Error *err) {
  CudaGemm *g = static_cast<CudaGemm *>(mem_zalloc(1, sizeof *g));
  if (cublaslt_open(&g->lt, err)) {
    free(g);
    return nullptr;
  }
  LT(g, cublasLtCreate, &g->handle);
  LT(g, cublasLtMatmulPreferenceCreate, &g->preference);
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

void gemm_in_company(CudaGemm *g) { g->in_company = true; }

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

/* Partial sums of a split product are added in F32, never in BF16. */
static void prefer(CudaGemm *g, const GemmKey *k, size_t room) {
  LT(g, cublasLtMatmulPreferenceSetAttribute, g->preference,
     CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room);
  const uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
                        (k->c_type == DT_F32 ? CUBLASLT_REDUCTION_SCHEME_INPLACE : 0);
  LT(g, cublasLtMatmulPreferenceSetAttribute, g->preference,
     CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums);
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

static int ask(CudaGemm *g, const GemmPlan *p, size_t room, cublasLtMatmulHeuristicResult_t *found,
               int most) {
  int n = 0;
  prefer(g, &p->key, room);
  cublasStatus_t s = g->lt.cublasLtMatmulAlgoGetHeuristic(g->handle, p->desc, p->b, p->a, p->c,
                                                          p->c, g->preference, most, found, &n);
  if (s == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
  gemm_check_at(g, s, "cublasLtMatmulAlgoGetHeuristic", __FILE__, __LINE__);
  return n;
}

/* With a workspace Hopper's algorithms keep a counter there, by which a multiprocessor takes its
 * next tile when it is free. That serves where NCCL's kernels hold some of them; otherwise large
 * products take 1.7 % less without (those of a layer of 7B 17.4 instead of 17.7 ms, H200), and no
 * memset in front. */
int gemm_algorithms(CudaGemm *g, const GemmPlan *p, cublasLtMatmulHeuristicResult_t *found,
                    int most) {
  bool heavy = p->key.type == DT_BF16 && gemm_is_heavy(&p->key);
  int n = heavy && !g->in_company ? ask(g, p, 0, found, most) : 0;
  return n > 0 ? n : ask(g, p, GEMM_WORKSPACE, found, most);
}

static void make_plan(CudaGemm *g, GemmPlan *p, const GemmKey *key) {
  forget(g, p);
  p->key = *key;
  p->made = true;
  describe_product(g, p);
  describe_operands(g, p);
  cublasLtMatmulHeuristicResult_t found;
  p->possible = gemm_algorithms(g, p, &found, 1) > 0;
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
  static_assert(sizeof *key == 3 * 8 + 8 * 4, "no padding");
  GemmPlan *p = &g->plan[hash_of(key) % GEMM_PLANS];
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

void gemm_run(Device *d, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, const GemmCall *x,
              void *to) {
  CudaGemm *g = cuda_of(d)->gemm;
  if (p->key.bias)
    LT(g, cublasLtMatmulDescSetAttribute, p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &x->bias.data,
       sizeof x->bias.data);
  void *workspace = cuda_scratch(d, GEMM_WORKSPACE);
  LT(g, cublasLtMatmul, g->handle, p->desc, &x->alpha, x->b.data, p->b, x->a.data, p->a, &x->beta,
     x->c.data, p->c, to, p->c, algo, workspace, GEMM_WORKSPACE, cuda_stream(d));
}

/* Uses of a plan after which it is tuned, which costs about 30 of them, and a second where they are
 * large; 0: never. Small products gain nothing that a run would notice, and in F32 the algorithms
 * of one kind do not all sum in one order: both stay as they are. A batch of decoding comes for
 * sure and is captured after a few; of other shapes a packed batch may use each but once a layer.
 */
static int tuned_after(const GemmKey *k) {
  if (k->type != DT_BF16 || k->n * k->k < 1 << 20) return 0;
  bool decoding = k->kind == GEMM_NT && k->m <= 512 && k->m % 8 == 0;
  return decoding ? 4 : 64;
}

/* Of products that differ in the number of tokens alone. */
static int family_of(GemmKey key) {
  (key.kind == GEMM_TN ? key.k : key.m) = 0;
  memset(key.align, 0, sizeof key.align);
  return static_cast<int>(hash_of(&key) % GEMM_FAMILIES);
}

/* Counts a use. A heavy product is worth the second only where it is no batch of a length that
 * passes by once: where at least a quarter of its family's uses have its number of tokens. */
static bool is_time_to_tune(CudaGemm *g, GemmPlan *p) {
  enum { SHARES = 4 };
  int after = tuned_after(&p->key);
  bool heavy = after > 0 && gemm_is_heavy(&p->key), common = true;
  if (heavy) {
    int64_t family = ++g->seen[family_of(p->key)];
    common = ++p->seen * SHARES >= family;
  }
  if (p->uses == after || ++p->uses < after) return false;
  if (!common) p->uses = 0;
  return common;
}

/* C = alpha op(A) op(B) + beta C, + bias in every row where there is one. False: not with a bias.
 */
static bool multiply(Device *d, GemmKind kind, GemmCall x) {
  if (gemm_rows(d, kind, &x)) return true;
  CudaGemm *g = cuda_of(d)->gemm;
  GemmKey key = key_of(kind, x.a, x.b, x.c, x.bias);
  GemmPlan *p = plan_of(g, &key);
  if (!p->possible && key.bias) return false;
  if (!p->possible)
    die("cuBLASLt has no algorithm for a product of [%lld, %lld, %lld], kind %d, %s to %s",
        static_cast<long long>(key.m), static_cast<long long>(key.n), static_cast<long long>(key.k),
        kind, dtype_name(x.a.dtype), dtype_name(x.c.dtype));
  if (!d->capturing && is_time_to_tune(g, p)) gemm_tune(d, p, &x);
  gemm_run(d, p, &p->algo, &x, x.c.data);
  return true;
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
    multiply(d, kind, {alpha, beta, a, b, c, {}});
}

void cuda_linear_bias(Device *d, Tensor x_NC, Tensor w_OC, Tensor b_O, Tensor y_NO) {
  require(b_O.ndim == 1 && b_O.dim[0] == y_NO.dim[1] && b_O.dtype == y_NO.dtype);
  require(x_NC.ndim == 2 && w_OC.ndim == 2 && y_NO.ndim == 2 && is_float(x_NC.dtype));
  require(w_OC.dtype == x_NC.dtype && y_NO.dtype == x_NC.dtype && x_NC.dim[1] == w_OC.dim[1]);
  require(y_NO.dim[0] == x_NC.dim[0] && y_NO.dim[1] == w_OC.dim[0]);
  if (y_NO.dim[0] > 0 && y_NO.dim[1] > 0 && x_NC.dim[1] > 0 &&
      multiply(d, GEMM_NT, {1, 0, x_NC, w_OC, y_NO, b_O}))
    return;
  cuda_gemm(d, GEMM_NT, 1, x_NC, w_OC, 0, y_NO);
  cuda_bias_add(d, y_NO, b_O);
}
