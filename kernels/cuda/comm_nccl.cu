/* NCCL as the transport, a communicator to a track. Blocks are bytes to it; sums are made by our
 * own kernels.
 *
 * A communicator that does not block would start a thread for every call (80 us of the host's time
 * a collective instead of 10, measured on two H200), so ours block, and what may take for ever is
 * watched: making and ending a group by the loop here, which has a thread make the call, and
 * collectives by the watch (kernels/cpu/comm_watch.c), also where the host is still inside NCCL. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>

#include "kernels/cuda/comm.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/lib_nccl.h"

struct NcclGroup {
  CudaGroup group; /* first */
  ncclComm_t comm[CUDA_TRACKS];
  int tracks;
  NcclGroup *next;
};

static void nccl_exchange(Device *d, CudaGroup *group, CollKind kind, const CommPeer *peer,
                          int size, int rank);
static void nccl_leave(Device *d, CudaGroup *group);

/* The library and all groups of the process. NCCL's communicators are not for two threads at a
 * time: whoever calls NCCL has the lock, through all of a call that is asked about. */
static struct {
  Nccl lib;
  bool loaded;
  NcclGroup *groups;
  pthread_mutex_t lock;
} nccl = {{}, false, nullptr, PTHREAD_MUTEX_INITIALIZER};

int nccl_load(Error *err) {
  if (nccl.loaded) return 0;
  if (nccl_open(&nccl.lib, err)) return -1;
  nccl.loaded = true;
  return 0;
}

int nccl_version(void) {
  int v = 0;
  if (nccl.loaded) nccl.lib.ncclGetVersion(&v);
  return v;
}

/* ---- calls ---- */

static void nccl_check(ncclResult_t rc, const char *call, const NcclGroup *g) {
  if (rc == ncclSuccess) return;
  die("%s over group '%s': %s; NCCL's last error: %s", call, g->group.name,
      nccl.lib.ncclGetErrorString(rc), nccl.lib.ncclGetLastError(g->comm[0]));
}

/* A call that needs the other ranks. */
struct LongCall {
  NcclGroup *group;
  int gpu, size, rank;
  ncclUniqueId id[CUDA_TRACKS]; /* of a group that is made; else it is ended */
  bool makes;
  ncclResult_t rc;
  std::atomic<bool> done;
};

static void *make_call(void *arg) {
  LongCall *l = static_cast<LongCall *>(arg);
  NcclGroup *g = l->group;
  CUDA_CHECK(cudaSetDevice(l->gpu));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  for (int t = 0; t < g->tracks && l->rc == ncclSuccess; t++)
    l->rc = l->makes
                ? nccl.lib.ncclCommInitRankConfig(&g->comm[t], l->size, l->id[t], l->rank, &config)
                : nccl.lib.ncclCommDestroy(g->comm[t]);
  l->done = true;
  return nullptr;
}

/* Dies when it takes longer than the time limit. */
static ncclResult_t watch_call(LongCall *l) {
  pthread_t thread;
  int rc = pthread_create(&thread, nullptr, make_call, l);
  if (rc) die("a thread for NCCL does not start: %s", strerror(rc));
  double start = clock_seconds(), limit = comm_timeout();
  struct timespec pause = {0, 500000};
  while (!l->done) {
    if (limit > 0 && clock_seconds() - start > limit)
      die("NCCL's group '%s': not all ranks %s it within %.1f s (time limit: "
          "zeropp.timeout_seconds)",
          l->group->group.name, l->makes ? "made" : "ended", limit);
    nanosleep(&pause, nullptr);
  }
  pthread_join(thread, nullptr);
  return l->rc;
}

/* ---- groups ---- */

static void keep(NcclGroup *g) {
  g->next = nccl.groups;
  nccl.groups = g;
}

static void forget(const NcclGroup *g) {
  for (NcclGroup **at = &nccl.groups; *at; at = &(*at)->next)
    if (*at == g) {
      *at = g->next;
      return;
    }
}

/* The group's first rank makes the ids. */
static int share_ids(Comm *host, ncclUniqueId *id, int n, Error *err) {
  int rc = 0;
  ncclResult_t made = ncclSuccess;
  for (int i = 0; i < n && made == ncclSuccess && comm_rank(host) == 0; i++)
    made = nccl.lib.ncclGetUniqueId(&id[i]);
  if (made != ncclSuccess)
    rc = error_set(err, "ncclGetUniqueId: %s; NCCL's last error: %s",
                   nccl.lib.ncclGetErrorString(made), nccl.lib.ncclGetLastError(nullptr));
  if (comm_agree(host, rc, err)) return -1;
  comm_broadcast(host, id, static_cast<size_t>(n) * sizeof *id, 0);
  return 0;
}

CudaGroup *nccl_group_create(Device *d, Comm *host, const char *name, int tracks, Error *err) {
  LongCall l{};
  gemm_in_company(cuda_of(d)->gemm);
  l.gpu = cuda_of(d)->gpu;
  l.size = comm_size(host);
  l.rank = comm_rank(host);
  if (share_ids(host, l.id, tracks, err)) return nullptr;
  NcclGroup *g = static_cast<NcclGroup *>(mem_zalloc(1, sizeof *g));
  g->group = {nccl_exchange, nccl_leave, nullptr, name, 0};
  g->tracks = tracks;
  l.group = g;
  l.makes = true;
  pthread_mutex_lock(&nccl.lock);
  ncclResult_t rc = watch_call(&l);
  if (rc == ncclSuccess) {
    keep(g);
  } else {
    error_set(err, "NCCL's group '%s' of %d ranks: %s; NCCL's last error: %s", name, l.size,
              nccl.lib.ncclGetErrorString(rc), nccl.lib.ncclGetLastError(nullptr));
    free(g);
    g = nullptr;
  }
  pthread_mutex_unlock(&nccl.lock);
  return g ? &g->group : nullptr;
}

