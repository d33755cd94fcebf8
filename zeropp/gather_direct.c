/* gather_direct: weights that travel as they are computed with need no message. On one node a
 * rank's slice of a parameter is a run of its elements, and the slices follow each other: they come
 * to their places in the full buffer, and nothing is copied out of a message afterwards.
 *
 * Where ranks reach each other's memory, every rank puts its own slices there and takes those of
 * the others out of their buffers, by copies that need no multiprocessor: a kernel's copy would
 * wait for the product that has them all. Else matrices are gathered by a collective each; vectors
 * are too short to be worth a call, and go in the unit's message.
 */
#include <stdlib.h>

#include "zeropp/internal.h"

static bool is_matrix(const ZeroPP *z, int param) { return z->specs[param].ndim == 2; }

/* Bytes before an element of a full buffer. */
static size_t full_at(const ZeroPP *z, int param, int64_t element) {
  return (size_t)(z->place[param].full + element) * dtype_size(z->cfg.compute);
}

/* This rank's slices, rounded, to where they belong. */
static void place_own(const ZeroPP *z, const Unit *u, bool vectors, Memory from, char *full) {
  WirePart *parts = mem_zalloc((size_t)u->count, sizeof *parts);
  int n = 0;
  for (int k = 0, p = u->first; k < u->count; k++, p++) {
    WireSpan span = u->slots[z->grid->local_rank * u->count + k].span;
    if (span.count == 0 || !(vectors || is_matrix(z, p))) continue;
    char *x = (char *)from.x + (size_t)z->place[p].shard * dtype_size(from.type);
    parts[n++] = (WirePart){.span = span,
                            .x = tensor_1d(x, from.type, span.count),
                            .to = {.payload = full + full_at(z, p, span.first), .n = 1}};
  }
  z->ops->quantize(z->device, u->message[MSG_WEIGHTS].format, n, parts);
  free(parts);
}

/* ---- out of the others' buffers ---- */

/* Starting behind the own rank: not all from one at a time. */
static void take(void *arg) {
  const UnitWork *w = arg;
  const ZeroPP *z = w->z;
  const Unit *u = w->u;
  int ranks = z->grid->local;
  for (int i = 1; i < ranks; i++) {
    int r = (z->grid->local_rank + i) % ranks;
    const char *from = shared_of(&z->full, u->gather.full, r);
    size_t bytes = 0;
    for (int k = 0; k < u->count; k++) {
      WireSpan span = u->slots[r * u->count + k].span;
      size_t at = full_at(z, u->first + k, span.first),
             each = (size_t)span.count * dtype_size(z->cfg.compute);
      device_copy(z->device, u->gather.full + at, from + at, each);
      bytes += each;
    }
    comm_count_taken(z->grid->intra, COLL_ALL_GATHER, r, bytes);
  }
}

bool gather_take_start(ZeroPP *z, Unit *u, Memory from) {
  char *full = shared_take(z, &z->full);
  if (!full) return false;
  u->gather.full = full;
  place_own(z, u, true, from, full);
  u->gather.ticket = comm_start_take(z->grid->dev_intra, COLL_ALL_GATHER, take, &u->work);
  return true;
}

/* ---- by collectives ---- */

/* Where this rank's slice of a matrix is sent from: rounded already, or put in its place first. */
static char *own_slice(const ZeroPP *z, int param, Memory from, char *full) {
  if (from.type == z->cfg.compute)
    return (char *)from.x + (size_t)z->place[param].shard * dtype_size(from.type);
  return full + full_at(z, param, z->place[param].start);
}

CommTicket gather_direct_start(const ZeroPP *z, const Unit *u, Memory from, char *full) {
  CommTicket ticket = 0;
  int ranks = z->grid->local;
  size_t *bytes = mem_alloc((size_t)ranks, sizeof *bytes);
  if (from.type != z->cfg.compute) place_own(z, u, false, from, full);
  for (int p = u->first; p < u->first + u->count; p++) {
    if (!is_matrix(z, p)) continue;
    for (int r = 0; r < ranks; r++)
      bytes[r] =
          (size_t)u->slots[r * u->count + p - u->first].span.count * dtype_size(z->cfg.compute);
    ticket = comm_start_all_gather(z->grid->dev_intra, own_slice(z, p, from, full),
                                   full + full_at(z, p, 0), bytes);
  }
  free(bytes);
  return ticket;
}
