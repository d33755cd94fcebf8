/* Deltas of BF16 vectors at the other side, and checksums of them. A thread block takes a block of
 * the stream. */
#include "kernels/cuda/delta.h"
#include "kernels/cuda/ops.h"

namespace {

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

__device__ void change(const Block &b, int place, int code, int64_t escape) {
  check(place < b.n && (code != DELTA_ESCAPE || escape < b.escapes));
  uint16_t x = b.x[place];
  b.x[place] =
      code == DELTA_ESCAPE ? b.value[escape] : static_cast<uint16_t>(x + code - DELTA_ESCAPE);
}

__device__ void apply_list(const Block &b) {
  const uint16_t *list = reinterpret_cast<const uint16_t *>(b.in);
  int64_t escapes = 0;
  for (int first = 0; first < b.changes; first += DELTA_THREADS) {
    int k = first + static_cast<int>(threadIdx.x);
    int entry = k < b.changes ? list[k] : 0, code = entry % 16;
    uint64_t before = 0, total = 0;
    if (b.escapes > 0) before = delta_scan(code == DELTA_ESCAPE, &total);
    if (k < b.changes) change(b, entry / 16, code, escapes + static_cast<int64_t>(before));
    escapes += static_cast<int64_t>(total);
  }
}

__device__ int code_at(const uint8_t *codes, int k) { return codes[k / 2] >> k % 2 * 4 & 15; }

/* A thread has 16 bits of the map. */
__device__ void apply_bitmap(const Block &b) {
  const uint8_t *codes = b.in + DELTA_BITMAP_BYTES;
  int t = static_cast<int>(threadIdx.x);
  unsigned bits = reinterpret_cast<const uint16_t *>(b.in)[t];
  uint64_t total, before = 0;
  int rank = static_cast<int>(delta_scan(static_cast<uint64_t>(__popc(bits)), &total));
  check(total == static_cast<uint64_t>(b.changes));
  if (b.escapes > 0) {
    uint64_t mine = 0;
    for (int k = rank; k < rank + __popc(bits); k++) mine += code_at(codes, k) == DELTA_ESCAPE;
    before = delta_scan(mine, &total);
  }
  for (; bits; bits &= bits - 1, rank++) {
    int code = code_at(codes, rank);
    change(b, 16 * t + __ffs(static_cast<int>(bits)) - 1, code, static_cast<int64_t>(before));
    before += code == DELTA_ESCAPE;
  }
}

__global__ void __launch_bounds__(DELTA_THREADS)
    apply_kernel(const __grid_constant__ DeltaJob job) {
  const DeltaSpan &p = job.part[delta_part_of(job, blockIdx.x)];
  int64_t block = static_cast<int64_t>(blockIdx.x) - p.first_block;
  DeltaHead head = reinterpret_cast<const DeltaHead *>(p.wire)[block];
  if (head.changes == 0) return;
  uint64_t end = 4 * static_cast<uint64_t>(head.at) + delta_block_bytes(head.changes, head.escapes);
  int64_t n = p.n - block * DELTA_BLOCK;
  check(head.changes <= DELTA_BLOCK && head.escapes <= head.changes && end <= p.room);
  const uint8_t *in = reinterpret_cast<const uint8_t *>(p.wire) + 4 * static_cast<size_t>(head.at);
  Block b = {p.last + block * DELTA_BLOCK,
             in,
             reinterpret_cast<const uint16_t *>(in + delta_codes_bytes(head.changes)),
             head.changes,
             head.escapes,
             static_cast<int>(n < DELTA_BLOCK ? n : DELTA_BLOCK)};
  if (delta_is_list(b.changes))
    apply_list(b);
  else
    apply_bitmap(b);
}

void apply_some(Device *d, int n, const DeltaPart *parts) {
  DeltaJob job;
  int64_t blocks = 0;
  job.n = n;
  for (int i = 0; i < n; i++) {
    require(parts[i].last.dtype == DT_BF16);
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
  apply_kernel<<<static_cast<unsigned>(blocks), DELTA_THREADS, 0, cuda_stream(d)>>>(job);
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

__global__ void __launch_bounds__(DELTA_THREADS)
    checksum_kernel(const __grid_constant__ SumJob job, uint64_t *sums) {
  const uint16_t *x = job.part[blockIdx.y].x;
  int64_t n = job.part[blockIdx.y].count, i = blockIdx.x * int64_t(DELTA_THREADS) + threadIdx.x;
  int64_t step = int64_t(gridDim.x) * DELTA_THREADS, packs = n / DELTA_PACK;
  uint64_t sum = 0;
  if (reinterpret_cast<uintptr_t>(x) % 16) packs = 0;
  for (int64_t k = i; k < packs; k += step) {
    uint4 raw = reinterpret_cast<const uint4 *>(x)[k];
    const uint16_t *bits = reinterpret_cast<const uint16_t *>(&raw);
#pragma unroll
    for (int j = 0; j < DELTA_PACK; j++)
      sum += checksum_term(static_cast<uint64_t>(DELTA_PACK * k + j), bits[j]);
  }
  for (int64_t k = DELTA_PACK * packs + i; k < n; k += step)
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
    job.n = n - i < DELTA_PARTS ? n - i : DELTA_PARTS;
    for (int k = 0; k < job.n; k++) {
      require(x[i + k].dtype == DT_BF16);
      job.part[k] = {cuda_data<const uint16_t>(x[i + k]), tensor_numel(x[i + k])};
    }
    dim3 grid(static_cast<unsigned>(2 * cuda_of(d)->sms), static_cast<unsigned>(job.n));
    checksum_kernel<<<grid, DELTA_THREADS, 0, cuda_stream(d)>>>(job, sums + i);
    CUDA_LAUNCHED();
  }
}
