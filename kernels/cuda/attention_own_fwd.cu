/* Attention forward on tensor cores: tiles of queries stay, tiles of keys and values pass by, with
 * a running softmax (Dao 2023, FlashAttention-2). A block is one head and one tile of queries; a
 * warp has MT times 16 of them to itself. The next keys and values are on their way while the
 * present ones are used. Tiles with the most keys start first. */
#include "kernels/cuda/attention_own_tile.h"

namespace {

template <int D>
struct Shape {
  static constexpr int WARPS = 4, THREADS = 32 * WARPS;
  static constexpr int MT = D <= 128 ? 2 : 1; /* 16-row tiles of a warp */
  static constexpr int ROWS = 16 * MT * WARPS, KEYS = D <= 128 ? 64 : 32;
  static constexpr int Q = ROWS * TileStride<D>::value, KV = KEYS * TileStride<D>::value;
  static constexpr size_t SHARED = sizeof(bf16) * (Q + 4 * KV);
};

/* q: of the lane's first row; key: of its first column. */
template <int N>
__device__ inline void mask_scores(float (&score)[N][4], int q, int key, int window) {
#pragma unroll
  for (int j = 0; j < N; j++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!own_sees(q + i / 2 * 8, key + 8 * j + i % 2, window)) score[j][i] = -INFINITY;
}

template <int D>
__global__ __launch_bounds__(Shape<D>::THREADS, 2) void forward_kernel(OwnAttention a) {
  using S = Shape<D>;
  constexpr int STRIDE = TileStride<D>::value;
  extern __shared__ __align__(16) unsigned char shared[];
  bf16 *q_tile = reinterpret_cast<bf16 *>(shared), *kv = q_tile + S::Q;
  int h = static_cast<int>(blockIdx.x) % a.n_heads, dim = a.head_dim;
  OwnTile t = own_tile(a, S::ROWS, static_cast<int>(blockIdx.x) / a.n_heads, true);
  int rows = min(S::ROWS, t.len - t.first), kv_head = h / (a.n_heads / a.n_kv_heads);
  const bf16 *base = static_cast<const bf16 *>(a.qkv) + t.start * a.q_stride;
  const bf16 *k_head = base + (a.n_heads + kv_head) * dim, *v_head = k_head + a.n_kv_heads * dim;
  int first = own_first_key(t.first, a.window) / S::KEYS * S::KEYS, end = t.first + rows;
  auto copy_keys = [&](int key, int stage) {
    int n = min(S::KEYS, t.len - key);
    bf16 *to = kv + 2 * stage * S::KV;
    tile_copy<D, S::KEYS, S::THREADS>(to, k_head + key * a.q_stride, a.q_stride, n, dim);
    tile_copy<D, S::KEYS, S::THREADS>(to + S::KV, v_head + key * a.q_stride, a.q_stride, n, dim);
    copy_async_commit();
  };
  tile_copy<D, S::ROWS, S::THREADS>(q_tile, base + t.first * a.q_stride + h * dim, a.q_stride, rows,
                                    dim);
  copy_keys(first, 0);

  int lane = static_cast<int>(threadIdx.x % 32),
      row0 = static_cast<int>(threadIdx.x / 32) * 16 * S::MT;
  float scale2 = a.scale * 1.44269504f, out[S::MT][D / 8][4];
  Softmax soft[S::MT];
#pragma unroll
  for (int m = 0; m < S::MT; m++) {
    tile_clear(out[m]);
    soft[m] = {{-INFINITY, -INFINITY}, {0, 0}};
  }
  for (int key = first, stage = 0; key < end; key += S::KEYS, stage ^= 1) {
    copy_async_wait<0>();
    __syncthreads();
    if (key + S::KEYS < end) copy_keys(key + S::KEYS, stage ^ 1);
    int q = t.first + row0;
    if (key > q + 16 * S::MT - 1) continue; /* all of them lie behind this warp's queries */
    const bf16 *k_tile = kv + 2 * stage * S::KV, *v_tile = k_tile + S::KV;
    float score[S::MT][S::KEYS / 8][4];
#pragma unroll
    for (int m = 0; m < S::MT; m++) tile_clear(score[m]);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
      uint32_t x[S::MT][4], y[4];
#pragma unroll
      for (int m = 0; m < S::MT; m++) load_a(x[m], q_tile + (row0 + 16 * m) * STRIDE + k, STRIDE);
#pragma unroll
      for (int j = 0; j < S::KEYS; j += 16) {
        load_b_of_rows(y, k_tile + j * STRIDE + k, STRIDE);
#pragma unroll
        for (int m = 0; m < S::MT; m++) {
          mma_bf16(score[m][j / 8], x[m], y[0], y[1]);
          mma_bf16(score[m][j / 8 + 1], x[m], y[2], y[3]);
        }
      }
    }
    bool whole = own_sees_all(q, 16 * S::MT, key, S::KEYS, a.window);
#pragma unroll
    for (int m = 0; m < S::MT; m++) {
      if (!whole) mask_scores(score[m], q + 16 * m + lane / 4, key + lane % 4 * 2, a.window);
      float keep[2];
      softmax_step(score[m], soft[m], scale2, keep);
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[m][j][i] *= keep[i / 2];
    }
#pragma unroll
    for (int k = 0; k < S::KEYS; k += 16) {
      uint32_t x[S::MT][4], y[4];
#pragma unroll
      for (int m = 0; m < S::MT; m++) a_of_c(x[m], score[m][k / 8], score[m][k / 8 + 1]);
#pragma unroll
      for (int j = 0; j < D; j += 16) {
        load_b_of_columns(y, v_tile + k * STRIDE + j, STRIDE);
#pragma unroll
        for (int m = 0; m < S::MT; m++) {
          mma_bf16(out[m][j / 8], x[m], y[0], y[1]);
          mma_bf16(out[m][j / 8 + 1], x[m], y[2], y[3]);
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < S::MT; m++) {
    int row = row0 + 16 * m;
    int64_t token = t.start + t.first + row;
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = quad_sum(soft[m].sum[i]);
      inverse[i] = 1 / sum;
      int r = lane / 4 + 8 * i;
      if (a.lse_w && lane % 4 == 0 && row + r < rows)
        a.lse_w[(token + r) * a.n_heads + h] = soft[m].max[i] * a.scale + logf(sum);
    }
    bf16 *to = static_cast<bf16 *>(a.out_w) + (token * a.n_heads + h) * dim;
    tile_store<D, D>(out[m], inverse, q_tile + row * STRIDE, 0, to,
                     static_cast<int64_t>(a.n_heads) * dim, rows - row, dim);
  }
}

}  // namespace

void own_mma_fwd(cudaStream_t stream, const OwnAttention &a, Segments seg) {
  own_by_head(a.head_dim, [&](auto size) {
    constexpr int D = decltype(size)::value;
    using S = Shape<D>;
    own_allow_shared(forward_kernel<D>, S::SHARED);
    forward_kernel<D><<<own_blocks(seg, S::ROWS, a.n_heads), S::THREADS, S::SHARED, stream>>>(a);
    CUDA_LAUNCHED();
  });
}
