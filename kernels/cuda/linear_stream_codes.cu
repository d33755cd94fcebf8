/* linear_stream.h for weights in codes of a byte, INT8 and FP8: they are exact as BF16, and a
 * block's scale multiplies its sums.
 *
 * A unit is 128 columns wide, so that it has 128 bytes of a row too, and lies in one block.
 * Warpgroups take units in turn, as many of them as hide the way from codes to sums: a warp has 16
 * and 16 rows of W and brings their codes from shared memory into registers, as numbers, for
 * tensor-core instructions of its own. Where a thread's numbers lie in k does not matter to a sum
 * as long as x and W agree, so each thread reads 16 codes in a row and calls them its share of four
 * instructions. Its rows' scales it has asked for a unit ahead. At the end of a tile the other
 * warpgroups' sums are added to the first's. */
#include "kernels/cuda/chain.h"
#include "kernels/cuda/linear_codes.h"
#include "kernels/cuda/linear_stream_end.h"
#include "kernels/cuda/linear_stream_scales.h"

namespace {

constexpr int CODES_HALF = 64 * CODES_K; /* bytes of 64 rows of a unit */
constexpr int codes_threads(int groups) { return groups * STREAM_WORKERS + 2 * 32; }

/* A place belongs to one warpgroup: who waits for its next turn has seen the one before, so that
 * parities suffice. */
template <int N, int G, int W_STAGES, int X_STAGES>
struct CodesShared {
  static_assert(W_STAGES % G == 0 && X_STAGES % G == 0);
  unsigned char w[W_STAGES][2 * CODES_HALF]; /* at a multiple of 1024 bytes */
  unsigned char x[X_STAGES][N * CODES_K * 2];
  float4 other[G - 1][N / 4][STREAM_WORKERS]; /* sums of warpgroups but the first */
  uint64_t w_full[W_STAGES], w_empty[W_STAGES], x_full[X_STAGES], x_empty[X_STAGES];
  uint64_t written, read; /* other */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int CODES_FLIGHT = 4; /* units of W on the way to a block */

__device__ inline void codes_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A thread has 16 codes in each half of a unit: of pieces of 16, in a row of 128, those at 2 q and
 * 2 q + 1, in this order where q < 2 and the other way round else, so that eight lanes that read at
 * once reach all banks, of W and of x. Both lie swizzled: piece p of row r at p ^ r % 8. */
struct CodesPlace {
  int w, x; /* of the first half, from the start of a stage; the second is at ^ 16 and ^ 32 */
};
template <int N>
__device__ inline CodesPlace codes_place() {
  int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, q = lane % 4;
  int piece = 2 * q + q / 2, warp = static_cast<int>(threadIdx.x % STREAM_WORKERS / 32);
  return {(warp * 16 + row) * 128 + (piece ^ row) * 16,
          q / 2 * (N * 128) + row * 128 + ((2 * (piece % 4)) ^ row) * 16};
}

/* 16 codes of four rows, at w, against those numbers of x, at x and x ^ 16. */
template <WireKind KIND, int N>
__device__ inline void codes_multiply(float (&part)[2][N / 8][4], const unsigned char *w,
                                      const unsigned char *stage, int x) {
  uint4 top[2], bottom[2];
#pragma unroll
  for (int t = 0; t < 2; t++) {
    top[t] = *reinterpret_cast<const uint4 *>(w + t * CODES_HALF);
    bottom[t] = *reinterpret_cast<const uint4 *>(w + t * CODES_HALF + 8 * 128);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) { /* 8 of the thread's 16 numbers of k */
    uint32_t a[2][2][4];
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int t = 0; t < 2; t++) {
        uint32_t up = (&top[t].x)[2 * i + s], down = (&bottom[t].x)[2 * i + s];
        a[s][t][0] = bf16_of_codes<KIND>(up, false);
        a[s][t][1] = bf16_of_codes<KIND>(down, false);
        a[s][t][2] = bf16_of_codes<KIND>(up, true);
        a[s][t][3] = bf16_of_codes<KIND>(down, true);
      }
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      uint4 b = *reinterpret_cast<const uint4 *>(stage + (x ^ (16 * i)) + j * 8 * 128);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        codes_mma(part[t][j], a[0][t], b.x, b.y);
        codes_mma(part[t][j], a[1][t], b.z, b.w);
      }
    }
  }
}

