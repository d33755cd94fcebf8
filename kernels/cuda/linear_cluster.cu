/* y = x W^T + b for 33 to 64 rows of BF16, as decoding has them, and W of a few million numbers:
 * what is read is little, so the time from the kernel in front to the last sum sets the pace.
 *
 * A cluster of four blocks owns 128 columns of y, each block a share of k. In a block one thread
 * has the copy engine bring W, most of it before the kernel in front of this one is done; another
 * brings x. A warpgroup multiplies, with W's rows as the product's rows and x's as its columns, and
 * sends each block the sums of its rows of x; that one adds them up in order of k. Clusters of
 * eight would fill the card at once only where no part of it has fewer than 16 multiprocessors. */
#include "kernels/cuda/linear_cluster.h"

#include "kernels/cuda/aligned.h"
#include "kernels/cuda/chain.h"
#include "kernels/cuda/cluster.h"
#include "kernels/cuda/linear_stream_end.h"
#include "kernels/cuda/tensor_map.h"

namespace {

constexpr int CLUSTER = 4, ROWS = STREAM_MOST, STAGES = 8;
constexpr int THREADS = STREAM_WORKERS + 2 * 32; /* workers, and warps that bring */
constexpr int HALF = 64 * STREAM_K * 2;          /* bytes of 64 rows of a unit */
constexpr int OWN = ROWS / 4 / CLUSTER;          /* pieces of a block, of a tile's */
constexpr int64_t LARGEST = 12 << 20;            /* numbers of W */

struct Shared {
  unsigned char w[STAGES][2 * HALF]; /* at a multiple of 1024 bytes */
  unsigned char x[STAGES][ROWS * STREAM_K * 2];
  float4 sums[CLUSTER][OWN][STREAM_WORKERS]; /* that come to this block */
  uint64_t w_full[STAGES], w_empty[STAGES], x_full[STAGES], x_empty[STAGES];
  uint64_t all; /* sums are there */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Pieces are 2 j + t as stream_goal has them: those of 8 j rows go round the blocks. */
__device__ inline int piece_of(int rank, int own) {
  return 2 * (own / 2 * CLUSTER + rank) + own % 2;
}
__device__ inline bool has_piece(const Stream &a, int piece) { return piece / 2 * 8 < a.m; }

__device__ inline void bring_w(const Stream &a, Shared *sh, const CUtensorMap *map, int tile,
                               int first, int end) {
  RingPlace<STAGES> place;
  for (int u = first; u < end; u++, place.next()) {
    if (u - first >= STAGES) barrier_wait(shared_at(&sh->w_empty[place.at]), place.turn ^ 1);
    uint32_t full = shared_at(&sh->w_full[place.at]), to = shared_at(sh->w[place.at]);
    barrier_expect(full, 2 * HALF);
    stream_copy_w(a, to, map, u * STREAM_K, STREAM_TILE * tile, full);
    stream_copy_w(a, to + HALF, map, u * STREAM_K, STREAM_TILE * tile + 64, full);
  }
}

__device__ inline void bring_x(Shared *sh, const CUtensorMap *map, int first, int end) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  RingPlace<STAGES> place;
  for (int u = first; u < end; u++, place.next()) {
    if (u - first >= STAGES) barrier_wait(shared_at(&sh->x_empty[place.at]), place.turn ^ 1);
    uint32_t full = shared_at(&sh->x_full[place.at]);
    barrier_expect(full, ROWS * STREAM_K * 2);
    copy_tile(shared_at(sh->x[place.at]), map, u * STREAM_K, 0, full);
  }
}

/* A unit's places are given back when the product behind it is on its way. */
__device__ inline void sum_units(float (&sum)[2][ROWS / 2], Shared *sh, int units) {
  RingPlace<STAGES> place;
  int owed = -1;
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sum[0][i] = sum[1][i] = 0;
  wgmma_fence();
#pragma unroll 1
  for (int u = 0; u < units; u++, place.next()) {
    barrier_wait(shared_at(&sh->x_full[place.at]), place.turn);
    barrier_wait(shared_at(&sh->w_full[place.at]), place.turn);
    uint64_t top = tile_descriptor(shared_at(sh->w[place.at])), bottom = top + HALF / 16;
    uint64_t columns = tile_descriptor(shared_at(sh->x[place.at]));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STREAM_K / 16; k++) {
      wgmma_shared_step(sum[0], top + 2 * k, columns + 2 * k);
      wgmma_shared_step(sum[1], bottom + 2 * k, columns + 2 * k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (owed >= 0 && threadIdx.x % 32 == 0) {
      barrier_arrive(shared_at(&sh->w_empty[owed]));
      barrier_arrive(shared_at(&sh->x_empty[owed]));
    }
    owed = place.at;
  }
  wgmma_wait<0>();
  wgmma_hold(sum[0]);
  wgmma_hold(sum[1]);
}

__device__ inline void send_pieces(const Stream &a, Shared *sh, int rank,
                                   const float (&sum)[2][ROWS / 2]) {
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    int to = i / 2 % CLUSTER, own = i / 2 / CLUSTER * 2 + i % 2;
    if (has_piece(a, i))
      cluster_send(cluster_at(&sh->sums[rank][own][threadIdx.x], to), cluster_at(&sh->all, to),
                   stream_piece<ROWS>(sum, i));
  }
}

/* What pieces are added to comes while sums are on the way. */
__device__ inline void finish_pieces(const Stream &a, Shared *sh, int rank, int tile) {
  StreamGoal goal[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) goal[i] = stream_goal(a, tile, piece_of(rank, i));
  barrier_wait(shared_at(&sh->all), 0);
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    if (!has_piece(a, piece_of(rank, i))) continue;
    float4 sum = sh->sums[0][i][threadIdx.x];
#pragma unroll
    for (int r = 1; r < CLUSTER; r++) {
      float4 x = sh->sums[r][i][threadIdx.x];
      sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    stream_finish(a, goal[i], sum);
  }
}

__device__ inline int bytes_to_come(const Stream &a, int rank) {
  int bytes = 0;
  for (int i = 0; i < OWN; i++)
    if (has_piece(a, piece_of(rank, i)))
      bytes += CLUSTER * STREAM_WORKERS * static_cast<int>(sizeof(float4));
  return bytes;
}

#endif

__global__ __launch_bounds__(THREADS,
                             1) void cluster_kernel(const __grid_constant__ Stream a,
                                                    const __grid_constant__ CUtensorMap w,
                                                    const __grid_constant__ CUtensorMap x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char cluster_memory[];
  Shared *sh = reinterpret_cast<Shared *>(cluster_memory);
  int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  int lane = static_cast<int>(threadIdx.x % 32), block = static_cast<int>(blockIdx.x);
  int rank = block % CLUSTER, tile = block / CLUSTER;
  int first = a.chunks * rank / CLUSTER, end = a.chunks * (rank + 1) / CLUSTER;
  stream_start_rings<Shared, STAGES, STAGES>(sh, 1);
  cluster_open(&sh->all, 1, bytes_to_come(a, rank));
  next_kernel_may_start();
  cluster_meet();
  if (warp < 4) {
    wait_for_kernel_before();
    float sum[2][ROWS / 2];
    sum_units(sum, sh, end - first);
    send_pieces(a, sh, rank, sum);
    finish_pieces(a, sh, rank, tile);
  } else if (warp == 4) {
    if (lane == 0) bring_w(a, sh, &w, tile, first, end);
  } else {
    if (lane == 0) map_fetch(&x);
    wait_for_kernel_before();
    if (lane == 0) bring_x(sh, &x, first, end);
  }
#endif
}

}  // namespace

