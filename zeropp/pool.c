/* pool: buffers of full weights, gradients and messages between their uses. A step gathers every
 * unit several times, so giving memory back each time would cost more than the copies. What is held
 * is bounded: idle buffers go back to the device when they and those in use together are beyond the
 * limit (a rollout that holds every unit is beyond it by what it needs, and no more). */
#include <stdlib.h>

#include "zeropp/internal.h"

static void drop(Pool *p, int i) {
  p->idle -= p->bytes[i];
  p->n--;
  p->free[i] = p->free[p->n];
  p->bytes[i] = p->bytes[p->n];
}

/* Idle buffers go back, the oldest first, until all fit below the limit. */
static void shrink(Pool *p) {
  while (p->n > 0 && p->idle + p->used > p->limit) {
    device_free(p->device, p->free[0]);
    drop(p, 0);
  }
}

void *pool_take(Pool *p, size_t bytes) {
  p->used += bytes;
  for (int i = p->n - 1; i >= 0; i--) {
    if (p->bytes[i] != bytes) continue;
    void *buffer = p->free[i];
    drop(p, i);
    return buffer;
  }
  shrink(p);
  return device_alloc(p->device, bytes);
}

void pool_give(Pool *p, void *buffer, size_t bytes) {
  p->used -= bytes;
  if (p->n == p->cap) {
    p->cap = 2 * p->cap + 8;
    p->free = mem_grow(p->free, (size_t)p->cap, sizeof *p->free);
    p->bytes = mem_grow(p->bytes, (size_t)p->cap, sizeof *p->bytes);
  }
  p->free[p->n] = buffer;
  p->bytes[p->n++] = bytes;
  p->idle += bytes;
  shrink(p);
}

void pool_close(Pool *p) {
  for (int i = 0; i < p->n; i++) device_free(p->device, p->free[i]);
  free(p->free);
  free(p->bytes);
}
