/* Captured steps are CUDA graphs of what was queued on the compute stream.
 *
 * A graph holds addresses, those of scratch too. Scratch that grows while graphs live is therefore
 * kept, and freed with the last of them. */
#include "kernels/cuda/graph.h"

#include <stdlib.h>

struct CudaGraphs {
  int alive;
  void **retired;
  size_t n_retired;
};

void graphs_open(Device *d) {
  cuda_of(d)->graphs = static_cast<CudaGraphs *>(mem_zalloc(1, sizeof(CudaGraphs)));
}

static void free_retired(Device *d) {
  CudaGraphs *all = cuda_of(d)->graphs;
  for (size_t i = 0; i < all->n_retired; i++) {
    size_t before = d->bytes;
    device_free(d, all->retired[i]);
    d->own_bytes -= before - d->bytes;
  }
  all->n_retired = 0;
}

void graphs_close(Device *d) {
  CudaGraphs *all = cuda_of(d)->graphs;
  if (all->alive) log_warn("device closed with %d captured steps", all->alive);
  free_retired(d);
  free(all->retired);
  free(all);
}

void graph_retire_scratch(Device *d, void *scratch) {
  CudaGraphs *all = cuda_of(d)->graphs;
  if (!scratch) return;
  all->retired =
      static_cast<void **>(mem_grow(all->retired, all->n_retired + 1, sizeof *all->retired));
  all->retired[all->n_retired++] = scratch;
  if (all->alive == 0) free_retired(d);
}

void cuda_capture_begin(Device *d) {
  require(cuda_of(d)->current == cuda_of(d)->compute);
  /* thread-local: what other threads do with other streams meanwhile is not ours */
  CUDA_CHECK(cudaStreamBeginCapture(cuda_stream(d), cudaStreamCaptureModeThreadLocal));
}

void *cuda_capture_end(Device *d) {
  cudaGraph_t captured;
  cudaGraphExec_t graph;
  CUDA_CHECK(cudaStreamEndCapture(cuda_stream(d), &captured));
  CUDA_CHECK(cudaGraphInstantiate(&graph, captured, 0));
  CUDA_CHECK(cudaGraphDestroy(captured));
  CUDA_CHECK(cudaGraphUpload(graph, cuda_stream(d)));
  cuda_of(d)->graphs->alive++;
  return graph;
}

void cuda_graph_launch(Device *d, void *graph) {
  CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), cuda_stream(d)));
}

/* Waits: a launch may still be under way. */
void cuda_graph_free(Device *d, void *graph) {
  CUDA_CHECK(cudaStreamSynchronize(cuda_stream(d)));
  CUDA_CHECK(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
  if (--cuda_of(d)->graphs->alive == 0) free_retired(d);
}
