/* The memory plan of the recipe's stages against the memory of this rank. */
#include <string.h>
#include <unistd.h>

#include "orchestrator/check.h"
#include "orchestrator/memory_plan.h"

/* Sequences decoded together by default (generation decides the same way). */
enum { DEFAULT_ROWS = 256 };

static PlannedStage plan_common(const Session *s, StageKind kind, int64_t batch_sequences) {
  const Recipe *r = s->recipe;
  return (PlannedStage){.name = stage_name(kind),
                        .nodes = s->grid->nodes,
                        .local = s->grid->local,
                        .zero = session_zeropp(s),
                        .device = device_kind(s->device),
                        .recompute = recompute_parse(r->zeropp.recompute),
                        .micro_tokens = r->batch.micro_tokens,
                        .longest = s->longest[kind],
                        .batch_tokens = batch_sequences * s->longest[kind]};
}

static void add_role(const Session *s, PlannedStage *p, Role role, bool trainable, bool ema) {
  p->model[p->n_models++] = (PlannedModel){&s->config[role], role_head(role), trainable, ema};
}

static PlannedStage plan_ppo(const Session *s) {
  const Recipe *r = s->recipe;
  int64_t sequences = r->rollout.prompts_per_step * r->rollout.samples_per_prompt;
  int64_t per_rank = (sequences + s->grid->world - 1) / s->grid->world;
  int64_t rows = r->rollout.max_batch > 0 ? r->rollout.max_batch : DEFAULT_ROWS;
  PlannedStage p = plan_common(s, STAGE_PPO, sequences);
  add_role(s, &p, ROLE_ACTOR, true, r->ppo.ema_decay > 0);
  add_role(s, &p, ROLE_CRITIC, true, false);
  if (ppo_needs(r, ROLE_REFERENCE)) add_role(s, &p, ROLE_REFERENCE, false, false);
  if (ppo_needs(r, ROLE_REWARD)) add_role(s, &p, ROLE_REWARD, false, false);
  p.rollout_rows = rows < per_rank ? rows : per_rank;
  p.page_size = r->rollout.page_size;
  p.kept = recipe_renormalizes(r);
  p.penalty = r->rollout.repetition_penalty < 1 || r->rollout.repetition_penalty > 1;
  return p;
}

/* What rollout.format comes to. */
static WireKind chosen_format(const Session *s) {
  const char *format = s->recipe->rollout.format;
  ZeroPPConfig zero = session_zeropp(s);
  WireKind given, trained = zeropp_rollout_format(&zero);
  int coded, matrices;
  if (!rollout_format_parse(format, &given)) return given;
  bool takes = !model_rollout_plan(s->device, &s->config[ROLE_ACTOR], &zero, ROLLOUT_REPLICA,
                                   trained, &coded, &matrices, &(Error){""});
  return takes ? trained : WIRE_F32; /* auto */
}

static int plan_rollout(Session *s, PlannedStage *p, uint64_t limit, Error *err) {
  Error found = {""};
  ZeroPPConfig zero = session_zeropp(s);
  p->format = chosen_format(s);
  if (rollout_weights_parse(s->recipe->rollout.weights, &p->weights)) {
    double choice = memory_choose_weights(p, limit); /* of the rank that has least memory */
    comm_all_reduce_f64(s->grid->all, &choice, 1, true);
    p->weights = (RolloutWeights)choice;
    if (p->weights != ROLLOUT_REPLICA)
      log_info("rollout.weights auto: %s, as memory has no room for a replica",
               rollout_weights_name(p->weights));
  }
  s->rollout_weights = p->weights;
  s->rollout_format = p->format;
  int coded, matrices;
  if (model_rollout_plan(s->device, &s->config[ROLE_ACTOR], &zero, p->weights, p->format, &coded,
                         &matrices, &found))
    return check_note(err, "%s: rollout.format: %s", recipe_place(s->recipe, "rollout.format"),
                      found.msg);
  if (p->format != WIRE_F32 && coded < matrices)
    log_info("rollout.format: %d of %d matrices in codes; rows of the others fit no kernel", coded,
             matrices);
  return 0;
}

static PlannedStage plan_stage(const Session *s, StageKind kind) {
  PlannedStage p;
  switch (kind) {
    case STAGE_SFT:
      p = plan_common(s, kind, s->recipe->batch.sft);
      add_role(s, &p, ROLE_ACTOR, true, false);
      return p;
    case STAGE_REWARD:
      p = plan_common(s, kind, 2 * s->recipe->batch.reward);
      add_role(s, &p, ROLE_REWARD, true, false);
      return p;
    default:
      return plan_ppo(s);
  }
}

