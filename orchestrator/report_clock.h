/* This rank's clock: always running, always in exactly one phase. What passes between two marks
 * (seconds, model FLOPs of the watched models, communication, the memory peak) belongs to the phase
 * that was on, so phases add up by construction. */
#ifndef ORCHESTRATOR_REPORT_CLOCK_H
#define ORCHESTRATOR_REPORT_CLOCK_H

#include "orchestrator/report.h"

enum { CLOCK_MODELS = 8 };

typedef struct PhaseClock {
  Device *device;
  Arena *arena; /* or NULL */
  Phase phase;
  double mark_seconds, mark_flops;
  Traffic mark_traffic;
  PhaseTotals since[PH_COUNT]; /* since the last flush */
  const Model *models[CLOCK_MODELS];
  int n_models;
} PhaseClock;

void phase_clock_open(PhaseClock *c, Device *d, Arena *a); /* in PH_OTHER */
Phase phase_clock_switch(PhaseClock *c, Phase next);       /* returns the phase that ended */
void phase_clock_watch(PhaseClock *c, const Model *m);
void phase_clock_unwatch(PhaseClock *c, const Model *m);
/* What happens between the two belongs to no phase. */
void phase_clock_stop(PhaseClock *c);
void phase_clock_go_on(PhaseClock *c);
/* Ends an interval and puts the ranks together: seconds and calls are means over ranks, FLOPs and
 * bytes sums, the peak the largest; sequences and tokens were global already. Collective. */
void phase_clock_flush(PhaseClock *c, Grid *g, PhaseTotals out[PH_COUNT]);
void phase_totals_add(PhaseTotals *sum, const PhaseTotals *p);

#endif
