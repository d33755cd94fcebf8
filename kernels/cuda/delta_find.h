/* The finders: each warp fetches its own strip of a block into shared memory, ahead, so only its
 * lanes wait for each other. */
#ifndef KERNELS_CUDA_DELTA_FIND_H
#define KERNELS_CUDA_DELTA_FIND_H

#include <cuda_pipeline.h>

#include "kernels/cuda/delta_encode.h"

/* As convert_from_f32: a NaN keeps the upper half of its bits and becomes quiet. */
__device__ inline uint32_t bf16_bits(float x) {
  uint32_t u = __float_as_uint(x);
  return x != x ? u >> 16 | 0x40
                : static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(x)));
}
__device__ inline uint32_t bf16_pair(float low, float high) {
  return bf16_bits(low) | bf16_bits(high) << 16;
}
__device__ inline uint2 bf16_quad(float4 x) {
  if (x.x != x.x || x.y != x.y || x.z != x.z || x.w != x.w)
    return {bf16_pair(x.x, x.y), bf16_pair(x.z, x.w)};
  __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  return {*reinterpret_cast<uint32_t *>(&low), *reinterpret_cast<uint32_t *>(&high)};
}

/* A warp's part of a block. */
struct Strip {
  const void *now;
  uint16_t *last;
  int n;            /* of STRIP; fewer, or none, at a part's end */
  bool f32, direct; /* direct: whole, and aligned: moved 16 bytes at a time */
};
/* k: the part of an earlier block. */
__device__ inline Strip strip_of(const DeltaJob &job, int64_t number, int *k) {
  while (*k + 1 < job.n && job.part[*k + 1].first_block <= number) ++*k;
  const int64_t at = (number - job.part[*k].first_block) * DELTA_BLOCK + threadIdx.x / 32 * STRIP;
  const int64_t left = job.part[*k].n - at;
  const bool f32 = job.part[*k].type == DT_F32;
  return {static_cast<const char *>(job.part[*k].now) + at * (f32 ? 4 : 2), job.part[*k].last + at,
          static_cast<int>(left < STRIP ? left : STRIP), f32,
          job.part[*k].aligned && left >= STRIP};
}

/* Beyond the end there is nothing that could differ. */
__device__ inline void fetch(const Strip &s, float *now, uint16_t *last) {
  const int lane = threadIdx.x % 32;
  const float *x = static_cast<const float *>(s.now);
  const uint16_t *bits = static_cast<const uint16_t *>(s.now);
  uint16_t *now_bits = reinterpret_cast<uint16_t *>(now);
  if (s.direct) {
#pragma unroll
    for (int i = 8 * lane; i < STRIP; i += 8 * 32)
      __pipeline_memcpy_async(last + i, s.last + i, 16);
    if (s.f32) {
#pragma unroll
      for (int i = 4 * lane; i < STRIP; i += 4 * 32) __pipeline_memcpy_async(now + i, x + i, 16);
    } else {
#pragma unroll
      for (int i = 8 * lane; i < STRIP; i += 8 * 32)
        __pipeline_memcpy_async(now_bits + i, bits + i, 16);
    }
    return;
  }
  for (int i = lane; i < STRIP; i += 32) {
    last[i] = i < s.n ? s.last[i] : 0;
    if (s.f32)
      now[i] = i < s.n ? x[i] : 0.0f;
    else
      now_bits[i] = i < s.n ? bits[i] : 0;
  }
}

/* Bits 0 to 3: which of four values differ. */
__device__ inline unsigned differ(uint2 a, uint2 b) {
  const uint32_t x = __vminu2(a.x ^ b.x, 0x00010001u) | __vminu2(a.y ^ b.y, 0x00010001u) << 2;
  return (x | x >> 15) & 15;
}

__device__ inline void keep(const Strip &s, int i, unsigned which, uint2 now) {
  uint16_t *to = s.last + i;
  if (s.direct) {
    if (which) *reinterpret_cast<uint2 *>(to) = now;
    return;
  }
#pragma unroll
  for (int k = 0; k < QUAD; k++)
    if (which >> k & 1) to[k] = static_cast<uint16_t>((k < 2 ? now.x : now.y) >> k % 2 * 16);
}

/* Which of the thread's 16 values changed; makes the last ones the new ones. The order of quads
 * turns from lane to lane, so that those of a warp lie in different banks. */
__device__ inline unsigned find(const Strip &s, const float *now, const uint16_t *last) {
  const int lane = threadIdx.x % 32, turn = (lane / 2 + lane / 8) % 4;
  unsigned changed = 0;
#pragma unroll
  for (int c = 0; c < LANE / QUAD; c++) {
    const int q = c ^ turn, i = LANE * lane + QUAD * q;
    uint2 old = *reinterpret_cast<const uint2 *>(last + i), bits;
    if (s.f32)
      bits = bf16_quad(*reinterpret_cast<const float4 *>(now + i));
    else
      bits = *reinterpret_cast<const uint2 *>(reinterpret_cast<const uint16_t *>(now) + i);
    const unsigned which = differ(bits, old);
    keep(s, i, which, bits);
    changed |= which << QUAD * q;
  }
  return changed;
}

__device__ inline uint16_t now_at(const Strip &s, const float *now, int i) {
  if (s.f32) return static_cast<uint16_t>(bf16_bits(now[i]));
  return reinterpret_cast<const uint16_t *>(now)[i];
}

