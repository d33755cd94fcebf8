/* Deltas of BF16 vectors: encode, in one pass. kernels/delta.h has the stream.
 *
 * A thread block takes a block of the stream; where that starts depends on all before it. Thread
 * blocks take numbers in the order in which they start and say how long their blocks are, first by
 * themselves, then with all before; each looks back until one says the latter (Merrill & Garland
 * 2016, decoupled look-back). Sums are of whole numbers: the stream does not depend on the order.
 */
#include "kernels/cuda/delta.h"
#include "kernels/cuda/ops.h"

namespace {

/* What a block says of its length: nothing yet, its own, or up to its end. */
constexpr uint64_t OWN = 1ull << 62, UP_TO = 2ull << 62, LENGTH = OWN - 1;

struct Found {
  uint16_t now[2][DELTA_PACK], last[2][DELTA_PACK];
};

__device__ void load_pack(const DeltaSpan &p, int64_t at, uint16_t *now, uint16_t *last) {
  if (p.aligned && at + DELTA_PACK <= p.n) {
    uint4 old = *reinterpret_cast<const uint4 *>(p.last + at);
    const uint16_t *o = reinterpret_cast<const uint16_t *>(&old);
    if (p.type == DT_F32) {
      const float4 *x = reinterpret_cast<const float4 *>(static_cast<const float *>(p.now) + at);
      float4 a = x[0], b = x[1];
      const float v[DELTA_PACK] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < DELTA_PACK; i++) now[i] = __bfloat16_as_ushort(__float2bfloat16_rn(v[i]));
    } else {
      uint4 raw = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(p.now) + at);
      const uint16_t *r = reinterpret_cast<const uint16_t *>(&raw);
#pragma unroll
      for (int i = 0; i < DELTA_PACK; i++) now[i] = r[i];
    }
#pragma unroll
    for (int i = 0; i < DELTA_PACK; i++) last[i] = o[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < DELTA_PACK; i++) {
    bool there = at + i < p.n;
    last[i] = there ? p.last[at + i] : 0;
    now[i] = last[i];
    if (there && p.type == DT_F32)
      now[i] = __bfloat16_as_ushort(__float2bfloat16_rn(static_cast<const float *>(p.now)[at + i]));
    else if (there)
      now[i] = static_cast<const uint16_t *>(p.now)[at + i];
  }
}

__device__ void keep_pack(const DeltaSpan &p, int64_t at, const uint16_t *now,
                          const uint16_t *last) {
  bool changed = false;
#pragma unroll
  for (int i = 0; i < DELTA_PACK; i++) changed |= now[i] != last[i];
  if (!changed) return;
  if (p.aligned && at + DELTA_PACK <= p.n) {
    uint4 raw;
    uint16_t *r = reinterpret_cast<uint16_t *>(&raw);
#pragma unroll
    for (int i = 0; i < DELTA_PACK; i++) r[i] = now[i];
    *reinterpret_cast<uint4 *>(p.last + at) = raw;
    return;
  }
#pragma unroll
  for (int i = 0; i < DELTA_PACK; i++)
    if (at + i < p.n && now[i] != last[i]) p.last[at + i] = now[i];
}

/* Changes and escapes of both packs, in four fields. */
__device__ uint64_t count_changes(const Found &f) {
  uint32_t changes[2] = {0, 0}, escapes[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < DELTA_PACK; i++) {
      bool changed = f.now[h][i] != f.last[h][i];
      changes[h] += changed;
      escapes[h] += changed && delta_code(f.last[h][i], f.now[h][i]) == DELTA_ESCAPE;
    }
  return changes[0] | static_cast<uint64_t>(escapes[0]) << 16 |
         static_cast<uint64_t>(changes[1]) << 32 | static_cast<uint64_t>(escapes[1]) << 48;
}

