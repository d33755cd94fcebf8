/* Captured steps: device_capture_begin and its like on CUDA. */
#ifndef KERNELS_CUDA_GRAPH_H
#define KERNELS_CUDA_GRAPH_H

#include "kernels/cuda/cuda.h"

void graphs_open(Device *d);
void graphs_close(Device *d);
void cuda_capture_begin(Device *d);
void *cuda_capture_end(Device *d);
void cuda_graph_launch(Device *d, void *graph);
void cuda_graph_free(Device *d, void *graph);

/* Frees a block of scratch that a larger one replaces; when no captured step names it any more. */
void graph_retire_scratch(Device *d, void *scratch);

#endif
