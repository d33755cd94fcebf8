/* The paged KV cache in device memory. Inside a page each kv head has its own block [page_size, D],
 * of k and of v alike: rows that one block of threads reads lie together.
 *
 * Decoding cuts a sequence into splits of SPLIT tokens, counted from its first token, whatever the
 * batch: a sequence's sums have one order in any company. A split that is not the sequence's only
 * one leaves its running softmax and sums to scratch, and a second kernel adds them in order. */
#ifndef KERNELS_CUDA_KV_CACHE_H
#define KERNELS_CUDA_KV_CACHE_H

#include "kernels/cuda/cuda.h"

enum { KV_SPLIT = 512, KV_WARPS = 4 };

/* One call of attention_decode. Of the partial results, `splits` for each sequence and query head:
 * out, not divided by its sum, [B, H, splits, D], and maximum and sum [B, H, splits, 2]. */
struct Decode {
  int n_heads, n_kv_heads, head_dim, window;
  float scale;
  int page_size, table_width, splits;
  int64_t n_pages, q_stride;
  const void *qkv, *k_pages, *v_pages;
  const int32_t *table, *len;
  void *out;
  float *part_out, *part_stat;
};

void decode_mma(cudaStream_t stream, const Decode &a, int64_t batch);
void decode_plain(cudaStream_t stream, DType type, const Decode &a, int64_t batch);
void decode_combine(cudaStream_t stream, DType type, const Decode &a, int64_t batch);

/* Tokens [first, end) of a split of a sequence; splits is the number of the sequence's own. */
struct SplitRange {
  int first, end, splits;
};
__device__ inline SplitRange split_range(const Decode &a, int len, int split) {
  if (len < 1 || len > a.table_width * a.page_size) __trap(); /* a broken contract */
  int seen = a.window > 0 && len > a.window ? len - a.window : 0, from = seen / KV_SPLIT;
  int begin = (from + split) * KV_SPLIT;
  return {max(seen, begin), min(len, begin + KV_SPLIT), (len - 1) / KV_SPLIT + 1 - from};
}

/* Row numbers, in units of D, of the split's tokens: rows[t - first]. All threads call it. */
__device__ inline void split_rows(const Decode &a, int b, int kv_head, SplitRange r,
                                  uint32_t *rows) {
  const int32_t *table = a.table + static_cast<int64_t>(b) * a.table_width;
  for (int t = r.first + static_cast<int>(threadIdx.x); t < r.end;
       t += static_cast<int>(blockDim.x)) {
    int id = table[t / a.page_size];
    if (id < 0 || id >= a.n_pages) __trap();
    uint32_t block = static_cast<uint32_t>(id) * static_cast<uint32_t>(a.n_kv_heads) +
                     static_cast<uint32_t>(kv_head);
    rows[t - r.first] =
        block * static_cast<uint32_t>(a.page_size) + static_cast<uint32_t>(t % a.page_size);
  }
}

#endif
