/* comm_stall: who keeps the others waiting.
 *
 * A rank that waits for long says for whom, to all ranks, and says so again when it waits no more.
 * These few words go over a communicator of their own and are read only by ranks that wait
 * themselves. A rank that gives up can thus tell a rank that waits too from one that says nothing:
 * one that hangs, was stopped or is gone.
 *
 * Every rank is both quick and slow here: nothing may block, since the rank spoken to may be the
 * one that is gone.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/comm.h"

/* Used by whoever runs collectives at the time; one thread at a time does. */
static struct {
  MPI_Comm mpi;
  int rank, size;
  int *waits_for;       /* [size] by what each rank has said; -1: nobody */
  int *said;            /* [size] what is on its way to each rank */
  MPI_Request *request; /* [size] */
} stall = {.mpi = MPI_COMM_NULL};

void stall_open(MPI_Comm world) {
  comm_check(MPI_Comm_dup(world, &stall.mpi), "stall", "MPI_Comm_dup");
  MPI_Comm_set_errhandler(stall.mpi, MPI_ERRORS_RETURN);
  MPI_Comm_rank(stall.mpi, &stall.rank);
  MPI_Comm_size(stall.mpi, &stall.size);
  size_t n = (size_t)stall.size;
  stall.waits_for = mem_alloc(n, sizeof(int));
  stall.said = mem_alloc(n, sizeof(int));
  stall.request = mem_alloc(n, sizeof(MPI_Request));
  for (size_t r = 0; r < n; r++) {
    stall.waits_for[r] = -1;
    stall.request[r] = MPI_REQUEST_NULL;
  }
}

/* Reads what has arrived. */
static void listen(void) {
  for (;;) {
    int any = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, 0, stall.mpi, &any, &status) != MPI_SUCCESS || !any) return;
    int from = status.MPI_SOURCE;
    if (MPI_Recv(&stall.waits_for[from], 1, MPI_INT, from, 0, stall.mpi, MPI_STATUS_IGNORE) !=
        MPI_SUCCESS)
      stall.waits_for[from] = -1;
  }
}

/* A rank that has not taken the last word is not told the next one: it is the one that hangs. */
void stall_announce(int world_rank) {
  if (stall.mpi == MPI_COMM_NULL) return;
  listen();
  for (int r = 0; r < stall.size; r++) {
    int taken = 1;
    if (r == stall.rank) continue;
    if (MPI_Test(&stall.request[r], &taken, MPI_STATUS_IGNORE) != MPI_SUCCESS || !taken) continue;
    stall.said[r] = world_rank;
    MPI_Isend(&stall.said[r], 1, MPI_INT, r, 0, stall.mpi, &stall.request[r]);
  }
}

/* Follows who waits for whom to one who waits for nobody. Ranks that wait in a circle make
 * different calls, and then the first is as good as any. */
static int to_blame(int rank) {
  int at = rank;
  for (int hops = 0; hops < stall.size; hops++) {
    if (at == stall.rank) return rank;
    int next = stall.waits_for[at];
    if (next < 0 || next >= stall.size) return at;
    at = next;
  }
  return rank;
}

void stall_describe(const int *world_ranks, int n, char *text, size_t size) {
  bool known = stall.mpi != MPI_COMM_NULL;
  if (known) listen();
  size_t at = 0;
  text[0] = '\0';
  for (int i = 0; i < n && at < size; i++) {
    int rank = world_ranks[i], blame = known ? to_blame(rank) : rank;
    at += (size_t)snprintf(text + at, size - at, "%srank %d", i ? ", " : "", rank);
    if (blame != rank && at < size)
      at += (size_t)snprintf(text + at, size - at, " (which waits for rank %d)", blame);
  }
}

void stall_close(void) {
  if (stall.mpi == MPI_COMM_NULL) return;
  listen();
  for (int r = 0; r < stall.size; r++)
    if (stall.request[r] != MPI_REQUEST_NULL) MPI_Request_free(&stall.request[r]);
  MPI_Comm_free(&stall.mpi);
  free(stall.waits_for);
  free(stall.said);
  free(stall.request);
  memset(&stall, 0, sizeof stall);
  stall.mpi = MPI_COMM_NULL;
}
