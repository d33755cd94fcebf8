/* zeropp: sharded parameters. ZeRO (Rajbhandari et al. 2020), stages 0 to 3, and ZeRO++ (Wang et
 * al. 2023) on a nodes x local grid of ranks.
 *
 * Every parameter is cut first into `local` contiguous slices (of whole rows where it has rows),
 * then each slice into `nodes` contiguous pieces; rank (n, j) owns piece n of slice j: its fp32
 * master, its AdamW moments, its gradient sum. Parameters belong to units (embedding, each block,
 * head) that are gathered and reduced together. Where something is quantized, pieces are cut
 * between the blocks that share a scale.
 *
 *            zeropp_gather                      zeropp_open_grad
 *   SHARDED ---------------> FULL      (closed) ------------------> GRAD
 *      ^                      |           ^                          |
 *      +---- zeropp_release --+           +---- zeropp_reduce -------+  (+= gradient shard)
 *
 * The weights of a unit and its gradient are independent: a tied embedding's gradient is opened by
 * the head, stays open through the blocks, and is reduced after the embedding's backward.
 *
 * A gather takes two hops: between nodes to whole slices, within a node to whole units, so that
 * every byte enters a node once. hpZ keeps a rank's slice (the secondary), so that only the first
 * gather after a write crosses nodes; frozen models then keep nothing else. qwZ quantizes what
 * crosses nodes. A reduction takes the two hops the other way round; qgZ quantizes both.
 *
 * zeropp_prefetch starts a gather, which zeropp_gather then finishes; a reduction is started by
 * zeropp_reduce and finished at the step. Both run behind compute where comm_queue_start was
 * called.
 *
 * A full copy is never older than its master: step, load and every other write of the weights die,
 * naming the unit, if one is still held by a gather, so the next gather brings the new weights.
 * Step, zero_grad and scale_grad die if a gradient is still open. Gathers nest (a count per unit;
 * only the first one communicates), opening an open gradient does nothing.
 *
 * Full weights are the masters as the wire rounds them, the same on every rank, in every stage and
 * for every grid. Where the wire is float32 and one rank (or every one, stage 0) has all, a full
 * weight is the master itself, and a full gradient of one rank the shard itself: no copies.
 *
 * Gradients are SUMS over ranks and micro-batches: losses are divided by global counts before, so
 * nothing is divided here.
 */
#ifndef ZEROPP_H
#define ZEROPP_H

#include "core/recipe.h"
#include "core/safetensors.h"
#include "kernels/kernels.h"

typedef enum ParamInit { INIT_NORMAL, INIT_ONES, INIT_ZEROS } ParamInit;

/* One row per parameter: the one table that drives allocation, sharding, checkpoints and messages.
 */
typedef struct ParamSpec {
  char name[96];  /* Hugging Face name, "model.layers.0.self_attn.q_proj.weight" */
  int unit;       /* 0.. ascending */
  int ndim;       /* 1 or 2 */
  int64_t dim[2]; /* [out, in] for matrices; unused 1 */
  bool decay;     /* weight decay applies (matrices, embeddings included) */
  bool joined; /* directly behind the previous parameter in memory, so that q, k, v (and gate, up)
                  form one matrix for one GEMM; the first of a group is 128-byte aligned */
  ParamInit init;
  float init_std;
} ParamSpec;

typedef enum HpzMode {
  HPZ_OFF,
  HPZ_ON,       /* the secondary is kept as `wire` says */
  HPZ_QUANTIZED /* as qwz says: payload and scales */
} HpzMode;

/* What a refresh of the secondaries sends between nodes (kernels/delta.h; zeropp/refresh_rule.c).
 *
 * DELTA: the BF16 weights that changed since the last refresh, without loss; a unit goes whole, in
 * BF16, on its first refresh, after a write that is not a step, and when its changes take more than
 * a quarter of that, which is all that buffers have room for. Needs hpz on, no qwz, BF16 weights.
 *
 * AUTO: per unit and step what is smallest. A unit starts exact, whole in BF16. While its replicas
 * are exact, its changes are sent where they are shorter than the unit in the configured dense
 * form (qwz's, or BF16 without), and else that. After a refresh in qwz's form replicas hold rounded
 * weights, to which no change can be added: the unit stays in that form until what changes would
 * have saved since, counted every step from the masters' BF16 values and never below zero, pays for
 * one refresh in BF16, which makes the replicas exact again. So a unit changes its form no more
 * often than that pays. The choice is one of all ranks and part of the training state. Replicas
 * that cost nothing to be exact are exact: of frozen models, which refresh once, and on one node.
 */
typedef enum RefreshMode { REFRESH_DENSE, REFRESH_DELTA, REFRESH_AUTO } RefreshMode;

