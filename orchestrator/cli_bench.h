/* Inside of `rlhf bench`: what its files share. */
#ifndef ORCHESTRATOR_CLI_BENCH_H
#define ORCHESTRATOR_CLI_BENCH_H

#include "orchestrator/cli.h"

/* The benchmarks by name, one file each. They print on rank 0. */
CliResult bench_zeropp(const Args *a, Error *err);
CliResult bench_train(const Args *a, Error *err);
CliResult bench_kernels(const Args *a, Error *err);
CliResult bench_ppo(const Args *a, Error *err);
CliResult bench_comm(const Args *a, Error *err);
CliResult bench_rollout(const Args *a, Error *err);

/* ---- what they work on (cli_bench_work.c) ---- */

void *bench_take(void *ctx, size_t bytes); /* for arena_create, of a Device */
void bench_give(void *ctx, void *p);
/* The ranks, their device and its precision, by --ranks-per-node, --device, --precision, --threads.
 * Collective. */
typedef struct BenchRig {
  Grid *grid;
  Device *device;
  DType compute;
  double lr;
} BenchRig;
CliResult bench_rig_open(BenchRig *r, const Args *a, Error *err);
void bench_rig_close(BenchRig *r);
/* Of a config file or a folder with one; NULL: a small Llama. name: how tables call it. */
int bench_model(const char *path, const char **name, ModelConfig *c, Error *err);
/* Random weights, quickly. Collective. */
Model *bench_model_create(Device *d, Grid *g, Arena *arena, const ModelConfig *c,
                          const ModelOptions *o);

/* One micro-batch of a rank: every token but a sequence's first is predicted. */
typedef struct Tokens {
  int n_seqs, n_rows;
  int32_t *offsets, *tokens, *rows, *targets;
} Tokens;
/* n tokens in n_seqs sequences of equal lengths. */
Tokens tokens_draw(const ModelConfig *c, int n_seqs, int n, uint64_t stream);
void tokens_free(Tokens *t);

typedef struct StepLoss {
  double weight, sum; /* 1 / rows of all ranks and micro-batches; of this rank's -log p */
  double reached;     /* when the first rows of the last micro-batch came */
} StepLoss;
/* Forward, loss, backward. */
void bench_micro_batch(Model *m, const Tokens *t, StepLoss *l);
AdamW bench_adamw(double lr);

typedef struct Count {
  double seconds, intra, inter, hidden, exposed;
} Count;
Count count_now(void);

/* ---- modes of the engine (cli_bench_table.c) ---- */

/* One way to run the engine; accumulate_node counts where there are several micro-batches. */
typedef struct BenchMode {
  const char *name;
  ZeroPPConfig zero;
} BenchMode;
/* The modes of a list parted by commas, in its order (NULL: all of them); the count, or -1. The
 * caller frees *out. */
int bench_modes_parse(const char *list, BenchMode **out, Error *err);

/* What every mode trains: tokens of a rank's micro-batch, always the same random ones. */
typedef struct BenchPlan {
  const char *model; /* how the table calls it */
  ModelConfig config;
  int steps; /* measured, after one that is not */
  int tokens, micro_batches, prefetch;
  Grid *grid;
  Device *device;
  DType compute;
  double lr;
} BenchPlan;

/* Of one step, over all ranks. */
typedef struct BenchResult {
  double seconds, tokens_per_second;
  double inter_bytes, intra_bytes; /* received by a rank, mean over the ranks */
  double hidden, exposed;          /* seconds of communication, mean over the ranks */
  double loss;                     /* nats a token, before the last step's update */
} BenchResult;

/* Both write to stdout; rank 0. */
void bench_print_head(const BenchPlan *p);
void bench_print_row(const BenchPlan *p, const BenchMode *mode, const BenchResult *r,
                     const BenchResult *first);
void bench_print_foot(const BenchPlan *p);
void bench_print_json(const BenchPlan *p, const BenchMode *mode, const BenchResult *r);

#endif
