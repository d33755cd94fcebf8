/* linear_stream.h for weights in codes of a byte, INT8 and FP8: they are exact as BF16, and a
 * block's scale multiplies its sums.
 *
 * Two warpgroups take units in turn: a warp has 16 and 16 rows of W and brings their codes from
 * shared memory into registers, as numbers, for tensor-core instructions of its own. Where a
 * thread's numbers lie in k does not matter to a sum as long as x and W agree, so each thread reads
 * 16 codes in a row and calls them its share of four instructions. A warp of its own brings scales.
 * At the end of a tile the second warpgroup's sums are added to the first's. */
#include "kernels/cuda/chain.h"
#include "kernels/cuda/linear_codes.h"
#include "kernels/cuda/linear_stream_end.h"

namespace {

constexpr int CODES_HALF = 64 * STREAM_K;                  /* bytes of 64 rows of a unit */
constexpr int CODES_THREADS = 2 * STREAM_WORKERS + 3 * 32; /* workers, and warps that bring */

template <int N, int W_STAGES, int X_STAGES>
struct CodesShared {
  unsigned char w[W_STAGES][2 * CODES_HALF]; /* at a multiple of 1024 bytes */
  unsigned char x[X_STAGES][N * STREAM_K * 2];
  float4 other[N / 4][STREAM_WORKERS];     /* the second warpgroup's sums */
  uint32_t w_scale[W_STAGES][STREAM_TILE]; /* of a unit's rows; of BF16 the word that has it */
  uint64_t w_full[W_STAGES], w_empty[W_STAGES], x_full[X_STAGES], x_empty[X_STAGES];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline void codes_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- scales ---- */

/* The place of the scale of a row of W in its block at column k. */
__device__ inline int64_t codes_scale_at(const CodeScales &c, int row, int k) {
  return static_cast<int64_t>(row) * c.blocks + k / c.block;
}
/* The row of W at place p of a tile's 128, or its last one. */
__device__ inline int codes_row(const Stream &a, int tile, int p) {
  int t = p / 64, in = p % 64;
  int row = a.paired ? in / 16 * 16 + in % 8 * 2 + in / 8 % 2 : in;
  return min(STREAM_TILE * tile + 64 * t + row, a.n - 1);
}

/* A warp: four rows' scales of each unit to a lane. */
template <class Shared, int STAGES>
__device__ inline void codes_bring_scales(const Stream &a, const CodeScales &c, Shared *sh) {
  int first = stream_start(a, static_cast<int>(blockIdx.x));
  int end = stream_start(a, static_cast<int>(blockIdx.x) + 1);
  int tile = first / a.chunks, chunk = first % a.chunks, lane = static_cast<int>(threadIdx.x % 32);
  RingPlace<STAGES> place;
  for (int u = first; u < end; u++) {
    if (u - first >= STAGES) barrier_wait(shared_at(&sh->w_empty[place.at]), place.turn ^ 1);
#pragma unroll
    for (int i = 0; i < STREAM_TILE / 32; i++) {
      int p = 32 * i + lane;
      int64_t at = codes_scale_at(c, codes_row(a, tile, p), chunk * STREAM_K);
      const uint32_t *word = static_cast<const uint32_t *>(c.scales) + (c.half ? at / 2 : at);
      asm volatile(
          "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_at(&sh->w_scale[place.at][p])),
          "l"(word)
          : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                     shared_at(&sh->w_full[place.at]))
                 : "memory");
    place.next();
    if (++chunk == a.chunks) {
      chunk = 0;
      tile++;
    }
  }
}

/* ---- sums ---- */

/* A thread's 16 codes of a row of its own in each half, and of the 8th row behind it. */
struct CodesPiece {
  uint4 top[2], bottom[2];
  float scale[2][2];
};
template <class Shared>
__device__ inline CodesPiece codes_piece(const Shared *sh, int stage, const bool (&odd)[2][2],
                                         bool half) {
  int thread = static_cast<int>(threadIdx.x % STREAM_WORKERS), lane = thread % 32;
  int row = thread / 32 * 16 + lane / 4;
  CodesPiece p;
#pragma unroll
  for (int t = 0; t < 2; t++) {
    const unsigned char *w = sh->w[stage] + t * CODES_HALF + row * 64 + lane % 4 * 16;
    p.top[t] = *reinterpret_cast<const uint4 *>(w);
    p.bottom[t] = *reinterpret_cast<const uint4 *>(w + 8 * 64);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t word = sh->w_scale[stage][64 * t + row + 8 * h];
      if (half) word = odd[t][h] ? word & 0xffff0000u : word << 16;
      p.scale[t][h] = __uint_as_float(word);
    }
  }
  return p;
}

template <WireKind KIND, int N, class Shared>
__device__ inline void codes_multiply(float (&sum)[2][N / 2], const CodesPiece &p, const Shared *sh,
                                      int stage) {
  int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, q = lane % 4;
  float part[2][N / 8][4] = {};
  const uint32_t *top[2] = {&p.top[0].x, &p.top[1].x},
                 *bottom[2] = {&p.bottom[0].x, &p.bottom[1].x};
#pragma unroll
  for (int i = 0; i < 2; i++) { /* 8 of the thread's 16 numbers of k */
    uint32_t a[2][2][4];
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int t = 0; t < 2; t++) {
        a[s][t][0] = bf16_of_codes<KIND>(top[t][2 * i + s], false);
        a[s][t][1] = bf16_of_codes<KIND>(bottom[t][2 * i + s], false);
        a[s][t][2] = bf16_of_codes<KIND>(top[t][2 * i + s], true);
        a[s][t][3] = bf16_of_codes<KIND>(bottom[t][2 * i + s], true);
      }
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const unsigned char *at = sh->x[stage] + (8 * j + row) * 128 + ((2 * q + i) ^ row) * 16;
      uint4 x = *reinterpret_cast<const uint4 *>(at);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        codes_mma(part[t][j], a[0][t], x.x, x.y);
        codes_mma(part[t][j], a[1][t], x.z, x.w);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[t][4 * j + e] += p.scale[t][e / 2] * part[t][j][e];
}

/* This warpgroup's units among those from `from` to `to`, of a block whose first is `first`. */
template <WireKind KIND, int N, class Shared, int W_STAGES, int X_STAGES>
__device__ inline void codes_sum(float (&sum)[2][N / 2], const Stream &a, const CodeScales &c,
                                 Shared *sh, int tile, int from, int to, int first) {
  int thread = static_cast<int>(threadIdx.x % STREAM_WORKERS), lane = thread % 32;
  int group = static_cast<int>(threadIdx.x) / STREAM_WORKERS, row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[0][i] = sum[1][i] = 0;
  bool odd_row[2][2]; /* where its first scale is not at the start of a word */
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int h = 0; h < 2; h++)
      odd_row[t][h] = codes_scale_at(c, codes_row(a, tile, 64 * t + row + 8 * h), 0) % 2 != 0;
  for (int u = from + ((from - first + group) & 1); u < to; u += 2) {
    int i = u - first, w = i % W_STAGES, x = i % X_STAGES;
    bool step = (u - tile * a.chunks) * STREAM_K / c.block % 2 != 0;
    const bool odd[2][2] = {{odd_row[0][0] != step, odd_row[0][1] != step},
                            {odd_row[1][0] != step, odd_row[1][1] != step}};
    barrier_wait(shared_at(&sh->w_full[w]), i / W_STAGES & 1);
    CodesPiece piece = codes_piece(sh, w, odd, c.half);
    barrier_wait(shared_at(&sh->x_full[x]), i / X_STAGES & 1);
    codes_multiply<KIND, N>(sum, piece, sh, x);
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared_at(&sh->w_empty[w]));
      barrier_arrive(shared_at(&sh->x_empty[x]));
    }
  }
}

