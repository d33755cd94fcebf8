/* Attention forward without tensor cores: as attention_own_fwd.cu, computed in F32. */
#include "kernels/cuda/attention_own_plain.h"

namespace {

/* Sum or maximum over the 16 threads that share rows. */
__device__ inline float row_sum(float x) {
  for (int o = 8; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
__device__ inline float row_max(float x) {
  for (int o = 8; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}

template <class T, int D, int TILE>
__global__ __launch_bounds__(256) void forward_kernel(OwnAttention a) {
  using S = Plain<D, TILE>;
  extern __shared__ __align__(16) float tiles[];
  float *q_tile = tiles, *kv_tile = q_tile + S::HEAD, *p = kv_tile + S::HEAD;
  int h = static_cast<int>(blockIdx.x) % a.n_heads, dim = a.head_dim;
  OwnTile t = own_tile(a, TILE, static_cast<int>(blockIdx.x) / a.n_heads, true);
  int rows = min(TILE, t.len - t.first), kv_head = h / (a.n_heads / a.n_kv_heads);
  const T *base = static_cast<const T *>(a.qkv) + t.start * a.q_stride;
  const T *k_head = base + (a.n_heads + kv_head) * dim, *v_head = k_head + a.n_kv_heads * dim;
  plain_copy<T, D, TILE>(q_tile, base + t.first * a.q_stride + h * dim, a.q_stride, rows, dim);
  float max[S::R], sum[S::R], score[S::R][S::R];
  float4 out[S::R][S::C];
  plain_clear<D, TILE>(out);
  for (int i = 0; i < S::R; i++) {
    max[i] = -INFINITY;
    sum[i] = 0;
  }
  for (int key = own_first_key(t.first, a.window) / TILE * TILE; key < t.first + rows;
       key += TILE) {
    int keys = min(TILE, t.len - key);
    __syncthreads();
    plain_copy<T, D, TILE>(kv_tile, k_head + key * a.q_stride, a.q_stride, keys, dim);
    __syncthreads();
    plain_dot<D, TILE>(score, q_tile, kv_tile);
#pragma unroll
    for (int i = 0; i < S::R; i++) {
      int q = t.first + thread_y() + 16 * i;
      float most = max[i], part = 0;
#pragma unroll
      for (int j = 0; j < S::R; j++) {
        bool sees = own_sees(q, key + thread_x() + 16 * j, a.window);
        score[i][j] = sees ? a.scale * score[i][j] : -INFINITY;
        most = fmaxf(most, score[i][j]);
      }
      most = row_max(most);
      float low = most == -INFINITY ? 0 : most; /* nothing seen yet: weights are 0 */
      float keep = expf(max[i] - low);
      max[i] = most;
#pragma unroll
      for (int j = 0; j < S::R; j++) part += score[i][j] = expf(score[i][j] - low);
      sum[i] = sum[i] * keep + row_sum(part);
#pragma unroll
      for (int c = 0; c < S::C; c++)
        out[i][c] = make_float4(out[i][c].x * keep, out[i][c].y * keep, out[i][c].z * keep,
                                out[i][c].w * keep);
    }
    plain_put<D, TILE>(p, score);
    __syncthreads();
    plain_copy<T, D, TILE>(kv_tile, v_head + key * a.q_stride, a.q_stride, keys, dim);
    __syncthreads();
    plain_add<D, TILE>(out, p, kv_tile);
  }
  for (int i = 0; i < S::R; i++) {
    int row = thread_y() + 16 * i;
    if (a.lse_w && thread_x() == 0 && row < rows)
      a.lse_w[(t.start + t.first + row) * a.n_heads + h] = max[i] + logf(sum[i]);
    sum[i] = 1 / sum[i];
  }
  T *to = static_cast<T *>(a.out_w) + ((t.start + t.first) * a.n_heads + h) * dim;
  plain_store<T, D, TILE>(out, sum, to, static_cast<int64_t>(a.n_heads) * dim, rows, dim);
}

template <class T, int D>
void launch_fwd(cudaStream_t stream, const OwnAttention &a, Segments seg) {
  constexpr int TILE = D > 128 ? 32 : 64;
  constexpr size_t SHARED = Plain<D, TILE>::shared(2);
  own_allow_shared(forward_kernel<T, D, TILE>, SHARED);
  forward_kernel<T, D, TILE><<<own_blocks(seg, TILE, a.n_heads), 256, SHARED, stream>>>(a);
  CUDA_LAUNCHED();
}

}  // namespace

void own_plain_fwd(cudaStream_t stream, DType type, const OwnAttention &a, Segments seg) {
  cuda_by_type(type, [&](auto zero) {
    using T = decltype(zero);
    if (a.head_dim <= 64)
      launch_fwd<T, 64>(stream, a, seg);
    else if (a.head_dim <= 128)
      launch_fwd<T, 128>(stream, a, seg);
    else
      launch_fwd<T, 256>(stream, a, seg);
  });
}
