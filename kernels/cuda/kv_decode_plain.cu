/* Decoding without tensor cores (F32, and BF16 of any head size or alignment), and the second pass
 * of both: the sum of a sequence's splits. */
#include <algorithm>

#include "kernels/cuda/kv_cache.h"
#include "kernels/cuda/mma.h"

namespace {

constexpr int TILE = 32, EACH = KV_HEADS / KV_WARPS; /* tokens of a tile; heads of a warp */

/* The page of token t of a sequence. */
__device__ inline int32_t page_at(const Decode &a, const int32_t *table, int t) {
  int page = t / a.page_size;
  return page < a.table_width ? table[page] : 0;
}

/* The block's range, and row numbers, in units of D, of its tokens: rows[t - first]. False where
 * the sequence has no such split. The first split's pages are looked up while its length is on the
 * way: a sequence has that one, and with nothing else to do a block is as slow as its chain of
 * loads. All threads call it. */
__device__ inline bool split_rows(const Decode &a, int b, int kv_head, int split, SplitRange *range,
                                  uint32_t *rows) {
  constexpr int EACH = KV_SPLIT / KV_THREADS;
  const int32_t *table = a.table + static_cast<int64_t>(b) * a.table_width;
  int len = a.len[b], thread = static_cast<int>(threadIdx.x);
  bool early = split == 0 && a.window == 0;
  int32_t id[EACH];
  if (early)
#pragma unroll
    for (int i = 0; i < EACH; i++) id[i] = page_at(a, table, i * KV_THREADS + thread);
  SplitRange r = *range = split_range(a, len, split);
  if (split >= r.splits) return false;
  if (!early)
#pragma unroll
    for (int i = 0; i < EACH; i++) id[i] = page_at(a, table, r.first + i * KV_THREADS + thread);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = i * KV_THREADS + thread, t = r.first + at;
    if (t >= r.end) break;
    if (id[i] < 0 || id[i] >= a.n_pages) __trap();
    uint32_t block = static_cast<uint32_t>(id[i]) * static_cast<uint32_t>(a.n_kv_heads) +
                     static_cast<uint32_t>(kv_head);
    rows[at] = block * static_cast<uint32_t>(a.page_size) + static_cast<uint32_t>(t % a.page_size);
  }
  return true;
}

/* Of shared memory, for heads of D padded to a multiple of 4: row numbers; scaled queries
 * [KV_HEADS][dim]; weights [KV_HEADS][TILE]; two stages of keys and values [TILE][dim + 4]. */
__host__ __device__ inline int padded(int D) { return (D + 3) / 4 * 4; }
size_t plain_shared(int D) {
  int dim = padded(D), floats = KV_HEADS * (dim + TILE) + 4 * TILE * (dim + 4);
  return sizeof(uint32_t) * KV_SPLIT + sizeof(float) * static_cast<size_t>(floats);
}

__device__ inline void copy_number(float *to, const float *from, bool exists) {
  copy_async_4(to, from, exists);
}
__device__ inline void copy_number(float *to, const __nv_bfloat16 *from, bool exists) {
  *to = exists ? to_float(*from) : 0;
}

/* `tokens` tokens to a stage, keys first; what is beyond them and beyond D becomes zero. */
template <class T>
__device__ inline void copy_stage(float *stage, const Decode &a, const uint32_t *rows, int tokens,
                                  bool packs) {
  int D = a.head_dim, dim = padded(D), step = packs ? 4 : 1, each = dim / step;
  const T *k = static_cast<const T *>(a.k_pages), *v = static_cast<const T *>(a.v_pages);
  float *values = stage + TILE * (dim + 4);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < TILE * each; i += KV_THREADS) {
    int row = i / each, column = i % each * step, to = row * (dim + 4) + column;
    bool exists = row < tokens && column < D;
    int64_t at = exists ? static_cast<int64_t>(rows[row]) * D + column : 0;
    if (packs) {
      copy_async_16(stage + to, k + at, exists);
      copy_async_16(values + to, v + at, exists);
    } else {
      copy_number(stage + to, k + at, exists);
      copy_number(values + to, v + at, exists);
    }
  }
  copy_async_commit();
}

