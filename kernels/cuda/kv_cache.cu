/* The paged KV cache: writing rows into pages, and the checks and launches of decoding. */
#include "kernels/cuda/kv_cache.h"

#include <algorithm>
#include <initializer_list>

#include "kernels/cuda/ops.h"

namespace {

enum { WRITE_THREADS = 256, WRITE_ROWS = 4 };

/* Rows of qkv and what of them is written: k heads, and v heads behind them, in packs. */
struct Written {
  int64_t n, q_stride, kv_at, slots;
  int n_kv_heads, dim, page_size;
  int packs; /* of a row */
  const int32_t *slot;
};

/* A thread moves one pack of k or v of PACK elements from each of WRITE_ROWS rows. Threads next to
 * each other have packs next to each other; with few packs to a row, a block has several rows. */
template <class T, int PACK>
__global__ void __launch_bounds__(WRITE_THREADS)
    write_kernel(Written w, const T *qkv, T *k_pages, T *v_pages) {
  struct alignas(sizeof(T) * PACK) Moved {
    T e[PACK];
  };
  wait_for_kernel_before();
  next_kernel_may_start();
  const int across = w.packs < WRITE_THREADS ? w.packs : WRITE_THREADS;
  const int down = WRITE_THREADS / across, y = static_cast<int>(threadIdx.x) / across;
  const int at = static_cast<int>(blockIdx.y) * across + static_cast<int>(threadIdx.x) % across;
  if (y >= down || at >= w.packs) return;
  const int of_k = w.packs / 2, j = (at < of_k ? at : at - of_k) * PACK, head = j / w.dim;
  T *pages = (at < of_k ? k_pages : v_pages) + j % w.dim;
  Moved moved[WRITE_ROWS];
  int to[WRITE_ROWS];
#pragma unroll
  for (int u = 0; u < WRITE_ROWS; u++) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * WRITE_ROWS + u) * down + y;
    to[u] = row < w.n ? w.slot[row] : -1;
    if (row < w.n)
      moved[u] = *reinterpret_cast<const Moved *>(qkv + row * w.q_stride + w.kv_at + at * PACK);
  }
#pragma unroll
  for (int u = 0; u < WRITE_ROWS; u++) {
    if (to[u] == -1) continue;
    if (to[u] < 0 || to[u] >= w.slots) __trap(); /* a broken contract */
    const int page = to[u] / w.page_size, in_page = to[u] - page * w.page_size;
    const int64_t row = (static_cast<int64_t>(page) * w.n_kv_heads + head) * w.page_size + in_page;
    *reinterpret_cast<Moved *>(pages + row * w.dim) = moved[u];
  }
}

void check_pages(AttnShape s, Tensor k_pages, Tensor v_pages) {
  for (Tensor t : {k_pages, v_pages}) {
    require(t.dtype == k_pages.dtype && t.ndim == 4);
    require(t.dim[0] == k_pages.dim[0] && t.dim[1] == k_pages.dim[1] && t.dim[1] > 0);
    require(t.dim[2] == s.n_kv_heads && t.dim[3] == s.head_dim);
  }
  require(k_pages.dim[0] * k_pages.dim[1] * s.n_kv_heads <= UINT32_MAX);
}

bool aligned(std::initializer_list<const void *> pointers) {
  for (const void *p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

bool is_ints(Tensor t, int64_t n) { return t.dtype == DT_I32 && t.ndim == 1 && t.dim[0] == n; }

}  // namespace

void cuda_kv_write(Device *d, Tensor qkv_NQ, Tensor slot_N, AttnShape s, Tensor k_pages,
                   Tensor v_pages) {
  int64_t n = qkv_NQ.dim[0], D = s.head_dim, width = s.n_kv_heads * D;
  require(qkv_NQ.ndim == 2 && qkv_NQ.dim[1] == s.n_heads * D + 2 * width && is_ints(slot_N, n));
  check_pages(s, k_pages, v_pages);
  require(k_pages.dtype == qkv_NQ.dtype);
  if (n * width == 0) return;
  cuda_by_type(qkv_NQ.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto launch = [&](auto kernel, int pack) {
      Written w = {n,
                   qkv_NQ.dim[1],
                   s.n_heads * D,
                   k_pages.dim[0] * k_pages.dim[1],
                   s.n_kv_heads,
                   s.head_dim,
                   static_cast<int>(k_pages.dim[1]),
                   static_cast<int>(2 * width / pack),
                   cuda_data<const int32_t>(slot_N)};
      int across = std::min<int>(w.packs, WRITE_THREADS), down = WRITE_THREADS / across;
      dim3 grid(static_cast<unsigned>(cuda_ceil(n, down * WRITE_ROWS)),
                static_cast<unsigned>(cuda_ceil(w.packs, across)));
      chain_launch(cuda_stream(d), kernel, grid, WRITE_THREADS, 0, 1, w, cuda_data<const T>(qkv_NQ),
                   cuda_data<T>(k_pages), cuda_data<T>(v_pages));
    };
    constexpr int PACK = Pack<T>::N;
    if (D % PACK == 0 && aligned({qkv_NQ.data, k_pages.data, v_pages.data}))
      launch(write_kernel<T, PACK>, PACK);
    else
      launch(write_kernel<T, 1>, 1);
  });
}

