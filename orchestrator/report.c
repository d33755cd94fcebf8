/* A running report: one clock per rank, the totals over ranks, the metrics file and the step line.
 *
 * Invariants: the clock always belongs to one phase; the totals are the same on every rank; a line
 * of metrics.jsonl is there whole or not at all. */
#include "orchestrator/report.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fs.h"

enum { MAX_MODELS = 8 };

struct Report {
  Grid *grid;
  Device *device;
  Arena *arena;
  char *dir, *metrics_path;
  FILE *metrics;         /* rank 0 */
  int64_t metrics_bytes; /* of whole lines */
  bool measure_peak;
  double own_peak; /* GEMM FLOPs per second, this rank */
  ReportTotals totals;

  /* This rank's clock. */
  Phase phase;
  double mark_seconds, mark_flops;
  Traffic mark_traffic;
  PhaseTotals since[PH_COUNT]; /* since the last flush */
  const Model *models[MAX_MODELS];
  int n_models;

  /* The step under way. */
  const char *stage;
  Progress progress;
  char *figures, *shown;
  size_t figures_len, shown_len;
  FILE *figures_out, *shown_out;
};

/* ---- the clock ---- */

static double flops_done(const Report *r) {
  double sum = 0;
  for (int i = 0; i < r->n_models; i++) sum += model_flops_done(r->models[i]);
  return sum;
}

static void add_traffic(Traffic *sum, const Traffic *now, const Traffic *before) {
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    sum->of[k].calls += now->of[k].calls - before->of[k].calls;
    sum->of[k].intra_bytes += now->of[k].intra_bytes - before->of[k].intra_bytes;
    sum->of[k].inter_bytes += now->of[k].inter_bytes - before->of[k].inter_bytes;
    sum->of[k].seconds += now->of[k].seconds - before->of[k].seconds;
  }
}

/* Most bytes in use since the last call; the arena's reserve does not count, what is used of it
 * does. */
static size_t take_peak(Report *r) {
  size_t peak = device_peak_bytes(r->device);
  device_reset_peak(r->device);
  if (!r->arena) return peak;
  size_t reserve = arena_capacity(r->arena);
  peak = (peak > reserve ? peak - reserve : 0) + arena_peak(r->arena);
  arena_reset_peak(r->arena);
  return peak;
}

/* Gives what has passed to the current phase. */
static void mark(Report *r) {
  PhaseTotals *p = &r->since[r->phase];
  double seconds = clock_seconds(), flops = flops_done(r);
  Traffic traffic = traffic_now();
  p->seconds += seconds - r->mark_seconds;
  p->flops += flops - r->mark_flops;
  add_traffic(&p->traffic, &traffic, &r->mark_traffic);
  for (CollKind k = 0; k < COLL_KINDS; k++)
    p->comm_seconds += traffic.of[k].seconds - r->mark_traffic.of[k].seconds;
  size_t peak = take_peak(r);
  if (peak > p->peak_bytes) p->peak_bytes = peak;
  r->mark_seconds = seconds;
  r->mark_flops = flops;
  r->mark_traffic = traffic;
}

Phase report_phase(Report *r, Phase next) {
  Phase ended = r->phase;
  mark(r);
  r->phase = next;
  r->since[next].calls++;
  return ended;
}

void report_count(Report *r, int64_t sequences, int64_t prompt_tokens, int64_t generated_tokens) {
  PhaseTotals *p = &r->since[r->phase];
  p->sequences += sequences;
  p->prompt_tokens += prompt_tokens;
  p->generated_tokens += generated_tokens;
}

void report_watch(Report *r, const Model *m) {
  require(r->n_models < MAX_MODELS);
  mark(r);
  r->models[r->n_models++] = m;
  r->mark_flops = flops_done(r);
}

void report_unwatch(Report *r, const Model *m) {
  mark(r);
  int kept = 0;
  for (int i = 0; i < r->n_models; i++)
    if (r->models[i] != m) r->models[kept++] = r->models[i];
  r->n_models = kept;
  r->mark_flops = flops_done(r);
}

/* ---- putting the ranks together ---- */

enum { PER_COLL = 4, PER_PHASE = 3 + PER_COLL * COLL_KINDS };

static void pack_phase(const PhaseTotals *p, double *x) {
  *x++ = p->seconds;
  *x++ = p->flops;
  *x++ = p->comm_seconds;
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    const TrafficCount *c = &p->traffic.of[k];
    *x++ = (double)c->calls;
    *x++ = (double)c->intra_bytes;
    *x++ = (double)c->inter_bytes;
    *x++ = c->seconds;
  }
}

/* Seconds and calls are means over ranks, FLOPs and bytes sums; counts were global already. */
static void unpack_phase(const double *x, int world, PhaseTotals *p) {
  p->seconds = *x++ / world;
  p->flops = *x++;
  p->comm_seconds = *x++ / world;
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    TrafficCount *c = &p->traffic.of[k];
    c->calls = (uint64_t)(*x++ / world + 0.5);
    c->intra_bytes = (uint64_t)*x++;
    c->inter_bytes = (uint64_t)*x++;
    c->seconds = *x++ / world;
  }
}

