/* Deltas of BF16 vectors at the other side, and checksums of them. A thread block takes a block of
 * the stream, so that what it changes is asked for at once, from places near each other; where
 * blocks say little, each of its warps takes one. */
#include "kernels/cuda/delta.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows.h"

namespace {

enum {
  SHORT_LIST = 32, /* changes, one a lane */
  APPLY_WARPS = DELTA_THREADS / 32,
  APPLY_RESIDENT = 8, /* thread blocks of a multiprocessor */
  SUM_UNROLL = 4,
  SUM_BLOCKS = 8 /* of a multiprocessor */
};

struct Block {
  uint16_t *x;
  const uint8_t *in;
  const uint16_t *value; /* of escapes, in order */
  int changes, escapes;
  int n; /* elements of x */
};

/* A stream that does not fit its vector: the checks of the CPU's twin, where memory is at stake. */
__device__ void check(bool fits) {
  if (!fits) __trap();
}

__device__ uint16_t changed(const Block &b, uint16_t x, int code, int escape) {
  check(code != DELTA_ESCAPE || escape < b.escapes);
  return code == DELTA_ESCAPE ? b.value[escape] : static_cast<uint16_t>(x + code - DELTA_ESCAPE);
}

__device__ void apply_list(const Block &b) {
  const uint16_t *list = reinterpret_cast<const uint16_t *>(b.in);
  int escapes = 0;
  for (int first = 0; first < b.changes; first += DELTA_THREADS) {
    int k = first + static_cast<int>(threadIdx.x);
    int entry = k < b.changes ? list[k] : 0, place = entry / 16, code = entry % 16;
    uint64_t before = 0, total = 0;
    if (b.escapes > 0) before = delta_scan(code == DELTA_ESCAPE, &total);
    check(place < b.n);
    if (k < b.changes)
      b.x[place] = changed(b, b.x[place], code, escapes + static_cast<int>(before));
    escapes += static_cast<int>(total);
  }
}

/* By one warp. */
__device__ void apply_short_list(const Block &b) {
  const int lane = threadIdx.x % 32;
  const int entry = lane < b.changes ? reinterpret_cast<const uint16_t *>(b.in)[lane] : 0;
  const int place = entry / 16, code = entry % 16;
  const unsigned escapes = __ballot_sync(0xffffffffu, code == DELTA_ESCAPE);
  if (lane >= b.changes) return;
  check(place < b.n);
  b.x[place] = changed(b, b.x[place], code, __popc(escapes & ((1u << lane) - 1)));
}

/* n codes, at most 16, from the k-th on, the first the lowest four bits. */
__device__ uint64_t codes_at(const uint8_t *codes, int k, int n) {
  const uint32_t *word = reinterpret_cast<const uint32_t *>(codes) + k / 8;
  const int skip = k % 8, last = (skip + n + 7) / 8; /* words that have some */
  uint64_t low = last > 0 ? word[0] : 0, high = last > 2 ? word[2] : 0;
  if (last > 1) low |= static_cast<uint64_t>(word[1]) << 32;
  return skip == 0 ? low : low >> 4 * skip | high << (64 - 4 * skip);
}

/* Changes a thread's 16 values. escape: how many are before its own. */
__device__ void apply_bits(const Block &b, int first, unsigned bits, uint64_t codes, int escape) {
  uint16_t *x = b.x + first;
  check(first + 32 - __clz(static_cast<int>(bits)) <= b.n);
  if (first + 16 <= b.n && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    uint4 raw[2] = {reinterpret_cast<uint4 *>(x)[0], reinterpret_cast<uint4 *>(x)[1]};
    uint16_t *old = reinterpret_cast<uint16_t *>(raw);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      if (!(bits >> i & 1)) continue;
      const int code = static_cast<int>(codes & 15);
      old[i] = changed(b, old[i], code, escape);
      escape += code == DELTA_ESCAPE;
      codes >>= 4;
    }
    reinterpret_cast<uint4 *>(x)[0] = raw[0];
    reinterpret_cast<uint4 *>(x)[1] = raw[1];
    return;
  }
  for (; bits; bits &= bits - 1, codes >>= 4) {
    const int code = static_cast<int>(codes & 15), i = __ffs(static_cast<int>(bits)) - 1;
    x[i] = changed(b, x[i], code, escape);
    escape += code == DELTA_ESCAPE;
  }
}

