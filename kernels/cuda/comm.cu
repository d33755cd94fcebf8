/* Collectives over GPU memory: streams and events for the tickets, and who carries blocks.
 *
 * Within a node whose GPUs reach each other's memory their copy engines do, else NCCL. Both need a
 * GPU for every rank; where ranks share one, on all ranks alike, blocks go through the host. */
#include "kernels/cuda/comm.h"

#include <stdio.h>
#include <string.h>

/* ---- streams and events ---- */

static cudaStream_t stream_of(Device *d, DeviceStream s) {
  return s == STREAM_COMPUTE ? cuda_of(d)->compute : cuda_of(d)->comm[s - STREAM_COMM];
}

static cudaEvent_t event_of(void *event) { return static_cast<cudaEvent_t>(event); }

static void *event_create(Device *d) {
  (void)d;
  cudaEvent_t e;
  CUDA_CHECK(cudaEventCreate(&e));
  return e;
}

static void event_destroy(Device *d, void *event) {
  (void)d;
  CUDA_CHECK(cudaEventDestroy(event_of(event)));
}

static void event_record(Device *d, DeviceStream s, void *event) {
  CUDA_CHECK(cudaEventRecord(event_of(event), stream_of(d, s)));
}

static bool event_done(Device *d, void *event) {
  (void)d;
  cudaError_t e = cudaEventQuery(event_of(event));
  if (e != cudaErrorNotReady) CUDA_CHECK(e);
  return e == cudaSuccess;
}

static double seconds_between(Device *d, void *from, void *to) {
  (void)d;
  float ms;
  CUDA_CHECK(cudaEventElapsedTime(&ms, event_of(from), event_of(to)));
  return static_cast<double>(ms) * 1e-3;
}

static void stream_wait(Device *d, DeviceStream s, void *event) {
  CUDA_CHECK(cudaStreamWaitEvent(stream_of(d, s), event_of(event), 0));
}

static void use_stream(Device *d, DeviceStream s) { cuda_of(d)->current = stream_of(d, s); }

/* Asking for events is fine while another thread captures a graph. */
static void enter_thread(Device *d) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  CUDA_CHECK(cudaSetDevice(cuda_of(d)->gpu));
  CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

static void exchange(Device *d, void *group, CollKind kind, const CommPeer *peer, int size,
                     int rank) {
  CudaGroup *g = static_cast<CudaGroup *>(group);
  g->exchange(d, g, kind, peer, size, rank);
}

static bool can_meet(Device *d, void *group) {
  (void)d;
  return static_cast<const CudaGroup *>(group)->meet;
}

static void meet(Device *d, void *group, int size, int rank) {
  CudaGroup *g = static_cast<CudaGroup *>(group);
  g->meet(d, g, size, rank);
}

static size_t captured_bytes(Device *d, void *group) {
  (void)d;
  return static_cast<const CudaGroup *>(group)->captured_bytes;
}

static void leave(Device *d, void *group) {
  CudaGroup *g = static_cast<CudaGroup *>(group);
  g->leave(d, g);
}

static const CommDeviceOps ops = {
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_done = event_done,
    .seconds_between = seconds_between,
    .stream_wait = stream_wait,
    .use_stream = use_stream,
    .exchange = exchange,
    .can_meet = can_meet,
    .meet = meet,
    .failed = nccl_failed,
    .abort_all = nccl_abort_all,
    .leave = leave,
    .enter_thread = enter_thread,
    .captured_bytes = captured_bytes,
};

/* ---- which transport ---- */

/* Whether any two ranks have the same GPU: same on all ranks. */
static bool ranks_share_gpus(const Grid *g, const CudaDevice *c) {
  cudaDeviceProp p;
  CUDA_CHECK(cudaGetDeviceProperties(&p, c->gpu));
  const size_t each = sizeof p.uuid;
  size_t world = static_cast<size_t>(g->world);
  char *uuid = static_cast<char *>(mem_alloc(world, each));
  size_t *bytes = static_cast<size_t *>(mem_alloc(world, sizeof *bytes));
  for (size_t r = 0; r < world; r++) bytes[r] = each;
  comm_all_gather(g->all, &p.uuid, uuid, bytes);
  bool shared = false;
  for (size_t a = 0; a < world; a++)
    for (size_t b = 0; b < a; b++) shared |= memcmp(uuid + a * each, uuid + b * each, each) == 0;
  free(bytes);
  free(uuid);
  return shared;
}

static void say(const Grid *g, bool shared, bool peers) {
  int v = nccl_version();
  char nccl[32] = "NCCL";
  if (v) snprintf(nccl, sizeof nccl, "NCCL %d.%d.%d", v / 10000, v / 100 % 100, v % 100);
  if (shared)
    log_info("collectives of the GPUs: ranks share GPUs, so through the host's memory and MPI");
  else
    log_info("collectives of the GPUs: %d node%s of %d; in a node %s, between nodes %s", g->nodes,
             g->nodes == 1 ? "" : "s", g->local,
             g->local == 1 ? "none" : (peers ? "copy engines" : nccl),
             g->nodes == 1 ? "none" : nccl);
}

/* Between nodes blocks of two tracks travel side by side: at the ends of every collective a network
 * is idle. */
static int tracks_of(const Grid *g) { return g->nodes > 1 ? CUDA_TRACKS : 1; }

static CudaGroup *nccl_group(Device *d, const Grid *g, Comm *host, const char *name, Error *err) {
  if (comm_agree(host, nccl_load(err), err)) return nullptr;
  return nccl_group_create(d, host, name, tracks_of(g), err);
}

/* One group of every kind, on all ranks. */
static int join(Device *d, const Grid *g, CudaGroup **intra, CudaGroup **inter, bool *peers,
                Error *err) {
  int rc = 0;
  *peers = false;
  if (g->local > 1) {
    *intra = peer_group_create(d, g->intra, "dev_intra");
    *peers = *intra;
    if (!*intra) *intra = nccl_group(d, g, g->intra, "dev_intra", err);
    rc = comm_agree(g->all, *intra ? 0 : -1, err);
  }
  if (g->nodes > 1 && !rc) {
    *inter = nccl_group(d, g, g->inter, "dev_inter", err);
    rc = comm_agree(g->all, *inter ? 0 : -1, err);
  }
  return rc;
}

int cuda_attach(Grid *g, Device *d, Error *err) {
  bool shared = g->world > 1 && ranks_share_gpus(g, cuda_of(d)), peers = false;
  CudaGroup *intra = nullptr, *inter = nullptr;
  if (!shared && join(d, g, &intra, &inter, &peers, err)) return -1;
  static_assert(static_cast<int>(CUDA_TRACKS) == static_cast<int>(MAX_TRACKS), "a stream each");
  comm_device_open(d, &ops, g->world > 1 && !shared ? tracks_of(g) : 0);
  g->dev_intra = comm_device_create(g->intra, "dev_intra", intra);
  g->dev_inter = comm_device_create(g->inter, "dev_inter", inter);
  if (g->world > 1) say(g, shared, peers);
  return 0;
}

void cuda_detach(Device *d) { comm_device_close(d); }