static void add_phase(PhaseTotals *sum, const PhaseTotals *p) {
  static const Traffic zero;
  sum->seconds += p->seconds;
  sum->flops += p->flops;
  sum->comm_seconds += p->comm_seconds;
  sum->sequences += p->sequences;
  sum->prompt_tokens += p->prompt_tokens;
  sum->generated_tokens += p->generated_tokens;
  sum->calls += p->calls;
  add_traffic(&sum->traffic, &p->traffic, &zero);
  if (p->peak_bytes > sum->peak_bytes) sum->peak_bytes = p->peak_bytes;
}

/* Ends an interval: its figures over all ranks go to out and into the totals. */
static void flush(Report *r, PhaseTotals out[PH_COUNT]) {
  mark(r);
  double sum[PH_COUNT * PER_PHASE], peak[PH_COUNT];
  for (Phase i = 0; i < PH_COUNT; i++) {
    pack_phase(&r->since[i], sum + i * PER_PHASE);
    peak[i] = (double)r->since[i].peak_bytes;
  }
  comm_all_reduce_f64(r->grid->all, sum, PH_COUNT * PER_PHASE, false);
  comm_all_reduce_f64(r->grid->all, peak, PH_COUNT, true);
  for (Phase i = 0; i < PH_COUNT; i++) {
    out[i] = r->since[i];
    unpack_phase(sum + i * PER_PHASE, r->grid->world, &out[i]);
    out[i].peak_bytes = (size_t)peak[i];
    add_phase(&r->totals.phase[i], &out[i]);
  }
  memset(r->since, 0, sizeof r->since);
}

/* ---- opening and closing ---- */

/* All ranks measure at the same time, as they will work; the better of all measurements counts. The
 * clock stands still meanwhile: it is no part of the run. */
static void measure_peak(Report *r) {
  if (!r->measure_peak) return;
  mark(r);
  comm_barrier(r->grid->all);
  double rate = device_measure(r->device).gemm_flops;
  if (rate > r->own_peak) r->own_peak = rate;
  double sum = r->own_peak;
  comm_all_reduce_f64(r->grid->all, &sum, 1, false);
  r->totals.peak_flops = sum;
  take_peak(r);
  r->mark_seconds = clock_seconds();
  r->mark_traffic = traffic_now();
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
  if (!r->figures_out || !r->shown_out) die("out of memory");
}

static void figures_close(Report *r) {
  fclose(r->figures_out);
  fclose(r->shown_out);
  free(r->figures);
  free(r->shown);
}

Report *report_open(const ReportOptions *o, Error *err) {
  Report *r = mem_zalloc(1, sizeof *r);
  r->grid = o->grid;
  r->device = o->device;
  r->arena = o->arena;
  r->dir = mem_strdup(o->dir);
  r->metrics_path = fs_join(o->dir, "metrics.jsonl");
  r->metrics_bytes = o->metrics_bytes;
  r->measure_peak = o->measure_peak;
  r->phase = PH_OTHER;
  r->mark_seconds = clock_seconds();
  r->mark_traffic = traffic_now();
  r->since[PH_OTHER].calls = 1;
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
  r->totals.steps = t->steps;
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

void report_stage(Report *r, const char *stage, int64_t done, int64_t total) {
  PhaseTotals before[PH_COUNT];
  report_phase(r, PH_OTHER);
  flush(r, before);
  r->stage = stage;
  progress_stage(&r->progress, stage, done, total);
}

void report_break(Report *r) { progress_end(&r->progress); }

typedef struct StepSums {
  double seconds, comm_seconds, flops;
  int64_t generated, trained;
  size_t peak_bytes;
} StepSums;

static StepSums sum_step(const PhaseTotals p[PH_COUNT]) {
  StepSums s = {0};
  for (Phase i = 0; i < PH_COUNT; i++) {
    s.seconds += p[i].seconds;
    s.comm_seconds += p[i].comm_seconds;
    s.flops += p[i].flops;
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
  fputs(",\"tokens_per_second\":", out);
  json_put_f64(out, (double)(s->generated + s->trained) / s->seconds);
  fputs(",\"model_flops\":", out);
  json_put_f64(out, s->flops);
  fputs(",\"utilisation\":", out);
  json_put_f64(out,
               r->totals.peak_flops > 0 ? s->flops / (s->seconds * r->totals.peak_flops) : NAN);
  fprintf(out, ",\"peak_bytes\":%zu", s->peak_bytes);
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
  fputs("}\n", out);
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
  if (step > 0) r->totals.steps++;
  int rc = r->grid->rank == 0 ? write_line(r, step, run_step, p, &s, err) : 0;
  if (rc == 0)
    progress_step(&r->progress, step, r->shown, s.seconds,
                  s.seconds > 0 ? (double)(s.generated + s.trained) / s.seconds : 0);
  figures_close(r);
  figures_open(r);
  return comm_agree(r->grid->all, rc, err);
}
