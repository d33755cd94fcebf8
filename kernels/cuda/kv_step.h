/* What a whole step of decoding does with the newest token of a row, for kv_decode.cu: its queries
 * and key are turned on the way in, its key and value go to their slot and to a warp's tile. */
#ifndef KERNELS_CUDA_KV_STEP_H
#define KERNELS_CUDA_KV_STEP_H

#include "kernels/cuda/kv_tile.h"

/* What a thread brings of the turn of the newest token's position, [cos: half | sin: half]. It is
 * asked for before the tiles are: behind them it would come last. */
template <int D>
struct Turn {
  static constexpr int EACH = (D + KV_THREADS - 1) / KV_THREADS;
  float part[EACH];
};
template <int D>
__device__ inline Turn<D> load_turn(const Newest &n, int64_t position) {
  Turn<D> turn = {};
  if (n.half > 0 && (position < 0 || position >= n.places)) __trap(); /* a broken contract */
#pragma unroll
  for (int k = 0; k < Turn<D>::EACH; k++) {
    int i = k * KV_THREADS + static_cast<int>(threadIdx.x);
    const float *from = i < n.half ? n.cos + i : n.sin + i - n.half;
    if (i < 2 * n.half) turn.part[k] = from[position * n.half];
  }
  return turn;
}
template <int D>
__device__ inline void leave_turn(float *to, const Turn<D> &turn, const Newest &n) {
#pragma unroll
  for (int k = 0; k < Turn<D>::EACH; k++) {
    int i = k * KV_THREADS + static_cast<int>(threadIdx.x);
    if (i < 2 * n.half) to[i] = turn.part[k];
  }
}

/* The block's queries, turned, its newest key, turned, and value: rows of the tile `turned`. */
template <int D>
__device__ inline void turn_rows(bf16 *turned, const Decode &a, const DecodeBlock &block,
                                 const Newest &n, const float *turn) {
  using S = Shape<D>;
  const bf16 *row_of_b = static_cast<const bf16 *>(a.qkv) + block.b * a.q_stride;
  constexpr int PACKS = D / 8;
#pragma unroll
  for (int i0 = 0; i0 < (KV_HEADS + 2) * PACKS; i0 += KV_THREADS) {
    int i = i0 + static_cast<int>(threadIdx.x), row = i / PACKS, c = i % PACKS * 8;
    if (row >= KV_HEADS + 2) break;
    bool query = row < KV_HEADS, exists = c < a.head_dim && (!query || row < block.n);
    int head =
        query ? block.first + row : a.n_heads + block.kv_head + (row > KV_HEADS ? a.n_kv_heads : 0);
    uint4 *to = reinterpret_cast<uint4 *>(turned + row * S::STRIDE + c);
    if (!exists) {
      *to = make_uint4(0, 0, 0, 0);
      continue;
    }
    const bf16 *x = row_of_b + head * a.head_dim + c;
    if (row > KV_HEADS || c >= 2 * n.half) {
      *to = *reinterpret_cast<const uint4 *>(x);
      continue;
    }
    bool low = c < n.half;
    Pack<bf16> own = pack_load(x), other = pack_load(low ? x + n.half : x - n.half);
    const float *cos = turn + (low ? c : c - n.half), *sin = cos + n.half;
#pragma unroll
    for (int e = 0; e < 8; e++)
      own.v[e] =
          low ? own.v[e] * cos[e] - other.v[e] * sin[e] : own.v[e] * cos[e] + other.v[e] * sin[e];
    pack_store(reinterpret_cast<bf16 *>(to), own);
  }
}

/* The newest key and value to their slot. */
template <int D>
__device__ inline void write_newest(const bf16 *turned, const Decode &a, const Divisors &by,
                                    int kv_head, int slot) {
  int i = static_cast<int>(threadIdx.x), c = i % (D / 8) * 8, which = i / (D / 8);
  if (which > 1 || c >= a.head_dim) return;
  int page = divide(slot, by.page), in_page = slot - page * a.page_size;
  int64_t of_head = static_cast<int64_t>(page) * a.n_kv_heads + kv_head;
  int64_t at = (of_head * a.page_size + in_page) * a.head_dim + c;
  bf16 *pages = static_cast<bf16 *>(const_cast<void *>(which == 0 ? a.k_pages : a.v_pages));
  *reinterpret_cast<uint4 *>(pages + at) =
      *reinterpret_cast<const uint4 *>(turned + (KV_HEADS + which) * Shape<D>::STRIDE + c);
}

/* The newest token into its row of a warp's tile. */
template <int D>
__device__ inline void place_newest(bf16 *tile, const bf16 *turned, int row) {
  using S = Shape<D>;
  for (int i = static_cast<int>(threadIdx.x % 32); i < 2 * (D / 8); i += 32) {
    int which = i / (D / 8), c = i % (D / 8) * 8;
    *reinterpret_cast<uint4 *>(tile + which * S::KV + row * S::STRIDE + c) =
        *reinterpret_cast<const uint4 *>(turned + (KV_HEADS + which) * S::STRIDE + c);
  }
  __syncwarp();
}

#endif
