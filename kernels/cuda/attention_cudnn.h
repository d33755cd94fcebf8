/* Attention by cuDNN: its plans, kept by shape, and their runs. */
#ifndef KERNELS_CUDA_ATTENTION_CUDNN_H
#define KERNELS_CUDA_ATTENTION_CUDNN_H

#include "kernels/cuda/attention_graph.h"

/* A built graph, or what refused it. Kept until the device closes. */
struct AttnPlan {
  AttnGraphKey key;
  CudnnGraph *graph;
  double build_seconds;
  AttnPlan *next;
};

enum { ATTN_PLAN_LISTS = 64 };
struct CudaAttention {
  Cudnn dnn;
  cudnnHandle_t handle; /* NULL: cuDNN does not open, and why says so */
  char why[1024];
  int64_t most_workspace;           /* bytes; what needs more is refused */
  AttnPlan *plans[ATTN_PLAN_LISTS]; /* by hash of the key */
};

/* The device's, opened by the first call. */
CudaAttention *attention_of(Device *d);
void attention_close(CudaAttention *a);

/* Builds what is not there yet; NULL where cuDNN refuses, which is said once. */
AttnPlan *attention_plan(CudaAttention *a, AttnGraphKey key);

/* As the ops, of BF16; false, with nothing queued, where cuDNN does not take this shape. */
bool cudnn_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                         Tensor lse_NH);
bool cudnn_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                         Segments seg, AttnShape s, Tensor dqkv_NQ);

#endif
