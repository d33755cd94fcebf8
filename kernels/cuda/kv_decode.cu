/* Decoding on tensor cores: one query per sequence against its pages. A block's warps take tiles of
 * tokens in turn, each with a running softmax of its own, and add up at the end: what a warp copies
 * it alone needs, several tiles ahead, so warps wait for nothing but their own copies.
 *
 * A whole step (STEP) turns queries and the newest key on the way in, and has that token from the
 * row itself: what it reads of pages is older than the kernel in front of it, and asked for before
 * that one is done. */
#include "kernels/cuda/kv_step.h"

namespace {

template <int D, int STAGES>
constexpr size_t tiles_bytes = sizeof(bf16) * KV_WARPS *STAGES * 2 * Shape<D>::KV;
template <int D, int STAGES, bool STEP>
constexpr size_t shared_bytes = tiles_bytes<D, STAGES> +
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

/* What the warps of a block have: sums [KV_WARPS][KV_HEADS][dim], maxima and sums of weights
 * [KV_WARPS][KV_HEADS]. */
struct Parts {
  float *out, *max, *sum;
};

/* A warp's part to shared memory. */
template <int D>
__device__ inline void leave_sums(const Parts &p, const float (&out)[D / 8][4], const Softmax &soft,
                                  int heads, int dim, float scale2) {
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int head = lane / 4 + 8 * i, row = warp * KV_HEADS + head;
    float all = quad_sum(soft.sum[i]);
    if (head >= heads) continue;
    if (lane % 4 == 0) p.max[row] = soft.max[i] * scale2;
    if (lane % 4 == 0) p.sum[row] = all;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      int column = 8 * j + lane % 4 * 2;
      if (column < dim)
        *reinterpret_cast<float2 *>(p.out + row * dim + column) =
            make_float2(out[j][2 * i], out[j][2 * i + 1]);
    }
  }
}

/* Adds the warps' parts in order, four numbers a thread, and leaves them as finish_number does. */
__device__ inline void finish_block(const Decode &a, const Divisors &by, const DecodeBlock &k,
                                    SplitRange r, const Parts &p) {
  for (int i = 4 * static_cast<int>(threadIdx.x); i < k.n * a.head_dim; i += 4 * KV_THREADS) {
    int row = divide(i, by.dim), column = i - row * a.head_dim;
    float max = -INFINITY, sum = 0, out[4] = {};
#pragma unroll
    for (int w = 0; w < KV_WARPS; w++) max = fmaxf(max, p.max[w * KV_HEADS + row]);
    float base = max == -INFINITY ? 0 : max;
#pragma unroll
    for (int w = 0; w < KV_WARPS; w++) {
      float keep = exp2f(p.max[w * KV_HEADS + row] - base);
      const float4 x =
          *reinterpret_cast<const float4 *>(p.out + (w * KV_HEADS + row) * a.head_dim + column);
      sum += keep * p.sum[w * KV_HEADS + row];
      out[0] += keep * x.x, out[1] += keep * x.y, out[2] += keep * x.z, out[3] += keep * x.w;
    }
    int64_t head = static_cast<int64_t>(k.b) * a.n_heads + k.first + row;
    if (r.splits == 1) {
      for (float &x : out) x = sum == 0 ? 0 : x / sum; /* 0: no tokens */
      uint2 packed = {pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3])};
      *reinterpret_cast<uint2 *>(static_cast<bf16 *>(a.out) + head * a.head_dim + column) = packed;
      continue;
    }
    int64_t part = head * a.splits + k.split;
    *reinterpret_cast<float4 *>(a.part_out + part * a.head_dim + column) =
        make_float4(out[0], out[1], out[2], out[3]);
    if (column == 0) *reinterpret_cast<float2 *>(a.part_stat + 2 * part) = make_float2(max, sum);
  }
}

