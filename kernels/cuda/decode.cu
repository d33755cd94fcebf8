/* What decoding adds to the other ops: rotary embedding and cache write in one, and rows that move
 * on without the host. */
#include "kernels/cuda/chain.h"
#include "kernels/cuda/ops.h"

namespace {

struct RopeWrite {
  int n_heads, n_kv_heads, dim, half, page_size; /* half: numbers of cos in a row; 0: no rope */
  int64_t places, slots;
  const int32_t *positions, *slot;
  const float *cos, *sin;
};

/* A block is a row. */
template <class T>
__global__ void rope_write_kernel(RopeWrite a, T *qkv, T *k_pages, T *v_pages) {
  wait_for_kernel_before();
  next_kernel_may_start();
  int D = a.dim, K = a.n_kv_heads, thread = static_cast<int>(threadIdx.x);
  int64_t row = blockIdx.x, at = a.half > 0 ? a.positions[row] : 0;
  int slot = a.slot[row];
  if (slot < -1 || slot >= a.slots || at < 0 || (a.half > 0 && at >= a.places)) __trap();
  T *x = qkv + row * (a.n_heads + 2 * K) * D, *k = x + a.n_heads * D, *v = k + K * D;
  for (int i = thread; i < (a.n_heads + K) * a.half; i += static_cast<int>(blockDim.x)) {
    int j = i % a.half;
    T *p = x + i / a.half * D + j;
    float u = to_float(p[0]), w = to_float(p[a.half]);
    float c = a.cos[at * a.half + j], s = a.sin[at * a.half + j];
    p[0] = from_float<T>(u * c - w * s);
    p[a.half] = from_float<T>(w * c + u * s);
  }
  if (slot < 0) return;
  __syncthreads();
  int64_t block = static_cast<int64_t>(slot / a.page_size) * K, place = slot % a.page_size;
  for (int i = thread; i < K * D; i += static_cast<int>(blockDim.x)) {
    int64_t to = ((block + i / D) * a.page_size + place) * D + i % D;
    k_pages[to] = k[i];
    v_pages[to] = v[i];
  }
}

struct Rows {
  int batch, page_size, first, width, steps;
  uint64_t seed;
  const int32_t *table, *end, *drawn;
  const int64_t *stream;
  const float *logprob;
  int32_t *token, *position, *len, *slot, *step, *history_token;
  float *u, *history_logprob;
};

/* rng_uniform_f32 of core/rng.c. */
__device__ float random_number(uint64_t seed, uint64_t stream, uint32_t index) {
  uint32_t c0 = index, c1 = 0;
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
  }
  uint64_t bits = (static_cast<uint64_t>(c0) << 32 | c1) >> 12;
  float u = static_cast<float>((static_cast<double>(bits) + 0.5) * 0x1p-52);
  return u < 1 ? u : 0x1.fffffep-1f;
}

/* What is known of a row, asked for all at once. */
struct Drawn {
  int number, end; /* number: of the token drawn; 0: inert */
  int32_t token;
  float logprob;
  uint64_t stream;
};

__device__ void advance_row(const Rows &r, int b, const Drawn &d) {
  int number = d.number;
  if (number + 1 >= d.end) {
    r.len[b] = 0;
    r.slot[b] = -1;
    return;
  }
  int page = number / r.page_size;
  if (page >= r.width) __trap(); /* a token behind its page table */
  r.len[b] = number + 1;
  r.token[b] = d.token;
  r.position[b] = r.first + number;
  r.slot[b] =
      r.table[static_cast<int64_t>(b) * r.width + page] * r.page_size + number % r.page_size;
  r.u[b] = random_number(r.seed, d.stream, static_cast<uint32_t>(number + 1));
}

/* One block: it reads the step before it counts it on. What comes next may read ahead of what is
 * right in front of it, but not ahead of this: it may not start before the end. */
__global__ void advance_kernel(Rows r) {
  wait_for_kernel_before();
  int step = *r.step;
  for (int b = static_cast<int>(threadIdx.x); b < r.batch; b += static_cast<int>(blockDim.x)) {
    Drawn d = {r.len[b], r.end[b], r.drawn[b], r.logprob[b], static_cast<uint64_t>(r.stream[b])};
    if (step < 0 || step >= r.steps) __trap();
    int64_t at = static_cast<int64_t>(step) * r.batch + b;
    r.history_token[at] = d.number == 0 ? -1 : d.token;
    r.history_logprob[at] = d.number == 0 ? 0 : d.logprob;
    if (d.number > 0) advance_row(r, b, d);
  }
  __syncthreads();
  if (threadIdx.x == 0) *r.step = step + 1;
}

bool is_1d(Tensor t, DType type, int64_t n) {
  return t.data && t.dtype == type && t.ndim == 1 && t.dim[0] == n;
}

}  // namespace

