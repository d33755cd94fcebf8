/* reduce: full gradients to the shards of their owners, in two hops (qgZ), behind compute.
 *
 *   full gradient --(1)--> sum over the node, this rank's slice --(2)--> sum over nodes, its piece
 *
 * Each hop is an all-to-all of messages that were quantized (or rounded) once; sums are in fp32 and
 * in rank order. The slices and pieces of the layout are the paper's reordering: a sum lands on its
 * owner. accumulate: node keeps the first sums in fp32 and takes the second hop once a step.
 * Stages 2 and 3 reduce every micro-batch; stages 0 and 1 keep local sums until the step. On a GPU,
 * on one node and unquantized, the first sums are the owners': there is no second rounding.
 *
 * Nothing is cleared that is overwritten: gradients and sums are `fresh` until somebody adds to
 * them, and get zeros only if nobody could overwrite them.
 *
 * A block with a NaN or an infinity travels as NaN, so what is not finite anywhere reaches the
 * norm. What is started here runs in the queue of collectives, the sums between hops too; nobody
 * reads what it writes (gradient shards, node sums) before reduce_finish.
 */
#include <stdlib.h>

#include "zeropp/internal.h"

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* ---- the queued work of both hops ---- */

static size_t own_slice_bytes(const ZeroPP *z, const Message *m) {
  return m->slice[z->grid->local_rank];
}

/* Error feedback: of the first hop for all a rank sends, of the second for its slice. */
static uint16_t *error_at(const ZeroPP *z, const Unit *u, int hop) {
  if (!z->error[hop]) return NULL;
  return z->error[hop] + (hop == 0 ? u->dense : u->slice);
}

static Memory sums_of(const ZeroPP *z) {
  return (Memory){LIE_SHARD, z->cfg.gradients, z->shard[STATE_GRAD]};
}

/* In: this rank's slice from every rank of the node. Out: its pieces, to be sent to their nodes. */
static void sum_node(void *arg) {
  const UnitWork *w = arg;
  const ReduceFlight *f = &w->u->reduce;
  pieces_recode(w->z, pieces_slice(w->z, w->u), MSG_GRADS, f->in, w->z->grid->local,
                own_slice_bytes(w->z, &w->u->message[MSG_GRADS]), MSG_GRADS,
                error_at(w->z, w->u, 1), f->out);
}

/* The same, kept in fp32. */
static void keep_node_sum(void *arg) {
  const UnitWork *w = arg;
  const ReduceFlight *f = &w->u->reduce;
  pieces_decode(w->z, pieces_slice(w->z, w->u), MSG_GRADS, f->in, w->z->grid->local,
                own_slice_bytes(w->z, &w->u->message[MSG_GRADS]), w->u->node_add,
                (Memory){LIE_DENSE, DT_F32, w->z->node_sum + w->u->slice});
}

/* The same, and on to the other nodes: the last of a step. */
static void send_node_sum(void *arg) {
  const UnitWork *w = arg;
  keep_node_sum(arg);
  pieces_encode(w->z, pieces_slice(w->z, w->u), MSG_GRADS,
                (Memory){LIE_DENSE, DT_F32, w->z->node_sum + w->u->slice}, error_at(w->z, w->u, 1),
                w->u->reduce.out);
}

/* In: this rank's piece from every node, or where there is one node, from every rank. Stage 0
 * replaces the local sum, which has been sent. */
static void sum_owner(void *arg) {
  const UnitWork *w = arg;
  const Grid *g = w->z->grid;
  const ReduceFlight *f = &w->u->reduce;
  size_t bytes = message_pieces(w->z, &w->u->message[MSG_GRADS], g->local_rank)[g->node];
  pieces_decode(w->z, pieces_own(w->z, w->u), MSG_GRADS, f->in, w->z->one_hop ? g->local : g->nodes,
                bytes, f->add, sums_of(w->z));
}

/* ---- starting and finishing ---- */

