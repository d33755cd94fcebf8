/* rlhf bench ppo: iterations of PPO with four models of one shape and random weights, through the
 * same calls as the loop (ppo_loop.c), phase by phase. Answers have no EOS, so that all are as long
 * as asked. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/cli_bench.h"

typedef enum Part {
  PART_ROLLOUT,
  PART_LOGPROBS,
  PART_REFERENCE,
  PART_VALUES,
  PART_REWARDS,
  PART_ADVANTAGES,
  PART_ACTOR,
  PART_CRITIC,
  PARTS
} Part;
static const char *const part_names[PARTS] = {"rollout",      "actor log-probs", "reference",
                                              "values",       "rewards",         "advantages",
                                              "actor update", "critic update"};

typedef struct PpoBench {
  const char *name;
  ModelConfig config;
  BenchRig rig;
  Arena *arena;
  Model *actor, *reference, *critic, *reward;
  int prompts, length, answer, micro_tokens, steps;
  RecomputeChoice recompute;
  int32_t *prompt_tokens; /* [prompts * length] */
  GenStats stats;         /* of the last rollout */
} PpoBench;

typedef struct PartTimes {
  double *seconds[PARTS], flops[PARTS];
  size_t peak[PARTS];
} PartTimes;

/* ---- models ---- */

static Model *make(const PpoBench *b, HeadKind head, bool trainable, uint64_t seed) {
  bool half = b->rig.compute == DT_BF16;
  ModelOptions o = {.head = head,
                    .trainable = trainable,
                    .recompute = b->recompute.how,
                    .init_head = true,
                    .seed = seed,
                    .zero = {.stage = 3,
                             .wire = half ? WIRE_BF16 : WIRE_F32,
                             .prefetch = 1,
                             .compute = b->rig.compute}};
  return bench_model_create(b->rig.device, b->rig.grid, b->arena, &b->config, &o);
}

static void open_models(PpoBench *b) {
  b->actor = make(b, HEAD_LM, true, 1);
  b->reference = make(b, HEAD_LM, false, 1);
  b->critic = make(b, HEAD_SCALAR, true, 2);
  b->reward = make(b, HEAD_SCALAR, false, 2);
}

static void close_models(PpoBench *b) {
  model_free(b->actor);
  model_free(b->reference);
  model_free(b->critic);
  model_free(b->reward);
}

/* ---- one iteration ---- */

static Rollout *roll_out(PpoBench *b, uint64_t step, Error *err) {
  const Grid *g = b->rig.grid;
  GenParams p = {.sample = {.temperature = 1, .top_p = 1},
                 .max_new_tokens = b->answer,
                 .seed = 5,
                 .step = step};
  GenRequest *all = mem_alloc((size_t)b->prompts, sizeof *all);
  for (int i = 0; i < b->prompts; i++)
    all[i] = (GenRequest){b->prompt_tokens + (int64_t)i * b->length, b->length, i, 0};
  Rollout *ro = NULL;
  RolloutShare share;
  if (rollout_generate(b->actor, &p, all, b->prompts, &share, err) == 0) {
    ro = rollout_share(g->all, all, b->prompts, share.owner, share.result);
    b->stats = share.stats;
    rollout_share_free(&share);
  }
  free(all);
  return ro;
}

static void logprobs(const PpoBench *b, Model *m, const BatchPlan *plan, Rollout *ro,
                     RolloutField field) {
  actor_logprobs(m, plan, ro, field, 1);
  rollout_share_field(b->rig.grid->all, ro, field, b->micro_tokens);
}

