/* dk and dv on Hopper: tiles of keys stay, and the queries of all heads of their group pass by. */
#include "kernels/cuda/attention_hopper_tiles.h"

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* What a block of keys_kernel does: 128 keys from tile first_tile on, queries from there to the
 * sequence's end, for each head of the group. */
struct KeysBlock {
  int seq, kv_head, heads, first_tile, tiles, first_row;
  __device__ explicit KeysBlock(const HopperJob &job) {
    int lists = job.n_seqs * job.n_kv_heads, list = static_cast<int>(blockIdx.x) % lists;
    seq = list / job.n_kv_heads;
    kv_head = list % job.n_kv_heads;
    heads = job.n_heads / job.n_kv_heads;
    first_tile = static_cast<int>(blockIdx.x) / lists * HOPPER_KEY_GROUPS;
    tiles = job.len / HOPPER_ROWS - first_tile;
    first_row = seq * job.len;
  }
};

__device__ __forceinline__ void keys_copy(HopperShared *sh, const HopperJob &job,
                                          const CUtensorMap *qkv_map, const CUtensorMap *dout_map) {
  KeysBlock b(job);
  int head = b.kv_head * b.heads, tile = b.first_tile;
  for (int step = 0; step < b.heads * b.tiles; step++) {
    int at = step % HOPPER_RING, row = b.first_row + tile * HOPPER_ROWS;
    int64_t rows =
        (static_cast<int64_t>(b.seq) * job.n_heads + head) * job.len + tile * HOPPER_ROWS;
    uint32_t full = shared_address(&sh->full[at]);
    wait_for_place(sh, step);
    barrier_expect(full, 2 * HOPPER_TILE_BYTES + 2 * HOPPER_ROW_BYTES);
    copy_tile(shared_address(sh->tile[at][0]), qkv_map, head * HOPPER_D, row, full);
    copy_tile(shared_address(sh->tile[at][1]), dout_map, head * HOPPER_D, row, full);
    copy_bytes(shared_address(sh->row[at][0]), job.lse + rows, HOPPER_ROW_BYTES, full);
    copy_bytes(shared_address(sh->row[at][1]), job.delta + rows, HOPPER_ROW_BYTES, full);
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

__device__ __forceinline__ void keys_compute(HopperShared *sh, const HopperJob &job,
                                             const HopperThread &me) {
  KeysBlock b(job);
  int64_t width = static_cast<int64_t>(job.n_heads + 2 * job.n_kv_heads) * HOPPER_D;
  int64_t row = b.first_row + (b.first_tile + me.group) * HOPPER_ROWS;
  int64_t k_at = row * width + static_cast<int64_t>(job.n_heads + b.kv_head) * HOPPER_D,
          v_at = k_at + static_cast<int64_t>(job.n_kv_heads) * HOPPER_D;
  uint32_t k[16], v[16], weights[16], grads[16];
  float dk[32], dv[32], scale2 = job.scale * HOPPER_LOG2E;
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
    int at = step % HOPPER_RING;
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

#endif

/* dk and dv of 128 keys. Blocks with most queries come first. */
__global__ __launch_bounds__((HOPPER_KEY_GROUPS + 1) * HOPPER_THREADS,
                             1) void keys_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                                 const __grid_constant__ CUtensorMap dout_map,
                                                 HopperJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  HopperShared *sh = reinterpret_cast<HopperShared *>(memory);
  HopperThread me;
  start_ring(sh, HOPPER_KEY_GROUPS);
  if (me.group == HOPPER_KEY_GROUPS) {
    registers_give<24>();
    if (threadIdx.x % HOPPER_THREADS == 0) keys_copy(sh, job, &qkv_map, &dout_map);
  } else {
    registers_take<240>();
    keys_compute(sh, job, me);
  }
#endif
}

}  // namespace

void hopper_keys(const HopperJob &job, const CUtensorMap &qkv_map, const CUtensorMap &dout_map,
                 cudaStream_t stream) {
  int bytes = static_cast<int>(sizeof(HopperShared));
  CUDA_CHECK(cudaFuncSetAttribute(keys_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int blocks = job.n_seqs * job.n_kv_heads * (job.len / (HOPPER_KEY_GROUPS * HOPPER_ROWS));
  keys_kernel<<<static_cast<unsigned>(blocks), (HOPPER_KEY_GROUPS + 1) * HOPPER_THREADS,
                sizeof(HopperShared), stream>>>(qkv_map, dout_map, job);
  CUDA_LAUNCHED();
}
