/* Decoding on tensor cores, what a warp does with tiles of tokens: finds them in pages, copies
 * them, attends to them. For kv_decode.cu. */
#ifndef KERNELS_CUDA_KV_TILE_H
#define KERNELS_CUDA_KV_TILE_H

#include "kernels/cuda/divisor.h"
#include "kernels/cuda/kv_cache.h"
#include "kernels/cuda/mma.h"

constexpr int OF_WARP = KV_SPLIT / KV_WARPS, LOOKED_UP = OF_WARP / 32; /* tokens of a split */
constexpr unsigned ALL = 0xffffffffu;

/* Of a page, of a head. */
struct Divisors {
  Divisor page, dim;
};

template <int D>
struct Shape {
  static constexpr int STRIDE = D + 8, TILE = D <= 64 ? 32 : 16; /* tokens of a tile */
  static constexpr int KV = TILE * STRIDE;
  static constexpr int TURNED = (KV_HEADS + 2) * STRIDE; /* queries, the newest key and value */
  /* Tiles of a warp: so few that two blocks, or with wide heads one, share a multiprocessor; fewer
   * of narrow heads where blocks begin and end all the time, so that a third one computes
   * meanwhile; more where there are fewer blocks than multiprocessors. No sum depends on it. */
  static constexpr int STAGES = D <= 128 ? 3 : 2, MORE_STAGES = D <= 128 ? 5 : 3;
  static constexpr int LESS_STAGES = D <= 64 ? 2 : STAGES;
  static_assert(sizeof(bf16) * LESS_STAGES * 2 * KV >= sizeof(float) * KV_HEADS * (D + 2),
                "the warps' sums take the place of their tiles");
};

/* Where the tokens lie that a warp takes of a split, tile after tile, KV_WARPS tiles apart: lane l
 * has the row numbers, in units of head_dim, of its tokens l, 32 + l and so on. */
struct Rows {
  uint32_t of[LOOKED_UP];
};

/* Where there is no window, pages are looked up while the length is on the way: with nothing else
 * to do a block is as slow as its chain of loads. False where the sequence has no such split. */
template <int D>
__device__ inline bool look_up(Rows *rows, SplitRange *range, const Decode &a, const Divisors &by,
                               const DecodeBlock &block) {
  constexpr int TILE = Shape<D>::TILE;
  const int32_t *table = a.table + static_cast<int64_t>(block.b) * a.table_width;
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int len = a.len[block.b], first = block.split * KV_SPLIT, page[LOOKED_UP];
  if (a.window > 0) first = split_range(a, len, block.split).first;
  auto place = [&](int i) { /* in the split */
                            int k = 32 * i + lane;
                            return (k / TILE * KV_WARPS + warp) * TILE + k % TILE;
  };
#pragma unroll
  for (int i = 0; i < LOOKED_UP; i++) {
    int in_table = divide(first + place(i), by.page);
    page[i] = in_table < a.table_width ? table[in_table] : 0;
  }
  *range = split_range(a, len, block.split);
  if (block.split >= range->splits) return false;
#pragma unroll
  for (int i = 0; i < LOOKED_UP; i++) {
    int t = first + place(i), in_page = t - divide(t, by.page) * a.page_size;
    if (t < range->end && (page[i] < 0 || page[i] >= a.n_pages)) __trap();
    uint32_t of_head = static_cast<uint32_t>(page[i]) * static_cast<uint32_t>(a.n_kv_heads) +
                       static_cast<uint32_t>(block.kv_head);
    rows->of[i] = of_head * static_cast<uint32_t>(a.page_size) + static_cast<uint32_t>(in_page);
  }
  return true;
}

/* Tile i of the warp, keys first, of which `tokens` tokens exist; those beyond become zero, and so
 * does `but`. All places are known before the first is asked for. */
template <int D>
__device__ inline void copy_tile(bf16 *tile, const Decode &a, const Rows &rows, int i, int tokens,
                                 int but) {
  using S = Shape<D>;
  constexpr int TIMES = S::TILE * D / 8 / 32;
  static_assert(LOOKED_UP == 4, "a tile's row numbers are one of four");
  int lane = static_cast<int>(threadIdx.x % 32), at = i * S::TILE;
  uint32_t low = at & 32 ? rows.of[1] : rows.of[0], high = at & 32 ? rows.of[3] : rows.of[2];
  uint32_t mine = at & 64 ? high : low;
  int64_t from[TIMES];
  bool exists[TIMES];
#pragma unroll
  for (int c0 = 0; c0 < TIMES; c0++) {
    int c = 32 * c0 + lane, row = c / (D / 8), column = c % (D / 8) * 8;
    exists[c0] = row < tokens && row != but && column < a.head_dim;
    from[c0] = static_cast<int64_t>(__shfl_sync(ALL, mine, at + row)) * a.head_dim + column;
    if (!exists[c0]) from[c0] = 0;
  }
#pragma unroll
  for (int c0 = 0; c0 < TIMES; c0++) {
    int c = 32 * c0 + lane;
    bf16 *to = tile + c / (D / 8) * S::STRIDE + c % (D / 8) * 8;
    copy_async_16(to, static_cast<const bf16 *>(a.k_pages) + from[c0], exists[c0]);
    copy_async_16(to + S::KV, static_cast<const bf16 *>(a.v_pages) + from[c0], exists[c0]);
  }
}
/* The running softmax and the sums take in a tile. */
template <int D>
__device__ inline void attend_tile(float (&out)[D / 8][4], Softmax &soft,
                                   const uint32_t (&q)[D / 16][4], const bf16 *tile, int tokens,
                                   float scale2) {
  using S = Shape<D>;
  int lane = static_cast<int>(threadIdx.x % 32);
  float score[S::TILE / 8][4] = {}, keep[2];
  uint32_t x[4], y[4];
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int j = 0; j < S::TILE; j += 16) {
      load_b_of_rows(y, tile + j * S::STRIDE + 16 * k, S::STRIDE);
      mma_bf16(score[j / 8], q[k], y[0], y[1]);
      mma_bf16(score[j / 8 + 1], q[k], y[2], y[3]);
    }
  if (tokens < S::TILE)
#pragma unroll
    for (int j = 0; j < S::TILE / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (8 * j + lane % 4 * 2 + e % 2 >= tokens) score[j][e] = -INFINITY;
  softmax_step(score, soft, scale2, keep);
#pragma unroll
  for (int j = 0; j < D / 8; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) out[j][e] *= keep[e / 2];
#pragma unroll
  for (int k = 0; k < S::TILE; k += 16) {
    a_of_c(x, score[k / 8], score[k / 8 + 1]);
#pragma unroll
    for (int j = 0; j < D; j += 16) {
      load_b_of_columns(y, tile + S::KV + k * S::STRIDE + j, S::STRIDE);
      mma_bf16(out[j / 8], x, y[0], y[1]);
      mma_bf16(out[j / 8 + 1], x, y[2], y[3]);
    }
  }
}

#endif
