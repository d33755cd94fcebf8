/* Prompts to answers: requests are dealt to the ranks, generated, and shared. */
#include <stdlib.h>

#include "orchestrator/ppo.h"

PromptPick ppo_pick_prompts(Ppo *p) {
  Session *s = p->s;
  const Recipe *r = s->recipe;
  int n = (int)r->rollout.prompts_per_step;
  PromptPick pick = {.set = &s->data.prompts,
                     .n = n,
                     .samples = (int)r->rollout.samples_per_prompt,
                     .ids = mem_alloc((size_t)n, sizeof *pick.ids)};
  for (int i = 0; i < n; i++)
    pick.ids[i] =
        data_order((uint64_t)r->run.seed, "prompts", s->state.position + i, s->data.prompts.n);
  s->state.position += n;
  return pick;
}

/* All requests of the step. A prompt that the walk meets twice in one step goes on counting its
 * samples: random numbers are keyed by prompt and sample. */
static GenRequest *make_requests(const PromptPick *pick) {
  const PromptSet *set = pick->set;
  GenRequest *req = mem_alloc((size_t)pick->n * (size_t)pick->samples, sizeof *req);
  int *seen = mem_zalloc((size_t)set->n, sizeof *seen), g = 0;
  for (int i = 0; i < pick->n; i++)
    for (int k = 0; k < pick->samples; k++) {
      int32_t id = pick->ids[i], at = set->offsets[id];
      req[g++] = (GenRequest){.prompt = set->tokens.v + at,
                              .prompt_len = set->offsets[id + 1] - at,
                              .prompt_id = id,
                              .sample_id = seen[id]++};
    }
  free(seen);
  return req;
}

void ppo_count(Ppo *p, const Rollout *ro, const int32_t *ids, int n) {
  int64_t prompt = 0, response = 0;
  for (int i = 0; i < n; i++) {
    int b = ids ? ids[i] : i;
    prompt += ro->prompt_len[b];
    response += rollout_response_len(ro, b);
  }
  report_count(p->s->report, n, prompt, response);
}

int ppo_generate(Ppo *p, const PromptPick *pick, const GenParams *gen, Rollout **out, Error *err) {
  Session *s = p->s;
  Comm *ranks = s->grid->all;
  int n = pick->n * pick->samples;
  GenRequest *all = make_requests(pick);
  RolloutShare share;

  /* What crosses nodes, and the weights that the answers come from: generate finds them there. */
  Phase before = report_phase(s->report, PH_REFRESH);
  model_rollout_begin(p->actor, gen->weights, gen->format);
  report_phase(s->report, before == PH_EVAL ? PH_EVAL : PH_ROLLOUT);
  int rc = rollout_generate(p->actor, gen, all, n, &share, err);
  model_rollout_end(p->actor);
  if (rc == 0) {
    p->rollout_busy = rollout_busy(&share, ranks);
    *out = rollout_share(ranks, all, n, share.owner, share.result);
    if (gen->keep)
      rollout_share_kept(ranks, *out, share.owner, share.result,
                         (model_config(p->actor)->vocab_size + 7) / 8);
    ppo_count(p, *out, NULL, n);
    rollout_share_free(&share);
  }
  free(all);
  return rc;
}
