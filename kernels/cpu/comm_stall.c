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

/* The ranks first, first + step.. of which there are n; also as it travels. */
typedef struct Ranks {
  int first, step, n;
} Ranks;
enum { RANKS_INTS = sizeof(Ranks) / sizeof(int) };

/* Used by whoever has MPI at the time (mpi_enter). */
static struct {
  MPI_Comm mpi;
  int rank, size;
  Ranks *waits_for;     /* [size] by what each rank has said; n = 0: nobody */
  Ranks *said;          /* [size] what is on its way to each rank */
  MPI_Request *request; /* [size] */
} stall = {.mpi = MPI_COMM_NULL};

void stall_open(MPI_Comm world) {
  comm_check(MPI_Comm_dup(world, &stall.mpi), "stall", "MPI_Comm_dup");
  MPI_Comm_set_errhandler(stall.mpi, MPI_ERRORS_RETURN);
  MPI_Comm_rank(stall.mpi, &stall.rank);
  MPI_Comm_size(stall.mpi, &stall.size);
  size_t n = (size_t)stall.size;
  stall.waits_for = mem_zalloc(n, sizeof(Ranks));
  stall.said = mem_zalloc(n, sizeof(Ranks));
  stall.request = mem_alloc(n, sizeof(MPI_Request));
  for (size_t r = 0; r < n; r++) stall.request[r] = MPI_REQUEST_NULL;
}

/* Reads what has arrived. */
static void listen(void) {
  for (;;) {
    int any = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, 0, stall.mpi, &any, &status) != MPI_SUCCESS || !any) return;
    Ranks *says = &stall.waits_for[status.MPI_SOURCE];
    if (MPI_Recv(says, RANKS_INTS, MPI_INT, status.MPI_SOURCE, 0, stall.mpi, MPI_STATUS_IGNORE) !=
        MPI_SUCCESS)
      *says = (Ranks){0};
  }
}

/* A rank that has not taken the last word is not told the next one: it is the one that hangs. */
void stall_announce(int first, int step, int n) {
  if (stall.mpi == MPI_COMM_NULL) return;
  listen();
  for (int r = 0; r < stall.size; r++) {
    int taken = 1;
    if (r == stall.rank) continue;
    if (MPI_Test(&stall.request[r], &taken, MPI_STATUS_IGNORE) != MPI_SUCCESS || !taken) continue;
    stall.said[r] = (Ranks){first, step, n};
    MPI_Isend(&stall.said[r], RANKS_INTS, MPI_INT, r, 0, stall.mpi, &stall.request[r]);
  }
}

/* Follows who waits for whom to one who waits for nobody; -1: there is none but what was seen. */
static int find_silent(int rank, bool *seen) {
  if (rank < 0 || rank >= stall.size || rank == stall.rank || seen[rank]) return -1;
  seen[rank] = true;
  Ranks w = stall.waits_for[rank];
  if (w.n == 0) return rank;
  for (int i = 0; i < w.n; i++) {
    int found = find_silent(w.first + i * w.step, seen);
    if (found >= 0) return found;
  }
  return -1;
}

/* Ranks that wait in a circle make different calls, and then the first is as good as any. */
static int to_blame(int rank) {
  bool *seen = mem_zalloc((size_t)stall.size, sizeof *seen);
  int found = find_silent(rank, seen);
  free(seen);
  return found < 0 ? rank : found;
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

int stall_keep_silent(int *world_ranks, int n) {
  if (stall.mpi == MPI_COMM_NULL) return n;
  listen();
  int kept = 0;
  for (int i = 0; i < n; i++)
    if (stall.waits_for[world_ranks[i]].n == 0) kept++;
  if (kept == 0 || kept == n) return n;
  kept = 0;
  for (int i = 0; i < n; i++)
    if (stall.waits_for[world_ranks[i]].n == 0) world_ranks[kept++] = world_ranks[i];
  return kept;
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
