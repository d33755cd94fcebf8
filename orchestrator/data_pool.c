/* Pools of examples, the split into trained-on and held-out ones, and the order of training. What
 * is random here is a pure function of the seed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "orchestrator/data.h"

enum { MAX_TOKENS = 1 << 30 }; /* offsets are 32 bits */

int data_pool_add(DataPool *p, const TokenList *seq, const char *place, Error *err) {
  if (p->offsets.n == 0) token_list_push(&p->offsets, 0);
  if (seq->n > MAX_TOKENS - p->tokens.n)
    return error_set(err, "%s: the data set passes 2^30 tokens here; expected max_records", place);
  for (int i = 0; i < seq->n; i++) token_list_push(&p->tokens, seq->v[i]);
  token_list_push(&p->offsets, p->tokens.n);
  return 0;
}

bool *data_pool_held(const DataPool *p, uint64_t seed, const char *name, double fraction) {
  bool *held = mem_zalloc((size_t)p->n, sizeof *held);
  int n = (int)lround(p->n * fraction);
  if (n == 0 && fraction > 0) n = 1;
  if (n >= p->n) n = p->n - 1;
  int32_t *order = mem_alloc((size_t)p->n, sizeof *order);
  rng_permute(seed, rng_mix(rng_hash("held out"), rng_hash(name)), order, p->n);
  for (int i = 0; i < n; i++) held[order[i]] = true;
  free(order);
  return held;
}

int data_pool_take(const DataPool *p, const bool *held, bool want, TokenList *tokens,
                   int32_t **offsets, int32_t **ids) {
  TokenList out_offsets = {0}, out_ids = {0};
  token_list_push(&out_offsets, 0);
  for (int i = 0; i < p->n; i++) {
    if (held[i] != want) continue;
    token_list_push(&out_ids, i);
    for (int k = i * p->width; k < (i + 1) * p->width; k++) {
      for (int32_t t = p->offsets.v[k]; t < p->offsets.v[k + 1]; t++)
        token_list_push(tokens, p->tokens.v[t]);
      token_list_push(&out_offsets, tokens->n);
    }
  }
  *offsets = out_offsets.v;
  *ids = out_ids.v;
  return out_ids.n;
}

void data_pool_free(DataPool *p) {
  for (int i = 0; i < p->n; i++) {
    if (p->text) free(p->text[i]);
    if (p->answer) free(p->answer[i]);
  }
  token_list_free(&p->tokens);
  token_list_free(&p->offsets);
  token_list_free(&p->loss);
  free(p->margins);
  free((void *)p->text);
  free((void *)p->answer);
  *p = (DataPool){.n = 0};
}

/* A Feistel network over the smallest 4^k >= n, entered again until the result lies in range: a
 * permutation of 0..n-1 without a table (Black and Rogaway, "Ciphers with arbitrary finite
 * domains", CT-RSA 2002). */
static uint32_t permuted(uint64_t seed, uint64_t stream, uint32_t x, uint32_t n) {
  enum { ROUNDS = 8 };
  unsigned half = 3; /* narrower halves mix badly */
  while ((uint64_t)1 << 2 * half < n) half++;
  uint32_t mask = (1u << half) - 1;
  do {
    uint32_t left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < ROUNDS; round++) {
      uint32_t mixed = left ^ (rng_block(seed, stream, round << 32 | right).v[0] & mask);
      left = right;
      right = mixed;
    }
    x = left << half | right;
  } while (x >= n);
  return x;
}

int32_t data_order(uint64_t seed, const char *what, int64_t i, int32_t n) {
  require(n > 0 && i >= 0);
  uint64_t stream = rng_mix(rng_hash(what), (uint64_t)(i / n));
  return (int32_t)permuted(seed, stream, (uint32_t)(i % n), (uint32_t)n);
}
