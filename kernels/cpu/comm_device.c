/* comm_device: collectives over device memory.
 *
 * With a transport every call is a ticket of a track, in the order of the calls of all groups; a
 * caller that waits makes the compute stream wait, never the host. Chains take the tracks by turns.
 * Groups of one rank copy, in their place. Without a transport (one rank; ranks that share a GPU) a
 * call is done on the compute stream when it returns: blocks go down to the host, through MPI, and
 * up again.
 *
 * Bytes are counted when a call is made, seconds when the device has done it.
 */
#include "kernels/cpu/comm_device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/backend.h"
#include "kernels/cpu/comm.h"

/* The process's one device with collectives; all of its Comms, so that the device can go first. */
static struct {
  Device *device;
  const CommDeviceOps *ops;
  Tickets *tickets;  /* NULL: without a transport */
  int tracks, track; /* of the chain that is being started */
  Watch *watch;
  Comm *comms;
  CommCaptured captured; /* of the step under way */
} on;

static const CommTicket DEVICE_TICKET = (CommTicket)1 << DEVICE_TICKET_BIT;

/* The watch talks to other ranks while the compute thread may be in MPI. */
static void check_threads(void) {
  int level;
  comm_check(MPI_Query_thread(&level), "world", "MPI_Query_thread");
  if (level < MPI_THREAD_SERIALIZED)
    die("this MPI is for one thread only: collectives of a device need MPI_THREAD_SERIALIZED");
}

void comm_device_open(Device *d, const CommDeviceOps *ops, int tracks) {
  require(tracks >= 0 && tracks <= MAX_TRACKS);
  if (on.device == d) return;
  if (on.device) die("collectives over the memory of a second device: a process has one");
  on.device = d;
  on.ops = ops;
  on.tracks = tracks;
  if (!tracks) return;
  if (launch_world() > 1) check_threads();
  on.tickets = tickets_create(d, ops);
  on.watch = watch_start(d, ops, on.tickets);
}

Comm *comm_device_create(const Comm *host, const char *name, void *transport) {
  require(on.device);
  int *node = mem_alloc((size_t)host->size, sizeof *node);
  for (int r = 0; r < host->size; r++) node[r] = !host->same_node[r];
  Comm *c = comm_create(host->mpi, host->size, host->rank, name, node, host->world_rank);
  free(node);
  c->on_device = true;
  c->transport = transport;
  c->next = on.comms;
  on.comms = c;
  return c;
}

static void leave(Comm *c) {
  if (c->transport) on.ops->leave(on.device, c->transport);
  c->transport = NULL;
}

void comm_device_leave(Comm *c) {
  if (on.tickets) tickets_drain(on.tickets);
  for (Comm **at = &on.comms; *at; at = &(*at)->next)
    if (*at == c) {
      *at = c->next;
      leave(c);
      return;
    }
}

void comm_device_close(Device *d) {
  if (!on.device || on.device != d) return;
  if (on.tickets) tickets_drain(on.tickets);
  for (Comm *c = on.comms; c; c = c->next) leave(c);
  watch_stop(on.watch);
  tickets_free(on.tickets);
  memset(&on, 0, sizeof on);
}

/* ---- the end ---- */

static void *abort_transport(void *done) {
  on.ops->abort_all(on.device);
  atomic_store((_Atomic bool *)done, true);
  return NULL;
}

/* An abort may hang as well, since the thread that dies may be anywhere: it gets two seconds, once.
 */
void comm_device_abort(void) {
  static _Atomic bool tried = false, done = false;
  pthread_t thread;
  if (!on.tickets || atomic_exchange(&tried, true)) return;
  if (pthread_create(&thread, NULL, abort_transport, &done)) return;
  struct timespec pause = {.tv_nsec = 1000000};
  for (double start = clock_seconds(); !atomic_load(&done) && clock_seconds() - start < 2;)
    nanosleep(&pause, NULL);
}

/* ---- what a call does ---- */

static size_t staged_bytes(const Comm *c, const CommPeer *peer) {
  size_t bytes = 0;
  for (int r = 0; r < c->size; r++) bytes += peer[r].send_bytes + peer[r].recv_bytes;
  return bytes;
}

/* Blocks to be sent come down to `at`, once where all ranks get the same; where it ends. */
static char *stage_down(const Comm *c, const CommPeer *peer, CommPeer *staged, char *at) {
  int last = -1;
  for (int r = 0; r < c->size; r++) {
    staged[r].send_bytes = peer[r].send_bytes;
    if (r == c->rank || !peer[r].send_bytes) continue;
    if (last >= 0 && peer[last].send == peer[r].send) {
      staged[r].send = staged[last].send;
      continue;
    }
    device_download(on.device, at, peer[r].send, peer[r].send_bytes);
    staged[r].send = at;
    at += peer[r].send_bytes;
    last = r;
  }
  return at;
}

static void exchange_through_host(Comm *c, CollKind kind, const CommPeer *peer) {
  CommPeer *staged = mem_zalloc((size_t)c->size, sizeof *staged);
  char *at = stage_down(c, peer, staged, comm_scratch(c, staged_bytes(c, peer)));
  for (int r = 0; r < c->size; r++) {
    staged[r].recv = at;
    staged[r].recv_bytes = peer[r].recv_bytes;
    at += peer[r].recv_bytes;
  }
  comm_drain();
  comm_exchange(c, kind, staged);
  for (int r = 0; r < c->size; r++)
    if (r != c->rank) device_upload(on.device, peer[r].recv, staged[r].recv, peer[r].recv_bytes);
  free(staged);
}