__device__ inline void codes_meet() { asm volatile("bar.sync 2, 256;" ::: "memory"); }

/* The first warpgroup's sums become those of both. */
template <int N, class Shared>
__device__ inline void codes_join(float (&sum)[2][N / 2], Shared *sh) {
  int thread = static_cast<int>(threadIdx.x % STREAM_WORKERS);
  bool second = threadIdx.x >= STREAM_WORKERS;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float *s = sum[i / (N / 8)] + i % (N / 8) * 4;
    if (second) sh->other[i][thread] = make_float4(s[0], s[1], s[2], s[3]);
  }
  codes_meet();
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float *s = sum[i / (N / 8)] + i % (N / 8) * 4;
    if (second) continue;
    float4 other = sh->other[i][thread];
    s[0] += other.x;
    s[1] += other.y;
    s[2] += other.z;
    s[3] += other.w;
  }
  codes_meet(); /* its place is free */
}

template <WireKind KIND, int N, class Shared, int W_STAGES, int X_STAGES>
__device__ inline void codes_work(const Stream &a, const CodeScales &c, Shared *sh) {
  int first = stream_start(a, static_cast<int>(blockIdx.x));
  int end = stream_start(a, static_cast<int>(blockIdx.x) + 1);
  int first_tile = first / a.chunks, last_tile = (end - 1) / a.chunks;
  bool finishes = threadIdx.x < STREAM_WORKERS;
#pragma unroll 1
  for (int tile = first_tile; tile <= last_tile; tile++) {
    int from = max(first, tile * a.chunks), to = min(end, (tile + 1) * a.chunks);
    float sum[2][N / 2];
    codes_sum<KIND, N, Shared, W_STAGES, X_STAGES>(sum, a, c, sh, tile, from, to, first);
    codes_join<N>(sum, sh);
    if (finishes) stream_end_tile<N>(a, tile, to - from, sum);
  }
  if (finishes) stream_add_up_all<N>(a, first_tile, last_tile);
}

