/* Rows of W from memory to tensor-core instructions, for linear_few.cu: BF16, and the codes and
 * scales of a wire format, which are exact as BF16 and whose scales multiply sums.
 *
 * A warp has 16 rows, and takes them piece by piece of PIECE numbers of k. Where a thread's numbers
 * lie in k does not matter to a sum as long as x and W agree, so each thread reads 16 bytes in a
 * row, OWN numbers from lane % 4 * OWN on, and calls them its share of several instructions. */
#ifndef KERNELS_CUDA_LINEAR_WEIGHTS_H
#define KERNELS_CUDA_LINEAR_WEIGHTS_H

#include "kernels/cuda/linear_codes.h"
#include "kernels/cuda/mma.h"

namespace {

constexpr int PIECE = 64;

struct Weights {
  const void *rows;        /* [n, k]: BF16, or codes of a byte */
  const void *scales;      /* [n, blocks] */
  int n, k, block, blocks; /* blocks of a row */
  bool scales_bf16;
};

/* It is read once: it must not push x out of the caches. */
__device__ inline uint4 load_once(const void *p) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
}
__device__ inline uint4 load_or_zero(const void *p, bool exists) {
  return exists ? load_once(p) : make_uint4(0, 0, 0, 0);
}

/* Eight numbers of two rows, as two instructions take them, against those of each row of x. */
template <int TILES>
__device__ inline void multiply_rows(float (&sum)[TILES][4], const uint32_t (&first)[4],
                                     const uint32_t (&second)[4], const bf16 *x, int stride) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint4 b = *reinterpret_cast<const uint4 *>(x + 8 * t * stride);
    mma_bf16(sum[t], first, b.x, b.y);
    mma_bf16(sum[t], second, b.z, b.w);
  }
}

/* BF16. A thread's 16 bytes lie in either half of a piece. */
struct PlainRows {
  static constexpr int OWN = 8;
  static constexpr int PAD = 32; /* numbers behind a row of x: eight lanes reach all banks */
  template <int TILES>
  static constexpr int AHEAD = 4; /* pieces that are asked for */
  struct Piece {
    uint4 w[2][2]; /* [half][top, bottom] */
  };
  const bf16 *top, *bottom; /* at this thread's place in a piece */
  int left;                 /* numbers of k from there on */

  __device__ PlainRows(const Weights &w, int row, int k, int count) {
    const bf16 *base = static_cast<const bf16 *>(w.rows) + k;
    top = base + static_cast<int64_t>(min(row, w.n - 1)) * w.k; /* beyond W: its last row */
    bottom = base + static_cast<int64_t>(min(row + 8, w.n - 1)) * w.k;
    left = count;
  }
  __device__ Piece load(int at) const {
    Piece p;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int k = at + half * (PIECE / 2);
      p.w[half][0] = load_or_zero(top + k, k < left);
      p.w[half][1] = load_or_zero(bottom + k, k < left);
    }
    return p;
  }
  template <int TILES>
  __device__ static void multiply(float (&sum)[TILES][4], const Piece &p, const bf16 *x,
                                  int stride) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 top = p.w[half][0], bottom = p.w[half][1];
      const uint32_t first[4] = {top.x, bottom.x, top.y, bottom.y};
      const uint32_t second[4] = {top.z, bottom.z, top.w, bottom.w};
      multiply_rows<TILES>(sum, first, second, x + half * (PIECE / 2), stride);
    }
  }
};

/* Codes of a byte. Blocks hold whole pieces: a piece has one scale for each row. */
template <WireKind KIND>
struct CodeRows {
  static constexpr int OWN = 16;
  static constexpr int PAD = 8;
  template <int TILES>
  static constexpr int AHEAD = TILES > 4   ? 2
                               : TILES > 2 ? 4
                                           : 6;
  struct Piece {
    uint4 top, bottom;
    float scale[2];
  };
  const uint8_t *top, *bottom;
  const Weights &w;
  int64_t scale_top, scale_bottom; /* of the rows' first blocks */
  int first, left, own;            /* own: this thread's place in a piece */

  __device__ CodeRows(const Weights &weights, int row, int k, int count) : w(weights) {
    int64_t a = min(row, w.n - 1), b = min(row + 8, w.n - 1);
    top = static_cast<const uint8_t *>(w.rows) + a * w.k + k;
    bottom = static_cast<const uint8_t *>(w.rows) + b * w.k + k;
    scale_top = a * w.blocks;
    scale_bottom = b * w.blocks;
    own = static_cast<int>(threadIdx.x % 4) * OWN;
    first = k - own;
    left = count;
  }
  __device__ float scale_at(int64_t i) const {
    if (w.scales_bf16) return to_float(static_cast<const bf16 *>(w.scales)[i]);
    return static_cast<const float *>(w.scales)[i];
  }
  /* Of the last piece of a row some threads have no codes; sums of the others' they have, so the
   * scales they need all the same. */
  __device__ Piece load(int at) const {
    Piece p = {};
    if (at >= left + own) return p;
    int block = (first + at) / w.block;
    p.top = load_or_zero(top + at, at < left);
    p.bottom = load_or_zero(bottom + at, at < left);
    p.scale[0] = scale_at(scale_top + block);
    p.scale[1] = scale_at(scale_bottom + block);
    return p;
  }
  /* Four codes of each row. */
  __device__ static void codes_as_a(uint32_t (&a)[4], uint32_t top_word, uint32_t bottom_word) {
    a[0] = bf16_of_codes<KIND>(top_word, false);
    a[1] = bf16_of_codes<KIND>(bottom_word, false);
    a[2] = bf16_of_codes<KIND>(top_word, true);
    a[3] = bf16_of_codes<KIND>(bottom_word, true);
  }
  template <int TILES>
  __device__ static void multiply(float (&sum)[TILES][4], const Piece &p, const bf16 *x,
                                  int stride) {
    float part[TILES][4] = {};
    uint32_t first[4], second[4];
    codes_as_a(first, p.top.x, p.bottom.x);
    codes_as_a(second, p.top.y, p.bottom.y);
    multiply_rows<TILES>(part, first, second, x, stride);
    codes_as_a(first, p.top.z, p.bottom.z);
    codes_as_a(second, p.top.w, p.bottom.w);
    multiply_rows<TILES>(part, first, second, x + 8, stride);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[t][i] += p.scale[i / 2] * part[t][i];
  }
};

}  // namespace

#endif