template <int D, int STAGES, bool STEP>
__global__ __launch_bounds__(KV_THREADS) void mma_kernel(Decode a, Divisors by, Newest newest) {
  using S = Shape<D>;
  constexpr int STEP_OF = S::TILE * KV_WARPS, STAGE = 2 * S::KV;
  extern __shared__ __align__(16) unsigned char shared[];
  bf16 *tiles = reinterpret_cast<bf16 *>(shared);
  bf16 *turned = tiles + tiles_bytes<D, STAGES> / sizeof(bf16);
  float *turn = reinterpret_cast<float *>(turned + S::TURNED);
  int warp = static_cast<int>(threadIdx.x / 32);
  uint32_t q[D / 16][4];
  DecodeBlock block = decode_block(a);
  if (!STEP) wait_for_kernel_before();
  next_kernel_may_start();
  int position = STEP && newest.half > 0 ? newest.position[block.b] : 0;
  int slot = STEP ? newest.slot[block.b] : -1;
  SplitRange range;
  Rows rows;
  if (!look_up<D>(&rows, &range, a, by, block)) return;
  if (slot < -1 || slot >= a.n_pages * a.page_size) __trap(); /* a broken contract */
  Turn<D> turned_by = {};
  if (STEP) turned_by = load_turn<D>(newest, position);

  int tokens = range.end - range.first; /* tile i of the warp starts at first + i * step */
  int last = STEP && block.split == range.splits - 1 ? tokens - 1 : -1; /* where the newest is */
  bf16 *stages = tiles + warp * STAGES * STAGE, *next = stages, *tile = stages;
  int first = warp * S::TILE, ahead = first;
  auto copy_next = [&]() {
    if (ahead < tokens) copy_tile<D>(next, a, rows, ahead / STEP_OF, tokens - ahead, last - ahead);
    copy_async_commit();
    ahead += STEP_OF;
    next = next == stages + (STAGES - 1) * STAGE ? stages : next + STAGE;
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) copy_next();
  if (STEP) {
    leave_turn<D>(turn, turned_by, newest);
    wait_for_kernel_before();
    __syncthreads();
    turn_rows<D>(turned, a, block, newest, turn);
    __syncthreads();
    bool writes = last >= 0 && slot >= 0 && block.leads;
    if (writes) write_newest<D>(turned, a, by, block.kv_head, slot);
#pragma unroll
    for (int k = 0; k < D / 16; k++) load_a(q[k], turned + 16 * k, S::STRIDE);
  } else {
    load_queries<D>(q, a, block);
  }
  float scale2 = a.scale * 1.44269504f, out[D / 8][4] = {};
  Softmax soft = {{-INFINITY, -INFINITY}, {0, 0}};
  for (; first < tokens; first += STEP_OF) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();
    if (STEP && last >= first && last < first + S::TILE)
      place_newest<D>(tile, turned, last - first);
    attend_tile<D>(out, soft, q, tile, tokens - first, scale2);
    __syncwarp();
    copy_next(); /* to where this tile was */
    tile = tile == stages + (STAGES - 1) * STAGE ? stages : tile + STAGE;
  }
  copy_async_wait<0>();
  __syncthreads(); /* the tiles' place is free */
  float *sums = reinterpret_cast<float *>(tiles), *max = sums + KV_WARPS * KV_HEADS * a.head_dim;
  Parts parts = {sums, max, max + KV_WARPS * KV_HEADS};
  leave_sums<D>(parts, out, soft, block.n, a.head_dim, scale2);
  __syncthreads();
  finish_block(a, by, block, range, parts);
}

template <int D, int STAGES, bool STEP>
void launch_stages(cudaStream_t stream, const Decode &a, const Newest &newest, int64_t batch) {
  auto kernel = mma_kernel<D, STAGES, STEP>;
  constexpr size_t shared = shared_bytes<D, STAGES, STEP>;
  Divisors by = {divisor_of(a.page_size), divisor_of(a.head_dim)};
  chain_allow_shared(kernel, shared);
  chain_launch(stream, kernel, decode_grid(a, batch), KV_THREADS, shared, 1, a, by, newest);
}

template <int D, bool STEP>
void launch_mma(cudaStream_t stream, const Decode &a, const Newest &newest, int64_t batch) {
  constexpr int STAGES = Shape<D>::STAGES, LESS = Shape<D>::LESS_STAGES;
  constexpr int MORE = STEP ? Shape<D>::MORE_STAGES : STAGES;
  dim3 grid = decode_grid(a, batch);
  int64_t blocks = static_cast<int64_t>(grid.x) * grid.y * grid.z;
  if (blocks <= a.sms)
    launch_stages<D, MORE, STEP>(stream, a, newest, batch);
  else if (blocks <= 2 * a.sms)
    launch_stages<D, STAGES, STEP>(stream, a, newest, batch);
  else
    launch_stages<D, LESS, STEP>(stream, a, newest, batch);
}

template <int D>
void launch(cudaStream_t stream, const Decode &a, const Newest *newest, int64_t batch) {
  if (newest)
    launch_mma<D, true>(stream, a, *newest, batch);
  else
    launch_mma<D, false>(stream, a, {}, batch);
}

}  // namespace

void decode_mma(cudaStream_t stream, const Decode &a, const Newest *newest, int64_t batch) {
  if (a.head_dim <= 32)
    launch<32>(stream, a, newest, batch);
  else if (a.head_dim <= 64)
    launch<64>(stream, a, newest, batch);
  else if (a.head_dim <= 96)
    launch<96>(stream, a, newest, batch);
  else if (a.head_dim <= 128)
    launch<128>(stream, a, newest, batch);
  else
    launch<256>(stream, a, newest, batch);
}