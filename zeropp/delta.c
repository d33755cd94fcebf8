/* delta: refreshes of the secondary that send the BF16 weights that changed, without loss.
 *
 * A rank's own piece of the secondary is what the other nodes hold of it: it was sent, or made from
 * what was sent. The first gather after a write encodes the pieces of all units against it, and the
 * sizes of the streams go round once; a unit's stream follows at its gather and patches the
 * secondaries. Where replicas hold rounded weights, the pieces are encoded against a copy of what
 * they would be if exact, for their sizes alone. refresh_rule.c says what is sent.
 *
 * Encoding moves the own piece on, also of a unit that then is never gathered in this version: the
 * others miss that step, so the unit goes whole next time.
 */
#include <math.h>
#include <stdlib.h>

#include "zeropp/internal.h"

enum { ROOM_MIN = 64 };

typedef struct Delta {
  char *wire;        /* this rank's streams of all units */
  char *exact;       /* its pieces in BF16, laid out like its shards, of units that are coded; NULL
                        where none will be */
  DeltaSize *sizes;  /* device memory, [n_units] */
  uint64_t *bytes;   /* [nodes][n_units]: of streams, whether they travel or not */
  uint64_t *changed; /* [n_units]: weights of this rank that will be others */
  RefreshRule *rule; /* [n_units] */
  RefreshForm *form; /* [n_units], of this version */
  uint64_t version;  /* that was encoded; 0: none since the masters were written */
  int64_t refreshes;
  ZeroPPRefresh count;
} Delta;

bool delta_is_on(const ZeroPP *z) {
  return z->cfg.refresh && z->cfg.trainable && z->cfg.hpz == HPZ_ON && !z->alias_full &&
         z->grid->nodes > 1;
}

bool delta_keeps_rules(const ZeroPP *z) { return delta_is_on(z) && z->cfg.qwz != WIRE_F32; }
RefreshRule *delta_rules(ZeroPP *z) { return z->delta->rule; }

static int64_t piece_numel(const ZeroPP *z, const Unit *u, int node) {
  return pieces_numel(z, (Pieces){u, z->grid->local_rank * z->grid->nodes + node, 1});
}

/* Of the stream of a node's piece of this rank's slice: what the piece takes in the dense form, or
 * a quarter of its weights, beyond which a stream is no shorter than half of what it replaces. */
static size_t room_of(const ZeroPP *z, const Unit *u, int node) {
  size_t n = (size_t)piece_numel(z, u, node), blocks = (n + DELTA_BLOCK - 1) / DELTA_BLOCK;
  size_t bytes = n / 2 + 8 * blocks;
  if (z->cfg.refresh == REFRESH_AUTO)
    bytes = message_pieces(z, &u->message[MSG_WEIGHTS], z->grid->local_rank)[node];
  return (bytes + ROOM_MIN + 15) / 16 * 16;
}

void delta_layout(ZeroPP *z) {
  size_t at = 0;
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    u->delta_at = at;
    u->delta_room = room_of(z, u, z->grid->node);
    at += u->delta_room;
    for (int n = 0; n < z->grid->nodes; n++) u->delta_most += room_of(z, u, n);
  }
}

static size_t wire_bytes(const ZeroPP *z) {
  const Unit *last = &z->units[z->n_units - 1];
  return z->n_units ? last->delta_at + last->delta_room : 0;
}

static size_t exact_bytes(const ZeroPP *z) {
  return delta_keeps_rules(z) ? 2 * (size_t)z->shard_numel : 0;
}

/* The sums of a check come and go. */
size_t delta_bytes(const ZeroPP *z) {
  size_t numbers = sizeof(DeltaSize) + (size_t)z->grid->nodes * sizeof(uint64_t);
  return wire_bytes(z) + exact_bytes(z) + (size_t)z->n_units * numbers;
}

void delta_open(ZeroPP *z) {
  Delta *d = mem_zalloc(1, sizeof *d);
  size_t n = (size_t)z->n_units;
  d->wire = device_alloc(z->device, wire_bytes(z));
  d->sizes = device_alloc(z->device, n * sizeof *d->sizes);
  if (exact_bytes(z)) d->exact = device_alloc(z->device, exact_bytes(z));
  d->bytes = mem_zalloc(n * (size_t)z->grid->nodes, sizeof *d->bytes);
  d->changed = mem_zalloc(n, sizeof *d->changed);
  d->rule = mem_zalloc(n, sizeof *d->rule);
  d->form = mem_zalloc(n, sizeof *d->form);
  z->delta = d;
}

