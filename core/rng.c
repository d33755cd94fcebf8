/* Philox4x32-10 after Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3"
 * (SC 2011). Checked against the published known-answer vectors. */
#include "core/rng.h"

#include <math.h>

#include "core/error.h"

RngBlock rng_block(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u; /* multipliers */
  const uint32_t w0 = 0x9E3779B9u, w1 = 0xBB67AE85u; /* Weyl steps of the key */
  uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32);
  uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += w0, k1 += w1) {
    uint64_t p0 = m0 * c0, p1 = m1 * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
  }
  return (RngBlock){{c0, c1, c2, c3}};
}

/* The middles of 2^52 equal cells: odd multiples of 2^-53, exact, never 0 or 1. */
static double unit(uint32_t hi, uint32_t lo) {
  uint64_t bits = ((uint64_t)hi << 32 | lo) >> 12;
  return ((double)bits + 0.5) * 0x1p-52;
}

double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  RngBlock b = rng_block(seed, stream, index);
  return unit(b.v[0], b.v[1]);
}

float rng_uniform_f32(uint64_t seed, uint64_t stream, uint64_t index) {
  float u = (float)rng_uniform(seed, stream, index);
  return u < 1 ? u : nextafterf(1, 0);
}

float rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const double two_pi = 6.283185307179586476925;
  RngBlock b = rng_block(seed, stream, index);
  double radius = sqrt(-2.0 * log(unit(b.v[0], b.v[1])));
  return (float)(radius * cos(two_pi * unit(b.v[2], b.v[3])));
}

uint64_t rng_hash(const char *s) {
  uint64_t h = 0xcbf29ce484222325u;
  for (; *s; s++) h = (h ^ (unsigned char)*s) * 0x100000001b3u;
  return h;
}

/* The finalizer of SplitMix64: a bijection of its argument, so that distinct b stay distinct. */
static uint64_t scramble(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

uint64_t rng_mix(uint64_t a, uint64_t b) { return scramble(scramble(a + 0x9e3779b97f4a7c15u) ^ b); }

void rng_permute(uint64_t seed, uint64_t stream, int32_t *out, int32_t n) {
  require(n >= 0);
  for (int32_t i = 0; i < n; i++) out[i] = i;
  for (int32_t i = n - 1; i > 0; i--) {
    /* 52 bits against at most 2^31 choices: the bias is below 2^-20 of a choice's probability. */
    int32_t j = (int32_t)(rng_uniform(seed, stream, (uint64_t)i) * (i + 1));
    int32_t t = out[i];
    out[i] = out[j];
    out[j] = t;
  }
}
