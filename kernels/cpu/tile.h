/* Small matrix products on tiles that lie in cache: what attention is built from. Internal to
 * kernels/cpu.
 *
 * Written with GCC's vector types, so that the sums stay in registers: 16 of AVX-512's 32, 8 of
 * the 16 of AVX and others. Tiles are padded: rows to TILE_ROWS, columns to VEC, and the padding is
 * zero or ignored. */
#ifndef KERNELS_CPU_TILE_H
#define KERNELS_CPU_TILE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__AVX512F__)
enum { VEC = 16, TILE_WIDE = 4 }; /* floats in a vector; vectors of a block that is 4 rows high */
#elif defined(__AVX__)
enum { VEC = 8, TILE_WIDE = 2 };
#else
enum { VEC = 4, TILE_WIDE = 2 };
#endif
enum { TILE_ROWS = 8 };

typedef float Vec __attribute__((vector_size(VEC * 4), aligned(4), may_alias));

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline Vec vec_load(const float *p) { return *(const Vec *)p; }
static inline void vec_store(float *p, Vec v) { *(Vec *)p = v; }

/* Lane by lane; NaN in a is passed over. */
static inline Vec vec_larger(Vec a, Vec b) {
  typedef int32_t Mask __attribute__((vector_size(VEC * 4)));
  Mask above = a > b;
  return (Vec)(((Mask)a & above) | ((Mask)b & ~above));
}

/* Sum of the lanes. By quarters: GCC's own reduction without fast-math goes lane by lane. */
static inline float vec_sum(Vec v) {
  typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
  float t[VEC];
  vec_store(t, v);
  Quad sum = *(const Quad *)t;
  for (int i = 4; i < VEC; i += 4) sum += *(const Quad *)(t + i);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* Keeps v in a register: GCC otherwise folds its load into each use, and the loads then set the
 * pace (measured: 200 instead of 258 GFLOP/s on a Zen 5 core). */
static inline Vec vec_keep(Vec v) {
#if defined(__AVX2__)
  __asm__("" : "+v"(v));
#endif
  return v;
}

/* One operand A of a tile product: element (row, depth) is p[row * by_row + depth * by_depth]. */
typedef struct TileA {
  const float *p;
  int64_t by_row, by_depth;
} TileA;

/* rows x vecs vectors of C, rows = 4 or 8. Inlined with both constant. */
static inline __attribute__((always_inline)) void tile_block(int rows, int vecs, int64_t k, TileA a,
                                                             const float *b, int64_t ldb, float *c,
                                                             int64_t ldc, bool add) {
  Vec acc[8][TILE_WIDE];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < vecs; j++) acc[i][j] = add ? vec_load(c + i * ldc + j * VEC) : (Vec){0};
  for (int64_t p = 0; p < k; p++) {
    Vec bv[TILE_WIDE];
    for (int j = 0; j < vecs; j++) bv[j] = vec_keep(vec_load(b + p * ldb + j * VEC));
    for (int i = 0; i < rows; i++) {
      float x = a.p[i * a.by_row + p * a.by_depth];
      for (int j = 0; j < vecs; j++) acc[i][j] += x * bv[j];
    }
  }
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < vecs; j++) vec_store(c + i * ldc + j * VEC, acc[i][j]);
}

/* C[m, n] = A[m, k] B[k, n], or += when add. m is a multiple of TILE_ROWS, n of VEC. Blocks are 4
 * rows x TILE_WIDE vectors; what is narrower has 8 rows, which keeps the multipliers busy. */
static inline void tile_gemm(int64_t m, int64_t n, int64_t k, TileA a, const float *b, int64_t ldb,
                             float *c, int64_t ldc, bool add) {
  for (int64_t j = 0; j < n; j += TILE_WIDE * VEC) {
    int64_t vecs = (n - j) / VEC;
    for (int64_t i = 0; i < m; i += vecs * 2 <= TILE_WIDE ? 8 : 4) {
      TileA rows = {a.p + i * a.by_row, a.by_row, a.by_depth};
      float *at = c + i * ldc + j;
      if (vecs >= TILE_WIDE)
        tile_block(4, TILE_WIDE, k, rows, b + j, ldb, at, ldc, add);
      else if (vecs * 2 > TILE_WIDE)
        tile_block(4, TILE_WIDE - 1, k, rows, b + j, ldb, at, ldc, add);
      else if (vecs * 2 == TILE_WIDE)
        tile_block(8, TILE_WIDE / 2, k, rows, b + j, ldb, at, ldc, add);
      else
        tile_block(8, 1, k, rows, b + j, ldb, at, ldc, add);
    }
  }
}

#endif
