/* comm: collectives over MPI, counted and timed.
 *
 * All of them are one exchange of blocks between every pair of ranks, and a sum in rank order where
 * something is summed: so results do not depend on arrival, on the MPI's choice of algorithm or on
 * message sizes, and what is counted is what was received. Blocks longer than an MPI count are sent
 * as several messages. A group of one returns at once and counts nothing.
 */
#include "kernels/cpu/comm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Traffic of this process since its start. */
static Traffic traffic;

Traffic traffic_now(void) { return traffic; }

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

Comm *comm_create(MPI_Comm mpi, int size, int rank, const char *name, const int *node_of_rank) {
  size_t n = (size_t)size;
  Comm *c = mem_zalloc(1, sizeof *c);
  *c = (Comm){.mpi = mpi, .size = size, .rank = rank, .name = name};
  c->message_bytes = (size_t)1 << 30;
  c->same_node = mem_alloc(n, sizeof *c->same_node);
  for (int r = 0; r < size; r++) c->same_node[r] = node_of_rank[r] == node_of_rank[rank];
  c->peer = mem_zalloc(n, sizeof *c->peer);
  c->requests = mem_alloc(2 * n, sizeof(MPI_Request));
  c->expected = mem_alloc(2 * n, sizeof *c->expected);
  return c;
}

void comm_destroy(Comm *c) {
  if (!c) return;
  if (c->mpi != MPI_COMM_NULL) MPI_Comm_free(&c->mpi);
  free(c->same_node);
  free(c->peer);
  free(c->requests);
  free(c->expected);
  free(c->scratch);
  free(c);
}

static void *scratch(Comm *c, size_t bytes) {
  if (bytes > c->scratch_bytes) {
    free(c->scratch);
    c->scratch = mem_alloc(bytes, 1);
    c->scratch_bytes = bytes;
  }
  return c->scratch;
}

static void check(const Comm *c, CollKind kind, int rc) {
  if (rc != MPI_SUCCESS) comm_check(rc, c->name, coll_name(kind));
}

static int message_length(const Comm *c, size_t left) {
  return (int)(left < c->message_bytes ? left : c->message_bytes);
}

/* Posts the part of every block that starts at byte `at`, receives first; returns how many of them,
 * and in *n all requests. Starting behind the own rank spreads the load: no two ranks send to the
 * same one first. */
static int post_messages(Comm *c, CollKind kind, size_t at, int *n) {
  int receives = 0, posted = 0;
  for (int i = 1; i < c->size; i++) {
    int from = (c->rank - i + c->size) % c->size;
    const CommPeer *p = &c->peer[from];
    if (p->recv_bytes <= at) continue;
    int bytes = message_length(c, p->recv_bytes - at);
    check(c, kind,
          MPI_Irecv(p->recv + at, bytes, MPI_BYTE, from, 0, c->mpi, &c->requests[posted++]));
    c->expected[2 * receives] = bytes;
    c->expected[2 * receives + 1] = from;
    receives++;
  }
  for (int i = 1; i < c->size; i++) {
    int to = (c->rank + i) % c->size;
    const CommPeer *p = &c->peer[to];
    if (p->send_bytes <= at) continue;
    int bytes = message_length(c, p->send_bytes - at);
    check(c, kind, MPI_Isend(p->send + at, bytes, MPI_BYTE, to, 0, c->mpi, &c->requests[posted++]));
  }
  *n = posted;
  return receives;
}

/* One at a time: Open MPI 4's MPI_Waitall may wait for ever when a message is longer than expected,
 * and the ranks would hang where they should die. */
static void wait_messages(Comm *c, CollKind kind, int receives, int n) {
  for (int i = 0; i < n; i++) {
    MPI_Status status;
    int bytes = 0;
    check(c, kind, MPI_Wait(&c->requests[i], &status));
    if (i >= receives) continue;
    check(c, kind, MPI_Get_count(&status, MPI_BYTE, &bytes));
    if (bytes != c->expected[2 * i])
      die("%s over group '%s': rank %d of it sent %d bytes where %d were expected: the ranks do "
          "not make the same calls",
          coll_name(kind), c->name, c->expected[2 * i + 1], bytes, c->expected[2 * i]);
  }
}