/* All zero: stage 0, everything off. Contradictions (see the recipe's reference) are broken
 * contracts here. */
typedef struct ZeroPPConfig {
  int stage;      /* 0 nothing sharded, 1 moments, 2 and gradients, 3 and weights */
  bool trainable; /* false: no moments, no gradients */
  WireKind wire;  /* WIRE_F32 or WIRE_BF16: of what is not quantized (weights that are computed
                     with in BF16 travel in it anyway) */
  WireKind qwz;   /* weights between nodes: WIRE_F32 (as wire says), WIRE_INT8, WIRE_FP8 */
  HpzMode hpz;
  WireKind qgz; /* gradients: WIRE_F32 (as wire says), WIRE_INT8, WIRE_INT4 */
  int block;    /* elements to a scale; 0: 256 */
  DType scale;  /* DT_F32, DT_BF16 */
  RefreshMode refresh;
  int64_t refresh_check; /* delta, auto: secondaries are compared every so many; 0: never */
  bool error_feedback;
  double error_decay;   /* see WireFeedback */
  int64_t error_reset;  /* errors are forgotten every so many steps; 0: never */
  bool accumulate_node; /* micro-batches are summed in a node, which crosses nodes once a step */
  int prefetch;         /* units that are gathered ahead; two more between nodes of GPUs */
  DType compute;        /* of full weights: DT_F32 or, on CUDA, DT_BF16. Full gradients are F32, but
                           for one rank's whose sums are BF16 */
  DType gradients;      /* of the owners' sums: DT_F32 or, on CUDA, DT_BF16 */
  bool offload;         /* moments, and masters where a copy in `compute` serves gathers, lie in
                           memory of the host, which the device reads and writes at the step */
} ZeroPPConfig;
/* What the recipe's section says; compute is left DT_F32. */
ZeroPPConfig zeropp_config(const Recipe *r);
/* Refuses what this device, or this number of ranks, does not do: "key: found ..". */
int zeropp_check(const ZeroPPConfig *cfg, DeviceKind device, int world, Error *err);

typedef struct ZeroPP ZeroPP;

/* Copies the specs. Masters are uninitialised until zeropp_init_random or a load. */
ZeroPP *zeropp_create(Device *d, Grid *g, const ZeroPPConfig *cfg, const ParamSpec *specs,
                      int n_params);
void zeropp_destroy(ZeroPP *z); /* collective: ranks may read each other's memory */
int zeropp_n_params(const ZeroPP *z);
int zeropp_n_units(const ZeroPP *z);
const ParamSpec *zeropp_spec(const ZeroPP *z, int param);
int zeropp_find(const ZeroPP *z, const char *name); /* -1 when absent */
int64_t zeropp_numel(const ZeroPP *z);              /* all parameters, all ranks */
int zeropp_prefetch_depth(const ZeroPP *z);         /* units to gather ahead */
Grid *zeropp_grid(const ZeroPP *z);
Device *zeropp_device(const ZeroPP *z);
const ZeroPPConfig *zeropp_config_of(const ZeroPP *z); /* with defaults filled in */

/* Layout (pure arithmetic, zeropp/layout.c): the flat range [*start, *start + *count) of a
 * parameter that rank (node, local_rank) owns when nothing is quantized. Any sizes; empty ranges
 * are normal. */
void layout_owned(const ParamSpec *s, int nodes, int local, int node, int local_rank,
                  int64_t *start, int64_t *count);

/* ---- weights ---- */
/* Starts the gather of a unit that is not FULL and not started yet; zeropp_gather finishes it. A
 * write of the weights in between forgets it. Messages are alive from start to gather: the plan
 * counts with zeropp_prefetch_depth of them. */
void zeropp_prefetch(ZeroPP *z, int unit);
void zeropp_gather(ZeroPP *z, int unit);
void zeropp_release(ZeroPP *z, int unit);
/* What refreshes by delta or auto sent of this rank's own pieces, since the start. */
typedef struct ZeroPPRefresh {
  uint64_t weights, changed;
  uint64_t bytes, dense_bytes;       /* sent, and what all of them would have been in BF16 */
  uint64_t int8_bytes;               /* and as qwZ with the config's blocks sends them */
  uint64_t delta_units, dense_units; /* units that were sent as changes, and otherwise */
} ZeroPPRefresh;
ZeroPPRefresh zeropp_refreshed(const ZeroPP *z);
/* Holds every unit FULL (the rollout's replica, small models) until the matching release. */
void zeropp_gather_all(ZeroPP *z);
void zeropp_release_all(ZeroPP *z);
Tensor zeropp_weight(const ZeroPP *z,
                     int param); /* shape of the spec; dies unless its unit is FULL */
