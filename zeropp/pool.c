/* pool: buffers of full weights and gradients between their uses. A step gathers every unit several
 * times, so giving memory back each time would cost more than the copies. What lies idle is
 * bounded: beyond the limit (a rollout that held every unit has ended) buffers go back to the
 * device. */
#include <stdlib.h>

#include "zeropp/internal.h"

float *pool_take(Pool *p, size_t bytes) {
  for (int i = p->n - 1; i >= 0; i--) {
    if (p->bytes[i] != bytes) continue;
    void *buffer = p->free[i];
    p->held -= bytes;
    p->n--;
    p->free[i] = p->free[p->n];
    p->bytes[i] = p->bytes[p->n];
    return buffer;
  }
  return device_alloc(p->device, bytes);
}

void pool_give(Pool *p, float *buffer, size_t bytes) {
  if (p->held + bytes > p->limit) {
    device_free(p->device, buffer);
    return;
  }
  if (p->n == p->cap) {
    p->cap = 2 * p->cap + 8;
    p->free = mem_grow(p->free, (size_t)p->cap, sizeof *p->free);
    p->bytes = mem_grow(p->bytes, (size_t)p->cap, sizeof *p->bytes);
  }
  p->free[p->n] = buffer;
  p->bytes[p->n++] = bytes;
  p->held += bytes;
}

void pool_close(Pool *p) {
  for (int i = 0; i < p->n; i++) device_free(p->device, p->free[i]);
  free(p->free);
  free(p->bytes);
}
