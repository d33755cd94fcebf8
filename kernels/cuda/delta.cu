/* Deltas of BF16 vectors: encode, in one pass. kernels/delta.h has the stream, delta_encode.h the
 * plan. */
#include "kernels/cuda/delta_find.h"
#include "kernels/cuda/delta_write.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows.h"

namespace {

__global__ void __launch_bounds__(ENCODE_THREADS)
    encode_kernel(const __grid_constant__ DeltaJob job, int64_t blocks, unsigned *next,
                  uint64_t *said, DeltaSize *sizes) {
  extern __shared__ __align__(16) char bytes[];
  EncodeShared &sh = *reinterpret_cast<EncodeShared *>(bytes);
  uint32_t *image = sh.image[0];
  for (int i = threadIdx.x; i < IMAGES * IMAGE_WORDS; i += ENCODE_THREADS) image[i] = 0;
  __syncthreads();
  wait_for_kernel_before();
  if (threadIdx.x < FINDERS)
    find_blocks(job, sh, next, said, blocks);
  else
    write_blocks(job, sh, said, sizes);
}

/* What the blocks say, and what is said of the parts. */
__global__ void clear_kernel(uint64_t *said, int64_t words, uint64_t *sizes, int64_t more) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  let_next_kernel_start();
  if (i < words) said[i] = 0;
  if (i < more) sizes[i] = 0;
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
  int64_t blocks = 0, sized = static_cast<int64_t>(n * sizeof *sizes / sizeof(uint64_t));
  job.n = n;
  for (int i = 0; i < n; i++) {
    job.part[i] = span_of(parts[i], blocks);
    blocks += delta_blocks(job.part[i].n);
  }
  size_t bytes = sizeof(uint64_t) * (static_cast<size_t>(blocks) + 1);
  uint64_t *said = static_cast<uint64_t *>(cuda_scratch(d, bytes));
  int64_t words = blocks + 1 > sized ? blocks + 1 : sized;
  clear_kernel<<<grid_of(cuda_ceil(words, 256)), 256, 0, cuda_stream(d)>>>(
      said, blocks + 1, reinterpret_cast<uint64_t *>(sizes), sized);
  CUDA_LAUNCHED();
  if (blocks == 0) return;
  const int shared = static_cast<int>(sizeof(EncodeShared));
  CUDA_CHECK(
      cudaFuncSetAttribute(encode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  int64_t stay = resident_blocks(d, encode_kernel, ENCODE_THREADS, sizeof(EncodeShared), blocks);
  launch_behind(d, grid_of(stay), ENCODE_THREADS, sizeof(EncodeShared), encode_kernel, job, blocks,
                reinterpret_cast<unsigned *>(said + blocks), said, sizes);
}

}  // namespace

/* Empty parts have no block to say their size. */
void cuda_delta_encode(Device *d, int n, const DeltaPart *parts, DeltaSize *sizes) {
  for (int i = 0; i < n; i += DELTA_PARTS)
    encode_some(d, n - i < DELTA_PARTS ? n - i : DELTA_PARTS, parts + i, sizes + i);
}
