/* Gradient of attention on tensor cores. With p = exp(scale q.k - lse) and delta = dout.out:
 * dv = sum p dout,  ds = p (dout.v - delta),  dk = scale sum ds q,  dq = scale sum ds k.
 *
 * Two kernels, so that every sum has one owner and one order: in keys_kernel tiles of keys stay and
 * the queries of all heads of their group pass by, one head after the other; in queries_kernel
 * tiles of queries stay and keys pass by. Both compute the weights again. A warp owns 16 of the
 * rows that stay; what passes by is copied ahead. */
#include "kernels/cuda/attention_own_tile.h"

namespace {

/* COLUMNS of dk and dv that a warp sums: of a large head two warps share 16 keys. BLOCKS run on a
 * multiprocessor at once: what one computes hides what another waits for. */
template <int D>
struct KeysShape {
  static constexpr int WARPS = D > 128 ? 8 : 4, THREADS = 32 * WARPS, PARTS = D > 128 ? 2 : 1;
  static constexpr int BLOCKS = D > 128 ? 1 : D > 64 ? 2 : 4;
  static constexpr int COLUMNS = D / PARTS, KEYS = 16 * WARPS / PARTS, ROWS = 32;
  static constexpr int KV = KEYS * TileStride<D>::value, Q = ROWS * TileStride<D>::value;
  static constexpr size_t SHARED = sizeof(bf16) * (2 * KV + 4 * Q) + sizeof(float) * 4 * ROWS;
};
template <int D>
struct QueriesShape {
  static constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = 16 * WARPS, KEYS = 32;
  static constexpr int BLOCKS = D > 128 ? 1 : D > 64 ? 3 : 4;
  static constexpr int Q = ROWS * TileStride<D>::value, KV = KEYS * TileStride<D>::value;
  static constexpr size_t SHARED = sizeof(bf16) * (2 * Q + 4 * KV);
};

__device__ inline const bf16 *sequence_qkv(const OwnAttention &a, int64_t start) {
  return static_cast<const bf16 *>(a.qkv) + start * a.q_stride;
}

template <int D>
__global__ __launch_bounds__(KeysShape<D>::THREADS,
                             KeysShape<D>::BLOCKS) void keys_kernel(OwnAttention a) {
  using S = KeysShape<D>;
  constexpr int STRIDE = TileStride<D>::value;
  extern __shared__ __align__(16) unsigned char shared[];
  bf16 *k_tile = reinterpret_cast<bf16 *>(shared), *v_tile = k_tile + S::KV,
       *queries = v_tile + S::KV;
  float *rows_lse =
      reinterpret_cast<float *>(queries + 4 * S::Q); /* [2 stages][lse, delta][ROWS] */
  int kv_head = static_cast<int>(blockIdx.x) % a.n_kv_heads, dim = a.head_dim,
      group = a.n_heads / a.n_kv_heads;
  int64_t out_stride = static_cast<int64_t>(a.n_heads) * dim;
  OwnTile t = own_tile(a, S::KEYS, static_cast<int>(blockIdx.x) / a.n_kv_heads, false);
  int keys = min(S::KEYS, t.len - t.first), head0 = kv_head * group;
  const bf16 *base = sequence_qkv(a, t.start),
             *dout = static_cast<const bf16 *>(a.dout) + t.start * out_stride;
  int q_first = t.first / S::ROWS * S::ROWS;
  int q_end = own_end_query(t.first + keys - 1, a.window, t.len);
  int tiles = (q_end - q_first + S::ROWS - 1) / S::ROWS, steps = tiles * group;

  auto copy_queries = [&](int step) {
    int h = head0 + step / tiles, q = q_first + step % tiles * S::ROWS, n = min(S::ROWS, t.len - q);
    bf16 *to = queries + step % 2 * 2 * S::Q;
    tile_copy<D, S::ROWS, S::THREADS>(to, base + q * a.q_stride + h * dim, a.q_stride, n, dim);
    tile_copy<D, S::ROWS, S::THREADS>(to + S::Q, dout + q * out_stride + h * dim, out_stride, n,
                                      dim);
    int i = static_cast<int>(threadIdx.x);
    if (i < 2 * S::ROWS) {
      const float *from = i < S::ROWS ? a.lse : a.delta;
      int row = i % S::ROWS;
      copy_async_4(rows_lse + step % 2 * 2 * S::ROWS + i,
                   from + (t.start + q + (row < n ? row : 0)) * a.n_heads + h, row < n);
    }
    copy_async_commit();
  };
  const bf16 *k_head = base + t.first * a.q_stride + (a.n_heads + kv_head) * dim;
  tile_copy<D, S::KEYS, S::THREADS>(k_tile, k_head, a.q_stride, keys, dim);
  tile_copy<D, S::KEYS, S::THREADS>(v_tile, k_head + a.n_kv_heads * dim, a.q_stride, keys, dim);
  copy_queries(0);

  int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int row0 = warp / S::PARTS * 16, column0 = warp % S::PARTS * S::COLUMNS, key = t.first + row0;
  float scale2 = a.scale * 1.44269504f, dk[S::COLUMNS / 8][4], dv[S::COLUMNS / 8][4];
  tile_clear(dk);
  tile_clear(dv);
  for (int step = 0; step < steps; step++) {
    copy_async_wait<0>();
    __syncthreads();
    if (step + 1 < steps) copy_queries(step + 1);
    int q = q_first + step % tiles * S::ROWS;
    if (q + S::ROWS <= key) continue; /* all of them lie before this warp's keys */
    const bf16 *q_tile = queries + step % 2 * 2 * S::Q, *dout_tile = q_tile + S::Q;
    const float *lse = rows_lse + step % 2 * 2 * S::ROWS, *delta = lse + S::ROWS;
    float p[S::ROWS / 8][4], ds[S::ROWS / 8][4]; /* [16 keys, ROWS queries] */
    tile_clear(p);
    tile_dot<D, S::ROWS>(p, k_tile + row0 * STRIDE, q_tile);
    bool whole = q + S::ROWS <= t.len && own_sees_all(q, S::ROWS, key, 16, a.window);
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int column = 8 * j + lane % 4 * 2 + i % 2;
        float w = exp2_fast(p[j][i] * scale2 - lse[column] * 1.44269504f);
        bool sees = whole || (q + column < t.len &&
                              own_sees(q + column, key + lane / 4 + i / 2 * 8, a.window));
        p[j][i] = sees ? w : 0;
      }
    tile_add<D, S::ROWS, S::COLUMNS>(dv, p, dout_tile + column0);
    tile_clear(ds);
    tile_dot<D, S::ROWS>(ds, v_tile + row0 * STRIDE, dout_tile);
#pragma unroll
    for (int j = 0; j < S::ROWS / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float g = p[j][i] * (ds[j][i] - delta[8 * j + lane % 4 * 2 + i % 2]);
        bool sees = whole || p[j][i] != 0; /* 0 by choice, not by product with what may be NaN */
        ds[j][i] = sees ? g : 0;
      }
    tile_add<D, S::ROWS, S::COLUMNS>(dk, ds, q_tile + column0);
  }
  __syncthreads(); /* of a large head two warps read the same keys */
  int64_t at = (t.start + key) * a.q_stride + (a.n_heads + kv_head) * dim;
  bf16 *to = static_cast<bf16 *>(a.dqkv_w) + at;
  float scale[2] = {a.scale, a.scale}, one[2] = {1, 1};
  tile_store<D, S::COLUMNS>(dk, scale, k_tile + row0 * STRIDE, column0, to, a.q_stride, keys - row0,
                            dim);
  tile_store<D, S::COLUMNS>(dv, one, v_tile + row0 * STRIDE, column0, to + a.n_kv_heads * dim,
                            a.q_stride, keys - row0, dim);
}