/* A warp's heads: `n` of them, KV_WARPS apart. CHUNKS times 32 columns, a lane has one of each. */
template <int CHUNKS>
struct Heads {
  int n;
  float max[EACH], sum[EACH], out[EACH][CHUNKS];
};

/* The running softmaxes of a warp's heads, and their sums, take in a tile: a lane is a token for
 * the scores, a column for the sums. */
template <int CHUNKS>
__device__ inline void attend_tile(Heads<CHUNKS> &x, const float *q, float *weight,
                                   const float *keys, int dim, int tokens) {
  int lane = static_cast<int>(threadIdx.x % 32);
  const float *values = keys + TILE * (dim + 4);
  float score[EACH] = {};
  for (int c = 0; c < dim; c += 4) {
    float4 k = *reinterpret_cast<const float4 *>(keys + lane * (dim + 4) + c);
#pragma unroll
    for (int h = 0; h < EACH; h++) {
      if (h >= x.n) continue;
      float4 y = *reinterpret_cast<const float4 *>(q + h * KV_WARPS * dim + c);
      score[h] += y.x * k.x + y.y * k.y + (y.z * k.z + y.w * k.w);
    }
  }
#pragma unroll
  for (int h = 0; h < EACH; h++) {
    if (h >= x.n) continue;
    float s = lane < tokens ? score[h] : -INFINITY, most = fmaxf(x.max[h], warp_max(s));
    float low = most == -INFINITY ? 0 : most; /* NaN alone: weights are NaN */
    float w = exp2f(s - low), keep = exp2f(x.max[h] - low);
    x.max[h] = most;
    x.sum[h] = x.sum[h] * keep + warp_sum(w);
    weight[h * KV_WARPS * TILE + lane] = w;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) x.out[h][c] *= keep;
  }
  __syncwarp();
  for (int j = 0; j < TILE; j += 4) {
    float4 w[EACH];
#pragma unroll
    for (int h = 0; h < EACH; h++)
      if (h < x.n) w[h] = *reinterpret_cast<const float4 *>(weight + h * KV_WARPS * TILE + j);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      int column = 32 * c + lane;
      if (column >= dim) continue;
      const float *v = values + j * (dim + 4) + column;
      float v0 = v[0], v1 = v[dim + 4], v2 = v[2 * (dim + 4)], v3 = v[3 * (dim + 4)];
#pragma unroll
      for (int h = 0; h < EACH; h++)
        if (h < x.n) x.out[h][c] += w[h].x * v0 + w[h].y * v1 + (w[h].z * v2 + w[h].w * v3);
    }
  }
}

