/* A device that only keeps time: streams, events, and collectives that last as long as a test
 * says. What is queued starts when the stream is free and the host has queued it; so every event's
 * time is known when it is recorded. The clock is the test's own, or (own_clock false) the host's.
 */
#ifndef SIM_DEVICE_H
#define SIM_DEVICE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/comm_device.h"

typedef struct SimEvent {
  double time; /* when it passes */
} SimEvent;

typedef struct Sim {
  Device base; /* first */
  bool own_clock;
  _Atomic double now; /* the own clock; the watch looks too */
  double tick;        /* by how much a look at an event moves it on */
  double free_at[1 + MAX_TRACKS];
  DeviceStream current;
  double exchange_seconds;     /* of the exchanges to come; INFINITY: they never end */
  const char *_Atomic trouble; /* the transport's */
  bool can_meet;
  double meet_seconds;
  int events, exchanges, meetings;
} Sim;

static inline Sim *sim_of(Device *d) { return (Sim *)(void *)d; }
static inline double sim_now(const Sim *s) { return s->own_clock ? s->now : clock_seconds(); }

/* Queues what takes so long. */
static inline void sim_run(Sim *s, DeviceStream stream, double seconds) {
  s->free_at[stream] = fmax(s->free_at[stream], sim_now(s)) + seconds;
}

static inline void *sim_event_create(Device *d) {
  sim_of(d)->events++;
  return mem_zalloc(1, sizeof(SimEvent));
}
static inline void sim_event_destroy(Device *d, void *event) {
  sim_of(d)->events--;
  free(event);
}
static inline void sim_event_record(Device *d, DeviceStream stream, void *event) {
  sim_run(sim_of(d), stream, 0);
  ((SimEvent *)event)->time = sim_of(d)->free_at[stream];
}
static inline bool sim_event_done(Device *d, void *event) {
  Sim *s = sim_of(d);
  if (s->own_clock) s->now = s->now + s->tick;
  return ((SimEvent *)event)->time <= sim_now(s);
}
static inline double sim_seconds_between(Device *d, void *from, void *to) {
  (void)d;
  return ((SimEvent *)to)->time - ((SimEvent *)from)->time;
}
static inline void sim_stream_wait(Device *d, DeviceStream stream, void *event) {
  Sim *s = sim_of(d);
  s->free_at[stream] = fmax(s->free_at[stream], ((SimEvent *)event)->time);
}
static inline void sim_use_stream(Device *d, DeviceStream stream) { sim_of(d)->current = stream; }
static inline void sim_exchange(Device *d, void *group, CollKind kind, const CommPeer *peer,
                                int size, int rank) {
  (void)group, (void)kind, (void)peer, (void)size, (void)rank;
  Sim *s = sim_of(d);
  sim_run(s, s->current, s->exchange_seconds);
  s->exchanges++;
}
static inline bool sim_can_meet(Device *d, void *group) {
  (void)group;
  return sim_of(d)->can_meet;
}
static inline void sim_meet(Device *d, void *group, int size, int rank) {
  (void)group, (void)size, (void)rank;
  Sim *s = sim_of(d);
  sim_run(s, s->current, s->meet_seconds);
  s->meetings++;
}
static inline bool sim_failed(Device *d, char *text, size_t size) {
  const char *trouble = sim_of(d)->trouble;
  text[0] = '\0';
  if (trouble) strncat(text, trouble, size - 1);
  return trouble != NULL;
}
static inline void sim_nothing(Device *d) { (void)d; }
static inline void sim_leave(Device *d, void *group) { (void)d, (void)group; }

static const CommDeviceOps sim_ops = {.event_create = sim_event_create,
                                      .event_destroy = sim_event_destroy,
                                      .event_record = sim_event_record,
                                      .event_done = sim_event_done,
                                      .seconds_between = sim_seconds_between,
                                      .stream_wait = sim_stream_wait,
                                      .use_stream = sim_use_stream,
                                      .exchange = sim_exchange,
                                      .can_meet = sim_can_meet,
                                      .meet = sim_meet,
                                      .failed = sim_failed,
                                      .abort_all = sim_nothing,
                                      .leave = sim_leave,
                                      .enter_thread = sim_nothing};

#endif