template <int D>
__global__ __launch_bounds__(QueriesShape<D>::THREADS,
                             QueriesShape<D>::BLOCKS) void queries_kernel(OwnAttention a) {
  using S = QueriesShape<D>;
  constexpr int STRIDE = TileStride<D>::value;
  extern __shared__ __align__(16) unsigned char shared[];
  bf16 *q_tile = reinterpret_cast<bf16 *>(shared), *dout_tile = q_tile + S::Q,
       *kv = dout_tile + S::Q;
  int h = static_cast<int>(blockIdx.x) % a.n_heads, dim = a.head_dim,
      kv_head = h / (a.n_heads / a.n_kv_heads);
  int64_t out_stride = static_cast<int64_t>(a.n_heads) * dim;
  OwnTile t = own_tile(a, S::ROWS, static_cast<int>(blockIdx.x) / a.n_heads, true);
  int rows = min(S::ROWS, t.len - t.first);
  const bf16 *base = sequence_qkv(a, t.start), *k_head = base + (a.n_heads + kv_head) * dim;
  const bf16 *v_head = k_head + a.n_kv_heads * dim;
  int first = own_first_key(t.first, a.window) / S::KEYS * S::KEYS, end = t.first + rows;
  auto copy_keys = [&](int key, int stage) {
    int n = min(S::KEYS, t.len - key);
    bf16 *to = kv + 2 * stage * S::KV;
    tile_copy<D, S::KEYS, S::THREADS>(to, k_head + key * a.q_stride, a.q_stride, n, dim);
    tile_copy<D, S::KEYS, S::THREADS>(to + S::KV, v_head + key * a.q_stride, a.q_stride, n, dim);
    copy_async_commit();
  };
  tile_copy<D, S::ROWS, S::THREADS>(q_tile, base + t.first * a.q_stride + h * dim, a.q_stride, rows,
                                    dim);
  tile_copy<D, S::ROWS, S::THREADS>(
      dout_tile, static_cast<const bf16 *>(a.dout) + (t.start + t.first) * out_stride + h * dim,
      out_stride, rows, dim);
  copy_keys(first, 0);

  int lane = static_cast<int>(threadIdx.x % 32), row0 = static_cast<int>(threadIdx.x / 32) * 16;
  int q = t.first + row0;
  float scale2 = a.scale * 1.44269504f, lse2[2] = {0, 0}, delta[2] = {0, 0}, dq[D / 8][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int r = row0 + lane / 4 + 8 * i;
    int64_t at = (t.start + t.first + r) * a.n_heads + h;
    if (r < rows) lse2[i] = a.lse[at] * 1.44269504f;
    if (r < rows) delta[i] = a.delta[at];
  }
  tile_clear(dq);
  for (int key = first, stage = 0; key < end; key += S::KEYS, stage ^= 1) {
    copy_async_wait<0>();
    __syncthreads();
    if (key + S::KEYS < end) copy_keys(key + S::KEYS, stage ^ 1);
    if (key > q + 15) continue; /* all of them lie behind this warp's queries */
    const bf16 *k_tile = kv + 2 * stage * S::KV, *v_tile = k_tile + S::KV;
    float p[S::KEYS / 8][4], ds[S::KEYS / 8][4];
    tile_clear(p);
    tile_clear(ds);
    tile_dot<D, S::KEYS>(p, q_tile + row0 * STRIDE, k_tile);
    tile_dot<D, S::KEYS>(ds, dout_tile + row0 * STRIDE, v_tile);
    bool whole = own_sees_all(q, 16, key, S::KEYS, a.window);
#pragma unroll
    for (int j = 0; j < S::KEYS / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float g = exp2_fast(p[j][i] * scale2 - lse2[i / 2]) * (ds[j][i] - delta[i / 2]);
        int column = key + 8 * j + lane % 4 * 2 + i % 2;
        ds[j][i] = whole || own_sees(q + lane / 4 + i / 2 * 8, column, a.window) ? g : 0;
      }
    tile_add<D, S::KEYS, D>(dq, ds, k_tile);
  }
  float scale[2] = {a.scale, a.scale};
  bf16 *to = static_cast<bf16 *>(a.dqkv_w) + (t.start + q) * a.q_stride + h * dim;
  tile_store<D, D>(dq, scale, q_tile + row0 * STRIDE, 0, to, a.q_stride, rows - row0, dim);
}

}  // namespace

void own_mma_bwd(cudaStream_t stream, const OwnAttention &a, Segments seg) {
  own_by_head(a.head_dim, [&](auto size) {
    constexpr int D = decltype(size)::value;
    using K = KeysShape<D>;
    using Q = QueriesShape<D>;
    own_allow_shared(keys_kernel<D>, K::SHARED);
    keys_kernel<D><<<own_blocks(seg, K::KEYS, a.n_kv_heads), K::THREADS, K::SHARED, stream>>>(a);
    CUDA_LAUNCHED();
    own_allow_shared(queries_kernel<D>, Q::SHARED);
    queries_kernel<D><<<own_blocks(seg, Q::ROWS, a.n_heads), Q::THREADS, Q::SHARED, stream>>>(a);
    CUDA_LAUNCHED();
  });
}
