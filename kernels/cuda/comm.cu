/* Collectives over GPU memory: streams and events for the tickets, and who carries blocks.
 *
 * NCCL does, where every rank has a GPU of its own. It refuses two ranks on one, so there, on all
 * ranks alike, blocks go through the host. */
#include "kernels/cuda/comm.h"

#include <string.h>

/* ---- streams and events ---- */

static cudaStream_t stream_of(Device *d, DeviceStream s) {
  return s == STREAM_COMM ? cuda_of(d)->comm : cuda_of(d)->compute;
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

static const CommDeviceOps ops = {
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_done = event_done,
    .seconds_between = seconds_between,
    .stream_wait = stream_wait,
    .use_stream = use_stream,
    .exchange = nccl_exchange,
    .failed = nccl_failed,
    .abort_all = nccl_abort_all,
    .leave = nccl_leave,
    .enter_thread = enter_thread,
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

static void say(const Grid *g, bool shared) {
  int v = nccl_version();
  if (shared)
    log_info("collectives of the GPUs: ranks share GPUs, so through the host's memory and MPI");
  else
    log_info("collectives of the GPUs: NCCL %d.%d.%d, %d node%s of %d", v / 10000, v / 100 % 100,
             v % 100, g->nodes, g->nodes == 1 ? "" : "s", g->local);
}

static int join(Device *d, Comm *host, const char *name, bool nccl, Comm **out, Error *err) {
  void *group = nullptr;
  if (nccl && comm_size(host) > 1) {
    group = nccl_group_create(d, host, name, err);
    if (!group) return -1;
  }
  *out = comm_device_create(host, name, group);
  return 0;
}

int cuda_attach(Grid *g, Device *d, Error *err) {
  bool shared = g->world > 1 && ranks_share_gpus(g, cuda_of(d));
  bool nccl = g->world > 1 && !shared;
  if (nccl && comm_agree(g->all, nccl_load(err), err)) return -1;
  comm_device_open(d, &ops, nccl);
  Comm *intra = nullptr, *inter = nullptr;
  int rc = join(d, g->intra, "dev_intra", nccl, &intra, err);
  rc = comm_agree(g->all, rc, err);
  if (!rc) rc = comm_agree(g->all, join(d, g->inter, "dev_inter", nccl, &inter, err), err);
  if (rc) return -1;
  g->dev_intra = intra;
  g->dev_inter = inter;
  if (g->world > 1) say(g, shared);
  return 0;
}

void cuda_detach(Device *d) { comm_device_close(d); }
