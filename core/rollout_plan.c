/* Who computes what: items (sequences, or pairs of them) are dealt to ranks by tokens, and each
 * rank's share is packed into micro-batches. Pure functions of their arguments, so that every rank
 * finds the same plan without a word between them. */
#include <stdlib.h>

#include "core/rollout.h"

/* One unit of planning: `width` adjacent sequences starting at `first`. */
typedef struct Item {
  int32_t first;
  int64_t tokens;
  int position; /* in the caller's list: breaks ties */
} Item;

static int longest_first(const void *a, const void *b) {
  const Item *x = a, *y = b;
  if (x->tokens != y->tokens) return x->tokens < y->tokens ? 1 : -1;
  return (x->position > y->position) - (x->position < y->position);
}

static int ascending(const void *a, const void *b) {
  int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
  return (x > y) - (x < y);
}

/* Owner of each (sorted) item: the least loaded rank so far, ties to the lowest. */
static int *deal(const Item *items, int n, int world) {
  int *owner = mem_alloc((size_t)n, sizeof *owner);
  int64_t *load = mem_zalloc((size_t)world, sizeof *load);
  for (int i = 0; i < n; i++) {
    int best = 0;
    for (int r = 1; r < world; r++)
      if (load[r] < load[best]) best = r;
    owner[i] = best;
    load[best] += items[i].tokens;
  }
  free(load);
  return owner;
}

/* First fit, longest first: bin[i] of each item of one rank; returns how many bins. */
static int fill_bins(const Item *items, const int *owner, int n, int rank, int64_t max_tokens,
                     int *bin) {
  int64_t *used = mem_alloc((size_t)n, sizeof *used);
  int bins = 0;
  for (int i = 0; i < n; i++) {
    if (owner[i] != rank) continue;
    int b = 0;
    while (b < bins && used[b] + items[i].tokens > max_tokens) b++;
    if (b == bins) used[bins++] = 0;
    used[b] += items[i].tokens;
    bin[i] = b;
  }
  free(used);
  return bins;
}

static MicroBatch *collect(const Item *items, const int *owner, const int *bin, int n, int rank,
                           int n_micro, int width) {
  MicroBatch *micro = mem_zalloc((size_t)n_micro, sizeof *micro);
  for (int i = 0; i < n; i++)
    if (owner[i] == rank) micro[bin[i]].n_seqs += width;
  for (int m = 0; m < n_micro; m++) {
    micro[m].ids = mem_alloc((size_t)micro[m].n_seqs, sizeof *micro[m].ids);
    micro[m].n_seqs = 0;
  }
  for (int i = 0; i < n; i++) {
    if (owner[i] != rank) continue;
    MicroBatch *mb = &micro[bin[i]];
    for (int k = 0; k < width; k++) mb->ids[mb->n_seqs++] = items[i].first + k;
  }
  for (int m = 0; m < n_micro; m++)
    qsort(micro[m].ids, (size_t)micro[m].n_seqs, sizeof *micro[m].ids, ascending);
  return micro;
}

static BatchPlan plan(const int32_t *lengths, const int32_t *ids, int n, int width, int rank,
                      int world, int max_tokens) {
  require(n >= 0 && world > 0 && rank >= 0 && rank < world && max_tokens > 0);
  Item *items = mem_alloc((size_t)n, sizeof *items);
  for (int i = 0; i < n; i++) {
    items[i] = (Item){(ids ? ids[i] : i) * width, 0, i};
    for (int k = 0; k < width; k++) items[i].tokens += lengths[items[i].first + k];
  }
  qsort(items, (size_t)n, sizeof *items, longest_first);
  int *owner = deal(items, n, world), *bin = mem_alloc((size_t)n, sizeof *bin);
  int n_micro = 0;
  for (int r = 0; r < world; r++) {
    int bins = fill_bins(items, owner, n, r, max_tokens, bin);
    if (bins > n_micro) n_micro = bins;
  }
  BatchPlan p = {n_micro, collect(items, owner, bin, n, rank, n_micro, width)};
  free(items);
  free(owner);
  free(bin);
  return p;
}

BatchPlan plan_batches(const int32_t *lengths, const int32_t *ids, int n, int rank, int world,
                       int max_tokens) {
  return plan(lengths, ids, n, 1, rank, world, max_tokens);
}

BatchPlan plan_pairs(const int32_t *lengths, const int32_t *pair_ids, int n_pairs, int rank,
                     int world, int max_tokens) {
  return plan(lengths, pair_ids, n_pairs, 2, rank, world, max_tokens);
}

void plan_free(BatchPlan *p) {
  for (int m = 0; m < p->n_micro; m++) free(p->micro[m].ids);
  free(p->micro);
  *p = (BatchPlan){0, NULL};
}
