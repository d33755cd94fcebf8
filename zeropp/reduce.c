/* reduce: full gradients to the shards of their owners, in two hops (qgZ), behind compute.
 *
 *   full gradient --(1)--> sum over the node, this rank's slice --(2)--> sum over nodes, its piece
 *
 * Each hop is an all-to-all of messages that were quantized (or rounded) once; sums are in fp32 and
 * in rank order. The slices and pieces of the layout are the paper's reordering: a sum lands on its
 * owner. accumulate: node keeps the first sums in fp32 and takes the second hop once a step.
 * Stages 2 and 3 reduce every micro-batch; stages 0 and 1 keep local sums until the step.
 *
 * A block with a NaN or an infinity travels as NaN, so what is not finite anywhere reaches the
 * norm. What is started here runs in the queue of collectives, the sums between hops too; nobody
 * reads what it writes (gradient shards, node sums) before reduce_finish.
 */
#include <stdlib.h>

#include "zeropp/internal.h"

enum { IN_FLIGHT = 2 /* reductions that hold buffers at a time */ };

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

/* In: this rank's slice from every rank of the node. Out: its pieces, to be sent to their nodes. */
static void sum_node(void *arg) {
  const UnitWork *w = arg;
  const ZeroPP *z = w->z;
  const Message *m = &w->u->message[MSG_GRADS];
  const Grid *g = z->grid;
  char *in = w->u->reduce.in, *out = w->u->reduce.out;
  uint16_t *error = error_at(z, w->u, 1);
  for (int n = 0; n < g->nodes; n++) {
    Piece piece = {w->u, n, g->local_rank};
    size_t bytes = message_pieces(z, m, g->local_rank)[n];
    piece_recode(z, piece, m->format, in, g->local, own_slice_bytes(z, m), m->format, error, out);
    in += bytes;
    out += bytes;
    if (error) error += piece_numel(z, piece);
  }
}

/* The same, kept in fp32. */
static void keep_node_sum(void *arg) {
  const UnitWork *w = arg;
  const ZeroPP *z = w->z;
  const Message *m = &w->u->message[MSG_GRADS];
  char *in = w->u->reduce.in;
  float *sum = z->node_sum + w->u->slice;
  for (int n = 0; n < z->grid->nodes; n++) {
    Piece piece = {w->u, n, z->grid->local_rank};
    piece_decode(z, piece, m->format, in, z->grid->local, own_slice_bytes(z, m), true, LIE_DENSE,
                 sum);
    in += message_pieces(z, m, z->grid->local_rank)[n];
    sum += piece_numel(z, piece);
  }
}

/* In: this rank's piece from every node. Stage 0 replaces the local sum, which has been sent. */
static void sum_owner(void *arg) {
  const UnitWork *w = arg;
  const ZeroPP *z = w->z;
  const Grid *g = z->grid;
  const Message *m = &w->u->message[MSG_GRADS];
  size_t bytes = message_pieces(z, m, g->local_rank)[g->node];
  piece_decode(z, (Piece){w->u, g->node, g->local_rank}, m->format, w->u->reduce.in, g->nodes,
               bytes, z->cfg.stage > 0, LIE_SHARD, z->shard[STATE_GRAD]);
}

/* ---- starting and finishing ---- */

static void take_buffers(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  const Message *m = &u->message[MSG_GRADS];
  ReduceFlight *f = &u->reduce;
  size_t slice = own_slice_bytes(z, m), piece = message_pieces(z, m, g->local_rank)[g->node];
  *f = (ReduceFlight){.active = true, .out_bytes = m->total};
  f->in_bytes = max_size(slice * (size_t)g->local, piece * (size_t)g->nodes);
  f->out = pool_take(&z->pool, f->out_bytes);
  f->in = pool_take(&z->pool, f->in_bytes);
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
  unit_encode(z, u, m, full, error_at(z, u, 0), u->reduce.out);
  all_to_all(u, z->grid->intra, m->slice, own_slice_bytes(z, m));
}

/* What goes to the nodes lies in u->reduce.out. */
static void start_second_hop(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  const size_t *bytes = message_pieces(z, &u->message[MSG_GRADS], g->local_rank);
  all_to_all(u, g->inter, bytes, bytes[g->node]);
  start_work(u, g->inter, sum_owner);
}

static void finish(ZeroPP *z, Unit *u) {
  ReduceFlight *f = &u->reduce;
  if (!f->active) return;
  comm_wait(f->ticket);
  pool_give(&z->pool, f->out, f->out_bytes);
  pool_give(&z->pool, f->in, f->in_bytes);
  *f = (ReduceFlight){0};
  z->reduces--;
}

/* Backward goes from the last unit to the first, so the oldest in flight is the last. */
static void make_room(ZeroPP *z, Unit *u) {
  finish(z, u);
  for (int i = z->n_units - 1; i >= 0 && z->reduces >= IN_FLIGHT; i--) finish(z, &z->units[i]);
}

static void start_reduce(ZeroPP *z, Unit *u, float *full) {
  make_room(z, u);
  start_first_hop(z, u, full);
  if (z->node_sum) {
    start_work(u, z->grid->intra, keep_node_sum);
    u->grad_waits = true;
  } else {
    start_work(u, z->grid->intra, sum_node);
    start_second_hop(z, u);
  }
  if (!comm_queue_runs()) finish(z, u);
}

/* ---- what the step still has to do ---- */