/* True, once all that was read for these sums is in registers; what says so comes out of them, or
 * a place would be given back to the copy engine while loads of it are still on the way. */
template <int N>
__device__ inline bool codes_are_read(const float (&part)[2][N / 8][4]) {
  float any = part[0][0][0] + part[1][0][0];
#pragma unroll
  for (int j = 1; j < N / 8; j++) any += part[0][j][0];
  return __float_as_uint(any) != 0x7fc0dead; /* a NaN that no sum is */
}

/* This warpgroup's units among those from `from` to `to`, of a block whose first is `first`. */
template <WireKind KIND, int N, int G, class Shared, int W_STAGES, int X_STAGES>
__device__ inline void codes_sum(float (&sum)[2][N / 2], CodesScales<G> &scales, const Stream &a,
                                 const CodeScales &c, Shared *sh, CodesPlace at, int from, int to,
                                 int first) {
  int group = static_cast<int>(threadIdx.x) / STREAM_WORKERS;
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[0][i] = sum[1][i] = 0;
#pragma unroll 1
  for (int u = from + (group + G - (from - first) % G) % G; u < to; u += G) {
    int i = u - first, w = i % W_STAGES, x = i % X_STAGES;
    float scale[2][2], part[2][N / 8][4] = {};
    scales.next(a, c, scale);
    barrier_wait(shared_at(&sh->x_full[x]), i / X_STAGES & 1);
    barrier_wait(shared_at(&sh->w_full[w]), i / W_STAGES & 1);
    codes_multiply<KIND, N>(part, sh->w[w] + at.w, sh->x[x], at.x);
    codes_multiply<KIND, N>(part, sh->w[w] + (at.w ^ 16), sh->x[x], at.x ^ 32);
    __syncwarp();
    if (threadIdx.x % 32 == 0 && codes_are_read<N>(part)) {
      barrier_arrive(shared_at(&sh->w_empty[w]));
      barrier_arrive(shared_at(&sh->x_empty[x]));
    }
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
      for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[t][4 * j + e] += scale[t][e / 2] * part[t][j][e];
  }
}

/* The first warpgroup's sums of the block's n-th tile become those of all: it waits for what the
 * others have written, and they, before they write again, until it has read that. */
template <int N, int G, class Shared>
__device__ inline void codes_join(float (&sum)[2][N / 2], Shared *sh, int n) {
  int thread = static_cast<int>(threadIdx.x % STREAM_WORKERS);
  int group = static_cast<int>(threadIdx.x) / STREAM_WORKERS;
  if (group > 0) {
    if (n > 0) barrier_wait(shared_at(&sh->read), (n - 1) & 1);
#pragma unroll
    for (int i = 0; i < N / 4; i++) sh->other[group - 1][i][thread] = stream_piece<N>(sum, i);
    barrier_arrive(shared_at(&sh->written));
    return;
  }
  barrier_wait(shared_at(&sh->written), n & 1);
#pragma unroll
  for (int g = 0; g < G - 1; g++)
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      float4 other = sh->other[g][i][thread];
      float *s = sum[i % 2] + i / 2 * 4;
      s[0] += other.x;
      s[1] += other.y;
      s[2] += other.z;
      s[3] += other.w;
    }
  barrier_arrive(shared_at(&sh->read));
}

