/* shared: buffers that the ranks of a node read out of each other's memory. Every rank has as many,
 * takes and gives them by the same calls, and maps those of the others: the one that a rank has
 * taken is the one that the others have taken. */
#include <stdlib.h>

#include "zeropp/internal.h"

/* Drivers hand out small pieces of blocks of 2 MiB, and map whole blocks. */
size_t shared_bytes(size_t bytes) {
  enum { BLOCK = 2 << 20 };
  return (bytes + BLOCK - 1) / BLOCK * BLOCK;
}

void shared_open(const ZeroPP *z, Shared *s, SharedSize size) {
  *s = (Shared){.size = size, .off = size.most == 0 || !comm_can_take(z->grid->dev_intra)};
  if (!s->off) s->at = mem_zalloc((size_t)size.most, sizeof *s->at);
}

/* One more, in place of what the pool may hold; on all ranks, or on none. */
static void add(ZeroPP *z, Shared *s) {
  SharedBuffer b = {.own = device_alloc(z->device, s->size.bytes)};
  b.of_rank = mem_zalloc((size_t)z->grid->local, sizeof *b.of_rank);
  if (peers_map(z, b.own, b.of_rank)) {
    s->at[s->n++] = b;
    z->pool.limit -= s->size.bytes < z->pool.limit ? s->size.bytes : z->pool.limit;
    return;
  }
  s->off = true;
  device_free(z->device, b.own);
  free(b.of_rank);
}

static char *take_idle(Shared *s) {
  for (int i = 0; i < s->n; i++) {
    if (s->at[i].busy) continue;
    s->at[i].busy = true;
    return s->at[i].own;
  }
  return NULL;
}

char *shared_take(ZeroPP *z, Shared *s) {
  char *idle = s->off ? NULL : take_idle(s);
  if (idle || s->off || s->n == s->size.most) return idle;
  add(z, s);
  return take_idle(s);
}

static const SharedBuffer *find(const Shared *s, const char *own) {
  for (int i = 0; i < s->n; i++)
    if (s->at[i].own == own) return &s->at[i];
  return NULL;
}

bool shared_give(Shared *s, const char *own) {
  const SharedBuffer *b = find(s, own);
  if (b) s->at[b - s->at].busy = false;
  return b;
}

const char *shared_of(const Shared *s, const char *own, int rank) {
  const SharedBuffer *b = find(s, own);
  require(b && b->busy);
  return b->of_rank[rank];
}

void shared_close(ZeroPP *z, Shared *s) {
  if (s->n > 0) peers_meet(z);
  for (int i = 0; i < s->n; i++) peers_unmap(z, s->at[i].of_rank);
  if (s->n > 0) comm_barrier(z->grid->intra); /* then the memory may go */
  for (int i = 0; i < s->n; i++) {
    device_free(z->device, s->at[i].own);
    free(s->at[i].of_rank);
  }
  free(s->at);
  *s = (Shared){0};
}
