/* Exchanges of a captured step: one kernel each, which writes into the other ranks' memory and
 * waits for what they write into its own.
 *
 * Copy engines cost several queued operations a block, whose numbers the host gives out: too much
 * for the hundreds of small exchanges of a decode step, and nothing that a graph can repeat. Here
 * every thread block has a share of all blocks of bytes and takes care of it alone:
 *
 *   its share to each other rank's box, then there the flag of this rank and thread block;
 *   waits for the others' flags in its own box; its share of each from there to where it belongs.
 *
 * A flag is the number of the exchange, counted in memory, so a graph can be launched again. An
 * exchange ends with all flags of it, both ways, zero bytes or not: a rank that is in exchange n
 * knows the others to be done with n - 2, whose slot it overwrites. A wait without end is noticed
 * by the ticket of the launch (kernels/cpu/comm_watch.c). */
#include "kernels/cuda/comm_step.h"

namespace {

enum { SLOTS = 2 };

struct StepFlags {
  uint32_t filled[STEP_PEERS][STEP_BLOCKS]; /* by rank: the exchange whose share lies here */
};

struct StepPeer {
  const char *send, *here; /* here: the slots in this rank's box */
  char *recv, *there;      /* there: this rank's slots in the other's box */
  size_t send_bytes, recv_bytes;
  const uint32_t *flag_here;
  uint32_t *flag_there;
};

struct StepCall { /* an argument of the launch */
  StepPeer peer[STEP_PEERS];
  int ranks, rank;
  size_t slot_bytes;
  uint32_t *count;
};

__device__ inline void write_flag(uint32_t *flag, uint32_t n) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(n) : "memory");
}

/* Numbers only grow, cyclically: the other may be one ahead. */
__device__ inline void wait_for_flag(const uint32_t *flag, uint32_t n) {
  uint32_t found;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  } while (static_cast<int32_t>(found - n) < 0);
}

/* What lies in a box is read from L2, where other GPUs write. */
template <class T>
__device__ inline void copy_numbers(char *to, const char *from, size_t bytes) {
  for (size_t i = threadIdx.x; i < bytes / sizeof(T); i += STEP_THREADS)
    reinterpret_cast<T *>(to)[i] = __ldcg(reinterpret_cast<const T *>(from) + i);
}

/* This block's share of the bytes: the same at both ends, whatever their addresses. */
__device__ inline void copy_share(char *to, const char *from, size_t bytes) {
  size_t each = (bytes + 16 * STEP_BLOCKS - 1) / (16 * STEP_BLOCKS) * 16;
  size_t first = blockIdx.x * each;
  if (first >= bytes) return;
  to += first;
  from += first;
  bytes = bytes - first < each ? bytes - first : each;
  size_t align = reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from) | bytes;
  if (align % 16 == 0)
    copy_numbers<uint4>(to, from, bytes);
  else if (align % 4 == 0)
    copy_numbers<unsigned>(to, from, bytes);
  else if (align % 2 == 0)
    copy_numbers<unsigned short>(to, from, bytes);
  else
    copy_numbers<unsigned char>(to, from, bytes);
}

__global__ void __launch_bounds__(STEP_THREADS) step_kernel(const __grid_constant__ StepCall c) {
  int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  uint32_t n = c.count[block] + 1;
  size_t slot = n % SLOTS * c.slot_bytes;
  for (int i = 1; i < c.ranks; i++) { /* starting behind the own rank: not all to one */
    const StepPeer &p = c.peer[(c.rank + i) % c.ranks];
    copy_share(p.there + slot, p.send, p.send_bytes);
  }
  __syncthreads();
  bool other = thread < c.ranks && thread != c.rank;
  if (other) write_flag(c.peer[thread].flag_there + block, n);
  const StepPeer &own = c.peer[c.rank];
  if (own.send != own.recv) copy_share(own.recv, own.send, own.send_bytes);
  if (other) wait_for_flag(c.peer[thread].flag_here + block, n);
  __syncthreads();
  for (int r = 0; r < c.ranks; r++)
    if (r != c.rank) copy_share(c.peer[r].recv, c.peer[r].here + slot, c.peer[r].recv_bytes);
  if (thread == 0) c.count[block] = n;
}

/* The slots of a box for what `from` sends; ranks leave themselves out. */
char *slots_of(char *box, int from, int owner, size_t slot_bytes) {
  size_t ring = static_cast<size_t>(from < owner ? from : from - 1);
  return box + sizeof(StepFlags) + ring * SLOTS * slot_bytes;
}

uint32_t *flags_of(char *box, int from) { return reinterpret_cast<StepFlags *>(box)->filled[from]; }

}  // namespace

size_t step_flag_bytes(void) { return sizeof(StepFlags); }

size_t step_box_bytes(int ranks, size_t slot_bytes) {
  return sizeof(StepFlags) + static_cast<size_t>(ranks - 1) * SLOTS * slot_bytes;
}

void step_exchange(cudaStream_t stream, const StepGroup *g, const CommPeer *peer, int ranks,
                   int rank) {
  require(ranks <= STEP_PEERS);
  StepCall c{};
  c.ranks = ranks;
  c.rank = rank;
  c.slot_bytes = g->slot_bytes;
  c.count = g->count;
  for (int r = 0; r < ranks; r++) {
    StepPeer &p = c.peer[r];
    p.send = peer[r].send;
    p.recv = peer[r].recv;
    p.send_bytes = peer[r].send_bytes;
    p.recv_bytes = peer[r].recv_bytes;
    if (r == rank) continue;
    require(p.send_bytes <= g->slot_bytes && p.recv_bytes <= g->slot_bytes);
    p.there = slots_of(g->box[r], rank, r, g->slot_bytes);
    p.here = slots_of(g->box[rank], r, rank, g->slot_bytes);
    p.flag_there = flags_of(g->box[r], rank);
    p.flag_here = flags_of(g->box[rank], r);
  }
  step_kernel<<<STEP_BLOCKS, STEP_THREADS, 0, stream>>>(c);
  CUDA_LAUNCHED();
}
