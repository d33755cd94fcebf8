/* gather: full weights from the masters, in two hops, started early or at once.
 *
 *   masters --(qwZ)--> this rank's slice --> all slices --> full weights
 *            between nodes            within the node
 *
 * Every byte enters a node once. With hpZ the slice stays, as the secondary, and the first hop is
 * taken once for each version of the weights: by the first gather after a write. A secondary of
 * another version is never read. All ranks round alike, their own pieces too, so all hold the same
 * weights; below stage 3 the full weights themselves stay until the next version.
 *
 * Gathers are collectives over all ranks: every rank makes the same calls in the same order.
 */
#include "zeropp/internal.h"

static bool keeps_full(const ZeroPP *z) { return z->cfg.stage < 3; }

/* ---- the first hop ---- */

/* This rank's slice of a unit to `slice`, which has the message's size. */
static void start_slice(const ZeroPP *z, Unit *u, const Message *m, Lie lie, float *from,
                        char *slice) {
  const Grid *g = z->grid;
  const size_t *bytes = message_pieces(z, m, g->local_rank);
  char *own = slice;
  for (int n = 0; n < g->node; n++) own += bytes[n];
  piece_encode(z, (Piece){u, g->node, g->local_rank}, m->format, lie, from, NULL, own);
  u->gather.ticket = comm_start_all_gather(g->inter, own, slice, bytes);
}

/* What came quantized, once dequantized, to the format of the secondary. */
static void convert_slice(void *arg) {
  const UnitWork *w = arg;
  Unit *u = w->u;
  int j = w->z->grid->local_rank;
  const Message *from = &u->message[MSG_WEIGHTS], *to = &u->message[MSG_SECONDARY];
  char *in = u->gather.slice, *out = u->secondary;
  for (int n = 0; n < w->z->grid->nodes; n++) {
    piece_recode(w->z, (Piece){u, n, j}, from->format, in, 1, 0, to->format, NULL, out);
    in += message_pieces(w->z, from, j)[n];
    out += message_pieces(w->z, to, j)[n];
  }
}

static void start_refresh(ZeroPP *z, Unit *u) {
  const Message *m = &u->message[MSG_WEIGHTS];
  float *master = z->shard[STATE_MASTER];
  require(master);
  if (m->format.kind == u->message[MSG_SECONDARY].format.kind) {
    start_slice(z, u, m, LIE_SHARD, master, u->secondary);
  } else {
    u->gather.slice_bytes = m->slice[z->grid->local_rank];
    u->gather.slice = pool_take(&z->pool, u->gather.slice_bytes);
    start_slice(z, u, m, LIE_SHARD, master, u->gather.slice);
    u->gather.ticket = comm_start_work(z->grid->inter, COLL_ALL_GATHER, convert_slice, &u->work);
  }
  u->secondary_version = z->version;
}

/* ---- both ---- */

/* All slices to u->gather.whole, given this rank's in `slice` (which may lie in its place there).
 */
static void start_whole(const ZeroPP *z, Unit *u, const Message *m, const char *slice) {
  u->gather.ticket = comm_start_all_gather(z->grid->intra, slice, u->gather.whole, m->slice);
}

static void start_gather(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  GatherFlight *f = &u->gather;
  *f = (GatherFlight){.active = true, .kind = z->cfg.hpz ? MSG_SECONDARY : MSG_WEIGHTS};
  const Message *m = &u->message[f->kind];
  if (z->cfg.hpz && u->secondary_version != z->version) start_refresh(z, u);
  if (z->cfg.hpz && g->local == 1) return;
  f->whole = pool_take(&z->pool, m->total);
  char *slice = f->whole + message_slice_at(m, g->local_rank);
  if (!z->cfg.hpz) start_slice(z, u, m, LIE_SHARD, z->shard[STATE_MASTER], slice);
  start_whole(z, u, m, z->cfg.hpz ? u->secondary : slice);
}

static void give_flight(ZeroPP *z, Unit *u) {
  GatherFlight *f = &u->gather;
  if (f->whole) pool_give(&z->pool, f->whole, u->message[f->kind].total);
  if (f->slice) pool_give(&z->pool, f->slice, f->slice_bytes);
  *f = (GatherFlight){0};
}

static void finish_gather(ZeroPP *z, Unit *u) {
  GatherFlight *f = &u->gather;
  const Message *m = &u->message[f->kind];
  comm_wait(f->ticket);
  require(!z->cfg.hpz || u->secondary_version == z->version);
  if (!u->full) u->full = pool_take(&z->pool, unit_full_bytes(u));
  unit_decode(z, u, m, f->whole ? f->whole : u->secondary, u->full);
  u->full_version = z->version;
  give_flight(z, u);
}

