/* A GPU as a device: which one, its streams, memory, copies, and what it is called. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/comm.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/staging.h"

bool cuda_overlaps;

void cuda_check_at(cudaError_t e, const char *call, const char *file, int line) {
  if (e != cudaSuccess)
    die_at(file, line, "%s: %s (%s)", call, cudaGetErrorString(e), cudaGetErrorName(e));
}

/* ---- memory: sizes of blocks are in a list, of which there are a few hundred at most ---- */

struct CudaBlock {
  void *p;
  size_t bytes;
};
struct CudaBlocks {
  CudaBlock *at;
  size_t n, room;
};

static void *cuda_alloc(Device *d, size_t bytes) {
  CudaBlocks *list = cuda_of(d)->blocks;
  void *p = nullptr;
  cudaError_t e = cudaMalloc(&p, bytes ? bytes : 1);
  if (e == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError(); /* not sticky: the caller reports it */
    return nullptr;
  }
  CUDA_CHECK(e);
  if (list->n == list->room) {
    list->room = list->room ? 2 * list->room : 64;
    list->at = static_cast<CudaBlock *>(mem_grow(list->at, list->room, sizeof *list->at));
  }
  list->at[list->n++] = {p, bytes};
  return p;
}

/* cudaFree waits for the whole device, so nothing that is queued loses its memory. */
static size_t cuda_release(Device *d, void *p) {
  CudaBlocks *list = cuda_of(d)->blocks;
  size_t i = 0;
  while (i < list->n && list->at[i].p != p) i++;
  if (i == list->n) die("device_free of %p, which device_alloc did not give", p);
  size_t bytes = list->at[i].bytes;
  list->at[i] = list->at[--list->n];
  CUDA_CHECK(cudaFree(p));
  return bytes;
}

static void cuda_sync(Device *d) {
  CUDA_CHECK(cudaStreamSynchronize(cuda_of(d)->compute));
  for (cudaStream_t s : cuda_of(d)->comm) CUDA_CHECK(cudaStreamSynchronize(s));
}

static void *cuda_alloc_host(Device *, size_t bytes) {
  void *p = nullptr;
  cudaError_t e = cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocDefault);
  if (e == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  CUDA_CHECK(e);
  return p;
}

static void cuda_release_host(Device *d, void *p) {
  cuda_sync(d);
  CUDA_CHECK(cudaFreeHost(p));
}

static bool cuda_export(Device *, void *p, void *handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == DEVICE_HANDLE_BYTES, "a handle is CUDA's");
  cudaError_t e = cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t *>(handle), p);
  if (e != cudaSuccess) (void)cudaGetLastError(); /* some containers allow none */
  return e == cudaSuccess;
}

static void *cuda_import(Device *, const void *handle) {
  cudaIpcMemHandle_t h;
  void *p = nullptr;
  memcpy(&h, handle, sizeof h);
  if (cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess) return p;
  (void)cudaGetLastError();
  return nullptr;
}

static void cuda_unimport(Device *d, void *p) {
  cuda_sync(d);
  CUDA_CHECK(cudaIpcCloseMemHandle(p));
}

void *cuda_scratch(Device *d, size_t bytes) {
  CudaDevice *c = cuda_of(d);
  int i = 0;
  for (int k = 0; k < CUDA_TRACKS; k++)
    if (c->current == c->comm[k]) i = 1 + k;
  if (bytes > c->scratch_bytes[i]) {
    size_t round = 1u << 20;
    graph_retire_scratch(d, c->scratch[i]);
    c->scratch_bytes[i] = (bytes + round - 1) / round * round;
    c->scratch[i] = device_alloc(d, c->scratch_bytes[i]);
    d->own_bytes += c->scratch_bytes[i];
  }
  return c->scratch[i];
}

static void cuda_zero(Device *d, void *p, size_t bytes) {
  CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, cuda_stream(d)));
}

static void cuda_upload(Device *d, void *dst, const void *src, size_t bytes) {
  staging_upload(cuda_of(d)->staging, cuda_stream(d), dst, src, bytes);
}

static void cuda_download(Device *d, void *dst, const void *src, size_t bytes) {
  staging_download(cuda_of(d)->staging, cuda_stream(d), dst, src, bytes);
}

static void cuda_copy(Device *d, void *dst, const void *src, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, cuda_stream(d)));
}

/* ---- open and close ---- */

static void cuda_close(Device *d) {
  CudaDevice *c = cuda_of(d);
  cuda_detach(d);
  cuda_sync(d);
  graphs_close(d);
  for (void *scratch : c->scratch) device_free(d, scratch);
  attention_close(c->attention);
  gemm_close(c->gemm);
  staging_free(c->staging);
  CUDA_CHECK(cudaStreamDestroy(c->compute));
  for (cudaStream_t s : c->comm) CUDA_CHECK(cudaStreamDestroy(s));
  free(c->blocks->at);
  free(c->blocks);
  free(c);
}

static bool cuda_takes_codes(const Device *d, DType compute) {
  return reinterpret_cast<const CudaDevice *>(d)->arch >= 90 && compute == DT_BF16;
}

static const Backend cuda_backend = {
    .ops = &cuda_ops,
    .close = cuda_close,
    .alloc = cuda_alloc,
    .release = cuda_release,
    .alloc_host = cuda_alloc_host,
    .release_host = cuda_release_host,
    .export_memory = cuda_export,
    .import_memory = cuda_import,
    .unimport = cuda_unimport,
    .zero = cuda_zero,
    .upload = cuda_upload,
    .download = cuda_download,
    .copy = cuda_copy,
    .sync = cuda_sync,
    .takes_codes = cuda_takes_codes,
    .capture_begin = cuda_capture_begin,
    .capture_end = cuda_capture_end,
    .graph_launch = cuda_graph_launch,
    .graph_free = cuda_graph_free,
    .attach = cuda_attach,
};

