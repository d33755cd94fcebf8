/* Attention's backward on Hopper. With p = exp(scale q.k - lse) and delta = dout.out:
 * dv = sum p dout,  ds = p (dout.v - delta),  dk = scale sum ds q,  dq = scale sum ds k.
 *
 * Two kernels, so that every sum has one owner and one order: in keys_kernel tiles of keys stay,
 * and the queries of all heads of their group pass by; in queries_kernel tiles of queries stay, and
 * keys pass by. Both compute the weights again, which costs less than to bring partial sums or ds
 * through memory. A block is two or three warpgroups, each of which owns 64 of the rows that stay;
 * they hold them in registers, as they do weights and gradients, so shared memory carries only what
 * passes by: a ring of tiles that the copy engine fills. While one warpgroup computes exponentials
 * another keeps the tensor cores busy.
 *
 * Sequences have one length, a multiple of 128. */
#include "kernels/cuda/attention_hopper.h"

#include <stdlib.h>

#include "kernels/cuda/wgmma.h"

namespace {

typedef __nv_bfloat16 bf16;

/* Warpgroups compute, one more copies, up to RING steps ahead, and leaves them its registers. */
constexpr int D = 64, ROWS = 64, GROUP_THREADS = 128, RING = 6;
constexpr int KEY_GROUPS = 2, QUERY_GROUPS = 3; /* of a block: as registers allow */
constexpr int TILE_BYTES = ROWS * D * 2;

struct Shared {
  unsigned char tile[RING][2][TILE_BYTES]; /* first: it must lie at a multiple of 1024 bytes */
  unsigned char stays[QUERY_GROUPS][TILE_BYTES]; /* queries_kernel: each warpgroup's queries */
  float row[RING][2][ROWS];                      /* keys_kernel: lse and delta of the queries */
  uint64_t full[RING], empty[RING], here;
};

struct Job {
  int n_seqs, len, n_heads, n_kv_heads;
  float scale;
  const bf16 *qkv, *dout;
  const float *lse, *delta; /* [B, H, len]; lse in powers of two */
  bf16 *dqkv;
};
constexpr float LOG2E = 1.44269504F;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int ROW_BYTES = ROWS * 4;

__device__ inline uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* Who a thread is, and its first row and column in fragments. */
struct Me {
  int group, row, column;
  __device__ Me()
      : group(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / GROUP_THREADS, 0)),
        row(static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        column(static_cast<int>(threadIdx.x) % 4 * 2) {}
};

/* groups: warpgroups that read the ring. */
__device__ inline void start_ring(Shared *sh, int groups) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < RING; i++) {
      barrier_init(shared_address(&sh->full[i]), 1);
      barrier_init(shared_address(&sh->empty[i]), groups * GROUP_THREADS / 32);
    }
    barrier_init(shared_address(&sh->here), 1);
    barrier_init_done();
  }
  __syncthreads();
}

/* Before `step` fills its place again: the warpgroups are done with it. */
__device__ inline void wait_for_place(Shared *sh, int step) {
  if (step >= RING) barrier_wait(shared_address(&sh->empty[step % RING]), (step / RING + 1) & 1);
}
__device__ inline void wait_for_step(Shared *sh, int step) {
  barrier_wait(shared_address(&sh->full[step % RING]), step / RING & 1);
}
/* Every warp says when it has read a step's place. */
__device__ inline void release_step(Shared *sh, int step) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&sh->empty[step % RING]));
}

/* 64 rows as an A fragment. */
__device__ inline void load_rows(uint32_t (&a)[16], const bf16 *first, int64_t stride,
                                 const Me &me) {
  const bf16 *p = first + me.row * stride + me.column;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    a[2 * j] = *reinterpret_cast<const uint32_t *>(p + 8 * j);
    a[2 * j + 1] = *reinterpret_cast<const uint32_t *>(p + 8 * stride + 8 * j);
  }
}
__device__ inline void store_rows(bf16 *first, int64_t stride, const float (&c)[32], float scale,
                                  const Me &me) {
  bf16 *p = first + me.row * stride + me.column;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    *reinterpret_cast<uint32_t *>(p + 8 * j) = pack_pair(scale * c[4 * j], scale * c[4 * j + 1]);
    *reinterpret_cast<uint32_t *>(p + 8 * stride + 8 * j) =
        pack_pair(scale * c[4 * j + 2], scale * c[4 * j + 3]);
  }
}

