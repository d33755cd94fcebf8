/* linear_stream.h for BF16: products of a warpgroup with W and x in shared memory. */
#include "kernels/cuda/chain.h"
#include "kernels/cuda/linear_stream_end.h"

namespace {

constexpr int STREAM_THREADS = STREAM_WORKERS + 2 * 32; /* workers, and warps that bring */
constexpr int STREAM_HALF = 64 * STREAM_K * 2;          /* bytes of 64 rows of a unit */

template <int N, int W_STAGES, int X_STAGES>
struct StreamShared {
  unsigned char w[W_STAGES][2 * STREAM_HALF]; /* at a multiple of 1024 bytes */
  unsigned char x[X_STAGES][N * STREAM_K * 2];
  uint64_t w_full[W_STAGES], w_empty[W_STAGES], x_full[X_STAGES], x_empty[X_STAGES];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* c[64, N] += A B^T over 16 of k, both in shared memory. */
__device__ inline void stream_multiply(float (&c)[4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;\n"
      : WGMMA_4("+f", c, 0)
      : "l"(a), "l"(b));
}
__device__ inline void stream_multiply(float (&c)[8], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
      "%8, %9, 1, 1, 1, 0, 0;\n"
      : WGMMA_4("+f", c, 0), WGMMA_4("+f", c, 4)
      : "l"(a), "l"(b));
}
__device__ inline void stream_multiply(float (&c)[16], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;\n"
      : WGMMA_16("+f", c, 0)
      : "l"(a), "l"(b));
}
__device__ inline void stream_multiply(float (&c)[32], uint64_t a, uint64_t b) {
  wgmma_shared_step(c, a, b);
}

/* What is read behind a wait passes through here. */
template <int N>
__device__ inline void stream_hold(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

/* Where a warpgroup is in the rings, and what it has yet to give back. */
template <class Shared, int W_STAGES, int X_STAGES>
struct StreamTurn {
  Shared *sh;
  RingPlace<W_STAGES> w;
  RingPlace<X_STAGES> x;
  int owed_w = -1, owed_x = -1;

  __device__ void wait() {
    barrier_wait(shared_at(&sh->x_full[x.at]), x.turn);
    barrier_wait(shared_at(&sh->w_full[w.at]), w.turn);
  }
  __device__ void give_back() {
    if (owed_w >= 0 && threadIdx.x % 32 == 0) {
      barrier_arrive(shared_at(&sh->w_empty[owed_w]));
      barrier_arrive(shared_at(&sh->x_empty[owed_x]));
    }
    owed_w = -1;
  }
  __device__ void next() {
    owed_w = w.at;
    owed_x = x.at;
    w.next();
    x.next();
  }
};

/* The sums of `units` units in a row. */
template <int N, class Turn>
__device__ inline void stream_sum(float (&sum)[2][N / 2], Turn &turn, int units) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[0][i] = sum[1][i] = 0;
  wgmma_fence();
#pragma unroll 1
  for (int u = 0; u < units; u++) {
    turn.wait();
    uint64_t top = tile_descriptor(shared_at(turn.sh->w[turn.w.at]));
    uint64_t bottom = top + STREAM_HALF / 16;
    uint64_t columns = tile_descriptor(shared_at(turn.sh->x[turn.x.at]));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STREAM_K / 16; k++) {
      stream_multiply(sum[0], top + 2 * k, columns + 2 * k);
      stream_multiply(sum[1], bottom + 2 * k, columns + 2 * k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    turn.give_back();
    turn.next();
  }
  wgmma_wait<0>();
  stream_hold(sum[0]);
  stream_hold(sum[1]);
  turn.give_back();
}

template <int N, class Shared, int W_STAGES, int X_STAGES>
__device__ inline void stream_work(const Stream &a, Shared *sh) {
  int first = stream_start(a, static_cast<int>(blockIdx.x));
  int end = stream_start(a, static_cast<int>(blockIdx.x) + 1);
  StreamTurn<Shared, W_STAGES, X_STAGES> turn = {sh};
  int first_tile = first / a.chunks, last_tile = (end - 1) / a.chunks;
  StreamSharers by_first = stream_sharers(a, first_tile), by_last = stream_sharers(a, last_tile);
  wait_for_kernel_before();
#pragma unroll 1
  for (int tile = first_tile; tile <= last_tile; tile++) {
    int from = max(first, tile * a.chunks), to = min(end, (tile + 1) * a.chunks);
    float sum[2][N / 2];
    stream_sum<N>(sum, turn, to - from);
    stream_end_tile<N>(a, tile, to - from, sum);
  }
  stream_add_up_all<N, 1>(a, first_tile, last_tile, by_first, by_last);
}

#endif

template <int N, int W_STAGES, int X_STAGES>
__global__ __launch_bounds__(STREAM_THREADS,
                             1) void stream_kernel(const __grid_constant__ Stream a,
                                                   const __grid_constant__ CUtensorMap w_map,
                                                   const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  typedef StreamShared<N, W_STAGES, X_STAGES> Shared;
  extern __shared__ __align__(1024) unsigned char stream_memory[];
  Shared *sh = reinterpret_cast<Shared *>(stream_memory);
  int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  int lane = static_cast<int>(threadIdx.x % 32);
  if (warp >= 4 && lane == 0) map_fetch(warp == 4 ? &w_map : &x_map);
  stream_start_rings<Shared, W_STAGES, X_STAGES>(sh, 1);
  next_kernel_may_start();
  if (warp < 4) {
    stream_work<N, Shared, W_STAGES, X_STAGES>(a, sh);
  } else if (warp == 4) {
    if (lane == 0) stream_bring_w<Shared, W_STAGES, W_STAGES, STREAM_K, STREAM_HALF>(a, sh, &w_map);
  } else {
    wait_for_kernel_before();
    if (lane == 0) stream_bring_x<N, Shared, X_STAGES, STREAM_K>(a, sh, &x_map);
  }
#endif
}

template <int N, int W, int X>
void launch_stages(cudaStream_t stream, const StreamLaunch &l) {
  static_assert(sizeof(StreamShared<N, W, X>) > 114 << 10);
  size_t shared = sizeof(StreamShared<N, W, X>);
  chain_allow_shared(stream_kernel<N, W, X>, shared);
  chain_launch(stream, stream_kernel<N, W, X>, dim3(static_cast<unsigned>(l.blocks)),
               STREAM_THREADS, shared, 1, l.a, l.w, l.x);
}
template <int N>
void launch(cudaStream_t stream, const StreamLaunch &l) {
  launch_stages<N, N == 64 ? 10 : 12, N == 64 ? 6 : N == 32 ? 5 : 8>(stream, l);
}
}  // namespace

void stream_plain(cudaStream_t stream, const StreamLaunch &l) {
  if (l.columns == 8)
    launch<8>(stream, l);
  else if (l.columns == 16)
    launch<16>(stream, l);
  else if (l.columns == 32)
    launch<32>(stream, l);
  else
    launch<64>(stream, l);
}
