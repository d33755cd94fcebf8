/* y = front(x) W^T + b for up to 64 rows of BF16, as decoding has them: bound by the reading of W,
 * which is BF16 or codes (linear_weights.h).
 *
 * A cluster of blocks owns COLUMNS columns of y, each block a share of k; their sums are added in
 * order of k through shared memory. A warp has 16 rows of W to itself, which go straight from
 * memory into the registers of tensor-core instructions, several pieces ahead, the first of them
 * before the kernel in front of this one is done. x lies in shared memory, with its front: of a
 * norm x times its weight, while the sum of squares joins the sums and divides them in the end.
 *
 * The cut of k depends on W alone: a row of y has the same bits whatever other rows are with it. */
#include "kernels/cuda/linear_few.h"

#include <algorithm>

#include "kernels/cuda/chain.h"
#include "kernels/cuda/cluster.h"
#include "kernels/cuda/linear_weights.h"
#include "kernels/cuda/math.h"

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS, COLUMNS = 16 * WARPS;
constexpr int PART = COLUMNS + 4; /* floats of a row of sums */
constexpr int MAX_SHARE = 768;    /* of k, of a block: 64 rows of it fill half of shared memory */
constexpr int MAX_CLUSTER = 16, PORTABLE_CLUSTER = 8;
constexpr int CHUNK = 256, CHUNKS = MAX_SHARE / CHUNK; /* of k, that a warp stages at a time */

/* With more rows, blocks that start early and wait take room from those that have work: 16 rows of
 * 1.1B, 1.40 ms a step instead of 1.30; 1 row 0.90 instead of 0.95. */
constexpr int EARLY_ROWS = 4;

struct Few {
  const bf16 *x, *norm, *bias;
  Weights w;
  void *y;
  int m, share, cluster; /* share: of k, of a block */
  float eps;
  bool add, y_f32;
};

/* ---- x ---- */

/* Eight numbers of front(x) at column c of a row; what they add to the sum of squares. */
template <Front FRONT>
__device__ inline uint4 front_pack(const Few &a, int row, int c, float *squares) {
  int64_t width = FRONT == FRONT_SWIGLU ? 2 * static_cast<int64_t>(a.w.k) : a.w.k;
  const bf16 *p = a.x + row * width + c;
  uint4 r;
  if constexpr (FRONT == FRONT_NONE) {
    r = *reinterpret_cast<const uint4 *>(p);
  } else {
    Pack<bf16> x = pack_load(p), y = pack_load(FRONT == FRONT_SWIGLU ? p + a.w.k : a.norm + c);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float v = x.v[i];
      if (FRONT == FRONT_RMSNORM) *squares += v * v;
      x.v[i] = (FRONT == FRONT_SWIGLU ? v * sigmoid_f32(v) : v) * y.v[i];
    }
    pack_store(reinterpret_cast<bf16 *>(&r), x);
  }
  return r;
}

/* Columns [k0, k0 + share) of front(x) to shared memory, zeros behind k; a warp has CHUNK columns
 * of a row at a time. squares[row][chunk]: of those columns. Rows beyond m stay what they are:
 * nobody reads what comes of them. */
template <Front FRONT>
__device__ inline void stage_rows(const Few &a, int k0, bf16 *x_tile, int stride, float *squares) {
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int chunks = (a.share + CHUNK - 1) / CHUNK;
  for (int i = warp; i < a.m * chunks; i += WARPS) {
    int row = i / chunks, chunk = i % chunks, c = chunk * CHUNK + 8 * lane;
    float sum = 0;
    if (c < a.share) {
      uint4 pack = make_uint4(0, 0, 0, 0);
      if (k0 + c < a.w.k) pack = front_pack<FRONT>(a, row, k0 + c, &sum);
      *reinterpret_cast<uint4 *>(x_tile + row * stride + c) = pack;
    }
    if constexpr (FRONT == FRONT_RMSNORM) {
      float all = warp_sum(sum);
      if (lane == 0) squares[row * CHUNKS + chunk] = all;
    }
  }
}

/* One number for each row: squares[row][0]. */
__device__ inline void add_chunks(const Few &a, float *squares) {
  if (static_cast<int>(threadIdx.x) >= a.m) return;
  float *s = squares + threadIdx.x * CHUNKS, sum = s[0];
  for (int i = 1; i * CHUNK < a.share; i++) sum += s[i];
  s[0] = sum;
}

