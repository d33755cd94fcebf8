/* What the ops that stream memory share: elements as raw words and as floats, shape checks, the
 * element-wise kernel, and sums of partial rows.
 *
 * Each kernel is written once for V elements per access: 16 bytes wide where addresses allow it,
 * and V = 1 for every other shape. Raw words stay in registers while they wait: BF16 needs half of
 * what its floats would. */
#ifndef KERNELS_CUDA_ROWS_H
#define KERNELS_CUDA_ROWS_H

#include "kernels/cuda/ops.h"

template <int BYTES>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<2> {
  using type = unsigned short;
};

/* V elements of T as they lie in memory. */
template <class T, int V>
using Raw = typename Word<V *static_cast<int>(sizeof(T))>::type;
template <int V>
struct Floats {
  float v[V];
};
template <class T>
inline constexpr int wide = 16 / sizeof(T);

template <class T, int V>
__device__ inline Raw<T, V> raw_load(const T *p) {
  return *reinterpret_cast<const Raw<T, V> *>(p);
}
/* One store each: the compiler cuts an assignment of a struct into words and does not always put
 * them together again. */
__device__ inline void word_store(uint4 *p, uint4 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(p)), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}
__device__ inline void word_store(uint2 *p, uint2 w) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(p)), "r"(w.x), "r"(w.y)
               : "memory");
}
__device__ inline void word_store(unsigned *p, unsigned w) { *p = w; }
__device__ inline void word_store(unsigned short *p, unsigned short w) { *p = w; }
template <class T, int V>
__device__ inline void raw_store(T *p, const Raw<T, V> &r) {
  word_store(reinterpret_cast<Raw<T, V> *>(p), r);
}

/* A BF16 is the upper half of a float. */
template <class T, int V>
__device__ inline Floats<V> floats_of(const Raw<T, V> &raw) {
  Floats<V> f;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < V; i++) f.v[i] = reinterpret_cast<const float *>(&raw)[i];
  } else if constexpr (V == 1) {
    f.v[0] = __uint_as_float(static_cast<unsigned>(raw) << 16);
  } else {
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
      unsigned pair = reinterpret_cast<const unsigned *>(&raw)[i];
      f.v[2 * i] = __uint_as_float(pair << 16);
      f.v[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  }
  return f;
}

template <class T, int V>
__device__ inline Raw<T, V> raw_of(const Floats<V> &f) {
  Raw<T, V> raw;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < V; i++) reinterpret_cast<float *>(&raw)[i] = f.v[i];
  } else if constexpr (V == 1) {
    raw = __bfloat16_as_ushort(__float2bfloat16_rn(f.v[0]));
  } else {
#pragma unroll
    for (int i = 0; i < V / 2; i++)
      reinterpret_cast<__nv_bfloat162 *>(&raw)[i] =
          __floats2bfloat162_rn(f.v[2 * i], f.v[2 * i + 1]);
  }
  return raw;
}

template <class T, int V>
__device__ inline Floats<V> floats_load(const T *p) {
  return floats_of<T, V>(raw_load<T, V>(p));
}
template <class T, int V>
__device__ inline void floats_store(T *p, const Floats<V> &f) {
  raw_store<T, V>(p, raw_of<T, V>(f));
}

/* The block's number counted from the last one. What streams behind a product begins with the rows
 * that the product wrote last, which the second cache may still hold, and ends with those that the
 * next product reads first. */
__device__ inline int64_t block_from_end() {
  return static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x;
}

/* ---- shape checks: as the CPU's, of any float type ---- */

static inline bool is_2d(Tensor t, DType type, int64_t d0, int64_t d1) {
  return t.dtype == type && t.ndim == 2 && t.dim[0] == d0 && t.dim[1] == d1;
}
static inline bool is_1d(Tensor t, DType type, int64_t d0) {
  return t.dtype == type && t.ndim == 1 && t.dim[0] == d0;
}
static inline bool is_f32_1d(Tensor t, int64_t d0) { return is_1d(t, DT_F32, d0); }
static inline bool is_i32_1d(Tensor t, int64_t d0) { return is_1d(t, DT_I32, d0); }

/* Whether all these can be read 16 bytes at a time; absent tensors can. */
template <class... Tensors>
static inline bool are_aligned(Tensors... t) {
  return (... && (reinterpret_cast<uintptr_t>(t.data) % 16 == 0));
}
/* Whether rows of so many elements of this type can. */
static inline bool is_wide(DType type, int64_t width) {
  return width * static_cast<int64_t>(dtype_size(type)) % 16 == 0;
}

static inline unsigned grid_of(int64_t blocks) {
  require(blocks > 0 && blocks <= INT32_MAX);
  return static_cast<unsigned>(blocks);
}

