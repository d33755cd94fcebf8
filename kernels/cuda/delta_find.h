/* The finder of changes: a warp takes a block of the stream, a batch of rows at a time, and depends
 * on no other. A lane reads four values of every row, but lists 32 that lie next to each other;
 * what changed comes to it through shared memory. */
#ifndef KERNELS_CUDA_DELTA_FIND_H
#define KERNELS_CUDA_DELTA_FIND_H

#include "kernels/cuda/delta_encode.h"

enum {
  QUAD = 4, /* values of a lane in a row */
  ROWS = 8, /* of a batch: a lane has a bit of a word for each of its values */
  ROW = 32 * QUAD,
  BATCH = ROWS * ROW
};

/* As convert_from_f32: a NaN keeps the upper half of its bits and becomes quiet. */
__device__ inline uint32_t bf16_bits(float x) {
  uint32_t u = __float_as_uint(x);
  return x != x ? u >> 16 | 0x40
                : static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(x)));
}
__device__ inline uint2 bf16_quad(float4 x) {
  return {bf16_bits(x.x) | bf16_bits(x.y) << 16, bf16_bits(x.z) | bf16_bits(x.w) << 16};
}
/* The same where no x is a NaN; one becomes 0x7fff. */
__device__ inline uint2 bf16_quad_of_numbers(float4 x) {
  __nv_bfloat162 low = __floats2bfloat162_rn(x.x, x.y), high = __floats2bfloat162_rn(x.z, x.w);
  return {*reinterpret_cast<uint32_t *>(&low), *reinterpret_cast<uint32_t *>(&high)};
}

/* A block of the stream, or what there is of it at a part's end. */
struct Values {
  const void *now;
  uint16_t *last;
  int n;
  bool f32, direct; /* direct: whole, and aligned: moved in quads */
};
__device__ inline Values values_of(const DeltaJob &job, int64_t number) {
  const DeltaSpan &p = job.part[delta_part_of(job, number)];
  const int64_t at = (number - p.first_block) * DELTA_BLOCK, left = p.n - at;
  const bool f32 = p.type == DT_F32;
  return {static_cast<const char *>(p.now) + at * (f32 ? 4 : 2), p.last + at,
          static_cast<int>(left < DELTA_BLOCK ? left : DELTA_BLOCK), f32,
          p.aligned && left >= DELTA_BLOCK};
}

/* How a block's values are read and written. */
enum Access { FLOATS, HALVES, ONE_BY_ONE };

/* Of a warp. */
struct Found {
  /* Of a batch, where a quad has changed. */
  alignas(16) uint16_t now[BATCH];
  uint16_t last[BATCH];
  /* Of a block. */
  alignas(16) uint8_t code[DELTA_BLOCK];
  alignas(16) uint16_t list[LIST_MOST + 3];
  uint32_t map[MAP_WORDS];
};

/* A lane's values of a batch, as BF16. */
struct Batch {
  uint2 now[ROWS], last[ROWS];
};

__device__ inline void read_floats(const float *x, uint2 *bits) {
  float4 raw[ROWS];
  uint32_t most = 0x80008000u;
#pragma unroll
  for (int r = 0; r < ROWS; r++) raw[r] = *reinterpret_cast<const float4 *>(x + r * ROW);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    bits[r] = bf16_quad_of_numbers(raw[r]);
    most = __vmaxs2(__vmaxs2(most, bits[r].x), bits[r].y);
  }
  if ((most & 0xffff) != 0x7fff && most >> 16 != 0x7fff) return;
#pragma unroll 1
  for (int r = 0; r < ROWS; r++) {
    const uint2 exact = bf16_quad(*reinterpret_cast<const float4 *>(x + r * ROW));
#pragma unroll
    for (int k = 0; k < ROWS; k++)
      if (k == r) bits[k] = exact;
  }
}

__device__ inline void read_halves(const uint16_t *x, uint2 *bits) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) bits[r] = *reinterpret_cast<const uint2 *>(x + r * ROW);
}

/* Beyond the end there is nothing that could differ. */
__device__ inline uint2 read_one_by_one(const void *x, bool f32, int at, int n) {
  uint32_t bits[QUAD];
#pragma unroll
  for (int k = 0; k < QUAD; k++) {
    bits[k] = 0;
    if (at + k < n)
      bits[k] = f32 ? bf16_bits(static_cast<const float *>(x)[at + k])
                    : static_cast<const uint16_t *>(x)[at + k];
  }
  return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
}

/* at: of the lane's first value in the block. */
template <Access A>
__device__ inline void read_batch(const Values &v, int at, Batch *b) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if constexpr (A == ONE_BY_ONE) {
      b->now[r] = read_one_by_one(v.now, v.f32, at + r * ROW, v.n);
      b->last[r] = read_one_by_one(v.last, false, at + r * ROW, v.n);
    } else {
      b->last[r] = *reinterpret_cast<const uint2 *>(v.last + at + r * ROW);
    }
  }
  if constexpr (A == FLOATS) read_floats(static_cast<const float *>(v.now) + at, b->now);
  if constexpr (A == HALVES) read_halves(static_cast<const uint16_t *>(v.now) + at, b->now);
}

/* Bits 0 to 3: which of four values differ. */
__device__ inline unsigned differ(uint2 a, uint2 b) {
  const uint32_t x = __vminu2(a.x ^ b.x, 0x00010001u) | __vminu2(a.y ^ b.y, 0x00010001u) << 2;
  return (x | x >> 15) & 15;
}

