/* Decoding without tensor cores (F32, and BF16 of any head size or alignment), and the second pass
 * of both: the sum of a sequence's splits. */
#include <algorithm>

#include "kernels/cuda/kv_cache.h"

namespace {

/* Floats of shared memory: scaled queries [KV_HEADS][D]; of each warp keys [32][D + 1], sums
 * [KV_HEADS][D], maximum and sum of weights [KV_HEADS]. */
size_t plain_shared(int D) {
  size_t dim = static_cast<size_t>(D), warps = KV_WARPS * (32 * (dim + 1) + KV_HEADS * (dim + 2));
  return sizeof(uint32_t) * KV_SPLIT + sizeof(float) * (KV_HEADS * dim + warps);
}

/* A lane is a token of the tile for the scores, a column for the sums. */
template <class T>
__global__ __launch_bounds__(KV_THREADS) void plain_kernel(Decode a) {
  extern __shared__ __align__(16) unsigned char shared[];
  uint32_t *rows = reinterpret_cast<uint32_t *>(shared);
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int D = a.head_dim;
  float *q = reinterpret_cast<float *>(rows + KV_SPLIT), *sums = q + KV_HEADS * D;
  float *max = sums + KV_WARPS * KV_HEADS * D, *sum = max + KV_WARPS * KV_HEADS;
  float *keys = sum + KV_WARPS * KV_HEADS + warp * 32 * (D + 1);
  DecodeBlock block = decode_block(a);
  next_kernel_may_start();
  SplitRange range;
  if (!split_rows(a, block.b, block.kv_head, block.split, &range, rows)) return;
  const T *q_head = static_cast<const T *>(a.qkv) + block.b * a.q_stride + block.first * D;
  for (int i = static_cast<int>(threadIdx.x); i < block.n * D; i += KV_THREADS)
    q[i] = a.scale * 1.44269504f * to_float(q_head[i]);
  for (int i = lane; i < KV_HEADS * D; i += 32) sums[warp * KV_HEADS * D + i] = 0;
  if (lane < KV_HEADS) max[warp * KV_HEADS + lane] = -INFINITY;
  if (lane < KV_HEADS) sum[warp * KV_HEADS + lane] = 0;
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
      int at = warp * KV_HEADS + h;
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

__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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

}  // namespace

void decode_plain(cudaStream_t stream, DType type, const Decode &a, int64_t batch) {
  cuda_by_type(type, [&](auto zero) {
    using T = decltype(zero);
    size_t shared = plain_shared(a.head_dim);
    kv_allow_shared(plain_kernel<T>, shared);
    plain_kernel<T><<<decode_grid(a, batch), KV_THREADS, shared, stream>>>(a);
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
