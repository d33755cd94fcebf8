/* Attention on Hopper: when its kernels serve, and what they are given.
 *
 * Forward: out = softmax(scale q.k) v, with a running softmax over tiles of keys (Dao 2023,
 * FlashAttention-2). Backward, with p = exp(scale q.k - lse) and delta = dout.out:
 * dv = sum p dout,  ds = p (dout.v - delta),  dk = scale sum ds q,  dq = scale sum ds k.
 *
 * The backward is two kernels, so that every sum has one owner and one order: in keys_kernel
 * (_keys.cu) tiles of keys stay, and the queries of all heads of their group pass by; in
 * queries_kernel (_queries.cu) tiles of queries stay, and keys pass by. Both compute the weights
 * again, which costs less than to bring partial sums or ds through memory. A block is two or three
 * warpgroups, each of which owns 64 of the rows that stay and their sums; weights and gradients
 * stay in registers, and shared memory carries what passes by: a ring of tiles that the copy engine
 * fills. While one warpgroup computes exponentials another keeps the tensor cores busy.
 *
 * Sequences are packed, and each is cut into tiles from its start. Tiles reach behind a sequence's
 * end into the next one; such rows are read, and cleared where a product sums over them, but never
 * written. */
#include "kernels/cuda/attention_hopper.h"

#include <cassert>

#include "kernels/cuda/attention_hopper_tiles.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/tensor_map.h"

namespace {

enum { HEADS = 4 }; /* of a block of rows_kernel */

/* lse in powers of two and delta, by head and tile. A block is 32 or 16 rows of HEADS heads, D / 8
 * lanes to a head; a thread has all its loads under way at once. */
template <int D>
__global__ __launch_bounds__(256) void rows_kernel(HopperJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int LANES = D / 8, ROWS = 256 / LANES;
  __shared__ float sum[HEADS][ROWS + 1];
  int thread = static_cast<int>(threadIdx.x), lane = thread % LANES, row = thread / LANES;
  int place = static_cast<int>(blockIdx.x) * ROWS, tile = place / HOPPER_ROWS;
  int seq = hopper_seq(job, HOPPER_ROWS, tile), first = job.offsets[seq];
  int in_seq = place - (first / HOPPER_ROWS + seq) * HOPPER_ROWS,
      rows = job.offsets[seq + 1] - first - in_seq;
  int head0 = static_cast<int>(blockIdx.y) * HEADS, heads = min(HEADS, job.n_heads - head0);
  int64_t head_row = static_cast<int64_t>(first + in_seq + row) * job.n_heads + head0;
  if (job.positions && row < rows && lane == 0)
    assert(job.positions[first + in_seq + row] >= 0 &&
           job.positions[first + in_seq + row] < job.n_positions);
  uint4 a[HEADS], b[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++)
    if (row < rows && h < heads) {
      int64_t at = (head_row + h) * D + lane * 8;
      a[h] = *reinterpret_cast<const uint4 *>(job.dout + at);
      b[h] = *reinterpret_cast<const uint4 *>(job.out + at);
    }
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const bf16 *x = reinterpret_cast<const bf16 *>(a + h),
               *y = reinterpret_cast<const bf16 *>(b + h);
    float dot = 0;
    if (row < rows && h < heads)
#pragma unroll
      for (int i = 0; i < 8; i++) dot = fmaf(to_float(x[i]), to_float(y[i]), dot);
    for (int o = LANES / 2; o > 0; o /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, o);
    if (lane == 0) sum[h][row] = dot;
  }
  __syncthreads();
  int h = thread / ROWS, r = thread % ROWS;
  if (h >= heads) return;
  int64_t to =
      (static_cast<int64_t>(head0 + h) * job.tiles + tile) * HOPPER_ROWS + place % HOPPER_ROWS + r;
  int64_t from = static_cast<int64_t>(first + in_seq + r) * job.n_heads + head0 + h;
  job.delta[to] = sum[h][r];
  job.lse[to] = r < rows ? HOPPER_LOG2E * job.lse_NH[from] : INFINITY;
#endif
}

void add_rotation(Rotation r, HopperJob *job) {
  require(r.positions_N.dtype == DT_I32 && tensor_numel(r.positions_N) == job->n);
  require(r.cos_Pr.dtype == DT_F32 && r.sin_Pr.dtype == DT_F32);
  require(r.cos_Pr.dim[0] == r.sin_Pr.dim[0] && r.cos_Pr.dim[1] == r.sin_Pr.dim[1]);
  job->positions = cuda_data<const int32_t>(r.positions_N);
  job->cos = cuda_data<const float>(r.cos_Pr);
  job->sin = cuda_data<const float>(r.sin_Pr);
  job->n_positions = static_cast<int>(r.cos_Pr.dim[0]);
}

