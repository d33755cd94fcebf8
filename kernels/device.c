/* Devices: opening a back end, memory with its accounts, and the rates measured on it. What differs
 * between back ends is behind the Backend table; the accounts and messages are the same for all. */
#include <stdlib.h>
#include <time.h>

#include "core/rng.h"
#include "kernels/backend.h"
#include "kernels/cpu/comm_device.h"

struct DeviceGraph {
  void *step; /* the back end's */
  CommCaptured exchanges;
};

Device *device_open(DeviceKind kind, int threads, Error *err) {
  if (threads < 0) {
    error_set(err, "threads: %d, expected 0 (automatic) or more", threads);
    return NULL;
  }
  return kind == DEVICE_CUDA ? cuda_device_open(threads, err) : cpu_device_open(threads, err);
}

void device_close(Device *d) {
  if (!d) return;
  size_t left = d->bytes - d->own_bytes;
  if (left) log_warn("device closed with %zu bytes still allocated", left);
  d->backend->close(d);
}

const Ops *device_ops(const Device *d) { return d->backend->ops; }
DeviceKind device_kind(const Device *d) { return d->kind; }
const char *device_describe(const Device *d) { return d->describe; }
int device_threads(const Device *d) { return d->threads; }

static void refuse_in_capture(const Device *d, const char *what) {
  if (d->capturing)
    die("%s while a step is captured: run the step once uncaptured before, and what is not an op "
        "outside",
        what);
}

void *device_alloc(Device *d, size_t bytes) {
  refuse_in_capture(d, "memory is allocated");
  void *p = d->backend->alloc(d, bytes);
  if (!p)
    die("out of memory: %zu bytes asked, %zu allocated, %zu for this rank", bytes, d->bytes,
        d->total_memory);
  d->bytes += bytes;
  if (d->bytes > d->peak) d->peak = d->bytes;
  return p;
}

void device_free(Device *d, void *p) {
  if (!p) return;
  refuse_in_capture(d, "memory is freed");
  d->bytes -= d->backend->release(d, p);
}

void *device_alloc_host(Device *d, size_t bytes) {
  void *p = d->backend->alloc_host(d, bytes);
  if (!p) die("out of memory of the host: %zu bytes asked", bytes);
  return p;
}

void device_free_host(Device *d, void *p) {
  if (p) d->backend->release_host(d, p);
}

bool device_export(Device *d, void *p, void *handle) {
  return d->backend->export_memory && d->backend->export_memory(d, p, handle);
}

void *device_import(Device *d, const void *handle) {
  return d->backend->import_memory ? d->backend->import_memory(d, handle) : NULL;
}

void device_unimport(Device *d, void *p) {
  if (p) d->backend->unimport(d, p);
}

void device_zero(Device *d, void *p, size_t bytes) {
  if (bytes) d->backend->zero(d, p, bytes);
}

void device_upload(Device *d, void *dst, const void *src_host, size_t bytes) {
  refuse_in_capture(d, "an upload");
  if (bytes) d->backend->upload(d, dst, src_host, bytes);
}

void device_download(Device *d, void *dst_host, const void *src, size_t bytes) {
  refuse_in_capture(d, "a download");
  if (bytes) d->backend->download(d, dst_host, src, bytes);
}

void device_copy(Device *d, void *dst, const void *src, size_t bytes) {
  if (bytes) d->backend->copy(d, dst, src, bytes);
}

void device_sync(Device *d) {
  refuse_in_capture(d, "a wait");
  d->backend->sync(d);
}

bool device_capture_begin(Device *d) {
  require(!d->capturing);
  if (!d->backend->capture_begin) return false;
  d->backend->capture_begin(d);
  d->capturing = true;
  return true;
}

DeviceGraph *device_capture_end(Device *d) {
  require(d->capturing);
  d->capturing = false;
  DeviceGraph *g = mem_alloc(1, sizeof *g);
  *g = (DeviceGraph){d->backend->capture_end(d), comm_device_captured()};
  return g;
}

void device_graph_launch(Device *d, DeviceGraph *g) {
  refuse_in_capture(d, "a captured step");
  if (g->exchanges.comm)
    comm_device_launch(&g->exchanges, d->backend->graph_launch, g->step);
  else
    d->backend->graph_launch(d, g->step);
}

