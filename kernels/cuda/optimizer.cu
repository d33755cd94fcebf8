/* AdamW (Loshchilov & Hutter 2019), step for step as torch.optim.AdamW computes it. One pass: the
 * gradient's scale, both moments, the weight, and its copy in BF16. */
#include <cmath>

#include "kernels/cuda/rows.h"

enum { ADAM_THREADS = 256, ADAM_UNROLL = 2, QUAD = 4 };

struct AdamStep {
  float scale, beta1, beta2, eps; /* scale: of the gradient */
  float step, root2, keep;        /* lr / correction 1, sqrt(correction 2), 1 - lr * decay */
};

/* out may be absent. */
template <class G>
struct AdamArrays {
  float *w;
  const G *g;
  float *m, *v;
  __nv_bfloat16 *out;
};

__device__ inline void adam_element(const AdamStep &s, float g, float *w, float *m, float *v) {
  g *= s.scale;
  *m += (1.0f - s.beta1) * (g - *m);
  *v = s.beta2 * *v + (1.0f - s.beta2) * g * g;
  *w = s.keep * *w - s.step * *m / (sqrtf(*v) / s.root2 + s.eps);
}

/* Accesses of V elements. QUAD_OUT: out is aligned as the others are; otherwise it is written
 * element by element. */
template <class G, int V, bool QUAD_OUT>
__global__ void __launch_bounds__(ADAM_THREADS)
    adamw_kernel(AdamStep s, AdamArrays<G> a, int64_t n) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * ADAM_UNROLL * ADAM_THREADS + threadIdx.x) * V;
  Floats<V> w[ADAM_UNROLL], m[ADAM_UNROLL], v[ADAM_UNROLL];
  Raw<G, V> g[ADAM_UNROLL];
#pragma unroll
  for (int u = 0; u < ADAM_UNROLL; u++) {
    const int64_t i = first + u * ADAM_THREADS * V;
    if (i + V > n) continue;
    w[u] = floats_load<float, V>(a.w + i);
    g[u] = raw_load<G, V>(a.g + i);
    m[u] = floats_load<float, V>(a.m + i);
    v[u] = floats_load<float, V>(a.v + i);
  }
#pragma unroll
  for (int u = 0; u < ADAM_UNROLL; u++) {
    const int64_t i = first + u * ADAM_THREADS * V;
    if (i + V > n) return;
    Floats<V> gf = floats_of<G, V>(g[u]);
#pragma unroll
    for (int k = 0; k < V; k++) adam_element(s, gf.v[k], &w[u].v[k], &m[u].v[k], &v[u].v[k]);
    floats_store<float, V>(a.w + i, w[u]);
    floats_store<float, V>(a.m + i, m[u]);
    floats_store<float, V>(a.v + i, v[u]);
    if (!a.out) continue;
    if constexpr (QUAD_OUT) {
      floats_store<__nv_bfloat16, V>(a.out + i, w[u]);
    } else {
#pragma unroll
      for (int k = 0; k < V; k++) a.out[i + k] = from_float<__nv_bfloat16>(w[u].v[k]);
    }
  }
}

template <class G>
static AdamArrays<G> behind(AdamArrays<G> a, int64_t n) {
  return {a.w + n, a.g + n, a.m + n, a.v + n, a.out ? a.out + n : nullptr};
}

template <class G, int V, bool QUAD_OUT>
static void adamw_launch(Device *d, AdamStep s, AdamArrays<G> a, int64_t n) {
  if (n == 0) return;
  unsigned grid = grid_of(cuda_ceil(n, ADAM_UNROLL * ADAM_THREADS * V));
  adamw_kernel<G, V, QUAD_OUT><<<grid, ADAM_THREADS, 0, cuda_stream(d)>>>(s, a, n);
  CUDA_LAUNCHED();
}

/* Whether an access of four elements at p would be aligned. */
template <class T>
static bool is_at_quad(const T *p) {
  return reinterpret_cast<uintptr_t>(p) % (QUAD * sizeof(T)) == 0;
}

/* Shards begin anywhere, all at the same element: the elements before the first aligned one, and
 * behind the last four, go one by one. */
template <class G>
static void adamw(Device *d, AdamStep s, AdamArrays<G> a, int64_t n) {
  int64_t head = elements_to_alignment(a.w, n), body = (n - head) / QUAD * QUAD;
  AdamArrays<G> middle = behind(a, head);
  if (!is_at_quad(middle.g) || !is_at_quad(middle.m) || !is_at_quad(middle.v)) head = n, body = 0;
  adamw_launch<G, 1, true>(d, s, a, head);
  if (is_at_quad(middle.out))
    adamw_launch<G, QUAD, true>(d, s, middle, body);
  else
    adamw_launch<G, QUAD, false>(d, s, middle, body);
  adamw_launch<G, 1, true>(d, s, behind(a, head + body), n - head - body);
}

void cuda_adamw(Device *d, AdamW p, Tensor w, Tensor g, Tensor m, Tensor v, Tensor out) {
  int64_t n = tensor_numel(w);
  require(w.dtype == DT_F32 && m.dtype == DT_F32 && v.dtype == DT_F32);
  require(tensor_numel(g) == n && tensor_numel(m) == n && tensor_numel(v) == n && p.t >= 1);
  require(!out.data || (out.dtype == DT_BF16 && tensor_numel(out) == n));
  double correct1 = 1.0 - std::pow(static_cast<double>(p.beta1), static_cast<double>(p.t));
  double correct2 = 1.0 - std::pow(static_cast<double>(p.beta2), static_cast<double>(p.t));
  AdamStep s = {
      p.grad_scale,
      p.beta1,
      p.beta2,
      p.eps,
      static_cast<float>(static_cast<double>(p.lr) / correct1),
      static_cast<float>(std::sqrt(correct2)),
      static_cast<float>(1.0 - static_cast<double>(p.lr) * static_cast<double>(p.weight_decay))};
  cuda_by_type(g.dtype, [&]<class G>(G) {
    adamw<G>(d, s,
             {tensor_f32(w), cuda_data<G>(g), tensor_f32(m), tensor_f32(v),
              cuda_data<__nv_bfloat16>(out)},
             n);
  });
}
