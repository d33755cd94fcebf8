/* quant_any: blocks of any size at any address, one element at a time. A warp takes a block and
 * goes over it twice, for the scale and for the codes; what it reads again lies in the cache. */
#include "kernels/cuda/quant_int4.h"

enum { CHUNK = QUANT_WARPS };

/* Element i of block b in a payload, unscaled. */
__device__ inline float code_at(WireKind kind, const char *payload, const QuantPlace &b, int i) {
  int64_t at = b.at + i;
  int half = (b.n + 1) / 2;
  if (kind == WIRE_F32) return reinterpret_cast<const float *>(payload)[at];
  if (kind == WIRE_BF16) return float_of_bf16(reinterpret_cast<const uint16_t *>(payload)[at]);
  if (kind == WIRE_INT8) return static_cast<float>(reinterpret_cast<const int8_t *>(payload)[at]);
  const uint8_t *bytes = reinterpret_cast<const uint8_t *>(payload);
  if (kind == WIRE_FP8) return float_of_fp8(bytes[at]);
  bytes += b.half_bytes;
  return static_cast<float>((i < half ? bytes[i] & 15 : bytes[i - half] >> 4) - 8);
}

/* What is to be sent of element i: the sum of the sources, and the error. */
__device__ inline float sum_at(const QuantJob &job, const QuantPart &p, const QuantPlace &b,
                               int64_t block, int i) {
  float x = job.add ? code_at(job.to, p.to_payload, b, i) : -0.0f;
  for (int r = 0; r < p.n; r++) {
    float y = code_at(job.from, p.from_payload + r * p.stride, b, i);
    float scale = 1;
    if (has_blocks(job.from))
      scale = scale_get(job.from_scale, p.from_scales + r * p.stride, block);
    x = __fmaf_rn(y, scale, x);
  }
  return p.error ? __fadd_rn(x, float_of_bf16(p.error[b.at + i])) : x;
}

__device__ inline void keep_error(const QuantPart &p, int64_t at, float sent, float got,
                                  float scale) {
  float left = error_left(sent, got, float_of_bf16(p.error[at]), p.keep);
  p.error[at] = static_cast<uint16_t>(isnan(scale) ? 0u : bf16_of_float(left));
}

/* Puts element i of a kind of whole bytes; returns what arrives. */
__device__ inline float put_at(WireKind kind, char *payload, int64_t at, float x, float scale) {
  float inverse = quant_inverse(scale);
  if (kind == WIRE_F32) return reinterpret_cast<float *>(payload)[at] = x;
  if (kind == WIRE_BF16) {
    uint32_t code = bf16_of_float(x);
    reinterpret_cast<uint16_t *>(payload)[at] = static_cast<uint16_t>(code);
    return float_of_bf16(code);
  }
  x = tamed(x, scale, quant_most(kind));
  uint32_t code = kind == WIRE_INT8 ? int8_code(x, inverse) : fp8_code(x, inverse);
  reinterpret_cast<uint8_t *>(payload)[at] = static_cast<uint8_t>(code);
  float value =
      kind == WIRE_INT8 ? static_cast<float>(static_cast<int8_t>(code)) : float_of_fp8(code);
  return __fmul_rn(value, scale);
}

/* Byte i of an int4 block: its elements i and half + i, where that is one. */
__device__ inline void put_pair(const QuantJob &job, const QuantPart &p, const QuantPlace &b,
                                int64_t block, int i, float scale) {
  int other = (b.n + 1) / 2 + i;
  float inverse = quant_inverse(scale);
  float low = sum_at(job, p, b, block, i), high = 0;
  if (other < b.n) high = sum_at(job, p, b, block, other);
  uint32_t a = int4_code(tamed(low, scale, 7), inverse) & 15;
  uint32_t c = int4_code(tamed(high, scale, 7), inverse) & 15;
  reinterpret_cast<uint8_t *>(p.to_payload)[b.half_bytes + i] = static_cast<uint8_t>(a | c << 4);
  if (!p.error) return;
  float scaled_a = __fmul_rn(static_cast<float>(a) - 8, scale);
  float scaled_c = __fmul_rn(static_cast<float>(c) - 8, scale);
  keep_error(p, b.at + i, low, scaled_a, scale);
  if (other < b.n) keep_error(p, b.at + other, high, scaled_c, scale);
}

