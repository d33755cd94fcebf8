/* gather_direct: weights that travel as they are computed with need no message. On one node a
 * rank's slice of a matrix is a run of its elements, and the slices follow each other, so each
 * matrix is gathered in its place in the full buffer: nothing is copied out of a message
 * afterwards. Vectors are too short to be worth a call each, and go in the unit's message.
 */
#include <stdlib.h>

#include "zeropp/internal.h"

static bool is_matrix(const ZeroPP *z, int param) { return z->specs[param].ndim == 2; }

/* Bytes before an element of a full buffer. */
static size_t full_at(const ZeroPP *z, int param, int64_t element) {
  return (size_t)(z->place[param].full + element) * dtype_size(z->cfg.compute);
}

/* This rank's slices, rounded, to where they belong. */
static void place_own(const ZeroPP *z, const Unit *u, Memory from, char *full) {
  WirePart *parts = mem_zalloc((size_t)u->count, sizeof *parts);
  int n = 0;
  for (int p = u->first; p < u->first + u->count; p++) {
    const ParamPlace *w = &z->place[p];
    if (!is_matrix(z, p) || w->count == 0) continue;
    char *x = (char *)from.x + (size_t)w->shard * dtype_size(from.type);
    parts[n++] = (WirePart){.span = {z->specs[p].dim[1], w->start, w->count},
                            .x = tensor_1d(x, from.type, w->count),
                            .to = {.payload = full + full_at(z, p, w->start), .n = 1}};
  }
  z->ops->quantize(z->device, u->message[MSG_WEIGHTS].format, n, parts);
  free(parts);
}

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
  if (from.type != z->cfg.compute) place_own(z, u, from, full);
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
