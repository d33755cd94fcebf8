/* Inside of zeropp: what its files share.
 *
 * Three places for a unit's numbers. Its FULL buffer holds its parameters in order, the first of
 * every joined group 64-byte aligned, gaps zero. A rank's SHARD buffers (master, moments, gradient,
 * average; one of each for the whole model) hold the rank's pieces in order, without gaps; where
 * the model is WHOLE on every rank (one rank, stage 0) they are laid out like full buffers. A
 * MESSAGE holds the pieces as they travel, by slice and then by piece, in a wire format.
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

/* A unit in one wire format: bytes of every piece ([local_rank * nodes + node]) and slice. */
typedef struct Message {
  WireFormat format;
  size_t *piece, *slice; /* [world], [local] */
  size_t total;
} Message;

/* What travels: weights between nodes, weights within one (the secondary), gradients, and full
 * precision (what stage 0 replicates). */
typedef enum MessageKind {
  MSG_WEIGHTS,
  MSG_SECONDARY,
  MSG_GRADS,
  MSG_EXACT,
  MSG_KINDS
} MessageKind;

/* A gather that was started and not finished. */
typedef struct GatherFlight {
  bool active;
  CommTicket ticket;
  char *whole; /* all slices; NULL: the secondary is all there is */
  char *slice; /* this rank's slice before it becomes the secondary, or NULL */
  size_t slice_bytes;
  MessageKind kind; /* of `whole` */
} GatherFlight;

/* A reduction that was started and not finished. */
typedef struct ReduceFlight {
  bool active;
  CommTicket ticket;
  char *out, *in; /* messages of both hops, one after the other */
  size_t out_bytes, in_bytes;
} ReduceFlight;

/* What a unit's queued work is about: valid until the wait. */
typedef struct UnitWork {
  ZeroPP *z;
  struct Unit *u;
} UnitWork;

typedef struct Unit {
  int first, count;           /* its parameters */
  int64_t full_numel;         /* of the full buffer, gaps included */
  int64_t dense_numel;        /* without gaps: what travels */
  int64_t shard, owned;       /* its piece of the shard buffers */
  int64_t dense;              /* where it starts among all units' dense numbers */
  int64_t slice, slice_numel; /* this rank's slice: where it starts among all units' slices, size */
  Message message[MSG_KINDS];
  int holds;             /* gathers not yet released; FULL while above 0 */
  float *full;           /* NULL unless FULL, or kept between gathers (below stage 3) */
  uint64_t full_version; /* of the weights in `full` */
  char *secondary;       /* this rank's slice; hpZ */
  uint64_t secondary_version;
  bool grad_open;
  float *grad;      /* NULL unless open, or kept until the step (stage 1) */
  bool grad_waits;  /* gradients of micro-batches that the step must still reduce */
  bool grad_summed; /* stage 0: what `grad` holds is the sum of all ranks already */
  GatherFlight gather;
  ReduceFlight reduce;
  UnitWork work;
} Unit;

/* Buffers for full weights, gradients and messages, kept for the next use. */
typedef struct Pool {
  Device *device;
  void **free;
  size_t *bytes;
  int n, cap;
  size_t idle, used, limit; /* bytes; idle ones go back when both together are above the limit */
} Pool;

struct ZeroPP {
  Device *device;
  const Ops *ops;
  Grid *grid;
  ZeroPPConfig cfg;
  int64_t cut;     /* pieces are cut between blocks of so many elements; 1: anywhere */
  bool whole;      /* shards hold the whole model */
  bool alias_full; /* a full weight is the master itself */
  bool alias_grad; /* a full gradient is the shard itself */
  ParamSpec *specs;
  ParamPlace *place;
  int n_params;
  Unit *units;
  int n_units;
  int64_t numel, shard_numel, slice_numel;
  float *shard[STATE_KINDS]; /* NULL when this model has none of a kind */
  Pool pool;
  char *secondary;    /* all units' */
  float *node_sum;    /* all units' slices, summed over this node; accumulate: node */
  uint16_t *error[2]; /* bf16: error feedback of each hop: all units dense, and their slices */
  int reduces;        /* reductions in flight */
  int64_t steps;
  uint64_t version;
};

/* layout.c: fills cut, place, units and sizes from specs, n_params, cfg and grid; dies on specs
 * that contradict each other. */