void delta_close(ZeroPP *z) {
  Delta *d = z->delta;
  if (!d) return;
  device_free(z->device, d->wire);
  device_free(z->device, d->sizes);
  device_free(z->device, d->exact);
  free(d->bytes);
  free(d->changed);
  free(d->rule);
  free(d->form);
  free(d);
}

void delta_forget(ZeroPP *z) { z->delta->version = 0; }

/* ---- a new version ---- */

Tensor delta_secondary(const ZeroPP *z, const Unit *u, int node) {
  char *at = u->secondary;
  for (int n = 0; n < node; n++)
    at += message_pieces(z, &u->message[MSG_SECONDARY], z->grid->local_rank)[n];
  return tensor_1d(at, DT_BF16, piece_numel(z, u, node));
}

/* This rank's piece as it was in the last version, in BF16. */
static Tensor last_exact(const ZeroPP *z, const Unit *u, bool coded) {
  if (!coded) return delta_secondary(z, u, z->grid->node);
  return tensor_1d(z->delta->exact + 2 * u->shard, DT_BF16, u->owned);
}

/* Whether exact replicas hold what was encoded last. */
static bool follows(const ZeroPP *z, const Unit *u) {
  return u->secondary_version > 0 && u->secondary_version == z->delta->version;
}

static void check_now_and_then(const ZeroPP *z) {
  int64_t every = z->cfg.refresh_check;
  if (every == 0 || z->delta->refreshes % every != 0) return;
  for (int i = 0; i < z->n_units; i++)
    if (!follows(z, &z->units[i])) return;
  DeltaMismatch m = delta_mismatch(z);
  if (m.unit < 0) return;
  die("refresh: of unit %d (%s...) rank %d holds other weights than rank %d, which owns them",
      m.unit, engine_unit_name(z, &z->units[m.unit]), m.holder, m.owner);
}

