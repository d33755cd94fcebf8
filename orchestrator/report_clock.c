/* See report_clock.h. */
#include "orchestrator/report_clock.h"

#include <string.h>

static double flops_done(const PhaseClock *c) {
  double sum = 0;
  for (int i = 0; i < c->n_models; i++) sum += model_flops_done(c->models[i]);
  return sum;
}

static void add_traffic(Traffic *sum, const Traffic *now, const Traffic *before) {
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    sum->of[k].calls += now->of[k].calls - before->of[k].calls;
    sum->of[k].intra_bytes += now->of[k].intra_bytes - before->of[k].intra_bytes;
    sum->of[k].inter_bytes += now->of[k].inter_bytes - before->of[k].inter_bytes;
    sum->of[k].seconds += now->of[k].seconds - before->of[k].seconds;
    sum->of[k].hidden_seconds += now->of[k].hidden_seconds - before->of[k].hidden_seconds;
  }
}

/* Most bytes in use since the last call; the arena's reserve does not count, what is used of it
 * does. */
static size_t take_peak(PhaseClock *c) {
  size_t peak = device_peak_bytes(c->device);
  device_reset_peak(c->device);
  if (!c->arena) return peak;
  size_t reserve = arena_capacity(c->arena);
  peak = (peak > reserve ? peak - reserve : 0) + arena_peak(c->arena);
  arena_reset_peak(c->arena);
  return peak;
}

/* Gives what has passed to the current phase. */
static void mark(PhaseClock *c) {
  PhaseTotals *p = &c->since[c->phase];
  device_sync(c->device); /* what was queued belongs to the phase that ends */
  double seconds = clock_seconds(), flops = flops_done(c);
  Traffic traffic = traffic_now();
  p->seconds += seconds - c->mark_seconds;
  p->flops += flops - c->mark_flops;
  add_traffic(&p->traffic, &traffic, &c->mark_traffic);
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    p->comm_seconds += traffic.of[k].seconds - c->mark_traffic.of[k].seconds;
    p->hidden_seconds += traffic.of[k].hidden_seconds - c->mark_traffic.of[k].hidden_seconds;
  }
  size_t peak = take_peak(c);
  if (peak > p->peak_bytes) p->peak_bytes = peak;
  c->mark_seconds = seconds;
  c->mark_flops = flops;
  c->mark_traffic = traffic;
}

void phase_clock_open(PhaseClock *c, Device *d, Arena *a) {
  *c = (PhaseClock){.device = d, .arena = a, .phase = PH_OTHER};
  c->since[PH_OTHER].calls = 1;
  phase_clock_go_on(c);
}

void phase_clock_stop(PhaseClock *c) { mark(c); }

void phase_clock_go_on(PhaseClock *c) {
  device_sync(c->device);
  take_peak(c);
  c->mark_seconds = clock_seconds();
  c->mark_flops = flops_done(c);
  c->mark_traffic = traffic_now();
}

Phase phase_clock_switch(PhaseClock *c, Phase next) {
  Phase ended = c->phase;
  mark(c);
  c->phase = next;
  c->since[next].calls++;
  return ended;
}

void phase_clock_watch(PhaseClock *c, const Model *m) {
  require(c->n_models < CLOCK_MODELS);
  mark(c);
  c->models[c->n_models++] = m;
  c->mark_flops = flops_done(c);
}

void phase_clock_unwatch(PhaseClock *c, const Model *m) {
  mark(c);
  int kept = 0;
  for (int i = 0; i < c->n_models; i++)
    if (c->models[i] != m) c->models[kept++] = c->models[i];
  c->n_models = kept;
  c->mark_flops = flops_done(c);
}

/* ---- putting the ranks together ---- */

enum { PER_COLL = 5, PER_PHASE = 4 + PER_COLL * COLL_KINDS };

static void pack_phase(const PhaseTotals *p, double *x) {
  *x++ = p->seconds;
  *x++ = p->flops;
  *x++ = p->comm_seconds;
  *x++ = p->hidden_seconds;
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    const TrafficCount *n = &p->traffic.of[k];
    *x++ = (double)n->calls;
    *x++ = (double)n->intra_bytes;
    *x++ = (double)n->inter_bytes;
    *x++ = n->seconds;
    *x++ = n->hidden_seconds;
  }
}

static void unpack_phase(const double *x, int world, PhaseTotals *p) {
  p->seconds = *x++ / world;
  p->flops = *x++;
  p->comm_seconds = *x++ / world;
  p->hidden_seconds = *x++ / world;
  for (CollKind k = 0; k < COLL_KINDS; k++) {
    TrafficCount *n = &p->traffic.of[k];
    n->calls = (uint64_t)(*x++ / world + 0.5);
    n->intra_bytes = (uint64_t)*x++;
    n->inter_bytes = (uint64_t)*x++;
    n->seconds = *x++ / world;
    n->hidden_seconds = *x++ / world;
  }
}

void phase_totals_add(PhaseTotals *sum, const PhaseTotals *p) {
  static const Traffic zero;
  sum->seconds += p->seconds;
  sum->flops += p->flops;
  sum->comm_seconds += p->comm_seconds;
  sum->hidden_seconds += p->hidden_seconds;
  sum->sequences += p->sequences;
  sum->prompt_tokens += p->prompt_tokens;
  sum->generated_tokens += p->generated_tokens;
  sum->calls += p->calls;
  add_traffic(&sum->traffic, &p->traffic, &zero);
  if (p->peak_bytes > sum->peak_bytes) sum->peak_bytes = p->peak_bytes;
}

void phase_clock_flush(PhaseClock *c, Grid *g, PhaseTotals out[PH_COUNT]) {
  mark(c);
  double sum[PH_COUNT * PER_PHASE], peak[PH_COUNT];
  for (Phase i = 0; i < PH_COUNT; i++) {
    pack_phase(&c->since[i], sum + i * PER_PHASE);
    peak[i] = (double)c->since[i].peak_bytes;
  }
  comm_all_reduce_f64(g->all, sum, PH_COUNT * PER_PHASE, false);
  comm_all_reduce_f64(g->all, peak, PH_COUNT, true);
  for (Phase i = 0; i < PH_COUNT; i++) {
    out[i] = c->since[i];
    unpack_phase(sum + i * PER_PHASE, g->world, &out[i]);
    out[i].peak_bytes = (size_t)peak[i];
  }
  memset(c->since, 0, sizeof c->since);
}