static int refuse(const PlannedStage *p, uint64_t limit, Error *err) {
  const double mib = 1024.0 * 1024.0;
  double need = (double)memory_need(p).total / mib, have = (double)limit / mib;
  int64_t micro = memory_fit_micro(p, limit);
  if (micro > 0)
    return check_note(err,
                      "stage %s needs %.0f MiB per rank and %.0f are there: the largest "
                      "batch.micro_tokens that fits is %lld, not %lld",
                      p->name, need, have, (long long)micro, (long long)p->micro_tokens);
  int64_t rows = p->rollout_rows > 0 ? memory_fit_rows(p, limit) : 0;
  if (rows > 0)
    return check_note(err,
                      "stage %s needs %.0f MiB per rank and %.0f are there: the largest "
                      "rollout.max_batch that fits is %lld",
                      p->name, need, have, (long long)rows);
  return check_note(err,
                    "stage %s needs %.0f MiB per rank and %.0f are there: no micro-batch fits; "
                    "more ranks hold less each",
                    p->name, need, have);
}

/* Places in a batch are 32-bit numbers. */
static int check_batch(const Session *s, StageKind kind, const PlannedStage *p, Error *err) {
  static const char *const keys[] = {[STAGE_SFT] = "batch.sft",
                                     [STAGE_REWARD] = "batch.reward",
                                     [STAGE_PPO] = "rollout.prompts_per_step"};
  if (p->batch_tokens <= INT32_MAX) return 0;
  return check_note(err,
                    "%s: %s: sequences of %lld tokens are %lld tokens a step; expected at most %d",
                    recipe_place(s->recipe, keys[kind]), keys[kind], (long long)p->longest,
                    (long long)p->batch_tokens, INT32_MAX);
}

/* A row of bits for each token of a rollout, on the host of every rank, and once more while ranks
 * exchange them. */
static int check_kept(const Session *s, const PlannedStage *p, Error *err) {
  const double mib = 1024.0 * 1024.0;
  double width = (s->config[ROLE_ACTOR].vocab_size + 7) / 8,
         need = 2 * (double)p->batch_tokens * width;
  double host = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
  double have = host / s->grid->local;
  if (!p->kept || need <= have) return 0;
  return check_note(err,
                    "%s: rollout.filters: renormalize takes %.0f MiB of the host per rank and %.0f "
                    "are there; expected fewer prompts a step, or another choice",
                    recipe_place(s->recipe, "rollout.filters"), need / mib, have / mib);
}

static void choose_recompute(Session *s, StageKind kind, PlannedStage *p, uint64_t limit) {
  memory_choose_recompute(p, limit);
  s->recompute[kind] = p->recompute;
  if (!p->recompute.by_memory || p->recompute.how == RECOMPUTE_NONE) return;
  if (p->recompute.how == RECOMPUTE_FULL)
    log_info("stage %s: zeropp.recompute auto: full", p->name);
  else
    log_info("stage %s: zeropp.recompute auto: selective, %d blocks whole", p->name,
             p->recompute.blocks);
}

int check_run_memory(Session *s, Error *err) {
  const Recipe *r = s->recipe;
  PlannedStage plan[STAGE_PPO + 1];
  uint64_t limit = memory_limit(s->device);
  int n = 0;
  for (int i = 0; i < r->n_stages; i++) {
    PlannedStage *p = &plan[i];
    *p = plan_stage(s, r->stages[i]);
    n += check_batch(s, r->stages[i], p, err);
    if (p->rollout_rows == 0) continue;
    n += plan_rollout(s, p, limit, err);
    n += check_kept(s, p, err);
    int64_t rows = memory_fit_rows(p, limit);
    if (r->rollout.max_batch == 0 && rows > 0) p->rollout_rows = rows; /* as memory allows */
    s->kv_tokens = memory_kv_tokens(p);
  }
  for (int i = 0; i < r->n_stages; i++) choose_recompute(s, r->stages[i], &plan[i], limit);
  if (n > 0) return n;
  for (int i = 0; i < r->n_stages; i++) s->arena_bytes[r->stages[i]] = memory_need(&plan[i]).arena;
  if (s->grid->rank == 0) memory_print(plan, r->n_stages, limit, stderr);
  for (int i = 0; i < r->n_stages; i++)
    if (memory_need(&plan[i]).total > limit) n += refuse(&plan[i], limit, err);
  return n;
}