/* ---- sums of the cluster ---- */

/* Four columns of a row of y, from the sums of all blocks. */
template <Front FRONT>
__device__ inline void finish_pack(const Few &a, const float *part, const float *squares, int row,
                                   int first_column) {
  constexpr int BATCH = PORTABLE_CLUSTER;
  float4 sum = make_float4(0, 0, 0, 0);
  float square = 0;
  for (int first = 0; first < a.cluster; first += BATCH) { /* all of them on the way at once */
    float4 x[BATCH];
    float s[BATCH];
#pragma unroll
    for (int r = 0; r < BATCH; r++) {
      if (first + r >= a.cluster) break;
      x[r] = cluster_load(reinterpret_cast<const float4 *>(part + row * PART), first + r);
      if (FRONT == FRONT_RMSNORM) s[r] = cluster_load(squares + row * CHUNKS, first + r);
    }
#pragma unroll
    for (int r = 0; r < BATCH; r++) {
      if (first + r >= a.cluster) break;
      sum = make_float4(sum.x + x[r].x, sum.y + x[r].y, sum.z + x[r].z, sum.w + x[r].w);
      if (FRONT == FRONT_RMSNORM) square += s[r];
    }
  }
  float scale = FRONT == FRONT_RMSNORM ? rsqrtf(square / static_cast<float>(a.w.k) + a.eps) : 1;
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int column = first_column + i;
    if (column >= a.w.n) break;
    int64_t at = static_cast<int64_t>(row) * a.w.n + column;
    float *wide = static_cast<float *>(a.y) + at;
    bf16 *narrow = static_cast<bf16 *>(a.y) + at;
    float total = scale * v[i];
    if (a.bias) total += to_float(a.bias[column]);
    if (a.add) total += a.y_f32 ? *wide : to_float(*narrow);
    if (a.y_f32)
      *wide = total;
    else
      *narrow = from_float<bf16>(total);
  }
}

template <class Rows, Front FRONT, int TILES>
__global__ __launch_bounds__(THREADS, 2) void few_kernel(const __grid_constant__ Few a) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int ROWS = 8 * TILES, AHEAD = Rows::template AHEAD<TILES>;
  float *squares = reinterpret_cast<float *>(shared), *part = squares + ROWS * CHUNKS;
  bf16 *x_tile = reinterpret_cast<bf16 *>(part); /* first x, then sums */
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int rank = static_cast<int>(blockIdx.x) % a.cluster, k0 = rank * a.share;
  int first_column = static_cast<int>(blockIdx.x) / a.cluster * COLUMNS;
  int own = lane % 4 * Rows::OWN, stride = a.share + Rows::PAD;
  Rows rows(a.w, first_column + warp * 16 + lane / 4, k0 + own, min(a.share, a.w.k - k0) - own);
  typename Rows::Piece ahead[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) ahead[i] = rows.load(i * PIECE);
  if (a.m <= EARLY_ROWS) next_kernel_may_start();
  wait_for_kernel_before();
  if (a.m > EARLY_ROWS) next_kernel_may_start();
  stage_rows<FRONT>(a, k0, x_tile, stride, squares);
  __syncthreads();

  const bf16 *x = x_tile + lane / 4 * stride + own;
  float sum[TILES][4] = {};
  for (int k = 0; k < a.share; k += AHEAD * PIECE)
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      int at = k + i * PIECE;
      if (at < a.share) Rows::template multiply<TILES>(sum, ahead[i], x + at, stride);
      ahead[i] = rows.load(at + AHEAD * PIECE);
    }

  __syncthreads(); /* x's place is free */
  if constexpr (FRONT == FRONT_RMSNORM) add_chunks(a, squares);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      part[(8 * t + lane % 4 * 2 + i % 2) * PART + warp * 16 + lane / 4 + i / 2 * 8] = sum[t][i];
  cluster_barrier();
  int packs = COLUMNS / a.cluster / 4; /* of this block, in a row of the cluster's sums */
  for (int i = static_cast<int>(threadIdx.x); i < a.m * packs; i += THREADS) {
    int column = (rank * packs + i % packs) * 4;
    finish_pack<FRONT>(a, part + column, squares, i / packs, first_column + column);
  }
  cluster_barrier(); /* nobody reads this block's sums any more */
}

