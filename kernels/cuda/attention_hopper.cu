/* Attention's backward on Hopper. With p = exp(scale q.k - lse) and delta = dout.out:
 * dv = sum p dout,  ds = p (dout.v - delta),  dk = scale sum ds q,  dq = scale sum ds k.
 *
 * Two kernels, so that every sum has one owner and one order: in keys_kernel (_keys.cu) tiles of
 * keys stay, and the queries of all heads of their group pass by; in queries_kernel (_queries.cu)
 * tiles of queries stay, and keys pass by. Both compute the weights again, which costs less than to
 * bring partial sums or ds through memory. A block is two or three warpgroups, each of which owns
 * 64 of the rows that stay; they hold them in registers, as they do weights and gradients, so
 * shared memory carries only what passes by: a ring of tiles that the copy engine fills. While one
 * warpgroup computes exponentials another keeps the tensor cores busy.
 *
 * Sequences have one length, a multiple of 128. */
#include "kernels/cuda/attention_hopper.h"

#include "kernels/cuda/attention_hopper_tiles.h"

/* lse_BHT = lse_NH in powers of two; delta_BHT = dout.out. A block is 32 tokens of 8 heads, 8 lanes
 * to a head. */
static __global__ __launch_bounds__(256) void rows_kernel(const bf16 *dout, const bf16 *out,
                                                          const float *lse_NH, int n_heads, int len,
                                                          float *lse, float *delta) {
  __shared__ float sum[8][33];
  int lane = static_cast<int>(threadIdx.x) % 8, token = static_cast<int>(threadIdx.x) / 8;
  int first_token = static_cast<int>(blockIdx.x) * 32, head0 = static_cast<int>(blockIdx.y) * 8;
  int64_t row = first_token + token;
  Pack<bf16> a[8], b[8];
#pragma unroll
  for (int h = 0; h < 8; h++)
    if (head0 + h < n_heads) {
      int64_t at = (row * n_heads + head0 + h) * HOPPER_D + lane * Pack<bf16>::N;
      a[h] = pack_load(dout + at);
      b[h] = pack_load(out + at);
    }
#pragma unroll
  for (int h = 0; h < 8; h++)
    if (head0 + h < n_heads) {
      float x = 0;
#pragma unroll
      for (int i = 0; i < Pack<bf16>::N; i++) x = fmaf(a[h].v[i], b[h].v[i], x);
      for (int o = 4; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
      if (lane == 0) sum[h][token] = x;
    }
  __syncthreads();
  int h = static_cast<int>(threadIdx.x) / 32, t = static_cast<int>(threadIdx.x) % 32;
  if (head0 + h >= n_heads) return;
  int64_t seq = first_token / len, to = (seq * n_heads + head0 + h) * len + first_token % len + t;
  delta[to] = sum[h][t];
  lse[to] = HOPPER_LOG2E * lse_NH[static_cast<int64_t>(first_token + t) * n_heads + head0 + h];
}

/* Rows of a matrix, in tiles of 64 x 64 for the copy engine. */
static CUtensorMap map_rows(Tensor x) {
  typedef decltype(&cuTensorMapEncodeTiled) Encode;
  static Encode encode = nullptr;
  if (!encode) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult status;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                cudaEnableDefault, &status));
    require(status == cudaDriverEntryPointSuccess);
    encode = reinterpret_cast<Encode>(found);
  }
  CUtensorMap map;
  cuuint64_t dims[2] = {static_cast<cuuint64_t>(x.dim[1]), static_cast<cuuint64_t>(x.dim[0])};
  cuuint64_t stride[1] = {2 * dims[0]};
  cuuint32_t box[2] = {HOPPER_D, HOPPER_ROWS}, step[2] = {1, 1};
  CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x.data, dims, stride, box, step,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) die("cuTensorMapEncodeTiled: error %d", static_cast<int>(r));
  return map;
}

/* Whether the card and the shape are those that the kernels are for. */
static bool takes(Device *d, Segments seg, AttnShape s) {
  int len = seg.n_seqs > 0 ? seg.offsets[1] - seg.offsets[0] : 0;
  if (cuda_of(d)->arch != 90 || s.head_dim != HOPPER_D || len == 0 || len % (2 * HOPPER_ROWS) != 0)
    return false;
  if (s.window > 0 && s.window < len) return false;
  for (int b = 0; b <= seg.n_seqs; b++)
    if (seg.offsets[b] != b * len) return false;
  return true;
}

bool hopper_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                          Segments seg, AttnShape s, Tensor dqkv_NQ) {
  if (!takes(d, seg, s)) return false;
  int n = static_cast<int>(qkv_NQ.dim[0]), len = n / seg.n_seqs;
  size_t numbers = static_cast<size_t>(n) * static_cast<size_t>(s.n_heads);
  float *lse = static_cast<float *>(cuda_scratch(d, 2 * sizeof(float) * numbers));
  float *delta = lse + numbers;
  cudaStream_t stream = cuda_stream(d);
  dim3 grid(static_cast<unsigned>(n / 32), static_cast<unsigned>((s.n_heads + 7) / 8));
  rows_kernel<<<grid, 256, 0, stream>>>(cuda_data<bf16>(dout_NHD), cuda_data<bf16>(out_NHD),
                                        cuda_data<float>(lse_NH), s.n_heads, len, lse, delta);
  CUDA_LAUNCHED();
  HopperJob job = {seg.n_seqs,
                   len,
                   s.n_heads,
                   s.n_kv_heads,
                   s.scale,
                   cuda_data<bf16>(qkv_NQ),
                   cuda_data<bf16>(dout_NHD),
                   lse,
                   delta,
                   cuda_data<bf16>(dqkv_NQ)};
  CUtensorMap qkv_map = map_rows(qkv_NQ), dout_map = map_rows(dout_NHD);
  hopper_keys(job, qkv_map, dout_map, stream);
  hopper_queries(job, qkv_map, stream);
  return true;
}