static void second_hop_of_node_sum(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  const Message *m = &u->message[MSG_GRADS];
  float *sum = z->node_sum + u->slice;
  uint16_t *error = error_at(z, u, 1);
  make_room(z, u);
  take_buffers(z, u);
  char *out = u->reduce.out;
  for (int n = 0; n < g->nodes; n++) {
    Piece piece = {u, n, g->local_rank};
    piece_encode(z, piece, m->format, LIE_DENSE, sum, error, out);
    out += message_pieces(z, m, g->local_rank)[n];
    sum += piece_numel(z, piece);
    if (error) error += piece_numel(z, piece);
  }
  device_zero(z->device, z->node_sum + u->slice, (size_t)u->slice_numel * sizeof(float));
  start_second_hop(z, u);
}

/* Stage 0: the sums of all owners to every rank, as they travel. */
static void spread_sum(ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  const Message *m = &u->message[MSG_GRADS];
  const size_t *bytes = message_pieces(z, m, g->local_rank);
  char *whole = pool_take(&z->pool, m->total), *slice = whole + message_slice_at(m, g->local_rank);
  char *own = slice;
  for (int n = 0; n < g->node; n++) own += bytes[n];
  piece_encode(z, (Piece){u, g->node, g->local_rank}, m->format, LIE_SHARD, z->shard[STATE_GRAD],
               NULL, own);
  comm_all_gather(g->inter, own, slice, bytes);
  comm_all_gather(g->intra, slice, whole, m->slice);
  unit_decode(z, u, m, whole, z->shard[STATE_GRAD] + u->shard);
  pool_give(&z->pool, whole, m->total);
  u->grad_summed = true;
}

static void reduce_waiting(ZeroPP *z, Unit *u) {
  u->grad_waits = false;
  require(z->node_sum || !u->grad_open);
  if (z->node_sum) {
    second_hop_of_node_sum(z, u);
  } else if (z->cfg.stage == 0) {
    start_reduce(z, u, z->shard[STATE_GRAD] + u->shard);
    finish(z, u);
    spread_sum(z, u);
  } else {
    start_reduce(z, u, u->grad);
    pool_give(&z->pool, u->grad, unit_full_bytes(u));
    u->grad = NULL;
  }
}

static void finish_flights(ZeroPP *z) {
  for (int i = z->n_units - 1; i >= 0; i--) finish(z, &z->units[i]);
}

void reduce_finish(ZeroPP *z) {
  for (int i = z->n_units - 1; i >= 0; i--)
    if (z->units[i].grad_waits) reduce_waiting(z, &z->units[i]);
  finish_flights(z);
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
  if (z->alias_grad || z->cfg.stage == 0) {
    u->grad = z->shard[STATE_GRAD] + u->shard;
    /* The next sum over ranks must count what was summed before once. */
    if (u->grad_summed && z->grid->rank > 0) device_zero(z->device, u->grad, unit_full_bytes(u));
    u->grad_summed = false;
    return;
  }
  if (u->grad) return; /* kept since the last micro-batch */
  u->grad = pool_take(&z->pool, unit_full_bytes(u));
  device_zero(z->device, u->grad, unit_full_bytes(u));
}

Tensor zeropp_grad_joined(ZeroPP *z, int param, int n) {
  const Unit *u = engine_unit(z, zeropp_spec(z, param)->unit);
  if (!u->grad_open)
    die("gradient of %s is asked for, but its unit's is not open", z->specs[param].name);
  return engine_joined(z, param, n, u->grad);
}

Tensor zeropp_grad(ZeroPP *z, int param) { return zeropp_grad_joined(z, param, 1); }

Tensor zeropp_grad_into(ZeroPP *z, int param, int n, float *beta) {
  *beta = 1;
  return zeropp_grad_joined(z, param, n);
}

void zeropp_reduce(ZeroPP *z, int unit) {
  Unit *u = engine_unit(z, unit);
  if (!u->grad_open)
    die("reduction of unit %d (%s...), whose gradient is not open", unit, engine_unit_name(z, u));
  u->grad_open = false;
  if (keeps_local_sums(z)) {
    u->grad_waits = true;
    if (z->cfg.stage == 0) u->grad = NULL;
    return;
  }
  if (!z->alias_grad) {
    start_reduce(z, u, u->grad);
    pool_give(&z->pool, u->grad, unit_full_bytes(u));
  }
  u->grad = NULL;
}

static void drop_waiting(ZeroPP *z, Unit *u) {
  if (u->grad && !z->alias_grad) pool_give(&z->pool, u->grad, unit_full_bytes(u));
  u->grad = NULL;
  u->grad_waits = u->grad_summed = false;
}

void zeropp_zero_grad(ZeroPP *z) {
  require(z->cfg.trainable);
  engine_require_closed(z, "zero_grad");
  finish_flights(z);
  for (int i = 0; i < z->n_units; i++) drop_waiting(z, &z->units[i]);
  device_zero(z->device, z->shard[STATE_GRAD], (size_t)z->shard_numel * sizeof(float));
  if (z->node_sum)
    device_zero(z->device, z->node_sum, (size_t)z->slice_numel * sizeof *z->node_sum);
}

void zeropp_scale_grad(ZeroPP *z, float alpha) {
  require(z->cfg.trainable);
  engine_require_closed(z, "scale_grad");
  reduce_finish(z);
  z->ops->scale(z->device, alpha, engine_shard(z, STATE_GRAD));
}

void reduce_close(ZeroPP *z) {
  finish_flights(z);
  for (int i = 0; i < z->n_units; i++)
    if (z->cfg.stage > 0) drop_waiting(z, &z->units[i]);
}
