/* Causal attention over packed sequences: the own kernels for Hopper (attention_hopper.h), else
 * cuDNN where it takes the shape, else the own kernels for any shape (attention_own.h). */
#include "kernels/cuda/aligned.h"
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_hopper.h"
#include "kernels/cuda/attention_own.h"
#include "kernels/cuda/ops.h"

static bool is_2d(Tensor t, DType type, int64_t rows, int64_t columns) {
  return t.data && t.dtype == type && t.ndim == 2 && t.dim[0] == rows && t.dim[1] == columns;
}

static void check(Tensor qkv, Tensor out, Segments seg, AttnShape s) {
  int64_t n = qkv.dim[0], D = s.head_dim, H = s.n_heads, K = s.n_kv_heads;
  require(H > 0 && K > 0 && H % K == 0 && D > 0 && s.window >= 0);
  require(is_2d(qkv, qkv.dtype, n, (H + 2 * K) * D) && is_2d(out, qkv.dtype, n, H * D));
  require(seg.offsets[seg.n_seqs] == n);
  require(seg.device_offsets.data && seg.device_offsets.dtype == DT_I32);
}

/* What cuDNN could take; whether it does is known when it is asked. Its backward of heads above 128
 * is wrong: 9.14 mixes rows of packed sequences. */
enum { CUDNN_HEAD_FORWARD = 256, CUDNN_HEAD_BACKWARD = 128 };
static bool suits_cudnn(Tensor qkv, Tensor out, AttnShape s, int most) {
  return qkv.dtype == DT_BF16 && s.head_dim % 8 == 0 && s.head_dim <= most && aligned(qkv.data) &&
         aligned(out.data);
}

void cuda_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                        Tensor lse_NH) {
  int64_t n = qkv_NQ.dim[0];
  if (n == 0) return;
  check(qkv_NQ, out_NHD, seg, s);
  require(!lse_NH.data || is_2d(lse_NH, DT_F32, n, s.n_heads));
  bool done = suits_cudnn(qkv_NQ, out_NHD, s, CUDNN_HEAD_FORWARD) &&
              (hopper_attention_fwd(d, qkv_NQ, seg, s, out_NHD, lse_NH) ||
               cudnn_attention_fwd(d, qkv_NQ, seg, s, out_NHD, lse_NH));
  if (!done) own_attention_fwd(d, qkv_NQ, seg, s, out_NHD, lse_NH);
}

void cuda_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                        Segments seg, AttnShape s, Rotation rotation, Tensor dqkv_NQ) {
  int64_t n = qkv_NQ.dim[0];
  if (n == 0) return;
  check(qkv_NQ, out_NHD, seg, s);
  require(is_2d(dout_NHD, qkv_NQ.dtype, n, out_NHD.dim[1]));
  require(is_2d(dqkv_NQ, qkv_NQ.dtype, n, qkv_NQ.dim[1]) && is_2d(lse_NH, DT_F32, n, s.n_heads));
  bool wide = suits_cudnn(qkv_NQ, out_NHD, s, CUDNN_HEAD_BACKWARD) && aligned(dout_NHD.data) &&
              aligned(dqkv_NQ.data);
  if (wide && hopper_attention_bwd(d, dout_NHD, qkv_NQ, out_NHD, lse_NH, seg, s, rotation, dqkv_NQ))
    return;
  if (!wide || !cudnn_attention_bwd(d, dout_NHD, qkv_NQ, out_NHD, lse_NH, seg, s, dqkv_NQ))
    own_attention_bwd(d, dout_NHD, qkv_NQ, out_NHD, lse_NH, seg, s, dqkv_NQ);
  if (rotation.cos_Pr.data)
    cuda_rope(d, dqkv_NQ, rotation.positions_N, rotation.cos_Pr, rotation.sin_Pr, s, true);
}
