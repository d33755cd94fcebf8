/* Attention on Hopper's own instructions, for BF16 and heads of 64 or 128: sequences of any
 * lengths, without a window that is shorter than they are. */
#ifndef KERNELS_CUDA_ATTENTION_HOPPER_H
#define KERNELS_CUDA_ATTENTION_HOPPER_H

#include "kernels/cuda/cuda.h"

/* As the ops; false, with nothing queued, where the card or the shape is another. */
bool hopper_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                          Tensor lse_NH);
bool hopper_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                          Segments seg, AttnShape s, Rotation rotation, Tensor dqkv_NQ);

#endif