/* Bytes of all blocks of the part before this one. One warp calls it; block > 0. */
__device__ uint64_t look_back(volatile uint64_t *said, int64_t block) {
  uint64_t sum = 0;
  int lane = threadIdx.x;
  for (int64_t at = block - 1;; at -= 32) {
    uint64_t word = UP_TO; /* before the first: nothing */
    if (at - lane >= 0)
      while (((word = said[at - lane]) & ~LENGTH) == 0) {
      }
    unsigned up_to = __ballot_sync(0xffffffffu, (word & UP_TO) != 0);
    int nearest = up_to ? __ffs(static_cast<int>(up_to)) - 1 : 31;
    uint64_t part = lane <= nearest ? word & LENGTH : 0;
    sum += warp_sum(part);
    if (up_to) return sum;
  }
}

struct Out {
  uint8_t *block; /* where what the block says starts; NULL: no room */
  int changes, escapes;
};

/* rank, escape: how many are before the thread's pack. */
__device__ void write_pack(const Out &out, uint8_t *codes, int pack, const uint16_t *now,
                           const uint16_t *last, int rank, int escape) {
  bool list = delta_is_list(out.changes);
  uint16_t *entry = reinterpret_cast<uint16_t *>(out.block);
  uint16_t *value = reinterpret_cast<uint16_t *>(out.block + delta_codes_bytes(out.changes));
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < DELTA_PACK; i++) {
    if (now[i] == last[i]) continue;
    int code = delta_code(last[i], now[i]);
    mask |= 1u << i;
    if (list)
      entry[rank] = static_cast<uint16_t>((pack * DELTA_PACK + i) * 16 + code);
    else
      codes[rank] = static_cast<uint8_t>(code);
    rank++;
    if (code == DELTA_ESCAPE) value[escape++] = now[i];
  }
  if (!list) out.block[pack] = static_cast<uint8_t>(mask);
}

/* What is between the parts of a block, and behind it, is zero. */
__device__ void write_rest(const Out &out, const uint8_t *codes) {
  uint32_t end = delta_codes_bytes(out.changes);
  if (!delta_is_list(out.changes)) {
    int bytes = (out.changes + 1) / 2;
    for (int i = threadIdx.x; i < bytes; i += DELTA_THREADS) {
      int high = 2 * i + 1 < out.changes ? codes[2 * i + 1] : 0;
      out.block[DELTA_BITMAP_BYTES + i] = static_cast<uint8_t>(codes[2 * i] | high << 4);
    }
    if (threadIdx.x == 0 && bytes % 2) out.block[DELTA_BITMAP_BYTES + bytes] = 0;
  }
  end += 2 * static_cast<uint32_t>(out.escapes);
  if (threadIdx.x == 0 && end % 4) *reinterpret_cast<uint16_t *>(out.block + end) = 0;
}

/* The last block of a part knows the stream's size, and fills it up. */
__device__ void finish_part(const DeltaSpan &p, uint64_t end, DeltaSize *size) {
  uint64_t bytes = (end + 15) / 16 * 16;
  size->bytes = bytes;
  if (bytes > p.room) return;
  for (uint64_t at = end; at < bytes; at += 4) *reinterpret_cast<uint32_t *>(p.wire + at) = 0;
}

