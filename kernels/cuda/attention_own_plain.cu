/* Attention without tensor cores: F32, and BF16 of any head size or alignment, computed in F32. The
 * same tiles and sums as the tensor-core kernels, in shared memory as floats.
 *
 * A block of 16 x 16 threads; a thread has of a [TILE, TILE] product rows y + 16 i and columns
 * x + 16 j, and of a [TILE, D] sum the same rows and columns 4 x + 64 c and the next three. Columns
 * of a head from its size up to D are zero. */
#include "kernels/cuda/attention_own.h"

namespace {

template <int D, int TILE>
struct Plain {
  static constexpr int THREADS = 256, R = TILE / 16, C = D / 64;
  static constexpr int STRIDE = D + 4, P_STRIDE = TILE + 4; /* rows in different banks */
  static constexpr int HEAD = TILE * STRIDE, P = TILE * P_STRIDE;
  /* Bytes of `heads` tiles of heads and one product. */
  static constexpr size_t shared(int heads) { return sizeof(float) * (heads * HEAD + P); }
};

__device__ inline int thread_x() { return static_cast<int>(threadIdx.x) % 16; }
__device__ inline int thread_y() { return static_cast<int>(threadIdx.x) / 16; }

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
__device__ inline void plain_copy(float *tile, const T *head, int64_t stride, int rows, int dim) {
  using S = Plain<D, TILE>;
  for (int i = static_cast<int>(threadIdx.x); i < TILE * D; i += S::THREADS) {
    int row = i / D, column = i % D;
    bool exists = row < rows && column < dim;
    tile[row * S::STRIDE + column] = exists ? to_float(head[row * stride + column]) : 0;
  }
}

/* c[TILE, TILE] = a[TILE, D] b[TILE, D]^T */
template <int D, int TILE>
__device__ inline void plain_dot(float (&c)[TILE / 16][TILE / 16], const float *a, const float *b) {
  using S = Plain<D, TILE>;
#pragma unroll
  for (int i = 0; i < S::R; i++)
#pragma unroll
    for (int j = 0; j < S::R; j++) c[i][j] = 0;
  a += thread_y() * S::STRIDE;
  b += thread_x() * S::STRIDE;
#pragma unroll 4
  for (int k = 0; k < D; k += 4) {
    float4 x[S::R], y[S::R];
#pragma unroll
    for (int i = 0; i < S::R; i++) {
      x[i] = *reinterpret_cast<const float4 *>(a + 16 * i * S::STRIDE + k);
      y[i] = *reinterpret_cast<const float4 *>(b + 16 * i * S::STRIDE + k);
    }
#pragma unroll
    for (int i = 0; i < S::R; i++)
#pragma unroll
      for (int j = 0; j < S::R; j++) {
        c[i][j] += x[i].x * y[j].x;
        c[i][j] += x[i].y * y[j].y;
        c[i][j] += x[i].z * y[j].z;
        c[i][j] += x[i].w * y[j].w;
      }
  }
}

/* A product to shared memory, for plain_add. */
template <int D, int TILE>
__device__ inline void plain_put(float *p, const float (&c)[TILE / 16][TILE / 16]) {
  using S = Plain<D, TILE>;
#pragma unroll
  for (int i = 0; i < S::R; i++)
#pragma unroll
    for (int j = 0; j < S::R; j++)
      p[(thread_y() + 16 * i) * S::P_STRIDE + thread_x() + 16 * j] = c[i][j];
}

/* sum[TILE, D] += p[TILE, TILE] b[TILE, D] */
template <int D, int TILE>
__device__ inline void plain_add(float4 (&sum)[TILE / 16][D / 64], const float *p, const float *b) {
  using S = Plain<D, TILE>;
  p += thread_y() * S::P_STRIDE;
  b += thread_x() * 4;
#pragma unroll 4
  for (int k = 0; k < TILE; k++) {
    float4 y[S::C];
#pragma unroll
    for (int c = 0; c < S::C; c++)
      y[c] = *reinterpret_cast<const float4 *>(b + k * S::STRIDE + 64 * c);
#pragma unroll
    for (int i = 0; i < S::R; i++) {
      float x = p[16 * i * S::P_STRIDE + k];
#pragma unroll
      for (int c = 0; c < S::C; c++) {
        sum[i][c].x += x * y[c].x;
        sum[i][c].y += x * y[c].y;
        sum[i][c].z += x * y[c].z;
        sum[i][c].w += x * y[c].w;
      }
    }
  }
}

template <int D, int TILE>
__device__ inline void plain_clear(float4 (&sum)[TILE / 16][D / 64]) {
#pragma unroll
  for (int i = 0; i < TILE / 16; i++)
#pragma unroll
    for (int c = 0; c < D / 64; c++) sum[i][c] = make_float4(0, 0, 0, 0);
}

/* scale[i] * sum to `rows` rows of one head. */
template <class T, int D, int TILE>
__device__ inline void plain_store(const float4 (&sum)[TILE / 16][D / 64],
                                   const float (&scale)[TILE / 16], T *head, int64_t stride,
                                   int rows, int dim) {
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) {
    int row = thread_y() + 16 * i;
    if (row >= rows) continue;
#pragma unroll
    for (int c = 0; c < D / 64; c++) {
      const float v[4] = {sum[i][c].x, sum[i][c].y, sum[i][c].z, sum[i][c].w};
      int column = 4 * thread_x() + 64 * c;
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (column + e < dim) head[row * stride + column + e] = from_float<T>(scale[i] * v[e]);
    }
  }
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
