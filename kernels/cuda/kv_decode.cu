/* Decoding on tensor cores: one query per sequence against its pages. A block's warps take tiles of
 * tokens in turn, each with a running softmax of its own, and add up at the end: what a warp copies
 * it alone needs, several tiles ahead, so warps wait for nothing but their own copies.
 *
 * A whole step (STEP) turns queries and the newest key on the way in, and has that token from the
 * row itself: what it reads of pages is older than the kernel in front of it, and asked for before
 * that one is done. */
#include "kernels/cuda/kv_cache.h"
#include "kernels/cuda/mma.h"

namespace {

template <int D>
struct Shape {
  static constexpr int STRIDE = D + 8, TILE = D <= 64 ? 32 : 16; /* tokens of a tile */
  static constexpr int KV = TILE * STRIDE;
  static constexpr int TURNED = (KV_HEADS + 2) * STRIDE; /* queries, the newest key and value */
  /* Tiles of a warp: so few that two blocks, or with wide heads one, share a multiprocessor; and
   * more of them where there are fewer blocks than multiprocessors. No sum depends on it. */
  static constexpr int STAGES = D <= 128 ? 3 : 2, MORE_STAGES = D <= 128 ? 5 : 3;
  static_assert(sizeof(bf16) * STAGES * 2 * KV >= sizeof(float) * KV_HEADS * (D + 2),
                "the warps' sums take the place of their tiles");
};

template <int D, int STAGES>
constexpr size_t tiles_bytes = sizeof(bf16) * KV_WARPS *STAGES * 2 * Shape<D>::KV;
template <int D, int STAGES, bool STEP>
constexpr size_t shared_bytes = sizeof(uint32_t) * KV_SPLIT + tiles_bytes<D, STAGES> +
                                (STEP ? sizeof(bf16) * Shape<D>::TURNED + sizeof(float) * D : 0);

/* The block's queries as A: rows beyond its heads and columns beyond theirs are zero. */
template <int D>
__device__ inline void load_queries(uint32_t (&q)[D / 16][4], const Decode &a,
                                    const DecodeBlock &block) {
  int lane = static_cast<int>(threadIdx.x % 32);
  const bf16 *head =
      static_cast<const bf16 *>(a.qkv) + block.b * a.q_stride + block.first * a.head_dim;
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = lane / 4 + i % 2 * 8, column = 16 * k + lane % 4 * 2 + i / 2 * 8;
      bool exists = row < block.n && column < a.head_dim;
      q[k][i] = exists ? *reinterpret_cast<const uint32_t *>(head + row * a.head_dim + column) : 0;
    }
}

/* `tokens` tokens to a tile, keys first; those beyond them become zero, and so does `but`. */
template <int D>
__device__ inline void copy_tile(bf16 *tile, const Decode &a, const uint32_t *rows, int tokens,
                                 int but) {
  using S = Shape<D>;
  int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int c0 = 0; c0 < S::TILE * D / 8; c0 += 32) {
    int c = c0 + lane, row = c / (D / 8), column = c % (D / 8) * 8;
    bool exists = row < tokens && row != but && column < a.head_dim;
    int64_t at = exists ? static_cast<int64_t>(rows[row]) * a.head_dim + column : 0;
    bf16 *to = tile + row * S::STRIDE + column;
    copy_async_16(to, static_cast<const bf16 *>(a.k_pages) + at, exists);
    copy_async_16(to + S::KV, static_cast<const bf16 *>(a.v_pages) + at, exists);
  }
}

/* ---- a whole step ---- */

/* The turn of the newest token's position to shared memory, [cos: half | sin: half]; its slot. */
__device__ inline int turn_of(const Decode &a, const Newest &n, int b, float *turn) {
  int64_t at = n.half > 0 ? n.position[b] : 0, slot = n.slot[b];
  if (at < 0 || (n.half > 0 && at >= n.places)) __trap(); /* a broken contract */
  if (slot < -1 || slot >= a.n_pages * a.page_size) __trap();
  for (int i = static_cast<int>(threadIdx.x); i < 2 * n.half; i += KV_THREADS)
    turn[i] = i < n.half ? n.cos[at * n.half + i] : n.sin[at * n.half + i - n.half];
  return static_cast<int>(slot);
}