/* A matrix in tiles for the copy engine. */
CUtensorMap map_tiles(Tensor x) {
  uint64_t columns = static_cast<uint64_t>(x.dim[1]), rows = static_cast<uint64_t>(x.dim[0]);
  return tensor_map(x.data, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                             CU_TENSOR_MAP_SWIZZLE_128B,
                             2,
                             {columns, rows},
                             {2 * columns},
                             {64, HOPPER_ROWS}});
}
/* lse and delta, n each: 64 of both at a time. */
CUtensorMap map_rows(const HopperJob &job, size_t n) {
  require(n <= INT32_MAX && job.delta == job.lse + n);
  return tensor_map(job.lse, {CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                              CU_TENSOR_MAP_SWIZZLE_NONE,
                              2,
                              {n, 2},
                              {sizeof(float) * n},
                              {HOPPER_ROWS, 2}});
}

/* Whether the card and the shape are those that the kernels are for. */
bool takes(Device *d, Segments seg, AttnShape s) {
  if (cuda_of(d)->arch != 90 || (s.head_dim != 64 && s.head_dim != 128)) return false;
  if (seg.n_seqs == 0 || seg.offsets[0] != 0) return false;
  for (int b = 0; s.window > 0 && b < seg.n_seqs; b++)
    if (s.window < seg.offsets[b + 1] - seg.offsets[b]) return false;
  return true;
}

HopperJob job_of(Tensor qkv_NQ, Segments seg, AttnShape s) {
  HopperJob job = {};
  job.n_seqs = seg.n_seqs;
  job.n_heads = s.n_heads;
  job.n_kv_heads = s.n_kv_heads;
  job.len = seg.offsets[1];
  for (int b = 1; b < seg.n_seqs; b++)
    if (seg.offsets[b + 1] - seg.offsets[b] != job.len) job.len = 0;
  job.n = static_cast<int>(qkv_NQ.dim[0]);
  job.offsets = cuda_data<const int32_t>(seg.device_offsets);
  job.scale = s.scale;
  job.qkv = cuda_data<bf16>(qkv_NQ);
  return job;
}

template <int D>
void launch_rows(const HopperJob &job, cudaStream_t stream) {
  dim3 grid(static_cast<unsigned>(job.tiles * HOPPER_ROWS / (256 / (D / 8))),
            static_cast<unsigned>((job.n_heads + HEADS - 1) / HEADS));
  rows_kernel<D><<<grid, 256, 0, stream>>>(job);
  CUDA_LAUNCHED();
}

}  // namespace

bool hopper_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                          Tensor lse_NH) {
  if (!takes(d, seg, s)) return false;
  HopperJob job = job_of(qkv_NQ, seg, s);
  if (s.head_dim == 64 && job.len > 0) return false; /* cuDNN is a tenth faster there */
  job.out = cuda_data<bf16>(out_NHD);
  job.lse_NH = cuda_data<float>(lse_NH);
  hopper_forward(job, s.head_dim, map_tiles(qkv_NQ), cuda_stream(d));
  return true;
}

bool hopper_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                          Segments seg, AttnShape s, Rotation rotation, Tensor dqkv_NQ) {
  if (!takes(d, seg, s)) return false;
  HopperJob job = job_of(qkv_NQ, seg, s);
  job.dout = cuda_data<bf16>(dout_NHD);
  job.out = cuda_data<bf16>(out_NHD);
  job.dqkv = cuda_data<bf16>(dqkv_NQ);
  job.lse_NH = cuda_data<float>(lse_NH);
  job.tiles = hopper_places(job.n, job.n_seqs, HOPPER_ROWS);
  size_t numbers = static_cast<size_t>(s.n_heads) * static_cast<size_t>(job.tiles) * HOPPER_ROWS;
  job.lse = static_cast<float *>(cuda_scratch(d, 2 * sizeof(float) * numbers));
  job.delta = job.lse + numbers;
  bool whole = rotation.cos_Pr.data && 2 * rotation.cos_Pr.dim[1] == s.head_dim; /* heads turn */
  if (whole) add_rotation(rotation, &job);
  if (s.head_dim == 64)
    launch_rows<64>(job, cuda_stream(d));
  else
    launch_rows<128>(job, cuda_stream(d));
  CUtensorMap qkv_map = map_tiles(qkv_NQ), dout_map = map_tiles(dout_NHD);
  hopper_keys(job, s.head_dim, qkv_map, dout_map, map_rows(job, numbers), cuda_stream(d));
  hopper_queries(job, s.head_dim, qkv_map, dout_map, cuda_stream(d));
  if (rotation.cos_Pr.data && !whole)
    cuda_rope(d, dqkv_NQ, rotation.positions_N, rotation.cos_Pr, rotation.sin_Pr, s, true);
  return true;
}