/* GPUs of this process (CUDA_VISIBLE_DEVICES has its say), or -1. */
static int count_gpus(Error *err) {
  int driver = 0, runtime = 0, n = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
    return error_set(err, "device cuda: no NVIDIA driver on this machine; use device cpu");
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  cudaError_t e = cudaGetDeviceCount(&n);
  if (e == cudaErrorInsufficientDriver)
    return error_set(err, "device cuda: the driver serves CUDA %d.%d, rlhf was built with %d.%d",
                     driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  if (e != cudaSuccess && e != cudaErrorNoDevice)
    return error_set(err, "device cuda: %s (%s)", cudaGetErrorString(e), cudaGetErrorName(e));
  if (e == cudaErrorNoDevice || n == 0)
    return error_set(err, "device cuda: no GPU (CUDA_VISIBLE_DEVICES=%s); use device cpu",
                     getenv("CUDA_VISIBLE_DEVICES") ? getenv("CUDA_VISIBLE_DEVICES") : "");
  return n;
}

/* Any kernel tells whether this build has machine code, or PTX to make it from, for this GPU. */
static __global__ void any_kernel() {}

/* The capability that this build's code for the GPU was written for: a newer GPU runs what is made
 * from older PTX. Negative where there is none. */
static int code_arch(const cudaDeviceProp *p, Error *err) {
  cudaFuncAttributes a;
  cudaError_t e = cudaFuncGetAttributes(&a, reinterpret_cast<const void *>(any_kernel));
  if (p->major >= 8 && e == cudaSuccess) return a.ptxVersion;
  (void)cudaGetLastError();
  if (p->major < 8)
    return error_set(err, "device cuda: %s has compute capability %d.%d, 8.0 or later is needed",
                     p->name, p->major, p->minor);
  return error_set(err,
                   "device cuda: this build has no code for %s (compute capability %d.%d): build "
                   "without CUDA_ARCHS, or with its own (%s)",
                   p->name, p->major, p->minor, cudaGetErrorName(e));
}

static int choose_gpu(CudaDevice *c, cudaDeviceProp *p, Error *err) {
  int n = count_gpus(err);
  if (n < 0) return -1;
  c->gpu = launch_host_rank() % n;
  c->sharing = (launch_host_ranks() - c->gpu + n - 1) / n;
  cudaError_t e = cudaSetDevice(c->gpu);
  if (e == cudaSuccess) e = cudaGetDeviceProperties(p, c->gpu);
  if (e == cudaSuccess) e = cudaFree(nullptr); /* makes the context */
  if (e != cudaSuccess)
    return error_set(err, "device cuda: GPU %d does not open: %s (%s)", c->gpu,
                     cudaGetErrorString(e), cudaGetErrorName(e));
  c->arch = code_arch(p, err);
  if (c->arch < 0) return -1;
  cuda_overlaps = c->arch >= 90;
  c->sms = p->multiProcessorCount;
  c->l2_bytes = static_cast<size_t>(p->l2CacheSize);
  return 0;
}

/* "580.159.03"; empty where the system does not say. */
static void driver_version(char *out, int size) {
  FILE *f = fopen("/sys/module/nvidia/version", "r");
  if (!f || !fgets(out, size, f)) out[0] = 0;
  out[strcspn(out, "\n")] = 0;
  if (f) fclose(f);
}

static void describe(CudaDevice *c, const cudaDeviceProp *p) {
  char driver[32];
  int runtime = 0;
  driver_version(driver, sizeof driver);
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  size_t lt = gemm_version(c->gemm);
  char *text =
      mem_printf("%s, %zu GiB%s%s, CUDA %d.%d, cuBLASLt %zu.%zu.%zu", p->name,
                 p->totalGlobalMem >> 30, driver[0] ? ", driver " : "", driver, runtime / 1000,
                 runtime % 1000 / 10, lt / 10000, lt / 100 % 100, lt % 100);
  snprintf(c->base.describe, sizeof c->base.describe, "%s", text);
  free(text);
}

static void make_streams(CudaDevice *c) {
  int low, high; /* what travels goes first: the rest waits for it */
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
  CUDA_CHECK(cudaStreamCreateWithPriority(&c->compute, cudaStreamNonBlocking, low));
  for (cudaStream_t &s : c->comm)
    CUDA_CHECK(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, high));
  c->current = c->compute;
}

Device *cuda_device_open(int threads, Error *err) {
  CudaDevice *c = static_cast<CudaDevice *>(mem_zalloc(1, sizeof *c));
  cudaDeviceProp p;
  if (choose_gpu(c, &p, err) || !(c->gemm = gemm_open(err))) {
    free(c);
    return nullptr;
  }
  size_t available = 0, whole = 0;
  CUDA_CHECK(cudaMemGetInfo(&available, &whole));
  make_streams(c);
  graphs_open(&c->base);
  c->base.threads = cpu_choose_threads(threads);
  c->staging = staging_create(c->base.threads);
  c->blocks = static_cast<CudaBlocks *>(mem_zalloc(1, sizeof *c->blocks));
  c->base.kind = DEVICE_CUDA;
  c->base.backend = &cuda_backend;
  c->base.total_memory = available / static_cast<size_t>(c->sharing);
  describe(c, &p);
  cuda_scratch(&c->base, GEMM_WORKSPACE); /* now, so that no product waits for memory later */
  return &c->base;
}
