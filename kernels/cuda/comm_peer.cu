/* Blocks between GPUs of one host by their copy engines. Kernels of a collective take
 * multiprocessors away from matrix products, which then wait for their last tiles; copies take
 * none.
 *
 * Every rank has a box with a ring of slots for each other rank. A block goes in pieces:
 *
 *   sender's put stream:    wait until the slot is free, copy the piece into the other's box, write
 *                           the piece's number to the other's `filled`
 *   receiver's get stream:  wait for that number, copy the piece to where it belongs, write its
 *                           number to the sender's `emptied`
 *
 * The n-th piece from one rank to another lies in slot n mod SLOTS, so both know it without a word.
 * Numbers only grow (cyclic comparison), each flag has one writer, and a stream waits for a flag in
 * its own GPU's memory: no kernel spins. The host queues all of it and waits for nothing.
 *
 * In captured steps a kernel does it (comm_step.cu), through a box of its own behind the slots. */
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/comm_step.h"

enum { SLOTS = 3, MAX_PEERS = 64, NUMBERS = 2 + CUDA_TRACKS };
static const size_t STEP_BYTES = (size_t)32 << 20; /* of the step box, about */
static const size_t BOX_BYTES = (size_t)192 << 20, MAX_SLOT = (size_t)24 << 20, ALIGN = 512;

/* At the start of a box; written by the ranks that they name. */
struct Flags {
  uint32_t filled[MAX_PEERS];           /* pieces that rank has put here */
  uint32_t emptied[MAX_PEERS];          /* pieces that rank has taken of what this one put there */
  uint32_t met[CUDA_TRACKS][MAX_PEERS]; /* meetings that rank's track has come to */
};

struct PeerLink {
  char *box;               /* of that rank, in this process's address space */
  uint32_t sent, received; /* pieces, ever */
};

struct PeerGroup {
  CudaGroup group; /* first */
  Comm *host;
  char *box;
  size_t slot_bytes;
  uint32_t *number; /* [NUMBERS] on the GPU: what the put and the get stream write elsewhere, and
                       what the tracks do */
  uint32_t meetings[CUDA_TRACKS];
  cudaStream_t put, get;
  cudaEvent_t fork, put_done, get_done;
  PeerLink link[MAX_PEERS];
  StepGroup step; /* slot_bytes 0: too many ranks */
};

/* ---- the driver's calls, which the runtime has none for ---- */

static struct {
  decltype(&cuStreamWaitValue32) wait;
  decltype(&cuStreamWriteValue32) write;
  unsigned wait_flags;
} driver;

template <class F>
static bool find(const char *name, F *function) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult state;
  cudaError_t e = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &state);
  *function = reinterpret_cast<F>(found);
  return e == cudaSuccess && state == cudaDriverEntryPointSuccess && found;
}

/* Where it can be said, that what others wrote before a flag is to be seen behind it. */
static bool driver_load(int gpu) {
  int flush = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&flush, cudaDevAttrCanFlushRemoteWrites, gpu));
  driver.wait_flags = CU_STREAM_WAIT_VALUE_GEQ;
  if (flush) driver.wait_flags |= CU_STREAM_WAIT_VALUE_FLUSH;
  return find("cuStreamWaitValue32", &driver.wait) && find("cuStreamWriteValue32", &driver.write);
}

static void driver_check(CUresult rc, const char *call) {
  if (rc != CUDA_SUCCESS) die("%s: the driver's error %d", call, static_cast<int>(rc));
}

static CUdeviceptr address(const void *p) { return reinterpret_cast<CUdeviceptr>(p); }

/* ---- pieces ---- */

static Flags *flags_of(char *box) { return reinterpret_cast<Flags *>(box); }

/* The slot of a box for piece `n` of rank `from`. Ranks leave themselves out. */
static char *slot_of(const PeerGroup *g, char *box, int from, int owner, uint32_t n) {
  size_t ring = static_cast<size_t>(from < owner ? from : from - 1);
  return box + sizeof(Flags) + (ring * SLOTS + n % SLOTS) * g->slot_bytes;
}

