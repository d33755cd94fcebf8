/* y = x W^T + b for up to 64 rows and large W, as decoding has them: bound by the reading of W.
 *
 * The matrix is cut into units of 128 rows by 64 numbers of k, 128 of codes, and these, k first,
 * into one range for each multiprocessor: all of them read all the time. In a block one thread has
 * the copy engine bring W, several units ahead, the first of them before the kernel in front of
 * this one is done; another brings x (linear_stream_ring.h). Warpgroups multiply, with W's rows as
 * the product's rows and x's as its columns: of BF16 linear_stream_plain.cu, of codes
 * linear_stream_codes.cu. A tile of 128 rows that several blocks have a part of is added up, in
 * order of k, by all of them, each for some rows of x (linear_stream_end.h).
 *
 * A block takes more than half of a multiprocessor's shared memory: two of a product on one, while
 * kernels before and behind hold others, would take twice as long as the rest.
 *
 * The cut depends on W and the card alone: a row of y has the same bits whatever other rows are
 * with it. */
#ifndef KERNELS_CUDA_LINEAR_STREAM_H
#define KERNELS_CUDA_LINEAR_STREAM_H

#include <cuda.h>

#include "kernels/cuda/cuda.h"

typedef __nv_bfloat16 bf16;

constexpr int STREAM_MOST = 64;     /* rows of x */
constexpr int STREAM_K = 64;        /* of a unit of BF16 */
constexpr int CODES_K = 128;        /* of codes; blocks are multiples of it */
constexpr int STREAM_TILE = 128;    /* rows of a unit */
constexpr int STREAM_WORKERS = 128; /* threads that finish a tile */
constexpr int STREAM_BLOCKS = 160;  /* at most */

struct Stream {
  int m, n, k;       /* y is [m, n] */
  int tiles, chunks; /* units of n, of k */
  int each, longer;  /* units of a block; so many blocks have one more */
  bool add, y_f32;
  bool paired; /* a tile's rows lie so that a thread has two in a row */
  const bf16 *bias;
  void *y;
  float4 *parts; /* [2 blocks, N / 4, STREAM_WORKERS], zeros between products */
};

/* Of codes. */
struct CodeScales {
  const void *scales; /* [rows, blocks]: F32 or BF16 */
  int blocks;         /* of a row */
  unsigned per_unit;  /* 2^31 units of k a block, rounded up */
  bool half;          /* BF16 */
};

/* A launch: columns are 8, 16, 32 or 64, at least m. */
struct StreamLaunch {
  Stream a;
  CodeScales c;
  CUtensorMap w, x; /* copies of 64 rows of a unit, and of `columns` rows by 64 of k */
  int blocks, columns;
};
/* Whether a product is for linear_stream: on Hopper, BF16 or codes, and W large; and rows of W lie
 * on 16 bytes. */
bool linear_stream_takes(Device *d, const Linear &l, Tensor x);
/* Queues it, for up to STREAM_MOST rows; the front is made. Shapes are checked. */
void linear_stream(Device *d, const Linear &l, Tensor x, Tensor y_MO);

void stream_plain(cudaStream_t stream, const StreamLaunch &l);
void stream_codes(cudaStream_t stream, WireKind kind, const StreamLaunch &l);

#endif
