/* comm_watch: a device that waits for ever is noticed, and so is a transport that has failed.
 *
 * The host may sit in any wait for the device, and a kernel that waits for another rank cannot give
 * up by itself. So a thread looks at the oldest ticket that is not done. While compute has not come
 * to it, it is not late. From then on it tells the other ranks that this one waits (comm_stall.c),
 * and when the time limit is over it says what is missing, and ends the process.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cpu/comm.h"

/* How often it looks: this part of the time limit, within bounds. */
static const double PART = 1.0 / 32, SHORTEST = 2e-3, LONGEST = 0.25;
/* From this part of the limit on, the others are told. */
static const double ANNOUNCE = 0.125;

struct Watch {
  Device *device;
  const CommDeviceOps *ops;
  Tickets *tickets;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake; /* stop */
  bool stop;
  CommTicket ticket; /* the oldest, and since when it has been so and could have run */
  double since;
  bool announced;
};

static int other_ranks(const Comm *c, int *ranks) {
  int n = 0;
  for (int r = 0; r < c->size; r++)
    if (r != c->rank) ranks[n++] = c->world_rank[r];
  return n;
}

/* MPI may be in somebody else's hands, even for good: then nothing is told, or known. */
static void announce(const Comm *c) {
  if (!mpi_try_enter(0.1)) return;
  int step = c->size > 1 ? c->world_rank[1] - c->world_rank[0] : 1;
  stall_announce(c->world_rank[0], step, c->size);
  mpi_leave();
}

static bool announce_nobody(void) {
  if (!mpi_try_enter(0.1)) return false;
  stall_announce(0, 0, 0);
  mpi_leave();
  return true;
}

static void describe_missing(const Comm *c, char *text, size_t size) {
  int *ranks = mem_alloc((size_t)c->size, sizeof *ranks);
  int n = other_ranks(c, ranks);
  if (mpi_try_enter(0.1)) {
    n = stall_keep_silent(ranks, n);
    stall_describe(ranks, n, text, size);
    mpi_leave();
  } else {
    snprintf(text, size, "one of the %d others of the group", n);
  }
  free(ranks);
}

static struct timespec time_after(double seconds) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  double ns = (double)t.tv_nsec + 1e9 * fmod(seconds, 1);
  t.tv_sec += (time_t)seconds + (ns >= 1e9);
  t.tv_nsec = (long)(ns >= 1e9 ? ns - 1e9 : ns);
  return t;
}

/* ---- the end ---- */

static _Noreturn void end_process(const TicketLabel *label, CommTicket t, double waited,
                                  const char *trouble) {
  char missing[1024] = "", text[2048];
  const Comm *c = label ? label->comm : NULL;
  if (c) describe_missing(c, missing, sizeof missing);
  if (!c)
    snprintf(text, sizeof text, "between collectives of the device: %s", trouble);
  else if (waited > 0)
    snprintf(text, sizeof text,
             "%s over group '%s' (ticket %llu, %zu bytes to receive): not done after %.1f s; waits "
             "for %s%s%s (time limit: zeropp.timeout_seconds)",
             coll_name(label->kind), c->name, (unsigned long long)t, label->bytes, waited, missing,
             trouble[0] ? "; " : "", trouble);
  else
    snprintf(text, sizeof text, "%s over group '%s' (ticket %llu, %zu bytes to receive): %s",
             coll_name(label->kind), c->name, (unsigned long long)t, label->bytes, trouble);
  die("%s", text);
}

/* ---- looking ---- */

static void calm(Watch *w, CommTicket t) {
  w->ticket = t;
  w->since = clock_seconds();
  if (w->announced) w->announced = !announce_nobody();
}

static void look(Watch *w) {
  char trouble[512] = "";
  CommTicket t = 0;
  TicketLabel label = {0};
  bool runs = false, any = tickets_oldest(w->tickets, &t, &label, &runs);
  bool failed = w->ops->failed(w->device, trouble, sizeof trouble);
  if (failed) end_process(any ? &label : NULL, t, 0, trouble);
  if (!any || !runs || t != w->ticket) {
    calm(w, any && runs ? t : 0);
    return;
  }
  double waited = clock_seconds() - w->since, limit = comm_timeout();
  if (limit > 0 && waited > limit) end_process(&label, t, waited, trouble);
  if (limit > 0 && waited > limit * ANNOUNCE && !w->announced) {
    announce(label.comm);
    w->announced = true;
  }
}

static void *watch(void *arg) {
  Watch *w = arg;
  w->ops->enter_thread(w->device);
  pthread_mutex_lock(&w->lock);
  while (!w->stop) {
    double limit = comm_timeout();
    double pause = limit > 0 ? fmin(fmax(limit * PART, SHORTEST), LONGEST) : LONGEST;
    struct timespec end = time_after(pause);
    pthread_cond_timedwait(&w->wake, &w->lock, &end);
    if (w->stop) break;
    pthread_mutex_unlock(&w->lock);
    look(w);
    pthread_mutex_lock(&w->lock);
  }
  pthread_mutex_unlock(&w->lock);
  if (w->announced) announce_nobody();
  return NULL;
}

Watch *watch_start(Device *d, const CommDeviceOps *ops, Tickets *q) {
  Watch *w = mem_zalloc(1, sizeof *w);
  *w = (Watch){.device = d, .ops = ops, .tickets = q, .since = clock_seconds()};
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->wake, NULL);
  int rc = pthread_create(&w->thread, NULL, watch, w);
  if (rc) die("the thread that watches collectives does not start: %s", strerror(rc));
  return w;
}

void watch_stop(Watch *w) {
  if (!w) return;
  pthread_mutex_lock(&w->lock);
  w->stop = true;
  pthread_cond_signal(&w->wake);
  pthread_mutex_unlock(&w->lock);
  pthread_join(w->thread, NULL);
  pthread_mutex_destroy(&w->lock);
  pthread_cond_destroy(&w->wake);
  free(w);
}