/* Carries out what c->peer says, with every other rank. */
static void exchange(Comm *c, CollKind kind) {
  double start = clock_seconds();
  size_t longest = 0;
  TrafficCount *count = &traffic.of[kind];
  for (int r = 0; r < c->size; r++) {
    const CommPeer *p = &c->peer[r];
    if (r == c->rank) continue;
    if (p->send_bytes > longest) longest = p->send_bytes;
    if (p->recv_bytes > longest) longest = p->recv_bytes;
    *(c->same_node[r] ? &count->intra_bytes : &count->inter_bytes) += p->recv_bytes;
  }
  for (size_t at = 0; at < longest; at += c->message_bytes) {
    int n = 0, receives = post_messages(c, kind, at, &n);
    wait_messages(c, kind, receives, n);
  }
  count->calls++;
  count->seconds += clock_seconds() - start;
}

static void copy_own(void *to, const void *from, size_t bytes) {
  if (bytes && to != from) memmove(to, from, bytes);
}

void comm_all_gather(Comm *c, const void *send, void *recv, const size_t *bytes_of_rank) {
  char *at = recv, *own_place = recv;
  size_t own = bytes_of_rank[c->rank];
  for (int r = 0; r < c->size; r++) {
    if (r == c->rank) own_place = at;
    c->peer[r] = (CommPeer){send, at, own, bytes_of_rank[r]};
    if (bytes_of_rank[r]) at += bytes_of_rank[r];
  }
  if (c->size > 1) exchange(c, COLL_ALL_GATHER);
  copy_own(own_place, send, own);
}

void comm_all_to_all(Comm *c, const void *send, const size_t *send_bytes, void *recv,
                     const size_t *recv_bytes) {
  const char *from = send;
  char *to = recv;
  require(send_bytes[c->rank] == recv_bytes[c->rank]);
  for (int r = 0; r < c->size; r++) {
    c->peer[r] = (CommPeer){from, to, send_bytes[r], recv_bytes[r]};
    if (r == c->rank) copy_own(to, from, send_bytes[r]);
    if (send_bytes[r]) from += send_bytes[r];
    if (recv_bytes[r]) to += recv_bytes[r];
  }
  if (c->size > 1) exchange(c, COLL_ALL_TO_ALL);
}

void comm_reduce_scatter_f32(Comm *c, const float *send, float *recv, const size_t *count_of_rank) {
  size_t own = count_of_rank[c->rank];
  if (c->size == 1) {
    copy_own(recv, send, own * sizeof(float));
    return;
  }
  float *of_rank = scratch(c, (size_t)c->size * own * sizeof(float));
  const float *from = send, *mine = send;
  for (int r = 0; r < c->size; r++) {
    if (r == c->rank) mine = from;
    c->peer[r] = (CommPeer){(const char *)from, (char *)(of_rank + (size_t)r * own),
                            count_of_rank[r] * sizeof(float), own * sizeof(float)};
    if (count_of_rank[r]) from += count_of_rank[r];
  }
  exchange(c, COLL_REDUCE_SCATTER);
  for (int r = 0; r < c->size; r++) {
    const float *x = r == c->rank ? mine : of_rank + (size_t)r * own;
    if (r == 0)
      copy_own(recv, x, own * sizeof(float));
    else
      for (size_t i = 0; i < own; i++) recv[i] += x[i];
  }
}

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
  size_t bytes = (size_t)n * sizeof(double);
  double *of_rank = scratch(c, (size_t)c->size * bytes);
  for (int r = 0; r < c->size; r++)
    c->peer[r] =
        (CommPeer){(const char *)x, (char *)(of_rank + (size_t)r * (size_t)n), bytes, bytes};
  exchange(c, COLL_ALL_REDUCE);
  memcpy(of_rank + (size_t)c->rank * (size_t)n, x, bytes);
  memcpy(x, of_rank, bytes);
  for (int r = 1; r < c->size; r++) fold(x, of_rank + (size_t)r * (size_t)n, n, max);
}

void comm_broadcast(Comm *c, void *data, size_t bytes, int root) {
  require(root >= 0 && root < c->size);
  if (c->size == 1) return;
  bool mine = root == c->rank;
  for (int r = 0; r < c->size; r++) {
    c->peer[r] = (CommPeer){data, data, mine ? bytes : 0, r == root && !mine ? bytes : 0};
  }
  exchange(c, COLL_BROADCAST);
}

void comm_barrier(Comm *c) {
  if (c->size == 1) return;
  double start = clock_seconds();
  check(c, COLL_BARRIER, MPI_Barrier(c->mpi));
  traffic.of[COLL_BARRIER].calls++;
  traffic.of[COLL_BARRIER].seconds += clock_seconds() - start;
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
