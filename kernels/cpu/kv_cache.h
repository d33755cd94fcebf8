/* One query per sequence against its pages: what kv_cache.c and kv_narrow.c share. Internal to
 * kernels/cpu. */
#ifndef KERNELS_CPU_KV_CACHE_H
#define KERNELS_CPU_KV_CACHE_H

#include "kernels/cpu/cpu.h"

typedef struct DecodeArgs {
  AttnShape s;
  int64_t page_size, n_pages, table_width;
  const float *q, *k_pages, *v_pages;
  const int32_t *table, *len;
  int64_t q_stride;
  float *out;
} DecodeArgs;

/* The block of a kv head in a page of sequence b. */
static inline const float *block_at(const DecodeArgs *a, const float *pages, int64_t b,
                                    int64_t page, int64_t kv_head) {
  int32_t id = a->table[b * a->table_width + page];
  if (id < 0 || id >= a->n_pages) die("KV page %d is outside [0, %lld)", id, (long long)a->n_pages);
  return pages + ((int64_t)id * a->s.n_kv_heads + kv_head) * a->page_size * a->s.head_dim;
}

/* Heads that are narrower than a vector, on pages of whole vectors of tokens, have a way of their
 * own: the same for the query heads of n kv heads of sequence b. score: two times the pages' tokens
 * and a vector more, `stride` apart. */
bool kv_is_narrow(const DecodeArgs *a);
void kv_decode_narrow(const DecodeArgs *a, int64_t b, int64_t kv_head, int64_t n, float *score,
                      int64_t stride);

#endif
