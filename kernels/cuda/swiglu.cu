/* SwiGLU (Shazeer 2020): y = silu(g) u with g and u side by side in one row. */
#include "kernels/cuda/math.h"
#include "kernels/cuda/rows.h"

enum { SWIGLU_THREADS = 256, SWIGLU_UNROLL = 2 };

/* The thread's accesses of y: `accesses` of them, per_row in a row of f = per_row V elements. */
template <class T, int V>
__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_fwd_kernel(int64_t accesses, int64_t per_row, const T *gu, T *y) {
  int64_t first = block_from_end() * SWIGLU_UNROLL * SWIGLU_THREADS + threadIdx.x;
  Raw<T, V> g[SWIGLU_UNROLL], u[SWIGLU_UNROLL];
#pragma unroll
  for (int k = 0; k < SWIGLU_UNROLL; k++) {
    int64_t i = first + k * SWIGLU_THREADS;
    if (i >= accesses) continue;
    const T *at = gu + (i + i / per_row * per_row) * V; /* a row of gu is two of y */
    g[k] = raw_load<T, V>(at);
    u[k] = raw_load<T, V>(at + per_row * V);
  }
#pragma unroll
  for (int k = 0; k < SWIGLU_UNROLL; k++) {
    int64_t i = first + k * SWIGLU_THREADS;
    if (i >= accesses) return;
    Floats<V> gf = floats_of<T, V>(g[k]), uf = floats_of<T, V>(u[k]);
#pragma unroll
    for (int e = 0; e < V; e++) gf.v[e] = gf.v[e] * sigmoid_f32(gf.v[e]) * uf.v[e];
    floats_store<T, V>(y + i * V, gf);
  }
}

/* d silu(g) / dg = s + g s (1 - s), s = sigmoid(g). */
template <class T, int V>
__global__ void __launch_bounds__(SWIGLU_THREADS)
    swiglu_bwd_kernel(int64_t accesses, int64_t per_row, const T *dy, const T *gu, T *dgu, T *y) {
  int64_t first = block_from_end() * SWIGLU_UNROLL * SWIGLU_THREADS + threadIdx.x;
  Raw<T, V> g[SWIGLU_UNROLL], u[SWIGLU_UNROLL], r[SWIGLU_UNROLL];
#pragma unroll
  for (int k = 0; k < SWIGLU_UNROLL; k++) {
    int64_t i = first + k * SWIGLU_THREADS;
    if (i >= accesses) continue;
    const T *at = gu + (i + i / per_row * per_row) * V;
    g[k] = raw_load<T, V>(at);
    u[k] = raw_load<T, V>(at + per_row * V);
    r[k] = raw_load<T, V>(dy + i * V);
  }
#pragma unroll
  for (int k = 0; k < SWIGLU_UNROLL; k++) {
    int64_t i = first + k * SWIGLU_THREADS;
    if (i >= accesses) return;
    Floats<V> gf = floats_of<T, V>(g[k]), uf = floats_of<T, V>(u[k]), d = floats_of<T, V>(r[k]), yf;
#pragma unroll
    for (int e = 0; e < V; e++) {
      float s = sigmoid_f32(gf.v[e]), du = d.v[e] * gf.v[e] * s;
      yf.v[e] = gf.v[e] * s * uf.v[e];
      gf.v[e] = d.v[e] * uf.v[e] * s * (1.0f + gf.v[e] * (1.0f - s));
      uf.v[e] = du;
    }
    if (y) floats_store<T, V>(y + i * V, yf);
    T *to = dgu + (i + i / per_row * per_row) * V;
    floats_store<T, V>(to, gf);
    floats_store<T, V>(to + per_row * V, uf);
  }
}

static unsigned swiglu_grid(int64_t accesses) {
  return grid_of(cuda_ceil(accesses, SWIGLU_UNROLL * SWIGLU_THREADS));
}

template <class T, int V>
static void swiglu_fwd(Device *d, Tensor gu, Tensor y) {
  int64_t accesses = tensor_numel(y) / V;
  swiglu_fwd_kernel<T, V><<<swiglu_grid(accesses), SWIGLU_THREADS, 0, cuda_stream(d)>>>(
      accesses, y.dim[1] / V, cuda_data<T>(gu), cuda_data<T>(y));
  CUDA_LAUNCHED();
}

void cuda_swiglu_fwd(Device *d, Tensor gu_N2F, Tensor y_NF) {
  int64_t n = y_NF.dim[0], f = y_NF.dim[1];
  require(y_NF.ndim == 2 && is_2d(gu_N2F, y_NF.dtype, n, 2 * f));
  if (n * f == 0) return;
  bool fits = is_wide(y_NF.dtype, f) && are_aligned(gu_N2F, y_NF);
  cuda_by_type(y_NF.dtype, [&]<class T>(T) {
    fits ? swiglu_fwd<T, wide<T>>(d, gu_N2F, y_NF) : swiglu_fwd<T, 1>(d, gu_N2F, y_NF);
  });
}

template <class T, int V>
static void swiglu_bwd(Device *d, Tensor dy, Tensor gu, Tensor dgu, Tensor y) {
  int64_t accesses = tensor_numel(dy) / V;
  swiglu_bwd_kernel<T, V><<<swiglu_grid(accesses), SWIGLU_THREADS, 0, cuda_stream(d)>>>(
      accesses, dy.dim[1] / V, cuda_data<T>(dy), cuda_data<T>(gu), cuda_data<T>(dgu),
      cuda_data<T>(y));
  CUDA_LAUNCHED();
}

void cuda_swiglu_bwd(Device *d, Tensor dy_NF, Tensor gu_N2F, Tensor dgu_N2F, Tensor y_NF) {
  int64_t n = dy_NF.dim[0], f = dy_NF.dim[1];
  DType t = dy_NF.dtype;
  require(dy_NF.ndim == 2 && is_2d(gu_N2F, t, n, 2 * f) && is_2d(dgu_N2F, t, n, 2 * f));
  require(!y_NF.data || is_2d(y_NF, t, n, f));
  if (n * f == 0) return;
  bool fits = is_wide(t, f) && are_aligned(dy_NF, gu_N2F, dgu_N2F, y_NF);
  cuda_by_type(t, [&]<class T>(T) {
    fits ? swiglu_bwd<T, wide<T>>(d, dy_NF, gu_N2F, dgu_N2F, y_NF)
         : swiglu_bwd<T, 1>(d, dy_NF, gu_N2F, dgu_N2F, y_NF);
  });
}
