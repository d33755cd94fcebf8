/* What the attention kernels on Hopper share: their job, what a block of them works on, tiles in
 * shared memory and fragments. attention_hopper.cu says how the kernels work. */
#ifndef KERNELS_CUDA_ATTENTION_HOPPER_TILES_H
#define KERNELS_CUDA_ATTENTION_HOPPER_TILES_H

#include "kernels/cuda/wgmma.h"

typedef __nv_bfloat16 bf16;

enum {
  HOPPER_ROWS = 64, /* of a tile */
  HOPPER_TILE_BYTES = 64 * 64 * 2,
  HOPPER_WARPGROUP = 128,
  HOPPER_TOGETHER = 32 /* lists of tiles that run side by side */
};
#define HOPPER_LOG2E 1.44269504F

struct HopperJob {
  int n_seqs, n_heads, n_kv_heads;
  int len;            /* of every sequence; 0 where they differ */
  int n;              /* tokens */
  const int *offsets; /* [n_seqs + 1] */
  float scale;
  const bf16 *qkv, *dout;
  bf16 *out, *dqkv;
  float *lse_NH; /* the forward's; may be absent */
  /* The backward's. Of tiles of 64 rows a sequence has those that it fills and up to one more. */
  int tiles;
  float *lse, *delta;   /* [H, tiles, 64]; lse in powers of two, infinite behind a sequence's end */
  const int *positions; /* [n]; absent: dq and dk are not turned */
  const float *cos, *sin; /* [n_positions, D / 2] */
  int n_positions;
};

/* The kernels, for heads of 64 or 128: out; dk and dv; dq. Maps are of tiles, 64 rows of 64;
 * rows_map of lse and delta, 64 of each. */
void hopper_forward(const HopperJob &job, int head_dim, const CUtensorMap &qkv_map,
                    cudaStream_t stream);
void hopper_keys(const HopperJob &job, int head_dim, const CUtensorMap &qkv_map,
                 const CUtensorMap &dout_map, const CUtensorMap &rows_map, cudaStream_t stream);
void hopper_queries(const HopperJob &job, int head_dim, const CUtensorMap &qkv_map,
                    const CUtensorMap &dout_map, cudaStream_t stream);

/* ---- sequences in tiles of `rows` rows ---- */

/* Places for tiles: sequence b starts at place offsets[b] / rows + b. */
static inline int hopper_places(int n, int n_seqs, int rows) { return n / rows + n_seqs; }

/* Blocks for tiles of `rows` rows of `heads` heads. */
static inline unsigned hopper_blocks(const HopperJob &job, int rows, int heads) {
  int places = job.len > 0 ? job.n_seqs * ((job.len + rows - 1) / rows)
                           : hopper_places(job.n, job.n_seqs, rows);
  return static_cast<unsigned>(places * heads);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The sequence that place t belongs to. */
__device__ inline int hopper_seq(const HopperJob &job, int rows, int t) {
  int low = 0, high = job.n_seqs - 1;
  while (low < high) {
    int mid = (low + high + 1) / 2;
    if (job.offsets[mid] / rows + mid <= t)
      low = mid;
    else
      high = mid - 1;
  }
  return low;
}

/* A tile of a sequence, for one head. */
struct HopperPlace {
  int head, first_row, len; /* the sequence's; len 0: there is no such tile */
  int tile, first_stat;     /* in the sequence; first of its tiles of 64 in the job's */
};

/* rank: of the sequence's tiles, counted from its end. */
__device__ inline HopperPlace hopper_place(const HopperJob &job, int rows, int seq, int head,
                                           int rank) {
  int first = job.offsets[seq], len = job.offsets[seq + 1] - first;
  int tiles = (len + rows - 1) / rows;
  return {head, first, rank < tiles ? len : 0, tiles - 1 - rank, first / HOPPER_ROWS + seq};
}

/* The block's, for tiles of `rows` rows of `heads` heads. Blocks with most work come first: for
 * queries the sequence's last tiles (from_end), for keys its first. Where sequences have one
 * length, HOPPER_TOGETHER lists of tiles at a time: those that run together share the cache. */
__device__ inline HopperPlace hopper_place_of_block(const HopperJob &job, int rows, int heads,
                                                    bool from_end) {
  int block = static_cast<int>(blockIdx.x), seq, head, rank;
  if (job.len > 0) {
    int lists = job.n_seqs * heads, ranks = (job.len + rows - 1) / rows;
    int first = block / (HOPPER_TOGETHER * ranks) * HOPPER_TOGETHER, rest = block - first * ranks;
    int some = min(HOPPER_TOGETHER, lists - first), list = first + rest % some;
    seq = list / heads;
    head = list % heads;
    rank = rest / some;
  } else {
    int t = block / heads;
    seq = hopper_seq(job, rows, t);
    head = block % heads;
    rank = t - (job.offsets[seq] / rows + seq);
  }
  HopperPlace p = hopper_place(job, rows, seq, head, rank);
  if (!from_end) p.tile = rank;
  return p;
}

/* ---- threads ---- */

__device__ inline uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* Who a thread is, and its first row and column in fragments. */
struct HopperThread {
  int group, row, column;
  __device__ HopperThread()
      : group(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / HOPPER_WARPGROUP, 0)),
        row(static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        column(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

__device__ inline void init_barrier(uint64_t *barrier, int arrivals) {
  barrier_init(shared_address(barrier), arrivals);
}
/* Until what is n-th there, counted from 0. */
__device__ inline void wait_for(uint64_t *barrier, int n) {
  barrier_wait(shared_address(barrier), n & 1);
}
/* Every warp says it once. */
__device__ inline void warp_arrives(uint64_t *barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(barrier));
}

/* ---- fragments and tiles ---- */

template <int N>
__device__ inline void clear(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) c[i] = 0;
  wgmma_hold(c);
}

template <int N>
__device__ inline void pack_fragment(uint32_t (&a)[N / 2], const float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) a[i] = pack_pair(c[2 * i], c[2 * i + 1]);
}