static Decode decode_of(Device *d, Tensor qkv_BQ, Tensor page_table_BP, Tensor len_B, AttnShape s,
                        Tensor k_pages, Tensor v_pages, Tensor out_BHD) {
  int64_t batch = qkv_BQ.dim[0], H = s.n_heads, D = s.head_dim, size = k_pages.dim[1];
  require(H > 0 && s.n_kv_heads > 0 && H % s.n_kv_heads == 0 && s.window >= 0 && s.scale > 0);
  require(qkv_BQ.ndim == 2 && qkv_BQ.dim[1] == (H + 2 * s.n_kv_heads) * D);
  require(page_table_BP.dtype == DT_I32 && page_table_BP.ndim == 2);
  require(page_table_BP.dim[0] == batch && is_ints(len_B, batch));
  require(out_BHD.dtype == qkv_BQ.dtype && out_BHD.ndim == 2 && out_BHD.dim[0] == batch);
  require(out_BHD.dim[1] == H * D && k_pages.dtype == qkv_BQ.dtype && batch <= 65535);
  check_pages(s, k_pages, v_pages);
  if (D < 1 || D > 256) die("decoding takes head sizes from 1 to 256, found %d", s.head_dim);
  int64_t capacity = page_table_BP.dim[1] * size, splits = cuda_ceil(capacity, KV_SPLIT);
  require(batch == 0 || (capacity > 0 && capacity <= INT32_MAX - KV_SPLIT));
  if (s.window > 0) splits = std::min<int64_t>(splits, (s.window - 1) / KV_SPLIT + 2);
  Decode a = {};
  a.n_heads = s.n_heads;
  a.n_kv_heads = s.n_kv_heads;
  a.group = s.n_heads / s.n_kv_heads;
  a.head_dim = s.head_dim;
  a.window = s.window;
  a.scale = s.scale;
  a.page_size = static_cast<int>(size);
  a.table_width = static_cast<int>(page_table_BP.dim[1]);
  a.splits = static_cast<int>(splits);
  a.sms = cuda_of(d)->sms;
  a.n_pages = k_pages.dim[0];
  a.q_stride = qkv_BQ.dim[1];
  a.qkv = qkv_BQ.data;
  a.k_pages = k_pages.data;
  a.v_pages = v_pages.data;
  a.table = cuda_data<const int32_t>(page_table_BP);
  a.len = cuda_data<const int32_t>(len_B);
  a.out = out_BHD.data;
  if (splits > 1 && batch > 0) {
    int64_t parts = batch * H * splits;
    a.part_out =
        static_cast<float *>(cuda_scratch(d, sizeof(float) * static_cast<size_t>(parts * (D + 2))));
    a.part_stat = a.part_out + parts * D;
  }
  return a;
}

static bool in_packs(const Decode &a) {
  return a.head_dim % 8 == 0 && aligned({a.qkv, a.k_pages, a.v_pages, a.out});
}

void cuda_attention_decode(Device *d, Tensor qkv_BQ, Tensor page_table_BP, Tensor len_B,
                           AttnShape s, Tensor k_pages, Tensor v_pages, Tensor out_BHD) {
  Decode a = decode_of(d, qkv_BQ, page_table_BP, len_B, s, k_pages, v_pages, out_BHD);
  int64_t batch = qkv_BQ.dim[0];
  if (batch == 0) return;
  if (qkv_BQ.dtype == DT_BF16 && in_packs(a))
    decode_mma(cuda_stream(d), a, nullptr, batch);
  else
    decode_plain(cuda_stream(d), qkv_BQ.dtype, a, batch);
  if (a.splits > 1) decode_combine(cuda_stream(d), qkv_BQ.dtype, a, batch);
}

void cuda_decode_attend(Device *d, DecodeRows r, Tensor qkv_BQ, Tensor cos_Pr, Tensor sin_Pr,
                        AttnShape s, Tensor k_pages, Tensor v_pages, Tensor out_BHD) {
  Decode a = decode_of(d, qkv_BQ, r.table_BP, r.len_B, s, k_pages, v_pages, out_BHD);
  int64_t batch = qkv_BQ.dim[0], turn = cos_Pr.data ? cos_Pr.dim[1] : 0;
  if (batch == 0) return;
  if (qkv_BQ.dtype != DT_BF16 || !in_packs(a) || turn % 8 != 0) {
    cuda_rope_write(d, qkv_BQ, r.position_B, cos_Pr, sin_Pr, s, r.slot_B, k_pages, v_pages);
    cuda_attention_decode(d, qkv_BQ, r.table_BP, r.len_B, s, k_pages, v_pages, out_BHD);
    return;
  }
  require(is_ints(r.slot_B, batch) && 2 * turn <= s.head_dim);
  Newest n = {};
  n.slot = cuda_data<const int32_t>(r.slot_B);
  if (turn > 0) {
    require(is_ints(r.position_B, batch) && cos_Pr.ndim == 2 && sin_Pr.ndim == 2);
    require(sin_Pr.dim[0] == cos_Pr.dim[0] && sin_Pr.dim[1] == turn);
    n.position = cuda_data<const int32_t>(r.position_B);
    n.cos = cuda_data<const float>(cos_Pr);
    n.sin = cuda_data<const float>(sin_Pr);
    n.half = static_cast<int>(turn);
    n.places = cos_Pr.dim[0];
  }
  decode_mma(cuda_stream(d), a, &n, batch);
  if (a.splits > 1) decode_combine(cuda_stream(d), DT_BF16, a, batch);
}
