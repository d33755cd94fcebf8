/* delta_check: whether the nodes hold the same weights. Every rank sums up each node's piece of its
 * slices; what an owner says of its own piece is what the others must have. */
#include <stdlib.h>

#include "zeropp/internal.h"

void delta_share(const ZeroPP *z, const uint64_t *own, int n, uint64_t *all) {
  size_t nodes = (size_t)z->grid->nodes;
  size_t *bytes = mem_alloc(nodes, sizeof *bytes);
  for (size_t i = 0; i < nodes; i++) bytes[i] = (size_t)n * sizeof *own;
  comm_all_gather(z->grid->inter, own, all, bytes);
  free(bytes);
}

/* Of every piece in this rank's secondary, [n_units][nodes]. */
static void sum_pieces(const ZeroPP *z, uint64_t *sums) {
  int nodes = z->grid->nodes, n = z->n_units * nodes;
  Tensor *pieces = mem_alloc((size_t)n, sizeof *pieces);
  uint64_t *on_device = device_alloc(z->device, (size_t)n * sizeof *sums);
  for (int i = 0; i < n; i++) pieces[i] = delta_secondary(z, &z->units[i / nodes], i % nodes);
  z->ops->checksum(z->device, n, pieces, on_device);
  device_download(z->device, sums, on_device, (size_t)n * sizeof *sums);
  device_free(z->device, on_device);
  free(pieces);
}

DeltaMismatch delta_mismatch(const ZeroPP *z) {
  int nodes = z->grid->nodes, n = z->n_units * nodes;
  uint64_t *own = mem_alloc((size_t)n, sizeof *own);
  uint64_t *all = mem_alloc((size_t)n * (size_t)nodes, sizeof *all);
  DeltaMismatch found = {.unit = -1};
  sum_pieces(z, own);
  delta_share(z, own, n, all);
  for (int i = 0; i < n && found.unit < 0; i++)
    for (int node = 0; node < nodes && found.unit < 0; node++)
      if (all[node * n + i] != all[i % nodes * n + i])
        found = (DeltaMismatch){i / nodes, i % nodes, node};
  found.owner = found.owner * z->grid->local + z->grid->local_rank;
  found.holder = found.holder * z->grid->local + z->grid->local_rank;
  free(own);
  free(all);
  return found;
}
