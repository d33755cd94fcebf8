/* The writer of the stream, from what the finder noted. A thread block has WRITE_BLOCKS blocks of
 * it; it adds up by itself what all before them take. */
#ifndef KERNELS_CUDA_DELTA_WRITE_H
#define KERNELS_CUDA_DELTA_WRITE_H

#include "kernels/cuda/delta_encode.h"

/* Bytes of a part's blocks before the notes' first one, and their changes. */
struct Carry {
  uint64_t bytes, changes;
};

struct WriteShared {
  uint16_t place[WRITE_WARPS][32 * 32]; /* of a warp's escapes */
  uint64_t start[WRITE_BLOCKS];
  uint32_t counts[WRITE_BLOCKS];
  int part[WRITE_BLOCKS];
};

__device__ inline uint64_t both(Length l) {
  return l.words | static_cast<uint64_t>(l.changes) << 32;
}

/* Of the blocks from `from` to before `to`, a multiple of FIND_WARPS after the notes' first: every
 * thread's share. */
__device__ inline uint64_t sum_lengths(const Notes &notes, int64_t from, int64_t to) {
  const int t = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(from - notes.first), end = static_cast<int>(to - notes.first);
  const int group = (first + FIND_WARPS - 1) / FIND_WARPS;
  uint64_t sum = 0;
#pragma unroll 4
  for (int g = group + t; g < end / FIND_WARPS; g += 32 * WRITE_WARPS) sum += both(notes.groups[g]);
  const int single = first + t; /* fewer than a group */
  if (single < group * FIND_WARPS && single < end) sum += both(length_of(notes.counts[single]));
  return sum;
}

/* The last block of a part knows the stream's size, and fills it up. */
__device__ inline void finish_part(const DeltaSpan &p, uint64_t end, uint64_t changes,
                                   DeltaSize *size) {
  const uint64_t bytes = (end + 15) / 16 * 16;
  *size = {bytes, changes};
  if (bytes > p.room) return;
  for (uint64_t at = end; at < bytes; at += 4) *reinterpret_cast<uint32_t *>(p.wire + at) = 0;
}

/* What is noted of the block of a lane; 0 where there is none. */
__device__ inline uint32_t counts_of(const Notes &notes, int64_t first) {
  const int64_t number = first + threadIdx.x;
  return threadIdx.x < WRITE_BLOCKS && number < notes.end ? notes.counts[number - notes.first] : 0;
}

/* By one warp: where the thread block's blocks start in their streams, the heads, and what parts
 * that end here are told. before: sum of the noted blocks of the first one's part before it; *from
 * has those before the notes, *to becomes this for the next notes. */
__device__ inline void place_blocks(const DeltaJob &job, const Notes &notes, int64_t first,
                                    uint32_t counts, uint64_t before, const Carry *from, Carry *to,
                                    WriteShared &sh, DeltaSize *sizes) {
  const int lane = threadIdx.x;
  const int64_t number = first + lane;
  const bool there = lane < WRITE_BLOCKS && number < notes.end;
  const int k = delta_part_of(job, there ? number : first);
  const DeltaSpan &p = job.part[k];
  const uint64_t own = there ? both(length_of(counts)) : 0;
  uint64_t up_to = own;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const uint64_t below = __shfl_up_sync(0xffffffffu, up_to, o);
    if (lane >= o) up_to += below;
  }
  /* A part that starts here starts at nothing. */
  const int64_t behind = p.first_block - first;
  const uint64_t start_of_part =
      __shfl_sync(0xffffffffu, up_to - own, static_cast<int>(behind > 0 ? behind : 0));
  Carry sum = {0, 0};
  if (p.first_block < notes.first) sum = *from;
  const uint64_t mine = behind > 0 ? up_to - start_of_part : before + up_to;
  sum.bytes += 4 * (mine & 0xffffffffu);
  sum.changes += mine >> 32;
  if (!there) return;
  const int64_t block = number - p.first_block, blocks = delta_blocks(p.n);
  const uint64_t end = static_cast<uint64_t>(blocks) * sizeof(DeltaHead) + sum.bytes;
  const uint64_t start = end - 4 * (own & 0xffffffffu);
  sh.start[lane] = start;
  sh.counts[lane] = counts;
  sh.part[lane] = k;
  if (end <= p.room)
    reinterpret_cast<DeltaHead *>(p.wire)[block] = {static_cast<uint32_t>(start / 4),
                                                    static_cast<uint16_t>(counts & 0xffff),
                                                    static_cast<uint16_t>(counts >> 16)};
  if (block == blocks - 1)
    finish_part(p, end, sum.changes, &sizes[k]);
  else if (number == notes.end - 1)
    *to = sum;
}

