/* y = front(x) W^T + b for up to 64 rows of BF16, as decoding has them: bound by the reading of W,
 * which is BF16 or codes (linear_weights.h).
 *
 * A cluster of blocks owns COLUMNS columns of y, each block a share of k; their sums are added in
 * order of k, each block some of the columns (linear_few_end.h). A warp has 16 rows of W to itself,
 * which go straight from memory into the registers of tensor-core instructions, several pieces
 * ahead, the first of them before the kernel in front of this one is done. x lies in shared memory,
 * with its front: of a norm x times its weight, while the sum of squares joins the sums and divides
 * them in the end.
 *
 * The cut of k depends on W alone: a row of y has the same bits whatever other rows are with it. */
#include "kernels/cuda/linear_few.h"

#include <algorithm>

#include "kernels/cuda/aligned.h"
#include "kernels/cuda/chain.h"
#include "kernels/cuda/linear_few_end.h"
#include "kernels/cuda/math.h"

namespace {

constexpr int MAX_SHARE = 768; /* of k, of a block: 64 rows of it fill half of shared memory */
constexpr int PORTABLE_CLUSTER = 8;
constexpr int CHUNK = 256, CHUNKS = MAX_SHARE / CHUNK; /* of k, that a warp stages at a time */

/* Of more rows, blocks that start early and wait take room from those that have work. A step of
 * 1.1B, by one form of the kernel: 1 row 0.90 ms in place of 0.95, 16 rows 1.15 in place of 1.16.
 */
constexpr int EARLY_ROWS = 16;

/* ---- x ---- */

#if __CUDA_ARCH__ >= 900

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

#endif

/* Sums arrive in a place of their own where rows are few. Of more they arrive where x was, and the
 * blocks of a cluster meet before they are sent. */
constexpr int ROWS_APART = 16;

/* Shared memory of a block of ROWS rows: a barrier, squares of all blocks and its own, and in
 * `place` x, later its sums, and what arrives. */
template <int ROWS>
struct Place {
  static constexpr bool APART = ROWS <= ROWS_APART;
  static constexpr int SUMS = ROWS * PART, ARRIVING = ROWS * COLUMNS; /* floats */
  static constexpr int PLACE = 4 + ROWS * (MAX_CLUSTER + CHUNKS);
  static size_t bytes(size_t x) {
    size_t sums = sizeof(float) * SUMS, arriving = sizeof(float) * ARRIVING;
    return sizeof(float) * PLACE +
           (APART ? arriving + std::max(x, sums) : std::max(x, sums + arriving));
  }
};

template <class Rows, Front FRONT, int TILES>
__global__ __launch_bounds__(THREADS, 2) void few_kernel(const __grid_constant__ Few a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int AHEAD = Rows::template AHEAD<TILES>;
  using P = Place<8 * TILES>;
  float *floats = reinterpret_cast<float *>(shared), *place = floats + P::PLACE;
  float *part = place + (P::APART ? P::ARRIVING : 0), *arriving = P::APART ? place : part + P::SUMS;
  float *squares = floats + 4 + 8 * TILES * MAX_CLUSTER;
  bf16 *x_tile = reinterpret_cast<bf16 *>(part); /* first x, then sums */
  Mail mail = {reinterpret_cast<uint64_t *>(shared), floats + 4,
               reinterpret_cast<float4 *>(arriving)};
  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int rank = static_cast<int>(blockIdx.x) % a.cluster, k0 = rank * a.share;
  int first_column = static_cast<int>(blockIdx.x) / a.cluster * COLUMNS;
  int own = lane % 4 * Rows::OWN, stride = a.share + Rows::PAD;
  open_mail<FRONT>(a, mail);
  Rows rows(a.w, first_column + warp * 16 + lane / 4, k0 + own, min(a.share, a.w.k - k0) - own);
  typename Rows::Piece ahead[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) ahead[i] = rows.load(i * PIECE);
  if (a.early) next_kernel_may_start();
  mail_is_open(a);
  wait_for_kernel_before();
  if (!a.early) next_kernel_may_start();
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

  if (P::APART || a.cluster == 1)
    __syncthreads(); /* x's place is free */
  else
    cluster_barrier(); /* in all blocks */
  if constexpr (FRONT == FRONT_RMSNORM) add_chunks(a, squares);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      part[(8 * t + lane % 4 * 2 + i % 2) * PART + warp * 16 + lane / 4 + i / 2 * 8] = sum[t][i];
  __syncthreads();
  send_sums<FRONT>(a, rank, part, squares, CHUNKS, mail);
  finish_sums<FRONT>(a, rank, mail, first_column);
#endif
}

template <class Rows, Front FRONT, int TILES>
void launch(cudaStream_t stream, const Few &a) {
  size_t x = sizeof(bf16) * 8 * TILES * static_cast<size_t>(a.share + Rows::PAD);
  size_t shared = Place<8 * TILES>::bytes(x);
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
  while (cluster << (a.own + 1) <= PACKS) a.own++;
  a.eps = l.eps;
  a.early = m <= EARLY_ROWS;
  a.add = l.add;
  a.y_f32 = y_MO.dtype == DT_F32;
  a.packed = n % 4 == 0 && aligned(y_MO.data) && aligned(l.bias_O.data);
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
