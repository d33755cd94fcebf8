/* Units are gathered ahead of their use, so that they travel behind the compute of those before
 * them: forward in ascending order, backward in descending order. What is started is always
 * gathered later in the same pass; how many units ahead is the engine's business to know. */
#include "model/internal.h"

/* A tied head's own unit is a norm, which is nothing; what it waits for is the embedding. */
static int unit_to_start(const Model *m, int unit) {
  return unit == unit_of_head(m) && head_is_tied(m) ? 0 : unit;
}

void gather_upwards(Model *m, int unit) {
  int depth = zeropp_prefetch_depth(m->zero), head = unit_of_head(m);
  for (int u = unit; depth > 0 && u <= head && u <= unit + depth; u++)
    zeropp_prefetch(m->zero, unit_to_start(m, u));
  zeropp_gather(m->zero, unit);
}

/* `unit` and as many below it; the embedding only where its backward reads weights. */
static void start_downwards(Model *m, int unit, int n) {
  int lowest = m->params.project_in >= 0 ? 0 : unit_of_block(0);
  for (int u = unit; u >= lowest && u > unit - n; u--) zeropp_prefetch(m->zero, u);
}

void prefetch_last_blocks(Model *m) {
  start_downwards(m, unit_of_head(m) - 1, zeropp_prefetch_depth(m->zero));
}

void gather_downwards(Model *m, int unit) {
  int depth = zeropp_prefetch_depth(m->zero);
  if (depth > 0) start_downwards(m, unit, depth + 1);
  zeropp_gather(m->zero, unit);
}
