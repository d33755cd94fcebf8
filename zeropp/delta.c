/* delta: refreshes of the secondary that send the BF16 weights that changed, without loss.
 *
 * A rank's own piece of the secondary is what the other nodes hold of it: it was sent, or made from
 * what was sent. The first gather after a write encodes the pieces of all units against it, and the
 * sizes of the streams go round once; a unit's stream follows at its gather and patches the
 * secondaries. A unit that changed too much, on any node, is sent whole.
 *
 * Encoding moves the own piece on, also of a unit that then is never gathered in this version: the
 * others miss that step, so the unit goes whole next time.
 */
#include <stdlib.h>

#include "zeropp/internal.h"

enum { SEND_WHOLE = 0 /* in the place of a stream's bytes */, ROOM_MIN = 64 };

typedef struct Delta {
  char *wire;       /* this rank's streams of all units */
  DeltaSize *sizes; /* device memory, [n_units] */
  uint64_t *sums;   /* device memory, [n_units] */
  uint64_t *bytes;  /* [nodes][n_units]: of streams that travel, and one, so that none is 0 */
  uint64_t version; /* that was encoded */
  int64_t refreshes;
  ZeroPPRefresh count;
} Delta;

bool delta_is_on(const ZeroPP *z) {
  return z->cfg.delta && z->cfg.trainable && z->cfg.hpz == HPZ_ON && !z->alias_full &&
         z->grid->nodes > 1;
}

/* A quarter of the weights, beyond which a stream is no shorter than half of what it replaces. */
static size_t room_of(int64_t numel) {
  size_t n = (size_t)numel, blocks = (n + DELTA_BLOCK - 1) / DELTA_BLOCK;
  return (n / 2 + 8 * blocks + ROOM_MIN + 15) / 16 * 16;
}

static int64_t piece_numel(const ZeroPP *z, const Unit *u, int node) {
  return pieces_numel(z, (Pieces){u, z->grid->local_rank * z->grid->nodes + node, 1});
}

void delta_layout(ZeroPP *z) {
  size_t at = 0;
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    u->delta_at = at;
    u->delta_room = room_of(u->owned);
    at += u->delta_room;
    for (int n = 0; n < z->grid->nodes; n++) u->delta_most += room_of(piece_numel(z, u, n));
  }
}

static size_t wire_bytes(const ZeroPP *z) {
  const Unit *last = &z->units[z->n_units - 1];
  return z->n_units ? last->delta_at + last->delta_room : 0;
}

static size_t numbers_bytes(const ZeroPP *z) {
  return (size_t)z->n_units * (sizeof(DeltaSize) + sizeof(uint64_t));
}

size_t delta_bytes(const ZeroPP *z) { return wire_bytes(z) + numbers_bytes(z); }

void delta_open(ZeroPP *z) {
  Delta *d = mem_zalloc(1, sizeof *d);
  size_t n = (size_t)z->n_units;
  d->wire = device_alloc(z->device, wire_bytes(z));
  d->sizes = device_alloc(z->device, n * sizeof *d->sizes);
  d->sums = device_alloc(z->device, n * sizeof *d->sums);
  d->bytes = mem_zalloc(n * (size_t)z->grid->nodes, sizeof *d->bytes);
  z->delta = d;
}

void delta_close(ZeroPP *z) {
  if (!z->delta) return;
  device_free(z->device, z->delta->wire);
  device_free(z->device, z->delta->sizes);
  device_free(z->device, z->delta->sums);
  free(z->delta->bytes);
  free(z->delta);
}

/* ---- pieces of the secondary: BF16, one behind another ---- */

static Tensor secondary_piece(const ZeroPP *z, const Unit *u, int node) {
  char *at = u->secondary;
  for (int n = 0; n < node; n++)
    at += message_pieces(z, &u->message[MSG_SECONDARY], z->grid->local_rank)[n];
  return tensor_1d(at, DT_BF16, piece_numel(z, u, node));
}

static Tensor secondary_slice(const Unit *u) {
  return tensor_1d(u->secondary, DT_BF16, u->slice_numel);
}

/* Everything of every node: [nodes][n_units], given this node's. */
static void share(const ZeroPP *z, const uint64_t *own, uint64_t *all) {
  size_t n = (size_t)z->grid->nodes;
  size_t *counts = mem_alloc(n, sizeof *counts);
  for (size_t i = 0; i < n; i++) counts[i] = (size_t)z->n_units * sizeof *own;
  comm_all_gather(z->grid->inter, own, all, counts);
  free(counts);
}

int delta_mismatch(const ZeroPP *z) {
  size_t n = (size_t)z->n_units, nodes = (size_t)z->grid->nodes;
  Tensor *slices = mem_alloc(n, sizeof *slices);
  uint64_t *own = mem_alloc(n, sizeof *own), *all = mem_alloc(n * nodes, sizeof *all);
  int found = -1;
  for (size_t i = 0; i < n; i++) slices[i] = secondary_slice(&z->units[i]);
  z->ops->checksum(z->device, z->n_units, slices, z->delta->sums);
  device_download(z->device, own, z->delta->sums, n * sizeof *own);
  share(z, own, all);
  for (size_t i = 0; i < n * nodes && found < 0; i++)
    if (all[i] != all[i % n]) found = (int)(i % n);
  free(slices);
  free(own);
  free(all);
  return found;
}

static bool all_delivered(const ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++)
    if (z->units[i].secondary_version != z->delta->version) return false;
  return z->delta->version > 0;
}