void device_graph_free(Device *d, DeviceGraph *g) {
  if (g) d->backend->graph_free(d, g->step);
  free(g);
}

size_t device_bytes(const Device *d) { return d->bytes; }
size_t device_peak_bytes(const Device *d) { return d->peak; }
void device_reset_peak(Device *d) { d->peak = d->bytes; }
bool device_takes_codes(const Device *d, DType compute) {
  return d->backend->takes_codes(d, compute);
}
size_t device_total_memory(const Device *d) { return d->total_memory; }

double clock_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Runs work for about a quarter of a second and returns its best rate: others may use the machine
 * too, and a peak is what it can do when they do not. */
static double best_rate(Device *d, void (*work)(Device *, void *), void *arg, double amount) {
  double best = 0, end = clock_seconds() + 0.25;
  for (int i = 0; i < 3 || clock_seconds() < end; i++) {
    double t = clock_seconds();
    work(d, arg);
    device_sync(d);
    double rate = amount / (clock_seconds() - t);
    if (i > 0 && rate > best) best = rate; /* the first run warms caches and page tables */
  }
  return best;
}

static void measure_gemm(Device *d, void *arg) {
  const Tensor *t = arg;
  d->backend->ops->gemm(d, GEMM_NT, 1, t[0], t[1], 0, t[2]);
}

static void measure_copy(Device *d, void *arg) {
  const Tensor *t = arg;
  d->backend->copy(d, t[1].data, t[0].data, tensor_bytes(t[0]));
}

/* What is measured: sizes beyond the caches and the cost of a start, in the type that the matrix
 * units like best; smaller ones where memory is nearly full. */
typedef struct MeasureSizes {
  DType type;
  int64_t side;      /* of the square matrices */
  size_t copy_bytes; /* of each of the two buffers */
} MeasureSizes;
static MeasureSizes measure_sizes(const Device *d) {
  MeasureSizes cpu = {DT_F32, 1024, 1UL << 26}, cuda = {DT_BF16, 8192, 1UL << 30};
  MeasureSizes s = d->kind == DEVICE_CPU ? cpu : cuda;
  size_t left = d->total_memory > d->bytes ? d->total_memory - d->bytes : 0;
  for (; 3 * s.copy_bytes > left / 2 && s.side > 256; s.side /= 2) s.copy_bytes /= 4;
  return s;
}

/* Numbers as a model has them: on a GPU a product of zeros draws less power and runs faster than
 * any real one. */
static void measure_fill(Device *d, Tensor t, size_t bytes) {
  enum { CHUNK = 1 << 16 };
  float *x = mem_alloc(CHUNK, sizeof *x);
  void *typed = mem_alloc(CHUNK, sizeof *x);
  for (size_t i = 0; i < CHUNK; i++) x[i] = rng_normal(1, 0, i);
  convert_from_f32(x, typed, t.dtype, CHUNK);
  size_t piece = CHUNK * dtype_size(t.dtype);
  device_upload(d, t.data, typed, piece);
  for (size_t at = piece; at < bytes; at += at)
    device_copy(d, (char *)t.data + at, t.data, at < bytes - at ? at : bytes - at);
  free(x);
  free(typed);
}

DeviceRates device_measure(Device *d) {
  MeasureSizes s = measure_sizes(d);
  size_t peak = d->peak;
  Tensor t[3];
  for (int i = 0; i < 3; i++) {
    size_t square = (size_t)(s.side * s.side) * dtype_size(s.type);
    size_t bytes = i < 2 && s.copy_bytes > square ? s.copy_bytes : square;
    t[i] = tensor_2d(device_alloc(d, bytes), s.type, s.side, s.side);
    measure_fill(d, t[i], bytes); /* pages that were never written are read for nothing */
  }
  DeviceRates r;
  double side = (double)s.side;
  r.gemm_flops = best_rate(d, measure_gemm, t, 2 * side * side * side);
  for (int i = 0; i < 2; i++) t[i] = tensor_1d(t[i].data, DT_U8, (int64_t)s.copy_bytes);
  r.copy_bytes = best_rate(d, measure_copy, t, 2.0 * (double)s.copy_bytes);
  for (int i = 0; i < 3; i++) device_free(d, t[i].data);
  d->peak = peak;
  return r;
}