/* Stage 0 keeps whole masters: only the rounding of the wire is left to do. */
static void round_whole(ZeroPP *z, Unit *u) {
  const Message *m = &u->message[MSG_WEIGHTS];
  char *message = pool_take(&z->pool, m->total);
  if (!u->full) u->full = pool_take(&z->pool, unit_full_bytes(u));
  unit_encode(z, u, m, z->shard[STATE_MASTER] + u->shard, NULL, message);
  unit_decode(z, u, m, message, u->full);
  pool_give(&z->pool, message, m->total);
  u->full_version = z->version;
}

/* Whether the weights are there, or need no message to be. */
static bool is_at_hand(const ZeroPP *z, const Unit *u) {
  return u->holds > 0 || z->alias_full || z->cfg.stage == 0 ||
         (u->full && u->full_version == z->version);
}

void zeropp_prefetch(ZeroPP *z, int unit) {
  Unit *u = engine_unit(z, unit);
  if (z->version == 0)
    die("prefetch of unit %d (%s...): no weights were written yet", unit, engine_unit_name(z, u));
  if (!u->gather.active && !is_at_hand(z, u)) start_gather(z, u);
}

void zeropp_gather(ZeroPP *z, int unit) {
  Unit *u = engine_unit(z, unit);
  if (z->version == 0)
    die("gather of unit %d (%s...): no weights were written yet", unit, engine_unit_name(z, u));
  if (u->holds > 0 || (u->full && u->full_version == z->version)) {
    u->holds++;
    return;
  }
  if (z->alias_full) {
    u->full = z->shard[STATE_MASTER] + u->shard;
  } else if (z->cfg.stage == 0) {
    round_whole(z, u);
  } else {
    if (!u->gather.active) start_gather(z, u);
    finish_gather(z, u);
  }
  u->holds++;
}

void zeropp_release(ZeroPP *z, int unit) {
  Unit *u = engine_unit(z, unit);
  if (u->holds == 0)
    die("release of unit %d (%s...), which no gather holds", unit, engine_unit_name(z, u));
  if (--u->holds > 0) return;
  if (!z->alias_full && keeps_full(z)) return;
  if (!z->alias_full) pool_give(&z->pool, u->full, unit_full_bytes(u));
  u->full = NULL;
}

void zeropp_gather_all(ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++) zeropp_gather(z, i);
}

void zeropp_release_all(ZeroPP *z) {
  for (int i = z->n_units - 1; i >= 0; i--) zeropp_release(z, i);
}

/* ---- new weights ---- */

/* A gather that was started brings weights that are no longer wanted. */
static void drop_flights(ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++) {
    if (!z->units[i].gather.active) continue;
    comm_wait(z->units[i].gather.ticket);
    give_flight(z, &z->units[i]);
  }
}

/* Frozen: nobody will change the masters any more, and the secondary is all that is read. */
static void keep_secondary_alone(ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    u->gather = (GatherFlight){.active = true};
    start_refresh(z, u);
    comm_wait(u->gather.ticket);
    give_flight(z, u);
  }
  device_free(z->device, z->shard[STATE_MASTER]);
  z->shard[STATE_MASTER] = NULL;
}

void gather_new_version(ZeroPP *z) {
  engine_require_sharded(z, "new weights");
  drop_flights(z);
  z->version++;
  if (z->secondary && !z->cfg.trainable && z->shard[STATE_MASTER]) keep_secondary_alone(z);
}

void gather_restore_master(ZeroPP *z) {
  if (z->shard[STATE_MASTER]) return;
  const Grid *g = z->grid;
  engine_add_kind(z, STATE_MASTER);
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    const Message *m = &u->message[MSG_SECONDARY];
    char *own = u->secondary;
    for (int n = 0; n < g->node; n++) own += message_pieces(z, m, g->local_rank)[n];
    piece_decode(z, (Piece){u, g->node, g->local_rank}, m->format, own, 1, 0, false, LIE_SHARD,
                 z->shard[STATE_MASTER]);
  }
}

void gather_replicate(ZeroPP *z, StateKind kind) {
  for (int i = 0; i < z->n_units && z->grid->world > 1; i++) {
    Unit *u = &z->units[i];
    const Message *m = &u->message[MSG_EXACT];
    char *whole = pool_take(&z->pool, m->total);
    char *slice = whole + message_slice_at(m, z->grid->local_rank);
    u->gather = (GatherFlight){.active = true, .whole = whole, .kind = MSG_EXACT};
    start_slice(z, u, m, LIE_SHARD, z->shard[kind], slice);
    start_whole(z, u, m, slice);
    comm_wait(u->gather.ticket);
    unit_decode(z, u, m, whole, z->shard[kind] + u->shard);
    give_flight(z, u);
  }
}

void gather_close(ZeroPP *z) {
  drop_flights(z);
  for (int i = 0; i < z->n_units && !z->alias_full; i++)
    if (z->units[i].full) pool_give(&z->pool, z->units[i].full, unit_full_bytes(&z->units[i]));
}