/* The joined matrix that starts at `param` and takes n parameters: [sum of rows, in] (or [sum]). */
Tensor zeropp_weight_joined(const ZeroPP *z, int param, int n);

/* ---- weights of a rollout (rollout.c) ---- */
typedef enum RolloutWeights {
  ROLLOUT_REPLICA,         /* every rank holds all of them */
  ROLLOUT_TENSOR_PARALLEL, /* of matrices its own slice, whole rows of each */
  ROLLOUT_STREAM           /* none: units are gathered in every step */
} RolloutWeights;
/* All zero: a replica of full weights. */
typedef struct ZeroPPRollout {
  RolloutWeights weights;
  WireKind format; /* of matrices: WIRE_F32 (as they are computed with), or the codes and scales of
                      WIRE_INT8 or WIRE_FP8, with the config's block and type of scales */
  int whole_units; /* the first so many units (tables that rows are looked up in) are held whole, as
                      they are computed with */
} ZeroPPRollout;
/* What the weights are in training: the codes that they are gathered as, or WIRE_F32. */
WireKind zeropp_rollout_format(const ZeroPPConfig *cfg);
/* Refuses what this device, or a model of these specs with this config, does not do. */
int zeropp_rollout_check(const Device *d, const ZeroPPConfig *cfg, const ParamSpec *specs,
                         int n_params, ZeroPPRollout r, Error *err);
/* How many matrices are in codes, and of how many, those of the first units not counted. */
int zeropp_rollout_coded(const ZeroPPConfig *cfg, const ParamSpec *specs, int n_params,
                         ZeroPPRollout r, int *matrices);
/* Bytes that a rollout's weights take beside what zeropp_memory counts. */
uint64_t zeropp_rollout_memory(const ZeroPPConfig *cfg, const ParamSpec *specs, int n_params,
                               int nodes, int local, ZeroPPRollout r);
/* From begin to end, during which weights are not written; begins of one kind nest. Collective.
 *
 * hpZ: what crosses nodes does so here, and once for each version of the weights. Codes come as
 * they were gathered where the format is that of training; else full weights are quantized, the
 * same way on every rank. Matrices whose rows linear_codes_fit refuses, and the first units', stay
 * full.
 *
 * Full weights in a replica are FULL all the time. Otherwise, but for streams, no gather
 * communicates any more: it makes full weights out of codes, or does nothing, and zeropp_weight may
 * be asked for vectors and for what is held without one. In tensor parallel a matrix is this rank's
 * rows (zeropp_slice_rows), joined ones one after the other. */
void zeropp_rollout_begin(ZeroPP *z, ZeroPPRollout r);
void zeropp_rollout_end(ZeroPP *z);
bool zeropp_in_rollout(const ZeroPP *z, RolloutWeights w);
/* The matrix of a linear map: w_OK, format and codes. Codes where it is held so and its unit is not
 * FULL at the moment. */
Linear zeropp_linear(const ZeroPP *z, int param, int n_joined);
/* Rows of a parameter's slice. */
void zeropp_slice_rows(const ZeroPP *z, int param, int local_rank, int64_t *first, int64_t *count);

/* ---- gradients (trainable only) ---- */
/* Full fp32 gradient to add to. It starts at zero when it was not open, or (one rank, stages 0 and
 * 1) holds the sum of earlier micro-batches. Zeros are written to a parameter's gradient when it is
 * first asked for, and not at all for who overwrites it. */
void zeropp_open_grad(ZeroPP *z, int unit);
Tensor zeropp_grad(ZeroPP *z, int param); /* dies unless open */
Tensor zeropp_grad_joined(ZeroPP *z, int param, int n);
/* For a GEMM: *beta is 0 where nothing was added yet; the tensor may then hold anything, NaN too,
 * and must be written whole. From then on, and where something was added before, *beta is 1. On one
 * rank with sums in BF16 the tensor is BF16: the sum itself. */
Tensor zeropp_grad_into(ZeroPP *z, int param, int n, float *beta);
/* Closes the gradient and starts its sum over ranks, which is in the owners' shards by the step (or
 * when a gradient shard is asked for). */
void zeropp_reduce(ZeroPP *z, int unit);
/* The reductions from here to the step are the last of their units: what accumulate: node keeps
 * then crosses nodes behind compute, not at the step. A hint: it changes no result. */
void zeropp_last_micro(ZeroPP *z);
void zeropp_zero_grad(ZeroPP *z); /* shards to zero, before the first micro-batch of a step */
void zeropp_scale_grad(ZeroPP *z, float alpha);

