/* NCCL as the transport. Its communicators do not block: a call that is not through yet is asked
 * about until it is, so that an error or a rank that is missing is always noticed, by the loop here
 * while groups are made and by the watch (kernels/cpu/comm_watch.c) from then on. Blocks are bytes
 * to it; sums are made by our own kernels. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/comm.h"
#include "kernels/cuda/lib_nccl.h"

struct NcclGroup {
  ncclComm_t comm;
  char name[16];
  NcclGroup *next;
};

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

/* ---- waiting for NCCL ---- */

static void nccl_check(ncclResult_t rc, const char *call, const NcclGroup *g) {
  if (rc == ncclSuccess || rc == ncclInProgress) return;
  die("%s over group '%s': %s; NCCL's last error: %s", call, g->name,
      nccl.lib.ncclGetErrorString(rc), nccl.lib.ncclGetLastError(g->comm));
}

static ncclResult_t state_of(const NcclGroup *g) {
  ncclResult_t state = ncclInProgress;
  ncclResult_t rc = nccl.lib.ncclCommGetAsyncError(g->comm, &state);
  return rc == ncclSuccess ? state : rc;
}

/* Mostly NCCL is through at once; connections are made by the first calls. */
static ncclResult_t wait_for(const NcclGroup *g, ncclResult_t rc, double seconds) {
  double start = clock_seconds();
  struct timespec pause = {0, 20000};
  while (rc == ncclInProgress) {
    double waited = clock_seconds() - start;
    if (seconds > 0 && waited > seconds) return rc;
    if (waited > 1e-3) nanosleep(&pause, nullptr);
    rc = state_of(g);
  }
  return rc;
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

/* The group's first rank makes the id. */
static int share_id(Comm *host, ncclUniqueId *id, Error *err) {
  int rc = 0;
  memset(id, 0, sizeof *id);
  if (comm_rank(host) == 0) {
    ncclResult_t made = nccl.lib.ncclGetUniqueId(id);
    if (made != ncclSuccess)
      rc = error_set(err, "ncclGetUniqueId: %s; NCCL's last error: %s",
                     nccl.lib.ncclGetErrorString(made), nccl.lib.ncclGetLastError(nullptr));
  }
  if (comm_agree(host, rc, err)) return -1;
  comm_broadcast(host, id, sizeof *id, 0);
  return 0;
}

void *nccl_group_create(Device *d, Comm *host, const char *name, Error *err) {
  ncclUniqueId id;
  CUDA_CHECK(cudaSetDevice(cuda_of(d)->gpu));
  if (share_id(host, &id, err)) return nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  NcclGroup *g = static_cast<NcclGroup *>(mem_zalloc(1, sizeof *g));
  snprintf(g->name, sizeof g->name, "%s", name);
  pthread_mutex_lock(&nccl.lock);
  ncclResult_t rc =
      nccl.lib.ncclCommInitRankConfig(&g->comm, comm_size(host), id, comm_rank(host), &config);
  rc = wait_for(g, rc, comm_timeout());
  if (rc == ncclInProgress)
    die("NCCL's group '%s' of %d ranks: not all of them came within %.1f s (time limit: "
        "zeropp.timeout_seconds)",
        name, comm_size(host), comm_timeout());
  if (rc != ncclSuccess) {
    error_set(err, "NCCL's group '%s' of %d ranks: %s; NCCL's last error: %s", name,
              comm_size(host), nccl.lib.ncclGetErrorString(rc), nccl.lib.ncclGetLastError(nullptr));
    if (g->comm) nccl.lib.ncclCommAbort(g->comm);
    free(g);
    g = nullptr;
  } else {
    keep(g);
  }
  pthread_mutex_unlock(&nccl.lock);
  return g;
}

void nccl_leave(Device *d, void *group) {
  NcclGroup *g = static_cast<NcclGroup *>(group);
  CUDA_CHECK(cudaSetDevice(cuda_of(d)->gpu));
  pthread_mutex_lock(&nccl.lock);
  ncclResult_t rc = wait_for(g, nccl.lib.ncclCommFinalize(g->comm), comm_timeout());
  forget(g);
  if (rc == ncclInProgress)
    die("NCCL's group '%s' does not end within %.1f s", g->name, comm_timeout());
  nccl_check(rc, "ncclCommFinalize", g);
  nccl_check(nccl.lib.ncclCommDestroy(g->comm), "ncclCommDestroy", g);
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

static void send_and_receive(const NcclGroup *g, const CommPeer *peer, int size, int rank,
                             cudaStream_t stream) {
  nccl_check(nccl.lib.ncclGroupStart(), "ncclGroupStart", g);
  for (int r = 0; r < size; r++) {
    const CommPeer *p = &peer[r];
    if (r == rank) continue;
    if (p->send_bytes)
      nccl_check(nccl.lib.ncclSend(p->send, p->send_bytes, ncclUint8, r, g->comm, stream),
                 "ncclSend", g);
    if (p->recv_bytes)
      nccl_check(nccl.lib.ncclRecv(p->recv, p->recv_bytes, ncclUint8, r, g->comm, stream),
                 "ncclRecv", g);
  }
  nccl_check(wait_for(g, nccl.lib.ncclGroupEnd(), 0), "ncclGroupEnd", g);
}

static void gather(const NcclGroup *g, const CommPeer *peer, int rank, cudaStream_t stream) {
  const CommPeer *own = &peer[rank];
  ncclResult_t rc =
      nccl.lib.ncclAllGather(own->send, peer[0].recv, own->send_bytes, ncclUint8, g->comm, stream);
  nccl_check(wait_for(g, rc, 0), "ncclAllGather", g);
}

void nccl_exchange(Device *d, void *group, CollKind kind, const CommPeer *peer, int size,
                   int rank) {
  const NcclGroup *g = static_cast<const NcclGroup *>(group);
  const CommPeer *own = &peer[rank];
  cudaStream_t stream = cuda_stream(d);
  bool even = is_even(kind, peer, size);
  pthread_mutex_lock(&nccl.lock);
  if (even)
    gather(g, peer, rank, stream);
  else
    send_and_receive(g, peer, size, rank, stream);
  pthread_mutex_unlock(&nccl.lock);
  if (!even && own->send_bytes && own->send != own->recv)
    CUDA_CHECK(
        cudaMemcpyAsync(own->recv, own->send, own->send_bytes, cudaMemcpyDeviceToDevice, stream));
}

/* ---- troubles ---- */

/* Who is inside NCCL finds out by itself, and is timed by its ticket. */
bool nccl_failed(Device *d, char *text, size_t size) {
  (void)d;
  bool failed = false;
  snprintf(text, size, "a call to NCCL is not through");
  if (pthread_mutex_trylock(&nccl.lock)) return false;
  for (const NcclGroup *g = nccl.groups; g && !failed; g = g->next) {
    ncclResult_t state = state_of(g);
    failed = state != ncclSuccess && state != ncclInProgress;
    const char *last = nccl.lib.ncclGetLastError(g->comm);
    snprintf(text, size, "NCCL says of group '%s': %s; its last error: %s", g->name,
             nccl.lib.ncclGetErrorString(state), last && last[0] ? last : "none");
  }
  pthread_mutex_unlock(&nccl.lock);
  return failed;
}

/* The process ends: whoever has the lock may never give it back. */
void nccl_abort_all(Device *d) {
  (void)d;
  struct timespec pause = {0, 1000000};
  for (int i = 0; i < 100 && pthread_mutex_trylock(&nccl.lock); i++) nanosleep(&pause, nullptr);
  for (const NcclGroup *g = nccl.groups; g; g = g->next) nccl.lib.ncclCommAbort(g->comm);
}