template <WireKind KIND, int N, int G, class Shared, int W_STAGES, int X_STAGES>
__device__ inline void codes_work(const Stream &a, const CodeScales &c, Shared *sh) {
  int first = stream_start(a, static_cast<int>(blockIdx.x));
  int end = stream_start(a, static_cast<int>(blockIdx.x) + 1);
  int first_tile = first / a.chunks, last_tile = (end - 1) / a.chunks;
  int group = static_cast<int>(threadIdx.x) / STREAM_WORKERS;
  CodesPlace at = codes_place<N>();
  CodesScales<G> scales;
  scales.start(a, c, first + group, end);
  StreamSharers by_first = stream_sharers(a, first_tile), by_last = stream_sharers(a, last_tile);
  wait_for_kernel_before();
#pragma unroll 1
  for (int tile = first_tile; tile <= last_tile; tile++) {
    int from = max(first, tile * a.chunks), to = min(end, (tile + 1) * a.chunks);
    float sum[2][N / 2];
    codes_sum<KIND, N, G, Shared, W_STAGES, X_STAGES>(sum, scales, a, c, sh, at, from, to, first);
    codes_join<N, G>(sum, sh, tile - first_tile);
    if (group == 0) stream_end_tile<N>(a, tile, to - from, sum);
  }
  stream_add_up_all<N, G>(a, first_tile, last_tile, by_first, by_last);
}

#endif

template <WireKind KIND, int N, int G, int W_STAGES, int X_STAGES>
__global__ __launch_bounds__(codes_threads(G),
                             1) void codes_kernel(const __grid_constant__ Stream a,
                                                  const __grid_constant__ CodeScales c,
                                                  const __grid_constant__ CUtensorMap w_map,
                                                  const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  typedef CodesShared<N, G, W_STAGES, X_STAGES> Shared;
  extern __shared__ __align__(1024) unsigned char stream_memory[];
  Shared *sh = reinterpret_cast<Shared *>(stream_memory);
  int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  int lane = static_cast<int>(threadIdx.x % 32), bringer = warp - G * STREAM_WORKERS / 32;
  if (bringer >= 0 && lane == 0) map_fetch(bringer == 0 ? &w_map : &x_map);
  if (threadIdx.x == 0) {
    barrier_init(shared_at(&sh->written), (G - 1) * STREAM_WORKERS);
    barrier_init(shared_at(&sh->read), STREAM_WORKERS);
  }
  stream_start_rings<Shared, W_STAGES, X_STAGES>(sh, 1);
  next_kernel_may_start();
  if (bringer < 0) {
    codes_work<KIND, N, G, Shared, W_STAGES, X_STAGES>(a, c, sh);
  } else if (bringer == 0) {
    if (lane == 0)
      stream_bring_w<Shared, W_STAGES, CODES_FLIGHT, CODES_K, CODES_HALF>(a, sh, &w_map);
  } else {
    wait_for_kernel_before();
    if (lane == 0) stream_bring_x<N, Shared, X_STAGES, CODES_K>(a, sh, &x_map);
  }
#endif
}

template <WireKind KIND, int N, int G, int W, int X>
void launch_groups(cudaStream_t stream, const StreamLaunch &l) {
  static_assert(sizeof(CodesShared<N, G, W, X>) > 114 << 10);
  size_t shared = sizeof(CodesShared<N, G, W, X>);
  chain_allow_shared(codes_kernel<KIND, N, G, W, X>, shared);
  chain_launch(stream, codes_kernel<KIND, N, G, W, X>, dim3(static_cast<unsigned>(l.blocks)),
               codes_threads(G), shared, 1, l.a, l.c, l.w, l.x);
}
template <WireKind KIND, int N>
void launch(cudaStream_t stream, const StreamLaunch &l) {
  if constexpr (N <= 16) /* the same for both: rows keep their bits */
    launch_groups<KIND, N, 3, 9, 6>(stream, l);
  else if constexpr (N == 32)
    launch_groups<KIND, N, 3, 6, 6>(stream, l);
  else
    launch_groups<KIND, N, 2, 6, 4>(stream, l);
}
template <WireKind KIND>
void launch_kind(cudaStream_t stream, const StreamLaunch &l) {
  if (l.columns == 8)
    launch<KIND, 8>(stream, l);
  else if (l.columns == 16)
    launch<KIND, 16>(stream, l);
  else if (l.columns == 32)
    launch<KIND, 32>(stream, l);
  else
    launch<KIND, 64>(stream, l);
}

}  // namespace

void stream_codes(cudaStream_t stream, WireKind kind, const StreamLaunch &l) {
  if (kind == WIRE_INT8)
    launch_kind<WIRE_INT8>(stream, l);
  else
    launch_kind<WIRE_FP8>(stream, l);
}