/* ---- optimizer ---- */
typedef struct StepResult {
  double grad_norm; /* global L2 norm before clipping, of the whole summed gradient */
  bool skipped;     /* NaN or Inf anywhere, on any rank: nothing was changed, on any rank */
} StepResult;
/* p.grad_scale and p.t are filled here; max_norm 0: no clipping. PyTorch's clip: scale = max_norm /
 * (norm + 1e-6) when below 1. Weight decay only where the spec says. The caller zeroes gradients.
 * With prefetch, gathers of the first units start while the others are updated. */
StepResult zeropp_step(ZeroPP *z, AdamW p, float max_norm);
int64_t zeropp_steps(const ZeroPP *z);    /* steps taken, skipped ones not counted */
uint64_t zeropp_version(const ZeroPP *z); /* changes with every write of the weights */

/* Learning rate of 0-based step s of `total`: linear warm-up (s + 1) / warmup_steps, then constant,
 * or linear or cosine to min_lr_ratio. Never 0 on the first step; the last step reaches the
 * minimum, not before. */
double optimizer_lr(const OptimizerConfig *o, int64_t step, int64_t total);
AdamW optimizer_adamw(const OptimizerConfig *o,
                      double lr); /* t and grad_scale left to zeropp_step */

/* Exponential moving average of the masters: ema = decay * ema + (1 - decay) * master. */
void zeropp_ema_enable(ZeroPP *z); /* starts as a copy of the masters */
void zeropp_ema_update(ZeroPP *z, float decay);
bool zeropp_has_ema(const ZeroPP *z);
/* Same specs, grid and stage; to's weights become from's. */
void zeropp_copy_weights(ZeroPP *to, ZeroPP *from);

/* ---- state: this rank's part of each parameter (load, save, tests) ---- */
typedef enum StateKind {
  STATE_MASTER,
  STATE_MOMENT1,
  STATE_MOMENT2,
  STATE_GRAD,
  STATE_EMA,
  STATE_KINDS
} StateKind;
/* In host memory, as F32: the shard itself on the CPU, else a copy that lives until the next call
 * for this kind (or a write of the weights). NULL with *count = 0 where this rank owns nothing of
 * it. The first look at gradients after a zeropp_reduce finishes the reductions: a collective.
 * Masters of a frozen model that keeps nothing but rounded weights (its secondary, or full weights
 * in BF16) are those. */
float *zeropp_shard(ZeroPP *z, StateKind kind, int param, int64_t *start, int64_t *count);
/* What zeropp_shard gave for this kind and parameter was written to: brings it to the device. */
void zeropp_shard_written(ZeroPP *z, StateKind kind, int param);
/* After masters were written through zeropp_shard (a load): ends stale full copies, bumps the
 * version. Collective: stage 0 brings all pieces to all ranks, frozen models under hpZ the slices
 * to their secondaries, and give the masters back. */
void zeropp_weights_written(ZeroPP *z);
/* N(0, init_std) keyed by (seed, name, element): the same for any number of ranks. _param: of one
 * parameter, before zeropp_weights_written. */
void zeropp_init_random(ZeroPP *z, uint64_t seed);
void zeropp_init_param(ZeroPP *z, int param, uint64_t seed);
/* The same for a master that repeats n numbers over and over: element i of the parameter is
 * x[i % n]. On a GPU as fast as memory writes. */
void zeropp_init_repeated(ZeroPP *z, int param, const float *x, int64_t n);

/* Training state in one file (safetensors, full tensors "master/NAME", "moment1/NAME", ..., so that
 * another number of ranks can read it): every rank writes its own pieces. Error feedback is each
 * rank's own ("error/RANK.1", "error/RANK.2"): the same grid goes on bit for bit, another one, or a
 * run that had none, starts with errors of zero. Collective; agrees on errors. A save that fails
 * leaves no file. A load checks names, shapes and types before it changes anything; should the disk
 * fail in the middle, the state is partly read and the model of no use.
 */
int zeropp_save_state(ZeroPP *z, const char *path, Error *err);
int zeropp_load_state(ZeroPP *z, const char *path, Error *err);

/* Bytes this rank needs for a model of these specs: shards, moments, gradients (and node sums),
 * secondary, error feedback, and full weights, gradients and messages as they come and go
 * (full_units). For the memory plan; allocates nothing. */
typedef struct ZeroPPMemory {
  uint64_t master, moments, gradients, full_units, ema, secondary, errors;
  uint64_t host; /* offloaded, and in none of the others */
} ZeroPPMemory;
ZeroPPMemory zeropp_memory(const ZeroPPConfig *cfg, const ParamSpec *specs, int n_params, int nodes,
                           int local, bool ema);

#endif
