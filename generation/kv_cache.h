/* The paged KV cache: per layer one tensor of pages for k and one for v, and who holds which page.
 *
 * A sequence's cache is a table of page ids; token p lies on page table[p / page_size]. Pages are
 * handed out one by one as a sequence grows and go back to the free list when the last holder drops
 * them. Full pages of a common prompt have several holders; they are written once, by the prefill
 * of the first, and only read from then on.
 */
#ifndef GENERATION_KV_CACHE_H
#define GENERATION_KV_CACHE_H

#include "core/arena.h"
#include "kernels/kernels.h"

typedef struct KvCache {
  int n_layers, n_pages, page_size;
  Tensor *k, *v;       /* [n_layers] of [n_pages, page_size, K, D], device memory */
  int32_t *free_pages; /* a stack: what was freed last is used first */
  int n_free;
  int32_t *holders; /* [n_pages] sequences that hold the page */
} KvCache;

/* Pages come from the arena (the caller pops them), the rest from malloc. n_pages * page_size must
 * fit an int32: slots are 32-bit. */
KvCache kv_create(Arena *arena, AttnShape s, DType type, int n_layers, int n_pages, int page_size);
void kv_destroy(KvCache *c);

static inline int kv_pages_of(const KvCache *c, int tokens) {
  return (tokens + c->page_size - 1) / c->page_size;
}
static inline int32_t kv_slot(const KvCache *c, const int32_t *table, int position) {
  return table[position / c->page_size] * c->page_size + position % c->page_size;
}

/* Makes the table of *n_pages pages hold `tokens` tokens. False, and nothing changes, when there
 * are not enough free pages. */
bool kv_grow(KvCache *c, int32_t *table, int *n_pages, int tokens);
/* `to` becomes a holder of the first n pages of `from`. */
void kv_share(KvCache *c, const int32_t *from, int n, int32_t *to);
void kv_drop(KvCache *c, const int32_t *table, int n_pages);

#endif
