/* Log-probabilities of the response tokens under the policy or its frozen reference. */
#include <stdlib.h>

#include "actor/actor.h"

void actor_logprobs(Model *m, const BatchPlan *plan, Rollout *ro, RolloutField field,
                    float temperature) {
  require(field == RO_OLD_LOGPROBS || field == RO_REF_LOGPROBS);
  float *out_N = rollout_array(ro, field);
  for (int i = 0; i < plan->n_micro; i++) {
    Pack p = pack_targets(ro->offsets, ro->tokens, ro->prompt_len, &plan->micro[i]);
    float *logprob_R = mem_alloc((size_t)p.n_rows, sizeof *logprob_R);
    uint8_t *kept_RW = pack_kept(&p, ro);
    model_restrict(m, kept_RW);
    model_logprobs(m, p.batch, p.n_rows, p.rows, p.targets, temperature, logprob_R, NULL);
    model_restrict(m, NULL);
    free(kept_RW);
    for (int r = 0; r < p.n_rows; r++) out_N[p.index[r]] = logprob_R[r];
    free(logprob_R);
    pack_free(&p);
  }
}
