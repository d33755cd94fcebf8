/* Inside of `rlhf bench train`: what is asked and what was measured. */
#ifndef ORCHESTRATOR_CLI_BENCH_TRAIN_H
#define ORCHESTRATOR_CLI_BENCH_TRAIN_H

#include "orchestrator/cli_bench.h"

typedef struct TrainPlan {
  const char *model;
  ModelConfig config;
  int n_seqs, length, steps, micro_batches;
  RecomputeChoice recompute;
  ZeroPPConfig given; /* without --modes */
  BenchMode *modes;
  int n_modes;
  BenchRig rig;
  bool json;
} TrainPlan;

typedef struct TrainTimes {
  double step, forward, backward, optimizer; /* seconds, medians; forward: to the first loss */
  double hidden, exposed, inter, intra;      /* of one step, mean over the ranks */
  double loss, peak;                         /* bytes, the largest of the ranks */
  Recompute recompute;                       /* as it ran */
  int blocks;
} TrainTimes;

void train_print_head(const TrainPlan *p);
void train_print_row(const TrainPlan *p, const char *mode, const TrainTimes *t);
void train_print_recompute(const TrainPlan *p, const TrainTimes *t); /* what auto came to */
void train_print_foot(void);
void train_print_json(const TrainPlan *p, const char *mode, const TrainTimes *t);

#endif
