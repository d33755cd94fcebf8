/* Inside of zeropp: what its files share.
 *
 * Three places for a unit's numbers. Its FULL buffer holds its parameters in order, the first of
 * every joined group 128-byte aligned; what is in the gaps is nobody's business. A rank's SHARD
 * buffers (master, moments, gradient, average; one of each for the whole model) hold the rank's
 * pieces in order, without gaps; where the model is WHOLE on every rank (one rank, stage 0) they
 * are laid out like full buffers, with zeros in the gaps, so that the norm and AdamW run over
 * everything. A MESSAGE holds the pieces as they travel, by slice and then by piece, in a wire
 * format.
 *
 * All of it is device memory: nothing here reads or writes it but through kernels.h. What is
 * offloaded is the host's, and AdamW reads and writes it over the bus while it runs.
 */
#ifndef ZEROPP_INTERNAL_H
#define ZEROPP_INTERNAL_H

#include "zeropp/zeropp.h"

typedef struct ParamPlace {
  int64_t numel;
  int64_t full;         /* in its unit's full buffer, elements */
  int64_t start, count; /* the elements this rank owns */
  int64_t shard;        /* where they lie in the shard buffers, elements */
  bool fresh;           /* its full gradient holds nothing yet, no zeros either */
  bool beside;          /* a sum in F32 is still to be added to it (halves.c) */
} ParamPlace;

/* One parameter's elements in one piece of its unit. */
typedef struct Slot {
  WireSpan span;
  int64_t dense; /* elements of the unit before them, in the order of messages */
} Slot;

/* A unit in one wire format. Piece n of slice j is number j * nodes + n. */
typedef struct Message {
  WireFormat format;
  bool vectors_only;        /* matrices go by themselves, gather_direct.c */
  size_t *piece, *slice;    /* bytes: [world], [local] */
  size_t *at;               /* where pieces start, [world + 1] */
  size_t *scales, *payload; /* of every slot, from the message's start */
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
  char *full;       /* what matrices come straight into, or NULL */
  char *whole;      /* all slices; NULL: the secondary is all there is */
  char *slice;      /* this rank's slice before it becomes the secondary, or NULL */
  MessageKind kind; /* of `whole` */
} GatherFlight;

/* A reduction that was started and not finished. */
typedef struct ReduceFlight {
  bool active;
  bool add; /* the sum goes on top of what is there */
  CommTicket ticket;
  char *out, *in; /* messages of both hops, one after the other */
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
  Slot *slots;                /* [world][count] */
  Message message[MSG_KINDS];
  int holds;             /* gathers not yet released; FULL while above 0 */
  char *full;            /* NULL unless FULL, or kept between gathers (keeps_full) */
  uint64_t full_version; /* of the weights in `full` */
  char *secondary;       /* this rank's slice; hpZ */
  uint64_t secondary_version;
  size_t delta_at, delta_room; /* this rank's stream among all units', and what it may take */
  size_t delta_most;           /* of the streams of all nodes */
  bool grad_open;
  float *grad;      /* NULL unless open, or kept until the step (stage 1) */
  bool grad_waits;  /* gradients of micro-batches that the step must still reduce */
  bool grad_summed; /* stage 0: what `grad` holds is the sum of all ranks already */
  bool shard_fresh; /* the owner's sum (its node's sum) holds nothing yet, no zeros either */
  bool node_fresh, node_add; /* add: a micro-batch goes on top of what is there */
  GatherFlight gather;
  ReduceFlight reduce;
  UnitWork work;
} Unit;

/* Buffers between their uses. Those of one use serve each other where their sizes are near. */
typedef enum PoolUse { POOL_FULL, POOL_GRAD, POOL_WHOLE, POOL_SLICE, POOL_OUT, POOL_IN } PoolUse;
typedef struct PoolBuffer {
  void *p;
  size_t bytes;
  PoolUse use;
  bool busy;
} PoolBuffer;
typedef struct Pool {
  Device *device;
  PoolBuffer *at;
  int n, cap;
  size_t held, limit; /* bytes; idle ones go back when all together are above the limit */
} Pool;

/* Buffers of one size, of each of which the ranks of a node read each other's. */
typedef struct SharedBuffer {
  char *own;
  void **of_rank; /* [local]: where the others' are in this process; the own one too */
  bool busy;
} SharedBuffer;
typedef struct SharedSize {
  int most;
  size_t bytes; /* of each */
} SharedSize;
typedef struct Shared {
  SharedSize size;
  int n;            /* made, when they are wanted */
  bool off;         /* memory cannot be read like that */
  SharedBuffer *at; /* [most] */
} Shared;

