/* Exchanges between GPUs of one host inside of a captured step (comm_step.cu). */
#ifndef KERNELS_CUDA_COMM_STEP_H
#define KERNELS_CUDA_COMM_STEP_H

#include "kernels/cuda/comm.h"

constexpr int STEP_PEERS = 8, STEP_BLOCKS = 32, STEP_THREADS = 256;

/* Where a rank's step boxes lie, in this process's address space, and how many exchanges there
 * were. */
struct StepGroup {
  char *box[STEP_PEERS]; /* [ranks], each step_box_bytes, flags zeroed before the first exchange */
  size_t slot_bytes;     /* longest block between two ranks; a multiple of 16 */
  uint32_t *count;       /* [STEP_BLOCKS] in this GPU's memory, zeroed */
};
size_t step_box_bytes(int ranks, size_t slot_bytes);
size_t step_flag_bytes(void); /* of these, at the start */

/* Queues one kernel. All ranks call it in the same order; no block is longer than a slot. */
void step_exchange(cudaStream_t stream, const StepGroup *g, const CommPeer *peer, int ranks,
                   int rank);

#endif