/* Never stores, but the compiler cannot know: fragments that stay are alive wherever this stands.
 * ptxas 13.0 otherwise gives their registers to fragments that come later in the same loop. */
__device__ inline void keep_alive(const uint32_t (&a)[16], const uint32_t (&b)[16],
                                  const Job &job) {
  if (job.len < 0)
    for (int i = 0; i < 16; i++) reinterpret_cast<volatile uint32_t *>(job.dqkv)[i] = a[i] + b[i];
}

__device__ inline void clear(float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 32; i++) c[i] = 0;
}

/* c[row, column] of a pair becomes 0 where the key lies behind the query. */
template <bool KEYS_ARE_ROWS>
__device__ inline void mask_diagonal(float (&p)[32], const Me &me) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    int row = me.row + (i & 2 ? 8 : 0), column = i / 4 * 8 + me.column + (i & 1);
    if (KEYS_ARE_ROWS ? row > column : column > row) p[i] = 0;
  }
}

__device__ inline void pack_fragment(uint32_t (&a)[16], const float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 16; i++) a[i] = pack_pair(c[2 * i], c[2 * i + 1]);
}

/* What a block of keys_kernel does: 128 keys from tile first_tile on, queries from there to the
 * sequence's end, for each head of the group. */
struct KeysBlock {
  int seq, kv_head, heads, first_tile, tiles, first_row;
  __device__ explicit KeysBlock(const Job &job) {
    int lists = job.n_seqs * job.n_kv_heads, list = static_cast<int>(blockIdx.x) % lists;
    seq = list / job.n_kv_heads;
    kv_head = list % job.n_kv_heads;
    heads = job.n_heads / job.n_kv_heads;
    first_tile = static_cast<int>(blockIdx.x) / lists * KEY_GROUPS;
    tiles = job.len / ROWS - first_tile;
    first_row = seq * job.len;
  }
};

__device__ __forceinline__ void keys_copy(Shared *sh, const Job &job, const CUtensorMap *qkv_map,
                                          const CUtensorMap *dout_map) {
  KeysBlock b(job);
  int head = b.kv_head * b.heads, tile = b.first_tile;
  for (int step = 0; step < b.heads * b.tiles; step++) {
    int at = step % RING, row = b.first_row + tile * ROWS;
    int64_t rows = (static_cast<int64_t>(b.seq) * job.n_heads + head) * job.len + tile * ROWS;
    uint32_t full = shared_address(&sh->full[at]);
    wait_for_place(sh, step);
    barrier_expect(full, 2 * TILE_BYTES + 2 * ROW_BYTES);
    copy_tile(shared_address(sh->tile[at][0]), qkv_map, head * D, row, full);
    copy_tile(shared_address(sh->tile[at][1]), dout_map, head * D, row, full);
    copy_bytes(shared_address(sh->row[at][0]), job.lse + rows, ROW_BYTES, full);
    copy_bytes(shared_address(sh->row[at][1]), job.delta + rows, ROW_BYTES, full);
    if (++tile == b.first_tile + b.tiles) tile = b.first_tile, head++;
  }
}