/* A warp's block of the stream on its way out. */
struct Said {
  const uint32_t *said; /* as noted */
  int changes, escapes;
  const uint16_t *now; /* its values */
  uint16_t *out;
};

/* Without values: an even number of bytes. */
__device__ inline void write_said(const Said &s) {
  enum { AT_ONCE = 6 };
  const uint32_t bytes = delta_codes_bytes(s.changes), lane = threadIdx.x % 32;
  uint32_t *out = reinterpret_cast<uint32_t *>(s.out);
  for (uint32_t first = lane; first < bytes / 4; first += 32 * AT_ONCE) {
    uint32_t word[AT_ONCE];
#pragma unroll
    for (uint32_t u = 0; u < AT_ONCE; u++)
      if (first + 32 * u < bytes / 4) word[u] = s.said[first + 32 * u];
#pragma unroll
    for (uint32_t u = 0; u < AT_ONCE; u++)
      if (first + 32 * u < bytes / 4) out[first + 32 * u] = word[u];
  }
  if (lane == 0 && bytes % 4)
    s.out[bytes / 2 - 1] = reinterpret_cast<const uint16_t *>(s.said)[bytes / 2 - 1];
}

/* New values of what a list says has the code DELTA_ESCAPE. */
__device__ inline void write_listed_values(const Said &s, uint16_t *value) {
  const int lane = threadIdx.x % 32;
  const uint16_t *list = reinterpret_cast<const uint16_t *>(s.said);
#pragma unroll 4
  for (int i = 0; i < s.changes; i += 32) {
    const int entry = i + lane < s.changes ? list[i + lane] : 0;
    const bool escape = entry % 16 == DELTA_ESCAPE;
    const unsigned all = __ballot_sync(0xffffffffu, escape);
    if (escape) value[__popc(all & ((1u << lane) - 1))] = s.now[entry / 16];
    value += __popc(all);
  }
}

/* The same of a map; place: room for 32 words of it. */
__device__ inline void write_mapped_values(const Said &s, uint16_t *place, uint16_t *value) {
  const int lane = threadIdx.x % 32;
  const uint32_t *code = s.said + MAP_WORDS;
  int rank = 0;
  for (int word = lane; word < MAP_WORDS; word += 32) {
    const uint32_t bits = s.said[word];
    const int own = __popc(bits), up_to = warp_up_to(own);
    uint32_t escapes = 0; /* of bits */
    int k = rank + up_to - own;
    for (uint32_t left = bits; left; left &= left - 1, k++)
      if ((code[k / 8] >> k % 8 * 4 & 15) == DELTA_ESCAPE) escapes |= left & -left;
    rank += __shfl_sync(0xffffffffu, up_to, 31);
    const int found = __popc(escapes), found_up_to = warp_up_to(found);
    uint16_t *to = place + found_up_to - found;
    for (; escapes; escapes &= escapes - 1)
      *to++ = static_cast<uint16_t>(32 * word + __ffs(static_cast<int>(escapes)) - 1);
    const int all = __shfl_sync(0xffffffffu, found_up_to, 31);
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < all; i += 32) value[i] = s.now[place[i]];
    value += all;
    __syncwarp();
  }
}

__device__ inline void write_blocks(const DeltaJob &job, const Notes &notes, int64_t first,
                                    WriteShared &sh) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int i = warp; i < WRITE_BLOCKS && first + i < notes.end; i += WRITE_WARPS) {
    const DeltaSpan &p = job.part[sh.part[i]];
    const Said s = {notes.said[first + i - notes.first], static_cast<int>(sh.counts[i] & 0xffff),
                    static_cast<int>(sh.counts[i] >> 16),
                    p.last + (first + i - p.first_block) * DELTA_BLOCK,
                    reinterpret_cast<uint16_t *>(p.wire + sh.start[i])};
    const uint32_t bytes = delta_block_bytes(s.changes, s.escapes);
    if (s.changes == 0 || sh.start[i] + bytes > p.room) continue;
    write_said(s);
    uint16_t *value = s.out + delta_codes_bytes(s.changes) / 2;
    if (s.escapes > 0 && delta_is_list(s.changes)) write_listed_values(s, value);
    if (s.escapes > 0 && !delta_is_list(s.changes)) write_mapped_values(s, sh.place[warp], value);
    value += s.escapes;
    if (lane == 0 && value < s.out + bytes / 2) *value = 0;
  }
}

#endif
