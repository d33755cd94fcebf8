/* The examples of one step, drawn from the endless shuffled walk over a data set. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/train_examples.h"

Examples examples_draw(uint64_t seed, const char *what, int64_t position, int n, int set_n,
                       const int32_t *offsets, const int32_t *tokens, int width) {
  Examples e = {.n = n, .ids = mem_alloc((size_t)n, sizeof *e.ids)};
  e.offsets = mem_zalloc((size_t)n * (size_t)width + 1, sizeof *e.offsets);
  for (int i = 0; i < n; i++) {
    e.ids[i] = data_order(seed, what, position + i, set_n);
    for (int k = 0; k < width; k++) {
      int from = e.ids[i] * width + k, to = i * width + k;
      e.offsets[to + 1] = e.offsets[to] + offsets[from + 1] - offsets[from];
    }
  }
  e.tokens = mem_alloc((size_t)e.offsets[n * width], sizeof *e.tokens);
  for (int i = 0; i < n; i++) {
    int from = e.ids[i] * width, to = i * width;
    memcpy(e.tokens + e.offsets[to], tokens + offsets[from],
           (size_t)(offsets[from + width] - offsets[from]) * sizeof *tokens);
  }
  return e;
}

void examples_free(Examples *e) {
  free(e->ids);
  free(e->offsets);
  free(e->tokens);
}
