/* Collectives over device memory: between what is the same for every device (comm_device.c,
 * comm_tickets.c, comm_watch.c) and what a device does (cuda/comm.cu; tests have a simulated one).
 * No MPI in here, so that CUDA sources can include it.
 *
 * A device has a stream for compute and one or more for communication, tracks. Each runs what is
 * queued on it in order; events can be recorded on one and waited for by the others. The
 * transport's exchange queues the blocks of a collective and returns. Where there is no transport
 * (ranks that share a GPU), blocks go through the host by MPI, and every call is done when it
 * returns. */
#ifndef KERNELS_CPU_COMM_DEVICE_H
#define KERNELS_CPU_COMM_DEVICE_H

#include "kernels/kernels.h"

typedef enum DeviceStream { STREAM_COMPUTE, STREAM_COMM, STREAM_COMM2 } DeviceStream;
enum { MAX_TRACKS = 2 };

/* What one rank of a group sends to and receives from another. */
typedef struct CommPeer {
  const char *send;
  char *recv;
  size_t send_bytes, recv_bytes;
} CommPeer;

typedef struct CommDeviceOps {
  void *(*event_create)(Device *d); /* keeps time */
  void (*event_destroy)(Device *d, void *event);
  void (*event_record)(Device *d, DeviceStream s, void *event);
  bool (*event_done)(Device *d, void *event); /* asks, does not wait */
  double (*seconds_between)(Device *d, void *from,
                            void *to); /* both done; below 0: to came first */
  void (*stream_wait)(Device *d, DeviceStream s, void *event);
  void (*use_stream)(Device *d, DeviceStream s); /* where ops, copies and exchanges go */
  /* Blocks to and from all of the group's ranks, the own one too, on the stream in use. Those of
   * two tracks may run side by side. */
  void (*exchange)(Device *d, void *group, CollKind kind, const CommPeer *peer, int size, int rank);
  /* On the stream in use: what is behind it waits until the streams of all ranks have come as far,
   * track by track. can_meet NULL, or false, on all ranks of the group: it has no such thing. */
  bool (*can_meet)(Device *d, void *group);
  void (*meet)(Device *d, void *group, int size, int rank);
  /* The transport's own troubles: true with their description. Called from any thread. */
  bool (*failed)(Device *d, char *text, size_t size);
  void (*abort_all)(Device *d);          /* ends what is under way, before the process ends */
  void (*leave)(Device *d, void *group); /* frees it */
  void (*enter_thread)(Device *d);       /* this thread will call event_done and failed */
  /* The longest block of an exchange that is captured; NULL, 0: it cannot be. */
  size_t (*captured_bytes)(Device *d, void *group);
} CommDeviceOps;

/* One device to a process: tickets do not say whose they are. comm_device_open comes first; with
 * tracks, groups of several ranks have a transport, and calls run behind compute, those of one
 * chain (comm_new_chain) on one track. 0: no transport. */
void comm_device_open(Device *d, const CommDeviceOps *ops, int tracks);
/* The ranks of `host` once more, over the memory of the device; the caller frees it before `host`,
 * or after the device is closed. group: the transport's; NULL where there is none. */
Comm *comm_device_create(const Comm *host, const char *name, void *group);
/* Ends the device's part in all Comms, behind all that was started; they can only be freed then.
 * Nothing happens when d is not the device that was opened. */
void comm_device_close(Device *d);

/* ---- captured steps: what is called between device_capture_begin and _end is queued on the
 * compute stream and kept with the rest. A launch of a step with collectives is one ticket, so that
 * the watch sees a rank that does not come; its seconds are compute's and counted nowhere. */
typedef struct CommCaptured {
  const Comm *comm; /* of several ranks, that lives until the last launch; NULL: there was none */
  size_t bytes;     /* received in each launch */
  Traffic traffic;
} CommCaptured;
/* The collectives since the last call; none where no device has collectives. */
CommCaptured comm_device_captured(void);
/* Queues launch(d, graph), which uses the current stream. */
void comm_device_launch(const CommCaptured *c, void (*launch)(Device *d, void *graph), void *graph);

/* The time limit of comm_set_timeout, 0: none. */
double comm_timeout(void);

/* ---- tickets (comm_tickets.c): what is queued on the tracks, one after another on each.
 *
 * start: the track waits for compute as it stands; end: the ticket is what was queued in between.
 * wait: compute waits for it and all before it. Everything in these is queued and none waits for
 * the device, but start, while MAX_TICKETS are under way, and drain. One thread starts and waits,
 * any may ask. */
typedef struct Tickets Tickets;
typedef struct TicketLabel {
  CollKind kind;
  const Comm *comm; /* lives until the ticket is done */
  size_t bytes;     /* that are received */
  bool computes;    /* a captured step: its seconds are not a collective's */
} TicketLabel;
enum { MAX_TICKETS = 256 };

Tickets *tickets_create(Device *d, const CommDeviceOps *ops);
void tickets_free(Tickets *q);                                      /* all are done */
CommTicket tickets_start(Tickets *q, TicketLabel label, int track); /* from 1, in order */
void tickets_end(Tickets *q, CommTicket t);
void tickets_wait(Tickets *q, CommTicket t);
void tickets_drain(Tickets *q); /* until the device has done all */
/* Adds the seconds of tickets that are done and were waited for to the traffic: exposed while
 * compute had come to the wait, hidden before. */
void tickets_count(Tickets *q);
/* The oldest that is not done; false: all are. runs: compute has come to its start. */
bool tickets_oldest(Tickets *q, CommTicket *t, TicketLabel *label, bool *runs);

/* ---- the watch (comm_watch.c): a thread that ends the process when a ticket takes longer than the
 * time limit, or the transport reports an error; the host may be anywhere, in a wait for the device
 * as well. */
typedef struct Watch Watch;
Watch *watch_start(Device *d, const CommDeviceOps *ops, Tickets *q);
void watch_stop(Watch *w);

#endif
