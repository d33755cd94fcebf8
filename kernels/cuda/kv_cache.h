/* The paged KV cache in device memory. Inside a page each kv head has its own block [page_size, D],
 * of k and of v alike: rows that one block of threads reads lie together.
 *
 * Decoding cuts a sequence into splits of SPLIT tokens, counted from its first token, whatever the
 * batch: a sequence's sums have one order in any company. A split that is not the sequence's only
 * one leaves its running softmax and sums to scratch, and a second kernel adds them in order.
 *
 * A block is one sequence, one kv head with up to KV_HEADS of its query heads, and one split. */
#ifndef KERNELS_CUDA_KV_CACHE_H
#define KERNELS_CUDA_KV_CACHE_H

#include "kernels/cuda/chain.h"

constexpr int KV_SPLIT = 512, KV_WARPS = 4, KV_THREADS = 32 * KV_WARPS;
constexpr int KV_HEADS = 16; /* query heads of a block */

/* One call of attention_decode. Of the partial results, `splits` for each sequence and query head:
 * out, not divided by its sum, [B, H, splits, D], and maximum and sum [B, H, splits, 2]. */
struct Decode {
  int n_heads, n_kv_heads, group, head_dim, window; /* group: query heads of a kv head */
  float scale;
  int page_size, table_width, splits, sms;
  int64_t n_pages, q_stride;
  const void *qkv, *k_pages, *v_pages;
  const int32_t *table, *len;
  void *out;
  float *part_out, *part_stat;
};

/* What a whole step knows of each row's newest token: its position, its slot (-1: an inert row),
 * the turns, rows of half a head (half 0: no rope; else a multiple of 8). */
struct Newest {
  const int32_t *position, *slot;
  const float *cos, *sin;
  int half;
  int64_t places; /* rows of cos */
};

/* newest: NULL where all tokens are in their pages and queries are turned. */
void decode_mma(cudaStream_t stream, const Decode &a, const Newest *newest, int64_t batch);
void decode_plain(cudaStream_t stream, DType type, const Decode &a, int64_t batch);
void decode_combine(cudaStream_t stream, DType type, const Decode &a, int64_t batch);

/* ---- device code ---- */

/* Tokens [first, end) of a split of a sequence; splits is the number of the sequence's own: one, of
 * no tokens, where there are none. */
struct SplitRange {
  int first, end, splits;
};
__device__ inline SplitRange split_range(const Decode &a, int len, int split) {
  if (len == 0) return {0, 0, 1};
  if (len < 0 || len > a.table_width * a.page_size) __trap(); /* a broken contract */
  int seen = a.window > 0 && len > a.window ? len - a.window : 0, from = seen / KV_SPLIT;
  int begin = (from + split) * KV_SPLIT;
  return {max(seen, begin), min(len, begin + KV_SPLIT), (len - 1) / KV_SPLIT + 1 - from};
}

/* Query heads [first, first + n) of kv head kv_head, and the split, of this block. */
struct DecodeBlock {
  int b, kv_head, first, n, split;
  bool leads; /* has the first of the kv head's query heads */
};
__device__ inline DecodeBlock decode_block(const Decode &a) {
  int group = a.group, chunks = (group + KV_HEADS - 1) / KV_HEADS;
  int kv_head = static_cast<int>(blockIdx.x), at = 0;
  if (chunks > 1) at = kv_head % chunks * KV_HEADS, kv_head /= chunks;
  return {static_cast<int>(blockIdx.y), kv_head, kv_head * group + at, min(KV_HEADS, group - at),
          static_cast<int>(blockIdx.z), at == 0};
}
static inline dim3 decode_grid(const Decode &a, int64_t batch) {
  int chunks = (a.group + KV_HEADS - 1) / KV_HEADS;
  return dim3(static_cast<unsigned>(a.n_kv_heads * chunks), static_cast<unsigned>(batch),
              static_cast<unsigned>(a.splits));
}

/* What a block has of one number of a query head's sum: to out where it is all, else to scratch.
 * max is that of exponents of 2, sum that of weights, out not divided by it. */
template <class T>
__device__ inline void finish_number(const Decode &a, const DecodeBlock &k, SplitRange r, int row,
                                     int column, float max, float sum, float out) {
  int64_t head = static_cast<int64_t>(k.b) * a.n_heads + k.first + row;
  if (r.splits == 1) {
    static_cast<T *>(a.out)[head * a.head_dim + column] =
        from_float<T>(sum == 0 ? 0 : out / sum); /* 0: no tokens */
    return;
  }
  int64_t part = head * a.splits + k.split;
  a.part_out[part * a.head_dim + column] = out;
  if (column == 0) a.part_stat[2 * part] = max;
  if (column == 0) a.part_stat[2 * part + 1] = sum;
}

#endif
