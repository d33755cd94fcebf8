/* Report: where a run's time, work and traffic went, phase by phase.
 *
 * One clock per rank is always running and always belongs to exactly one phase: report_phase gives
 * what has passed since the last switch (seconds, model FLOPs of the watched models, communication,
 * memory peak) to the phase that ends. So the phases of a step add up to the step, and what no one
 * claimed is PH_OTHER. At the end of a step the ranks' figures are put together: seconds are the
 * mean over ranks, FLOPs and bytes the sum, the memory peak the largest.
 *
 * Rank 0 alone writes RUN/metrics.jsonl (an object per step), RUN/report.json (totals) and the step
 * line on stderr. */
#ifndef ORCHESTRATOR_REPORT_H
#define ORCHESTRATOR_REPORT_H

#include "orchestrator/orchestrator.h"

/* How far the log-probs that answers were drawn with are from those the update starts from, d = |
 * drawn - old | of every answer token: with one engine and no filters only rounding is left.
 * Weights are those of importance_weight, of the tokens that have one. */
typedef struct RolloutGap {
  int64_t tokens, weighed, capped; /* capped: their weight is the cap */
  double sum, exp_sum, max;        /* of d and exp(d) */
  double weight_sum;
} RolloutGap;

/* Totals of a run over all ranks: what report.json holds and the table prints. */
typedef struct ReportTotals {
  PhaseTotals phase[PH_COUNT];
  int ranks;
  int64_t steps;
  ZeroPPRefresh refresh; /* by delta or auto, all models; units of one rank */
  RolloutGap gap;        /* of all PPO steps whose gap is a number */
  double peak_flops; /* per second, all ranks together: the best of GEMMs measured at the start and
                        the end, and of any phase; 0: not measured */
  char device[256];
} ReportTotals;

const char *phase_name(Phase p);  /* "actor_logprobs": keys of files */
const char *phase_title(Phase p); /* "actor log-probs": rows of the table */
json_t *report_totals_json(const ReportTotals *t);
/* file stands in messages. */
int report_totals_parse(const json_t *obj, const char *file, ReportTotals *out, Error *err);
void report_table(const ReportTotals *t, FILE *out);

/* ---- a running report ---- */

typedef struct Report Report; /* clocks, totals, the metrics file, the step line */

typedef struct ReportOptions {
  Grid *grid;
  Device *device;
  Arena *arena;         /* whose reserve counts only where it is used; or NULL */
  const char *dir;      /* the run directory, which exists */
  const char *progress; /* auto|bar|plain|off */
  bool measure_peak;
  int64_t metrics_bytes; /* metrics.jsonl is cut to this length: the steps before a resume */
} ReportOptions;
Report *report_open(const ReportOptions *o, Error *err); /* collective */
/* Measures the peak again and keeps the better of the two; writes report.json. Collective. */
int report_finish(Report *r, Error *err);
void report_close(Report *r);
const ReportTotals *report_totals(const Report *r);
void report_set_totals(Report *r, const ReportTotals *t); /* a resumed run goes on counting */
int64_t report_metrics_bytes(const Report *r);            /* length of metrics.jsonl */
int report_write(Report *r, Error *err); /* report.json as it stands; rank 0, not collective */

/* Models whose FLOPs are counted, until they are freed. */
void report_watch(Report *r, const Model *m);
void report_unwatch(Report *r, const Model *m);

Phase report_phase(Report *r, Phase next); /* returns the phase that ended */
/* Adds to the current phase what the whole batch (all ranks) held. */
void report_count(Report *r, int64_t sequences, int64_t prompt_tokens, int64_t generated_tokens);

/* ---- one step ---- */

/* Figures of the step that is under way, in the order given. Not-a-number is written as null. */
void report_metric(Report *r, const char *name, double value);
void report_metric_int(Report *r, const char *name, int64_t value);
void report_show(Report *r, const char *label, double value); /* also on the step line */

/* A figure of the step that hangs on clocks, behind the other costs. */
void report_cost(Report *r, const char *name, double value);
/* What refreshes by delta sent of a model during the step, this rank's part; the line has it behind
 * the other costs. Nothing where there was none on any rank. Collective. */
void report_refresh(Report *r, const char *model, ZeroPPRefresh sent);

/* Adds a step's gap, which every rank has, to the totals. */
void report_gap(Report *r, RolloutGap g);

/* A stage of `total` steps begins, `done` of them already behind it: what passed before belongs to
 * no step. Collective. */
void report_stage(Report *r, const char *stage, int64_t done, int64_t total);
/* Ends the step: puts the ranks together, appends the line to metrics.jsonl, draws the step line.
 * run_step counts over all stages. Collective. */
int report_step(Report *r, int64_t step, int64_t run_step, Error *err);
/* Ends the bar's line, since other text follows. */
void report_break(Report *r);

/* Held-out answers of a PPO run before its first and after its last step, side by side, from
 * RUN/samples; nothing when there are none. Not collective. */
int report_samples(const char *run_dir, int64_t last_step, FILE *out, Error *err);

/* The step line (orchestrator/report_progress.c). */
typedef struct Progress {
  bool bar, off;
  bool drawn; /* the cursor is behind a bar */
  const char *stage;
  int64_t done_at_start, total;
  double started;
} Progress;
void progress_open(Progress *p, const char *mode);
void progress_stage(Progress *p, const char *stage, int64_t done, int64_t total);
void progress_step(Progress *p, int64_t step, const char *figures, double step_seconds,
                   double tokens_per_second);
void progress_end(Progress *p); /* leaves the bar's line */

#endif