static void run_part(PpoBench *b, Part part, const BatchPlan *plan, Rollout *ro) {
  const PolicyLoss loss = {.clip_low = 0.2F, .clip_high = 0.2F, .kl_kind = KL_K1, .temperature = 1};
  AdamW opt = bench_adamw(1e-6);
  PolicyStats policy;
  ValueStats value;
  ShapeStats shaped;
  ShapeConfig shape = {.kl_coef = 0.05, .kl_in_reward = true, .kl_kind = KL_K1, .reward_clip = 5};
  switch (part) {
    case PART_LOGPROBS:
      logprobs(b, b->actor, plan, ro, RO_OLD_LOGPROBS);
      return;
    case PART_REFERENCE:
      logprobs(b, b->reference, plan, ro, RO_REF_LOGPROBS);
      return;
    case PART_VALUES:
      critic_values(b->critic, plan, ro);
      rollout_share_field(b->rig.grid->all, ro, RO_VALUES, b->micro_tokens);
      return;
    case PART_REWARDS:
      reward_scores(b->reward, plan, ro, ro->scores);
      rollout_share_scores(b->rig.grid->all, ro, ro->scores, b->micro_tokens);
      ro->have |= RO_SCORES;
      return;
    case PART_ADVANTAGES:
      shape_rewards(ro, &shape, &shaped);
      gae(ro, 1, 0.95F);
      whiten_advantages(ro);
      return;
    case PART_ACTOR:
      actor_update(b->actor, ro, NULL, ro->n_seqs, &loss, false, b->micro_tokens, opt, 1, &policy);
      return;
    default:
      critic_update(b->critic, ro, NULL, ro->n_seqs, 0.2F, 0.5F, false, b->micro_tokens, opt, 1,
                    &value);
  }
}

static double flops_now(const PpoBench *b) {
  return model_flops_done(b->actor) + model_flops_done(b->reference) + model_flops_done(b->critic) +
         model_flops_done(b->reward);
}

/* Ends a part: its seconds with all that was queued, its FLOPs, its peak. */
static void part_end(const PpoBench *b, PartTimes *t, Part part, int step, double *start,
                     double *flops) {
  device_sync(b->rig.device);
  double now = clock_seconds(), done = flops_now(b);
  if (step >= 0) t->seconds[part][step] = now - *start;
  t->flops[part] = done - *flops;
  t->peak[part] = device_peak_bytes(b->rig.device);
  device_reset_peak(b->rig.device);
  *start = now;
  *flops = done;
}

static int iterate(PpoBench *b, int step, PartTimes *t, Error *err) {
  const Grid *g = b->rig.grid;
  device_sync(b->rig.device);
  device_reset_peak(b->rig.device);
  double start = clock_seconds(), flops = flops_now(b);
  Rollout *ro = roll_out(b, (uint64_t)step + 1, err);
  if (!ro) return -1;
  part_end(b, t, PART_ROLLOUT, step, &start, &flops);
  int32_t *lengths = mem_alloc((size_t)ro->n_seqs, sizeof *lengths);
  for (int i = 0; i < ro->n_seqs; i++) lengths[i] = rollout_len(ro, i);
  BatchPlan plan = plan_batches(lengths, NULL, ro->n_seqs, g->rank, g->world, b->micro_tokens);
  for (Part part = PART_LOGPROBS; part < PARTS; part++) {
    run_part(b, part, &plan, ro);
    part_end(b, t, part, step, &start, &flops);
  }
  plan_free(&plan);
  free(lengths);
  rollout_free(ro);
  return 0;
}

/* ---- the table ---- */

static double best_of(const double *x, int n) {
  double best = x[0];
  for (int i = 1; i < n; i++)
    if (x[i] < best) best = x[i];
  return best;
}

