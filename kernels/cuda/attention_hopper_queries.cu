/* dq on Hopper: tiles of queries stay, and keys pass by. */
#include "kernels/cuda/attention_hopper_tiles.h"

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* What a block of queries_kernel does: tiles of queries from first_tile on, one for each warpgroup
 * (fewer at a sequence's end), keys up to the last one's. */
struct QueriesBlock {
  int seq, head, first_tile, groups, steps, first_row;
  __device__ explicit QueriesBlock(const HopperJob &job) {
    int lists = job.n_seqs * job.n_heads, list = static_cast<int>(blockIdx.x) % lists;
    int tiles = job.len / HOPPER_ROWS,
        blocks = (tiles + HOPPER_QUERY_GROUPS - 1) / HOPPER_QUERY_GROUPS;
    seq = list / job.n_heads;
    head = list % job.n_heads;
    first_tile = (blocks - 1 - static_cast<int>(blockIdx.x) / lists) * HOPPER_QUERY_GROUPS;
    groups = min(HOPPER_QUERY_GROUPS, tiles - first_tile);
    steps = first_tile + groups;
    first_row = seq * job.len;
  }
};

__device__ __forceinline__ void queries_copy(HopperShared *sh, const HopperJob &job,
                                             const CUtensorMap *qkv_map) {
  QueriesBlock b(job);
  int k_column = (job.n_heads + b.head / (job.n_heads / job.n_kv_heads)) * HOPPER_D;
  uint32_t here = shared_address(&sh->here);
  barrier_expect(here, b.groups * HOPPER_TILE_BYTES);
  for (int i = 0; i < b.groups; i++)
    copy_tile(shared_address(sh->stays[i]), qkv_map, b.head * HOPPER_D,
              b.first_row + (b.first_tile + i) * HOPPER_ROWS, here);
  for (int step = 0; step < b.steps; step++) {
    int at = step % HOPPER_RING, row = b.first_row + step * HOPPER_ROWS;
    uint32_t full = shared_address(&sh->full[at]);
    wait_for_place(sh, step);
    barrier_expect(full, 2 * HOPPER_TILE_BYTES);
    copy_tile(shared_address(sh->tile[at][0]), qkv_map, k_column, row, full);
    copy_tile(shared_address(sh->tile[at][1]), qkv_map, k_column + job.n_kv_heads * HOPPER_D, row,
              full);
  }
}

__device__ __forceinline__ void queries_compute(HopperShared *sh, const HopperJob &job,
                                                const HopperThread &me) {
  QueriesBlock b(job);
  int diagonal = b.first_tile + me.group, in_seq = diagonal * HOPPER_ROWS;
  int64_t width = static_cast<int64_t>(job.n_heads + 2 * job.n_kv_heads) * HOPPER_D,
          out_width = static_cast<int64_t>(job.n_heads) * HOPPER_D, row = b.first_row + in_seq;
  uint32_t dout[16], grads[16], q_tile = shared_address(sh->stays[me.group]);
  float dq[32], scale2 = job.scale * HOPPER_LOG2E;
  load_rows(dout, job.dout + row * out_width + b.head * HOPPER_D, out_width, me);
  clear(dq);
  int64_t at_row = (static_cast<int64_t>(b.seq) * job.n_heads + b.head) * job.len + in_seq + me.row;
  float lse[2] = {job.lse[at_row], job.lse[at_row + 8]},
        delta[2] = {job.delta[at_row], job.delta[at_row + 8]};
  barrier_wait(shared_address(&sh->here), 0);
  for (int step = 0; step <= diagonal; step++) { /* the rest is for the other warpgroups */
    int at = step % HOPPER_RING;
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
  store_rows(job.dqkv + row * width + b.head * HOPPER_D, width, dq, job.scale, me);
}

#endif

/* dq of 64 queries for each warpgroup, of one head. Blocks with most keys come first. */
__global__ __launch_bounds__((HOPPER_QUERY_GROUPS + 1) * HOPPER_THREADS,
                             1) void queries_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                                    HopperJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  HopperShared *sh = reinterpret_cast<HopperShared *>(memory);
  HopperThread me;
  int groups = QueriesBlock(job).groups;
  start_ring(sh, groups);
  if (me.group == HOPPER_QUERY_GROUPS) {
    registers_give<24>();
    if (threadIdx.x % HOPPER_THREADS == 0) queries_copy(sh, job, &qkv_map);
  } else {
    registers_take<160>();
    if (me.group < groups) queries_compute(sh, job, me);
  }
#endif
}

}  // namespace

void hopper_queries(const HopperJob &job, const CUtensorMap &qkv_map, cudaStream_t stream) {
  int bytes = static_cast<int>(sizeof(HopperShared)), tiles = job.len / HOPPER_ROWS;
  CUDA_CHECK(
      cudaFuncSetAttribute(queries_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int blocks = job.n_seqs * job.n_heads * ((tiles + HOPPER_QUERY_GROUPS - 1) / HOPPER_QUERY_GROUPS);
  queries_kernel<<<static_cast<unsigned>(blocks), (HOPPER_QUERY_GROUPS + 1) * HOPPER_THREADS,
                   sizeof(HopperShared), stream>>>(qkv_map, job);
  CUDA_LAUNCHED();
}
