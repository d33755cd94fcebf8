/* The per-phase table: at the end of a run, and again from its files by `rlhf report`.
 *
 * Tokens per second count generated tokens alone in the rollout, and all tokens where a forward or
 * an update runs over whole sequences, as in evaluations of the loss. Utilisation is model FLOPs
 * over seconds times the measured peak of all ranks. "comm s" are the seconds that compute waited
 * for communication, "hidden s" those that ran beside it. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "orchestrator/report.h"
#include "orchestrator/train.h"

static const double MIB = 1024.0 * 1024.0;

typedef struct Sums {
  double seconds, flops, comm_seconds, hidden_seconds;
  uint64_t intra, inter;
  size_t peak_bytes;
} Sums;

static void phase_bytes(const PhaseTotals *p, uint64_t *intra, uint64_t *inter) {
  *intra = *inter = 0;
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    *intra += p->traffic.of[k].intra_bytes;
    *inter += p->traffic.of[k].inter_bytes;
  }
}

static Sums sum_phases(const ReportTotals *t) {
  Sums s = {0};
  for (Phase i = 0; i < PH_COUNT; i++) {
    const PhaseTotals *p = &t->phase[i];
    uint64_t intra, inter;
    phase_bytes(p, &intra, &inter);
    s.seconds += p->seconds;
    s.flops += p->flops;
    s.comm_seconds += p->comm_seconds;
    s.hidden_seconds += p->hidden_seconds;
    s.intra += intra;
    s.inter += inter;
    if (p->peak_bytes > s.peak_bytes) s.peak_bytes = p->peak_bytes;
  }
  return s;
}

static int64_t tokens_counted(Phase i, const PhaseTotals *p) {
  return p->generated_tokens + (i == PH_ROLLOUT ? 0 : p->prompt_tokens);
}

/* A count, or "-" where there is nothing to count. */
static void print_count(FILE *out, int width, int64_t n) {
  if (n > 0)
    fprintf(out, " %*lld", width, (long long)n);
  else
    fprintf(out, " %*s", width, "-");
}

static void print_work(const ReportTotals *t, double flops, double seconds, FILE *out) {
  if (flops > 0)
    fprintf(out, " %10.2f", flops / 1e9);
  else
    fprintf(out, " %10s", "-");
  if (flops > 0 && t->peak_flops > 0 && seconds > 0)
    fprintf(out, " %5.1f%%", 100 * flops / (seconds * t->peak_flops));
  else
    fprintf(out, " %6s", "-");
}

static void print_links(double exposed, double hidden, uint64_t intra, uint64_t inter, size_t peak,
                        FILE *out) {
  fprintf(out, " %7.2f %8.2f %9.2f %9.2f %9.1f\n", exposed, hidden, (double)intra / MIB,
          (double)inter / MIB, (double)peak / MIB);
}

static void print_phase(const ReportTotals *t, Phase i, double total_seconds, FILE *out) {
  const PhaseTotals *p = &t->phase[i];
  uint64_t intra, inter;
  phase_bytes(p, &intra, &inter);
  double rate = p->seconds > 0 ? (double)tokens_counted(i, p) / p->seconds : 0;
  fprintf(out, "%-16s %9.2f %5.1f%%", phase_title(i), p->seconds,
          total_seconds > 0 ? 100 * p->seconds / total_seconds : 0);
  print_count(out, 8, p->sequences);
  print_count(out, 10, p->prompt_tokens);
  print_count(out, 10, p->generated_tokens);
  print_count(out, 9, (int64_t)(rate + 0.5));
  print_count(out, 9, (int64_t)(rate / t->ranks + 0.5));
  print_work(t, p->flops, p->seconds, out);
  print_links(p->comm_seconds, p->hidden_seconds, intra, inter, p->peak_bytes, out);
}

