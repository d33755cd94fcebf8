/* Small matrix products on tiles that lie in cache: what attention is built from. Internal to
 * kernels/cpu.
 *
 * Written with GCC's vector types, so that the accumulators stay in registers: on AVX-512 a block
 * of 4 rows x 4 vectors holds 16 of the 32, with AVX2 (or whatever has 8 lanes) 4 x 2 holds 8 of
 * the
 * 16. Tiles are padded: rows to TILE_ROWS, columns to VEC, and the padding is zero or ignored. */
#ifndef KERNELS_CPU_TILE_H
#define KERNELS_CPU_TILE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__AVX512F__)
enum { VEC = 16, TILE_VECS = 4 };
#else
enum { VEC = 8, TILE_VECS = 2 };
#endif
enum { TILE_ROWS = 4 };

typedef float Vec __attribute__((vector_size(VEC * 4), aligned(4), may_alias));

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline Vec vec_load(const float *p) { return *(const Vec *)p; }
static inline void vec_store(float *p, Vec v) { *(Vec *)p = v; }

/* One operand A of a tile product: element (row, depth) is p[row * by_row + depth * by_depth]. */
typedef struct TileA {
  const float *p;
  int64_t by_row, by_depth;
} TileA;

/* TILE_ROWS rows of n_vecs vectors. Inlined with a constant n_vecs. */
static inline __attribute__((always_inline)) void tile_block(int n_vecs, int64_t k, TileA a,
                                                             const float *b, int64_t ldb, float *c,
                                                             int64_t ldc, bool add) {
  Vec acc[TILE_ROWS][TILE_VECS];
  for (int i = 0; i < TILE_ROWS; i++)
    for (int j = 0; j < n_vecs; j++) acc[i][j] = add ? vec_load(c + i * ldc + j * VEC) : (Vec){0};
  for (int64_t p = 0; p < k; p++) {
    Vec bv[TILE_VECS];
    for (int j = 0; j < n_vecs; j++) bv[j] = vec_load(b + p * ldb + j * VEC);
    for (int i = 0; i < TILE_ROWS; i++) {
      float x = a.p[i * a.by_row + p * a.by_depth];
      for (int j = 0; j < n_vecs; j++) acc[i][j] += x * bv[j];
    }
  }
  for (int i = 0; i < TILE_ROWS; i++)
    for (int j = 0; j < n_vecs; j++) vec_store(c + i * ldc + j * VEC, acc[i][j]);
}

/* C[m, n] = A[m, k] B[k, n], or += when add. m is a multiple of TILE_ROWS, n of VEC. */
static inline void tile_gemm(int64_t m, int64_t n, int64_t k, TileA a, const float *b, int64_t ldb,
                             float *c, int64_t ldc, bool add) {
  for (int64_t j = 0; j < n; j += TILE_VECS * VEC)
    for (int64_t i = 0; i < m; i += TILE_ROWS) {
      TileA rows = {a.p + i * a.by_row, a.by_row, a.by_depth};
      float *at = c + i * ldc + j;
      switch ((n - j) / VEC) {
        case 1:
          tile_block(1, k, rows, b + j, ldb, at, ldc, add);
          break;
        case 2:
          tile_block(2, k, rows, b + j, ldb, at, ldc, add);
          break;
        case 3:
          tile_block(TILE_VECS < 3 ? TILE_VECS : 3, k, rows, b + j, ldb, at, ldc, add);
          break;
        default:
          tile_block(TILE_VECS, k, rows, b + j, ldb, at, ldc, add);
          break;
      }
    }
}

#endif