static void print_table(const PpoBench *b, const PartTimes *t) {
  const double gib = 1024.0 * 1024 * 1024;
  double all = 0, scoring = 0, update = 0, whole = (double)b->prompts * (b->length + b->answer);
  printf("\n%-16s %9s %10s %9s %9s\n", "phase", "ms", "tok/s", "TFLOP/s", "GiB");
  for (Part i = 0; i < PARTS; i++) {
    double s = best_of(t->seconds[i], b->steps);
    double tokens = i == PART_ROLLOUT ? (double)b->prompts * b->answer : whole;
    printf("%-16s %9.2f %10.0f %9.1f %9.2f\n", part_names[i], s * 1e3, tokens / s,
           t->flops[i] / s / 1e12, (double)t->peak[i] / gib);
    all += s;
    if (i >= PART_LOGPROBS && i <= PART_REWARDS) scoring += s;
    if (i >= PART_ACTOR) update += s;
  }
  printf("rollout: prefill %.2f ms, decode %.2f ms for %lld steps\n",
         b->stats.prefill_seconds * 1e3, b->stats.decode_seconds * 1e3,
         (long long)b->stats.decode_steps);
  printf("iteration %.3f s: rollout %.3f, scoring %.3f, update %.3f\n", all,
         best_of(t->seconds[PART_ROLLOUT], b->steps), scoring, update);
}

/* ---- the command ---- */

static int read_args(PpoBench *b, const Args *a, Error *err) {
  b->prompts = (int)args_int(a, "--prompts");
  b->length = (int)args_int(a, "--prompt-length");
  b->answer = (int)args_int(a, "--answer-length");
  b->micro_tokens = (int)args_int(a, "--micro-tokens");
  b->steps = (int)args_int(a, "--steps");
  b->recompute = recompute_parse(args_word(a, "--recompute"));
  if (bench_model(args_text(a, "--model"), &b->name, &b->config, err)) return -1;
  if (b->length + b->answer <= b->config.max_positions) return 0;
  return error_set(err,
                   "--prompt-length and --answer-length are %d together; %s takes %d positions",
                   b->length + b->answer, b->name, b->config.max_positions);
}

/* The arena in one piece, for the update, which needs most of it. */
static void reserve(const PpoBench *b) {
  int64_t whole = (int64_t)b->prompts * (b->length + b->answer);
  PassPlan p = {device_kind(b->rig.device), b->rig.compute, true, b->recompute.how, 0, false};
  ArenaMark mark = arena_mark(b->arena);
  arena_push(b->arena,
             model_activation_bytes(&b->config, HEAD_LM,
                                    whole < b->micro_tokens ? whole : b->micro_tokens, p));
  arena_pop(b->arena, mark);
}

static int measure(PpoBench *b, Error *err) {
  int64_t n = (int64_t)b->prompts * b->length;
  PartTimes t = {0};
  for (int i = 0; i < PARTS; i++) t.seconds[i] = mem_zalloc((size_t)b->steps, sizeof(double));
  Tokens drawn = tokens_draw(&b->config, b->prompts, (int)n, 77);
  b->prompt_tokens = drawn.tokens;
  b->arena = arena_create(b->rig.device, bench_take, bench_give);
  reserve(b);
  open_models(b);
  int rc = 0;
  for (int s = -1; s < b->steps && rc == 0; s++) rc = iterate(b, s, &t, err);
  if (rc == 0 && b->rig.grid->rank == 0) print_table(b, &t);
  close_models(b);
  arena_free(b->arena);
  tokens_free(&drawn);
  for (int i = 0; i < PARTS; i++) free(t.seconds[i]);
  return rc;
}

CliResult bench_ppo(const Args *a, Error *err) {
  PpoBench b = {0};
  CliResult rc = bench_rig_open(&b.rig, a, err);
  if (rc == CLI_OK && comm_agree(b.rig.grid->all, read_args(&b, a, err), err)) rc = CLI_FAILED;
  if (rc == CLI_OK && b.rig.grid->rank == 0)
    printf("%s, four models of %.2f million parameters; %d prompts, %d + %d tokens; %s, %s\n",
           b.name, (double)model_config_params(&b.config, HEAD_LM) / 1e6, b.prompts, b.length,
           b.answer, device_describe(b.rig.device), dtype_name(b.rig.compute));
  if (rc == CLI_OK) {
    comm_queue_start();
    if (measure(&b, err)) rc = CLI_FAILED;
    comm_queue_stop();
  }
  bench_rig_close(&b.rig);
  return rc;
}