/* Rows of a head's gradient to what it is in front of the rotation, rope's transpose: number i
 * turns with number i + D / 2. `token` is the first row's. No assert here: with any call in a
 * kernel ptxas lets each product end before the next begins; rows_kernel has looked at the
 * positions. */
template <int N>
__device__ inline void turn_back(float (&c)[N], const HopperJob &job, int token, int rows,
                                 const HopperThread &me) {
  constexpr int HALF = N / 2; /* of a thread's numbers; N = D / 2 */
#pragma unroll
  for (int second = 0; second < 2; second++) {
    int row = me.row + 8 * second;
    if (!job.positions || row >= rows) continue;
    int position = job.positions[token + row];
    int64_t at = static_cast<int64_t>(position) * N + me.column;
#pragma unroll
    for (int i = 2 * second; i < HALF; i += 4) {
      float2 cs = *reinterpret_cast<const float2 *>(job.cos + at + i / 4 * 8),
             sn = *reinterpret_cast<const float2 *>(job.sin + at + i / 4 * 8);
      float x0 = c[i], x1 = c[i + 1], y0 = c[i + HALF], y1 = c[i + HALF + 1];
      c[i] = x0 * cs.x + y0 * sn.x;
      c[i + 1] = x1 * cs.y + y1 * sn.y;
      c[i + HALF] = y0 * cs.x - x0 * sn.x;
      c[i + HALF + 1] = y1 * cs.y - x1 * sn.y;
    }
  }
}

/* Thread q of four that share a row has pair q of each of four pieces of eight numbers; it gets all
 * of piece q. */
__device__ inline uint4 gather_piece(uint32_t (&w)[4], int q) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!(i & bit)) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, q & bit ? w[i] : w[i + bit], bit);
        if (q & bit)
          w[i] = other;
        else
          w[i + bit] = other;
      }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Of 64 rows of c the first `rows`, times scale[0] in a thread's first row and scale[1] in its
 * second; 16 bytes at a time. */
template <int N>
__device__ inline void store_rows(bf16 *first, int64_t stride, const float (&c)[N],
                                  const float (&scale)[2], int rows, const HopperThread &me) {
  int q = me.column / 2;
#pragma unroll
  for (int second = 0; second < 2; second++) {
    int row = me.row + 8 * second;
    bf16 *to = first + row * stride + 8 * q;
#pragma unroll
    for (int i = 0; i < N; i += 16) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float *pair = c + i + 4 * j + 2 * second;
        w[j] = pack_pair(scale[second] * pair[0], scale[second] * pair[1]);
      }
      uint4 piece = gather_piece(w, q);
      if (row < rows) *reinterpret_cast<uint4 *>(to + 2 * i) = piece;
    }
  }
}

/* Rows [from, rows) of tiles side by side, `next` bytes apart, become 0: what lies behind a
 * sequence's end belongs to another and may be NaN. A warpgroup does it for itself. */
template <int TILES>
__device__ inline void clear_rows(uint32_t tile, int next, int from, int rows, int barrier) {
  for (int i = 0; i < TILES; i++)
    for (int at = 128 * from + 16 * (static_cast<int>(threadIdx.x) % 128); at < 128 * rows;
         at += 16 * 128)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + i * next + at), "r"(0)
                   : "memory");
  shared_written();
  named_wait(barrier, HOPPER_WARPGROUP);
}

/* A warpgroup's 64 rows that stay, as the left operand of products with tiles that pass by: for
 * heads of 64 in registers, for heads of 128 in shared memory. */
template <int D>
struct HopperOperand {
  uint32_t tile;
  __device__ inline void load(const bf16 *, int64_t, int, uint32_t shared, const HopperThread &) {
    tile = shared;
  }
  __device__ inline void times(float (&c)[32], uint32_t other) const {
    tiles_along_rows<D / 64>(c, tile, HOPPER_TILE_BYTES, other, HOPPER_TILE_BYTES);
  }
  __device__ inline void keep(const HopperJob &) const {}
};
template <>
struct HopperOperand<64> {
  uint32_t a[16];
  __device__ inline void load(const bf16 *first, int64_t stride, int rows, uint32_t,
                              const HopperThread &me) {
    const bf16 *p = first + me.row * stride + me.column;
#pragma unroll
    for (int i = 0; i < 16; i++)
      a[i] = me.row + i % 2 * 8 < rows
                 ? *reinterpret_cast<const uint32_t *>(p + i % 2 * 8 * stride + i / 2 * 8)
                 : 0;
  }
  __device__ inline void times(float (&c)[32], uint32_t other) const {
    tile_along_rows(c, a, other);
  }
  /* Never stores, but the compiler cannot know: the operand is alive wherever this stands. ptxas
   * 13.0 otherwise gives its registers to fragments that come later in the same loop. */
  __device__ inline void keep(const HopperJob &job) const {
    if (job.n < 0)
      for (int i = 0; i < 16; i++) reinterpret_cast<volatile uint32_t *>(job.dqkv)[i] = a[i];
  }
};

#endif

#endif
