/* comm_exchange: moves the blocks of a collective, and waits without taking the core from others.
 *
 * A block goes as a row of messages, a few of them under way, so that every one that arrives is a
 * sign of life. While nothing arrives the thread polls: at first without pause, giving way to
 * others, then it sleeps an eighth of the time it has waited already. So a message is never
 * late by much more than an eighth, and a wait of seconds costs hardly any CPU time.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cpu/comm.h"

/* Polls without pause come to 100 us at least; on a busy machine, where time passes while others
 * run, to this many polls. */
static const double SPIN_SECONDS = 100e-6;
enum { SPIN_POLLS = 100 };
static const double LONGEST_SLEEP = 2e-3;
/* From this part of the time limit on, the other ranks are told whom this one waits for. */
static const double ANNOUNCE = 0.125;

static _Atomic double limit_seconds = 0; /* none */

void comm_set_timeout(double seconds) {
  require(seconds >= 0);
  atomic_store(&limit_seconds, seconds);
}

double comm_timeout(void) { return atomic_load(&limit_seconds); }

/* ---- one thread at a time ---- */

static pthread_mutex_t mpi_lock = PTHREAD_MUTEX_INITIALIZER;

void mpi_enter(void) { pthread_mutex_lock(&mpi_lock); }
void mpi_leave(void) { pthread_mutex_unlock(&mpi_lock); }

bool mpi_try_enter(double seconds) {
  double start = clock_seconds();
  struct timespec pause = {.tv_nsec = 100000};
  while (pthread_mutex_trylock(&mpi_lock)) {
    if (clock_seconds() - start > seconds) return false;
    nanosleep(&pause, NULL);
  }
  return true;
}

/* ---- lanes ---- */

static int message_length(const Comm *c, size_t left) {
  return (int)(left < c->message_bytes ? left : c->message_bytes);
}

static void check(const Comm *c, CollKind kind, const CommLane *lane, int rc) {
  char call[64];
  if (rc == MPI_SUCCESS) return;
  snprintf(call, sizeof call, "%s with rank %d", coll_name(kind), c->world_rank[lane->rank]);
  comm_check(rc, c->name, call);
}

static void lane_post(const Comm *c, CollKind kind, CommLane *l) {
  while (l->posted < l->bytes && l->n_posted - l->n_done < LANE_DEPTH) {
    int bytes = message_length(c, l->bytes - l->posted);
    MPI_Request *request = &l->request[l->n_posted++ % LANE_DEPTH];
    int rc = l->recv ? MPI_Irecv(l->recv + l->posted, bytes, MPI_BYTE, l->rank, 0, c->mpi, request)
                     : MPI_Isend(l->send + l->posted, bytes, MPI_BYTE, l->rank, 0, c->mpi, request);
    check(c, kind, l, rc);
    l->posted += (size_t)bytes;
  }
}

/* Has the lane's oldest message gone through? One request at a time: Open MPI 4's calls for several
 * may wait for ever when a message is longer than expected, and the ranks would hang where they
 * should die. */
static bool lane_advance(const Comm *c, CollKind kind, CommLane *l) {
  int gone = 0, bytes = message_length(c, l->bytes - l->done);
  MPI_Status status;
  check(c, kind, l, MPI_Test(&l->request[l->n_done % LANE_DEPTH], &gone, &status));
  if (!gone) return false;
  if (l->recv) {
    int got = 0;
    check(c, kind, l, MPI_Get_count(&status, MPI_BYTE, &got));
    if (got != bytes)
      die("%s over group '%s': rank %d sent %d bytes where %d were expected: the ranks do not make "
          "the same calls",
          coll_name(kind), c->name, c->world_rank[l->rank], got, bytes);
  }
  l->n_done++;
  l->done += (size_t)bytes;
  lane_post(c, kind, l);
  return true;
}

/* Receives first. Starting behind the own rank spreads the load: no two ranks send to the same one
 * first. */
static int lanes_open(Comm *c, CollKind kind, const CommPeer *peer) {
  int n = 0;
  for (int i = 1; i < c->size; i++) {
    int from = (c->rank - i + c->size) % c->size;
    if (peer[from].recv_bytes)
      c->lane[n++] =
          (CommLane){.recv = peer[from].recv, .bytes = peer[from].recv_bytes, .rank = from};
  }
  for (int i = 1; i < c->size; i++) {
    int to = (c->rank + i) % c->size;
    if (peer[to].send_bytes)
      c->lane[n++] = (CommLane){.send = peer[to].send, .bytes = peer[to].send_bytes, .rank = to};
  }
  for (int i = 0; i < n; i++) lane_post(c, kind, &c->lane[i]);
  return n;
}