template <class Rows, Front FRONT, int TILES>
void launch(cudaStream_t stream, const Few &a) {
  size_t x = sizeof(bf16) * 8 * TILES * static_cast<size_t>(a.share + Rows::PAD);
  size_t shared =
      sizeof(float) * 8 * TILES * CHUNKS + std::max(x, sizeof(float) * 8 * TILES * PART);
  auto kernel = few_kernel<Rows, FRONT, TILES>;
  chain_allow_shared(kernel, shared);
  if (a.cluster > PORTABLE_CLUSTER)
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  unsigned blocks = static_cast<unsigned>(cuda_ceil(a.w.n, COLUMNS) * a.cluster);
  chain_launch(stream, kernel, dim3(blocks), THREADS, shared, a.cluster, a);
}

template <class Rows, Front FRONT>
void launch_rows(cudaStream_t stream, const Few &a) {
  if (a.m <= 8)
    launch<Rows, FRONT, 1>(stream, a);
  else if (a.m <= 16)
    launch<Rows, FRONT, 2>(stream, a);
  else if (a.m <= 32)
    launch<Rows, FRONT, 4>(stream, a);
  else
    launch<Rows, FRONT, 8>(stream, a);
}

template <class Rows>
void launch_front(cudaStream_t stream, const Few &a, Front front) {
  if (front == FRONT_NONE) launch_rows<Rows, FRONT_NONE>(stream, a);
  if (front == FRONT_RMSNORM) launch_rows<Rows, FRONT_RMSNORM>(stream, a);
  if (front == FRONT_SWIGLU) launch_rows<Rows, FRONT_SWIGLU>(stream, a);
}

/* Enough blocks for the whole card, with shares of k that shared memory holds. By W alone. */
int cluster_of(int64_t n, int64_t k) {
  int64_t tiles = cuda_ceil(n, COLUMNS);
  int cluster = 1;
  while (cluster < PORTABLE_CLUSTER && tiles * cluster < 200 && k / cluster > 4 * PIECE)
    cluster *= 2;
  while (cluster < MAX_CLUSTER && cuda_ceil(k, cluster) > MAX_SHARE) cluster *= 2;
  return cluster;
}

bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

bool linear_few(Device *d, const Linear &l, Tensor x, Tensor y_MO) {
  int64_t m = x.dim[0], n = l.w_OK.dim[0], k = l.w_OK.dim[1];
  bool coded = l.codes.payload != nullptr;
  if (cuda_of(d)->arch < 90 || x.dtype != DT_BF16 || k % (coded ? 16 : 8) != 0) return false;
  if (m > LINEAR_FEW_ROWS || !aligned(x.data) || !aligned(coded ? l.codes.payload : l.w_OK.data))
    return false;
  if (l.front == FRONT_RMSNORM && !aligned(l.norm_K.data)) return false;
  int cluster = cluster_of(n, k);
  int64_t share = cuda_ceil(cuda_ceil(k, cluster), PIECE) * PIECE;
  if (k > LINEAR_FEW_MOST_K || share > MAX_SHARE || n > INT32_MAX / MAX_CLUSTER) return false;
  if (m == 0 || n == 0) return true;
  Few a = {};
  a.x = cuda_data<const bf16>(x);
  a.norm = cuda_data<const bf16>(l.norm_K);
  a.bias = cuda_data<const bf16>(l.bias_O);
  a.w.rows = coded ? l.codes.payload : l.w_OK.data;
  a.w.n = static_cast<int>(n);
  a.w.k = static_cast<int>(k);
  a.y = y_MO.data;
  a.m = static_cast<int>(m);
  a.share = static_cast<int>(share);
  a.cluster = cluster;
  a.eps = l.eps;
  a.add = l.add;
  a.y_f32 = y_MO.dtype == DT_F32;
  if (!coded) {
    launch_front<PlainRows>(cuda_stream(d), a, l.front);
    return true;
  }
  a.w.scales = l.codes.scales;
  a.w.block = l.format.block;
  a.w.blocks = static_cast<int>(wire_row_blocks(l.format, k));
  a.w.scales_bf16 = l.format.scale == DT_BF16;
  if (l.format.kind == WIRE_INT8)
    launch_front<CodeRows<WIRE_INT8>>(cuda_stream(d), a, l.front);
  else
    launch_front<CodeRows<WIRE_FP8>>(cuda_stream(d), a, l.front);
  return true;
}
