/* A running report: this rank's clock, the totals over ranks, the metrics file and the step line.
 *
 * Invariants: the totals are the same on every rank; a line of metrics.jsonl is there whole or not
 * at all. */
#include "orchestrator/report.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fs.h"
#include "orchestrator/report_clock.h"

struct Report {
  Grid *grid;
  PhaseClock clock;
  char *dir, *metrics_path;
  FILE *metrics;         /* rank 0 */
  int64_t metrics_bytes; /* of whole lines */
  bool measure_peak;
  double own_peak; /* GEMM FLOPs per second, this rank */
  ReportTotals totals;

  /* The step under way. */
  const char *stage;
  Progress progress;
  char *figures, *shown, *costs;
  size_t figures_len, shown_len, costs_len;
  FILE *figures_out, *shown_out, *costs_out;
};

Phase report_phase(Report *r, Phase next) { return phase_clock_switch(&r->clock, next); }

void report_count(Report *r, int64_t sequences, int64_t prompt_tokens, int64_t generated_tokens) {
  PhaseTotals *p = &r->clock.since[r->clock.phase];
  p->sequences += sequences;
  p->prompt_tokens += prompt_tokens;
  p->generated_tokens += generated_tokens;
}

void report_watch(Report *r, const Model *m) { phase_clock_watch(&r->clock, m); }
void report_unwatch(Report *r, const Model *m) { phase_clock_unwatch(&r->clock, m); }

/* On a machine that others use too, the measurement may have had less of it than a phase got. */
static void raise_peak(ReportTotals *t, const PhaseTotals p[PH_COUNT]) {
  for (Phase i = 0; i < PH_COUNT && t->peak_flops > 0; i++)
    if (p[i].flops > p[i].seconds * t->peak_flops) t->peak_flops = p[i].flops / p[i].seconds;
}

/* Ends an interval: its figures over all ranks go to out and into the totals. */
static void flush(Report *r, PhaseTotals out[PH_COUNT]) {
  phase_clock_flush(&r->clock, r->grid, out);
  for (Phase i = 0; i < PH_COUNT; i++) phase_totals_add(&r->totals.phase[i], &out[i]);
  raise_peak(&r->totals, out);
}

/* ---- opening and closing ---- */

/* All ranks measure at the same time, as they will work; the better of all measurements counts. The
 * clock stands still meanwhile: it is no part of the run. */
static void measure_peak(Report *r) {
  if (!r->measure_peak) return;
  phase_clock_stop(&r->clock);
  comm_barrier(r->grid->all);
  double rate = device_measure(r->clock.device).gemm_flops;
  if (rate > r->own_peak) r->own_peak = rate;
  double sum = r->own_peak;
  comm_all_reduce_f64(r->grid->all, &sum, 1, false);
  if (sum > r->totals.peak_flops) r->totals.peak_flops = sum;
  phase_clock_go_on(&r->clock);
}

static int open_metrics(Report *r, Error *err) {
  if (r->grid->rank != 0) return 0;
  struct stat st;
  r->metrics = fopen(r->metrics_path, "ab");
  if (!r->metrics || fstat(fileno(r->metrics), &st) != 0)
    return error_set(err, "%s: %s", r->metrics_path, strerror(errno));
  if (st.st_size < r->metrics_bytes)
    return error_set(err, "%s: %lld bytes, but the checkpoint was taken at %lld", r->metrics_path,
                     (long long)st.st_size, (long long)r->metrics_bytes);
  if (ftruncate(fileno(r->metrics), (off_t)r->metrics_bytes) != 0)
    return error_set(err, "%s: %s", r->metrics_path, strerror(errno));
  return 0;
}

static void figures_open(Report *r) {
  r->figures_out = open_memstream(&r->figures, &r->figures_len);
  r->shown_out = open_memstream(&r->shown, &r->shown_len);
  r->costs_out = open_memstream(&r->costs, &r->costs_len);
  if (!r->figures_out || !r->shown_out || !r->costs_out) die("out of memory");
}

static void figures_close(Report *r) {
  fclose(r->figures_out);
  fclose(r->shown_out);
  fclose(r->costs_out);
  free(r->figures);
  free(r->shown);
  free(r->costs);
}

Report *report_open(const ReportOptions *o, Error *err) {
  Report *r = mem_zalloc(1, sizeof *r);
  r->grid = o->grid;
  r->dir = mem_strdup(o->dir);
  r->metrics_path = fs_join(o->dir, "metrics.jsonl");
  r->metrics_bytes = o->metrics_bytes;
  r->measure_peak = o->measure_peak;
  phase_clock_open(&r->clock, o->device, o->arena);
  r->totals.ranks = o->grid->world;
  r->stage = "";
  snprintf(r->totals.device, sizeof r->totals.device, "%s", device_describe(o->device));
  progress_open(&r->progress, o->grid->rank == 0 ? o->progress : "off");
  figures_open(r);
  if (comm_agree(r->grid->all, open_metrics(r, err), err)) {
    report_close(r);
    return NULL;
  }
  measure_peak(r);
  return r;
}