/* The block's queries, turned, its newest key, turned, and value: rows of the tile `turned`. */
template <int D>
__device__ inline void turn_rows(bf16 *turned, const Decode &a, const DecodeBlock &block, int half,
                                 const float *turn) {
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
    if (row > KV_HEADS || c >= 2 * half) {
      *to = *reinterpret_cast<const uint4 *>(x);
      continue;
    }
    bool low = c < half;
    Pack<bf16> own = pack_load(x), other = pack_load(low ? x + half : x - half);
    const float *cos = turn + (low ? c : c - half), *sin = cos + half;
#pragma unroll
    for (int e = 0; e < 8; e++)
      own.v[e] =
          low ? own.v[e] * cos[e] - other.v[e] * sin[e] : own.v[e] * cos[e] + other.v[e] * sin[e];
    pack_store(reinterpret_cast<bf16 *>(to), own);
  }
}

/* The newest key and value to their slot. */
template <int D>
__device__ inline void write_newest(const bf16 *turned, const Decode &a, int kv_head, int slot) {
  int i = static_cast<int>(threadIdx.x), c = i % (D / 8) * 8, which = i / (D / 8);
  if (which > 1 || c >= a.head_dim) return;
  int64_t block = static_cast<int64_t>(slot / a.page_size) * a.n_kv_heads + kv_head;
  int64_t at = (block * a.page_size + slot % a.page_size) * a.head_dim + c;
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

/* What the warps of a block have: sums [KV_WARPS][KV_HEADS][dim], maxima and sums of weights
 * [KV_WARPS][KV_HEADS]. */
struct Parts {
  float *out, *max, *sum;
};

/* A warp's part to shared memory. */
template <int D>
__device__ inline void leave_sums(const Parts &p, const float (&out)[D / 8][4], const Softmax &soft,
                                  int dim, float scale2) {
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = warp * KV_HEADS + lane / 4 + 8 * i;
    float all = quad_sum(soft.sum[i]);
    if (lane % 4 == 0) p.max[row] = soft.max[i] * scale2;
    if (lane % 4 == 0) p.sum[row] = all;
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int column = 8 * j + lane % 4 * 2 + e;
        if (column < dim) p.out[row * dim + column] = out[j][2 * i + e];
      }
  }
}

/* Adds the warps' parts in order. */
__device__ inline void finish_block(const Decode &a, const DecodeBlock &k, SplitRange r,
                                    const Parts &p) {
  for (int i = static_cast<int>(threadIdx.x); i < k.n * a.head_dim; i += KV_THREADS) {
    int row = i / a.head_dim, column = i % a.head_dim;
    float max = -INFINITY, sum = 0, out = 0;
    for (int w = 0; w < KV_WARPS; w++) max = fmaxf(max, p.max[w * KV_HEADS + row]);
    float base = max == -INFINITY ? 0 : max;
    for (int w = 0; w < KV_WARPS; w++) {
      float keep = exp2f(p.max[w * KV_HEADS + row] - base);
      sum += keep * p.sum[w * KV_HEADS + row];
      out += keep * p.out[(w * KV_HEADS + row) * a.head_dim + column];
    }
    finish_number<bf16>(a, k, r, row, column, max, sum, out);
  }
}

