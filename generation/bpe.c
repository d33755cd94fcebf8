/* Words to ids. Symbols are the word's tokens so far, in a list; a heap holds the pairs that may be
 * merged, the lowest rank first and of these the leftmost: O(n log n) in the length of the word. A
 * pair whose symbols have changed since it was pushed is passed over. */
#include "generation/bpe.h"

#include <stdlib.h>

#include "generation/bpe_internal.h"

typedef struct Symbol {
  int32_t id;         /* -1: merged into the one before */
  int32_t prev, next; /* -1: none */
} Symbol;

/* A heap entry is rank << 32 | place, so that order is that of one number. */
typedef struct Heap {
  uint64_t *v;
  size_t n;
} Heap;

static void heap_push(Heap *h, uint64_t entry) {
  size_t i = h->n++;
  for (; i > 0 && h->v[(i - 1) / 2] > entry; i = (i - 1) / 2) h->v[i] = h->v[(i - 1) / 2];
  h->v[i] = entry;
}

static uint64_t heap_pop(Heap *h) {
  uint64_t top = h->v[0], last = h->v[--h->n];
  size_t i = 0;
  for (size_t child; (child = 2 * i + 1) < h->n; i = child) {
    if (child + 1 < h->n && h->v[child + 1] < h->v[child]) child++;
    if (h->v[child] >= last) break;
    h->v[i] = h->v[child];
  }
  h->v[i] = last;
  return top;
}

/* The pair of a symbol and the next, if there is a merge for it. */
static void push_pair(const Bpe *b, const Symbol *s, int32_t place, Heap *h) {
  if (place < 0 || s[place].next < 0) return;
  int rank = bpe_rank(b, s[place].id, s[s[place].next].id);
  if (rank >= 0) heap_push(h, (uint64_t)(uint32_t)rank << 32 | (uint32_t)place);
}

static void merge_symbols(const Bpe *b, Symbol *s, int32_t n, uint64_t *heap) {
  Heap h = {heap, 0};
  for (int32_t i = 0; i < n; i++) push_pair(b, s, i, &h);
  while (h.n > 0) {
    uint64_t top = heap_pop(&h);
    const BpeMerge *m = &b->merges[top >> 32];
    int32_t place = (int32_t)(uint32_t)top, next = s[place].next;
    if (s[place].id != m->left || next < 0 || s[next].id != m->right) continue;
    s[place] = (Symbol){m->result, s[place].prev, s[next].next};
    s[next].id = -1;
    if (s[place].next >= 0) s[s[place].next].prev = place;
    push_pair(b, s, s[place].prev, &h);
    push_pair(b, s, place, &h);
  }
}

/* Every merge pushes at most two pairs and takes one symbol away: 3 n entries are enough. */
static void work_reserve(BpeWork *w, size_t n) {
  if (n <= w->cap) return;
  w->cap = n < 64 ? 64 : n;
  w->symbols = mem_grow(w->symbols, w->cap, sizeof *w->symbols);
  w->heap = mem_grow(w->heap, 3 * w->cap, sizeof *w->heap);
}

void bpe_work_free(BpeWork *w) {
  free(w->symbols);
  free(w->heap);
  *w = (BpeWork){0};
}

int bpe_encode_word(const Bpe *b, BpeWork *w, const char *word, size_t len, TokenList *out,
                    size_t *bad) {
  int whole = len <= b->longest ? bpe_lookup(b, word, len, false) : -1;
  if (whole >= 0 && b->tokens[whole].whole) {
    token_list_push(out, whole);
    return 0;
  }
  require(len < INT32_MAX);
  work_reserve(w, len);
  Symbol *s = w->symbols;
  int32_t n = (int32_t)len;
  for (int32_t i = 0; i < n; i++) {
    s[i] = (Symbol){b->byte_id[(uint8_t)word[i]], i - 1, i + 1 < n ? i + 1 : -1};
    if (s[i].id >= 0) continue;
    *bad = (size_t)i;
    return -1;
  }
  merge_symbols(b, s, n, w->heap);
  for (int32_t i = 0; i >= 0 && n > 0; i = s[i].next) token_list_push(out, s[i].id);
  return 0;
}