static void print_traffic(const ReportTotals *t, FILE *out) {
  if (t->ranks == 1) return; /* a rank alone moves nothing */
  fprintf(out, "\n%-16s %10s %12s %12s %9s %9s\n", "collective", "calls", "intra MiB", "inter MiB",
          "comm s", "hidden s");
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    TrafficCount sum = {0};
    for (Phase i = 0; i < PH_COUNT; i++) {
      const TrafficCount *c = &t->phase[i].traffic.of[k];
      sum.calls += c->calls;
      sum.intra_bytes += c->intra_bytes;
      sum.inter_bytes += c->inter_bytes;
      sum.seconds += c->seconds;
      sum.hidden_seconds += c->hidden_seconds;
    }
    if (sum.calls == 0) continue;
    fprintf(out, "%-16s %10llu %12.2f %12.2f %9.2f %9.2f\n", coll_name(k),
            (unsigned long long)sum.calls, (double)sum.intra_bytes / MIB,
            (double)sum.inter_bytes / MIB, sum.seconds, sum.hidden_seconds);
  }
}

static void print_refresh(const ZeroPPRefresh *x, FILE *out) {
  if (x->weights == 0) return;
  fprintf(out,
          "\nrefresh: %.2f %% of weights changed; %.2f MiB sent, %.2f as bfloat16, %.2f as int8; "
          "%llu units by delta, %llu dense\n",
          100 * (double)x->changed / (double)x->weights, (double)x->bytes / MIB,
          (double)x->dense_bytes / MIB, (double)x->int8_bytes / MIB,
          (unsigned long long)x->delta_units, (unsigned long long)x->dense_units);
}

static void print_gap(const RolloutGap *g, FILE *out) {
  double n = (double)g->tokens, w = (double)g->weighed;
  if (g->tokens == 0) return;
  fprintf(out,
          "\nlog-probabilities of rollout and update: |difference| %.2e in the mean, %.2e at most; "
          "mean exp|difference| %.6f\n",
          g->sum / n, g->max, g->exp_sum / n);
  if (g->weighed > 0)
    fprintf(out, "importance weights: %.4f in the mean, %.2f %% at the cap\n", g->weight_sum / w,
            100 * (double)g->capped / w);
}

void report_table(const ReportTotals *t, FILE *out) {
  Sums s = sum_phases(t);
  fprintf(out, "%lld steps on %d rank%s (%s)\n", (long long)t->steps, t->ranks,
          t->ranks == 1 ? "" : "s", t->device);
  if (t->peak_flops > 0)
    fprintf(out, "measured peak %.1f GFLOP/s, all ranks together\n", t->peak_flops / 1e9);
  fprintf(out, "\n%-16s %9s %6s %8s %10s %10s %9s %9s %10s %6s %7s %8s %9s %9s %9s\n", "phase",
          "seconds", "share", "seqs", "prompt tok", "gen tok", "tok/s", "per rank", "GFLOP", "util",
          "comm s", "hidden s", "intra MiB", "inter MiB", "peak MiB");
  for (Phase i = 0; i < PH_COUNT; i++)
    if (t->phase[i].calls > 0) print_phase(t, i, s.seconds, out);
  fprintf(out, "%-16s %9.2f %5.1f%% %8s %10s %10s %9s %9s", "total", s.seconds, 100.0, "", "", "",
          "", "");
  print_work(t, s.flops, s.seconds, out);
  print_links(s.comm_seconds, s.hidden_seconds, s.intra, s.inter, s.peak_bytes, out);
  print_traffic(t, out);
  print_refresh(&t->refresh, out);
  print_gap(&t->gap, out);
}

int report_print_run(const char *run_dir, FILE *out, Error *err) {
  if (!fs_is_dir(run_dir)) return error_set(err, "%s: no such run directory", run_dir);
  char *path = fs_join(run_dir, "report.json");
  int rc = -1;
  if (!fs_exists(path)) {
    error_set(err, "%s: not there; a run writes it at its first checkpoint and at its end", path);
  } else {
    json_t *obj = json_read(path, err);
    ReportTotals t;
    rc = obj ? report_totals_parse(obj, path, &t, err) : -1;
    if (rc == 0) report_table(&t, out);
    json_decref(obj);
  }
  free(path);
  return rc;
}
