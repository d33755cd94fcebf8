/* Deltas of BF16 vectors: encode, in two kernels. kernels/delta.h has the stream, delta_encode.h
 * the plan. */
#include "kernels/cuda/delta_find.h"
#include "kernels/cuda/delta_write.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows.h"

namespace {

__global__ void __launch_bounds__(32 * FIND_WARPS, FIND_RESIDENT)
    find_kernel(const __grid_constant__ DeltaJob job, Notes notes) {
  __shared__ Found of[FIND_WARPS];
  __shared__ uint32_t counts[FIND_WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t note = static_cast<int64_t>(blockIdx.x) * FIND_WARPS + warp;
  const int64_t number = notes.first + note;
  wait_for_kernel_before();
  uint32_t found = 0;
  if (number < notes.end) found = find_block(values_of(job, number), &of[warp], notes.said[note]);
  if (lane == 0) counts[warp] = found;
  if (lane == 0 && number < notes.end) notes.counts[note] = found;
  __syncthreads();
  if (threadIdx.x > 0) return;
  Length sum = {0, 0};
  for (int i = 0; i < FIND_WARPS; i++) {
    const Length one = length_of(counts[i]);
    sum = {sum.words + one.words, sum.changes + one.changes};
  }
  notes.groups[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(32 * WRITE_WARPS)
    write_kernel(const __grid_constant__ DeltaJob job, Notes notes, const Carry *from, Carry *to,
                 DeltaSize *sizes) {
  __shared__ WriteShared sh;
  const int64_t first = notes.first + static_cast<int64_t>(blockIdx.x) * WRITE_BLOCKS;
  const int64_t part = job.part[delta_part_of(job, first)].first_block;
  wait_for_kernel_before();
  const uint32_t counts = counts_of(notes, first);
  const uint64_t before =
      block_sum(sum_lengths(notes, part > notes.first ? part : notes.first, first));
  if (threadIdx.x < 32) place_blocks(job, notes, first, counts, before, from, to, sh, sizes);
  __syncthreads();
  write_blocks(job, notes, first, sh);
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

static_assert(NOTE_BLOCKS * (sizeof(uint32_t[NOTE_WORDS + 1]) + sizeof(Length)) < GEMM_WORKSPACE,
              "no more scratch than every device has anyway");

/* Room for notes of so many blocks, from `bytes` on; returns where it ends. */
char *place_notes(Notes *notes, int64_t blocks, char *bytes) {
  notes->said = reinterpret_cast<uint32_t(*)[NOTE_WORDS]>(bytes);
  notes->groups = reinterpret_cast<Length *>(notes->said + blocks);
  notes->counts = reinterpret_cast<uint32_t *>(notes->groups + cuda_ceil(blocks, FIND_WARPS));
  return reinterpret_cast<char *>(notes->counts + blocks);
}

void encode_some(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes) {
  DeltaJob job;
  int64_t blocks = 0;
  bool has_empty = false; /* there no block says the size */
  job.n = n;
  for (int i = 0; i < n; i++) {
    job.part[i] = span_of(parts[i], blocks);
    blocks += delta_blocks(job.part[i].n);
    has_empty = has_empty || job.part[i].n == 0;
  }
  if (has_empty)
    CUDA_CHECK(cudaMemsetAsync(sizes, 0, static_cast<size_t>(n) * sizeof *sizes, cuda_stream(d)));
  if (blocks == 0) return;
  const int64_t lot = NOTE_BLOCKS, most = blocks < lot ? blocks : lot;
  Notes notes = {};
  const size_t carries = 2 * sizeof(Carry);
  const size_t bytes = reinterpret_cast<size_t>(place_notes(&notes, most, nullptr)) + carries;
  Carry *carry = static_cast<Carry *>(cuda_scratch(d, bytes));
  place_notes(&notes, most, reinterpret_cast<char *>(carry + 2));
  for (int turn = 0; notes.end < blocks; turn = 1 - turn) {
    notes.first = notes.end;
    notes.end = notes.first + most < blocks ? notes.first + most : blocks;
    launch_behind(d, grid_of(cuda_ceil(notes.end - notes.first, FIND_WARPS)), 32 * FIND_WARPS,
                  FIND_SPARE, find_kernel, job, notes);
    launch_behind(d, grid_of(cuda_ceil(notes.end - notes.first, WRITE_BLOCKS)), 32 * WRITE_WARPS, 0,
                  write_kernel, job, notes, carry + turn, carry + 1 - turn, sizes);
  }
}

}  // namespace

void cuda_delta_encode(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes) {
  for (int i = 0; i < n; i += DELTA_PARTS)
    encode_some(d, n - i < DELTA_PARTS ? n - i : DELTA_PARTS, parts + i, sizes + i);
}