void report_close(Report *r) {
  if (!r) return;
  progress_end(&r->progress);
  if (r->metrics) fclose(r->metrics);
  figures_close(r);
  free(r->dir);
  free(r->metrics_path);
  free(r);
}

const ReportTotals *report_totals(const Report *r) { return &r->totals; }
int64_t report_metrics_bytes(const Report *r) { return r->metrics_bytes; }

void report_set_totals(Report *r, const ReportTotals *t) {
  memcpy(r->totals.phase, t->phase, sizeof r->totals.phase);
  r->totals.refresh = t->refresh;
  r->totals.gap = t->gap;
  r->totals.steps = t->steps;
  raise_peak(&r->totals, t->phase);
}

int report_write(Report *r, Error *err) {
  json_t *obj = report_totals_json(&r->totals);
  char *text = json_dumps(obj, JSON_INDENT(1));
  char *path = fs_join(r->dir, "report.json");
  if (!text) die("report.json: figures that are no JSON");
  int rc = fs_write_atomic(path, text, strlen(text), err);
  free(path);
  free(text);
  json_decref(obj);
  return rc;
}

int report_finish(Report *r, Error *err) {
  progress_end(&r->progress);
  report_phase(r, PH_OTHER);
  measure_peak(r);
  PhaseTotals rest[PH_COUNT];
  flush(r, rest);
  return comm_agree(r->grid->all, r->grid->rank == 0 ? report_write(r, err) : 0, err);
}

/* ---- steps ---- */

void report_metric(Report *r, const char *name, double value) {
  fprintf(r->figures_out, ",\"%s\":", name);
  json_put_f64(r->figures_out, value);
}

void report_metric_int(Report *r, const char *name, int64_t value) {
  fprintf(r->figures_out, ",\"%s\":%lld", name, (long long)value);
}

void report_show(Report *r, const char *label, double value) {
  fprintf(r->shown_out, "  %s %.4g", label, value);
}

void report_cost(Report *r, const char *name, double value) {
  fprintf(r->costs_out, ",\"%s\":", name);
  json_put_f64(r->costs_out, value);
}

void report_refresh(Report *r, const char *model, ZeroPPRefresh sent) {
  double x[7] = {(double)sent.weights,     (double)sent.changed,    (double)sent.bytes,
                 (double)sent.dense_bytes, (double)sent.int8_bytes, (double)sent.delta_units,
                 (double)sent.dense_units};
  comm_all_reduce_f64(r->grid->all, x, 7, false);
  if (!(x[0] > 0)) return;
  fprintf(r->costs_out, ",\"%s_refresh\":{\"changed\":", model);
  json_put_f64(r->costs_out, x[1] / x[0]);
  for (int i = 5; i < 7; i++) x[i] /= r->grid->world; /* the same on all */
  fprintf(r->costs_out, ",\"bytes\":%.0f,\"bfloat16_bytes\":%.0f,\"int8_bytes\":%.0f", x[2], x[3],
          x[4]);
  fprintf(r->costs_out, ",\"delta_units\":%.0f,\"dense_units\":%.0f}", x[5], x[6]);
  ZeroPPRefresh *t = &r->totals.refresh;
  t->weights += (uint64_t)x[0];
  t->changed += (uint64_t)x[1];
  t->bytes += (uint64_t)x[2];
  t->dense_bytes += (uint64_t)x[3];
  t->int8_bytes += (uint64_t)x[4];
  t->delta_units += (uint64_t)x[5];
  t->dense_units += (uint64_t)x[6];
}

void report_gap(Report *r, RolloutGap g) {
  RolloutGap *t = &r->totals.gap;
  /* A step's line has what is no number; JSON of totals has no place for it. */
  if (!isfinite(t->sum + g.sum + t->exp_sum + g.exp_sum + g.weight_sum)) return;
  t->tokens += g.tokens;
  t->weighed += g.weighed;
  t->capped += g.capped;
  t->sum += g.sum;
  t->exp_sum += g.exp_sum;
  t->weight_sum += g.weight_sum;
  if (g.max > t->max) t->max = g.max;
}

void report_stage(Report *r, const char *stage, int64_t done, int64_t total) {
  PhaseTotals before[PH_COUNT];
  report_phase(r, PH_OTHER);
  flush(r, before);
  r->stage = stage;
  progress_stage(&r->progress, stage, done, total);
}

