/* comm_tickets: collectives on a device's tracks of communication, and what they cost.
 *
 *   compute:  ... ready ............... reached |wait| ...
 *   comm:             begin [collective] done
 *
 * A ticket has four events. Its track waits for `ready`; `begin` and `done` are the time it took;
 * `reached` is recorded where compute starts to wait for `done`. Time between reached and done is
 * exposed, and what is left of the collective's is hidden. Events are read only when they have
 * passed, so nothing here ever holds up the device.
 *
 * Tickets of a track end in order. Where two tracks work at a time, that time is the earlier
 * ticket's: sums of seconds are time in which something travelled. A slot of the ring is used again
 * when its ticket and the next were counted.
 */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/cpu/comm.h"

typedef struct Slot {
  TicketLabel label;
  int track;
  bool ended;  /* done is recorded */
  bool waited; /* reached is recorded */
  void *ready, *begin, *done, *reached;
} Slot;

struct Tickets {
  Device *device;
  const CommDeviceOps *ops;
  pthread_mutex_t lock; /* of the rest: the watch asks too */
  CommTicket started, finished, counted;
  CommTicket waited; /* compute waits for all up to this one */
  CommTicket last;   /* of those counted the one that was done last; 0: none */
  Slot ring[MAX_TICKETS];
};

static Slot *slot_of(Tickets *q, CommTicket t) { return &q->ring[t % MAX_TICKETS]; }

Tickets *tickets_create(Device *d, const CommDeviceOps *ops) {
  Tickets *q = mem_zalloc(1, sizeof *q);
  q->device = d;
  q->ops = ops;
  pthread_mutex_init(&q->lock, NULL);
  return q;
}

void tickets_free(Tickets *q) {
  if (!q) return;
  for (int i = 0; i < MAX_TICKETS; i++) {
    Slot *s = &q->ring[i];
    void *event[4] = {s->ready, s->begin, s->done, s->reached};
    for (int k = 0; k < 4 && s->ready; k++) q->ops->event_destroy(q->device, event[k]);
  }
  pthread_mutex_destroy(&q->lock);
  free(q);
}

/* ---- counting; with the lock ---- */

static bool is_done(Tickets *q, void *event) { return q->ops->event_done(q->device, event); }

static void look(Tickets *q) {
  while (q->finished < q->started) {
    Slot *s = slot_of(q, q->finished + 1);
    if (!s->ended || !is_done(q, s->done)) return;
    q->finished++;
  }
}

/* Where compute first waited for this ticket or a later one; NULL: nowhere. */
static Slot *first_wait(Tickets *q, CommTicket t) {
  for (; t <= q->waited; t++)
    if (slot_of(q, t)->waited) return slot_of(q, t);
  return NULL;
}

/* From its begin to its done, without what is counted already. */
static double time_taken(Tickets *q, const Slot *s, CommTicket t) {
  double took = q->ops->seconds_between(q->device, s->begin, s->done);
  bool known = q->last && q->started < q->last + MAX_TICKETS; /* its slot still is its own */
  if (known) {
    double later = q->ops->seconds_between(q->device, slot_of(q, q->last)->done, s->done);
    if (later <= 0) return 0;
    if (later < took) took = later;
  }
  q->last = t;
  return took;
}

static void count_one(Tickets *q, CommTicket t) {
  Slot *s = slot_of(q, t), *w = first_wait(q, t);
  if (s->label.computes) return;
  double took = time_taken(q, s, t), exposed = 0;
  /* A compute stream that is not even there yet did not wait. */
  if (w && is_done(q, w->reached))
    exposed = q->ops->seconds_between(q->device, w->reached, s->done);
  if (exposed < 0) exposed = 0;
  if (exposed > took) exposed = took;
  traffic_add(s->label.kind, &(TrafficCount){.seconds = exposed, .hidden_seconds = took - exposed});
}