template <int D, int STAGES, bool STEP>
__global__ __launch_bounds__(KV_THREADS) void mma_kernel(Decode a, Newest newest) {
  using S = Shape<D>;
  extern __shared__ __align__(16) unsigned char shared[];
  uint32_t *rows = reinterpret_cast<uint32_t *>(shared), q[D / 16][4];
  bf16 *tiles = reinterpret_cast<bf16 *>(rows + KV_SPLIT);
  bf16 *turned = tiles + tiles_bytes<D, STAGES> / sizeof(bf16);
  float *turn = reinterpret_cast<float *>(turned + S::TURNED);
  int warp = static_cast<int>(threadIdx.x / 32), slot = -1;
  DecodeBlock block = decode_block(a);
  if (!STEP) wait_for_kernel_before();
  next_kernel_may_start();
  SplitRange range;
  if (!split_rows(a, block.b, block.kv_head, block.split, &range, rows)) return;
  if (!STEP) load_queries<D>(q, a, block);
  __syncthreads();

  int tokens = range.end - range.first; /* tile i of the warp starts at first + i * step */
  int last = STEP && block.split == range.splits - 1 ? tokens - 1 : -1; /* where the newest is */
  constexpr int STEP_OF = S::TILE * KV_WARPS, STAGE = 2 * S::KV;
  bf16 *stages = tiles + warp * STAGES * STAGE, *next = stages;
  int first = warp * S::TILE, ahead = first;
  auto copy_next = [&]() {
    if (ahead < tokens) copy_tile<D>(next, a, rows + ahead, tokens - ahead, last - ahead);
    copy_async_commit();
    ahead += STEP_OF;
    next = next == stages + (STAGES - 1) * STAGE ? stages : next + STAGE;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) copy_next();
  if (STEP) {
    slot = turn_of(a, newest, block.b, turn);
    wait_for_kernel_before();
    __syncthreads();
    turn_rows<D>(turned, a, block, newest.half, turn);
    __syncthreads();
    bool writes = last >= 0 && slot >= 0 && block.first % (a.n_heads / a.n_kv_heads) == 0;
    if (writes) write_newest<D>(turned, a, block.kv_head, slot);
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_a(q[k], turned + 16 * k, S::STRIDE);
  }
  float scale2 = a.scale * 1.44269504f, out[D / 8][4] = {};
  Softmax soft = {{-INFINITY, -INFINITY}, {0, 0}};
  for (bf16 *tile = stages; first < tokens; first += STEP_OF) {
    copy_async_wait<STAGES - 2>();
    __syncwarp();
    copy_next(); /* to where the tile before this one was */
    if (STEP && last >= first && last < first + S::TILE)
      place_newest<D>(tile, turned, last - first);
    attend_tile<D>(out, soft, q, tile, tokens - first, scale2);
    tile = tile == stages + (STAGES - 1) * STAGE ? stages : tile + STAGE;
  }
  copy_async_wait<0>();
  __syncthreads(); /* the tiles' place is free */
  float *sums = reinterpret_cast<float *>(tiles), *max = sums + KV_WARPS * KV_HEADS * a.head_dim;
  Parts parts = {sums, max, max + KV_WARPS * KV_HEADS};
  leave_sums<D>(parts, out, soft, a.head_dim, scale2);
  __syncthreads();
  finish_block(a, block, range, parts);
}

template <int D, int STAGES, bool STEP>
void launch_stages(cudaStream_t stream, const Decode &a, const Newest &newest, int64_t batch) {
  auto kernel = mma_kernel<D, STAGES, STEP>;
  constexpr size_t shared = shared_bytes<D, STAGES, STEP>;
  chain_allow_shared(kernel, shared);
  chain_launch(stream, kernel, decode_grid(a, batch), KV_THREADS, shared, 1, a, newest);
}

template <int D>
void launch_mma(cudaStream_t stream, const Decode &a, const Newest *newest, int64_t batch) {
  constexpr int STAGES = Shape<D>::STAGES, MORE = Shape<D>::MORE_STAGES;
  dim3 grid = decode_grid(a, batch);
  bool few = static_cast<int64_t>(grid.x) * grid.y * grid.z <= a.sms;
  if (newest && few)
    launch_stages<D, MORE, true>(stream, a, *newest, batch);
  else if (newest)
    launch_stages<D, STAGES, true>(stream, a, *newest, batch);
  else
    launch_stages<D, STAGES, false>(stream, a, {}, batch);
}

}  // namespace

void decode_mma(cudaStream_t stream, const Decode &a, const Newest *newest, int64_t batch) {
  if (a.head_dim <= 32)
    launch_mma<32>(stream, a, newest, batch);
  else if (a.head_dim <= 64)
    launch_mma<64>(stream, a, newest, batch);
  else if (a.head_dim <= 96)
    launch_mma<96>(stream, a, newest, batch);
  else if (a.head_dim <= 128)
    launch_mma<128>(stream, a, newest, batch);
  else
    launch_mma<256>(stream, a, newest, batch);
}
