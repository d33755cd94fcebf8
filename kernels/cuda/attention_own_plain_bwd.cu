/* Gradient of attention without tensor cores: the two kernels of attention_own_bwd.cu, computed in
 * F32. */
#include "kernels/cuda/attention_own_plain.h"

namespace {

/* weight and its derivative times it, of query q and key k of one head; 0 where k is not seen. */
struct Pair {
  float p, ds;
};
__device__ inline Pair pair_of(const OwnAttention &a, float qk, float gv, float lse, float delta,
                               bool sees) {
  float p = expf(a.scale * qk - lse);
  return sees ? Pair{p, p * (gv - delta)} : Pair{0, 0};
}

/* dk and dv: a block's keys stay, the queries of every head of their group pass by. */
template <class T, int D, int TILE>
__global__ __launch_bounds__(256) void keys_kernel(OwnAttention a) {
  using S = Plain<D, TILE>;
  extern __shared__ __align__(16) float tiles[];
  float *k_tile = tiles, *v_tile = k_tile + S::HEAD, *q_tile = v_tile + S::HEAD;
  float *g_tile = q_tile + S::HEAD, *p = g_tile + S::HEAD;
  int kv_head = static_cast<int>(blockIdx.x) % a.n_kv_heads, dim = a.head_dim;
  int group = a.n_heads / a.n_kv_heads;
  int64_t out_stride = static_cast<int64_t>(a.n_heads) * dim;
  OwnTile t = own_tile(a, TILE, static_cast<int>(blockIdx.x) / a.n_kv_heads, false);
  int keys = min(TILE, t.len - t.first);
  int q_end = own_end_query(t.first + keys - 1, a.window, t.len);
  const T *base = static_cast<const T *>(a.qkv) + t.start * a.q_stride;
  const T *dout = static_cast<const T *>(a.dout) + t.start * out_stride;
  int64_t k_at = t.first * a.q_stride + (a.n_heads + kv_head) * dim,
          v_at = k_at + a.n_kv_heads * dim;
  plain_copy<T, D, TILE>(k_tile, base + k_at, a.q_stride, keys, dim);
  plain_copy<T, D, TILE>(v_tile, base + v_at, a.q_stride, keys, dim);
  float4 dk[S::R][S::C], dv[S::R][S::C];
  plain_clear<D, TILE>(dk);
  plain_clear<D, TILE>(dv);
  for (int h = kv_head * group; h < (kv_head + 1) * group; h++)
    for (int q = t.first; q < q_end; q += TILE) {
      int rows = min(TILE, t.len - q);
      float qk[S::R][S::R], gv[S::R][S::R];
      __syncthreads();
      plain_copy<T, D, TILE>(q_tile, base + q * a.q_stride + h * dim, a.q_stride, rows, dim);
      plain_copy<T, D, TILE>(g_tile, dout + q * out_stride + h * dim, out_stride, rows, dim);
      __syncthreads();
      plain_dot<D, TILE>(qk, k_tile, q_tile);
      plain_dot<D, TILE>(gv, v_tile, g_tile);
#pragma unroll
      for (int j = 0; j < S::R; j++) {
        int row = thread_x() + 16 * j;
        int64_t at = (t.start + q + min(row, rows - 1)) * a.n_heads + h;
        float lse = a.lse[at], delta = a.delta[at];
#pragma unroll
        for (int i = 0; i < S::R; i++) {
          bool sees = row < rows && own_sees(q + row, t.first + thread_y() + 16 * i, a.window);
          Pair x = pair_of(a, qk[i][j], gv[i][j], lse, delta, sees);
          qk[i][j] = x.p;
          gv[i][j] = x.ds;
        }
      }
      plain_put<D, TILE>(p, qk);
      __syncthreads();
      plain_add<D, TILE>(dv, p, g_tile);
      __syncthreads();
      plain_put<D, TILE>(p, gv);
      __syncthreads();
      plain_add<D, TILE>(dk, p, q_tile);
    }
  T *to = static_cast<T *>(a.dqkv_w) + t.start * a.q_stride;
  float scale[S::R], one[S::R];
  for (int i = 0; i < S::R; i++) {
    scale[i] = a.scale;
    one[i] = 1;
  }
  plain_store<T, D, TILE>(dk, scale, to + k_at, a.q_stride, keys, dim);
  plain_store<T, D, TILE>(dv, one, to + v_at, a.q_stride, keys, dim);
}

/* dq: a block's queries stay, keys pass by. */
template <class T, int D, int TILE>
__global__ __launch_bounds__(256) void queries_kernel(OwnAttention a) {
  using S = Plain<D, TILE>;
  extern __shared__ __align__(16) float tiles[];
  float *q_tile = tiles, *g_tile = q_tile + S::HEAD, *k_tile = g_tile + S::HEAD;
  float *v_tile = k_tile + S::HEAD, *p = v_tile + S::HEAD;
  int h = static_cast<int>(blockIdx.x) % a.n_heads, dim = a.head_dim;
  int kv_head = h / (a.n_heads / a.n_kv_heads);
  int64_t out_stride = static_cast<int64_t>(a.n_heads) * dim;
  OwnTile t = own_tile(a, TILE, static_cast<int>(blockIdx.x) / a.n_heads, true);
  int rows = min(TILE, t.len - t.first);
  int64_t q_at = (t.start + t.first) * a.q_stride + h * dim;
  const T *qkv = static_cast<const T *>(a.qkv), *dout = static_cast<const T *>(a.dout);
  const T *k_head = qkv + t.start * a.q_stride + (a.n_heads + kv_head) * dim;
  const T *v_head = k_head + a.n_kv_heads * dim;
  plain_copy<T, D, TILE>(q_tile, qkv + q_at, a.q_stride, rows, dim);
  plain_copy<T, D, TILE>(g_tile, dout + (t.start + t.first) * out_stride + h * dim, out_stride,
                         rows, dim);
  float lse[S::R], delta[S::R], scale[S::R];
#pragma unroll
  for (int i = 0; i < S::R; i++) {
    int row = min(thread_y() + 16 * i, rows - 1);
    int64_t at = (t.start + t.first + row) * a.n_heads + h;
    lse[i] = a.lse[at];
    delta[i] = a.delta[at];
    scale[i] = a.scale;
  }
  float4 dq[S::R][S::C];
  plain_clear<D, TILE>(dq);
  for (int key = own_first_key(t.first, a.window) / TILE * TILE; key < t.first + rows;
       key += TILE) {
    int keys = min(TILE, t.len - key);
    float qk[S::R][S::R], gv[S::R][S::R];
    __syncthreads();
    plain_copy<T, D, TILE>(k_tile, k_head + key * a.q_stride, a.q_stride, keys, dim);
    plain_copy<T, D, TILE>(v_tile, v_head + key * a.q_stride, a.q_stride, keys, dim);
    __syncthreads();
    plain_dot<D, TILE>(qk, q_tile, k_tile);
    plain_dot<D, TILE>(gv, g_tile, v_tile);
#pragma unroll
    for (int i = 0; i < S::R; i++)
#pragma unroll
      for (int j = 0; j < S::R; j++) {
        int q = t.first + thread_y() + 16 * i;
        bool sees = own_sees(q, key + thread_x() + 16 * j, a.window);
        gv[i][j] = pair_of(a, qk[i][j], gv[i][j], lse[i], delta[i], sees).ds;
      }
    plain_put<D, TILE>(p, gv);
    __syncthreads();
    plain_add<D, TILE>(dq, p, k_tile);
  }
  plain_store<T, D, TILE>(dq, scale, static_cast<T *>(a.dqkv_w) + q_at, a.q_stride, rows, dim);
}

/* Large heads have smaller tiles: four of them fit into shared memory. */
template <class T, int D>
void launch_bwd(cudaStream_t stream, const OwnAttention &a, Segments seg) {
  constexpr int TILE = D > 64 ? 32 : 64;
  constexpr size_t SHARED = Plain<D, TILE>::shared(4);
  own_allow_shared(keys_kernel<T, D, TILE>, SHARED);
  keys_kernel<T, D, TILE><<<own_blocks(seg, TILE, a.n_kv_heads), 256, SHARED, stream>>>(a);
  CUDA_LAUNCHED();
  own_allow_shared(queries_kernel<T, D, TILE>, SHARED);
  queries_kernel<T, D, TILE><<<own_blocks(seg, TILE, a.n_heads), 256, SHARED, stream>>>(a);
  CUDA_LAUNCHED();
}

}  // namespace

void own_plain_bwd(cudaStream_t stream, DType type, const OwnAttention &a, Segments seg) {
  cuda_by_type(type, [&](auto zero) {
    using T = decltype(zero);
    if (a.head_dim <= 64)
      launch_bwd<T, 64>(stream, a, seg);
    else if (a.head_dim <= 128)
      launch_bwd<T, 128>(stream, a, seg);
    else
      launch_bwd<T, 256>(stream, a, seg);
  });
}
