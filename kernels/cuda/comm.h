/* Collectives of a GPU: comm.cu gives the device's streams and events to kernels/cpu/comm_device.h
 * and chooses the transports: comm_peer.cu copies between GPUs of one host, comm_nccl.cu does the
 * rest. */
#ifndef KERNELS_CUDA_COMM_H
#define KERNELS_CUDA_COMM_H

#include "kernels/cuda/cuda.h"

extern "C" {
#include "kernels/cpu/comm_device.h"
}

int cuda_attach(Grid *g, Device *d, Error *err); /* Backend.attach */
void cuda_detach(Device *d); /* before its streams go: ends its part in all Comms */

/* A transport's part in a Comm. Making and leaving one is collective. exchange queues on
 * cuda_stream(d). */
struct CudaGroup {
  void (*exchange)(Device *d, CudaGroup *g, CollKind kind, const CommPeer *peer, int size,
                   int rank);
  void (*leave)(Device *d, CudaGroup *g);                    /* frees it */
  void (*meet)(Device *d, CudaGroup *g, int size, int rank); /* as CommDeviceOps.meet, or NULL */
  const char *name;
  size_t captured_bytes; /* as CommDeviceOps.captured_bytes */
};

/* The track that is queued on. */
static inline int cuda_track(Device *d) {
  int t = 0;
  while (t + 1 < CUDA_TRACKS && cuda_stream(d) != cuda_of(d)->comm[t]) t++;
  return t;
}

/* With a communicator for each of so many tracks. NULL with an error. */
CudaGroup *nccl_group_create(Device *d, Comm *host, const char *name, int tracks, Error *err);
int nccl_load(Error *err); /* before the others; once is enough */
int nccl_version(void);    /* 22809 is 2.28.9; 0: not loaded */
bool nccl_failed(Device *d, char *text, size_t size);
void nccl_abort_all(Device *d);

/* NULL where the GPUs of the ranks do not reach each other's memory; on all ranks then. Keeps host.
 */
CudaGroup *peer_group_create(Device *d, Comm *host, const char *name);

#endif
