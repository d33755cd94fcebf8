/* Graphs of cuDNN's back-end API: tensors and operations are added one by one, and the whole is
 * built into a plan, which is what runs.
 *
 * The first call that cuDNN refuses leaves its reason in `error`; what is added after that does
 * nothing, so that only the build is checked. Tensors have four dimensions. */
#ifndef KERNELS_CUDA_CUDNN_GRAPH_H
#define KERNELS_CUDA_CUDNN_GRAPH_H

#include "kernels/cuda/lib_cudnn.h"

typedef struct GraphShape {
  int64_t dim[4], stride[4];
} GraphShape;

/* A tensor of a graph: its descriptor, and what operations on it need to know. */
typedef struct GraphTensor {
  cudnnBackendDescriptor_t desc;
  GraphShape shape;
} GraphTensor;

enum { GRAPH_DESCRIPTORS = 384, GRAPH_OPS = 48, GRAPH_SCALARS = 8 };

typedef struct CudnnGraph {
  const Cudnn *dnn;
  int n_descs, n_ops, n_scalars;
  int64_t next_uid; /* of virtual tensors and scalars: above those of the caller */
  cudnnBackendDescriptor_t descs[GRAPH_DESCRIPTORS]; /* all, for the end */
  cudnnBackendDescriptor_t ops[GRAPH_OPS];
  float scalar[GRAPH_SCALARS]; /* tensors of one number, in host memory */
  int64_t scalar_uid[GRAPH_SCALARS];
  cudnnBackendDescriptor_t plan;
  int64_t workspace; /* bytes that the plan needs */
  char engine[96];   /* which engine and knobs, for people */
  char error[512];   /* "": none */
} CudnnGraph;

CudnnGraph *graph_create(const Cudnn *dnn, int64_t first_free_uid);
void graph_free(CudnnGraph *g);

GraphShape graph_packed(int64_t a, int64_t b, int64_t c, int64_t d); /* row-major */
GraphShape graph_transposed(GraphShape s);                           /* of the last two */

/* Memory that the caller gives when the plan runs, by uid. ragged: sequence b starts at element
 * ragged[b]; desc NULL: it is not. */
GraphTensor graph_tensor(CudnnGraph *g, int64_t uid, cudnnDataType_t type, GraphShape shape,
                         GraphTensor ragged);
GraphTensor graph_virtual(CudnnGraph *g, cudnnDataType_t type, GraphShape shape);
GraphTensor graph_scalar(CudnnGraph *g, float value);

/* y = mode(x), mode(x, b), or b where t is false: mode(x, b, t). y has x's shape. */
GraphTensor graph_pointwise(CudnnGraph *g, cudnnPointwiseMode_t mode, cudnnDataType_t type,
                            GraphTensor x, GraphTensor b = {}, GraphTensor t = {});
void graph_pointwise_to(CudnnGraph *g, cudnnPointwiseMode_t mode, GraphTensor x, GraphTensor b,
                        GraphTensor y);
/* The index along an axis, I32, in x's shape. */
GraphTensor graph_index(CudnnGraph *g, GraphTensor x, int64_t axis);
void graph_reduce_to(CudnnGraph *g, cudnnReduceTensorOp_t mode, GraphTensor x, GraphTensor y);
/* Another view of x's elements. */
void graph_reshape_to(CudnnGraph *g, GraphTensor x, GraphTensor y);

/* Lengths of each sequence in place of the sizes m, n and k; desc NULL: the whole. */
typedef struct GraphLengths {
  GraphTensor m, n, k;
} GraphLengths;
void graph_matmul_to(CudnnGraph *g, GraphTensor a, GraphTensor b, GraphTensor c, GraphLengths len);

/* Takes the first of cuDNN's proposals that it then accepts; before them those of the kernel
 * configuration `liked`, where cuDNN proposes it (ANY_KERNEL: the order is cuDNN's). False: error
 * says why. */
enum { ANY_KERNEL = -1 };
bool graph_build(CudnnGraph *g, cudnnHandle_t handle, int64_t liked);

/* Pointers by uid; scalars are added. Queued on the handle's stream; false: error says why. */
bool graph_run(CudnnGraph *g, cudnnHandle_t handle, int n, const int64_t *uids, void *const *data,
               void *workspace);

#endif
