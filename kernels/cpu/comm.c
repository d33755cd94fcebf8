/* comm: the collectives, as blocks that go from rank to rank.
 *
 * All of them are one exchange of blocks between every pair of ranks, and a sum in rank order where
 * something is summed: so results do not depend on arrival, on the MPI's choice of algorithm or on
 * message sizes, and what is counted is what was received. A group of one sends and counts nothing.
 */
#include "kernels/cpu/comm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *coll_name(CollKind k) {
  static const char *const names[COLL_KINDS] = {"all-gather", "reduce-scatter", "all-to-all",
                                                "all-reduce", "broadcast",      "barrier"};
  require(k >= 0 && k < COLL_KINDS);
  return names[k];
}

int comm_size(const Comm *c) { return c->size; }
int comm_rank(const Comm *c) { return c->rank; }

void comm_check(int rc, const char *group, const char *call) {
  if (rc == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int len = 0;
  MPI_Error_string(rc, text, &len);
  die("%s over group '%s': %s", call, group, text);
}

Comm *comm_create(MPI_Comm mpi, int size, int rank, const char *name, const int *node_of_rank,
                  const int *world_rank) {
  size_t n = (size_t)size;
  Comm *c = mem_zalloc(1, sizeof *c);
  *c = (Comm){.mpi = mpi, .size = size, .rank = rank, .name = name};
  /* Long enough to run at full speed, short enough that on a slow network something arrives all the
   * time: how long to sleep and when to give up is told by that. */
  c->message_bytes = (size_t)1 << 18;
  c->same_node = mem_alloc(n, sizeof *c->same_node);
  c->world_rank = mem_alloc(n, sizeof *c->world_rank);
  for (int r = 0; r < size; r++) {
    c->same_node[r] = node_of_rank[r] == node_of_rank[rank];
    c->world_rank[r] = world_rank[r];
  }
  c->lane = mem_alloc(2 * n, sizeof *c->lane);
  return c;
}

void comm_destroy(Comm *c) {
  if (!c) return;
  comm_drain();
  if (c->on_device) {
    comm_device_leave(c);
  } else if (c->mpi != MPI_COMM_NULL) {
    mpi_enter();
    MPI_Comm_free(&c->mpi);
    mpi_leave();
  }
  free(c->same_node);
  free(c->world_rank);
  free(c->lane);
  free(c->scratch);
  free(c);
}

void *comm_scratch(Comm *c, size_t bytes) {
  if (bytes > c->scratch_bytes) {
    free(c->scratch);
    c->scratch = mem_alloc(bytes, 1);
    c->scratch_bytes = bytes;
  }
  return c->scratch;
}

/* ---- what a call does when its turn has come ---- */

static void copy_own(const CommPeer *own) {
  if (own->send_bytes && own->recv != own->send) memmove(own->recv, own->send, own->send_bytes);
}

TrafficCount comm_bytes_of(const CommCall *call) {
  const Comm *c = call->comm;
  TrafficCount n = {.calls = 1};
  for (int r = 0; r < c->size; r++) {
    if (r == c->rank || call->kind == COLL_BARRIER) continue; /* a barrier's bytes say nothing */
    *(c->same_node[r] ? &n.intra_bytes : &n.inter_bytes) += call->peer[r].recv_bytes;
  }
  return n;
}

void comm_count_bytes(const CommCall *call) {
  TrafficCount n = comm_bytes_of(call);
  traffic_add(call->kind, &n);
}

/* The terms of the own block meet in scratch and are added in rank order. */
static void run_sum(CommCall *call) {
  Comm *c = call->comm;
  size_t own = call->peer[c->rank].send_bytes / sizeof(float);
  float *term = comm_scratch(c, (size_t)c->size * own * sizeof(float));
  for (int r = 0; r < c->size; r++) call->peer[r].recv = (char *)(term + (size_t)r * own);
  comm_exchange(c, call->kind, call->peer);
  for (int r = 0; r < c->size; r++) {
    const float *x = r == c->rank ? (const float *)call->peer[r].send : term + (size_t)r * own;
    if (r == 0)
      copy_own(&(CommPeer){(const char *)x, (char *)call->sum, own * sizeof(float), 0});
    else
      for (size_t i = 0; i < own; i++) call->sum[i] += x[i];
  }
}

void comm_run(CommCall *call) {
  Comm *c = call->comm;
  if (call->work) {
    call->work(call->arg);
    return;
  }
  if (call->sum) {
    run_sum(call);
  } else {
    comm_exchange(c, call->kind, call->peer);
    copy_own(&call->peer[c->rank]);
  }
  if (c->size > 1) comm_count_bytes(call);
  free(call->peer);
}

/* ---- calls ---- */

static CommCall new_call(Comm *c, CollKind kind) {
  return (CommCall){.kind = kind, .comm = c, .peer = mem_zalloc((size_t)c->size, sizeof(CommPeer))};
}

static CommCall all_gather(Comm *c, const void *send, void *recv, const size_t *bytes_of_rank) {
  CommCall call = new_call(c, COLL_ALL_GATHER);
  char *at = recv;
  for (int r = 0; r < c->size; r++) {
    call.peer[r] = (CommPeer){send, at, bytes_of_rank[c->rank], bytes_of_rank[r]};
    if (bytes_of_rank[r]) at += bytes_of_rank[r];
  }
  return call;
}

static CommCall all_to_all(Comm *c, const void *send, const size_t *send_bytes, void *recv,
                           const size_t *recv_bytes) {
  CommCall call = new_call(c, COLL_ALL_TO_ALL);
  const char *from = send;
  char *to = recv;
  require(send_bytes[c->rank] == recv_bytes[c->rank]);
  for (int r = 0; r < c->size; r++) {
    call.peer[r] = (CommPeer){from, to, send_bytes[r], recv_bytes[r]};
    if (send_bytes[r]) from += send_bytes[r];
    if (recv_bytes[r]) to += recv_bytes[r];
  }
  return call;
}

static CommCall reduce_scatter(Comm *c, const float *send, float *recv,
                               const size_t *count_of_rank) {
  CommCall call = new_call(c, COLL_REDUCE_SCATTER);
  size_t own = count_of_rank[c->rank] * sizeof(float);
  const float *from = send;
  call.sum = recv;
  for (int r = 0; r < c->size; r++) {
    call.peer[r] = (CommPeer){(const char *)from, NULL, count_of_rank[r] * sizeof(float), own};
    if (count_of_rank[r]) from += count_of_rank[r];
  }
  return call;
}

void comm_all_gather(Comm *c, const void *send, void *recv, const size_t *bytes_of_rank) {
  comm_call(all_gather(c, send, recv, bytes_of_rank));
}

CommTicket comm_start_all_gather(Comm *c, const void *send, void *recv,
                                 const size_t *bytes_of_rank) {
  return comm_submit(all_gather(c, send, recv, bytes_of_rank));
}

void comm_all_to_all(Comm *c, const void *send, const size_t *send_bytes, void *recv,
                     const size_t *recv_bytes) {
  comm_call(all_to_all(c, send, send_bytes, recv, recv_bytes));
}

CommTicket comm_start_all_to_all(Comm *c, const void *send, const size_t *send_bytes, void *recv,
                                 const size_t *recv_bytes) {
  return comm_submit(all_to_all(c, send, send_bytes, recv, recv_bytes));
}

void comm_reduce_scatter_f32(Comm *c, const float *send, float *recv, const size_t *count_of_rank) {
  comm_call(reduce_scatter(c, send, recv, count_of_rank));
}

CommTicket comm_start_reduce_scatter_f32(Comm *c, const float *send, float *recv,
                                         const size_t *count_of_rank) {
  return comm_submit(reduce_scatter(c, send, recv, count_of_rank));
}

void comm_count_taken(Comm *c, CollKind kind, int from, size_t bytes) {
  TrafficCount n = {.calls = 0};
  if (c->same_node[from])
    n.intra_bytes = bytes;
  else
    n.inter_bytes = bytes;
  if (from != c->rank) traffic_add(kind, &n);
}

CommTicket comm_start_work(Comm *c, CollKind kind, void (*work)(void *arg), void *arg) {
  return comm_submit((CommCall){.kind = kind, .comm = c, .work = work, .arg = arg});
}

CommTicket comm_start_take(Comm *c, CollKind kind, void (*work)(void *arg), void *arg) {
  require(comm_can_take(c));
  return comm_submit((CommCall){.kind = kind, .comm = c, .work = work, .arg = arg, .take = true});
}

/* ---- small ones, whose caller always waits ---- */

static void fold(double *x, const double *y, int n, bool max) {
  for (int i = 0; i < n; i++) {
    if (!max)
      x[i] += y[i];
    else if (isnan(y[i]) || y[i] > x[i]) /* a NaN of any rank stays: nothing is above it */
      x[i] = y[i];
  }
}

void comm_all_reduce_f64(Comm *c, double *x, int n, bool max) {
  require(n >= 0);
  if (c->size == 1 || n == 0) return;
  size_t numel = (size_t)n, bytes = numel * sizeof(double);
  double *of_rank = mem_alloc((size_t)c->size * numel, sizeof(double));
  CommCall call = new_call(c, COLL_ALL_REDUCE);
  for (int r = 0; r < c->size; r++)
    call.peer[r] = (CommPeer){(const char *)x, (char *)(of_rank + (size_t)r * numel), bytes, bytes};
  comm_call(call);
  memcpy(x, of_rank, bytes);
  for (int r = 1; r < c->size; r++) fold(x, of_rank + (size_t)r * numel, n, max);
  free(of_rank);
}

void comm_broadcast(Comm *c, void *data, size_t bytes, int root) {
  require(root >= 0 && root < c->size);
  if (c->size == 1) return;
  bool mine = root == c->rank;
  CommCall call = new_call(c, COLL_BROADCAST);
  for (int r = 0; r < c->size; r++)
    call.peer[r] = (CommPeer){data, data, mine ? bytes : 0, r == root && !mine ? bytes : 0};
  comm_call(call);
}

void comm_barrier(Comm *c) {
  if (c->size == 1) return;
  const char here = 1;
  char *there = mem_alloc((size_t)c->size, 1);
  CommCall call = new_call(c, COLL_BARRIER);
  for (int r = 0; r < c->size; r++) call.peer[r] = (CommPeer){&here, there + r, 1, 1};
  comm_call(call);
  free(there);
}

int comm_agree(Comm *c, int rc, Error *err) {
  Error local = {""};
  Error *e = err ? err : &local;
  if (c->size == 1) return rc < 0 ? -1 : 0;
  double worst = rc < 0 ? c->size - c->rank : 0;
  comm_all_reduce_f64(c, &worst, 1, true);
  if (worst == 0) return 0;
  comm_broadcast(c, e->msg, sizeof e->msg, c->size - (int)worst);
  return -1;
}