__global__ void __launch_bounds__(DELTA_THREADS)
    encode_kernel(const __grid_constant__ DeltaJob job, unsigned *next, uint64_t *said,
                  DeltaSize *sizes) {
  __shared__ int64_t number;
  __shared__ uint64_t start;
  __shared__ uint8_t codes[DELTA_BLOCK];
  if (threadIdx.x == 0) number = atomicAdd(next, 1u);
  __syncthreads();
  int k = delta_part_of(job, number);
  const DeltaSpan &p = job.part[k];
  int64_t block = number - p.first_block, blocks = delta_blocks(p.n);
  int pack = static_cast<int>(threadIdx.x);
  int64_t at = block * DELTA_BLOCK + pack * DELTA_PACK, half = DELTA_BLOCK / 2;
  Found f;
  load_pack(p, at, f.now[0], f.last[0]);
  load_pack(p, at + half, f.now[1], f.last[1]);
  uint64_t total, before = delta_scan(count_changes(f), &total);
  int changes0 = static_cast<int>(total & 0xffff),
      escapes0 = static_cast<int>(total >> 16 & 0xffff);
  Out out = {nullptr, changes0 + static_cast<int>(total >> 32 & 0xffff),
             escapes0 + static_cast<int>(total >> 48)};
  uint64_t own = delta_block_bytes(out.changes, out.escapes);
  if (threadIdx.x < 32) {
    volatile uint64_t *word = said + p.first_block;
    uint64_t heads = static_cast<uint64_t>(blocks) * sizeof(DeltaHead), sum = heads;
    if (block > 0) {
      if (threadIdx.x == 0) word[block] = OWN | own;
      sum = look_back(word, block);
    }
    if (threadIdx.x == 0) {
      word[block] = UP_TO | (sum + own);
      start = sum;
      atomicAdd(reinterpret_cast<unsigned long long *>(&sizes[k].changed),
                static_cast<unsigned long long>(out.changes));
      if (block == blocks - 1) finish_part(p, sum + own, &sizes[k]);
    }
  }
  __syncthreads();
  keep_pack(p, at, f.now[0], f.last[0]);
  keep_pack(p, at + half, f.now[1], f.last[1]);
  if (start + own > p.room) return;
  out.block = reinterpret_cast<uint8_t *>(p.wire) + start;
  if (threadIdx.x == 0)
    reinterpret_cast<DeltaHead *>(p.wire)[block] = {static_cast<uint32_t>(start / 4),
                                                    static_cast<uint16_t>(out.changes),
                                                    static_cast<uint16_t>(out.escapes)};
  write_pack(out, codes, pack, f.now[0], f.last[0], static_cast<int>(before & 0xffff),
             static_cast<int>(before >> 16 & 0xffff));
  write_pack(out, codes, pack + DELTA_THREADS, f.now[1], f.last[1],
             changes0 + static_cast<int>(before >> 32 & 0xffff),
             escapes0 + static_cast<int>(before >> 48));
  __syncthreads();
  write_rest(out, codes);
}

DeltaSpan span_of(const DeltaPart &p, int64_t first_block) {
  require(p.last.dtype == DT_BF16 && tensor_numel(p.now) == tensor_numel(p.last));
  require(p.now.dtype == DT_F32 || p.now.dtype == DT_BF16);
  require(reinterpret_cast<uintptr_t>(p.wire) % 16 == 0);
  uintptr_t places =
      reinterpret_cast<uintptr_t>(p.now.data) | reinterpret_cast<uintptr_t>(p.last.data);
  return {p.now.data,
          cuda_data<uint16_t>(p.last),
          static_cast<char *>(p.wire),
          p.room,
          tensor_numel(p.last),
          first_block,
          p.now.dtype,
          places % 16 == 0};
}

void encode_some(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes) {
  DeltaJob job;
  int64_t blocks = 0;
  job.n = n;
  for (int i = 0; i < n; i++) {
    job.part[i] = span_of(parts[i], blocks);
    blocks += delta_blocks(job.part[i].n);
  }
  if (blocks == 0) return;
  size_t bytes = sizeof(uint64_t) * (static_cast<size_t>(blocks) + 1);
  uint64_t *said = static_cast<uint64_t *>(cuda_scratch(d, bytes));
  CUDA_CHECK(cudaMemsetAsync(said, 0, bytes, cuda_stream(d)));
  encode_kernel<<<static_cast<unsigned>(blocks), DELTA_THREADS, 0, cuda_stream(d)>>>(
      job, reinterpret_cast<unsigned *>(said + blocks), said, sizes);
  CUDA_LAUNCHED();
}

}  // namespace

/* Empty parts have no block to say their size. */
void cuda_delta_encode(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes) {
  if (n == 0) return;
  CUDA_CHECK(cudaMemsetAsync(sizes, 0, static_cast<size_t>(n) * sizeof *sizes, cuda_stream(d)));
  for (int i = 0; i < n; i += DELTA_PARTS)
    encode_some(d, n - i < DELTA_PARTS ? n - i : DELTA_PARTS, parts + i, sizes + i);
}
