/* Requests that the ranks of a node share: who has least to do takes those that have not begun from
 * who has most.
 *
 * It is done after every so many decode steps of each rank, or when it has nothing left, and by
 * numbers of sequences: by the clock, who generates what would change from run to run, and with the
 * company of a sequence the last bits of its log-probabilities. When nothing waits on any rank it
 * is over. */
#ifndef GENERATION_POOL_H
#define GENERATION_POOL_H

#include "generation/scheduler.h"

typedef struct Pool {
  Comm *group;    /* NULL: nothing is shared */
  int32_t *owner; /* [requests] local ranks; the same on all of them */
  bool open;
  int64_t due; /* the decode step before which requests are dealt again */
} Pool;

/* steps: taken so far. */
bool pool_is_due(const Pool *p, const Scheduler *s, int64_t steps);
/* failed: this rank has. Returns whether any has: then all stop. Collective. */
bool pool_deal(Pool *p, Scheduler *s, int64_t steps, bool failed);

#endif