#endif

template <WireKind KIND, int N, int W_STAGES, int X_STAGES>
__global__ __launch_bounds__(CODES_THREADS, N <= 16 ? 2 : 1) void codes_kernel(
    const __grid_constant__ Stream a, const __grid_constant__ CodeScales c,
    const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  typedef CodesShared<N, W_STAGES, X_STAGES> Shared;
  extern __shared__ __align__(1024) unsigned char stream_memory[];
  Shared *sh = reinterpret_cast<Shared *>(stream_memory);
  int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  int lane = static_cast<int>(threadIdx.x % 32), bringer = warp - 2 * STREAM_WORKERS / 32;
  stream_start_rings<Shared, W_STAGES, X_STAGES>(sh, 1 + 32);
  next_kernel_may_start();
  if (bringer < 0) {
    wait_for_kernel_before();
    codes_work<KIND, N, Shared, W_STAGES, X_STAGES>(a, c, sh);
  } else if (bringer == 0) {
    if (lane == 0) stream_bring_w<Shared, W_STAGES, CODES_HALF>(a, sh, &w_map);
  } else if (bringer == 1) {
    wait_for_kernel_before();
    if (lane == 0) stream_bring_x<N, Shared, X_STAGES>(a, sh, &x_map);
  } else if (bringer == 2) {
    codes_bring_scales<Shared, W_STAGES>(a, c, sh);
  }
#endif
}

template <WireKind KIND, int N>
void launch(cudaStream_t stream, const StreamLaunch &l) {
  constexpr int W = N <= 16 ? 10 : N <= 32 ? 8 : 6, X = N <= 16 ? 10 : N <= 32 ? 6 : 4;
  size_t shared = sizeof(CodesShared<N, W, X>);
  chain_allow_shared(codes_kernel<KIND, N, W, X>, shared);
  chain_launch(stream, codes_kernel<KIND, N, W, X>, dim3(static_cast<unsigned>(l.blocks)),
               CODES_THREADS, shared, 1, l.a, l.c, l.w, l.x);
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