void layout_build(ZeroPP *z);
void layout_free(ZeroPP *z);
/* The flat range of a parameter that a rank owns where pieces are cut between blocks. */
void layout_piece(const ParamSpec *s, int64_t cut, int nodes, int local, int node, int local_rank,
                  int64_t *start, int64_t *count);
/* Bytes before slice `local_rank` in a message. */
size_t message_slice_at(const Message *m, int local_rank);
/* Bytes of piece `node` of slice `local_rank`, and of all pieces of a slice, [nodes]. */
const size_t *message_pieces(const ZeroPP *z, const Message *m, int local_rank);

/* memory.c: most bytes that the pool has in use at a time during training. */
uint64_t memory_working_bytes(const ZeroPP *z);
size_t memory_secondary_bytes(const ZeroPP *z, const Unit *u); /* with what aligns the next */

/* pool.c: buffers are 64-byte aligned; their size is asked again when they come back. */
void *pool_take(Pool *p, size_t bytes);
void pool_give(Pool *p, void *buffer, size_t bytes);
void pool_close(Pool *p);

/* piece.c: one rank's piece of a unit between memory and a message. */
typedef enum Lie { LIE_FULL, LIE_SHARD, LIE_DENSE } Lie; /* dense: this piece alone, without gaps */
typedef struct Piece {
  const Unit *unit;
  int node, local_rank;
} Piece;
/* error (dense) may be NULL. */
void piece_encode(const ZeroPP *z, Piece piece, WireFormat f, Lie lie, float *x, uint16_t *error,
                  char *to);
/* The sum of n messages `stride` bytes apart, to or (add) on top of what is there. */
void piece_decode(const ZeroPP *z, Piece piece, WireFormat f, char *from, int n, size_t stride,
                  bool add, Lie lie, float *x);
void piece_recode(const ZeroPP *z, Piece piece, WireFormat f, char *from, int n, size_t stride,
                  WireFormat f_to, uint16_t *error, char *to);
int64_t piece_numel(const ZeroPP *z, Piece piece);
/* The whole unit: every piece of a message to a full buffer, and back. error: dense, or NULL. */
void unit_decode(const ZeroPP *z, const Unit *u, const Message *m, char *from, float *full);
void unit_encode(const ZeroPP *z, const Unit *u, const Message *m, float *full, uint16_t *error,
                 char *to);
size_t unit_full_bytes(const Unit *u);

/* engine.c: defaults filled in; dies on what contradicts itself. */
ZeroPPConfig engine_config(const ZeroPPConfig *given);
/* Die if a gradient is open, or if a unit is FULL, naming the unit and what was asked. */
void engine_require_closed(const ZeroPP *z, const char *what);
void engine_require_sharded(const ZeroPP *z, const char *what);
Unit *engine_unit(const ZeroPP *z, int unit);
const char *engine_unit_name(const ZeroPP *z,
                             const Unit *u); /* for messages: its first parameter */
/* All of one kind of this rank, as one vector. */
Tensor engine_shard(const ZeroPP *z, StateKind kind);
void engine_add_kind(ZeroPP *z, StateKind kind); /* allocates it, zeroed */
/* Parameters from `param` on, joined, in a unit's full buffer. */
Tensor engine_joined(const ZeroPP *z, int param, int n, float *unit_buffer);

/* gather.c */
void gather_new_version(ZeroPP *z); /* masters changed, on every rank in the same way */
void gather_close(ZeroPP *z);
/* Every rank's piece of a kind to every rank, where the model is whole (stage 0). */
void gather_replicate(ZeroPP *z, StateKind kind);
/* The master of a frozen model that keeps its secondary alone, from that. */
void gather_restore_master(ZeroPP *z);

/* reduce.c: everything that was reduced arrives in the gradient shards. Collective. */
void reduce_finish(ZeroPP *z);
void reduce_forget_errors(ZeroPP *z);
void reduce_close(ZeroPP *z);

/* state_error.c: entries of error feedback behind all others of a state file; nothing where there
 * is none. index: of the first. */
void state_error_add(const ZeroPP *z, StWriter *w);
int state_error_write(const ZeroPP *z, StWriter *w, int index, Error *err);
int state_error_entries(const StFile *f);
int state_error_read(ZeroPP *z, const StFile *f, Error *err);

#endif
