/* A thread's part of a whole block whose size is a power of two: some eights, pairs of which may
 * lie side by side, so that they are read and written as one. Internal to quant_one.cu,
 * quant_sum.cu.
 *
 * S says how: EIGHTS of a thread, GROUP of them (1 or 2) at a time. */
#ifndef KERNELS_CUDA_QUANT_WHOLE_H
#define KERNELS_CUDA_QUANT_WHOLE_H

#include "kernels/cuda/quant_codes.h"

template <class S>
struct Whole {
  int64_t block;
  int size, lane;
  bool mine; /* else it is another's, looked at once more for nothing */
  __device__ int lanes() const { return size / (8 * S::EIGHTS); }

  /* Where eight k (the first of its group) lies, and how far its second half is behind. */
  template <WireKind KIND>
  __device__ int64_t offset(int k) const {
    constexpr int bytes = KIND == WIRE_F32 ? 4 : KIND == WIRE_BF16 ? 2 : 1;
    const int64_t start = block * (KIND == WIRE_INT4 ? size / 2 : size);
    return (start + 4 * (S::GROUP * lane + lanes() * k)) * bytes;
  }
  template <WireKind KIND>
  __device__ int apart() const {
    return KIND == WIRE_F32 ? 2 * size : KIND == WIRE_BF16 ? size : size / 2;
  }
};

/* This thread's. Threads behind the last block have that one again: a warp stays together. */
template <class S>
__device__ inline Whole<S> whole_of(const QuantJob &job, const QuantPart &p, int lane_bits) {
  const int64_t chunk = blockIdx.x - p.first_chunk;
  Whole<S> w;
  w.size = job.block;
  w.lane = static_cast<int>(threadIdx.x) & (w.lanes() - 1);
  w.block = chunk * (QUANT_THREADS >> lane_bits) + (threadIdx.x >> lane_bits);
  w.mine = w.block < p.blocks;
  if (!w.mine) w.block = p.blocks - 1;
  return w;
}

/* ---- a group ---- */

template <WireKind KIND, int GROUP>
__device__ inline void group_load(Raw<KIND> *r, const char *p, int apart) {
  if constexpr (GROUP == 1 || KIND == WIRE_F32) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) r[g] = raw_load<KIND>(p + 16 * g, apart);
  } else if constexpr (KIND == WIRE_BF16) {
    uint4 a = *reinterpret_cast<const uint4 *>(p), b = *reinterpret_cast<const uint4 *>(p + apart);
    r[0].w[0] = a.x, r[0].w[1] = a.y, r[0].w[2] = b.x, r[0].w[3] = b.y;
    r[1].w[0] = a.z, r[1].w[1] = a.w, r[1].w[2] = b.z, r[1].w[3] = b.w;
  } else {
    uint2 a = *reinterpret_cast<const uint2 *>(p);
    r[0].w[0] = a.x, r[1].w[0] = a.y;
    if constexpr (KIND != WIRE_INT4) {
      uint2 b = *reinterpret_cast<const uint2 *>(p + apart);
      r[0].w[1] = b.x, r[1].w[1] = b.y;
    }
  }
}

template <WireKind KIND, int GROUP>
__device__ inline void group_store(char *p, int apart, const Raw<KIND> *r) {
  if constexpr (GROUP == 1 || KIND == WIRE_F32) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) raw_store<KIND>(p + 16 * g, apart, r[g]);
  } else if constexpr (KIND == WIRE_BF16) {
    *reinterpret_cast<uint4 *>(p) = {r[0].w[0], r[0].w[1], r[1].w[0], r[1].w[1]};
    *reinterpret_cast<uint4 *>(p + apart) = {r[0].w[2], r[0].w[3], r[1].w[2], r[1].w[3]};
  } else {
    *reinterpret_cast<uint2 *>(p) = {r[0].w[0], r[1].w[0]};
    if constexpr (KIND != WIRE_INT4) *reinterpret_cast<uint2 *>(p + apart) = {r[0].w[1], r[1].w[1]};
  }
}

/* All of a thread's eights of a payload. */
template <WireKind KIND, class S>
__device__ inline void all_load(Raw<KIND> *r, const Whole<S> &w, const void *payload) {
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k += S::GROUP)
    group_load<KIND, S::GROUP>(r + k,
                               static_cast<const char *>(payload) + w.template offset<KIND>(k),
                               w.template apart<KIND>());
}
template <WireKind KIND, class S>
__device__ inline void all_store(const Raw<KIND> *r, const Whole<S> &w, void *payload) {
#pragma unroll
  for (int k = 0; k < S::EIGHTS; k += S::GROUP)
    group_store<KIND, S::GROUP>(static_cast<char *>(payload) + w.template offset<KIND>(k),
                                w.template apart<KIND>(), r + k);
}

#endif
