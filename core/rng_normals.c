/* Rows of normal numbers, in loops that a compiler makes vectors of: bit for bit rng_normal's.
 *
 * Logarithm and cosine here differ from the library's by a few units in a double's last place,
 * which a float shows only where it lies next to the middle between two floats: such numbers, one
 * in millions, are left to rng_normal. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "core/rng.h"

enum { LANES = 64, SCALES = 10 };
/* Of the 29 bits that a float has less than a double: how near to their middle is next to it. The
 * loops' error is below 8, the library's below 1. */
static const int64_t half = 1 << 28, margin = 128;

/* A uniform number's bits (rng.c's unit), of words 2k and 2k + 1 of each block. */
typedef struct Draws {
  uint64_t c[4][LANES]; /* 32 bits each */
} Draws;

static void draw(uint64_t seed, uint64_t stream, uint64_t first, Draws *d) {
  const uint64_t low = 0xffffffff;
  uint64_t k0 = seed & low, k1 = seed >> 32;
  for (int i = 0; i < LANES; i++) {
    uint64_t index = first + (uint64_t)i;
    d->c[0][i] = index & low;
    d->c[1][i] = index >> 32;
    d->c[2][i] = stream & low;
    d->c[3][i] = stream >> 32;
  }
  for (int round = 0; round < 10; round++) {
#pragma omp simd
    for (int i = 0; i < LANES; i++) {
      uint64_t p0 = 0xD2511F53U * d->c[0][i], p1 = 0xCD9E8D57U * d->c[2][i];
      d->c[0][i] = (p1 >> 32 ^ d->c[1][i] ^ k0) & low;
      d->c[2][i] = (p0 >> 32 ^ d->c[3][i] ^ k1) & low;
      d->c[1][i] = p1 & low;
      d->c[3][i] = p0 & low;
    }
    k0 = (k0 + 0x9E3779B9U) & low;
    k1 = (k1 + 0xBB67AE85U) & low;
  }
}

static inline double unit(uint64_t hi, uint64_t lo) {
  return ((double)(int64_t)((hi << 32 | lo) >> 12) + 0.5) * 0x1p-52;
}

static inline double from_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline uint64_t to_bits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Of u in (0, 1): with u = 2^e m, m from sqrt(1/2) to sqrt(2), and s = (m - 1) / (m + 1), it is
 * e log 2 + 2 (s + s^3 / 3 + s^5 / 5 + ...). */
static inline double log_of(double u) {
  const uint64_t root_half = 0x3FE6A09E667F3BCD;
  uint64_t over = to_bits(u) - root_half;
  int64_t e = (int64_t)over >> 52;
  double m = from_bits((over & ((1ULL << 52) - 1)) + root_half);
  double s = (m - 1) / (m + 1), z = s * s, sum = 1.0 / 25;
  for (int k = 23; k > 1; k -= 2) sum = sum * z + 1.0 / k;
  return (double)e * 0x1.62e42fefa39efp-1 + 2 * (s + s * z * sum);
}

/* Of y from 0 to 2 pi: quarter turns off, then Taylor's series of sine or cosine up to pi / 4. */
static inline double cos_of(double y) {
  int64_t quarter = (int64_t)(y * 0x1.45f306dc9c883p-1 + 0.5);
  double q = (double)quarter;
  double r = fma(-q, 0x1.1a62633145c07p-54, fma(-q, 0x1.921fb54442d18p0, y)), z = r * r;
  double s = 1, c = 1;
  for (int k = 2 * SCALES - 2; k > 1; k -= 2) {
    s = 1 - z * s * (1.0 / (k * (k + 1)));
    c = 1 - z * c * (1.0 / (k * (k - 1)));
  }
  double x = quarter & 1 ? r * s : c;
  return (quarter + 1) & 2 ? -x : x;
}

void rng_normals(uint64_t seed, uint64_t stream, uint64_t first, int64_t n, float *out) {
  for (int64_t at = 0; at < n; at += LANES) {
    Draws d;
    double x[LANES];
    draw(seed, stream, first + (uint64_t)at, &d);
#pragma omp simd
    for (int i = 0; i < LANES; i++) {
      double radius = sqrt(-2.0 * log_of(unit(d.c[0][i], d.c[1][i])));
      x[i] = radius * cos_of(6.283185307179586476925 * unit(d.c[2][i], d.c[3][i]));
    }
    for (int i = 0; i < LANES && at + i < n; i++) {
      int64_t off = (int64_t)(to_bits(x[i]) & ((1 << 29) - 1)) - half;
      bool near = off > -margin && off < margin;
      out[at + i] = near ? rng_normal(seed, stream, first + (uint64_t)(at + i)) : (float)x[i];
    }
  }
}
