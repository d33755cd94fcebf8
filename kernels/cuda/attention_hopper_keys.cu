/* dk and dv on Hopper: 128 keys stay, and the queries of all heads of their group pass by in tiles
 * of 64. Two warpgroups own 64 of the keys each, one thread of a third copies. Weights and their
 * gradients are computed transposed, [keys, queries], so that they are operands in registers. Keys
 * and values stay in registers for heads of 64, in shared memory for heads of 128. */
#include "kernels/cuda/attention_hopper_tiles.h"

namespace {

enum { TILE = HOPPER_TILE_BYTES, GROUPS = 2, KEYS = GROUPS * HOPPER_ROWS };

/* PARTS: tiles of 64 columns. STAYS: of them in shared memory, keys and values of a warpgroup. */
template <int D>
struct Shared {
  static constexpr int PARTS = D / 64, RING = D == 64 ? 6 : 4, STAYS = D == 64 ? 0 : 2 * PARTS;
  unsigned char q[RING][2 * PARTS][TILE]; /* first: at a multiple of 1024 bytes; behind q dout */
  unsigned char k[GROUPS][STAYS > 0 ? STAYS : 1][STAYS > 0 ? TILE : 1]; /* behind k v */
  alignas(128) float row[RING][2][HOPPER_ROWS];                         /* lse and delta */
  uint64_t full[RING], empty[RING], here;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* What a block does: `tiles` tiles of queries for each head from `head` on, from the keys' own. */
struct Work {
  int head, heads, tiles, steps;
  int first_row, rows; /* of the first tile: token, and rows to the sequence's end */
  int groups;          /* that have keys */
  int stat;            /* the first tile in the job's, without the head */
  __device__ Work(const HopperJob &job, const HopperPlace &b)
      : heads(job.n_heads / job.n_kv_heads), rows(b.len - b.tile * KEYS) {
    head = b.head * heads;
    tiles = (rows + HOPPER_ROWS - 1) / HOPPER_ROWS;
    steps = heads * tiles;
    first_row = b.first_row + b.tile * KEYS;
    groups = min(GROUPS, tiles);
    stat = b.first_stat + b.tile * GROUPS;
  }
};

template <int D>
__device__ __forceinline__ void copy(Shared<D> *sh, const HopperJob &job, const HopperPlace &b,
                                     const CUtensorMap *qkv_map, const CUtensorMap *dout_map,
                                     const CUtensorMap *rows_map) {
  constexpr int PARTS = Shared<D>::PARTS, RING = Shared<D>::RING, STAYS = Shared<D>::STAYS;
  Work w(job, b);
  uint32_t here = shared_address(&sh->here);
  if (STAYS > 0) barrier_expect(here, w.groups * STAYS * TILE);
  for (int i = 0; i < w.groups * STAYS; i++) {
    int group = i / (2 * PARTS), v = i / PARTS % 2, part = i % PARTS;
    copy_tile(shared_address(sh->k[group][PARTS * v + part]), qkv_map,
              (job.n_heads + v * job.n_kv_heads + b.head) * D + part * 64,
              w.first_row + group * HOPPER_ROWS, here);
  }
  int tile = 0;
  for (int step = 0; step < w.steps; step++) {
    int at = step % RING, row = w.first_row + tile * HOPPER_ROWS;
    uint32_t full = shared_address(&sh->full[at]);
    if (step >= RING) wait_for(&sh->empty[at], step / RING - 1);
    barrier_expect(full, 2 * PARTS * TILE + static_cast<int>(sizeof sh->row[at]));
    for (int part = 0; part < PARTS; part++) {
      int column = w.head * D + part * 64;
      copy_tile(shared_address(sh->q[at][part]), qkv_map, column, row, full);
      copy_tile(shared_address(sh->q[at][PARTS + part]), dout_map, column, row, full);
    }
    copy_tile(shared_address(sh->row[at]), rows_map,
              (w.head * job.tiles + w.stat + tile) * HOPPER_ROWS, 0, full);
    if (++tile == w.tiles) tile = 0, w.head++;
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
/* ds = p (dp - delta), with delta of the columns, and p as it was rounded. */
__device__ inline void column_gradients(float (&dp)[32], const uint32_t (&p)[16],
                                        const float *delta) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float2 x = *reinterpret_cast<const float2 *>(delta + 8 * j);
    dp[4 * j] = low_half(p[2 * j]) * (dp[4 * j] - x.x);
    dp[4 * j + 1] = high_half(p[2 * j]) * (dp[4 * j + 1] - x.y);
    dp[4 * j + 2] = low_half(p[2 * j + 1]) * (dp[4 * j + 2] - x.x);
    dp[4 * j + 3] = high_half(p[2 * j + 1]) * (dp[4 * j + 3] - x.y);
  }
}

template <int D>
__device__ __forceinline__ void compute(Shared<D> *sh, const HopperJob &job, const HopperPlace &b,
                                        const HopperThread &me) {
  constexpr int PARTS = Shared<D>::PARTS, RING = Shared<D>::RING;
  Work w(job, b);
  int rows = w.rows - me.group * HOPPER_ROWS, last_rows = w.rows - (w.tiles - 1) * HOPPER_ROWS;
  int64_t width = static_cast<int64_t>(job.n_heads + 2 * job.n_kv_heads) * D;
  int64_t k_at = (w.first_row + me.group * HOPPER_ROWS) * width + (job.n_heads + b.head) * D,
          v_at = k_at + job.n_kv_heads * D;
  HopperOperand<D> k, v;
  uint32_t shared = shared_address(sh->k[me.group][0]);
  k.load(job.qkv + k_at, width, rows, shared, me);
  v.load(job.qkv + v_at, width, rows, shared + PARTS * TILE, me);
  float dk[D / 2], dv[D / 2], scale2 = job.scale * HOPPER_LOG2E;
  clear(dk);
  clear(dv);
  if (Shared<D>::STAYS > 0) wait_for(&sh->here, 0);
  int step = 0, tile = 0;
  auto arrive = [&] { /* at the next step that the warpgroup's keys have part in */
                      if (tile == w.tiles) tile = 0;
                      if (tile <
                          me.group) { /* the second 64 keys lie behind the first 64 queries */
                        wait_for(&sh->full[step % RING], step / RING);
                        warp_arrives(&sh->empty[step % RING]);
                        step++;
                        tile++;
                      }
                      wait_for(&sh->full[step % RING], step / RING);
                      if (tile == w.tiles - 1 && last_rows < HOPPER_ROWS)
                        clear_rows<2 * PARTS>(shared_address(sh->q[step % RING][0]), TILE,
                                              last_rows, HOPPER_ROWS, 1 + me.group);
  };
  float p[32];
  arrive();
  wgmma_fence();
  k.times(p, shared_address(sh->q[step % RING][0]));
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(p);
  while (step < w.steps) { /* p is here */
    int at = step % RING;
    uint32_t q_tile = shared_address(sh->q[at][0]), dout_tile = shared_address(sh->q[at][PARTS]);
    float dp[32];
    uint32_t weights[16], grads[16];
    wgmma_fence();
    v.times(dp, dout_tile);
    wgmma_commit();
    column_weights(p, scale2, sh->row[at][0] + me.column);
    if (tile == me.group) {
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (me.row + (i & 2 ? 8 : 0) > i / 4 * 8 + me.column + (i & 1)) p[i] = 0;
    }
    pack_fragment(weights, p);
    wgmma_fence();
    tile_along_columns(dv, weights, dout_tile, TILE);
    wgmma_commit();
    step++;
    tile++;
    if (step < w.steps) arrive();
    wgmma_fence(); /* the next p; behind the last step for nothing */
    k.times(p, step < w.steps ? shared_address(sh->q[step % RING][0]) : q_tile);
    wgmma_commit();
    wgmma_wait<2>();
    wgmma_hold(dp);
    column_gradients(dp, weights, sh->row[at][1] + me.column);
    pack_fragment(grads, dp);
    wgmma_fence();
    tile_along_columns(dk, grads, q_tile, TILE);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(p);
    warp_arrives(&sh->empty[at]);
    k.keep(job);
    v.keep(job);
  }
  wgmma_wait<0>();
  wgmma_hold(dk);
  wgmma_hold(dv);
  turn_back(dk, job, w.first_row + me.group * HOPPER_ROWS, rows, me);
  store_rows(job.dqkv + k_at, width, dk, {job.scale, job.scale}, rows, me);
  store_rows(job.dqkv + v_at, width, dv, {1, 1}, rows, me);
}

#endif

template <int D>
__global__ __launch_bounds__((GROUPS + 1) * HOPPER_WARPGROUP,
                             1) void keys_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                                 const __grid_constant__ CUtensorMap dout_map,
                                                 const __grid_constant__ CUtensorMap rows_map,
                                                 HopperJob job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared<D> *sh = reinterpret_cast<Shared<D> *>(memory);
  HopperThread me;
  HopperPlace b = hopper_place_of_block(job, KEYS, job.n_kv_heads, false);
  if (b.len == 0) return;
  int groups = Work(job, b).groups;
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
    if (threadIdx.x % HOPPER_WARPGROUP == 0) copy(sh, job, b, &qkv_map, &dout_map, &rows_map);
  } else {
    registers_take<240>();
    if (me.group < groups) compute(sh, job, b, me);
  }
#endif
}

template <int D>
void launch(const HopperJob &job, const CUtensorMap &qkv_map, const CUtensorMap &dout_map,
            const CUtensorMap &rows_map, cudaStream_t stream) {
  auto kernel = keys_kernel<D>;
  int bytes = static_cast<int>(sizeof(Shared<D>));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<hopper_blocks(job, KEYS, job.n_kv_heads), (GROUPS + 1) * HOPPER_WARPGROUP,
           sizeof(Shared<D>), stream>>>(qkv_map, dout_map, rows_map, job);
  CUDA_LAUNCHED();
}

}  // namespace

void hopper_keys(const HopperJob &job, int head_dim, const CUtensorMap &qkv_map,
                 const CUtensorMap &dout_map, const CUtensorMap &rows_map, cudaStream_t stream) {
  if (head_dim == 64)
    launch<64>(job, qkv_map, dout_map, rows_map, stream);
  else
    launch<128>(job, qkv_map, dout_map, rows_map, stream);
}
