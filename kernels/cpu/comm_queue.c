/* comm_queue: when a collective runs, and on which thread.
 *
 * What is started waits in a ring until the queue's thread has run everything before it; its ticket
 * is its number. A caller that waits for a result anyway (the synchronous collectives, the making
 * of groups) first waits until the ring is empty and then uses MPI itself: no time is lost in
 * handing over, and there are never two threads in MPI, nor two orders of calls.
 *
 * Without a thread a start runs the call at once.
 *
 * Seconds: a call's time on the queue's thread is exposed while the compute thread waits, and
 * hidden while it does not. The sum of what is exposed is exactly the time that it waited.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/comm.h"

enum { RING = 64 };
static const double SPIN_SECONDS = 50e-6;

/* One queue to a process, as one MPI. All but `finished` and `runs` under the lock; `runs` is the
 * compute thread's. */
static struct {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t more, less; /* calls were started; calls have finished */
  bool runs, stop;
  CommCall ring[RING];
  CommTicket started;
  _Atomic CommTicket finished;
  Traffic traffic;
  double wait_since;             /* the compute thread waits since then; 0: it does not */
  double run_since, run_exposed; /* the call that runs; waits that ended during it */
  double last_end;               /* when the last call ended, and what it was */
  CollKind last_kind;
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER,
           .more = PTHREAD_COND_INITIALIZER,
           .less = PTHREAD_COND_INITIALIZER};

Traffic traffic_now(void) {
  comm_device_count();
  pthread_mutex_lock(&queue.lock);
  Traffic now = queue.traffic;
  pthread_mutex_unlock(&queue.lock);
  return now;
}

void traffic_add(CollKind kind, const TrafficCount *n) {
  pthread_mutex_lock(&queue.lock);
  TrafficCount *sum = &queue.traffic.of[kind];
  sum->calls += n->calls;
  sum->intra_bytes += n->intra_bytes;
  sum->inter_bytes += n->inter_bytes;
  sum->seconds += n->seconds;
  sum->hidden_seconds += n->hidden_seconds;
  pthread_mutex_unlock(&queue.lock);
}

/* ---- the queue's thread ---- */

static void count_run(CollKind kind, double end) {
  double start = queue.run_since;
  double exposed = queue.wait_since > 0 ? end - fmax(start, queue.wait_since) : 0;
  TrafficCount *n = &queue.traffic.of[kind];
  n->seconds += exposed;
  n->hidden_seconds += fmax(0, end - start - exposed - queue.run_exposed);
  queue.last_end = end;
  queue.last_kind = kind;
  queue.run_since = queue.run_exposed = 0;
}

static void *work(void *arg) {
  (void)arg;
  pthread_mutex_lock(&queue.lock);
  for (;;) {
    CommTicket next = queue.finished + 1;
    if (next > queue.started) {
      if (queue.stop) break;
      pthread_cond_wait(&queue.more, &queue.lock);
      continue;
    }
    CommCall call = queue.ring[next % RING];
    queue.run_since = clock_seconds();
    pthread_mutex_unlock(&queue.lock);
    comm_run(&call);
    pthread_mutex_lock(&queue.lock);
    count_run(call.kind, clock_seconds());
    queue.finished = next;
    pthread_cond_signal(&queue.less);
  }
  pthread_mutex_unlock(&queue.lock);
  return NULL;
}

bool comm_queue_runs(void) { return queue.runs; }

void comm_queue_start(void) {
  if (queue.runs || launch_world() == 1) return;
  int level;
  comm_check(MPI_Query_thread(&level), "world", "MPI_Query_thread");
  if (level < MPI_THREAD_SERIALIZED)
    die("this MPI is for one thread only: zeropp.prefetch needs MPI_THREAD_SERIALIZED");
  queue.stop = false;
  int rc = pthread_create(&queue.thread, NULL, work, NULL);
  if (rc) die("the communication queue's thread does not start: %s", strerror(rc));
  queue.runs = true;
}

void comm_queue_stop(void) {
  if (!queue.runs) return;
  comm_drain();
  pthread_mutex_lock(&queue.lock);
  queue.stop = true;
  pthread_cond_signal(&queue.more);
  pthread_mutex_unlock(&queue.lock);
  pthread_join(queue.thread, NULL);
  queue.runs = false;
}

/* ---- the compute thread ---- */

/* The end of a wait: from the end of the last call on it is the time of being told. */
static void count_wait(double end) {
  queue.traffic.of[queue.last_kind].seconds += end - fmax(queue.last_end, queue.wait_since);
  if (queue.run_since > 0) queue.run_exposed += end - fmax(queue.run_since, queue.wait_since);
  queue.wait_since = 0;
}

void comm_wait(CommTicket t) {
  if (t >> DEVICE_TICKET_BIT) {
    comm_device_wait(t);
    return;
  }
  if (t <= atomic_load(&queue.finished)) return;
  double since = clock_seconds();
  pthread_mutex_lock(&queue.lock);
  require(t <= queue.started);
  queue.wait_since = since;
  pthread_mutex_unlock(&queue.lock);
  while (atomic_load(&queue.finished) < t && clock_seconds() - since < SPIN_SECONDS) sched_yield();
  pthread_mutex_lock(&queue.lock);
  while (queue.finished < t) pthread_cond_wait(&queue.less, &queue.lock);
  count_wait(clock_seconds());
  pthread_mutex_unlock(&queue.lock);
}

void comm_drain(void) {
  if (queue.runs) comm_wait(queue.started); /* only this thread starts calls */
}

void comm_call(CommCall call) {
  if (call.comm->on_device) {
    comm_wait(comm_device_submit(call));
    return;
  }
  comm_drain();
  double start = clock_seconds();
  bool alone = call.work ? launch_world() == 1 : call.comm->size == 1;
  comm_run(&call);
  if (!alone) traffic_add(call.kind, &(TrafficCount){.seconds = clock_seconds() - start});
}

CommTicket comm_submit(CommCall call) {
  require(call.kind >= 0 && call.kind < COLL_KINDS);
  if (call.comm->on_device) return comm_device_submit(call);
  if (!queue.runs) {
    comm_call(call);
    return 0;
  }
  if (queue.started >= RING) comm_wait(queue.started + 1 - RING); /* room */
  pthread_mutex_lock(&queue.lock);
  CommTicket t = ++queue.started;
  queue.ring[t % RING] = call;
  pthread_cond_signal(&queue.more);
  pthread_mutex_unlock(&queue.lock);
  return t;
}
