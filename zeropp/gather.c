/* gather: full weights from the masters, in two hops, started early or at once.
 *
 *   masters --(qwZ)--> this rank's slice --> all slices --> full weights
 *            between nodes            within the node
 *
 * Every byte enters a node once. With hpZ the slice stays, as the secondary, and the first hop is
 * taken once for each version of the weights: by the first gather after a write. A secondary of
 * another version is never read. All ranks round alike, their own pieces too, so all hold the same
 * weights; below stage 3 the full weights themselves stay until the next version. Where every rank
 * has the whole model, and rounding to BF16 is all that is to be done, AdamW does it: a gather then
 * does nothing.
 *
 * Gathers are collectives over all ranks: every rank makes the same calls in the same order.
 */
#include "zeropp/internal.h"

/* ---- the first hop ---- */

/* What weights are read from: the masters, or what they were rounded to already. */
static Memory source(ZeroPP *z) {
  if (!z->rounded) return (Memory){LIE_SHARD, DT_F32, z->shard[STATE_MASTER]};
  if (z->rounded_version != z->version) {
    peers_before_write(z);
    numbers_round(z, engine_shard(z, STATE_MASTER), z->rounded);
    z->rounded_version = z->version;
  }
  return (Memory){LIE_SHARD, DT_BF16, z->rounded};
}

/* This rank's slice of a unit to `slice`, which has the message's size. */
static void start_slice(const ZeroPP *z, Unit *u, MessageKind kind, Memory from, char *slice) {
  const Grid *g = z->grid;
  const size_t *bytes = message_pieces(z, &u->message[kind], g->local_rank);
  char *own = slice;
  for (int n = 0; n < g->node; n++) own += bytes[n];
  pieces_encode(z, pieces_own(z, u), kind, from, NULL, own);
  u->gather.ticket = comm_start_all_gather(g->dev_inter, own, slice, bytes);
}

/* What came quantized, once dequantized, to the format of the secondary. */
static void convert_slice(void *arg) {
  const UnitWork *w = arg;
  pieces_recode(w->z, pieces_slice(w->z, w->u), MSG_WEIGHTS, w->u->gather.slice, 1, 0,
                MSG_SECONDARY, NULL, w->u->secondary);
}

static void start_dense(ZeroPP *z, Unit *u) {
  const Message *m = &u->message[MSG_WEIGHTS];
  if (m->format.kind == u->message[MSG_SECONDARY].format.kind) {
    start_slice(z, u, MSG_WEIGHTS, source(z), u->secondary);
  } else {
    u->gather.slice = pool_take(&z->pool, POOL_SLICE, m->slice[z->grid->local_rank]);
    start_slice(z, u, MSG_WEIGHTS, source(z), u->gather.slice);
    u->gather.ticket =
        comm_start_work(z->grid->dev_inter, COLL_ALL_GATHER, convert_slice, &u->work);
  }
}

static void start_refresh(ZeroPP *z, Unit *u) {
  require(z->shard[STATE_MASTER]);
  if (z->delta) delta_choose(z, source(z));
  comm_new_chain();
  if (!z->delta || !delta_start(z, u)) start_dense(z, u);
  u->secondary_version = z->version;
}

/* ---- both ---- */

/* All slices to u->gather.whole, given this rank's in `slice` (which may lie in its place there).
 */
static void start_whole(const ZeroPP *z, Unit *u, const Message *m, const char *slice) {
  u->gather.ticket = comm_start_all_gather(z->grid->dev_intra, slice, u->gather.whole, m->slice);
}

static void start_gather(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  GatherFlight *f = &u->gather;
  *f = (GatherFlight){.active = true, .kind = z->cfg.hpz ? MSG_SECONDARY : MSG_WEIGHTS};
  const Message *m = &u->message[f->kind];
  if (z->cfg.hpz && u->secondary_version != z->version) start_refresh(z, u);
  if (z->cfg.hpz && g->local == 1) return;
  if (z->direct) {
    Memory from = source(z);
    if (z->rounded && !z->peers) peers_open(z);
    if (gather_take_start(z, u, from)) return;
    f->full = pool_take(&z->pool, POOL_FULL, unit_weight_bytes(z, u));
    if (peers_start(z, u)) return;
    f->ticket = gather_direct_start(z, u, from, f->full);
    if (m->total == 0) return;
  }
  f->whole = pool_take(&z->pool, POOL_WHOLE, m->total);
  char *slice = f->whole + message_slice_at(z, m, g->local_rank);
  if (!z->cfg.hpz) {
    comm_new_chain();
    start_slice(z, u, MSG_WEIGHTS, source(z), slice);
  }
  start_whole(z, u, m, z->cfg.hpz ? u->secondary : slice);
}

static void give_full(ZeroPP *z, char *full) {
  if (full && !shared_give(&z->full, full)) pool_give(&z->pool, full);
}

static void give_flight(ZeroPP *z, Unit *u) {
  GatherFlight *f = &u->gather;
  give_full(z, f->full);
  if (f->whole) pool_give(&z->pool, f->whole);
  if (f->slice) pool_give(&z->pool, f->slice);
  *f = (GatherFlight){0};
}

static void decode_full(ZeroPP *z, Unit *u, MessageKind kind, char *message) {
  if (!u->full) u->full = pool_take(&z->pool, POOL_FULL, unit_weight_bytes(z, u));
  pieces_decode(z, pieces_all(z, u), kind, message, 1, 0, false,
                (Memory){LIE_FULL, z->cfg.compute, u->full});
}