static void copy_own(const CommPeer *own) {
  if (own->send != own->recv) device_copy(on.device, own->recv, own->send, own->send_bytes);
}

static void carry_out(const CommCall *call) {
  Comm *c = call->comm;
  if (call->work) {
    if (call->take) on.ops->meet(on.device, c->transport, c->size, c->rank);
    call->work(call->arg);
    if (call->take) on.ops->meet(on.device, c->transport, c->size, c->rank);
  } else if (c->transport) {
    on.ops->exchange(on.device, c->transport, call->kind, call->peer, c->size, c->rank);
  } else {
    if (c->size > 1) exchange_through_host(c, call->kind, call->peer);
    copy_own(&call->peer[c->rank]);
  }
}

/* ---- when ---- */

static void run_at_once(const CommCall *call) {
  double start = clock_seconds();
  carry_out(call);
  if (call->comm->size > 1 && !call->work)
    traffic_add(call->kind, &(TrafficCount){.seconds = clock_seconds() - start});
}

static size_t received_bytes(const CommCall *call) {
  size_t bytes = 0;
  for (int r = 0; r < call->comm->size && call->peer; r++)
    if (r != call->comm->rank) bytes += call->peer[r].recv_bytes;
  return bytes;
}

/* What is queued in between is a ticket of the chain's track. */
static CommTicket start_on_track(TicketLabel label) {
  CommTicket t = tickets_start(on.tickets, label, on.track);
  on.ops->use_stream(on.device, (DeviceStream)(STREAM_COMM + on.track));
  return t;
}

static void end_on_track(CommTicket t) {
  on.ops->use_stream(on.device, STREAM_COMPUTE);
  tickets_end(on.tickets, t);
}

static CommTicket run_behind(const CommCall *call) {
  TicketLabel label = {call->kind, call->comm, received_bytes(call), false};
  CommTicket t = start_on_track(label);
  carry_out(call);
  end_on_track(t);
  if (comm_queue_runs()) return t | DEVICE_TICKET;
  tickets_wait(on.tickets, t);
  return 0;
}

/* ---- captured steps ---- */

size_t comm_captured_bytes(const Comm *c) {
  if (c->size == 1) return SIZE_MAX;
  if (!c->transport || !on.ops->captured_bytes) return 0;
  return on.ops->captured_bytes(on.device, c->transport);
}

static void capture(const CommCall *call) {
  const Comm *c = call->comm;
  if (call->work) die("compute between collectives while a step is captured");
  if (!comm_captured_bytes(c))
    die("a collective over group '%s' while a step is captured", c->name);
  carry_out(call);
  if (c->size == 1) return;
  TrafficCount n = comm_bytes_of(call), *sum = &on.captured.traffic.of[call->kind];
  on.captured.comm = c;
  on.captured.bytes += (size_t)(n.intra_bytes + n.inter_bytes);
  sum->calls += n.calls;
  sum->intra_bytes += n.intra_bytes;
  sum->inter_bytes += n.inter_bytes;
}

CommCaptured comm_device_captured(void) {
  CommCaptured c = on.captured;
  on.captured = (CommCaptured){0};
  return c;
}

void comm_device_launch(const CommCaptured *c, void (*launch)(Device *d, void *graph),
                        void *graph) {
  TicketLabel label = {COLL_ALL_GATHER, c->comm, c->bytes, true};
  CommTicket t = start_on_track(label);
  launch(on.device, graph);
  end_on_track(t);
  tickets_wait(on.tickets, t);
  for (int k = 0; k < COLL_KINDS; k++)
    if (c->traffic.of[k].calls) traffic_add((CollKind)k, &c->traffic.of[k]);
}

/* ---- calls ---- */

bool comm_can_take(const Comm *c) {
  return c->transport && on.ops->can_meet && on.ops->can_meet(on.device, c->transport);
}

CommTicket comm_device_submit(CommCall call) {
  CommTicket t = 0;
  if (!on.device) die("a collective over group '%s', whose device is closed", call.comm->name);
  if (!call.work && call.kind != COLL_ALL_GATHER && call.kind != COLL_ALL_TO_ALL)
    die("%s over group '%s': over device memory there are all-gather and all-to-all only",
        coll_name(call.kind), call.comm->name);
  if (on.device->capturing)
    capture(&call);
  else if (on.tickets)
    t = run_behind(&call);
  else
    run_at_once(&call);
  if (!on.device->capturing && !call.work && call.comm->size > 1) comm_count_bytes(&call);
  free(call.peer);
  return t;
}

void comm_new_chain(void) {
  if (on.tracks > 1) on.track = (on.track + 1) % on.tracks;
}

void comm_device_wait(CommTicket t) {
  if (on.tickets) tickets_wait(on.tickets, t & ~DEVICE_TICKET);
}

void comm_device_count(void) {
  if (on.tickets) tickets_count(on.tickets);
}
