/* Inside of zeropp: what its files share.
 *
 * Two address spaces. A unit's FULL buffer holds its parameters in order, the first of every joined
 * group 64-byte aligned, gaps zero. A rank's SHARD buffers (master, moments, gradient, average; one
 * of each for the whole model) hold the rank's pieces in order, without gaps, so that a unit's
 * piece is one message. With one rank the two are the same: shards are laid out like full buffers,
 * and full weights and gradients point into them.
 */
#ifndef ZEROPP_INTERNAL_H
#define ZEROPP_INTERNAL_H

#include "zeropp/zeropp.h"

typedef struct ParamPlace {
  int64_t numel;
  int64_t full;         /* in its unit's full buffer, floats */
  int64_t start, count; /* the elements this rank owns */
  int64_t shard;        /* where they lie in the shard buffers, floats */
} ParamPlace;

typedef struct Unit {
  int first, count;     /* its parameters */
  int64_t full_numel;   /* of the full buffer, gaps included */
  int64_t dense_numel;  /* without gaps: what travels */
  int64_t shard, owned; /* its piece of the shard buffers */
  size_t *rank_count;   /* [world] floats that each rank owns */
  size_t *rank_bytes;   /* [world] the same in bytes */
  int holds;            /* gathers not yet released; FULL while above 0 */
  bool grad_open;
  float *full, *grad; /* NULL unless FULL, open; point into the shards with one rank */
} Unit;

/* Buffers for full weights and gradients, kept for the next gather. */
typedef struct Pool {
  Device *device;
  void **free;
  size_t *bytes;
  int n, cap;
  size_t held, limit; /* bytes lying idle, and how many may */
} Pool;

struct ZeroPP {
  Device *device;
  const Ops *ops;
  Grid *grid;
  bool trainable;
  ParamSpec *specs;
  ParamPlace *place;
  int n_params;
  Unit *units;
  int n_units;
  int64_t numel, shard_numel;
  float *shard[STATE_KINDS]; /* NULL when this model has none of a kind */
  Pool pool;
  float *pack;   /* a unit as it travels: every rank's piece, by rank */
  float *summed; /* this rank's piece of a reduced unit */
  int64_t steps;
  uint64_t version;
};

/* layout.c: fills place, units and sizes from specs, n_params and grid; dies on specs that
 * contradict each other. */
void layout_build(ZeroPP *z);
void layout_free(ZeroPP *z);
/* Full weights and gradients that training holds at the same time: two units, since a tied
 * embedding's gradient stays open while the blocks' come and go. 0 with one rank. */
uint64_t layout_full_bytes(const ZeroPP *z);

/* pool.c: buffers are 64-byte aligned; their size is asked again when they come back. */
float *pool_take(Pool *p, size_t bytes);
void pool_give(Pool *p, float *buffer, size_t bytes);
void pool_close(Pool *p);

/* engine.c: die if a gradient is open, or if a unit is FULL, naming the unit and what was asked. */
void engine_require_closed(const ZeroPP *z, const char *what);
void engine_require_sharded(const ZeroPP *z, const char *what);
/* All of one kind of this rank, as one vector; and all of one parameter. */
Tensor engine_shard(const ZeroPP *z, StateKind kind);
void engine_add_kind(ZeroPP *z, StateKind kind); /* allocates it, zeroed */

#endif