static void finish_gather(ZeroPP *z, Unit *u) {
  GatherFlight *f = &u->gather;
  comm_wait(f->ticket);
  require(!z->cfg.hpz || u->secondary_version == z->version);
  if (f->full) u->full = f->full;
  f->full = NULL;
  char *message = f->whole ? f->whole : u->secondary;
  if (message && z->rollout) rollout_take(z, u, f->kind, message);
  if (message) decode_full(z, u, f->kind, message);
  u->full_version = z->version;
  give_flight(z, u);
}

/* Stage 0 keeps whole masters: only the rounding of the wire is left to do. */
static void round_whole(ZeroPP *z, Unit *u) {
  char *message = pool_take(&z->pool, POOL_WHOLE, u->message[MSG_WEIGHTS].total);
  Memory master = {LIE_FULL, DT_F32, engine_part(z, STATE_MASTER, u->shard, 0).data};
  pieces_encode(z, pieces_all(z, u), MSG_WEIGHTS, master, NULL, message);
  decode_full(z, u, MSG_WEIGHTS, message);
  pool_give(&z->pool, message);
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
  if (rollout_serves(z)) return;
  if (!u->gather.active && !is_at_hand(z, u)) start_gather(z, u);
}

void zeropp_gather(ZeroPP *z, int unit) {
  Unit *u = engine_unit(z, unit);
  if (z->version == 0)
    die("gather of unit %d (%s...): no weights were written yet", unit, engine_unit_name(z, u));
  if (rollout_serves(z)) {
    rollout_open(z, u);
    return;
  }
  if (u->holds > 0 || (u->full && u->full_version == z->version)) {
    u->holds++;
    return;
  }
  if (z->alias_full) {
    Memory all = source(z);
    u->full = (char *)all.x + (size_t)u->shard * dtype_size(all.type);
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
  if (rollout_serves(z)) {
    rollout_close(z, u);
    return;
  }
  if (!z->alias_full && z->keeps_full) return;
  if (!z->alias_full) give_full(z, u->full);
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

void gather_refresh(ZeroPP *z) {
  for (int i = 0; i < z->n_units && z->secondary; i++) {
    Unit *u = &z->units[i];
    if (u->secondary_version == z->version) continue;
    u->gather = (GatherFlight){.active = true};
    start_refresh(z, u);
    comm_wait(u->gather.ticket);
    give_flight(z, u);
  }
}

/* Not where a refresh must know all changes first, nor where ranks read each other's memory, which
 * is complete on all of them or not at all. */
int gather_early_units(const ZeroPP *z) {
  bool early = z->cfg.stage == 3 && z->grid->world > 1 && comm_queue_runs() && !z->delta &&
               !z->rounded && z->ahead > 0;
  int n = early ? 1 + z->ahead : 0;
  return n < z->n_units ? n : z->n_units;
}

/* Frozen: nobody will change the masters any more, and what they were rounded to is all that is
 * read. */
static void keep_rounded_alone(ZeroPP *z) {
  if (z->rounded) source(z);
  gather_refresh(z);
  engine_drop_kind(z, STATE_MASTER);
}

void gather_before_step(ZeroPP *z) {
  drop_flights(z);
  peers_before_write(z);
}

void gather_new_version(ZeroPP *z) {
  if (z->rollout) die("new weights: a rollout still holds the old ones");
  engine_require_sharded(z, "new weights");
  drop_flights(z);
  z->version++;
  bool alone = z->secondary || (z->rounded && z->alias_full);
  if (alone && !z->cfg.trainable && z->shard[STATE_MASTER]) keep_rounded_alone(z);
}

void gather_restore_master(ZeroPP *z) {
  if (z->shard[STATE_MASTER]) return;
  const Grid *g = z->grid;
  engine_add_kind(z, STATE_MASTER);
  Memory master = {LIE_SHARD, DT_F32, z->shard[STATE_MASTER]};
  if (!z->secondary) numbers_widen(z, z->rounded, engine_shard(z, STATE_MASTER));
  for (int i = 0; i < z->n_units && z->secondary; i++) {
    Unit *u = &z->units[i];
    char *own = u->secondary;
    for (int n = 0; n < g->node; n++)
      own += message_pieces(z, &u->message[MSG_SECONDARY], g->local_rank)[n];
    pieces_decode(z, pieces_own(z, u), MSG_SECONDARY, own, 1, 0, false, master);
  }
}

void gather_settle(ZeroPP *z) {
  if (z->delta && z->version > 0) delta_choose(z, source(z));
}

void gather_replicate(ZeroPP *z, StateKind kind) {
  for (int i = 0; i < z->n_units && z->grid->world > 1; i++) {
    Unit *u = &z->units[i];
    const Message *m = &u->message[MSG_EXACT];
    char *whole = pool_take(&z->pool, POOL_WHOLE, m->total);
    char *slice = whole + message_slice_at(z, m, z->grid->local_rank);
    u->gather = (GatherFlight){.active = true, .whole = whole, .kind = MSG_EXACT};
    start_slice(z, u, MSG_EXACT, (Memory){LIE_SHARD, DT_F32, z->shard[kind]}, slice);
    start_whole(z, u, m, slice);
    comm_wait(u->gather.ticket);
    pieces_decode(z, pieces_all(z, u), MSG_EXACT, whole, 1, 0, false,
                  (Memory){LIE_FULL, DT_F32, engine_part(z, kind, u->shard, 0).data});
    give_flight(z, u);
  }
}

void gather_close(ZeroPP *z) {
  drop_flights(z);
  for (int i = 0; i < z->n_units && !z->alias_full; i++) give_full(z, z->units[i].full);
}
