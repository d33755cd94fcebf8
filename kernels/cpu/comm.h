/* Inside of a Comm, shared by the launcher (which makes them) and the collectives (which use them).
 * Nobody else includes this but tests. */
#ifndef KERNELS_CPU_COMM_H
#define KERNELS_CPU_COMM_H

#include <mpi.h>

#include "kernels/kernels.h"

typedef struct CommPeer {
  const char *send;
  char *recv;
  size_t send_bytes, recv_bytes;
} CommPeer;

struct Comm {
  MPI_Comm mpi; /* MPI_COMM_NULL in a group of one */
  int size, rank;
  const char *name;      /* "all", "intra", "inter": for messages */
  bool *same_node;       /* [size] traffic with this rank stays inside the node */
  size_t message_bytes;  /* longest message: MPI counts are int. Tests make it small. */
  CommPeer *peer;        /* [size] the exchange that is being prepared */
  MPI_Request *requests; /* [2 size] receives first */
  int *expected;         /* [2 size] bytes of each posted receive, and its rank */
  void *scratch;         /* grows, is kept */
  size_t scratch_bytes;
};

/* Takes mpi over (comm_destroy frees it). nodes_of_rank: node of each rank of the group. */
Comm *comm_create(MPI_Comm mpi, int size, int rank, const char *name, const int *node_of_rank);
void comm_destroy(Comm *c);

/* Dies with rank, call and MPI's own words unless rc is MPI_SUCCESS. */
void comm_check(int rc, const char *group, const char *call);

#endif
