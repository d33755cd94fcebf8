/* Pages, their holders and the free list; see kv_cache.h. */
#include "generation/kv_cache.h"

#include <stdlib.h>
#include <string.h>

static Tensor push_pages(Arena *arena, AttnShape s, DType type, int n_pages, int page_size) {
  Tensor t = {.dtype = type, .ndim = 4, .dim = {n_pages, page_size, s.n_kv_heads, s.head_dim}};
  t.data = arena_push(arena, tensor_bytes(t));
  return t;
}

KvCache kv_create(Arena *arena, AttnShape s, DType type, int n_layers, int n_pages, int page_size) {
  require(n_pages > 0 && page_size > 0 && (int64_t)n_pages * page_size <= INT32_MAX);
  KvCache c = {.n_layers = n_layers, .n_pages = n_pages, .page_size = page_size};
  c.k = mem_alloc((size_t)n_layers, sizeof *c.k);
  c.v = mem_alloc((size_t)n_layers, sizeof *c.v);
  for (int l = 0; l < n_layers; l++) {
    c.k[l] = push_pages(arena, s, type, n_pages, page_size);
    c.v[l] = push_pages(arena, s, type, n_pages, page_size);
  }
  c.holders = mem_zalloc((size_t)n_pages, sizeof *c.holders);
  c.free_pages = mem_alloc((size_t)n_pages, sizeof *c.free_pages);
  for (int i = n_pages; i-- > 0;) c.free_pages[c.n_free++] = i;
  return c;
}

void kv_destroy(KvCache *c) {
  free(c->k);
  free(c->v);
  free(c->holders);
  free(c->free_pages);
}

bool kv_grow(KvCache *c, int32_t *table, int *n_pages, int tokens) {
  int want = kv_pages_of(c, tokens);
  if (want - *n_pages > c->n_free) return false;
  while (*n_pages < want) {
    int32_t page = c->free_pages[--c->n_free];
    require(c->holders[page] == 0);
    c->holders[page] = 1;
    table[(*n_pages)++] = page;
  }
  return true;
}

void kv_share(KvCache *c, const int32_t *from, int n, int32_t *to) {
  for (int i = 0; i < n; i++) {
    c->holders[from[i]]++;
    to[i] = from[i];
  }
}

void kv_drop(KvCache *c, const int32_t *table, int n_pages) {
  for (int i = n_pages; i-- > 0;) {
    require(c->holders[table[i]] > 0);
    if (--c->holders[table[i]] == 0) c->free_pages[c->n_free++] = table[i];
  }
}
