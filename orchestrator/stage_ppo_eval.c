/* Evaluation: the same held-out prompts with the same random numbers each time, so that a figure
 * moves only because the actor did. Some answers are written to RUN/samples/. */
#include <stdlib.h>
#include <string.h>

#include "core/fs.h"
#include "core/rng.h"
#include "orchestrator/ppo.h"

static PromptPick held_out_prompts(Ppo *p) {
  const PromptSet *set = &p->s->data.prompts_held;
  int64_t limit = p->s->recipe->ppo.eval_prompts;
  int n = set->n < limit ? set->n : (int)limit;
  PromptPick pick = {
      .set = set, .n = n, .samples = 1, .ids = mem_alloc((size_t)n, sizeof *pick.ids)};
  for (int i = 0; i < n; i++) pick.ids[i] = i;
  return pick;
}

static int write_sample(Ppo *p, const PromptSet *set, const Rollout *ro, int b, FILE *out,
                        Error *err) {
  size_t len;
  int n = rollout_response_len(ro, b);
  const int32_t *tokens = ro->tokens + rollout_first(ro, b);
  char *text = ppo_answer_text(p, ro, b, &len, err);
  if (!text) return -1;
  const char *prompt = set->text[ro->prompt_id[b]];
  fputs("{\"prompt\":", out);
  json_put_str(out, prompt, strlen(prompt));
  fputs(",\"response\":", out);
  json_put_str(out, text, len);
  fputs(",\"score\":", out);
  json_put_f32(out, ro->scores[b]);
  fprintf(out, ",\"finish\":\"%s\",\"tokens\":", ro->ended[b] ? "eos" : "length");
  json_put_i32_array(out, tokens, (size_t)n);
  fputs("}\n", out);
  free(text);
  return 0;
}

static int write_samples(Ppo *p, const PromptSet *set, const Rollout *ro, int64_t step,
                         Error *err) {
  const Recipe *r = p->s->recipe;
  int n = ro->n_seqs < r->report.samples ? ro->n_seqs : (int)r->report.samples, rc = 0;
  if (n == 0) return 0;
  char *text = NULL;
  size_t len = 0;
  FILE *out = open_memstream(&text, &len);
  if (!out) die("out of memory");
  for (int b = 0; b < n && rc == 0; b++) rc = write_sample(p, set, ro, b, out, err);
  fclose(out);
  char *path = mem_printf("%s/samples/step_%06lld.jsonl", r->run.directory, (long long)step);
  if (rc == 0) rc = fs_write_atomic(path, text, len, err);
  free(path);
  free(text);
  return rc;
}

static void report_evaluation(Ppo *p, const Rollout *ro, const ScoreFigures *scores) {
  Report *report = p->s->report;
  double ended = 0;
  for (int b = 0; b < ro->n_seqs; b++) ended += ro->ended[b];
  report_metric(report, "eval_reward_mean", scores->mean);
  report_metric(report, "eval_reward_std", scores->std);
  for (int t = 0; t < p->n_terms; t++) {
    char name[64];
    snprintf(name, sizeof name, "eval_score_%s", p->term[t].name);
    report_metric(report, name, scores->term_mean[t]);
  }
  report_metric(report, "eval_response_tokens",
                (double)rollout_response_tokens(ro) / (double)ro->n_seqs);
  report_metric(report, "eval_eos_fraction", ended / (double)ro->n_seqs);
  report_show(report, "eval_reward", scores->mean);
}

int ppo_evaluate(void *ctx, int64_t step, Error *err) {
  Ppo *p = ctx;
  Rollout *ro = NULL;
  ScoreFigures scores;
  GenParams gen = p->gen;
  gen.seed = rng_mix((uint64_t)p->s->recipe->run.seed, rng_hash("evaluation"));
  gen.step = 0;
  gen.keep = false;
  PromptPick pick = held_out_prompts(p);
  int rc = ppo_generate(p, &pick, &gen, &ro, err);
  require(rc || !ro->kept); /* nothing is scored by what filters left */
  if (rc == 0) rc = ppo_scores(p, pick.set, ro, &scores, err);
  if (rc == 0) {
    report_evaluation(p, ro, &scores);
    rc = p->s->grid->rank == 0 ? write_samples(p, pick.set, ro, step, err) : 0;
    rc = comm_agree(p->s->grid->all, rc, err);
  }
  rollout_free(ro);
  free(pick.ids);
  return rc;
}
