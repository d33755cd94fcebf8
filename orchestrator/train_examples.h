/* The examples of one step, copied out of a data set. */
#ifndef ORCHESTRATOR_TRAIN_EXAMPLES_H
#define ORCHESTRATOR_TRAIN_EXAMPLES_H

#include "orchestrator/orchestrator.h"

typedef struct Examples {
  int n;
  int32_t *ids;              /* [n] which of the set's examples */
  int32_t *offsets, *tokens; /* [n * width + 1], packed anew from 0 */
} Examples;

/* Items position .. position + n of the walk `what` over set_n examples of `width` sequences each
 * (pairs: 2). */
Examples examples_draw(uint64_t seed, const char *what, int64_t position, int n, int set_n,
                       const int32_t *offsets, const int32_t *tokens, int width);
void examples_free(Examples *e);

#endif
