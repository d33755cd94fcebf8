/* Attention's forward on Hopper: tiles of queries stay, and keys pass by in tiles of 64, from the
 * queries' own back to the sequence's start, so that only the first is masked. Three warpgroups own
 * 64 of the queries each, one thread of a fourth copies. While the tensor cores multiply a tile's
 * weights with v, they already have q.k of the next, whose softmax runs beside that. */
#include "kernels/cuda/attention_hopper_tiles.h"

namespace {

enum { TILE = HOPPER_TILE_BYTES, GROUPS = 3, QUERIES = GROUPS * HOPPER_ROWS };

template <int D>
struct Shared {
  static constexpr int PARTS = D / 64, RING = D == 64 ? 4 : 3; /* parts: tiles of 64 columns */
  unsigned char k[RING][PARTS][TILE];                          /* at a multiple of 1024 bytes */
  unsigned char v[RING][PARTS][TILE], q[GROUPS][PARTS][TILE];
  uint64_t k_full[RING], k_empty[RING], v_full[RING], v_empty[RING], here;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* What a block does: tiles of queries from first_tile on, one for each warpgroup (fewer at a
 * sequence's end), tiles of keys from the last one's down. */
struct Work {
  int first_tile, groups, tiles;
  __device__ Work(const HopperPlace &b)
      : first_tile(b.tile * GROUPS),
        groups(min(GROUPS, (b.len + HOPPER_ROWS - 1) / HOPPER_ROWS - first_tile)),
        tiles(first_tile + groups) {}
};

template <int D>
__device__ __forceinline__ void copy(Shared<D> *sh, const HopperJob &job, const HopperPlace &b,
                                     const CUtensorMap *map) {
  constexpr int PARTS = Shared<D>::PARTS, RING = Shared<D>::RING;
  Work w(b);
  uint32_t here = shared_address(&sh->here);
  barrier_expect(here, w.groups * PARTS * TILE);
  for (int i = 0; i < w.groups * PARTS; i++)
    copy_tile(shared_address(sh->q[i / PARTS][i % PARTS]), map, b.head * D + i % PARTS * 64,
              b.first_row + (w.first_tile + i / PARTS) * HOPPER_ROWS, here);
  int k_column = (job.n_heads + b.head / (job.n_heads / job.n_kv_heads)) * D,
      v_column = k_column + job.n_kv_heads * D;
  for (int step = 0; step < w.tiles; step++) {
    int at = step % RING, row = b.first_row + (w.tiles - 1 - step) * HOPPER_ROWS;
    uint32_t k_full = shared_address(&sh->k_full[at]), v_full = shared_address(&sh->v_full[at]);
    if (step >= RING) wait_for(&sh->k_empty[at], step / RING - 1);
    barrier_expect(k_full, PARTS * TILE);
    for (int part = 0; part < PARTS; part++)
      copy_tile(shared_address(sh->k[at][part]), map, k_column + part * 64, row, k_full);
    if (step >= RING) wait_for(&sh->v_empty[at], step / RING - 1);
    barrier_expect(v_full, PARTS * TILE);
    for (int part = 0; part < PARTS; part++)
      copy_tile(shared_address(sh->v[at][part]), map, v_column + part * 64, row, v_full);
  }
}

/* Over the four threads that share a row. */
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Of a thread's two rows: the largest product so far, and the thread's part of the sum of weights.
 */
struct Running {
  float max[2], sum[2];
};

/* Products become weights; keep: what the earlier sums are multiplied by. */
__device__ inline void softmax(float (&s)[32], Running &x, float (&keep)[2], float scale2) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float max = x.max[r], sum = 0;
#pragma unroll
    for (int i = 2 * r; i < 32; i += 4) max = fmaxf(max, fmaxf(s[i], s[i + 1]));
    max = quad_max(max);
    keep[r] = exp2_fast((x.max[r] - max) * scale2);
    x.max[r] = max;
    float base = max * scale2;
#pragma unroll
    for (int i = 2 * r; i < 32; i += 4) {
      s[i] = exp2_fast(fmaf(s[i], scale2, -base));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], scale2, -base));
      sum += s[i] + s[i + 1];
    }
    x.sum[r] = fmaf(x.sum[r], keep[r], sum);
  }
}

/* The v of a step is here; rows behind the sequence's end are none. */
template <int D>
__device__ inline uint32_t wait_for_v(Shared<D> *sh, int step, int rows, const HopperThread &me) {
  constexpr int RING = Shared<D>::RING;
  uint32_t v_tile = shared_address(sh->v[step % RING][0]);
  wait_for(&sh->v_full[step % RING], step / RING);
  if (rows < HOPPER_ROWS) clear_rows<D / 64>(v_tile, TILE, rows, HOPPER_ROWS, 1 + me.group);
  return v_tile;
}