static_assert(16 * DELTA_THREADS == DELTA_BLOCK, "a thread has 16 bits of the map");
__device__ void apply_bitmap(const Block &b) {
  const int t = static_cast<int>(threadIdx.x);
  const unsigned bits = reinterpret_cast<const uint16_t *>(b.in)[t];
  const int mine = __popc(bits);
  uint64_t total, before = 0;
  const int rank = static_cast<int>(delta_scan(static_cast<uint64_t>(mine), &total));
  check(total == static_cast<uint64_t>(b.changes));
  const uint64_t codes = codes_at(b.in + DELTA_BITMAP_BYTES, rank, mine);
  if (b.escapes > 0) {
    int escapes = 0;
    for (int k = 0; k < mine; k++) escapes += (codes >> 4 * k & 15) == DELTA_ESCAPE;
    before = delta_scan(static_cast<uint64_t>(escapes), &total);
  }
  if (bits) apply_bits(b, 16 * t, bits, codes, static_cast<int>(before));
}

/* What the stream says of a block of the launch; no changes: nothing, or no such block. */
__device__ Block block_of(const DeltaJob &job, int64_t number, int64_t blocks) {
  if (number >= blocks) return {};
  const DeltaSpan &p = job.part[delta_part_of(job, number)];
  const int64_t block = number - p.first_block, left = p.n - block * DELTA_BLOCK;
  const DeltaHead head = reinterpret_cast<const DeltaHead *>(p.wire)[block];
  if (head.changes == 0) return {};
  const uint64_t at = 4 * static_cast<uint64_t>(head.at);
  const uint64_t end = at + delta_block_bytes(head.changes, head.escapes);
  check(head.changes <= DELTA_BLOCK && head.escapes <= head.changes && end <= p.room);
  const uint8_t *in = reinterpret_cast<const uint8_t *>(p.wire) + at;
  return {p.last + block * DELTA_BLOCK,
          in,
          reinterpret_cast<const uint16_t *>(in + delta_codes_bytes(head.changes)),
          head.changes,
          head.escapes,
          static_cast<int>(left < DELTA_BLOCK ? left : DELTA_BLOCK)};
}

/* By all threads. */
__device__ void apply_block(const Block &b) {
  if (b.changes == 0) return;
  if (delta_is_list(b.changes))
    apply_list(b);
  else
    apply_bitmap(b);
}

__global__ void __launch_bounds__(DELTA_THREADS, APPLY_RESIDENT)
    apply_kernel(const __grid_constant__ DeltaJob job, int64_t blocks) {
  apply_block(block_of(job, blockIdx.x, blocks));
}

/* Each warp a block; the few that are no short lists together. */
__global__ void __launch_bounds__(DELTA_THREADS, APPLY_RESIDENT)
    apply_short_kernel(const __grid_constant__ DeltaJob job, int64_t blocks) {
  __shared__ Block block[APPLY_WARPS];
  const int warp = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * APPLY_WARPS;
  const Block own = block_of(job, first + warp, blocks);
  const bool is_short = own.changes <= SHORT_LIST;
  if (threadIdx.x % 32 == 0) block[warp] = own;
  if (is_short) apply_short_list(own);
  if (!__syncthreads_or(!is_short)) return;
  for (int w = 0; w < APPLY_WARPS; w++)
    if (block[w].changes > SHORT_LIST) apply_block(block[w]);
}

void apply_some(Device *d, int n, const DeltaPart *parts) {
  DeltaJob job;
  int64_t blocks = 0, bytes = 0;
  job.n = n;
  for (int i = 0; i < n; i++) {
    require(parts[i].last.dtype == DT_BF16);
    bytes += static_cast<int64_t>(parts[i].room);
    job.part[i] = {};
    job.part[i].last = cuda_data<uint16_t>(parts[i].last);
    job.part[i].wire = static_cast<char *>(parts[i].wire);
    job.part[i].room = parts[i].room;
    job.part[i].n = tensor_numel(parts[i].last);
    job.part[i].first_block = blocks;
    require(static_cast<size_t>(delta_blocks(job.part[i].n)) * sizeof(DeltaHead) <= parts[i].room);
    blocks += delta_blocks(job.part[i].n);
  }
  if (blocks == 0) return;
  const int64_t bytes_if_short = blocks * static_cast<int64_t>(sizeof(DeltaHead) + 2 * SHORT_LIST);
  if (bytes <= bytes_if_short)
    apply_short_kernel<<<grid_of(cuda_ceil(blocks, APPLY_WARPS)), DELTA_THREADS, 0,
                         cuda_stream(d)>>>(job, blocks);
  else
    apply_kernel<<<grid_of(blocks), DELTA_THREADS, 0, cuda_stream(d)>>>(job, blocks);
  CUDA_LAUNCHED();
}

