/* Tensor-core instructions for BF16 (m16n8k16, compute capability 8.0 and later), and copies from
 * global to shared memory that run beside compute. For the attention kernels.
 *
 * Fragments: a warp's lane l holds of C[16, 8] rows l/4 and l/4 + 8, columns 2 (l%4) and the next,
 * as c[0], c[1] and c[2], c[3]. A[16, 16] is four registers of two numbers, B[16, 8] two. Two C
 * tiles side by side, packed, are one A.
 *
 * Rows of tiles in shared memory are 16 bytes longer than their numbers, so that eight rows that
 * ldmatrix reads lie in different banks. */
#ifndef KERNELS_CUDA_MMA_H
#define KERNELS_CUDA_MMA_H

#include "kernels/cuda/cuda.h"

typedef __nv_bfloat16 bf16;

__device__ inline uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* 16 bytes, or zeros where the source does not exist: then nothing is read. */
__device__ inline void copy_async_16(void *to_shared, const void *from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)),
               "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_4(void *to_shared, const void *from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to_shared)),
               "l"(from), "r"(exists ? 4 : 0)
               : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Until at most N of the latest commits are under way. */
template <int N>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void ldmatrix(uint32_t (&r)[4], const bf16 *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void ldmatrix_trans(uint32_t (&r)[4], const bf16 *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

/* tile: 16 x 16 numbers whose rows lie `stride` apart. As A: its rows are C's rows. As B of its
 * transpose (C's columns are the tile's rows, sums run along them): b[0], b[1] for rows 0..7, b[2],
 * b[3] for rows 8..15. As B (sums run down its columns): b[0], b[1] for columns 0..7, b[2], b[3]
 * for columns 8..15. */
__device__ inline void load_a(uint32_t (&a)[4], const bf16 *tile, int stride) {
  int lane = static_cast<int>(threadIdx.x % 32);
  ldmatrix(a, tile + (lane % 16) * stride + lane / 16 * 8);
}
__device__ inline void load_b_of_rows(uint32_t (&b)[4], const bf16 *tile, int stride) {
  int lane = static_cast<int>(threadIdx.x % 32);
  ldmatrix(b, tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
}
__device__ inline void load_b_of_columns(uint32_t (&b)[4], const bf16 *tile, int stride) {
  int lane = static_cast<int>(threadIdx.x % 32);
  ldmatrix_trans(b, tile + (lane % 16) * stride + lane / 16 * 8);
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&x);
}
/* Two C tiles, columns 0..7 and 8..15, as A. */
__device__ inline void a_of_c(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

/* 2^x to about 2 ulp; results below 2^-126 are 0. */
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Sum and maximum over the four lanes that share a row of C. */
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* Running softmax of the two rows of C that a lane has numbers of. max is of the raw products. */
struct Softmax {
  float max[2], sum[2];
};

/* Products become weights, exp2(scale2 times them less the maximum); returns what the rows' earlier
 * sums are multiplied by. */
template <int N>
__device__ inline void softmax_step(float (&score)[N][4], Softmax &x, float scale2,
                                    float (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float max = x.max[i], sum = 0;
#pragma unroll
    for (int j = 0; j < N; j++) max = fmaxf(max, fmaxf(score[j][2 * i], score[j][2 * i + 1]));
    max = quad_max(max);
    float base = max == -INFINITY ? 0 : max * scale2; /* nothing seen yet: weights are 0 */
    keep[i] = exp2_fast(x.max[i] * scale2 - base);
    x.max[i] = max;
#pragma unroll
    for (int j = 0; j < N; j++) {
      score[j][2 * i] = exp2_fast(score[j][2 * i] * scale2 - base);
      score[j][2 * i + 1] = exp2_fast(score[j][2 * i + 1] * scale2 - base);
      sum += score[j][2 * i] + score[j][2 * i + 1];
    }
    x.sum[i] = x.sum[i] * keep[i] + sum;
  }
}

#endif
