/* Element-wise ops and sums. A sum's partial results and their order depend on shapes and the
 * GPU's size only. */
#include "kernels/cuda/columns.h"

/* ---- biases ---- */

enum { BIAS_THREADS = 256, BIAS_UNROLL = 4 };

/* In place; per_row accesses of V elements make a row. */
template <class T, int V>
__global__ void __launch_bounds__(BIAS_THREADS)
    bias_add_kernel(int64_t accesses, int64_t per_row, T *x, const T *b) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * BIAS_UNROLL * BIAS_THREADS + threadIdx.x;
  Raw<T, V> rx[BIAS_UNROLL], rb[BIAS_UNROLL];
#pragma unroll
  for (int u = 0; u < BIAS_UNROLL; u++) {
    int64_t i = first + u * BIAS_THREADS;
    if (i >= accesses) continue;
    rx[u] = raw_load<T, V>(x + i * V);
    rb[u] = raw_load<T, V>(b + i % per_row * V);
  }
#pragma unroll
  for (int u = 0; u < BIAS_UNROLL; u++) {
    int64_t i = first + u * BIAS_THREADS;
    if (i >= accesses) return;
    Floats<V> xf = floats_of<T, V>(rx[u]), bf = floats_of<T, V>(rb[u]);
#pragma unroll
    for (int k = 0; k < V; k++) xf.v[k] += bf.v[k];
    floats_store<T, V>(x + i * V, xf);
  }
}

template <class T, int V>
static void bias_add(Device *d, Tensor x_NC, Tensor b_C) {
  int64_t accesses = tensor_numel(x_NC) / V;
  unsigned grid = grid_of(cuda_ceil(accesses, BIAS_UNROLL * BIAS_THREADS));
  bias_add_kernel<T, V><<<grid, BIAS_THREADS, 0, cuda_stream(d)>>>(
      accesses, x_NC.dim[1] / V, cuda_data<T>(x_NC), cuda_data<T>(b_C));
  CUDA_LAUNCHED();
}

void cuda_bias_add(Device *d, Tensor x_NC, Tensor b_C) {
  require(x_NC.ndim == 2 && is_1d(b_C, x_NC.dtype, x_NC.dim[1]));
  if (tensor_numel(x_NC) == 0) return;
  bool fits = is_wide(x_NC.dtype, x_NC.dim[1]) && are_aligned(x_NC, b_C);
  cuda_by_type(x_NC.dtype, [&]<class T>(T) {
    fits ? bias_add<T, wide<T>>(d, x_NC, b_C) : bias_add<T, 1>(d, x_NC, b_C);
  });
}

template <class T, int V>
struct MatrixTerms {
  const T *x;
  int64_t c;
  using Read = Raw<T, V>;
  __device__ Read read(int64_t row, int64_t column) const {
    return raw_load<T, V>(x + row * c + column);
  }
  __device__ Floats<V> terms(Read r) const { return floats_of<T, V>(r); }
};

void cuda_bias_grad(Device *d, Tensor dy_NC, Tensor db_C) {
  int64_t n = dy_NC.dim[0], c = dy_NC.dim[1];
  require(dy_NC.ndim == 2 && is_f32_1d(db_C, c));
  bool fits = is_wide(dy_NC.dtype, c) && are_aligned(dy_NC);
  cuda_by_type(dy_NC.dtype, [&]<class T>(T) {
    constexpr int V = wide<T>;
    const T *dy = cuda_data<T>(dy_NC);
    fits ? cuda_column_sums<V>(d, n, c, MatrixTerms<T, V>{dy, c}, tensor_f32(db_C))
         : cuda_column_sums<1>(d, n, c, MatrixTerms<T, 1>{dy, c}, tensor_f32(db_C));
  });
}

/* ---- sums ---- */

/* A warp takes 32 columns and every PARTIAL_WARPS-th row; the warps' sums are added in order. */
enum { PARTIAL_WARPS = 32 };
__global__ void __launch_bounds__(32 * PARTIAL_WARPS)
    sum_partials_kernel(int64_t width, PartialSum first, PartialSum second) {
  __shared__ float part[PARTIAL_WARPS][32];
  const PartialSum s = blockIdx.y == 0 ? first : second;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t j = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float sum = 0, old = 0;
  wait_for_kernel_before();
  let_next_kernel_start();
  if (j < width) {
    if (warp == 0) old = s.out[j]; /* together with the rest */
#pragma unroll 8
    for (int64_t i = warp; i < s.count; i += PARTIAL_WARPS) sum += s.partial[i * s.stride + j];
  }
  part[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || j >= width) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < PARTIAL_WARPS; w++) total += part[w][lane];
  s.out[j] = old + total;
}