static void wait_for(cudaStream_t s, const uint32_t *flag, uint32_t n) {
  driver_check(driver.wait(s, address(flag), n, driver.wait_flags), "cuStreamWaitValue32");
}

/* Behind all that is on the stream. The number goes as a copy, which every link between GPUs can
 * carry; a stream's copies are done one after another, so one cell will do. */
static void tell(cudaStream_t s, uint32_t *cell, uint32_t *flag, uint32_t n) {
  driver_check(driver.write(s, address(cell), n, CU_STREAM_WRITE_VALUE_DEFAULT),
               "cuStreamWriteValue32");
  CUDA_CHECK(cudaMemcpyAsync(flag, cell, sizeof n, cudaMemcpyDefault, s));
}

static void put_piece(PeerGroup *g, int rank, int to, const char *from, size_t bytes) {
  PeerLink *l = &g->link[to];
  uint32_t n = l->sent++;
  if (n >= SLOTS) wait_for(g->put, &flags_of(g->box)->emptied[to], n + 1 - SLOTS);
  CUDA_CHECK(
      cudaMemcpyAsync(slot_of(g, l->box, rank, to, n), from, bytes, cudaMemcpyDefault, g->put));
  tell(g->put, &g->number[0], &flags_of(l->box)->filled[rank], n + 1);
}

static void get_piece(PeerGroup *g, int rank, int from, char *to, size_t bytes) {
  PeerLink *l = &g->link[from];
  uint32_t n = l->received++;
  wait_for(g->get, &flags_of(g->box)->filled[from], n + 1);
  CUDA_CHECK(
      cudaMemcpyAsync(to, slot_of(g, g->box, from, rank, n), bytes, cudaMemcpyDefault, g->get));
  tell(g->get, &g->number[1], &flags_of(l->box)->emptied[rank], n + 1);
}

