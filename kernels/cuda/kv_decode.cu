/* Decoding: one query per sequence against its pages. A block is one sequence, one kv head with up
 * to HEADS of its query heads, and one split. Its warps take tiles of tokens in turn, each with a
 * running softmax of its own, and add up at the end: what a warp reads it alone needs, so warps
 * wait for nothing but their own copies. */
#include <algorithm>

#include "kernels/cuda/kv_cache.h"
#include "kernels/cuda/mma.h"

namespace {

enum { HEADS = 16, THREADS = 32 * KV_WARPS };

/* Query heads [first, first + n) of kv head kv_head, and the split, of this block. */
struct DecodeBlock {
  int b, kv_head, first, n, split;
};
__device__ inline DecodeBlock decode_block(const Decode &a) {
  int group = a.n_heads / a.n_kv_heads, chunks = (group + HEADS - 1) / HEADS;
  int x = static_cast<int>(blockIdx.x), at = x % chunks * HEADS, kv_head = x / chunks;
  return {static_cast<int>(blockIdx.y), kv_head, kv_head * group + at, min(HEADS, group - at),
          static_cast<int>(blockIdx.z)};
}
dim3 decode_grid(const Decode &a, int64_t batch) {
  int chunks = (a.n_heads / a.n_kv_heads + HEADS - 1) / HEADS;
  return dim3(static_cast<unsigned>(a.n_kv_heads * chunks), static_cast<unsigned>(batch),
              static_cast<unsigned>(a.splits));
}

/* Lets the kernel behind this one start as soon as blocks of this one end; that one then waits for
 * all of it before it reads. */
__device__ inline void next_kernel_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* What the warps of a block have: sums [KV_WARPS][HEADS][dim], not divided, and maxima and sums of
 * weights [KV_WARPS][HEADS]. The maxima are of exponents of 2. */
struct Parts {
  const float *out, *max, *sum;
};
/* Adds the warps' in order. */
template <class T>
__device__ inline void finish_block(const Decode &a, const DecodeBlock &k, SplitRange r,
                                    const Parts &p) {
  for (int i = static_cast<int>(threadIdx.x); i < k.n * a.head_dim; i += THREADS) {
    int row = i / a.head_dim, column = i % a.head_dim;
    float max = -INFINITY, sum = 0, out = 0;
    for (int w = 0; w < KV_WARPS; w++) max = fmaxf(max, p.max[w * HEADS + row]);
    float base = max == -INFINITY ? 0 : max;
    for (int w = 0; w < KV_WARPS; w++) {
      float keep = exp2f(p.max[w * HEADS + row] - base);
      sum += keep * p.sum[w * HEADS + row];
      out += keep * p.out[(w * HEADS + row) * a.head_dim + column];
    }
    int64_t head = static_cast<int64_t>(k.b) * a.n_heads + k.first + row;
    if (r.splits == 1) {
      static_cast<T *>(a.out)[head * a.head_dim + column] = from_float<T>(out / sum);
      continue;
    }
    int64_t part = head * a.splits + k.split;
    a.part_out[part * a.head_dim + column] = out;
    if (column == 0) a.part_stat[2 * part] = max;
    if (column == 0) a.part_stat[2 * part + 1] = sum;
  }
}

/* ---- tensor cores ---- */

template <int D>
struct Shape {
  static constexpr int STRIDE = D + 8, TILE = 16; /* tokens of a tile */
  static constexpr int STAGES = D <= 64 ? 4 : D <= 128 ? 3 : 2;
  static constexpr int KV = TILE * STRIDE;
  static constexpr size_t SHARED =
      sizeof(uint32_t) * KV_SPLIT + sizeof(bf16) * KV_WARPS * STAGES * 2 * KV;
  static_assert(sizeof(bf16) * STAGES * 2 * KV >= sizeof(float) * HEADS * (D + 2),
                "the warps' sums take the place of their tiles");
};

template <int D>
__global__ __launch_bounds__(THREADS) void mma_kernel(Decode a) {
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
  float *sums = reinterpret_cast<float *>(tiles), *max = sums + KV_WARPS * HEADS * a.head_dim;
  float *sum = max + KV_WARPS * HEADS;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = warp * HEADS + lane / 4 + 8 * i;
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

/* ---- plain ---- */

/* Floats of shared memory: scaled queries [HEADS][D]; of each warp keys [32][D + 1], sums
 * [HEADS][D], maximum and sum of weights [HEADS]. */
size_t plain_shared(int D) {
  size_t dim = static_cast<size_t>(D), warps = KV_WARPS * (32 * (dim + 1) + HEADS * (dim + 2));
  return sizeof(uint32_t) * KV_SPLIT + sizeof(float) * (HEADS * dim + warps);
}

/* A lane is a token of the tile for the scores, a column for the sums. */
template <class T>
__global__ __launch_bounds__(THREADS) void plain_kernel(Decode a) {
  extern __shared__ __align__(16) unsigned char shared[];
  uint32_t *rows = reinterpret_cast<uint32_t *>(shared);
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int D = a.head_dim;
  float *q = reinterpret_cast<float *>(rows + KV_SPLIT), *sums = q + HEADS * D;
  float *max = sums + KV_WARPS * HEADS * D, *sum = max + KV_WARPS * HEADS;
  float *keys = sum + KV_WARPS * HEADS + warp * 32 * (D + 1);
  DecodeBlock block = decode_block(a);
  next_kernel_may_start();
  SplitRange range;
  if (!split_rows(a, block.b, block.kv_head, block.split, &range, rows)) return;
  const T *q_head = static_cast<const T *>(a.qkv) + block.b * a.q_stride + block.first * D;
  for (int i = static_cast<int>(threadIdx.x); i < block.n * D; i += THREADS)
    q[i] = a.scale * 1.44269504f * to_float(q_head[i]);
  for (int i = lane; i < HEADS * D; i += 32) sums[warp * HEADS * D + i] = 0;
  if (lane < HEADS) max[warp * HEADS + lane] = -INFINITY;
  if (lane < HEADS) sum[warp * HEADS + lane] = 0;
  __syncthreads();

  int tokens = range.end - range.first;
  for (int first = 32 * warp; first < tokens; first += 32 * KV_WARPS) {
    int n = min(32, tokens - first);
    for (int j = 0; j < n; j++) {
      const T *k = static_cast<const T *>(a.k_pages) + static_cast<int64_t>(rows[first + j]) * D;
      for (int c = lane; c < D; c += 32) keys[j * (D + 1) + c] = to_float(k[c]);
    }
    __syncwarp();
    for (int h = 0; h < block.n; h++) {
      int at = warp * HEADS + h;
      float score = 0;
      for (int c = 0; c < D; c++) score += q[h * D + c] * keys[lane * (D + 1) + c];
      score = lane < n ? score : -INFINITY;
      float before = max[at], most = fmaxf(before, warp_max(score));
      float low = most == -INFINITY ? 0 : most; /* NaN alone: weights are NaN */
      float weight = exp2f(score - low), keep = exp2f(before - low), all = warp_sum(weight);
      for (int c0 = 0; c0 < D; c0 += 32) {
        int c = c0 + lane;
        float add = 0;
        for (int j = 0; j < n; j++) {
          float w = __shfl_sync(0xffffffffu, weight, j);
          const T *v =
              static_cast<const T *>(a.v_pages) + static_cast<int64_t>(rows[first + j]) * D;
          if (c < D) add += w * to_float(v[c]);
        }
        if (c < D) sums[at * D + c] = sums[at * D + c] * keep + add;
      }
      __syncwarp();
      if (lane == 0) max[at] = most;
      if (lane == 0) sum[at] = sum[at] * keep + all;
    }
    __syncwarp();
  }
  __syncthreads();
  finish_block<T>(a, block, range, Parts{sums, max, sum});
}

/* ---- the second pass ---- */

/* A block is one query head of one sequence: its splits are added in order. */
template <class T>
__global__ void combine_kernel(Decode a) {
  int b = static_cast<int>(blockIdx.x) / a.n_heads;
  int splits = split_range(a, a.len[b], 0).splits;
  wait_for_kernel_before();
  if (splits == 1) return;
  int64_t head = blockIdx.x, part = head * a.splits;
  float max = -INFINITY;
  for (int i = 0; i < splits; i++) max = fmaxf(max, a.part_stat[2 * (part + i)]);
  float base = max == -INFINITY ? 0 : max;
  for (int c = static_cast<int>(threadIdx.x); c < a.head_dim; c += static_cast<int>(blockDim.x)) {
    float sum = 0, out = 0;
    for (int i = 0; i < splits; i++) {
      float keep = exp2f(a.part_stat[2 * (part + i)] - base);
      sum += keep * a.part_stat[2 * (part + i) + 1];
      out += keep * a.part_out[(part + i) * a.head_dim + c];
    }
    static_cast<T *>(a.out)[head * a.head_dim + c] = from_float<T>(out / sum);
  }
}

template <class Kernel>
void allow_shared(Kernel kernel, size_t bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
}

template <int D>
void launch_mma(cudaStream_t stream, const Decode &a, int64_t batch) {
  allow_shared(mma_kernel<D>, Shape<D>::SHARED);
  mma_kernel<D><<<decode_grid(a, batch), THREADS, Shape<D>::SHARED, stream>>>(a);
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

void decode_plain(cudaStream_t stream, DType type, const Decode &a, int64_t batch) {
  cuda_by_type(type, [&](auto zero) {
    using T = decltype(zero);
    size_t shared = plain_shared(a.head_dim);
    allow_shared(plain_kernel<T>, shared);
    plain_kernel<T><<<decode_grid(a, batch), THREADS, shared, stream>>>(a);
    CUDA_LAUNCHED();
  });
}

void decode_combine(cudaStream_t stream, DType type, const Decode &a, int64_t batch) {
  cuda_by_type(type, [&](auto zero) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(batch * a.n_heads));
    config.blockDim = dim3(static_cast<unsigned>(std::min(128, (a.head_dim + 31) / 32 * 32)));
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, combine_kernel<decltype(zero)>, a));
  });
}