static void check_now_and_then(const ZeroPP *z) {
  int64_t every = z->cfg.refresh_check;
  if (every == 0 || z->delta->refreshes % every != 0 || !all_delivered(z)) return;
  int unit = delta_mismatch(z);
  if (unit < 0) return;
  die("refresh: the nodes hold different weights of unit %d (%s...), slice %d", unit,
      engine_unit_name(z, &z->units[unit]), z->grid->local_rank);
}

/* ---- a new version ---- */

static void encode_all(ZeroPP *z, Memory from) {
  Delta *d = z->delta;
  DeltaPart *parts = mem_zalloc((size_t)z->n_units, sizeof *parts);
  for (int i = 0; i < z->n_units; i++) {
    const Unit *u = &z->units[i];
    char *now = (char *)from.x + (size_t)u->shard * dtype_size(from.type);
    bool follows = u->secondary_version > 0 && u->secondary_version == d->version;
    parts[i] = (DeltaPart){.now = tensor_1d(now, from.type, u->owned),
                           .last = secondary_piece(z, u, z->grid->node),
                           .wire = d->wire + u->delta_at,
                           .room = follows ? u->delta_room : 0};
  }
  z->ops->delta_encode(z->device, z->n_units, parts, d->sizes);
  free(parts);
}

/* This rank's piece of a unit as int8: a row's last block may be short, so it is by rows. */
static uint64_t int8_bytes(const ZeroPP *z, const Unit *u) {
  int64_t block = z->cfg.block, scale = (int64_t)dtype_size(z->cfg.scale), bytes = 0;
  const Slot *slot = u->slots + pieces_own(z, u).first * u->count;
  for (int i = 0; i < u->count; i++) {
    WireSpan s = slot[i].span;
    int64_t row_blocks = (s.width + block - 1) / block;
    bytes += s.count + (s.count * row_blocks + s.width - 1) / s.width * scale;
  }
  return (uint64_t)bytes;
}

/* Sizes of all nodes, and what of this one's will be sent whole. */
static void share_sizes(ZeroPP *z) {
  Delta *d = z->delta;
  DeltaSize *sizes = mem_alloc((size_t)z->n_units, sizeof *sizes);
  uint64_t *own = mem_alloc((size_t)z->n_units, sizeof *own);
  device_download(z->device, sizes, d->sizes, (size_t)z->n_units * sizeof *sizes);
  for (int i = 0; i < z->n_units; i++) {
    const Unit *u = &z->units[i];
    bool follows = u->secondary_version > 0 && u->secondary_version == d->version;
    own[i] = follows && sizes[i].bytes <= u->delta_room ? sizes[i].bytes + 1 : SEND_WHOLE;
    d->count.weights += (uint64_t)u->owned;
    d->count.dense_bytes += 2 * (uint64_t)u->owned;
    d->count.int8_bytes += int8_bytes(z, u);
    if (follows) d->count.changed += sizes[i].changed;
    if (!follows) d->count.changed += (uint64_t)u->owned;
  }
  share(z, own, d->bytes);
  free(sizes);
  free(own);
}

static uint64_t stream_bytes(const ZeroPP *z, const Unit *u, int node) {
  return z->delta->bytes[(ptrdiff_t)node * z->n_units + (u - z->units)];
}

static bool goes_whole(const ZeroPP *z, const Unit *u) {
  for (int n = 0; n < z->grid->nodes; n++)
    if (stream_bytes(z, u, n) == SEND_WHOLE) return true;
  return false;
}

/* Streams of the other nodes patch their pieces. */
static void apply(void *arg) {
  const UnitWork *w = arg;
  const ZeroPP *z = w->z;
  DeltaPart *parts = mem_zalloc((size_t)z->grid->nodes, sizeof *parts);
  char *wire = w->u->gather.slice;
  int count = 0;
  for (int n = 0; n < z->grid->nodes; n++) {
    size_t bytes = stream_bytes(z, w->u, n) - 1;
    if (n != z->grid->node)
      parts[count++] =
          (DeltaPart){.last = secondary_piece(z, w->u, n), .wire = wire, .room = bytes};
    wire += bytes;
  }
  z->ops->delta_apply(z->device, count, parts);
  free(parts);
}

static void start_streams(ZeroPP *z, Unit *u) {
  Comm *inter = z->grid->dev_inter;
  size_t *bytes = mem_alloc((size_t)z->grid->nodes, sizeof *bytes);
  for (int n = 0; n < z->grid->nodes; n++) bytes[n] = stream_bytes(z, u, n) - 1;
  u->gather.slice = pool_take(&z->pool, POOL_SLICE, u->delta_most);
  comm_start_all_gather(inter, z->delta->wire + u->delta_at, u->gather.slice, bytes);
  u->gather.ticket = comm_start_work(inter, COLL_ALL_GATHER, apply, &u->work);
  z->delta->count.bytes += bytes[z->grid->node];
  free(bytes);
}

void delta_start(ZeroPP *z, Unit *u, Memory from) {
  Delta *d = z->delta;
  if (d->version != z->version) {
    check_now_and_then(z);
    encode_all(z, from);
    share_sizes(z);
    d->version = z->version;
    d->refreshes++;
  }
  if (goes_whole(z, u)) {
    Tensor own = secondary_piece(z, u, z->grid->node);
    const size_t *bytes = message_pieces(z, &u->message[MSG_SECONDARY], z->grid->local_rank);
    u->gather.ticket = comm_start_all_gather(z->grid->dev_inter, own.data, u->secondary, bytes);
    d->count.bytes += bytes[z->grid->node];
  } else {
    start_streams(z, u);
  }
}

ZeroPPRefresh zeropp_refreshed(const ZeroPP *z) {
  return z->delta ? z->delta->count : (ZeroPPRefresh){0};
}