struct ZeroPP {
  Device *device;
  const Ops *ops;
  Grid *grid;
  ZeroPPConfig cfg;
  int64_t cut;     /* pieces are cut between blocks of so many elements; 1: anywhere */
  bool whole;      /* shards hold the whole model */
  bool alias_full; /* a full weight is the master itself, or `rounded` */
  bool alias_grad; /* a full gradient is the shard itself */
  bool half_grad;  /* and that in BF16 */
  bool one_hop;    /* sums of a node are the owners' */
  bool direct;     /* matrices come straight into full buffers */
  bool keeps_full; /* full weights stay until the next version */
  bool keeps_rounded;
  int flights; /* reductions that hold buffers at a time */
  int ahead;   /* units that are gathered ahead */
  ParamSpec *specs;
  ParamPlace *place;
  int n_params;
  Unit *units;
  int n_units;
  int64_t numel, shard_numel, slice_numel;
  char *shard[STATE_KINDS]; /* NULL when this model has none of a kind */
  char *rounded; /* masters in BF16, laid out like them: what is read in their place; or NULL */
  uint64_t rounded_version;
  float *view[STATE_KINDS]; /* host copies of a parameter's shard, for others to read and write */
  size_t view_bytes[STATE_KINDS];
  Pool pool;
  Shared full;             /* full weights where ranks read each other's (gather_direct.c) */
  char *secondary;         /* all units' */
  struct Peers *peers;     /* NULL unless ranks read each other's `rounded` */
  struct Delta *delta;     /* NULL unless refreshes are by delta */
  struct Rollout *rollout; /* NULL but from zeropp_rollout_begin to _end */
  float *node_sum;         /* all units' slices, summed over this node; accumulate: node */
  uint16_t *error[2];      /* bf16: error feedback of each hop: all units dense, and their slices */
  int reduces;             /* reductions in flight */
  bool last_micro;         /* zeropp_last_micro */
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
/* Rows of a slice of so many. */
void layout_rows(int64_t rows, int local, int local_rank, int64_t *first, int64_t *count);
/* Bytes before slice `local_rank` in a message. */
size_t message_slice_at(const ZeroPP *z, const Message *m, int local_rank);
/* Bytes of piece `node` of slice `local_rank`, and of all pieces of a slice, [nodes]. */
const size_t *message_pieces(const ZeroPP *z, const Message *m, int local_rank);

/* memory.c: most bytes that the pool has in use at a time during training. */
uint64_t memory_working_bytes(const ZeroPP *z);
size_t memory_rounded_bytes(const ZeroPP *z);
SharedSize memory_shared_full(const ZeroPP *z);                /* most 0: there are none */
size_t memory_secondary_bytes(const ZeroPP *z, const Unit *u); /* with what aligns the next */

/* pool.c */
void *pool_take(Pool *p, PoolUse use, size_t bytes);
void pool_give(Pool *p, void *buffer);
void pool_close(Pool *p);

/* piece.c: consecutive pieces of a unit between memory and a message, all in one op. */
typedef enum Lie { LIE_FULL, LIE_SHARD, LIE_DENSE } Lie; /* dense: these pieces alone, no gaps */
typedef struct Memory {
  Lie lie;
  DType type;
  void *x;
} Memory;
typedef struct Pieces {
  const Unit *unit;
  int first, n;
} Pieces;
bool slot_travels(const ZeroPP *z, const Unit *u, const Message *m, int slot);
Pieces pieces_own(const ZeroPP *z, const Unit *u);   /* this rank's piece */
Pieces pieces_slice(const ZeroPP *z, const Unit *u); /* this rank's slice */
Pieces pieces_all(const ZeroPP *z, const Unit *u);
int64_t pieces_numel(const ZeroPP *z, Pieces pieces);
/* to, from: where the first of the pieces starts. error (dense) may be NULL. */
void pieces_encode(const ZeroPP *z, Pieces pieces, MessageKind kind, Memory x, uint16_t *error,
                   char *to);
/* The sum of n messages `stride` bytes apart, to or (add) on top of what is there. */
void pieces_decode(const ZeroPP *z, Pieces pieces, MessageKind kind, char *from, int n,
                   size_t stride, bool add, Memory x);
void pieces_recode(const ZeroPP *z, Pieces pieces, MessageKind kind, char *from, int n,
                   size_t stride, MessageKind kind_to, uint16_t *error, char *to);
/* A vector of F32 to BF16, and back. */
void numbers_round(const ZeroPP *z, Tensor x, char *half);
void numbers_widen(const ZeroPP *z, char *half, Tensor x);
void numbers_add(const ZeroPP *z, char *half, Tensor x); /* x += half */

/* Gradients with half_grad, of an open unit but for settle, which clears what nobody wrote. */
void halves_settle(ZeroPP *z, const Unit *u);
void halves_open(ZeroPP *z, Unit *u);
Tensor halves_beside(ZeroPP *z, int param, int n);
Tensor halves_into(ZeroPP *z, int param, int n, float *beta);
void halves_close(ZeroPP *z, Unit *u);

/* engine.c: defaults filled in; dies on what contradicts itself. */
ZeroPPConfig engine_config(const ZeroPPConfig *given);
/* Die if a gradient is open, or if a unit is FULL, naming the unit and what was asked. */
void engine_require_closed(const ZeroPP *z, const char *what);
void engine_require_sharded(const ZeroPP *z, const char *what);
Unit *engine_unit(const ZeroPP *z, int unit);
const char *engine_unit_name(const ZeroPP *z,
                             const Unit *u); /* for messages: its first parameter */
/* All of one kind of this rank as one vector, and n elements of it. */
Tensor engine_shard(const ZeroPP *z, StateKind kind);
Tensor engine_part(const ZeroPP *z, StateKind kind, int64_t at, int64_t n);
void engine_add_kind(ZeroPP *z, StateKind kind); /* allocates it, zeroed */
void engine_drop_kind(ZeroPP *z, StateKind kind);
bool engine_offloads(const ZeroPP *z, StateKind kind); /* in memory of the host */
/* Parameters from `param` on, joined, in a unit's full buffer. */
Tensor engine_joined(const ZeroPP *z, int param, int n, void *unit_buffer, DType type);
/* A full buffer of weights, and one of gradients. */
size_t unit_weight_bytes(const ZeroPP *z, const Unit *u);
size_t unit_grad_bytes(const Unit *u);

/* gather.c */
void gather_before_step(ZeroPP *z); /* nobody reads the weights any more, on any rank */
void gather_new_version(ZeroPP *z); /* masters changed, on every rank in the same way */
void gather_close(ZeroPP *z);
/* Every rank's piece of a kind to every rank, where the model is whole (stage 0). */
void gather_replicate(ZeroPP *z, StateKind kind);
/* The master of a frozen model that keeps rounded weights alone, from those. */
void gather_restore_master(ZeroPP *z);
/* How this version will be refreshed is settled: part of the state that is saved. Collective. */
void gather_settle(ZeroPP *z);
/* Secondaries of this version; nothing without hpZ. Collective. */
void gather_refresh(ZeroPP *z);
/* How many of the first units may be gathered while a step still updates those behind them. */
int gather_early_units(const ZeroPP *z);

/* refresh_rule.c: how a unit's refresh travels: what changed, its BF16 weights, or as qwz says. */
typedef enum RefreshForm { REFRESH_CHANGES, REFRESH_EXACT, REFRESH_CODED } RefreshForm;
typedef struct RefreshRule {
  bool coded;    /* replicas hold what a refresh as qwz says left: rounded weights */
  int64_t saved; /* while coded: bytes that changes would have saved, see zeropp.h */
} RefreshRule;
typedef struct RefreshCosts { /* bytes of the whole unit, all ranks */
  double changes;             /* infinite where a stream does not fit its buffer */
  int64_t exact, coded;       /* equal without qwz */
  bool known;                 /* changes counts from the last version; else it says nothing */
  bool follows;               /* and that is what exact replicas hold */
} RefreshCosts;
RefreshForm refresh_choose(RefreshRule *r, RefreshCosts c);

/* delta.c: refreshes that send what changed. */
void delta_open(ZeroPP *z);
void delta_close(ZeroPP *z);
bool delta_is_on(const ZeroPP *z);
void delta_layout(ZeroPP *z);        /* rooms of all units */
size_t delta_bytes(const ZeroPP *z); /* of what delta_open allocates */
/* Counts the changes of this version, unless that was done, and chooses all units' forms: a
 * collective. */
void delta_choose(ZeroPP *z, Memory from);
/* Starts the refresh of a unit, which fills u->gather; false, and nothing is started, where it is
 * to be coded. */
bool delta_start(ZeroPP *z, Unit *u);
void delta_forget(ZeroPP *z); /* the masters were written: every unit goes whole once */
bool delta_keeps_rules(const ZeroPP *z);
RefreshRule *delta_rules(ZeroPP *z); /* [n_units] */

/* delta_check.c: collective: the first of this rank's slices of units whose copies differ between
 * nodes. */
typedef struct DeltaMismatch {
  int unit;          /* -1: none */
  int owner, holder; /* ranks */
} DeltaMismatch;
DeltaMismatch delta_mismatch(const ZeroPP *z);
/* One rank's piece of the unit in this rank's secondary. */
Tensor delta_secondary(const ZeroPP *z, const Unit *u, int node);
/* n numbers of every node, by node, given this one's. */
void delta_share(const ZeroPP *z, const uint64_t *own, int n, uint64_t *all);

/* peers.c: ranks of a node that take weights out of each other's memory. _open is collective, and
 * may come to nothing; _before_write, before `rounded` changes, too. _start: starts what fills
 * u->gather.full; false where it came to nothing. */
void peers_open(ZeroPP *z);
void peers_close(ZeroPP *z);
void peers_before_write(const ZeroPP *z);
bool peers_start(ZeroPP *z, Unit *u);
/* The memory of all ranks of the node, the own one too, where device_copy reads it, to of_rank:
 * on all ranks, or on none. Collective. */
bool peers_map(const ZeroPP *z, void *own_memory, void **of_rank);
void peers_unmap(const ZeroPP *z, void **of_rank);
void peers_meet(const ZeroPP *z); /* what was queued is done, on all of them */

/* shared.c. _take is collective: all ranks take and give the same; NULL where all are busy, or
 * memory cannot be read like that. _give: false where it is none of these. _of: a rank's buffer of
 * those that this one belongs to. */
size_t shared_bytes(size_t bytes); /* that a buffer of so many takes */
void shared_open(const ZeroPP *z, Shared *s, SharedSize size);
char *shared_take(ZeroPP *z, Shared *s);
bool shared_give(Shared *s, const char *own);
const char *shared_of(const Shared *s, const char *own, int rank);
void shared_close(ZeroPP *z, Shared *s);

/* gather_direct.c: where weights travel as they are computed with, straight into full buffers.
 * _take_start: out of the others' buffers; false where it came to nothing. _start: this rank's
 * slices of a unit's matrices to their places, and those of the others beside them by collectives;
 * returns the ticket. */
bool gather_take_start(ZeroPP *z, Unit *u, Memory from);
CommTicket gather_direct_start(const ZeroPP *z, const Unit *u, Memory from, char *full);

/* rollout.c. _serves: weights come out of the rollout's own buffers. _take: a unit's message came
 * in; its codes are kept where they are wanted. */
bool rollout_serves(const ZeroPP *z);
void rollout_open(ZeroPP *z, Unit *u);
void rollout_close(ZeroPP *z, Unit *u);
void rollout_take(ZeroPP *z, Unit *u, MessageKind kind, char *message);
Tensor rollout_weight(const ZeroPP *z, int param, int n);

/* reduce.c: everything that was reduced arrives in the gradient shards. Collective. */
void reduce_finish(ZeroPP *z);
void reduce_forget_errors(ZeroPP *z);
void reduce_close(ZeroPP *z);

/* state.c: host copies go. */
void state_drop_views(ZeroPP *z);

/* state_error.c: entries of error feedback behind all others of a state file; nothing where there
 * is none. index: of the first. */
void state_error_add(const ZeroPP *z, StWriter *w);
int state_error_write(const ZeroPP *z, StWriter *w, int index, Error *err);
int state_error_entries(const StFile *f);
int state_error_read(ZeroPP *z, const StFile *f, Error *err);

/* state_refresh.c: so too the forms of refreshes that are chosen (auto with qwz). */
void state_refresh_add(const ZeroPP *z, StWriter *w);
int state_refresh_write(ZeroPP *z, StWriter *w, int index, Error *err);
int state_refresh_entries(const StFile *f);
int state_refresh_check(const ZeroPP *z, const StFile *f, Error *err);
int state_refresh_read(ZeroPP *z, const StFile *f, Error *err);

#endif