/* p = exp(scale q.k - lse), with lse of the columns. */
__device__ inline void column_weights(float (&p)[32], float scale2, const float *lse) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float2 l = *reinterpret_cast<const float2 *>(lse + 8 * j);
    p[4 * j] = exp2_fast(fmaf(p[4 * j], scale2, -l.x));
    p[4 * j + 1] = exp2_fast(fmaf(p[4 * j + 1], scale2, -l.y));
    p[4 * j + 2] = exp2_fast(fmaf(p[4 * j + 2], scale2, -l.x));
    p[4 * j + 3] = exp2_fast(fmaf(p[4 * j + 3], scale2, -l.y));
  }
}
/* ds = p (dp - delta), with delta of the columns. */
__device__ inline void column_gradients(float (&dp)[32], const float (&p)[32], const float *delta) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float2 x = *reinterpret_cast<const float2 *>(delta + 8 * j);
    dp[4 * j] = p[4 * j] * (dp[4 * j] - x.x);
    dp[4 * j + 1] = p[4 * j + 1] * (dp[4 * j + 1] - x.y);
    dp[4 * j + 2] = p[4 * j + 2] * (dp[4 * j + 2] - x.x);
    dp[4 * j + 3] = p[4 * j + 3] * (dp[4 * j + 3] - x.y);
  }
}

__device__ __forceinline__ void keys_compute(Shared *sh, const Job &job, const Me &me) {
  KeysBlock b(job);
  int64_t width = static_cast<int64_t>(job.n_heads + 2 * job.n_kv_heads) * D;
  int64_t row = b.first_row + (b.first_tile + me.group) * ROWS;
  int64_t k_at = row * width + static_cast<int64_t>(job.n_heads + b.kv_head) * D,
          v_at = k_at + static_cast<int64_t>(job.n_kv_heads) * D;
  uint32_t k[16], v[16], weights[16], grads[16];
  float dk[32], dv[32], scale2 = job.scale * LOG2E;
  load_rows(k, job.qkv + k_at, width, me);
  load_rows(v, job.qkv + v_at, width, me);
  clear(dk);
  clear(dv);
  int tile = 0, unreleased = -1; /* tile: of the head's, from the first on the diagonal */
  for (int step = 0; step < b.heads * b.tiles; step++, tile = tile + 1 < b.tiles ? tile + 1 : 0) {
    wait_for_step(sh, step);
    if (tile < me.group) { /* the second 64 keys lie behind the first 64 queries */
      release_step(sh, step);
      continue;
    }
    int at = step % RING;
    uint32_t q_tile = shared_address(sh->tile[at][0]), dout_tile = shared_address(sh->tile[at][1]);
    float p[32], dp[32];
    wgmma_fence();
    tile_along_rows(p, k, q_tile);
    wgmma_commit();
    tile_along_rows(dp, v, dout_tile);
    wgmma_commit();
    wgmma_wait<1>(); /* and for all of the step before */
    wgmma_hold(p);
    if (unreleased >= 0) release_step(sh, unreleased);
    unreleased = step;
    column_weights(p, scale2, sh->row[at][0] + me.column);
    if (tile == me.group) mask_diagonal<true>(p, me);
    pack_fragment(weights, p);
    wgmma_fence();
    tile_along_columns(dv, weights, dout_tile);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_hold(dp);
    column_gradients(dp, p, sh->row[at][1] + me.column);
    pack_fragment(grads, dp);
    wgmma_fence();
    tile_along_columns(dk, grads, q_tile);
    wgmma_commit();
    keep_alive(k, v, job);
  }
  wgmma_wait<0>();
  wgmma_hold(dk);
  wgmma_hold(dv);
  store_rows(job.dqkv + k_at, width, dk, job.scale, me);
  store_rows(job.dqkv + v_at, width, dv, 1, me);
}

/* What a block of queries_kernel does: tiles of queries from first_tile on, one for each warpgroup
 * (fewer at a sequence's end), keys up to the last one's. */
template <int GROUPS>
struct QueriesBlock {
  int seq, head, first_tile, groups, steps, first_row;
  __device__ explicit QueriesBlock(const Job &job) {
    int lists = job.n_seqs * job.n_heads, list = static_cast<int>(blockIdx.x) % lists;
    int tiles = job.len / ROWS, blocks = (tiles + GROUPS - 1) / GROUPS;
    seq = list / job.n_heads;
    head = list % job.n_heads;
    first_tile = (blocks - 1 - static_cast<int>(blockIdx.x) / lists) * GROUPS;
    groups = min(GROUPS, tiles - first_tile);
    steps = first_tile + groups;
    first_row = seq * job.len;
  }
};

