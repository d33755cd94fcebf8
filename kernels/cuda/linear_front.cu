/* linear_front.h. A row's sum of squares is taken by one block. */
#include "kernels/cuda/linear_front.h"

#include "kernels/cuda/aligned.h"
#include "kernels/cuda/chain.h"
#include "kernels/cuda/math.h"

namespace {

constexpr int NORM_THREADS = 256, GATE_THREADS = 128;
constexpr int NORM_MOST = 6; /* accesses of 8 numbers a thread */

typedef __nv_bfloat16 bf16;

__device__ inline Pack<bf16> unpack(const uint4 &raw) {
  return pack_load(reinterpret_cast<const bf16 *>(&raw));
}

/* In few registers, beside the product before: numbers stay as they lie in memory. */
template <int EACH>
__global__ __launch_bounds__(NORM_THREADS) void norm_kernel(const bf16 *x, const bf16 *weight,
                                                            int k, float eps, bf16 *y) {
  next_kernel_may_start();
  wait_for_kernel_before();
  int64_t row = blockIdx.x;
  uint4 v[EACH], w[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = 8 * (static_cast<int>(threadIdx.x) + i * NORM_THREADS);
    if (at >= k) continue;
    v[i] = *reinterpret_cast<const uint4 *>(x + row * k + at);
    w[i] = *reinterpret_cast<const uint4 *>(weight + at);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (8 * (static_cast<int>(threadIdx.x) + i * NORM_THREADS) >= k) continue;
    Pack<bf16> n = unpack(v[i]);
#pragma unroll
    for (int e = 0; e < 8; e++) squares += n.v[e] * n.v[e];
  }
  float rstd = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(k) + eps);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = 8 * (static_cast<int>(threadIdx.x) + i * NORM_THREADS);
    if (at >= k) continue;
    Pack<bf16> n = unpack(v[i]), by = unpack(w[i]);
#pragma unroll
    for (int e = 0; e < 8; e++) n.v[e] = n.v[e] * rstd * by.v[e];
    pack_store(y + row * k + at, n);
  }
}

/* A row's g and u are k numbers each. */
__global__ __launch_bounds__(GATE_THREADS) void gate_kernel(const bf16 *gu, int k, bf16 *y) {
  next_kernel_may_start();
  wait_for_kernel_before();
  int at = 8 * static_cast<int>(blockIdx.x * GATE_THREADS + threadIdx.x);
  if (at >= k) return;
  int64_t row = blockIdx.y;
  Pack<bf16> g = pack_load(gu + 2 * row * k + at), u = pack_load(gu + (2 * row + 1) * k + at);
#pragma unroll
  for (int e = 0; e < 8; e++) g.v[e] = g.v[e] * sigmoid_f32(g.v[e]) * u.v[e];
  pack_store(y + row * k + at, g);
}

}  // namespace

bool linear_front(Device *d, const Linear &l, Tensor x) {
  int64_t m = l.front_MK.dim[0], k = l.front_MK.dim[1];
  if (x.dtype != DT_BF16 || k % 8 != 0 || m > LINEAR_FRONT_ROWS) return false;
  if (!aligned(x.data) || !aligned(l.front_MK.data)) return false;
  bf16 *y = cuda_data<bf16>(l.front_MK);
  if (l.front == FRONT_RMSNORM) {
    if (k > 8 * NORM_THREADS * NORM_MOST || !aligned(l.norm_K.data)) return false;
    chain_launch(cuda_stream(d),
                 k <= 2 * 8 * NORM_THREADS ? norm_kernel<2> : norm_kernel<NORM_MOST>,
                 dim3(static_cast<unsigned>(m)), NORM_THREADS, 0, 1, cuda_data<const bf16>(x),
                 cuda_data<const bf16>(l.norm_K), static_cast<int>(k), l.eps, y);
  } else {
    dim3 grid(static_cast<unsigned>(cuda_ceil(k, 8 * GATE_THREADS)), static_cast<unsigned>(m));
    chain_launch(cuda_stream(d), gate_kernel, grid, GATE_THREADS, 0, 1, cuda_data<const bf16>(x),
                 static_cast<int>(k), y);
  }
  return true;
}