/* ---- checksums ---- */

struct SumJob {
  int n;
  struct {
    const uint16_t *x;
    int64_t count;
  } part[DELTA_PARTS];
};

/* The terms of a pack with the numbers i to i + 7, without their common factor: sum of (bits + 1)
 * (2 (i + j) + 1) = (2 i + 1) sum of (bits + 1) + 2 sum of j (bits + 1). */
__device__ uint64_t pack_terms(uint4 raw, uint64_t i) {
  const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t sum = DELTA_PACK, by_place = DELTA_PACK * (DELTA_PACK - 1) / 2;
#pragma unroll
  for (uint32_t k = 0; k < 4; k++) {
    sum = __dp2a_lo(word[k], 0x0101u, sum);
    by_place = __dp2a_lo(word[k], 2 * k | (2 * k + 1) << 8, by_place);
  }
  return (2 * i + 1) * sum + 2 * static_cast<uint64_t>(by_place);
}

__global__ void __launch_bounds__(DELTA_THREADS)
    checksum_kernel(const __grid_constant__ SumJob job, uint64_t *sums) {
  const uint16_t *x = job.part[blockIdx.y].x;
  int64_t n = job.part[blockIdx.y].count, i = blockIdx.x * int64_t(DELTA_THREADS) + threadIdx.x;
  int64_t step = int64_t(gridDim.x) * DELTA_THREADS, packs = n / DELTA_PACK, k = i;
  const uint4 *pack = reinterpret_cast<const uint4 *>(x);
  uint64_t sum = 0;
  if (reinterpret_cast<uintptr_t>(x) % 16) packs = 0;
  for (; k + (SUM_UNROLL - 1) * step < packs; k += SUM_UNROLL * step) {
    uint4 raw[SUM_UNROLL];
#pragma unroll
    for (int u = 0; u < SUM_UNROLL; u++) raw[u] = pack[k + u * step];
#pragma unroll
    for (int u = 0; u < SUM_UNROLL; u++)
      sum += pack_terms(raw[u], static_cast<uint64_t>(DELTA_PACK * (k + u * step)));
  }
  for (; k < packs; k += step) sum += pack_terms(pack[k], static_cast<uint64_t>(DELTA_PACK * k));
  sum *= checksum_term(0, 0);
  for (k = DELTA_PACK * packs + i; k < n; k += step)
    sum += checksum_term(static_cast<uint64_t>(k), x[k]);
  sum = block_sum(sum);
  /* Of whole numbers: the order does not matter. */
  if (threadIdx.x == 0)
    atomicAdd(reinterpret_cast<unsigned long long *>(&sums[blockIdx.y]),
              static_cast<unsigned long long>(sum));
}

}  // namespace

void cuda_delta_apply(Device *d, int n, const DeltaPart *parts) {
  for (int i = 0; i < n; i += DELTA_PARTS)
    apply_some(d, n - i < DELTA_PARTS ? n - i : DELTA_PARTS, parts + i);
}

void cuda_checksum(Device *d, int n, const Tensor *x, uint64_t *sums) {
  if (n == 0) return;
  CUDA_CHECK(cudaMemsetAsync(sums, 0, static_cast<size_t>(n) * sizeof *sums, cuda_stream(d)));
  for (int i = 0; i < n; i += DELTA_PARTS) {
    SumJob job;
    int64_t most = 0;
    job.n = n - i < DELTA_PARTS ? n - i : DELTA_PARTS;
    for (int k = 0; k < job.n; k++) {
      require(x[i + k].dtype == DT_BF16);
      job.part[k] = {cuda_data<const uint16_t>(x[i + k]), tensor_numel(x[i + k])};
      if (job.part[k].count > most) most = job.part[k].count;
    }
    int64_t blocks = cuda_ceil(most, DELTA_THREADS * DELTA_PACK * SUM_UNROLL);
    int64_t fill = static_cast<int64_t>(SUM_BLOCKS) * cuda_of(d)->sms;
    if (blocks == 0) continue;
    dim3 grid(static_cast<unsigned>(blocks < fill ? blocks : fill), static_cast<unsigned>(job.n));
    checksum_kernel<<<grid, DELTA_THREADS, 0, cuda_stream(d)>>>(job, sums + i);
    CUDA_LAUNCHED();
  }
}
