/* Rotary position embedding (Su et al. 2021), half-split pairs as in Hugging Face's Llama. */
#include <cassert>

#include "kernels/cuda/rows.h"

struct Rope {
  int64_t n, row; /* tokens; elements of a row of qkv */
  int heads, head_dim, pairs, positions;
  int lanes, teams; /* threads for the pairs of one head; and for heads next to each other */
  float sign;
  const int32_t *position;
  const float *cos, *sin;
};

/* V floats of a table, 16 bytes at a time where V allows it. */
template <int V>
__device__ inline Floats<V> angles_load(const float *p) {
  constexpr int W = V % 4 == 0 ? 4 : 1;
  Floats<V> f;
#pragma unroll
  for (int i = 0; i < V; i += W) {
    Floats<W> few = floats_load<float, W>(p + i);
#pragma unroll
    for (int k = 0; k < W; k++) f.v[i + k] = few.v[k];
  }
  return f;
}

enum { ROPE_THREADS = 256, ROPE_HEADS = 2 };

/* A thread turns V pairs of several heads of one token by the same angles: those of `team`,
 * `team + teams`, and so on. */
template <class T, int V>
__global__ void __launch_bounds__(ROPE_THREADS) rope_kernel(Rope a, T *qkv) {
  int64_t i = block_from_end() * ROPE_THREADS + threadIdx.x;
  int64_t row = i / (a.lanes * a.teams);
  if (row >= a.n) return;
  int rest = static_cast<int>(i - row * (a.lanes * a.teams));
  int team = rest / a.lanes, first = (rest - team * a.lanes) * V;
  int position = a.position[row];
  assert(position >= 0 && position < a.positions);
  Floats<V> cs = angles_load<V>(a.cos + static_cast<int64_t>(position) * a.pairs + first);
  Floats<V> sn = angles_load<V>(a.sin + static_cast<int64_t>(position) * a.pairs + first);
  T *base = qkv + row * a.row + first;
  Raw<T, V> x[ROPE_HEADS], y[ROPE_HEADS];
#pragma unroll
  for (int h = 0; h < ROPE_HEADS; h++) {
    int64_t head = team + h * a.teams;
    if (head >= a.heads) continue;
    x[h] = raw_load<T, V>(base + head * a.head_dim);
    y[h] = raw_load<T, V>(base + head * a.head_dim + a.pairs);
  }
#pragma unroll
  for (int h = 0; h < ROPE_HEADS; h++) {
    int64_t head = team + h * a.teams;
    if (head >= a.heads) return;
    Floats<V> xf = floats_of<T, V>(x[h]), yf = floats_of<T, V>(y[h]);
#pragma unroll
    for (int k = 0; k < V; k++) {
      float p = xf.v[k], q = yf.v[k], sine = a.sign * sn.v[k];
      xf.v[k] = p * cs.v[k] - q * sine;
      yf.v[k] = q * cs.v[k] + p * sine;
    }
    floats_store<T, V>(base + head * a.head_dim, xf);
    floats_store<T, V>(base + head * a.head_dim + a.pairs, yf);
  }
}

template <class T, int V>
static void rope(Device *d, Rope a, Tensor qkv_NQ) {
  a.lanes = a.pairs / V;
  a.teams = static_cast<int>(cuda_ceil(a.heads, ROPE_HEADS));
  unsigned grid = grid_of(cuda_ceil(a.n * a.lanes * a.teams, ROPE_THREADS));
  rope_kernel<T, V><<<grid, ROPE_THREADS, 0, cuda_stream(d)>>>(a, cuda_data<T>(qkv_NQ));
  CUDA_LAUNCHED();
}

void cuda_rope(Device *d, Tensor qkv_NQ, Tensor positions_N, Tensor cos_Pr, Tensor sin_Pr,
               AttnShape s, bool inverse) {
  int64_t n = qkv_NQ.dim[0], q = qkv_NQ.dim[1], pairs = cos_Pr.dim[1], p = cos_Pr.dim[0];
  int heads = s.n_heads + s.n_kv_heads; /* q and k heads lie next to each other */
  DType t = qkv_NQ.dtype;
  require(qkv_NQ.ndim == 2 && q == static_cast<int64_t>(heads + s.n_kv_heads) * s.head_dim);
  require(is_i32_1d(positions_N, n) && p <= INT32_MAX && 2 * pairs <= s.head_dim);
  require(is_2d(cos_Pr, DT_F32, p, pairs) && is_2d(sin_Pr, DT_F32, p, pairs));
  if (n == 0 || pairs == 0 || heads == 0) return;
  Rope a = {n,
            q,
            heads,
            s.head_dim,
            static_cast<int>(pairs),
            static_cast<int>(p),
            0,
            0,
            inverse ? -1.0f : 1.0f,
            tensor_i32(positions_N),
            tensor_f32(cos_Pr),
            tensor_f32(sin_Pr)};
  bool fits = are_aligned(qkv_NQ, cos_Pr, sin_Pr) && is_wide(t, pairs) && is_wide(t, s.head_dim);
  cuda_by_type(
      t, [&]<class T>(T) { fits ? rope<T, wide<T>>(d, a, qkv_NQ) : rope<T, 1>(d, a, qkv_NQ); });
}