/* Tickets whose wait may still come are left out, up to `at_least`. */
static void count_to(Tickets *q, CommTicket at_least) {
  CommTicket last = q->waited > at_least ? q->waited : at_least;
  look(q);
  while (q->counted < last && q->counted < q->finished) {
    count_one(q, q->counted + 1);
    q->counted++;
  }
}

void tickets_count(Tickets *q) {
  pthread_mutex_lock(&q->lock);
  count_to(q, 0);
  pthread_mutex_unlock(&q->lock);
}

/* ---- starting and waiting ---- */

static bool counted_up_to(Tickets *q, CommTicket t) {
  pthread_mutex_lock(&q->lock);
  count_to(q, t);
  bool yes = q->counted >= t;
  pthread_mutex_unlock(&q->lock);
  return yes;
}

/* The watch ends the process should this not end. */
static void until_counted(Tickets *q, CommTicket t) {
  struct timespec pause = {.tv_nsec = 50000};
  while (!counted_up_to(q, t)) nanosleep(&pause, NULL);
}

static void slot_prepare(Tickets *q, Slot *s, TicketLabel label) {
  if (!s->ready) {
    s->ready = q->ops->event_create(q->device);
    s->begin = q->ops->event_create(q->device);
    s->done = q->ops->event_create(q->device);
    s->reached = q->ops->event_create(q->device);
  }
  s->label = label;
  s->ended = s->waited = false;
}

static DeviceStream stream_of(int track) { return (DeviceStream)(STREAM_COMM + track); }

CommTicket tickets_start(Tickets *q, TicketLabel label, int track) {
  if (q->started + 1 >= MAX_TICKETS) until_counted(q, q->started + 2 - MAX_TICKETS);
  pthread_mutex_lock(&q->lock);
  CommTicket t = q->started + 1;
  Slot *s = slot_of(q, t);
  slot_prepare(q, s, label);
  s->track = track;
  q->ops->event_record(q->device, STREAM_COMPUTE, s->ready);
  q->ops->stream_wait(q->device, stream_of(track), s->ready);
  q->ops->event_record(q->device, stream_of(track), s->begin);
  q->started = t;
  pthread_mutex_unlock(&q->lock);
  return t;
}

void tickets_end(Tickets *q, CommTicket t) {
  pthread_mutex_lock(&q->lock);
  require(t == q->started);
  Slot *s = slot_of(q, t);
  q->ops->event_record(q->device, stream_of(s->track), s->done);
  s->ended = true;
  pthread_mutex_unlock(&q->lock);
}

/* Compute waits for the last of each track up to t. */
static void wait_for_tracks(Tickets *q, CommTicket t) {
  bool told[MAX_TRACKS] = {false};
  CommTicket first = q->waited > q->counted ? q->waited : q->counted;
  for (; t > first; t--) {
    const Slot *s = slot_of(q, t);
    if (!told[s->track]) q->ops->stream_wait(q->device, STREAM_COMPUTE, s->done);
    told[s->track] = true;
  }
}

void tickets_wait(Tickets *q, CommTicket t) {
  pthread_mutex_lock(&q->lock);
  require(t <= q->started);
  /* What was counted is done, and compute was told to wait for what came before `waited`. */
  if (t > q->waited && t > q->counted) {
    Slot *s = slot_of(q, t);
    q->ops->event_record(q->device, STREAM_COMPUTE, s->reached);
    wait_for_tracks(q, t);
    s->waited = true;
    q->waited = t;
  }
  pthread_mutex_unlock(&q->lock);
}

void tickets_drain(Tickets *q) { until_counted(q, q->started); }

bool tickets_oldest(Tickets *q, CommTicket *t, TicketLabel *label, bool *runs) {
  pthread_mutex_lock(&q->lock);
  look(q);
  bool any = q->finished < q->started;
  if (any) {
    *t = q->finished + 1;
    *label = slot_of(q, *t)->label;
    *runs = is_done(q, slot_of(q, *t)->ready);
  }
  pthread_mutex_unlock(&q->lock);
  return any;
}