static void take_buffers(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  const Message *m = &u->message[MSG_GRADS];
  size_t slice = own_slice_bytes(z, m), piece = message_pieces(z, m, g->local_rank)[g->node];
  size_t in = max_size(slice * (size_t)g->local, piece * (size_t)g->nodes);
  u->reduce = (ReduceFlight){.active = true,
                             .out = pool_take(&z->pool, POOL_OUT, m->total),
                             .in = pool_take(&z->pool, POOL_IN, in)};
  z->reduces++;
}

static void all_to_all(Unit *u, Comm *c, const size_t *send, size_t receive) {
  size_t stack[64], *each = stack;
  int n = comm_size(c);
  if (n > 64) each = mem_alloc((size_t)n, sizeof *each);
  for (int r = 0; r < n; r++) each[r] = receive;
  u->reduce.ticket = comm_start_all_to_all(c, u->reduce.out, send, u->reduce.in, each);
  if (each != stack) free(each);
}

static void start_work(Unit *u, Comm *c, void (*work)(void *)) {
  u->reduce.ticket = comm_start_work(c, COLL_ALL_TO_ALL, work, &u->work);
}

static void start_first_hop(ZeroPP *z, Unit *u, float *full) {
  const Message *m = &u->message[MSG_GRADS];
  take_buffers(z, u);
  pieces_encode(z, pieces_all(z, u), MSG_GRADS, (Memory){LIE_FULL, DT_F32, full}, error_at(z, u, 0),
                u->reduce.out);
  all_to_all(u, z->grid->dev_intra, m->slice, own_slice_bytes(z, m));
}

static void start_owner_sum(ZeroPP *z, Unit *u, Comm *c) {
  u->reduce.add = z->cfg.stage > 0 && !u->shard_fresh;
  u->shard_fresh = false;
  start_work(u, c, sum_owner);
}

/* What goes to the nodes lies in u->reduce.out. */
static void start_second_hop(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  const size_t *bytes = message_pieces(z, &u->message[MSG_GRADS], g->local_rank);
  all_to_all(u, g->dev_inter, bytes, bytes[g->node]);
  start_owner_sum(z, u, g->dev_inter);
}

static void finish(ZeroPP *z, Unit *u) {
  ReduceFlight *f = &u->reduce;
  if (!f->active) return;
  comm_wait(f->ticket);
  pool_give(&z->pool, f->out);
  pool_give(&z->pool, f->in);
  *f = (ReduceFlight){0};
  z->reduces--;
}

/* Backward goes from the last unit to the first, so the oldest in flight is the last. */
static void make_room(ZeroPP *z, Unit *u) {
  finish(z, u);
  for (int i = z->n_units - 1; i >= 0 && z->reduces >= z->flights; i--) finish(z, &z->units[i]);
}

static void start_reduce(ZeroPP *z, Unit *u, float *full) {
  make_room(z, u);
  comm_new_chain();
  start_first_hop(z, u, full);
  if (z->node_sum) {
    u->node_add = !u->node_fresh;
    u->node_fresh = z->last_micro;
    u->grad_waits = !z->last_micro;
    start_work(u, z->grid->dev_intra, z->last_micro ? send_node_sum : keep_node_sum);
    if (z->last_micro) start_second_hop(z, u);
  } else if (z->one_hop) {
    start_owner_sum(z, u, z->grid->dev_intra);
  } else {
    start_work(u, z->grid->dev_intra, sum_node);
    start_second_hop(z, u);
  }
  if (!comm_queue_runs()) finish(z, u); /* it is done */
}

/* ---- zeros for what nobody overwrote ---- */

/* Full gradients that lie in the shard. */
static bool adds_in_shard(const ZeroPP *z) { return z->alias_grad || z->cfg.stage == 0; }

static float *grad_in_shard(const ZeroPP *z, const Unit *u) {
  return engine_part(z, STATE_GRAD, u->shard, 0).data;
}