template <int GROUPS>
__device__ __forceinline__ void queries_copy(Shared *sh, const Job &job,
                                             const CUtensorMap *qkv_map) {
  QueriesBlock<GROUPS> b(job);
  int k_column = (job.n_heads + b.head / (job.n_heads / job.n_kv_heads)) * D;
  uint32_t here = shared_address(&sh->here);
  barrier_expect(here, b.groups * TILE_BYTES);
  for (int i = 0; i < b.groups; i++)
    copy_tile(shared_address(sh->stays[i]), qkv_map, b.head * D,
              b.first_row + (b.first_tile + i) * ROWS, here);
  for (int step = 0; step < b.steps; step++) {
    int at = step % RING, row = b.first_row + step * ROWS;
    uint32_t full = shared_address(&sh->full[at]);
    wait_for_place(sh, step);
    barrier_expect(full, 2 * TILE_BYTES);
    copy_tile(shared_address(sh->tile[at][0]), qkv_map, k_column, row, full);
    copy_tile(shared_address(sh->tile[at][1]), qkv_map, k_column + job.n_kv_heads * D, row, full);
  }
}

template <int GROUPS>
__device__ __forceinline__ void queries_compute(Shared *sh, const Job &job, const Me &me) {
  QueriesBlock<GROUPS> b(job);
  int diagonal = b.first_tile + me.group, in_seq = diagonal * ROWS;
  int64_t width = static_cast<int64_t>(job.n_heads + 2 * job.n_kv_heads) * D,
          out_width = static_cast<int64_t>(job.n_heads) * D, row = b.first_row + in_seq;
  uint32_t dout[16], grads[16], q_tile = shared_address(sh->stays[me.group]);
  float dq[32], scale2 = job.scale * LOG2E;
  load_rows(dout, job.dout + row * out_width + b.head * D, out_width, me);
  clear(dq);
  int64_t at_row = (static_cast<int64_t>(b.seq) * job.n_heads + b.head) * job.len + in_seq + me.row;
  float lse[2] = {job.lse[at_row], job.lse[at_row + 8]},
        delta[2] = {job.delta[at_row], job.delta[at_row + 8]};
  barrier_wait(shared_address(&sh->here), 0);
  for (int step = 0; step <= diagonal; step++) { /* the rest is for the other warpgroups */
    int at = step % RING;
    uint32_t k_tile = shared_address(sh->tile[at][0]), v_tile = shared_address(sh->tile[at][1]);
    float p[32], dp[32];
    wait_for_step(sh, step);
    wgmma_fence();
    tiles_along_rows(p, q_tile, k_tile);
    wgmma_commit();
    tile_along_rows(dp, dout, v_tile);
    wgmma_commit();
    wgmma_wait<1>(); /* and for all of the step before */
    wgmma_hold(p);
    if (step > 0) release_step(sh, step - 1);
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = exp2_fast(fmaf(p[i], scale2, -lse[i / 2 & 1]));
    if (step == diagonal) mask_diagonal<false>(p, me);
    wgmma_wait<0>();
    wgmma_hold(dp);
#pragma unroll
    for (int i = 0; i < 32; i++) dp[i] = p[i] * (dp[i] - delta[i / 2 & 1]);
    pack_fragment(grads, dp);
    wgmma_fence();
    tile_along_columns(dq, grads, k_tile);
    wgmma_commit();
    keep_alive(dout, dout, job);
  }
  wgmma_wait<0>();
  wgmma_hold(dq);
  store_rows(job.dqkv + row * width + b.head * D, width, dq, job.scale, me);
}

#endif

/* dk and dv of 128 keys. Blocks with most queries come first. */
__global__ __launch_bounds__((KEY_GROUPS + 1) * GROUP_THREADS,
                             1) void keys_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                                 const __grid_constant__ CUtensorMap dout_map,
                                                 Job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared *sh = reinterpret_cast<Shared *>(memory);
  Me me;
  start_ring(sh, KEY_GROUPS);
  if (me.group == KEY_GROUPS) {
    registers_give<24>();
    if (threadIdx.x % GROUP_THREADS == 0) keys_copy(sh, job, &qkv_map, &dout_map);
  } else {
    registers_take<240>();
    keys_compute(sh, job, me);
  }