static void encode_all(ZeroPP *z, Memory from) {
  Delta *d = z->delta;
  DeltaPart *parts = mem_zalloc((size_t)z->n_units, sizeof *parts);
  for (int i = 0; i < z->n_units; i++) {
    const Unit *u = &z->units[i];
    char *now = (char *)from.x + (size_t)u->shard * dtype_size(from.type);
    bool coded = d->rule[i].coded;
    parts[i] = (DeltaPart){.now = tensor_1d(now, from.type, u->owned),
                           .last = last_exact(z, u, coded),
                           .wire = d->wire + u->delta_at,
                           .room = !coded && follows(z, u) ? u->delta_room : 0};
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

/* Sizes of this rank's streams go to the other nodes. */
static void share_sizes(ZeroPP *z) {
  Delta *d = z->delta;
  DeltaSize *sizes = mem_alloc((size_t)z->n_units, sizeof *sizes);
  uint64_t *own = mem_alloc((size_t)z->n_units, sizeof *own);
  device_download(z->device, sizes, d->sizes, (size_t)z->n_units * sizeof *sizes);
  for (int i = 0; i < z->n_units; i++) {
    const Unit *u = &z->units[i];
    bool counted = d->rule[i].coded ? d->version > 0 : follows(z, u);
    own[i] = sizes[i].bytes;
    d->changed[i] = counted ? sizes[i].changed : (uint64_t)u->owned;
  }
  delta_share(z, own, z->n_units, d->bytes);
  free(sizes);
  free(own);
}

static size_t stream_bytes(const ZeroPP *z, const Unit *u, int node) {
  return z->delta->bytes[(ptrdiff_t)node * z->n_units + (u - z->units)];
}

/* All streams of a unit, of all ranks; infinite where one does not fit. [n_units] */
static void sum_streams(const ZeroPP *z, double *sum) {
  for (int i = 0; i < z->n_units; i++) {
    const Unit *u = &z->units[i];
    sum[i] = 0;
    for (int n = 0; n < z->grid->nodes; n++)
      sum[i] +=
          stream_bytes(z, u, n) <= room_of(z, u, n) ? (double)stream_bytes(z, u, n) : INFINITY;
  }
  if (z->grid->local > 1) comm_all_reduce_f64(z->grid->intra, sum, z->n_units, false);
}

/* The rule of every unit takes a step. What the next changes are counted from stays where the rule
 * looks for it. */
static void choose_forms(ZeroPP *z) {
  Delta *d = z->delta;
  double *changes = mem_alloc((size_t)z->n_units, sizeof *changes);
  sum_streams(z, changes);
  for (int i = 0; i < z->n_units; i++) {
    const Unit *u = &z->units[i];
    bool was = d->rule[i].coded;
    RefreshCosts c = {.changes = changes[i],
                      .exact = (int64_t)u->message[MSG_SECONDARY].total,
                      .coded = (int64_t)u->message[MSG_WEIGHTS].total,
                      .known = d->version > 0,
                      .follows = follows(z, u)};
    d->form[i] = refresh_choose(&d->rule[i], c);
    if (d->rule[i].coded == was) continue;
    Tensor from = last_exact(z, u, was);
    device_copy(z->device, last_exact(z, u, !was).data, from.data, tensor_bytes(from));
  }
  free(changes);
}

void delta_choose(ZeroPP *z, Memory from) {
  Delta *d = z->delta;
  if (d->version == z->version) return;
  check_now_and_then(z);
  encode_all(z, from);
  share_sizes(z);
  choose_forms(z);
  d->version = z->version;
  d->refreshes++;
}

/* ---- a unit's refresh ---- */

/* Streams of the other nodes patch their pieces. */
static void apply(void *arg) {
  const UnitWork *w = arg;
  const ZeroPP *z = w->z;
  DeltaPart *parts = mem_zalloc((size_t)z->grid->nodes, sizeof *parts);
  char *wire = w->u->gather.slice;
  int count = 0;
  for (int n = 0; n < z->grid->nodes; n++) {
    size_t bytes = stream_bytes(z, w->u, n);
    if (n != z->grid->node)
      parts[count++] =
          (DeltaPart){.last = delta_secondary(z, w->u, n), .wire = wire, .room = bytes};
    wire += bytes;
  }
  z->ops->delta_apply(z->device, count, parts);
  free(parts);
}

static void start_changes(ZeroPP *z, Unit *u) {
  Comm *inter = z->grid->dev_inter;
  size_t *bytes = mem_alloc((size_t)z->grid->nodes, sizeof *bytes);
  for (int n = 0; n < z->grid->nodes; n++) bytes[n] = stream_bytes(z, u, n);
  u->gather.slice = pool_take(&z->pool, POOL_SLICE, u->delta_most);
  comm_start_all_gather(inter, z->delta->wire + u->delta_at, u->gather.slice, bytes);
  u->gather.ticket = comm_start_work(inter, COLL_ALL_GATHER, apply, &u->work);
  free(bytes);
}

static void start_exact(const ZeroPP *z, Unit *u) {
  Tensor own = delta_secondary(z, u, z->grid->node);
  const size_t *bytes = message_pieces(z, &u->message[MSG_SECONDARY], z->grid->local_rank);
  u->gather.ticket = comm_start_all_gather(z->grid->dev_inter, own.data, u->secondary, bytes);
}

/* Bytes of this rank's piece. */
static size_t piece_bytes(const ZeroPP *z, const Unit *u, RefreshForm form) {
  int node = z->grid->node;
  if (form == REFRESH_CHANGES) return stream_bytes(z, u, node);
  const Message *m = &u->message[form == REFRESH_EXACT ? MSG_SECONDARY : MSG_WEIGHTS];
  return message_pieces(z, m, z->grid->local_rank)[node];
}

static void count(const ZeroPP *z, const Unit *u, RefreshForm form) {
  ZeroPPRefresh *c = &z->delta->count;
  c->weights += (uint64_t)u->owned;
  c->changed += z->delta->changed[u - z->units];
  c->bytes += piece_bytes(z, u, form);
  c->dense_bytes += 2 * (uint64_t)u->owned;
  c->int8_bytes += int8_bytes(z, u);
  c->delta_units += form == REFRESH_CHANGES;
  c->dense_units += form != REFRESH_CHANGES;
}

bool delta_start(ZeroPP *z, Unit *u) {
  Delta *d = z->delta;
  RefreshForm form = d->form[u - z->units];
  require(d->version == z->version);
  if (form == REFRESH_CHANGES) start_changes(z, u);
  if (form == REFRESH_EXACT) start_exact(z, u);
  count(z, u, form);
  return form != REFRESH_CODED;
}

ZeroPPRefresh zeropp_refreshed(const ZeroPP *z) {
  return z->delta ? z->delta->count : (ZeroPPRefresh){0};
}