static void nccl_leave(Device *d, CudaGroup *group) {
  NcclGroup *g = reinterpret_cast<NcclGroup *>(group);
  LongCall l{};
  l.group = g;
  l.gpu = cuda_of(d)->gpu;
  pthread_mutex_lock(&nccl.lock);
  forget(g);
  nccl_check(watch_call(&l), "ncclCommDestroy", g);
  pthread_mutex_unlock(&nccl.lock);
  free(g);
}

/* ---- blocks ---- */

/* Whether one ncclAllGather does it: blocks of one size, one after another. */
static bool is_even(CollKind kind, const CommPeer *peer, int size) {
  size_t each = peer[0].recv_bytes;
  if (kind != COLL_ALL_GATHER || each == 0) return false;
  for (int r = 1; r < size; r++)
    if (peer[r].recv_bytes != each) return false;
  return true;
}

static void send_and_receive(const NcclGroup *g, ncclComm_t comm, const CommPeer *peer, int size,
                             int rank, cudaStream_t stream) {
  nccl_check(nccl.lib.ncclGroupStart(), "ncclGroupStart", g);
  for (int r = 0; r < size; r++) {
    const CommPeer *p = &peer[r];
    if (r == rank) continue;
    if (p->send_bytes)
      nccl_check(nccl.lib.ncclSend(p->send, p->send_bytes, ncclUint8, r, comm, stream), "ncclSend",
                 g);
    if (p->recv_bytes)
      nccl_check(nccl.lib.ncclRecv(p->recv, p->recv_bytes, ncclUint8, r, comm, stream), "ncclRecv",
                 g);
  }
  nccl_check(nccl.lib.ncclGroupEnd(), "ncclGroupEnd", g);
}

static void gather(const NcclGroup *g, ncclComm_t comm, const CommPeer *peer, int rank,
                   cudaStream_t stream) {
  const CommPeer *own = &peer[rank];
  nccl_check(
      nccl.lib.ncclAllGather(own->send, peer[0].recv, own->send_bytes, ncclUint8, comm, stream),
      "ncclAllGather", g);
}

static void nccl_exchange(Device *d, CudaGroup *group, CollKind kind, const CommPeer *peer,
                          int size, int rank) {
  const NcclGroup *g = reinterpret_cast<const NcclGroup *>(group);
  const CommPeer *own = &peer[rank];
  cudaStream_t stream = cuda_stream(d);
  int track = cuda_track(d);
  require(track < g->tracks);
  ncclComm_t comm = g->comm[track];
  bool even = is_even(kind, peer, size);
  pthread_mutex_lock(&nccl.lock);
  if (even)
    gather(g, comm, peer, rank, stream);
  else
    send_and_receive(g, comm, peer, size, rank, stream);
  pthread_mutex_unlock(&nccl.lock);
  if (!even && own->send_bytes && own->send != own->recv)
    CUDA_CHECK(
        cudaMemcpyAsync(own->recv, own->send, own->send_bytes, cudaMemcpyDeviceToDevice, stream));
}

/* ---- troubles ---- */

static bool has_failed(const NcclGroup *g, int track, char *text, size_t size) {
  ncclResult_t state = ncclSuccess;
  ncclResult_t rc = nccl.lib.ncclCommGetAsyncError(g->comm[track], &state);
  if (rc != ncclSuccess) state = rc;
  const char *last = nccl.lib.ncclGetLastError(g->comm[track]);
  snprintf(text, size, "NCCL says of group '%s': %s; its last error: %s", g->group.name,
           nccl.lib.ncclGetErrorString(state), last && last[0] ? last : "none");
  return state != ncclSuccess && state != ncclInProgress;
}

/* Who is inside NCCL finds out by itself, and is timed by its ticket. */
bool nccl_failed(Device *d, char *text, size_t size) {
  (void)d;
  bool failed = false;
  text[0] = 0;
  if (pthread_mutex_trylock(&nccl.lock)) {
    snprintf(text, size, "a call to NCCL is not through");
    return false;
  }
  for (const NcclGroup *g = nccl.groups; g; g = g->next)
    for (int t = 0; t < g->tracks && !failed; t++) failed = has_failed(g, t, text, size);
  pthread_mutex_unlock(&nccl.lock);
  return failed;
}

/* The process ends: whoever has the lock may never give it back. */
void nccl_abort_all(Device *d) {
  (void)d;
  struct timespec pause = {0, 1000000};
  for (int i = 0; i < 100 && pthread_mutex_trylock(&nccl.lock); i++) nanosleep(&pause, nullptr);
  for (const NcclGroup *g = nccl.groups; g; g = g->next)
    for (int t = 0; t < g->tracks; t++) nccl.lib.ncclCommAbort(g->comm[t]);
}
