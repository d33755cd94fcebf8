/* comm_queue: collectives that are started and waited for. Without a thread a start does its work
 * at once. */
#include "kernels/cpu/comm.h"

bool comm_queue_runs(void) { return false; }
void comm_queue_start(void) {}
void comm_queue_stop(void) {}

CommTicket comm_start_all_gather(Comm *c, const void *send, void *recv,
                                 const size_t *bytes_of_rank) {
  comm_all_gather(c, send, recv, bytes_of_rank);
  return 0;
}

CommTicket comm_start_reduce_scatter_f32(Comm *c, const float *send, float *recv,
                                         const size_t *count_of_rank) {
  comm_reduce_scatter_f32(c, send, recv, count_of_rank);
  return 0;
}

CommTicket comm_start_all_to_all(Comm *c, const void *send, const size_t *send_bytes, void *recv,
                                 const size_t *recv_bytes) {
  comm_all_to_all(c, send, send_bytes, recv, recv_bytes);
  return 0;
}

CommTicket comm_start_work(CollKind kind, void (*work)(void *arg), void *arg) {
  require(kind >= 0 && kind < COLL_KINDS);
  work(arg);
  return 0;
}

void comm_wait(CommTicket t) { require(t == 0); }
void comm_set_timeout(double seconds) { require(seconds >= 0); }
