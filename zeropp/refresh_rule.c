/* refresh_rule: in which form a unit's refresh travels; zeropp.h says the rule. */
#include <math.h>

#include "zeropp/internal.h"

static RefreshForm of_exact(RefreshRule *r, RefreshCosts c) {
  int64_t dense = c.coded < c.exact ? c.coded : c.exact;
  if (!c.follows) return REFRESH_EXACT;
  if (c.changes < (double)dense) return REFRESH_CHANGES;
  if (c.exact <= c.coded) return REFRESH_EXACT;
  *r = (RefreshRule){.coded = true};
  return REFRESH_CODED;
}

static int64_t more_saved(int64_t saved, RefreshCosts c) {
  if (!c.known) return saved;
  if (!isfinite(c.changes)) return 0; /* changes that could not have been sent */
  saved += c.coded - (int64_t)c.changes;
  return saved > 0 ? saved : 0;
}

RefreshForm refresh_choose(RefreshRule *r, RefreshCosts c) {
  if (!r->coded) return of_exact(r, c);
  r->saved = more_saved(r->saved, c);
  if (r->saved < c.exact - c.coded) return REFRESH_CODED;
  *r = (RefreshRule){0};
  return REFRESH_EXACT;
}
