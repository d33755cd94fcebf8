/* Decoding on tensor cores: one query per sequence against its pages. What a warp copies it alone
 * needs, several tiles ahead, so warps wait for nothing but their own copies. */
#include "kernels/cuda/kv_cache.h"
#include "kernels/cuda/mma.h"

namespace {

template <int D>
struct Shape {
  static constexpr int STRIDE = D + 8, TILE = 16; /* tokens of a tile */
  static constexpr int STAGES = D <= 64 ? 4 : D <= 128 ? 3 : 2;
  static constexpr int KV = TILE * STRIDE;
  static constexpr size_t SHARED =
      sizeof(uint32_t) * KV_SPLIT + sizeof(bf16) * KV_WARPS * STAGES * 2 * KV;
  static_assert(sizeof(bf16) * STAGES * 2 * KV >= sizeof(float) * KV_HEADS * (D + 2),
                "the warps' sums take the place of their tiles");
};

template <int D>
__global__ __launch_bounds__(KV_THREADS) void mma_kernel(Decode a) {
  using S = Shape<D>;
  extern __shared__ __align__(16) unsigned char shared[];
  uint32_t *rows = reinterpret_cast<uint32_t *>(shared);
  bf16 *tiles = reinterpret_cast<bf16 *>(rows + KV_SPLIT);
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  DecodeBlock block = decode_block(a);
  next_kernel_may_start();
  SplitRange range;
  if (!split_rows(a, block.b, block.kv_head, block.split, &range, rows)) return;

  uint32_t q[D / 16][4];
  const bf16 *q_head =
      static_cast<const bf16 *>(a.qkv) + block.b * a.q_stride + block.first * a.head_dim;
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = lane / 4 + i % 2 * 8, column = 16 * k + lane % 4 * 2 + i / 2 * 8;
      bool exists = row < block.n && column < a.head_dim;
      q[k][i] =
          exists ? *reinterpret_cast<const uint32_t *>(q_head + row * a.head_dim + column) : 0;
    }
  __syncthreads();

  int tokens = range.end - range.first;
  int mine = ((tokens + S::TILE - 1) / S::TILE - warp + KV_WARPS - 1) / KV_WARPS;
  bf16 *stages = tiles + warp * S::STAGES * 2 * S::KV;
  auto copy_tile = [&](int i) {
    bf16 *to = stages + i % S::STAGES * 2 * S::KV;
    int first = (i * KV_WARPS + warp) * S::TILE;
#pragma unroll
    for (int c0 = 0; c0 < S::TILE * D / 8; c0 += 32) {
      int c = c0 + lane, row = c / (D / 8), column = c % (D / 8) * 8;
      bool exists = first + row < tokens && column < a.head_dim;
      int64_t at = exists ? static_cast<int64_t>(rows[first + row]) * a.head_dim + column : 0;
      copy_async_16(to + row * S::STRIDE + column, static_cast<const bf16 *>(a.k_pages) + at,
                    exists);
      copy_async_16(to + S::KV + row * S::STRIDE + column,
                    static_cast<const bf16 *>(a.v_pages) + at, exists);
    }
  };
#pragma unroll
  for (int i = 0; i < S::STAGES - 1; i++) {
    if (i < mine) copy_tile(i);
    copy_async_commit();
  }
  float scale2 = a.scale * 1.44269504f, out[D / 8][4] = {};
  Softmax soft = {{-INFINITY, -INFINITY}, {0, 0}};
  for (int i = 0; i < mine; i++) {
    copy_async_wait<S::STAGES - 2>();
    __syncwarp();
    if (i + S::STAGES - 1 < mine) copy_tile(i + S::STAGES - 1);
    copy_async_commit();
    const bf16 *k_tile = stages + i % S::STAGES * 2 * S::KV, *v_tile = k_tile + S::KV;
    float score[2][4] = {}, keep[2];
    uint32_t x[4], y[4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      load_b_of_rows(y, k_tile + 16 * k, S::STRIDE);
      mma_bf16(score[0], q[k], y[0], y[1]);
      mma_bf16(score[1], q[k], y[2], y[3]);
    }
    int left = tokens - (i * KV_WARPS + warp) * S::TILE;
    if (left < S::TILE)
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j / 4 * 8 + lane % 4 * 2 + j % 2 >= left) score[j / 4][j % 4] = -INFINITY;
    softmax_step(score, soft, scale2, keep);
    a_of_c(x, score[0], score[1]);
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) out[j][e] *= keep[e / 2];
#pragma unroll
    for (int j = 0; j < D; j += 16) {
      load_b_of_columns(y, v_tile + j, S::STRIDE);
      mma_bf16(out[j / 8], x, y[0], y[1]);
      mma_bf16(out[j / 8 + 1], x, y[2], y[3]);
    }
  }

  copy_async_wait<0>();
  __syncthreads(); /* the tiles' place is free */
  float *sums = reinterpret_cast<float *>(tiles), *max = sums + KV_WARPS * KV_HEADS * a.head_dim;
  float *sum = max + KV_WARPS * KV_HEADS;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = warp * KV_HEADS + lane / 4 + 8 * i;
    float all = quad_sum(soft.sum[i]);
    if (lane % 4 == 0) max[row] = soft.max[i] * scale2;
    if (lane % 4 == 0) sum[row] = all;
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int column = 8 * j + lane % 4 * 2 + e;
        if (column < a.head_dim) sums[row * a.head_dim + column] = out[j][2 * i + e];
      }
  }
  __syncthreads();
  finish_block<bf16>(a, block, range, Parts{sums, max, sum});
}

template <int D>
void launch_mma(cudaStream_t stream, const Decode &a, int64_t batch) {
  kv_allow_shared(mma_kernel<D>, Shape<D>::SHARED);
  mma_kernel<D><<<decode_grid(a, batch), KV_THREADS, Shape<D>::SHARED, stream>>>(a);
  CUDA_LAUNCHED();
}

}  // namespace

void decode_mma(cudaStream_t stream, const Decode &a, int64_t batch) {
  if (a.head_dim <= 32)
    launch_mma<32>(stream, a, batch);
  else if (a.head_dim <= 64)
    launch_mma<64>(stream, a, batch);
  else if (a.head_dim <= 96)
    launch_mma<96>(stream, a, batch);
  else if (a.head_dim <= 128)
    launch_mma<128>(stream, a, batch);
  else
    launch_mma<256>(stream, a, batch);
}
