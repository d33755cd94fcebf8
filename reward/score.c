/* Scores of a reward model: its head at the last token of each sequence. */
#include <stdlib.h>

#include "reward/reward.h"

void reward_scores(Model *m, const BatchPlan *plan, Rollout *ro, float *scores) {
  for (int i = 0; i < plan->n_micro; i++) {
    const MicroBatch *mb = &plan->micro[i];
    Pack p = pack_last(ro->offsets, ro->tokens, mb);
    float *score_R = mem_alloc((size_t)p.n_rows, sizeof *score_R);
    model_values(m, p.batch, p.n_rows, p.rows, score_R);
    for (int r = 0; r < p.n_rows; r++) scores[mb->ids[r]] = score_R[r];
    free(score_R);
    pack_free(&p);
  }
}