/* Pieces of a block are of one length, which both ends work out. */
static size_t piece_bytes(const PeerGroup *g, size_t bytes) {
  size_t pieces = (bytes + g->slot_bytes - 1) / g->slot_bytes;
  size_t each = pieces ? (bytes + pieces - 1) / pieces : 0;
  return (each + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* A block out and a block in, piece by piece by turns: whatever the hardware runs one after another
 * of the two streams, no piece then waits for one that is queued behind it. */
static void pass_blocks(PeerGroup *g, int rank, int to, const CommPeer *out, int from,
                        const CommPeer *in) {
  size_t send = out->send_bytes, recv = in->recv_bytes, sent = 0, received = 0;
  size_t put_each = piece_bytes(g, send), get_each = piece_bytes(g, recv);
  while (sent < send || received < recv) {
    size_t put = smaller(put_each, send - sent), get = smaller(get_each, recv - received);
    if (put) put_piece(g, rank, to, out->send + sent, put);
    if (get) get_piece(g, rank, from, in->recv + received, get);
    sent += put;
    received += get;
  }
}

/* Starting behind the own rank: no two ranks put into the same box at a time. */
static void peer_exchange(Device *d, CudaGroup *group, CollKind kind, const CommPeer *peer,
                          int size, int rank) {
  (void)kind;
  PeerGroup *g = reinterpret_cast<PeerGroup *>(group);
  cudaStream_t stream = cuda_stream(d);
  const CommPeer *own = &peer[rank];
  if (d->capturing) {
    step_exchange(stream, &g->step, peer, size, rank);
    return;
  }
  CUDA_CHECK(cudaEventRecord(g->fork, stream));
  CUDA_CHECK(cudaStreamWaitEvent(g->put, g->fork, 0));
  CUDA_CHECK(cudaStreamWaitEvent(g->get, g->fork, 0));
  for (int i = 1; i < size; i++) {
    int to = (rank + i) % size, from = (rank - i + size) % size;
    pass_blocks(g, rank, to, &peer[to], from, &peer[from]);
  }
  if (own->send_bytes && own->send != own->recv)
    CUDA_CHECK(cudaMemcpyAsync(own->recv, own->send, own->send_bytes, cudaMemcpyDefault, stream));
  CUDA_CHECK(cudaEventRecord(g->put_done, g->put));
  CUDA_CHECK(cudaEventRecord(g->get_done, g->get));
  CUDA_CHECK(cudaStreamWaitEvent(stream, g->put_done, 0));
  CUDA_CHECK(cudaStreamWaitEvent(stream, g->get_done, 0));
}

/* Numbers of meetings, told to all and waited for from all, on the track's stream itself. */
static void peer_meet(Device *d, CudaGroup *group, int size, int rank) {
  PeerGroup *g = reinterpret_cast<PeerGroup *>(group);
  cudaStream_t stream = cuda_stream(d);
  int track = cuda_track(d);
  uint32_t n = ++g->meetings[track];
  for (int i = 1; i < size; i++)
    tell(stream, &g->number[2 + track], &flags_of(g->link[(rank + i) % size].box)->met[track][rank],
         n);
  for (int r = 0; r < size; r++)
    if (r != rank) wait_for(stream, &flags_of(g->box)->met[track][r], n);
}

/* ---- making and leaving ---- */

static void share(Comm *host, const void *own, void *all, size_t each) {
  size_t bytes[MAX_PEERS];
  for (int r = 0; r < comm_size(host); r++) bytes[r] = each;
  comm_all_gather(host, own, all, bytes);
}

static bool all_can(Comm *host, bool can) {
  double no = !can;
  comm_all_reduce_f64(host, &no, 1, true);
  return no == 0;
}

/* Whether this GPU reaches the memory of the one with that UUID, which is on this host if it is
 * found. */
static bool reaches(int gpu, const cudaUUID_t *uuid) {
  int n = 0, can = 0;
  CUDA_CHECK(cudaGetDeviceCount(&n));
  for (int i = 0; i < n; i++) {
    cudaDeviceProp p;
    CUDA_CHECK(cudaGetDeviceProperties(&p, i));
    if (memcmp(&p.uuid, uuid, sizeof *uuid) != 0) continue;
    if (i == gpu) return true;
    return cudaDeviceCanAccessPeer(&can, gpu, i) == cudaSuccess && can;
  }
  return false;
}

/* NCCL's switch against such links counts here too, and there is one of our own, to compare. */
static bool is_off(void) {
  const char *nccl = getenv("NCCL_P2P_DISABLE"), *own = getenv("RLHF_COPY_ENGINES");
  return (nccl && strcmp(nccl, "0") != 0) || (own && strcmp(own, "0") == 0);
}

static bool reaches_all(Device *d, Comm *host) {
  cudaDeviceProp own;
  cudaUUID_t uuid[MAX_PEERS];
  CUDA_CHECK(cudaGetDeviceProperties(&own, cuda_of(d)->gpu));
  share(host, &own.uuid, uuid, sizeof own.uuid);
  bool can = !is_off() && driver_load(cuda_of(d)->gpu);
  for (int r = 0; r < comm_size(host) && can; r++) can = reaches(cuda_of(d)->gpu, &uuid[r]);
  return all_can(host, can);
}

static void close_boxes(PeerGroup *g) {
  for (int r = 0; r < comm_size(g->host); r++)
    if (r != comm_rank(g->host) && g->link[r].box)
      CUDA_CHECK(cudaIpcCloseMemHandle(g->link[r].box));
}

/* Containers can forbid it: then nobody does it this way. */
static bool open_boxes(PeerGroup *g) {
  cudaIpcMemHandle_t own, all[MAX_PEERS];
  memset(&own, 0, sizeof own);
  bool can = cudaIpcGetMemHandle(&own, g->box) == cudaSuccess;
  can = all_can(g->host, can);
  share(g->host, &own, all, sizeof own);
  for (int r = 0; r < comm_size(g->host) && can; r++) {
    void *box = nullptr;
    if (r == comm_rank(g->host)) continue;
    can = cudaIpcOpenMemHandle(&box, all[r], cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    g->link[r].box = can ? static_cast<char *>(box) : nullptr;
  }
  (void)cudaGetLastError(); /* of what cannot be done; it is not sticky */
  return all_can(g->host, can);
}

static void free_group(Device *d, PeerGroup *g) {
  close_boxes(g);
  comm_barrier(g->host); /* nobody has it open any more */
  device_free(d, g->number);
  device_free(d, g->step.count);
  device_free(d, g->box);
  CUDA_CHECK(cudaStreamDestroy(g->put));
  CUDA_CHECK(cudaStreamDestroy(g->get));
  for (cudaEvent_t e : {g->fork, g->put_done, g->get_done}) CUDA_CHECK(cudaEventDestroy(e));
  free(g);
}

static void peer_leave(Device *d, CudaGroup *group) {
  PeerGroup *g = reinterpret_cast<PeerGroup *>(group);
  CUDA_CHECK(cudaStreamSynchronize(g->put));
  CUDA_CHECK(cudaStreamSynchronize(g->get));
  comm_barrier(g->host); /* nobody writes any more */
  free_group(d, g);
}

static void make_streams(PeerGroup *g) {
  int low, high;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
  CUDA_CHECK(cudaStreamCreateWithPriority(&g->put, cudaStreamNonBlocking, high));
  CUDA_CHECK(cudaStreamCreateWithPriority(&g->get, cudaStreamNonBlocking, high));
  for (cudaEvent_t *e : {&g->fork, &g->put_done, &g->get_done})
    CUDA_CHECK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
}

/* Where slots end, in every box. */
static size_t slots_end(const PeerGroup *g, size_t ranks) {
  return sizeof(Flags) + (ranks - 1) * SLOTS * g->slot_bytes;
}

static void size_boxes(PeerGroup *g, size_t ranks) {
  size_t slot = BOX_BYTES / SLOTS / (ranks - 1) / ALIGN * ALIGN;
  g->slot_bytes = slot < MAX_SLOT ? slot : MAX_SLOT;
  if (ranks <= STEP_PEERS) g->step.slot_bytes = STEP_BYTES / 2 / (ranks - 1) / ALIGN * ALIGN;
  g->group.captured_bytes = g->step.slot_bytes;
}

static void alloc_boxes(Device *d, PeerGroup *g, size_t ranks) {
  size_t slots = slots_end(g, ranks),
         step = step_box_bytes(static_cast<int>(ranks), g->step.slot_bytes);
  g->box = static_cast<char *>(device_alloc(d, slots + step));
  g->number = static_cast<uint32_t *>(device_alloc(d, NUMBERS * sizeof(uint32_t)));
  g->step.count = static_cast<uint32_t *>(device_alloc(d, STEP_BLOCKS * sizeof(uint32_t)));
  device_zero(d, g->box, sizeof(Flags));
  device_zero(d, g->box + slots, step_flag_bytes());
  device_zero(d, g->step.count, STEP_BLOCKS * sizeof(uint32_t));
  device_sync(d);
}

CudaGroup *peer_group_create(Device *d, Comm *host, const char *name) {
  size_t n = static_cast<size_t>(comm_size(host));
  if (n > MAX_PEERS || !reaches_all(d, host)) return nullptr;
  PeerGroup *g = static_cast<PeerGroup *>(mem_zalloc(1, sizeof *g));
  g->group = {peer_exchange, peer_leave, peer_meet, name, 0};
  g->host = host;
  size_boxes(g, n);
  alloc_boxes(d, g, n);
  make_streams(g);
  if (!open_boxes(g)) { /* agreed on behind the zeroing of all */
    free_group(d, g);
    return nullptr;
  }
  for (size_t r = 0; r < n && n <= STEP_PEERS; r++) {
    bool own = r == static_cast<size_t>(comm_rank(host));
    g->step.box[r] = (own ? g->box : g->link[r].box) + slots_end(g, n);
  }
  return &g->group;
}
