/* Our own attention kernels: what attention.cu falls back on where cuDNN is absent or refuses a
 * shape. Contracts are those of the ops in kernels.h; head sizes up to OWN_MAX_HEAD. */
#ifndef KERNELS_CUDA_ATTENTION_OWN_H
#define KERNELS_CUDA_ATTENTION_OWN_H

#include "kernels/cuda/cuda.h"

enum { OWN_MAX_HEAD = 256 };

extern "C" { /* the test of these kernels is C */
void own_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                       Tensor lse_NH);
void own_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                       Segments seg, AttnShape s, Tensor dqkv_NQ);
}

/* ---- between the files of the own kernels ---- */

/* What every attention kernel is told. Row strides are q_stride = (H + 2K) D of qkv and dqkv, H D
 * of out and dout. */
struct OwnAttention {
  int n_seqs, n_heads, n_kv_heads, head_dim, window;
  float scale;
  int64_t q_stride;
  const int32_t *offsets; /* [n_seqs + 1], device */
  const void *qkv, *out, *dout;
  const float *lse, *delta; /* [N, H]; delta = row sums of dout * out, per head */
  void *out_w;              /* out of the forward */
  float *lse_w;             /* may be NULL */
  void *dqkv_w;
};

/* Launches for rows that allow 16-byte accesses and tensor cores (BF16, head size a multiple of 8),
 * and for all others. */
void own_mma_fwd(cudaStream_t stream, const OwnAttention &a, Segments seg);
void own_mma_bwd(cudaStream_t stream, const OwnAttention &a, Segments seg);
void own_plain_fwd(cudaStream_t stream, DType type, const OwnAttention &a, Segments seg);
void own_plain_bwd(cudaStream_t stream, DType type, const OwnAttention &a, Segments seg);

/* Blocks of a grid: one for each of `heads` and each tile of `rows` rows that the sequences are cut
 * into, each sequence from its start. Block i is head i % heads of tile i / heads. */
unsigned own_blocks(Segments seg, int rows, int heads);

/* More shared memory than a kernel gets unasked. */
template <class Kernel>
static inline void own_allow_shared(Kernel kernel, size_t bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
}

/* ---- device code ---- */

/* A tile of one sequence: rows [first, first + rows) of the `len` rows that start at `start`. */
struct OwnTile {
  int64_t start;
  int len, first;
};

/* Tile number `flat` of all, counted by sequence and in it from its end (from_end) or its start.
 * Every lane of a warp calls it and gets the same. */
__device__ inline OwnTile own_tile(const OwnAttention &a, int rows, int flat, bool from_end) {
  int lane = static_cast<int>(threadIdx.x % 32), before = 0;
  for (int b0 = 0; b0 < a.n_seqs; b0 += 32) {
    int b = b0 + lane, start = 0, len = 0;
    if (b < a.n_seqs) {
      start = a.offsets[b];
      len = a.offsets[b + 1] - start;
    }
    int tiles = (len + rows - 1) / rows, sum = tiles;
    for (int o = 1; o < 32; o *= 2) {
      int up = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += up;
    }
    unsigned ends = __ballot_sync(0xffffffffu, before + sum > flat);
    if (ends) {
      int at = __ffs(static_cast<int>(ends)) - 1, index = flat - (before + sum - tiles);
      if (from_end) index = tiles - 1 - index;
      index = __shfl_sync(0xffffffffu, index, at);
      start = __shfl_sync(0xffffffffu, start, at);
      len = __shfl_sync(0xffffffffu, len, at);
      return {start, len, index * rows};
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return {0, 0, 0};
}

/* Whether query q sees key k. */
__device__ inline bool own_sees(int q, int k, int window) {
  return k <= q && (window == 0 || k > q - window);
}
/* Whether queries [q, q + nq) all see keys [k, k + nk). */
__device__ inline bool own_sees_all(int q, int nq, int k, int nk, int window) {
  return k + nk - 1 <= q && (window == 0 || k > q + nq - 1 - window);
}
/* The first key that query q sees. */
__device__ inline int own_first_key(int q, int window) {
  return window > 0 && q + 1 > window ? q + 1 - window : 0;
}
/* One past the last query of a sequence that sees key k. */
__device__ inline int own_end_query(int k, int window, int len) {
  return window > 0 && window < len - k ? k + window : len;
}

#endif
