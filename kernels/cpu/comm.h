/* Inside of the collectives: what the launcher makes and comm*.c use. Nobody else includes this but
 * tests.
 *
 * comm.c says what goes where (a CommCall), comm_queue.c when it runs and on which thread,
 * comm_exchange.c moves the blocks, comm_stall.c finds out who keeps the others waiting. Over
 * device memory comm_device.c carries calls out; comm_device.h. */
#ifndef KERNELS_CPU_COMM_H
#define KERNELS_CPU_COMM_H

#include <mpi.h>

#include "kernels/cpu/comm_device.h"
#include "kernels/kernels.h"

enum { LANE_DEPTH = 4 };

/* One block in one direction: a row of messages, of which at most LANE_DEPTH are under way. */
typedef struct CommLane {
  const char *send; /* one of the two, the other NULL */
  char *recv;
  size_t bytes, posted, done;
  int rank;                        /* in the group: where it goes or comes from */
  MPI_Request request[LANE_DEPTH]; /* of message number i at i % LANE_DEPTH */
  int n_posted, n_done;            /* messages */
} CommLane;

struct Comm {
  MPI_Comm mpi; /* MPI_COMM_NULL in a group of one */
  int size, rank;
  const char *name;     /* "all", "intra", "inter": for messages */
  bool *same_node;      /* [size] traffic with this rank stays inside the node */
  int *world_rank;      /* [size] for messages */
  size_t message_bytes; /* longest message; tests make it small */
  CommLane *lane;       /* [2 size] the exchange under way */
  void *scratch;        /* grows, is kept */
  size_t scratch_bytes;
  bool on_device;  /* over device memory; mpi then is the host Comm's */
  void *transport; /* of comm_device_create */
  Comm *next;      /* of the device's */
};

/* A collective, or compute between collectives, that waits to be run. It owns peer. */
typedef struct CommCall {
  CollKind kind;
  Comm *comm;
  CommPeer *peer; /* [size] the own entry is copied, or is the own term of a sum */
  float *sum;     /* reduce-scatter: what the blocks (received into scratch) are added up in */
  void (*work)(void *arg); /* compute: the only thing done */
  void *arg;
  bool take; /* all ranks meet before and after work */
} CommCall;

/* comm.c. Takes mpi over (comm_destroy frees it). node and world_rank: of each rank of the group.
 */
Comm *comm_create(MPI_Comm mpi, int size, int rank, const char *name, const int *node_of_rank,
                  const int *world_rank);
void comm_destroy(Comm *c);
/* Dies with rank, call and MPI's own words unless rc is MPI_SUCCESS. */
void comm_check(int rc, const char *group, const char *call);
/* Carries the call out on this thread, counts its bytes, and frees what it owns. */
void comm_run(CommCall *call);
void *comm_scratch(Comm *c, size_t bytes); /* valid until the next call */
/* What a call that sends moves; and counts it. */
TrafficCount comm_bytes_of(const CommCall *call);
void comm_count_bytes(const CommCall *call);

/* comm_queue.c. */
CommTicket comm_submit(CommCall call);
void comm_call(CommCall call); /* on this thread, behind all that was started */
void comm_drain(
    void); /* waits for all that was started: MPI is the caller's until it starts more */
void traffic_add(CollKind kind, const TrafficCount *n);

/* comm_device.c: what comm_submit and comm_wait do for Comms over device memory. */
CommTicket comm_device_submit(CommCall call);
void comm_device_wait(CommTicket t);
void comm_device_count(void); /* brings the traffic up to date */
void comm_device_leave(Comm *c);
void comm_device_abort(void);    /* ends what the device has under way, as the process does */
enum { DEVICE_TICKET_BIT = 63 }; /* set in tickets of devices */

/* comm_exchange.c: carries out what peer says with every other rank. */
void comm_exchange(Comm *c, CollKind kind, const CommPeer *peer);
/* MPI is for one thread at a time: whoever calls it while the watch of a device may do so as well
 * enters first. mpi_try_enter gives up after some seconds. */
void mpi_enter(void);
bool mpi_try_enter(double seconds);
void mpi_leave(void);

/* comm_stall.c: ranks that wait for long tell all others whom they wait for, so that the one that
 * dies first names the rank that is to blame, and not one that waits as well. */
void stall_open(MPI_Comm world); /* takes a copy; no announcements before */
void stall_close(void);
/* Whom this rank waits for: any of the n ranks first, first + step..; n = 0: for nobody any more.
 */
void stall_announce(int first, int step, int n);
/* "rank 1 (which waits for rank 2), rank 3"; text has room for size bytes. */
void stall_describe(const int *world_ranks, int n, char *text, size_t size);
/* Drops ranks that wait themselves where others do not; how many are left. */
int stall_keep_silent(int *world_ranks, int n);

#endif