/* Warp w has heads w, w + KV_WARPS, ... of the block's, over all tokens of the split. */
template <class T, int CHUNKS>
__global__ __launch_bounds__(KV_THREADS) void plain_kernel(Decode a) {
  extern __shared__ __align__(16) unsigned char shared[];
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int D = a.head_dim, dim = padded(D), stage = 2 * TILE * (dim + 4);
  uint32_t *rows = reinterpret_cast<uint32_t *>(shared);
  float *q = reinterpret_cast<float *>(rows + KV_SPLIT), *weights = q + KV_HEADS * dim;
  float *stages = weights + KV_HEADS * TILE;
  DecodeBlock block = decode_block(a);
  wait_for_kernel_before();
  next_kernel_may_start();
  SplitRange range;
  if (!split_rows(a, block.b, block.kv_head, block.split, &range, rows)) return;
  const T *q_head = static_cast<const T *>(a.qkv) + block.b * a.q_stride + block.first * D;
  for (int i = static_cast<int>(threadIdx.x); i < block.n * dim; i += KV_THREADS) {
    int row = i / dim, column = i % dim;
    q[i] = column < D ? a.scale * 1.44269504f * to_float(q_head[row * D + column]) : 0;
  }
  Heads<CHUNKS> x = {};
  x.n = (block.n - warp + KV_WARPS - 1) / KV_WARPS;
#pragma unroll
  for (int h = 0; h < EACH; h++) x.max[h] = -INFINITY;
  __syncthreads();

  int tokens = range.end - range.first;
  bool packs =
      sizeof(T) == sizeof(float) && D % 4 == 0 &&
      (reinterpret_cast<uintptr_t>(a.k_pages) | reinterpret_cast<uintptr_t>(a.v_pages)) % 16 == 0;
  copy_stage<T>(stages, a, rows, tokens, packs);
  for (int first = 0, i = 0; first < tokens; first += TILE, i ^= 1) {
    copy_async_wait<0>();
    __syncthreads();
    if (first + TILE < tokens)
      copy_stage<T>(stages + (i ^ 1) * stage, a, rows + first + TILE, tokens - first - TILE, packs);
    attend_tile<CHUNKS>(x, q + warp * dim, weights + warp * TILE, stages + i * stage, dim,
                        tokens - first);
  }
#pragma unroll
  for (int h = 0; h < EACH; h++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      if (h < x.n && 32 * c + lane < D)
        finish_number<T>(a, block, range, warp + h * KV_WARPS, 32 * c + lane, x.max[h], x.sum[h],
                         x.out[h][c]);
}

/* A block is one query head of one sequence: its splits are added in order. A thread asks for its
 * first numbers before it knows the maximum, without which they are no sums yet. */
template <class T>
__global__ void combine_kernel(Decode a) {
  constexpr int EARLY = 4;
  int b = static_cast<int>(blockIdx.x) / a.n_heads;
  next_kernel_may_start();
  wait_for_kernel_before();
  int splits = split_range(a, a.len[b], 0).splits;
  if (splits == 1) return;
  int64_t head = blockIdx.x, part = head * a.splits;
  const float *stat = a.part_stat + 2 * part;
  for (int c = static_cast<int>(threadIdx.x); c < a.head_dim; c += static_cast<int>(blockDim.x)) {
    const float *parts = a.part_out + part * a.head_dim + c;
    float early[EARLY] = {}, max = -INFINITY, sum = 0, out = 0;
#pragma unroll
    for (int i = 0; i < EARLY; i++)
      if (i < splits) early[i] = parts[i * a.head_dim];
#pragma unroll EARLY
    for (int i = 0; i < splits; i++) max = fmaxf(max, stat[2 * i]);
    float base = max == -INFINITY ? 0 : max;
    auto add = [&](int i, float x) {
      float keep = exp2f(stat[2 * i] - base);
      sum += keep * stat[2 * i + 1];
      out += keep * x;
    };
#pragma unroll
    for (int i = 0; i < EARLY; i++)
      if (i < splits) add(i, early[i]);
    for (int i = EARLY; i < splits; i++) add(i, parts[static_cast<int64_t>(i) * a.head_dim]);
    static_cast<T *>(a.out)[head * a.head_dim + c] = from_float<T>(out / sum);
  }
}

}  // namespace

void decode_plain(cudaStream_t stream, DType type, const Decode &a, int64_t batch) {
  cuda_by_type(type, [&](auto zero) {
    using T = decltype(zero);
    auto kernel = a.head_dim <= 64    ? plain_kernel<T, 2>
                  : a.head_dim <= 128 ? plain_kernel<T, 4>
                                      : plain_kernel<T, 8>;
    chain_allow_shared(kernel, plain_shared(a.head_dim));
    chain_launch(stream, kernel, decode_grid(a, batch), KV_THREADS, plain_shared(a.head_dim), 1, a);
  });
}

void decode_combine(cudaStream_t stream, DType type, const Decode &a, int64_t batch) {
  cuda_by_type(type, [&](auto zero) {
    dim3 grid(static_cast<unsigned>(batch * a.n_heads));
    int threads = std::min(128, (a.head_dim + 31) / 32 * 32);
    chain_launch(stream, combine_kernel<decltype(zero)>, grid, threads, 0, 1, a);
  });
}
