/* Collectives of a GPU: comm.cu gives the device's streams and events to kernels/cpu/comm_device.h
 * and chooses the transport, comm_nccl.cu is that transport. */
#ifndef KERNELS_CUDA_COMM_H
#define KERNELS_CUDA_COMM_H

#include "kernels/cuda/cuda.h"

extern "C" {
#include "kernels/cpu/comm_device.h"
}

int cuda_attach(Grid *g, Device *d, Error *err); /* Backend.attach */
void cuda_detach(Device *d); /* before its streams go: ends its part in all Comms */

/* A communicator of the ranks of `host`, made together; NULL with an error. */
void *nccl_group_create(Device *d, Comm *host, const char *name, Error *err);
int nccl_load(Error *err); /* before the others; once is enough */
int nccl_version(void);    /* 22809 is 2.28.9 */
void nccl_exchange(Device *d, void *group, CollKind kind, const CommPeer *peer, int size, int rank);
bool nccl_failed(Device *d, char *text, size_t size);
void nccl_abort_all(Device *d);
void nccl_leave(Device *d, void *group);

#endif