void report_break(Report *r) { progress_end(&r->progress); }

typedef struct StepSums {
  double seconds, comm_seconds, hidden_seconds, flops;
  int64_t generated, trained;
  uint64_t intra_bytes, inter_bytes;
  size_t peak_bytes;
} StepSums;

static StepSums sum_step(const PhaseTotals p[PH_COUNT]) {
  StepSums s = {0};
  for (Phase i = 0; i < PH_COUNT; i++) {
    s.seconds += p[i].seconds;
    s.comm_seconds += p[i].comm_seconds;
    s.hidden_seconds += p[i].hidden_seconds;
    s.flops += p[i].flops;
    for (CollKind k = 0; k < COLL_KINDS; k++) {
      s.intra_bytes += p[i].traffic.of[k].intra_bytes;
      s.inter_bytes += p[i].traffic.of[k].inter_bytes;
    }
    if (p[i].peak_bytes > s.peak_bytes) s.peak_bytes = p[i].peak_bytes;
  }
  s.generated = p[PH_ROLLOUT].generated_tokens;
  s.trained = p[PH_SFT].prompt_tokens + p[PH_REWARD_TRAIN].prompt_tokens;
  return s;
}

/* Figures of machine and clock: everything of a line that may differ between two equal runs. */
static void put_costs(Report *r, const PhaseTotals p[PH_COUNT], const StepSums *s, FILE *out) {
  fputs(",\"seconds\":{", out);
  for (Phase i = 0; i < PH_COUNT; i++) {
    if (p[i].calls == 0 && p[i].seconds <= 0) continue;
    fprintf(out, "\"%s\":", phase_name(i));
    json_put_f64(out, p[i].seconds);
    fputc(',', out);
  }
  fputs("\"step\":", out);
  json_put_f64(out, s->seconds);
  fputs("},\"comm_seconds\":", out);
  json_put_f64(out, s->comm_seconds);
  fputs(",\"comm_hidden_seconds\":", out);
  json_put_f64(out, s->hidden_seconds);
  fputs(",\"tokens_per_second\":", out);
  json_put_f64(out, (double)(s->generated + s->trained) / s->seconds);
  fputs(",\"model_flops\":", out);
  json_put_f64(out, s->flops);
  fputs(",\"utilisation\":", out);
  json_put_f64(out,
               r->totals.peak_flops > 0 ? s->flops / (s->seconds * r->totals.peak_flops) : NAN);
  fprintf(out, ",\"intra_bytes\":%llu,\"inter_bytes\":%llu,\"peak_bytes\":%zu",
          (unsigned long long)s->intra_bytes, (unsigned long long)s->inter_bytes, s->peak_bytes);
}

/* The line, or an error and the file as it was. */
static int append_line(Report *r, const char *line, size_t len, Error *err) {
  if (fwrite(line, 1, len, r->metrics) == len && fflush(r->metrics) == 0) {
    r->metrics_bytes += (int64_t)len;
    return 0;
  }
  error_set(err, "%s: %s", r->metrics_path, strerror(errno));
  if (ftruncate(fileno(r->metrics), (off_t)r->metrics_bytes) != 0)
    error_set(err, "%s: a line could not be written whole nor taken back: %s", r->metrics_path,
              strerror(errno));
  return -1;
}

static int write_line(Report *r, int64_t step, int64_t run_step, const PhaseTotals p[PH_COUNT],
                      const StepSums *s, Error *err) {
  char *line = NULL;
  size_t len = 0;
  FILE *out = open_memstream(&line, &len);
  if (!out) die("out of memory");
  fprintf(out, "{\"stage\":\"%s\",\"step\":%lld,\"run_step\":%lld%s", r->stage, (long long)step,
          (long long)run_step, r->figures);
  put_costs(r, p, s, out);
  fprintf(out, "%s}\n", r->costs);
  fclose(out);
  int rc = append_line(r, line, len, err);
  free(line);
  return rc;
}

int report_step(Report *r, int64_t step, int64_t run_step, Error *err) {
  PhaseTotals p[PH_COUNT];
  report_phase(r, PH_OTHER);
  flush(r, p);
  StepSums s = sum_step(p);
  fflush(r->figures_out);
  fflush(r->shown_out);
  fflush(r->costs_out);
  if (step > 0) r->totals.steps++;
  int rc = r->grid->rank == 0 ? write_line(r, step, run_step, p, &s, err) : 0;
  if (rc == 0)
    progress_step(&r->progress, step, r->shown, s.seconds,
                  s.seconds > 0 ? (double)(s.generated + s.trained) / s.seconds : 0);
  figures_close(r);
  figures_open(r);
  return comm_agree(r->grid->all, rc, err);
}
