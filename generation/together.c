/* Steps that the ranks of a group take together, because weights are gathered in every step, or
 * because each rank has a part of them. Each has its own requests, rows and cache; what is common
 * is which kind of step comes next and, in tensor parallel, how many rows each brings: where steps
 * are filled up, all as many, so that what they capture is the same. A rank without any takes part
 * all the same, until all have ended. An error of one ends all of them. */
#include <stdlib.h>

#include "generation/decode.h"

enum { AGREED_TO_STOP = 1 };

/* What a rank has for the next step. */
typedef struct Offer {
  int32_t tokens, heads; /* of its prefill */
  int32_t rows, steps;   /* of its decode steps; steps 0: all its requests are over */
  int32_t bans;          /* decoder_bans */
  int32_t failed;
} Offer;

/* All ranks' offers, [ranks of the group]; to be freed. */
static Offer *exchange(Comm *c, Offer own) {
  size_t ranks = (size_t)comm_size(c);
  Offer *all = mem_alloc(ranks, sizeof *all);
  size_t *bytes = mem_alloc(ranks, sizeof *bytes);
  for (size_t r = 0; r < ranks; r++) bytes[r] = sizeof *all;
  comm_all_gather(c, &own, all, bytes);
  free(bytes);
  return all;
}

/* Tells the model what each rank brings, where it wants to know. */
static void announce(const Stepping *t, const Offer *of, bool prefill) {
  if (!zeropp_in_rollout(model_zero(t->model), ROLLOUT_TENSOR_PARALLEL)) return;
  int ranks = comm_size(t->group);
  int *rows = mem_alloc(2 * (size_t)ranks, sizeof *rows), *heads = rows + ranks;
  for (int r = 0; r < ranks; r++) {
    rows[r] = prefill ? of[r].tokens : of[r].rows;
    heads[r] = of[r].heads;
  }
  model_step_rows(t->model, rows, prefill ? heads : NULL);
  free(rows);
}

/* One rank's requests enter, or several's; *entered: any. */
static int prefill_once(const Stepping *t, int *rc, bool *entered, Error *err) {
  Scheduler *s = t->sched;
  int fresh = 0;
  bool enter = *rc == 0 && is_time_to_enter(s, t->entering);
  if (enter) fresh = sched_admit(s, t->prefill_tokens);
  int first = s->n_rows - fresh;
  Offer own = {
      .tokens = decoder_prefill_tokens(t->decoder, first), .heads = fresh, .failed = *rc != 0};
  Offer *of = exchange(t->group, own);
  bool failed = false;
  *entered = false;
  for (int r = 0; r < comm_size(t->group); r++) {
    failed |= of[r].failed != 0;
    *entered |= of[r].tokens > 0;
  }
  if (!failed && *entered) {
    announce(t, of, true);
    *rc = decoder_prefill(t->decoder, first, err);
  }
  free(of);
  return failed ? AGREED_TO_STOP : 0;
}

/* What this rank does in steps that all agreed on; of: changed where all have as many rows. */
static StepPlan plan_steps(const Stepping *t, Offer *of, int steps) {
  StepPlan plan = {.steps = steps};
  int ranks = comm_size(t->group);
  int32_t most = 0;
  for (int r = 0; r < ranks; r++) {
    plan.mixed |= of[r].bans != 0;
    if (of[r].rows > most) most = of[r].rows;
  }
  bool sliced = zeropp_in_rollout(model_zero(t->model), ROLLOUT_TENSOR_PARALLEL);
  if (!sliced || plan.mixed || !t->fills) return plan;
  for (int r = 0; r < ranks; r++) of[r].rows = most;
  plan.rows = most;
  return plan;
}

static int decode_once(const Stepping *t, int *rc, bool *over, Error *err) {
  Scheduler *s = t->sched;
  Offer own = {.failed = *rc != 0};
  if (*rc == 0 && s->n_rows > 0) own.steps = decoder_plan(t->decoder);
  if (*rc == 0) own.rows = decoder_step_rows(t->decoder);
  if (*rc == 0) own.bans = decoder_bans(t->decoder);
  bool running = s->n_rows > 0;
  if (!running) own.steps = 0;
  Offer *of = exchange(t->group, own);
  bool failed = false;
  int steps = 0;
  for (int r = 0; r < comm_size(t->group); r++) {
    failed |= of[r].failed != 0;
    if (of[r].steps > 0 && (steps == 0 || of[r].steps < steps)) steps = of[r].steps;
  }
  *over = steps == 0;
  if (!failed && steps > 0) {
    StepPlan plan = plan_steps(t, of, steps);
    announce(t, of, false);
    *rc = decoder_decode(t->decoder, plan, err);
  }
  free(of);
  return failed ? AGREED_TO_STOP : 0;
}

int step_together(const Stepping *t, GenStats *stats, Error *err) {
  int rc = 0;
  for (bool over = false; !over;) {
    double t0 = clock_seconds();
    for (bool entered = true; entered;)
      if (prefill_once(t, &rc, &entered, err)) return rc ? rc : AGREED_TO_STOP;
    double t1 = clock_seconds();
    if (decode_once(t, &rc, &over, err)) return rc ? rc : AGREED_TO_STOP;
    stats->prefill_seconds += t1 - t0;
    stats->decode_seconds += clock_seconds() - t1;
  }
  return rc;
}