/* Moves what can be moved; open lanes stay in front. */
static bool lanes_advance(Comm *c, CollKind kind, int *n_open) {
  bool moved = false;
  int open = 0;
  for (int i = 0; i < *n_open; i++) {
    CommLane *l = &c->lane[i];
    while (l->done < l->bytes && lane_advance(c, kind, l)) moved = true;
    if (l->done == l->bytes) continue;
    if (open != i) c->lane[open] = *l;
    open++;
  }
  *n_open = open;
  return moved;
}

/* ---- waiting ---- */

static void sleep_seconds(double seconds) {
  struct timespec t = {.tv_nsec = (long)(seconds * 1e9)};
  nanosleep(&t, NULL);
}

/* World ranks whose blocks are missing, or, when all have arrived, who do not take theirs. */
static int missing_ranks(const Comm *c, int n_open, int *ranks) {
  bool receives = c->lane[0].recv; /* open receives come before open sends */
  int n = 0;
  for (int i = 0; i < n_open; i++)
    if ((c->lane[i].recv != NULL) == receives) ranks[n++] = c->world_rank[c->lane[i].rank];
  return n;
}

static _Noreturn void give_up(const Comm *c, CollKind kind, int n_open, double waited) {
  int *ranks = mem_alloc((size_t)n_open, sizeof *ranks);
  char text[1024];
  mpi_enter();
  stall_describe(ranks, missing_ranks(c, n_open, ranks), text, sizeof text);
  mpi_leave();
  die("%s over group '%s': for %.1f s %s %s (time limit: zeropp.timeout_seconds)", coll_name(kind),
      c->name, waited, c->lane[0].recv ? "nothing came from" : "nothing was taken by", text);
}

typedef struct Wait {
  double since; /* nothing has moved since then */
  int polls;
  bool announced;
} Wait;

static void wait_more(const Comm *c, CollKind kind, int n_open, Wait *w) {
  double waited = clock_seconds() - w->since, limit = atomic_load(&limit_seconds);
  if (waited < SPIN_SECONDS || w->polls++ < SPIN_POLLS) {
    sched_yield();
    return;
  }
  if (limit > 0 && waited > limit) give_up(c, kind, n_open, waited);
  if (limit > 0 && waited > limit * ANNOUNCE && !w->announced) {
    mpi_enter();
    stall_announce(c->world_rank[c->lane[0].rank], 1, 1);
    mpi_leave();
    w->announced = true;
  }
  sleep_seconds(fmin(waited / 8, LONGEST_SLEEP));
}

static void wait_over(Wait *w) {
  if (w->announced) {
    mpi_enter();
    stall_announce(0, 0, 0);
    mpi_leave();
  }
  *w = (Wait){.since = clock_seconds()};
}

#ifdef __SANITIZE_THREAD__
/* The sanitizer does not see what MPI does, so it is told: whoever touches a buffer between start
 * and wait is found out. */
void __tsan_read_range(const void *data, size_t bytes);
void __tsan_write_range(void *data, size_t bytes);
static void show_accesses(const Comm *c, const CommPeer *peer) {
  for (int r = 0; r < c->size; r++) {
    if (r == c->rank) continue;
    __tsan_read_range(peer[r].send, peer[r].send_bytes);
    __tsan_write_range(peer[r].recv, peer[r].recv_bytes);
  }
}
#else
static void show_accesses(const Comm *c, const CommPeer *peer) {
  (void)c;
  (void)peer;
}
#endif

void comm_exchange(Comm *c, CollKind kind, const CommPeer *peer) {
  show_accesses(c, peer);
  mpi_enter();
  int n_open = lanes_open(c, kind, peer);
  mpi_leave();
  Wait w = {.since = clock_seconds()};
  while (n_open > 0) {
    mpi_enter();
    bool moved = lanes_advance(c, kind, &n_open);
    mpi_leave();
    if (moved)
      wait_over(&w);
    else
      wait_more(c, kind, n_open, &w);
  }
}
