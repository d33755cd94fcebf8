/* Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011). No state: a number is a
 * pure function of (seed, stream, index), so a sample or an initial weight does not depend on the
 * rank count, on its company in a batch, or on what was drawn before. */
#ifndef CORE_RNG_H
#define CORE_RNG_H

#include <stdint.h>

typedef struct RngBlock {
  uint32_t v[4];
} RngBlock;

/* key = seed (64 bits), counter = (stream, index) (64 bits each). Matches the published Random123
 * vectors: philox4x32-10 with counter words {index lo, index hi, stream lo, stream hi}, key words
 * {seed lo, seed hi}. */
RngBlock rng_block(uint64_t seed, uint64_t stream, uint64_t index);
double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index); /* in (0, 1), 53 bits */
/* The same rounded to float, still in (0, 1): rounding must not make it 1. */
float rng_uniform_f32(uint64_t seed, uint64_t stream, uint64_t index);
float rng_normal(uint64_t seed, uint64_t stream, uint64_t index); /* Box-Muller, one per index */
/* rng_normal of indices first to first + n - 1, the same bits, several times as fast. */
void rng_normals(uint64_t seed, uint64_t stream, uint64_t first, int64_t n, float *out);
uint64_t rng_hash(const char *s);         /* FNV-1a: a stream from a name */
uint64_t rng_mix(uint64_t a, uint64_t b); /* combines two ids into a stream */

/* Fisher-Yates permutation of 0..n-1 under (seed, stream). */
void rng_permute(uint64_t seed, uint64_t stream, int32_t *out, int32_t n);

#endif
