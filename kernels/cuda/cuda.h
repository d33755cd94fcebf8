/* What the files of kernels/cuda share: the device, its streams and scratch, error checks. Nobody
 * else includes it; contracts of ops are in kernels.h, and the CPU file of the same name is the
 * readable reference.
 *
 * An op checks its shapes, launches on cuda_stream(d) and returns. It never waits for the GPU
 * unless its contract gives a host result. Nothing is summed by atomics: partial sums go to scratch
 * and are added in a fixed order, so that same inputs give same bits. */
#ifndef KERNELS_CUDA_CUDA_H
#define KERNELS_CUDA_CUDA_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>

extern "C" {
#include "kernels/backend.h"
#include "kernels/wire.h"
}

struct CudaGemm;      /* gemm.cu: cuBLASLt's handle, workspace and chosen algorithms */
struct CudaAttention; /* attention.cu: cuDNN's handle and built graphs */
struct CudaStaging;   /* staging.cu: pinned memory of uploads and downloads */
struct CudaGraphs;    /* graph.cu: captured steps, and the scratch that they name */
struct CudaBlocks;    /* device.cu: what was allocated */

enum { CUDA_TRACKS = 2 }; /* streams of communication */

struct CudaDevice {
  Device base; /* first: a Device * is a CudaDevice * */
  int gpu, sms;
  int sharing; /* ranks of this host on this GPU, this one included */
  int arch;    /* 90: the code that this build has for the GPU is for compute capability 9.0 */
  size_t l2_bytes;
  cudaStream_t compute, comm[CUDA_TRACKS];
  cudaStream_t current; /* compute; one of comm while queued work of a collective is launched */
  void *scratch[1 + CUDA_TRACKS]; /* of compute and comm */
  size_t scratch_bytes[1 + CUDA_TRACKS];
  CudaGraphs *graphs;
  CudaGemm *gemm;
  CudaAttention *attention;
  CudaStaging *staging;
  CudaBlocks *blocks;
};

/* Whether that code knows launches that overlap (chain.h): of capability 9.0 or later. */
extern bool cuda_overlaps;

static inline CudaDevice *cuda_of(Device *d) { return reinterpret_cast<CudaDevice *>(d); }
static inline cudaStream_t cuda_stream(Device *d) { return cuda_of(d)->current; }

/* Scratch of the current stream, 256-byte aligned, uninitialised, valid for what is launched until
 * the next call on the same stream: an op asks once. Grows, never shrinks; counted in device_bytes.
 */
void *cuda_scratch(Device *d, size_t bytes);

/* Dies with the call, its place and CUDA's message. */
void cuda_check_at(cudaError_t e, const char *call, const char *file, int line);
#define CUDA_CHECK(call) cuda_check_at((call), #call, __FILE__, __LINE__)
/* Behind every launch. */
#define CUDA_LAUNCHED() CUDA_CHECK(cudaGetLastError())

/* Calls f with a value of the element type of t: float or __nv_bfloat16. */
template <class F>
static inline void cuda_by_type(DType t, F f) {
  if (t == DT_F32)
    f(float());
  else if (t == DT_BF16)
    f(__nv_bfloat16());
  else
    die("kernels take F32 and BF16, found %s", dtype_name(t));
}

static inline int64_t cuda_ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
template <class T>
static inline T *cuda_data(Tensor t) {
  return static_cast<T *>(t.data);
}

/* ---- device code that kernels share ---- */

/* 16 bytes of elements as floats: one access of the widest kind. p is 16-byte aligned. */
template <class T>
struct Pack {
  static constexpr int N = 16 / sizeof(T);
  float v[N];
};
template <class T>
__device__ inline float to_float(T x) {
  return static_cast<float>(x);
}
template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <class T>
__device__ inline Pack<T> pack_load(const T *p) {
  uint4 raw = *reinterpret_cast<const uint4 *>(p);
  const T *e = reinterpret_cast<const T *>(&raw);
  Pack<T> r;
#pragma unroll
  for (int i = 0; i < Pack<T>::N; i++) r.v[i] = to_float(e[i]);
  return r;
}
template <class T>
__device__ inline void pack_store(T *p, const Pack<T> &r) {
  uint4 raw;
  T *e = reinterpret_cast<T *>(&raw);
#pragma unroll
  for (int i = 0; i < Pack<T>::N; i++) e[i] = from_float<T>(r.v[i]);
  *reinterpret_cast<uint4 *>(p) = raw;
}

/* All lanes get the result; the order is fixed. */
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}
/* The same over a block of up to 1024 threads, a multiple of 32; every thread calls it. */
template <class T>
__device__ inline T block_sum(T x) {
  __shared__ T part[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) part[warp] = x;
  __syncthreads();
  x = lane < warps ? part[lane] : T(0);
  return warp_sum(x);
}

#endif
