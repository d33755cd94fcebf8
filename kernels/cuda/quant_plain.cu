/* quant_plain: between formats without blocks, float32 and bfloat16: sums and conversions of single
 * elements, four at a time. */
#include "kernels/cuda/quant_codes.h"

enum { UNROLL = 8, CHUNK = 4 * QUANT_THREADS * UNROLL };

struct Four {
  float v[4];
};

template <WireKind KIND>
__device__ inline float one_load(const char *p, int64_t i) {
  if constexpr (KIND == WIRE_F32) return reinterpret_cast<const float *>(p)[i];
  return float_of_bf16(reinterpret_cast<const uint16_t *>(p)[i]);
}
template <WireKind KIND>
__device__ inline void one_store(char *p, int64_t i, float x) {
  if constexpr (KIND == WIRE_F32)
    reinterpret_cast<float *>(p)[i] = x;
  else
    reinterpret_cast<uint16_t *>(p)[i] = static_cast<uint16_t>(bf16_of_float(x));
}

template <WireKind KIND>
__device__ inline Four four_load(const char *p, int64_t i) {
  if constexpr (KIND == WIRE_F32) {
    float4 f = *reinterpret_cast<const float4 *>(p + 4 * i);
    return {f.x, f.y, f.z, f.w};
  }
  uint2 w = *reinterpret_cast<const uint2 *>(p + 2 * i);
  return {__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u),
          __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xffff0000u)};
}
template <WireKind KIND>
__device__ inline void four_store(char *p, int64_t i, const Four &f) {
  if constexpr (KIND == WIRE_F32)
    *reinterpret_cast<float4 *>(p + 4 * i) = {f.v[0], f.v[1], f.v[2], f.v[3]};
  else
    *reinterpret_cast<uint2 *>(p + 2 * i) = {pack_bf16(f.v[0], f.v[1]), pack_bf16(f.v[2], f.v[3])};
}

/* What element x becomes on the wire. */
template <WireKind TO>
__device__ inline float arrives(float x) {
  return TO == WIRE_F32 ? x : float_of_bf16(bf16_of_float(x));
}

/* ---- any alignment: one element at a time ---- */

template <WireKind FROM, WireKind TO>
__device__ inline void one_element(const QuantJob &job, const QuantPart &p, int64_t i) {
  float x = job.add ? one_load<TO>(p.to_payload, i) : one_load<FROM>(p.from_payload, i);
  for (int r = job.add ? 0 : 1; r < p.n; r++)
    x = __fadd_rn(x, one_load<FROM>(p.from_payload + r * p.stride, i));
  if (p.error) {
    float e = float_of_bf16(p.error[i]);
    x = __fadd_rn(x, e);
    float left = error_left(x, arrives<TO>(x), e, p.keep);
    p.error[i] = static_cast<uint16_t>(bf16_of_float(left));
  }
  one_store<TO>(p.to_payload, i, x);
}

template <WireKind FROM, WireKind TO>
__global__ void __launch_bounds__(QUANT_THREADS) one_kernel(const __grid_constant__ QuantJob job) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  int64_t first = (blockIdx.x - p.first_chunk) * CHUNK;
  for (int j = threadIdx.x; j < CHUNK && first + j < p.count; j += QUANT_THREADS)
    one_element<FROM, TO>(job, p, first + j);
}

/* ---- aligned, no errors ---- */

template <WireKind KIND>
__device__ inline void fours_load(Four *x, const char *payload, int64_t first, int64_t count) {
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int64_t i = first + 4 * QUANT_THREADS * u;
    if (i + 4 <= count) x[u] = four_load<KIND>(payload, i);
  }
}

template <WireKind FROM, WireKind TO>
__global__ void __launch_bounds__(QUANT_THREADS) four_kernel(const __grid_constant__ QuantJob job) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  int64_t first = (blockIdx.x - p.first_chunk) * CHUNK + 4 * threadIdx.x;
  Four x[UNROLL], y[UNROLL];
  if (job.add)
    fours_load<TO>(x, p.to_payload, first, p.count);
  else
    fours_load<FROM>(x, p.from_payload, first, p.count);
  for (int r = job.add ? 0 : 1; r < p.n; r++) {
    fours_load<FROM>(y, p.from_payload + r * p.stride, first, p.count);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int k = 0; k < 4; k++) x[u].v[k] = __fadd_rn(x[u].v[k], y[u].v[k]);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int64_t i = first + 4 * QUANT_THREADS * u;
    if (i + 4 <= p.count)
      four_store<TO>(p.to_payload, i, x[u]);
    else /* the last one to three elements */
      for (; i < p.count; i++) one_element<FROM, TO>(job, p, i);
  }
}

/* ---- launch ---- */

int64_t quant_plain_chunks(const QuantPart &p) { return cuda_ceil(p.count, CHUNK); }

static bool is_aligned(const QuantJob &job) {
  static const int bytes[] = {16, 8};
  for (int i = 0; i < job.n; i++) {
    const QuantPart &p = job.part[i];
    if (p.error || quant_alignment(p.from_payload, p.stride) < bytes[job.from] ||
        quant_alignment(p.to_payload, 0) < bytes[job.to])
      return false;
  }
  return true;
}

template <WireKind FROM, WireKind TO>
static void launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  if (is_aligned(job))
    four_kernel<FROM, TO><<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job);
  else
    one_kernel<FROM, TO><<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job);
  CUDA_LAUNCHED();
}

void quant_plain_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  bool from_f32 = job.from == WIRE_F32, to_f32 = job.to == WIRE_F32;
  if (from_f32 && to_f32)
    launch<WIRE_F32, WIRE_F32>(stream, job, chunks);
  else if (from_f32)
    launch<WIRE_F32, WIRE_BF16>(stream, job, chunks);
  else if (to_f32)
    launch<WIRE_BF16, WIRE_F32>(stream, job, chunks);
  else
    launch<WIRE_BF16, WIRE_BF16>(stream, job, chunks);
}
