/* Attention's backward on Hopper's own instructions, for heads of 64 and sequences of one length:
 * the training step's shape. */
#ifndef KERNELS_CUDA_ATTENTION_HOPPER_H
#define KERNELS_CUDA_ATTENTION_HOPPER_H

#include "kernels/cuda/cuda.h"

/* As the op, of BF16; false, with nothing queued, where the card or the shape is another. */
bool hopper_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                          Segments seg, AttnShape s, Tensor dqkv_NQ);

#endif