static void mark_fresh(ZeroPP *z, const Unit *u) {
  for (int p = u->first; p < u->first + u->count; p++) z->place[p].fresh = true;
}

static void settle_param(ZeroPP *z, int p, float *full) {
  ParamPlace *w = &z->place[p];
  if (w->fresh) device_zero(z->device, full + w->full, (size_t)w->numel * sizeof *full);
  w->fresh = false;
}

static void settle(ZeroPP *z, const Unit *u, float *full) {
  for (int p = u->first; p < u->first + u->count; p++) settle_param(z, p, full);
}

static void settle_shard(ZeroPP *z, Unit *u) {
  if (z->half_grad) {
    halves_settle(z, u);
  } else if (adds_in_shard(z)) {
    settle(z, u, grad_in_shard(z, u));
  } else if (u->shard_fresh) {
    Tensor own = engine_part(z, STATE_GRAD, u->shard, z->whole ? u->full_numel : u->owned);
    device_zero(z->device, own.data, tensor_bytes(own));
    u->shard_fresh = false;
  }
}

/* ---- what the step still has to do ---- */

static void second_hop_of_node_sum(ZeroPP *z, Unit *u) {
  make_room(z, u);
  comm_new_chain();
  take_buffers(z, u);
  pieces_encode(z, pieces_slice(z, u), MSG_GRADS,
                (Memory){LIE_DENSE, DT_F32, z->node_sum + u->slice}, error_at(z, u, 1),
                u->reduce.out);
  u->node_fresh = true;
  start_second_hop(z, u);
}

/* Stage 0: the sums of all owners to every rank, as they travel. */
static void spread_sum(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  const Message *m = &u->message[MSG_GRADS];
  const size_t *bytes = message_pieces(z, m, g->local_rank);
  char *whole = pool_take(&z->pool, POOL_WHOLE, m->total);
  char *slice = whole + message_slice_at(z, m, g->local_rank), *own = slice;
  for (int n = 0; n < g->node; n++) own += bytes[n];
  pieces_encode(z, pieces_own(z, u), MSG_GRADS, sums_of(z), NULL, own);
  comm_all_gather(g->dev_inter, own, slice, bytes);
  comm_all_gather(g->dev_intra, slice, whole, m->slice);
  pieces_decode(z, pieces_all(z, u), MSG_GRADS, whole, 1, 0, false,
                (Memory){LIE_FULL, DT_F32, grad_in_shard(z, u)});
  pool_give(&z->pool, whole);
  u->grad_summed = true;
}

static void reduce_waiting(ZeroPP *z, Unit *u) {
  u->grad_waits = false;
  require(z->node_sum || !u->grad_open);
  if (z->node_sum) {
    second_hop_of_node_sum(z, u);
  } else if (z->cfg.stage == 0) {
    start_reduce(z, u, grad_in_shard(z, u));
    finish(z, u);
    spread_sum(z, u);
  } else {
    start_reduce(z, u, u->grad);
    pool_give(&z->pool, u->grad);
    u->grad = NULL;
  }
}

static void finish_flights(ZeroPP *z) {
  for (int i = z->n_units - 1; i >= 0; i--) finish(z, &z->units[i]);
}

void reduce_finish(ZeroPP *z) {
  z->last_micro = false;
  for (int i = z->n_units - 1; i >= 0; i--)
    if (z->units[i].grad_waits) reduce_waiting(z, &z->units[i]);
  finish_flights(z);
  for (int i = 0; i < z->n_units; i++) settle_shard(z, &z->units[i]);
}

void reduce_forget_errors(ZeroPP *z) {
  const int64_t count[2] = {z->numel, z->slice_numel};
  for (int hop = 0; hop < 2; hop++)
    if (z->error[hop])
      device_zero(z->device, z->error[hop], (size_t)count[hop] * sizeof *z->error[hop]);
}

/* ---- what others call ---- */

/* Where local sums stay until the step. */
static bool keeps_local_sums(const ZeroPP *z) { return z->cfg.stage < 2 && !z->alias_grad; }

