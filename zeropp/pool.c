/* pool: buffers of full weights, gradients and messages between their uses. A step gathers every
 * unit several times, and memory that goes back to a device each time would stop it. What is held
 * is bounded: idle buffers go back when all together are beyond the limit (a rollout that holds
 * every unit is beyond it by what it needs, and no more).
 *
 * Units of about one size share buffers: one of up to twice the size asked for serves, so a use
 * that has k buffers busy at a time holds no more than k of the largest size. An idle one that a
 * new one can stand in for goes back.
 */
#include <stdlib.h>
#include <string.h>

#include "zeropp/internal.h"

static void drop(Pool *p, int i) {
  p->held -= p->at[i].bytes;
  device_free(p->device, p->at[i].p);
  p->n--;
  memmove(p->at + i, p->at + i + 1, (size_t)(p->n - i) * sizeof *p->at);
}

/* Idle buffers go back, the oldest first, until all fit below the limit. */
static void shrink(Pool *p, size_t more) {
  for (int i = 0; i < p->n && p->held + more > p->limit;)
    if (p->at[i].busy)
      i++;
    else
      drop(p, i);
}

static bool fits(const PoolBuffer *b, PoolUse use, size_t bytes) {
  return !b->busy && b->use == use && b->bytes >= bytes && b->bytes <= 2 * bytes;
}

/* The smallest idle buffer that one of so many bytes would serve for. */
static void drop_replaced(Pool *p, PoolUse use, size_t bytes) {
  int found = -1;
  for (int i = 0; i < p->n; i++) {
    const PoolBuffer *b = &p->at[i];
    if (b->busy || b->use != use || b->bytes >= bytes || bytes > 2 * b->bytes) continue;
    if (found < 0 || b->bytes < p->at[found].bytes) found = i;
  }
  if (found >= 0) drop(p, found);
}

void *pool_take(Pool *p, PoolUse use, size_t bytes) {
  int best = -1;
  for (int i = 0; i < p->n; i++)
    if (fits(&p->at[i], use, bytes) && (best < 0 || p->at[i].bytes <= p->at[best].bytes)) best = i;
  if (best >= 0) {
    p->at[best].busy = true;
    return p->at[best].p;
  }
  drop_replaced(p, use, bytes);
  shrink(p, bytes);
  if (p->n == p->cap) {
    p->cap = 2 * p->cap + 8;
    p->at = mem_grow(p->at, (size_t)p->cap, sizeof *p->at);
  }
  p->held += bytes;
  p->at[p->n] = (PoolBuffer){device_alloc(p->device, bytes), bytes, use, true};
  return p->at[p->n++].p;
}

void pool_give(Pool *p, void *buffer) {
  int i = 0;
  while (i < p->n && p->at[i].p != buffer) i++;
  require(i < p->n && p->at[i].busy);
  PoolBuffer b = p->at[i];
  b.busy = false;
  memmove(p->at + i, p->at + i + 1, (size_t)(p->n - i - 1) * sizeof *p->at); /* now the newest */
  p->at[p->n - 1] = b;
  shrink(p, 0);
}

void pool_close(Pool *p) {
  for (int i = 0; i < p->n; i++) device_free(p->device, p->at[i].p);
  free(p->at);
}
