/* Where a rollout's weights lie: arithmetic, before anything is allocated. Internal to zeropp. */
#ifndef ZEROPP_ROLLOUT_PLAN_H
#define ZEROPP_ROLLOUT_PLAN_H

#include "zeropp/internal.h"

typedef struct RolloutPlace {
  bool coded;
  bool in_place;       /* read where training keeps it */
  int64_t first, rows; /* of the parameter that lie here; elements of a vector */
  size_t at, scales;   /* numbers or codes, and scales, in the unit's buffer */
  size_t open;         /* full numbers in the unit's opened buffer */
} RolloutPlace;

typedef struct RolloutUnit {
  char *buffer, *open; /* open: codes made full, while a gather holds the unit */
  size_t bytes, open_bytes;
} RolloutUnit;

typedef struct Rollout {
  ZeroPPRollout how;
  WireFormat format; /* of codes */
  int begins;
  bool serves;
  RolloutPlace *place; /* [n_params] */
  RolloutUnit *unit;   /* [n_units] */
} Rollout;

/* For the caller to free. */
Rollout *rollout_plan(const ZeroPP *z, ZeroPPRollout how);
void rollout_plan_free(Rollout *r);

bool rollout_has_buffers(ZeroPPRollout r);
/* Codes as training has them, in the messages that gathers bring? */
bool rollout_codes_travel(const ZeroPPConfig *c, WireKind kind);
/* Bytes of a parameter's slice before it in what training keeps. */
size_t rollout_place_in_slice(const ZeroPP *z, int param);

static inline int64_t rollout_width(const ParamSpec *s) { return s->ndim == 2 ? s->dim[1] : 1; }

/* Whole rows of a parameter, as the wire has them. */
static inline WireSpan rollout_span(const ParamSpec *s, int64_t rows) {
  return (WireSpan){rollout_width(s), 0, rows * rollout_width(s)};
}

#endif