bool linear_cluster_takes(Device *d, const Linear &l, Tensor x, Tensor y_MO) {
  int64_t m = x.dim[0], n = l.w_OK.dim[0], k = l.w_OK.dim[1];
  if (l.front != FRONT_RMSNORM || l.codes.payload) return false;
  if (cuda_of(d)->arch != 90 || x.dtype != DT_BF16) return false;
  return m > 32 && m <= ROWS && n % 16 == 0 && k % 8 == 0 && k >= CLUSTER * STREAM_K &&
         n * k <= LARGEST && cuda_ceil(n, STREAM_TILE) * CLUSTER <= cuda_of(d)->sms &&
         aligned(x.data) && aligned(l.w_OK.data) && aligned(y_MO.data) && aligned(l.bias_O.data);
}

void linear_cluster(Device *d, const Linear &l, Tensor x, Tensor y_MO) {
  uint64_t m = static_cast<uint64_t>(x.dim[0]), n = static_cast<uint64_t>(l.w_OK.dim[0]);
  uint64_t k = static_cast<uint64_t>(l.w_OK.dim[1]), row = 2 * k;
  Stream a = {};
  a.m = static_cast<int>(m);
  a.n = static_cast<int>(n);
  a.k = static_cast<int>(k);
  a.tiles = static_cast<int>(cuda_ceil(a.n, STREAM_TILE));
  a.chunks = static_cast<int>(cuda_ceil(a.k, STREAM_K));
  a.add = l.add;
  a.y_f32 = y_MO.dtype == DT_F32;
  a.paired = true;
  a.bias = cuda_data<const bf16>(l.bias_O);
  a.y = y_MO.data;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap w_map = tensor_map(
      l.w_OK.data,
      {type, swizzle, 4, {k, 8, 2, n / 16}, {2 * row, row, 16 * row}, {STREAM_K, 8, 2, 4}});
  CUtensorMap x_map = tensor_map(x.data, {type, swizzle, 2, {k, m}, {row}, {STREAM_K, ROWS}});
  chain_allow_shared(cluster_kernel, sizeof(Shared));
  chain_launch(cuda_stream(d), cluster_kernel, dim3(static_cast<unsigned>(a.tiles * CLUSTER)),
               THREADS, sizeof(Shared), CLUSTER, a, w_map, x_map);
}