void cuda_sum_partials(Device *d, int64_t width, PartialSum first, PartialSum second) {
  if (width == 0) return;
  dim3 grid(grid_of(cuda_ceil(width, 32)), second.count > 0 ? 2 : 1);
  launch_behind(d, grid, 32 * PARTIAL_WARPS, 0, sum_partials_kernel, width, first, second);
}

enum { SQUARE_THREADS = 256, SQUARE_UNROLL = 4 };

template <int V>
__device__ inline void add_squares(const Floats<V> &x, double *sum) {
#pragma unroll
  for (int k = 0; k < V; k++) {
    double v = static_cast<double>(x.v[k]);
    sum[k % SQUARE_UNROLL] += v * v;
  }
}

/* head elements, then `accesses` whole ones of 16 bytes, then the rest up to n. */
template <class T>
__global__ void __launch_bounds__(SQUARE_THREADS)
    sum_squares_kernel(const T *x, int64_t head, int64_t accesses, int64_t n, double *partial) {
  constexpr int V = wide<T>;
  int64_t thread = static_cast<int64_t>(blockIdx.x) * SQUARE_THREADS + threadIdx.x;
  int64_t threads = static_cast<int64_t>(gridDim.x) * SQUARE_THREADS;
  double sum[SQUARE_UNROLL] = {};
  int64_t i = thread;
  for (; i + (SQUARE_UNROLL - 1) * threads < accesses; i += SQUARE_UNROLL * threads) {
    Raw<T, V> raw[SQUARE_UNROLL];
#pragma unroll
    for (int u = 0; u < SQUARE_UNROLL; u++)
      raw[u] = raw_load<T, V>(x + head + (i + u * threads) * V);
#pragma unroll
    for (int u = 0; u < SQUARE_UNROLL; u++) add_squares<V>(floats_of<T, V>(raw[u]), sum);
  }
  for (; i < accesses; i += threads) add_squares<V>(floats_load<T, V>(x + head + i * V), sum);
  for (i = thread; i < head; i += threads) add_squares<1>(floats_load<T, 1>(x + i), sum);
  for (i = head + accesses * V + thread; i < n; i += threads)
    add_squares<1>(floats_load<T, 1>(x + i), sum);
  double total = block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(SQUARE_THREADS)
    sum_doubles_kernel(const double *partial, int64_t count, double *result) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += SQUARE_THREADS) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *result = sum;
}

double cuda_sum_squares(Device *d, Tensor x) {
  enum { BLOCKS_PER_SM = 8 };
  int64_t n = tensor_numel(x);
  if (n == 0) return 0;
  double *partial = nullptr, result = 0;
  cuda_by_type(x.dtype, [&]<class T>(T) {
    int64_t head = elements_to_alignment(cuda_data<T>(x), n), accesses = (n - head) / wide<T>;
    int64_t most = static_cast<int64_t>(cuda_of(d)->sms) * BLOCKS_PER_SM;
    int64_t blocks = cuda_ceil(n, SQUARE_THREADS * wide<T>);
    blocks = blocks < most ? blocks : most;
    partial =
        static_cast<double *>(cuda_scratch(d, sizeof(double) * static_cast<size_t>(blocks + 1)));
    sum_squares_kernel<<<grid_of(blocks), SQUARE_THREADS, 0, cuda_stream(d)>>>(
        cuda_data<T>(x), head, accesses, n, partial + 1);
    CUDA_LAUNCHED();
    sum_doubles_kernel<<<1, SQUARE_THREADS, 0, cuda_stream(d)>>>(partial + 1, blocks, partial);
    CUDA_LAUNCHED();
  });
  device_download(d, &result, partial, sizeof result);
  return result;
}

/* ---- y from x and y ---- */

struct Axpy {
  float alpha;
  __device__ float operator()(float x, float y) const { return y + alpha * x; }
};
void cuda_axpy(Device *d, float alpha, Tensor x, Tensor y) {
  require(x.dtype == y.dtype && tensor_numel(y) == tensor_numel(x));
  cuda_map<true>(d, x, y, y, Axpy{alpha});
}

struct Scale {
  float alpha;
  __device__ float operator()(float x, float) const { return alpha * x; }
};
void cuda_scale(Device *d, float alpha, Tensor x) {
  if (alpha == 0) /* 0 x NaN is NaN, but a cleared tensor is 0 */
    device_zero(d, x.data, tensor_bytes(x));
  else
    cuda_map<false>(d, x, x, x, Scale{alpha});
}

struct Lerp {
  float w;
  __device__ float operator()(float x, float y) const { return w * y + (1.0f - w) * x; }
};
void cuda_lerp(Device *d, float w, Tensor x, Tensor y) {
  require(x.dtype == y.dtype && tensor_numel(y) == tensor_numel(x));
  cuda_map<true>(d, x, y, y, Lerp{w});
}
