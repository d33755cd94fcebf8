/* Inside of `rlhf bench`: what its files share. */
#ifndef ORCHESTRATOR_CLI_BENCH_H
#define ORCHESTRATOR_CLI_BENCH_H

#include "orchestrator/cli.h"

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
  int tokens, micro_batches, threads, prefetch;
  Grid *grid;
} BenchPlan;

/* Of one step, over all ranks. */
typedef struct BenchResult {
  double seconds, tokens_per_second;
  double inter_bytes, intra_bytes; /* received by a rank, mean over the ranks */
  double hidden, exposed;          /* seconds of communication, mean over the ranks */
  double loss;                     /* nats a token, before the last step's update */
} BenchResult;

int bench_run(const BenchPlan *p, const BenchMode *mode, BenchResult *out, Error *err);

/* Both write to stdout; rank 0. */
void bench_print_head(const BenchPlan *p);
void bench_print_row(const BenchPlan *p, const BenchMode *mode, const BenchResult *r,
                     const BenchResult *first);
void bench_print_foot(const BenchPlan *p);
void bench_print_json(const BenchPlan *p, const BenchMode *mode, const BenchResult *r);

#endif
