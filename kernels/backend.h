/* What a back end gives to kernels/device.c. Internal to kernels/: the only interface for others is
 * kernels.h. */
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/kernels.h"

struct Device {
  DeviceKind kind;
  const struct Backend *backend;
  int threads;
  char describe[256];
  size_t total_memory;
  size_t bytes, peak; /* allocated now, most since the last reset */
  size_t own_bytes;   /* of bytes: the back end's own, until it closes */
  bool capturing;     /* between device_capture_begin and _end */
};

typedef struct Backend {
  const Ops *ops;
  void (*close)(Device *d);                     /* frees d itself */
  void *(*alloc)(Device *d, size_t bytes);      /* 64-byte aligned; NULL when out of memory */
  size_t (*release)(Device *d, void *p);        /* returns the bytes asked for at alloc */
  void *(*alloc_host)(Device *d, size_t bytes); /* as alloc, of the host's memory */
  void (*release_host)(Device *d, void *p);
  bool (*export_memory)(Device *d, void *p, void *handle); /* these three: all or none */
  void *(*import_memory)(Device *d, const void *handle);
  void (*unimport)(Device *d, void *p);
  void (*zero)(Device *d, void *p, size_t bytes);
  void (*upload)(Device *d, void *dst, const void *src, size_t bytes);
  void (*download)(Device *d, void *dst, const void *src, size_t bytes);
  void (*copy)(Device *d, void *dst, const void *src, size_t bytes); /* queued */
  void (*sync)(Device *d);
  bool (*takes_codes)(const Device *d, DType compute);
  void (*capture_begin)(Device *d); /* this and the next three: NULL without graphs */
  void *(*capture_end)(Device *d);
  void (*graph_launch)(Device *d, void *graph); /* on the current stream */
  void (*graph_free)(Device *d, void *graph);
  int (*attach)(Grid *g, Device *d, Error *err); /* grid_attach; NULL: the host's Comms serve */
} Backend;

/* Make a device with kind, backend, threads, describe and total_memory filled; NULL: err says why.
 */
Device *cpu_device_open(int threads, Error *err);
Device *cuda_device_open(int threads, Error *err);

/* CPU threads of this rank: what was asked for, OMP_NUM_THREADS, or the cores / ranks on them. */
int cpu_choose_threads(int asked);
/* memcpy by several threads. */
void host_copy(int threads, void *dst, const void *src, size_t bytes);

#endif