template <int D>
__device__ __forceinline__ void compute(Shared<D> *sh, const HopperJob &job, const HopperPlace &b,
                                        const HopperThread &me) {
  constexpr int PARTS = Shared<D>::PARTS, RING = Shared<D>::RING;
  Work w(b);
  int in_seq = (w.first_tile + me.group) * HOPPER_ROWS, rows = b.len - in_seq;
  int first = w.groups - 1 - me.group, step = first; /* tiles before are for the others */
  for (int i = 0; i < first; i++) {
    wait_for(&sh->k_full[i % RING], i / RING);
    warp_arrives(&sh->k_empty[i % RING]);
    wait_for(&sh->v_full[i % RING], i / RING);
    warp_arrives(&sh->v_empty[i % RING]);
  }
  float o[D / 2], keep[2], scale2 = job.scale * HOPPER_LOG2E;
  uint32_t weights[16], q_tile = shared_address(sh->q[me.group][0]);
  Running x = {{-INFINITY, -INFINITY}, {0, 0}};
  clear(o);
  wait_for(&sh->here, 0);
  auto start_products = [&](float(&s)[32]) {
    wait_for(&sh->k_full[step % RING], step / RING);
    wgmma_fence();
    tiles_along_rows<PARTS>(s, q_tile, TILE, shared_address(sh->k[step % RING][0]), TILE);
    wgmma_commit();
  };
  auto start_sum = [&] { /* of the step before */
                         int valid = step - 1 == first ? rows : HOPPER_ROWS;
                         uint32_t v_tile = wait_for_v(sh, step - 1, valid, me);
                         wgmma_fence();
                         tile_along_columns(o, weights, v_tile, TILE);
                         wgmma_commit();
  };
  {
    float s[32];
    start_products(s);
    wgmma_wait<0>();
    wgmma_hold(s);
    warp_arrives(&sh->k_empty[step % RING]);
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (i / 4 * 8 + me.column + (i & 1) > me.row + (i & 2 ? 8 : 0)) s[i] = -INFINITY;
    softmax(s, x, keep, scale2);
    pack_fragment(weights, s);
  }
  for (step++; step < w.tiles; step++) {
    float s[32];
    start_products(s);
    start_sum();
    wgmma_wait<1>();
    wgmma_hold(s);
    warp_arrives(&sh->k_empty[step % RING]);
    softmax(s, x, keep, scale2);
    wgmma_wait<0>();
    wgmma_hold(o);
    warp_arrives(&sh->v_empty[(step - 1) % RING]);
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= keep[i / 2 & 1];
    pack_fragment(weights, s);
  }
  start_sum();
  wgmma_wait<0>();
  wgmma_hold(o);
  int64_t width = static_cast<int64_t>(job.n_heads) * D, row = b.first_row + in_seq;
  float sum[2] = {quad_sum(x.sum[0]), quad_sum(x.sum[1])};
  store_rows(job.out + row * width + b.head * D, width, o, {1 / sum[0], 1 / sum[1]}, rows, me);
  if (!job.lse_NH || me.column > 0) return;
#pragma unroll
  for (int r = 0; r < 2; r++)
    if (me.row + 8 * r < rows)
      job.lse_NH[(row + me.row + 8 * r) * job.n_heads + b.head] =
          x.max[r] * job.scale + logf(sum[r]);
}

#endif

template <int D>
__global__ __launch_bounds__((GROUPS + 1) * HOPPER_WARPGROUP,
                             1) void forward_kernel(const __grid_constant__ CUtensorMap map,
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
      init_barrier(&sh->k_full[i], 1);
      init_barrier(&sh->k_empty[i], 4 * groups);
      init_barrier(&sh->v_full[i], 1);
      init_barrier(&sh->v_empty[i], 4 * groups);
    }
    init_barrier(&sh->here, 1);
    barrier_init_done();
  }
  __syncthreads();
  if (me.group == GROUPS) {
    registers_give<24>();
    if (threadIdx.x % HOPPER_WARPGROUP == 0) copy(sh, job, b, &map);
  } else {
    registers_take<160>();
    if (me.group < groups) compute(sh, job, b, me);
  }
#endif
}

template <int D>
void launch(const HopperJob &job, const CUtensorMap &map, cudaStream_t stream) {
  auto kernel = forward_kernel<D>;
  int bytes = static_cast<int>(sizeof(Shared<D>));
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<hopper_blocks(job, QUERIES, job.n_heads), (GROUPS + 1) * HOPPER_WARPGROUP,
           sizeof(Shared<D>), stream>>>(map, job);
  CUDA_LAUNCHED();
}

}  // namespace

void hopper_forward(const HopperJob &job, int head_dim, const CUtensorMap &qkv_map,
                    cudaStream_t stream) {
  if (head_dim == 64)
    launch<64>(job, qkv_map, stream);
  else
    launch<128>(job, qkv_map, stream);
}