/* ---- sums of int4 in integers ---- */

/* Element i, 0 where there is none. */
__device__ inline int int4_sum_at(const QuantJob &job, const QuantPart &p, const QuantPlace &b,
                                  int64_t block, int i, float unit) {
  int sum = 0;
  for (int r = 0; r < p.n && i < b.n; r++) {
    float code = code_at(WIRE_INT4, p.from_payload + r * p.stride, b, i);
    float scale = scale_get(job.from_scale, p.from_scales + r * p.stride, block);
    sum += static_cast<int>(code) * static_cast<int>(int4_weight(scale, unit));
  }
  return sum;
}

/* A warp's block; returns whether it could be done, to all. */
__device__ inline bool int4_block(const QuantJob &job, const QuantPart &p, const QuantPlace &b,
                                  int64_t block, int lane) {
  float unit = b.n > 0 ? int4_unit(job, p, block) : 0;
  int most = 0;
  if (unit == 0) return false;
  for (int i = lane; i < b.n; i += 32)
    most = max(most, abs(int4_sum_at(job, p, b, block, i, unit)));
  most = __reduce_max_sync(0xffffffffu, most);
  if (most < INT4_LEAST) return false;
  Int4Result result = int4_result(job.to_scale, unit, static_cast<float>(most));
  if (lane == 0) scale_put(job.to_scale, p.to_scales, block, result.scale);
  for (int i = lane; 2 * i < b.n; i += 32) {
    int low = int4_sum_at(job, p, b, block, i, unit);
    int high = int4_sum_at(job, p, b, block, (b.n + 1) / 2 + i, unit);
    uint32_t a = int4_code_high(static_cast<uint32_t>(low), 0, result.multiplier) >> 28;
    uint32_t c = int4_code_high(static_cast<uint32_t>(high), 0, result.multiplier) >> 28;
    reinterpret_cast<uint8_t *>(p.to_payload)[b.half_bytes + i] = static_cast<uint8_t>(a | c << 4);
  }
  return true;
}

__global__ void __launch_bounds__(QUANT_THREADS) any_kernel(const __grid_constant__ QuantJob job) {
  const QuantPart &p = quant_part_of(job, blockIdx.x);
  int64_t block = (blockIdx.x - p.first_chunk) * CHUNK + threadIdx.x / 32;
  QuantPlace b = quant_place(p, job.block, block);
  int lane = threadIdx.x % 32;
  float scale = 1;
  if (int4_takes(job, p) && int4_block(job, p, b, block, lane)) return;
  if (has_blocks(job.to)) {
    float most = 0;
    for (int i = lane; i < b.n; i += 32) most = largest(most, sum_at(job, p, b, block, i));
    scale =
        quant_scale(job.to, job.to_scale, __reduce_max_sync(0xffffffffu, __float_as_uint(most)));
    if (lane == 0 && b.n > 0) scale_put(job.to_scale, p.to_scales, block, scale);
  }
  if (job.to == WIRE_INT4) {
    for (int i = lane; 2 * i < b.n; i += 32) put_pair(job, p, b, block, i, scale);
    return;
  }
  for (int i = lane; i < b.n; i += 32) {
    float x = sum_at(job, p, b, block, i);
    float got = put_at(job.to, p.to_payload, b.at + i, x, scale);
    if (p.error) keep_error(p, b.at + i, x, got, scale);
  }
}

int64_t quant_any_chunks(const QuantPart &p) { return cuda_ceil(p.blocks, CHUNK); }

void quant_any_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks) {
  any_kernel<<<static_cast<unsigned>(chunks), QUANT_THREADS, 0, stream>>>(job);
  CUDA_LAUNCHED();
}