__device__ inline uint16_t value_of(uint2 quad, int k) {
  return static_cast<uint16_t>((k < 2 ? quad.x : quad.y) >> k % 2 * 16);
}

template <Access A>
__device__ inline void keep(const Values &v, int at, unsigned which, uint2 now) {
  if constexpr (A == ONE_BY_ONE) {
#pragma unroll
    for (int k = 0; k < QUAD; k++)
      if (which >> k & 1) v.last[at + k] = value_of(now, k);
  } else {
    if (which) *reinterpret_cast<uint2 *>(v.last + at) = now;
  }
}

/* Four bits for each row: which of the lane's values changed; makes the last ones the new ones. */
template <Access A>
__device__ inline uint32_t find(const Values &v, int at, const Batch &b, Found *found) {
  const int lane = threadIdx.x % 32;
  uint32_t changed = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const unsigned which = differ(b.now[r], b.last[r]);
    keep<A>(v, at + r * ROW, which, b.now[r]);
    if (which) {
      reinterpret_cast<uint2 *>(found->now)[32 * r + lane] = b.now[r];
      reinterpret_cast<uint2 *>(found->last)[32 * r + lane] = b.last[r];
    }
    changed |= which << QUAD * r;
  }
  return changed;
}

/* Lane 8 g + j has four bits of every row. Lane w gets the bits of the values 32 w to 32 w + 31,
 * which are those of row w / 4 and lanes 8 (w % 4) to 8 (w % 4) + 7. */
__device__ inline uint32_t rows_to_words(uint32_t x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 4; o > 0; o /= 2) {
    const uint32_t low = o == 4 ? 0x0000ffffu : o == 2 ? 0x00ff00ffu : 0x0f0f0f0fu;
    const bool upper = lane & o;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? x & low : x & ~low, o);
    x = upper ? (x & ~low) | (other >> QUAD * o & low) : (x & low) | (other << QUAD * o & ~low);
  }
  return __shfl_sync(0xffffffffu, x, lane % 4 * 8 + lane / 4);
}

/* Notes the changes among a lane's 32 values of a batch: bits, from place `at` of the block on;
 * rank changes are before them. Returns the escapes among them. */
__device__ inline int list_changes(Found *found, uint32_t bits, int at, int rank) {
  int escapes = 0;
  for (; bits; bits &= bits - 1, rank++) {
    const int place = at + __ffs(static_cast<int>(bits)) - 1;
    const int code = delta_code(found->last[place % BATCH], found->now[place % BATCH]);
    found->code[rank] = static_cast<uint8_t>(code);
    if (rank < LIST_MOST) found->list[rank] = static_cast<uint16_t>(place * 16 + code);
    escapes += code == DELTA_ESCAPE;
  }
  return escapes;
}

/* Eight codes, a byte each, in half the room. */
__device__ inline uint32_t pack_codes(uint2 codes) {
  return __byte_perm(codes.x | codes.x >> 4, codes.y | codes.y >> 4, 0x6420);
}

/* What the block says, without values; what is left of the last word is zero. */
__device__ inline void say(const Found &found, int changes, uint32_t *said) {
  const int lane = threadIdx.x % 32;
  if (delta_is_list(changes)) {
    const uint32_t *list = reinterpret_cast<const uint32_t *>(found.list);
    for (int i = lane; 2 * i < changes; i += 32)
      said[i] = 2 * i + 1 < changes ? list[i] : list[i] & 0xffff;
    return;
  }
#pragma unroll
  for (int i = lane; i < MAP_WORDS; i += 32) said[i] = found.map[i];
  for (int i = lane; 8 * i < changes; i += 32) {
    const uint32_t eight = pack_codes(reinterpret_cast<const uint2 *>(found.code)[i]);
    const int left = changes - 8 * i;
    said[MAP_WORDS + i] = left < 8 ? eight & ((1u << 4 * left) - 1) : eight;
  }
}

/* Returns what Notes counts. */
template <Access A>
__device__ inline uint32_t find_in(const Values &v, Found *found, uint32_t *said) {
  const int lane = threadIdx.x % 32;
  int changes = 0, escapes = 0;
#pragma unroll 1
  for (int first = 0; first < DELTA_BLOCK; first += BATCH) {
    Batch b;
    read_batch<A>(v, first + QUAD * lane, &b);
    const uint32_t changed = find<A>(v, first + QUAD * lane, b, found);
    if (!__any_sync(0xffffffffu, changed != 0)) {
      found->map[first / 32 + lane] = 0;
      continue;
    }
    const uint32_t bits = rows_to_words(changed);
    found->map[first / 32 + lane] = bits;
    __syncwarp(); /* what other lanes found is there */
    const int own = __popc(bits), up_to = warp_up_to(own);
    escapes += list_changes(found, bits, first + 32 * lane, changes + up_to - own);
    changes += __shfl_sync(0xffffffffu, up_to, 31);
    __syncwarp();
  }
  __syncwarp();
  say(*found, changes, said);
  return static_cast<uint32_t>(changes) |
         __reduce_add_sync(0xffffffffu, static_cast<unsigned>(escapes)) << 16;
}

__device__ inline uint32_t find_block(const Values &v, Found *found, uint32_t *said) {
  if (!v.direct) return find_in<ONE_BY_ONE>(v, found, said);
  return v.f32 ? find_in<FLOATS>(v, found, said) : find_in<HALVES>(v, found, said);
}

#endif
