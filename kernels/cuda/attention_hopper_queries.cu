/* dq on Hopper: tiles of queries stay, and keys pass by in tiles of 64. Three warpgroups own 64 of
 * the queries each, one thread of a fourth copies. Gradients of weights are an operand in
 * registers, as are dout's rows for heads of 64. */
#include "kernels/cuda/attention_hopper_tiles.h"

namespace {

enum { TILE = HOPPER_TILE_BYTES, GROUPS = 3, QUERIES = GROUPS * HOPPER_ROWS };

/* PARTS: tiles of 64 columns. STAYS: of them in shared memory for each warpgroup: q, dout. */
template <int D>
struct Shared {
  static constexpr int PARTS = D / 64, RING = D == 64 ? 6 : 4, STAYS = D == 64 ? 1 : 2 * PARTS;
  unsigned char k[RING][2 * PARTS][TILE]; /* first: at a multiple of 1024 bytes; behind k v */
  unsigned char q[GROUPS][STAYS][TILE];
  uint64_t full[RING], empty[RING], here;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* What a block does: tiles of queries from first_tile on, one for each warpgroup (fewer at a
 * sequence's end), keys up to the last one's. */
struct Work {
  int first_tile, groups, steps;
  __device__ Work(const HopperPlace &b)
      : first_tile(b.tile * GROUPS),
        groups(min(GROUPS, (b.len + HOPPER_ROWS - 1) / HOPPER_ROWS - first_tile)),
        steps(first_tile + groups) {}
};

template <int D>
__device__ __forceinline__ void copy(Shared<D> *sh, const HopperJob &job, const HopperPlace &b,
                                     const CUtensorMap *qkv_map, const CUtensorMap *dout_map) {
  constexpr int PARTS = Shared<D>::PARTS, RING = Shared<D>::RING, STAYS = Shared<D>::STAYS;
  Work w(b);
  uint32_t here = shared_address(&sh->here);
  barrier_expect(here, w.groups * STAYS * TILE);
  for (int i = 0; i < w.groups * STAYS; i++)
    copy_tile(shared_address(sh->q[i / STAYS][i % STAYS]), i % STAYS < PARTS ? qkv_map : dout_map,
              b.head * D + i % PARTS * 64, b.first_row + (w.first_tile + i / STAYS) * HOPPER_ROWS,
              here);
  int column = (job.n_heads + b.head / (job.n_heads / job.n_kv_heads)) * D;
  for (int step = 0; step < w.steps; step++) {
    int at = step % RING, row = b.first_row + step * HOPPER_ROWS;
    uint32_t full = shared_address(&sh->full[at]);
    if (step >= RING) wait_for(&sh->empty[at], step / RING - 1);
    barrier_expect(full, 2 * PARTS * TILE);
    for (int i = 0; i < 2 * PARTS; i++)
      copy_tile(shared_address(sh->k[at][i]), qkv_map,
                column + i / PARTS * job.n_kv_heads * D + i % PARTS * 64, row, full);
  }
}

template <int D>
__device__ __forceinline__ void compute(Shared<D> *sh, const HopperJob &job, const HopperPlace &b,
                                        const HopperThread &me) {
  constexpr int PARTS = Shared<D>::PARTS, RING = Shared<D>::RING;
  int diagonal = Work(b).first_tile + me.group, in_seq = diagonal * HOPPER_ROWS;
  int rows = b.len - in_seq;
  int64_t width = static_cast<int64_t>(job.n_heads + 2 * job.n_kv_heads) * D,
          out_width = static_cast<int64_t>(job.n_heads) * D, row = b.first_row + in_seq;
  HopperOperand<D> dout;
  uint32_t q_tile = shared_address(sh->q[me.group][0]);
  dout.load(job.dout + row * out_width + b.head * D, out_width, rows, q_tile + PARTS * TILE, me);
  float dq[D / 2], scale2 = job.scale * HOPPER_LOG2E;
  clear(dq);
  int64_t stat =
      (static_cast<int64_t>(b.head) * job.tiles + b.first_stat + diagonal) * HOPPER_ROWS + me.row;
  float lse[2] = {job.lse[stat], job.lse[stat + 8]},
        delta[2] = {job.delta[stat], job.delta[stat + 8]};
  wait_for(&sh->here, 0);
  for (int step = 0; step <= diagonal; step++) { /* the rest is for the other warpgroups */
    int at = step % RING;
    uint32_t k_tile = shared_address(sh->k[at][0]), v_tile = shared_address(sh->k[at][PARTS]);
    wait_for(&sh->full[at], step / RING);
    if (step == diagonal && rows < HOPPER_ROWS)
      clear_rows<2 * PARTS>(k_tile, TILE, rows, HOPPER_ROWS, 1 + me.group);
    float p[32], dp[32];
    uint32_t grads[16];
    wgmma_fence();
    tiles_along_rows<PARTS>(p, q_tile, TILE, k_tile, TILE);
    wgmma_commit();
    if (D > 64) wgmma_wait<1>(); /* frees the registers of the step before's operand */
    wgmma_fence();
    dout.times(dp, v_tile);
    wgmma_commit();
    wgmma_wait<1>(); /* and for all of the step before */
    wgmma_hold(p);
    if (step > 0) warp_arrives(&sh->empty[(step - 1) % RING]);
#pragma unroll
    for (int i = 0; i < 32; i++) p[i] = exp2_fast(fmaf(p[i], scale2, -lse[i / 2 & 1]));
    if (step == diagonal) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 4 * 8 + me.column + (i & 1) > me.row + (i & 2 ? 8 : 0)) p[i] = 0;
    }
    wgmma_wait<0>();
    wgmma_hold(dp);
#pragma unroll
    for (int i = 0; i < 32; i++) dp[i] = p[i] * (dp[i] - delta[i / 2 & 1]);
    pack_fragment(grads, dp);
    wgmma_fence();
    tile_along_columns(dq, grads, k_tile, TILE);
    wgmma_commit();
    dout.keep(job);
  }
  wgmma_wait<0>();
  wgmma_hold(dq);
  turn_back(dq, job, b.first_row + in_seq, rows, me);
  store_rows(job.dqkv + row * width + b.head * D, width, dq, {job.scale, job.scale}, rows, me);
}

#endif

template <int D>
__global__ __launch_bounds__((GROUPS + 1) * HOPPER_WARPGROUP,
                             1) void queries_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                                    const __grid_constant__ CUtensorMap dout_map,
                                                    HopperJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<D> *sh = reinterpret_cast<Shared<D> *>(memory);
  HopperThread me;
  HopperPlace b = hopper_place_of_block(job, QUERIES, job.n_heads, true);
  if (b.len == 0) return;
  int groups = Work(b).groups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<D>::RING; i++) {
      init_barrier(&sh->full[i], 1);
      init_barrier(&sh->empty[i], 4 * groups);
    }
    init_barrier(&sh->here, 1);
    barrier_init_done();
  }
  __syncthreads();
  if (me.group == GROUPS) {
    registers_give<24>();
    if (threadIdx.x % HOPPER_WARPGROUP == 0) copy(sh, job, b, &qkv_map, &dout_map);
  } else {
    registers_take<160>();
    if (me.group < groups) compute(sh, job, b, me);
  }
#endif
}

template <int D>
void launch(const HopperJob &job, const CUtensorMap &qkv_map, const CUtensorMap &dout_map,
            cudaStream_t stream) {
  auto kernel = queries_kernel<D>;
  int bytes = static_cast<int>(sizeof(Shared<D>));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<hopper_blocks(job, QUERIES, job.n_heads), (GROUPS + 1) * HOPPER_WARPGROUP,
           sizeof(Shared<D>), stream>>>(qkv_map, dout_map, job);
  CUDA_LAUNCHED();
}

}  // namespace

void hopper_queries(const HopperJob &job, int head_dim, const CUtensorMap &qkv_map,
                    const CUtensorMap &dout_map, cudaStream_t stream) {
  if (head_dim == 64)
    launch<64>(job, qkv_map, dout_map, stream);
  else
    launch<128>(job, qkv_map, dout_map, stream);
}
