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
  constexpr int THREADS = 32 * KV_WARPS, EACH = KV_SPLIT / THREADS;
  const int32_t *table = a.table + static_cast<int64_t>(b) * a.table_width;
  int len = a.len[b], thread = static_cast<int>(threadIdx.x);
  bool early = split == 0 && a.window == 0;
  int32_t id[EACH];
  if (early)
#pragma unroll
    for (int i = 0; i < EACH; i++) id[i] = page_at(a, table, i * THREADS + thread);
  SplitRange r = *range = split_range(a, len, split);
  if (split >= r.splits) return false;
  if (!early)
#pragma unroll
    for (int i = 0; i < EACH; i++) id[i] = page_at(a, table, r.first + i * THREADS + thread);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int at = i * THREADS + thread, t = r.first + at;
    if (t >= r.end) break;
    if (id[i] < 0 || id[i] >= a.n_pages) __trap();
    uint32_t block = static_cast<uint32_t>(id[i]) * static_cast<uint32_t>(a.n_kv_heads) +
                     static_cast<uint32_t>(kv_head);
    rows[at] = block * static_cast<uint32_t>(a.page_size) + static_cast<uint32_t>(t % a.page_size);
  }
  return true;
}

#endif
