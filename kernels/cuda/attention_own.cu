/* Our own attention: checks, delta, and who computes: tensor cores where rows are BF16 and allow
 * 16-byte accesses, plain arithmetic anywhere else. */
#include "kernels/cuda/attention_own.h"

namespace {

/* delta[n, h] = sum of dout * out over head h of row n, by `width` lanes (a power of two). */
template <class T>
__global__ void delta_kernel(int64_t heads, int dim, int width, const T *dout, const T *out,
                             float *delta) {
  int64_t i = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / width;
  int lane = static_cast<int>(threadIdx.x) % width;
  float sum = 0;
  if (i < heads) {
    const T *x = dout + i * dim, *y = out + i * dim;
    if (dim % Pack<T>::N == 0 &&
        (reinterpret_cast<uintptr_t>(dout) | reinterpret_cast<uintptr_t>(out)) % 16 == 0)
      for (int j = lane * Pack<T>::N; j < dim; j += width * Pack<T>::N) {
        Pack<T> u = pack_load(x + j), v = pack_load(y + j);
#pragma unroll
        for (int k = 0; k < Pack<T>::N; k++) sum += u.v[k] * v.v[k];
      }
    else
      for (int j = lane; j < dim; j += width) sum += to_float(x[j]) * to_float(y[j]);
  }
  for (int o = width / 2; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (i < heads && lane == 0) delta[i] = sum;
}

void launch_delta(cudaStream_t stream, Tensor dout_NHD, const OwnAttention &a, int64_t rows) {
  cuda_by_type(dout_NHD.dtype, [&](auto zero) {
    using T = decltype(zero);
    int64_t heads = rows * a.n_heads;
    int width = 1;
    while (width < 32 && width * Pack<T>::N < a.head_dim) width *= 2;
    int64_t blocks = cuda_ceil(heads * width, 256);
    delta_kernel<T><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(
        heads, a.head_dim, width, static_cast<const T *>(a.dout), static_cast<const T *>(a.out),
        const_cast<float *>(a.delta));
    CUDA_LAUNCHED();
  });
}

void check_matrix(Tensor t, DType type, int64_t rows, int64_t columns) {
  require(t.dtype == type && t.ndim == 2 && t.dim[0] == rows && t.dim[1] == columns);
}

OwnAttention attention_of(Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD) {
  int64_t n = qkv_NQ.dim[0], D = s.head_dim, H = s.n_heads, K = s.n_kv_heads;
  require(H > 0 && K > 0 && H % K == 0 && s.window >= 0 && s.scale > 0);
  require(qkv_NQ.dtype == DT_F32 || qkv_NQ.dtype == DT_BF16);
  check_matrix(qkv_NQ, qkv_NQ.dtype, n, (H + 2 * K) * D);
  check_matrix(out_NHD, qkv_NQ.dtype, n, H * D);
  require(seg.offsets[seg.n_seqs] == n && seg.device_offsets.dtype == DT_I32);
  require(seg.device_offsets.data && tensor_numel(seg.device_offsets) == seg.n_seqs + 1);
  if (D < 1 || D > OWN_MAX_HEAD)
    die("attention takes head sizes from 1 to %d, found %d", OWN_MAX_HEAD, s.head_dim);
  OwnAttention a = {};
  a.n_seqs = seg.n_seqs;
  a.n_heads = s.n_heads;
  a.n_kv_heads = s.n_kv_heads;
  a.head_dim = s.head_dim;
  a.window = s.window;
  a.scale = s.scale;
  a.q_stride = qkv_NQ.dim[1];
  a.offsets = cuda_data<const int32_t>(seg.device_offsets);
  a.qkv = qkv_NQ.data;
  a.out = out_NHD.data;
  return a;
}

/* Whether every head of every row starts on 16 bytes. */
bool rows_fit_mma(DType type, const OwnAttention &a) {
  uintptr_t all = reinterpret_cast<uintptr_t>(a.qkv) | reinterpret_cast<uintptr_t>(a.out) |
                  reinterpret_cast<uintptr_t>(a.dout) | reinterpret_cast<uintptr_t>(a.out_w) |
                  reinterpret_cast<uintptr_t>(a.dqkv_w);
  return type == DT_BF16 && a.head_dim % 8 == 0 && all % 16 == 0;
}

}  // namespace

unsigned own_blocks(Segments seg, int rows, int heads) {
  int64_t n = 0;
  for (int b = 0; b < seg.n_seqs; b++)
    n += cuda_ceil(seg.offsets[b + 1] - seg.offsets[b], rows) * heads;
  if (n > INT32_MAX) die("attention over %lld tiles", static_cast<long long>(n));
  return static_cast<unsigned>(n);
}

void own_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                       Tensor lse_NH) {
  OwnAttention a = attention_of(qkv_NQ, seg, s, out_NHD);
  if (lse_NH.data) check_matrix(lse_NH, DT_F32, qkv_NQ.dim[0], s.n_heads);
  if (qkv_NQ.dim[0] == 0) return;
  a.out_w = out_NHD.data;
  a.lse_w = cuda_data<float>(lse_NH);
  if (rows_fit_mma(qkv_NQ.dtype, a))
    own_mma_fwd(cuda_stream(d), a, seg);
  else
    own_plain_fwd(cuda_stream(d), qkv_NQ.dtype, a, seg);
}

void own_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                       Segments seg, AttnShape s, Tensor dqkv_NQ) {
  OwnAttention a = attention_of(qkv_NQ, seg, s, out_NHD);
  int64_t n = qkv_NQ.dim[0];
  check_matrix(dout_NHD, qkv_NQ.dtype, n, out_NHD.dim[1]);
  check_matrix(lse_NH, DT_F32, n, s.n_heads);
  check_matrix(dqkv_NQ, qkv_NQ.dtype, n, qkv_NQ.dim[1]);
  if (n == 0) return;
  size_t heads = static_cast<size_t>(n) * static_cast<size_t>(s.n_heads);
  a.dout = dout_NHD.data;
  a.lse = cuda_data<const float>(lse_NH);
  a.delta = static_cast<float *>(cuda_scratch(d, sizeof(float) * heads));
  a.dqkv_w = dqkv_NQ.data;
  launch_delta(cuda_stream(d), dout_NHD, a, n);
  if (rows_fit_mma(qkv_NQ.dtype, a))
    own_mma_bwd(cuda_stream(d), a, seg);
  else
    own_plain_bwd(cuda_stream(d), qkv_NQ.dtype, a, seg);
}