/* Launches a kernel that the GPU may make ready while the one before it still runs. The kernel
 * calls wait_for_kernel_before first of all. */
template <class... Params, class... Args>
static inline void launch_behind(Device *d, dim3 grid, dim3 threads, size_t shared,
                                 void (*kernel)(Params...), Args... args) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = cuda_stream(d);
  config.attrs = &early;
  config.numAttrs = cuda_of(d)->arch >= 90;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/* ---- element-wise: out[i] = f(a[i], b[i]) ---- */

/* Elements before the first that is 16-byte aligned, at most n. */
template <class T>
static inline int64_t elements_to_alignment(const T *p, int64_t n) {
  int64_t head = static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(p) % 16) % 16 / sizeof(T));
  return head < n ? head : n;
}

enum { MAP_THREADS = 256, MAP_UNROLL = 4 };

/* BINARY = false never reads b. The block's accesses are all asked for before the first is used. */
template <class T, int V, bool BINARY, class F>
__global__ void __launch_bounds__(MAP_THREADS)
    map_kernel(const T *a, const T *b, T *out, int64_t n, F f) {
  int64_t first = (static_cast<int64_t>(blockIdx.x) * MAP_UNROLL * MAP_THREADS + threadIdx.x) * V;
  Raw<T, V> ra[MAP_UNROLL], rb[MAP_UNROLL];
#pragma unroll
  for (int u = 0; u < MAP_UNROLL; u++) {
    int64_t i = first + static_cast<int64_t>(u) * MAP_THREADS * V;
    if (i + V <= n) {
      ra[u] = raw_load<T, V>(a + i);
      if constexpr (BINARY) rb[u] = raw_load<T, V>(b + i);
    }
  }
#pragma unroll
  for (int u = 0; u < MAP_UNROLL; u++) {
    int64_t i = first + static_cast<int64_t>(u) * MAP_THREADS * V;
    if (i + V > n) return;
    Floats<V> x = floats_of<T, V>(ra[u]), y = x;
    if constexpr (BINARY) y = floats_of<T, V>(rb[u]);
#pragma unroll
    for (int k = 0; k < V; k++) x.v[k] = f(x.v[k], y.v[k]);
    floats_store<T, V>(out + i, x);
  }
}

template <class T, int V, bool BINARY, class F>
static void map_launch(Device *d, const T *a, const T *b, T *out, int64_t n, F f) {
  if (n == 0) return;
  int64_t blocks = cuda_ceil(n, static_cast<int64_t>(MAP_THREADS) * MAP_UNROLL * V);
  map_kernel<T, V, BINARY><<<grid_of(blocks), MAP_THREADS, 0, cuda_stream(d)>>>(a, b, out, n, f);
  CUDA_LAUNCHED();
}

/* out may be a or b. Tensors that are out of step with each other go element by element; a common
 * step from alignment is taken first. */
template <bool BINARY, class F>
static void cuda_map(Device *d, Tensor a, Tensor b, Tensor out, F f) {
  cuda_by_type(out.dtype, [&]<class T>(T) {
    int64_t n = tensor_numel(out), head = elements_to_alignment(cuda_data<T>(out), n);
    const T *pa = cuda_data<T>(a), *pb = BINARY ? cuda_data<T>(b) : nullptr;
    T *po = cuda_data<T>(out);
    bool in_step = elements_to_alignment(pa, n) == head;
    if (BINARY) in_step = in_step && elements_to_alignment(pb, n) == head;
    int64_t body = in_step ? (n - head) / wide<T> * wide<T> : 0;
    int64_t tail = in_step ? head + body : 0;
    if (in_step) {
      map_launch<T, 1, BINARY>(d, pa, pb, po, head, f);
      map_launch<T, wide<T>, BINARY>(d, pa + head, BINARY ? pb + head : pb, po + head, body, f);
    }
    map_launch<T, 1, BINARY>(d, pa + tail, BINARY ? pb + tail : pb, po + tail, n - tail, f);
  });
}

/* ---- sums over rows, in two steps ---- */

/* out[j] += sum over i < count of partial[i * stride + j], j < width, always in the same order. */
struct PartialSum {
  const float *partial;
  int64_t count, stride;
  float *out;
};
/* Behind the kernel that wrote the partial sums; two of one width at once, or one and an empty one.
 */
void cuda_sum_partials(Device *d, int64_t width, PartialSum first, PartialSum second);

/* Blocks of a kernel that fill the GPU at once, at most `most`. */
template <class Kernel>
static inline int64_t resident_blocks(Device *d, Kernel kernel, int threads, size_t shared,
                                      int64_t most) {
  int per_sm = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared));
  require(per_sm > 0);
  int64_t n = static_cast<int64_t>(per_sm) * cuda_of(d)->sms;
  return n < most ? n : most;
}

#endif