void cuda_rope_write(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
                     AttnShape s, Tensor slot_N, Tensor k_pages, Tensor v_pages) {
  int64_t n = qkv_NQ.dim[0],
          width = (s.n_heads + 2 * s.n_kv_heads) * static_cast<int64_t>(s.head_dim);
  require(qkv_NQ.ndim == 2 && qkv_NQ.dim[1] == width && k_pages.dtype == qkv_NQ.dtype);
  require(k_pages.ndim == 4 && v_pages.ndim == 4 && v_pages.dtype == k_pages.dtype);
  for (int i = 0; i < 4; i++) require(k_pages.dim[i] == v_pages.dim[i]);
  require(k_pages.dim[1] > 0 && k_pages.dim[2] == s.n_kv_heads && k_pages.dim[3] == s.head_dim);
  if (n == 0) return;
  require(is_1d(slot_N, DT_I32, n));
  RopeWrite a = {};
  a.n_heads = s.n_heads;
  a.n_kv_heads = s.n_kv_heads;
  a.dim = s.head_dim;
  a.page_size = static_cast<int>(k_pages.dim[1]);
  a.slots = k_pages.dim[0] * k_pages.dim[1];
  a.slot = cuda_data<const int32_t>(slot_N);
  if (cos_Pr.data) {
    require(is_1d(positions_N, DT_I32, n) && cos_Pr.ndim == 2 && 2 * cos_Pr.dim[1] <= s.head_dim);
    require(sin_Pr.dim[0] == cos_Pr.dim[0] && sin_Pr.dim[1] == cos_Pr.dim[1]);
    a.half = static_cast<int>(cos_Pr.dim[1]);
    a.places = cos_Pr.dim[0];
    a.positions = cuda_data<const int32_t>(positions_N);
    a.cos = cuda_data<const float>(cos_Pr);
    a.sin = cuda_data<const float>(sin_Pr);
  }
  cuda_by_type(qkv_NQ.dtype, [&](auto zero) {
    using T = decltype(zero);
    chain_launch(cuda_stream(d), rope_write_kernel<T>, dim3(static_cast<unsigned>(n)), 256, 0, 1, a,
                 cuda_data<T>(qkv_NQ), cuda_data<T>(k_pages), cuda_data<T>(v_pages));
  });
}

void cuda_decode_advance(Device *d, DecodeRows r) {
  int64_t batch = r.token_B.dim[0], steps = r.history_token_TB.dim[0];
  for (Tensor t : {r.token_B, r.position_B, r.len_B, r.slot_B, r.end_B, r.drawn_B})
    require(t.dtype == DT_I32 && t.ndim == 1 && t.dim[0] == batch);
  require(r.table_BP.dtype == DT_I32 && r.table_BP.ndim == 2 && r.table_BP.dim[0] == batch);
  require(r.stream_B.dtype == DT_I64 && tensor_numel(r.stream_B) == batch && r.page_size > 0);
  require(r.u_B.dtype == DT_F32 && tensor_numel(r.u_B) == batch);
  require(r.logprob_B.dtype == DT_F32 && tensor_numel(r.logprob_B) == batch);
  require(r.step_1.dtype == DT_I32 && tensor_numel(r.step_1) == 1 && batch <= INT32_MAX);
  require(r.history_token_TB.dtype == DT_I32 && tensor_numel(r.history_token_TB) == steps * batch);
  require(r.history_logprob_TB.dtype == DT_F32 &&
          tensor_numel(r.history_logprob_TB) == steps * batch);
  Rows a = {};
  a.batch = static_cast<int>(batch);
  a.page_size = r.page_size;
  a.first = r.first;
  a.width = static_cast<int>(r.table_BP.dim[1]);
  a.steps = static_cast<int>(steps);
  a.seed = r.seed;
  a.table = cuda_data<const int32_t>(r.table_BP);
  a.end = cuda_data<const int32_t>(r.end_B);
  a.drawn = cuda_data<const int32_t>(r.drawn_B);
  a.stream = cuda_data<const int64_t>(r.stream_B);
  a.logprob = cuda_data<const float>(r.logprob_B);
  a.token = cuda_data<int32_t>(r.token_B);
  a.position = cuda_data<int32_t>(r.position_B);
  a.len = cuda_data<int32_t>(r.len_B);
  a.slot = cuda_data<int32_t>(r.slot_B);
  a.step = cuda_data<int32_t>(r.step_1);
  a.history_token = cuda_data<int32_t>(r.history_token_TB);
  a.u = cuda_data<float>(r.u_B);
  a.history_logprob = cuda_data<float>(r.history_logprob_TB);
  chain_launch(cuda_stream(d), advance_kernel, dim3(1), 256, 0, 1, a);
}
