/* peers: ranks of one node that take each other's weights out of memory by themselves.
 *
 * Every rank keeps its masters rounded to BF16 (AdamW writes them), and the others map that memory.
 * A gather is then a row of copies, which a GPU's copy engines make beside its kernels: no rank
 * waits for another, no kernel of a collective takes multiprocessors from those that compute.
 *
 * Ranks only meet where the memory is written: nobody writes before all have done reading, nobody
 * reads before all have done writing. Where memory cannot be mapped, weights travel as collectives.
 */
#include <stdlib.h>
#include <string.h>

#include "zeropp/internal.h"

typedef struct Peers {
  bool mapped;
  void **of_rank;   /* [local]: the rounded masters of each, this rank's own too */
  int64_t *start;   /* [n_units][local]: where units start there */
  uint64_t version; /* that is complete on all ranks */
} Peers;

void peers_meet(const ZeroPP *z) {
  device_sync(z->device);
  comm_barrier(z->grid->intra);
}

static int64_t piece_numel(const ZeroPP *z, const Unit *u, int rank) {
  return pieces_numel(z, (Pieces){u, rank, 1}); /* one node: a piece is a slice */
}

static void find_starts(const ZeroPP *z, int64_t *start) {
  int ranks = z->grid->local;
  for (int r = 0; r < ranks; r++) {
    int64_t at = 0;
    for (int i = 0; i < z->n_units; i++) {
      start[i * ranks + r] = at;
      at += piece_numel(z, &z->units[i], r);
    }
  }
}

void peers_unmap(const ZeroPP *z, void **of_rank) {
  for (int r = 0; r < z->grid->local; r++)
    if (r != z->grid->local_rank) device_unimport(z->device, of_rank[r]);
}

bool peers_map(const ZeroPP *z, void *own_memory, void **of_rank) {
  size_t ranks = (size_t)z->grid->local, size = 1 + DEVICE_HANDLE_BYTES;
  char own[1 + DEVICE_HANDLE_BYTES] = {0}, *all = mem_alloc(ranks, size);
  size_t *bytes = mem_alloc(ranks, sizeof *bytes);
  for (size_t r = 0; r < ranks; r++) bytes[r] = size;
  own[0] = device_export(z->device, own_memory, own + 1);
  comm_all_gather(z->grid->intra, own, all, bytes);
  double missing = 0;
  for (size_t r = 0; r < ranks; r++) missing += !all[r * size];
  for (size_t r = 0; r < ranks && missing == 0; r++) {
    bool mine = (int)r == z->grid->local_rank;
    of_rank[r] = mine ? own_memory : device_import(z->device, all + r * size + 1);
    missing += !of_rank[r];
  }
  comm_all_reduce_f64(z->grid->intra, &missing, 1, true);
  if (missing > 0) peers_unmap(z, of_rank);
  free(bytes);
  free(all);
  return missing == 0;
}

void peers_open(ZeroPP *z) {
  size_t ranks = (size_t)z->grid->local;
  Peers *p = mem_zalloc(1, sizeof *p);
  p->of_rank = mem_zalloc(ranks, sizeof *p->of_rank);
  p->start = mem_zalloc(ranks * (size_t)z->n_units, sizeof *p->start);
  find_starts(z, p->start);
  p->mapped = peers_map(z, z->rounded, p->of_rank);
  if (!p->mapped)
    log_info("zeropp: ranks do not reach each other's memory: weights by collectives");
  z->peers = p;
}

void peers_close(ZeroPP *z) {
  Peers *p = z->peers;
  if (!p) return;
  if (p->mapped) {
    peers_meet(z);
    peers_unmap(z, p->of_rank);
    comm_barrier(z->grid->intra); /* then the memory may go */
  }
  free(p->of_rank);
  free(p->start);
  free(p);
  z->peers = NULL;
}

void peers_before_write(const ZeroPP *z) {
  if (z->peers && z->peers->mapped) peers_meet(z);
}

/* Every rank's slices of a unit to their places in the full buffer. */
static void take(void *arg) {
  const UnitWork *w = arg;
  const ZeroPP *z = w->z;
  const Unit *u = w->u;
  int ranks = z->grid->local;
  for (int r = 0; r < ranks; r++) {
    const char *from = z->peers->of_rank[r];
    int64_t start = z->peers->start[(u - z->units) * ranks + r];
    int64_t before = u->slots[r * u->count].dense;
    for (int k = 0; k < u->count; k++) {
      const Slot *s = &u->slots[r * u->count + k];
      int64_t to = z->place[u->first + k].full + s->span.first;
      device_copy(z->device, u->gather.full + 2 * to, from + 2 * (start + s->dense - before),
                  2 * (size_t)s->span.count);
    }
    comm_count_taken(z->grid->intra, COLL_ALL_GATHER, r, 2 * (size_t)piece_numel(z, u, r));
  }
}

bool peers_start(ZeroPP *z, Unit *u) {
  if (!z->peers || !z->peers->mapped) return false;
  if (z->peers->version != z->version) peers_meet(z);
  z->peers->version = z->version;
  u->gather.ticket = comm_start_work(z->grid->dev_intra, COLL_ALL_GATHER, take, &u->work);
  return true;
}
