/* See pool.h. */
#include "generation/pool.h"

#include <stdlib.h>

enum { POOL_STEPS = 32 };

/* What a rank has. */
typedef struct Load {
  int32_t rows, waiting;
  int32_t free; /* of those that wait, the last so many have not begun */
  int32_t failed;
} Load;

bool pool_is_due(const Pool *p, const Scheduler *s, int64_t steps) {
  return p->open && (steps >= p->due || s->n_rows + s->n_waiting == 0);
}

static void gather(Comm *c, const void *own, size_t size, void *all) {
  size_t *bytes = mem_alloc((size_t)comm_size(c), sizeof *bytes);
  for (int r = 0; r < comm_size(c); r++) bytes[r] = size;
  comm_all_gather(c, own, all, bytes);
  free(bytes);
}

/* Every rank's requests that have not begun, the last one first: [ranks, most]. */
static int32_t *gather_free(const Pool *p, const Scheduler *s, int32_t most, int32_t own) {
  int32_t *mine = mem_zalloc((size_t)most, sizeof *mine);
  int32_t *all = mem_alloc((size_t)(most * comm_size(p->group)), sizeof *all);
  for (int i = 0; i < own; i++) mine[i] = s->waiting[i];
  gather(p->group, mine, (size_t)most * sizeof *mine, all);
  free(mine);
  return all;
}

static int of(const Load *l) { return l->rows + l->waiting; }

/* One after the other from who has most to who has least, ties to the lowest rank, while that makes
 * them more equal. Every rank finds the same. */
static void deal(Pool *p, Scheduler *s, Load *load, const int32_t *free_of, int32_t most) {
  int ranks = comm_size(p->group), me = comm_rank(p->group);
  int *given = mem_zalloc((size_t)ranks, sizeof *given);
  for (;;) {
    int from = -1, to = 0;
    for (int r = 0; r < ranks; r++) {
      bool can = given[r] < load[r].free;
      if (can && (from < 0 || of(&load[r]) > of(&load[from]))) from = r;
      if (of(&load[r]) < of(&load[to])) to = r;
    }
    if (from < 0 || of(&load[from]) - of(&load[to]) < 2) break;
    int32_t request = free_of[from * most + given[from]++];
    load[from].waiting--;
    load[to].waiting++;
    p->owner[request] = to;
    if (from == me) sched_give(s, request);
    if (to == me) sched_take(s, request);
  }
  free(given);
}

bool pool_deal(Pool *p, Scheduler *s, int64_t steps, bool failed) {
  int ranks = comm_size(p->group);
  Load own = {s->n_rows, s->n_waiting, 0, failed}, *load = mem_alloc((size_t)ranks, sizeof *load);
  while (own.free < s->n_waiting && s->results[s->waiting[own.free]].n == 0) own.free++;
  gather(p->group, &own, sizeof own, load);
  int32_t most = 0, waiting = 0;
  bool any_failed = false;
  for (int r = 0; r < ranks; r++) {
    any_failed |= load[r].failed != 0;
    waiting += load[r].waiting;
    most = load[r].free > most ? load[r].free : most;
  }
  if (!any_failed && most > 0) {
    int32_t *free_of = gather_free(p, s, most, own.free);
    deal(p, s, load, free_of, most);
    free(free_of);
  }
  p->open = waiting > 0;
  p->due = steps + POOL_STEPS;
  free(load);
  return any_failed;
}