/* Codes of the thread's changes, the first the lowest four bits, and how many are escapes. */
__device__ inline uint64_t codes_of(const Strip &s, const float *now, const uint16_t *last,
                                    unsigned changed, int *escapes) {
  const int first = threadIdx.x % 32 * LANE;
  uint64_t codes = 0;
  *escapes = 0;
  while (changed) {
    const int i = 31 - __clz(static_cast<int>(changed));
    changed ^= 1u << i;
    const int code = delta_code(last[first + i], now_at(s, now, first + i));
    codes = codes << 4 | static_cast<unsigned>(code);
    *escapes += code == DELTA_ESCAPE;
  }
  return codes;
}

/* Sum of x over the threads of the warp up to this one. */
__device__ inline uint32_t warp_scan(uint32_t x) {
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    uint32_t below = __shfl_up_sync(0xffffffffu, x, o);
    if (threadIdx.x % 32 >= static_cast<unsigned>(o)) x += below;
  }
  return x;
}

/* In a bitmap's image the first may share its word with codes. */
__device__ inline void put_value(uint32_t *image, bool list, int byte, unsigned bits) {
  if (list)
    reinterpret_cast<uint16_t *>(image)[byte / 2] = static_cast<uint16_t>(bits);
  else
    atomicOr(image + byte / 4, bits << byte % 4 * 8);
}

/* rank, escape: how many are before the thread's. */
__device__ inline void write_image(const Strip &s, const float *now, uint32_t *image, Found all,
                                   unsigned changed, uint64_t codes, int rank, int escape) {
  const int first = threadIdx.x % 32 * LANE, in_block = threadIdx.x * LANE;
  const bool list = delta_is_list(all.changes);
  uint16_t *entry = reinterpret_cast<uint16_t *>(image);
  const int values = static_cast<int>(delta_codes_bytes(all.changes));
  if (!list) entry[threadIdx.x] = static_cast<uint16_t>(changed);
  for (; changed; changed &= changed - 1, codes >>= 4, rank++) {
    const int i = __ffs(static_cast<int>(changed)) - 1;
    const unsigned code = static_cast<unsigned>(codes) & 15;
    if (list)
      entry[rank] = static_cast<uint16_t>((in_block + i) * 16 + code);
    else
      atomicOr(image + DELTA_BITMAP_BYTES / 4 + rank / 8, code << rank % 8 * 4);
    if (code == DELTA_ESCAPE)
      put_value(image, list, values + 2 * escape++, now_at(s, now, first + i));
  }
}

__device__ inline void find_blocks(const DeltaJob &job, EncodeShared &sh, unsigned *next,
                                   uint64_t *said, int64_t blocks) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int fetching = 0, finding = 0; /* parts */
  if (threadIdx.x == 0)
    for (int i = 0; i < STAGES; i++) sh.number[i] = atomicAdd(next, 1u);
  meet<FINDERS_MEET>(0, FINDERS);
  int64_t ticket = 0;
  if (threadIdx.x == 0) ticket = atomicAdd(next, 1u);
  for (int i = 0; i < STAGES; i++) {
    const int64_t number = sh.number[i];
    if (number < blocks)
      fetch(strip_of(job, number, &fetching), sh.now[i] + warp * STRIP, sh.last[i] + warp * STRIP);
    __pipeline_commit();
  }
  int turn = 0;
  for (;; turn++) {
    const int64_t number = sh.number[turn % (STAGES + 1)];
    const int stage = turn % STAGES, of = turn % IMAGES;
    if (number >= blocks) break;
    float *now = sh.now[stage] + warp * STRIP;
    uint16_t *last = sh.last[stage] + warp * STRIP;
    const Strip s = strip_of(job, number, &finding);
    __pipeline_wait_prior(STAGES - 1);
    __syncwarp();
    const unsigned changed = find(s, now, last);
    int escapes;
    const uint64_t codes = codes_of(s, now, last, changed, &escapes);
    const uint32_t own = static_cast<uint32_t>(__popc(changed) | escapes << 16);
    const uint32_t up_to = warp_scan(own);
    if (lane == 31) sh.sums[turn % 2][warp] = up_to;
    if (threadIdx.x == 0) {
      sh.number[(turn + STAGES) % (STAGES + 1)] = ticket;
      if (ticket < blocks) ticket = atomicAdd(next, 1u);
    }
    meet<FINDERS_MEET>(0, FINDERS);
    const uint32_t sum = lane < ENCODE_WARPS ? sh.sums[turn % 2][lane] : 0;
    const uint32_t total = __reduce_add_sync(0xffffffffu, sum);
    const uint32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? sum : 0) + up_to - own;
    const Found all = {number, static_cast<int>(total & 0xffff), static_cast<int>(total >> 16)};
    if (threadIdx.x == 0)
      *static_cast<volatile uint64_t *>(said + number) =
          OWN | delta_block_bytes(all.changes, all.escapes);
    if (turn >= IMAGES) meet<IMAGE_EMPTY>(of, ENCODE_THREADS);
    if (threadIdx.x == 0) sh.found[of] = all;
    write_image(s, now, sh.image[of], all, changed, codes, static_cast<int>(before & 0xffff),
                static_cast<int>(before >> 16));
    report<IMAGE_FULL>(of, ENCODE_THREADS);
    __syncwarp();
    const int64_t then = sh.number[(turn + STAGES) % (STAGES + 1)];
    if (then < blocks) fetch(strip_of(job, then, &fetching), now, last);
    __pipeline_commit();
  }
  if (turn >= IMAGES) meet<IMAGE_EMPTY>(turn % IMAGES, ENCODE_THREADS);
  if (threadIdx.x == 0) sh.found[turn % IMAGES].number = -1;
  report<IMAGE_FULL>(turn % IMAGES, ENCODE_THREADS);
}

#endif
