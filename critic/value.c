/* Values of a rollout's states, and the clipped value loss of one token. */
#include <stdlib.h>

#include "critic/critic.h"

void critic_values(Model *m, const BatchPlan *plan, Rollout *ro) {
  for (int i = 0; i < plan->n_micro; i++) {
    /* The rows that predict response tokens are the states before them: values[t] needs no shift.
     */
    Pack p = pack_targets(ro->offsets, ro->tokens, ro->prompt_len, &plan->micro[i]);
    float *value_R = mem_alloc((size_t)p.n_rows, sizeof *value_R);
    model_values(m, p.batch, p.n_rows, p.rows, value_R);
    for (int r = 0; r < p.n_rows; r++) ro->values[p.index[r]] = value_R[r];
    free(value_R);
    pack_free(&p);
  }
}

ValueTerm value_term(float v, float old, float ret, float clip) {
  float plain = v - ret;
  ValueTerm t = {.loss = 0.5f * plain * plain, .dvalue = plain};
  if (clip <= 0) return t;
  float moved = v - old;
  if (!(moved > clip || moved < -clip)) return t; /* NaN keeps its NaN gradient */
  t.clipped = true;
  float limited = (moved > 0 ? old + clip : old - clip) - ret;
  if (limited * limited > plain * plain) {
    t.loss = 0.5f * limited * limited;
    t.dvalue = 0; /* constant in v */
  }
  return t;
}