#endif
}

/* dq of 64 queries for each warpgroup, of one head. Blocks with most keys come first. */
template <int GROUPS>
__global__ __launch_bounds__((GROUPS + 1) * GROUP_THREADS,
                             1) void queries_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                                    Job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared *sh = reinterpret_cast<Shared *>(memory);
  Me me;
  int groups = QueriesBlock<GROUPS>(job).groups;
  start_ring(sh, groups);
  if (me.group == GROUPS) {
    registers_give<24>();
    if (threadIdx.x % GROUP_THREADS == 0) queries_copy<GROUPS>(sh, job, &qkv_map);
  } else {
    registers_take<GROUPS == 3 ? 160 : 240>();
    if (me.group < groups) queries_compute<GROUPS>(sh, job, me);
  }
#endif
}

/* lse_BHT = lse_NH in powers of two; delta_BHT = dout.out. A block is 32 tokens of 8 heads, 8 lanes
 * to a head. */
__global__ __launch_bounds__(256) void rows_kernel(const bf16 *dout, const bf16 *out,
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
      int64_t at = (row * n_heads + head0 + h) * D + lane * Pack<bf16>::N;
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
  lse[to] = LOG2E * lse_NH[static_cast<int64_t>(first_token + t) * n_heads + head0 + h];
}

void keys_launch(const Job &job, const CUtensorMap &qkv_map, const CUtensorMap &dout_map,
                 cudaStream_t stream) {
  int bytes = static_cast<int>(sizeof(Shared));
  CUDA_CHECK(cudaFuncSetAttribute(keys_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int blocks = job.n_seqs * job.n_kv_heads * (job.len / (KEY_GROUPS * ROWS));
  keys_kernel<<<static_cast<unsigned>(blocks), (KEY_GROUPS + 1) * GROUP_THREADS, sizeof(Shared),
                stream>>>(qkv_map, dout_map, job);
  CUDA_LAUNCHED();
}

template <int GROUPS = QUERY_GROUPS>
void queries_launch(const Job &job, const CUtensorMap &qkv_map, cudaStream_t stream) {
  int bytes = static_cast<int>(sizeof(Shared)), tiles = job.len / ROWS;
  CUDA_CHECK(cudaFuncSetAttribute(queries_kernel<GROUPS>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int blocks = job.n_seqs * job.n_heads * ((tiles + GROUPS - 1) / GROUPS);
  queries_kernel<GROUPS>
      <<<static_cast<unsigned>(blocks), (GROUPS + 1) * GROUP_THREADS, sizeof(Shared), stream>>>(
          qkv_map, job);
  CUDA_LAUNCHED();
}

/* Rows of a matrix, in tiles of 64 x 64 for the copy engine. */
CUtensorMap map_rows(Tensor x) {
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
  cuuint32_t box[2] = {D, ROWS}, step[2] = {1, 1};
  CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x.data, dims, stride, box, step,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) die("cuTensorMapEncodeTiled: error %d", static_cast<int>(r));
  return map;
}

bool takes(Device *d, Segments seg, AttnShape s) {
  int len = seg.n_seqs > 0 ? seg.offsets[1] - seg.offsets[0] : 0;
  if (!getenv("RLHF_HOPPER")) return false;
  if (cuda_of(d)->arch != 90 || s.head_dim != D || len == 0 || len % (2 * ROWS) != 0) return false;
  if (s.window > 0 && s.window < len) return false;
  for (int b = 0; b <= seg.n_seqs; b++)
    if (seg.offsets[b] != b * len) return false;
  return true;
}

}  // namespace

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
  Job job = {seg.n_seqs,
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
  keys_launch(job, qkv_map, dout_map, stream);
  queries_launch(job, qkv_map, stream);
  return true;
}
