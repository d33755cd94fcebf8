/* Parts of quantization as kernels see them. Internal to kernels/cuda/quant*.cu.
 *
 * The three ops are one: a sum of sources, in order, goes to a sink, both spans on the wire. x is a
 * span in the plain format of its type (one source, or the sink; where it is added to, the sum
 * starts with what the sink holds). A launch takes up to QUANT_PARTS spans: its grid is cut into
 * chunks, and a thread block finds the part that its chunk lies in. */
#ifndef KERNELS_CUDA_QUANT_PARTS_H
#define KERNELS_CUDA_QUANT_PARTS_H

#include "kernels/cuda/cuda.h"

enum { QUANT_PARTS = 64, QUANT_THREADS = 256, QUANT_WARPS = QUANT_THREADS / 32 };

struct QuantPart {
  const char *from_scales, *from_payload;
  int64_t stride; /* bytes from source to source */
  char *to_scales, *to_payload;
  uint16_t *error; /* NULL: none */
  /* Where blocks are, as in the CPU's Walk: a span of `blocks` starts with block `start` of its
   * row, behind `lead` elements. Plain formats: one row. */
  int64_t width, row_blocks, blocks, start, lead;
  int64_t count; /* elements */
  int64_t first_chunk;
  float keep; /* of the error */
  int n;      /* sources */
};

struct QuantJob {
  WireKind from, to;
  DType from_scale, to_scale;
  int block;
  bool add; /* the sum starts with what is in the sink, a plain one */
  int n;
  QuantPart part[QUANT_PARTS];
};

/* The launches of a job whose parts have first_chunk, with `chunks` in all. */
bool quant_int4_takes(const QuantJob &job,
                      const QuantPart &p); /* sums back to int4, whole blocks */
int64_t quant_int4_chunks(const QuantJob &job, const QuantPart &p);
void quant_int4_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks);
/* One plain span in whole blocks; a job with errors has them in all its parts. */
bool quant_one_takes(const QuantJob &job, const QuantPart &p);
int64_t quant_one_chunks(const QuantJob &job, const QuantPart &p);
void quant_one_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks);
bool quant_sum_takes(const QuantJob &job, const QuantPart &p); /* sums of codes, whole blocks */
int64_t quant_sum_chunks(const QuantJob &job, const QuantPart &p);
void quant_sum_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks);
bool quant_wide_takes(const QuantJob &job, const QuantPart &p); /* aligned, in whole groups of 8 */
int64_t quant_wide_chunks(const QuantJob &job, const QuantPart &p);
void quant_wide_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks);
int64_t quant_plain_chunks(const QuantPart &p); /* both formats without blocks */
void quant_plain_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks);
int64_t quant_any_chunks(const QuantPart &p);
void quant_any_launch(cudaStream_t stream, const QuantJob &job, int64_t chunks);

/* The smallest alignment of a part's payloads, at most 16. */
static inline int64_t quant_alignment(const void *p, int64_t stride) {
  int64_t bits = (int64_t)(uintptr_t)p | stride | 16;
  return bits & -bits;
}

/* Whether all blocks are whole, and as large as a power of two from 64 to 1024. */
static inline bool quant_is_whole(const QuantJob &job, const QuantPart &p) {
  return p.width % job.block == 0 && (job.block & (job.block - 1)) == 0 && job.block >= 64 &&
         job.block <= 1024;
}

/* Whether eights can be read and written in pairs: 16 bytes of a plain format, 8 of codes. */
static inline bool quant_is_paired(const QuantJob &job, const QuantPart &p) {
  auto bytes = [](WireKind kind) { return kind == WIRE_F32 || kind == WIRE_BF16 ? 16 : 8; };
  return quant_alignment(p.from_payload, p.stride) >= bytes(job.from) &&
         quant_alignment(p.to_payload, 0) >= bytes(job.to) && quant_alignment(p.error, 0) >= 16;
}

/* A block is cut among threads of `each` elements, as many as a power of two: its exponent. */
static inline int quant_lane_bits(int block, int each) {
  int bits = 0;
  while (each << bits < block) bits++;
  return bits;
}

__device__ inline const QuantPart &quant_part_of(const QuantJob &job, int64_t chunk) {
  int low = 0, high = job.n - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (job.part[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle - 1;
  }
  return job.part[low];
}

/* One block: its first element, size, and first byte in an int4 payload. Size 0: behind the end. */
struct QuantPlace {
  int64_t at, half_bytes;
  int n;
};

__device__ inline QuantPlace quant_place(const QuantPart &p, int block, int64_t i) {
  if (i >= p.blocks) return {0, 0, 0};
  int64_t row = (p.start + i) / p.row_blocks, column = (p.start + i) % p.row_blocks * block;
  int64_t left = p.width - column;
  QuantPlace place;
  place.at = row * p.width + column - p.lead;
  place.half_bytes = row * ((p.width + 1) / 2) + column / 2 - p.lead / 2;
  place.n = static_cast<int>(left < block ? left : block);
  return place;
}

#endif