void zeropp_open_grad(ZeroPP *z, int unit) {
  Unit *u = engine_unit(z, unit);
  require(z->cfg.trainable);
  if (u->grad_open) return;
  u->grad_open = true;
  if (z->half_grad) {
    halves_open(z, u);
  } else if (adds_in_shard(z)) {
    u->grad = grad_in_shard(z, u);
    /* The next sum over ranks must count what was summed before once. */
    if (u->grad_summed && z->grid->rank > 0) mark_fresh(z, u);
    u->grad_summed = false;
  } else if (!u->grad) { /* else it is kept since the last micro-batch */
    u->grad = pool_take(&z->pool, POOL_GRAD, unit_grad_bytes(u));
    mark_fresh(z, u);
  }
}

static Tensor open_grad(const ZeroPP *z, int param, int n) {
  const Unit *u = engine_unit(z, zeropp_spec(z, param)->unit);
  if (!u->grad_open)
    die("gradient of %s is asked for, but its unit's is not open", z->specs[param].name);
  return engine_joined(z, param, n, u->grad, DT_F32);
}

Tensor zeropp_grad_joined(ZeroPP *z, int param, int n) {
  Tensor g = open_grad(z, param, n);
  if (z->half_grad) return halves_beside(z, param, n);
  for (int p = param; p < param + n; p++) settle_param(z, p, z->units[z->specs[p].unit].grad);
  return g;
}

Tensor zeropp_grad(ZeroPP *z, int param) { return zeropp_grad_joined(z, param, 1); }

Tensor zeropp_grad_into(ZeroPP *z, int param, int n, float *beta) {
  Tensor g = open_grad(z, param, n);
  if (z->half_grad) return halves_into(z, param, n, beta);
  int fresh = 0;
  for (int p = param; p < param + n; p++) fresh += z->place[p].fresh;
  *beta = fresh == n ? 0 : 1;
  if (fresh < n) return zeropp_grad_joined(z, param, n);
  for (int p = param; p < param + n; p++) z->place[p].fresh = false;
  return g;
}

void zeropp_reduce(ZeroPP *z, int unit) {
  Unit *u = engine_unit(z, unit);
  if (!u->grad_open)
    die("reduction of unit %d (%s...), whose gradient is not open", unit, engine_unit_name(z, u));
  u->grad_open = false;
  if (z->half_grad) {
    halves_close(z, u);
    return;
  }
  settle(z, u, u->grad);
  if (keeps_local_sums(z)) {
    u->grad_waits = true;
    if (z->cfg.stage == 0) u->grad = NULL;
    return;
  }
  if (!z->alias_grad) {
    start_reduce(z, u, u->grad);
    pool_give(&z->pool, u->grad);
  }
  u->grad = NULL;
}

static void drop_waiting(ZeroPP *z, Unit *u) {
  if (u->grad && !adds_in_shard(z)) pool_give(&z->pool, u->grad);
  u->grad = NULL;
  u->grad_waits = u->grad_summed = false;
}

void zeropp_zero_grad(ZeroPP *z) {
  require(z->cfg.trainable);
  engine_require_closed(z, "zero_grad");
  finish_flights(z);
  z->last_micro = false;
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    drop_waiting(z, u);
    if (adds_in_shard(z)) mark_fresh(z, u);
    u->shard_fresh = !adds_in_shard(z);
    u->node_fresh = true;
  }
}

void zeropp_last_micro(ZeroPP *z) { z->last_micro = true; }

void zeropp_scale_grad(ZeroPP *z, float alpha) {
  require(z->cfg.trainable);
  engine_require_closed(z, "scale_grad");
  reduce_finish(z);
  z->ops->scale(z->device, alpha, engine_shard(z, STATE_GRAD));
}

void reduce_close(ZeroPP *z) {
  finish_flights(z);
  for (int i = 0; i < z->n_units; i++) drop_waiting(z, &z->units[i]);
}
