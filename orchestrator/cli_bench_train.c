/* rlhf bench train: time of a training step.
 *
 * A step's first loss is where clocks are read: the host waits there for the log-probabilities
 * anyway. A step is as long as it is from one first loss to the next; the parts come from a few
 * steps more, in which the host waits for the device at their ends. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/cli_bench_train.h"
#include "orchestrator/memory_plan.h"

/* ---- one step ---- */

enum { FORWARD, BACKWARD, OPTIMIZER, PARTS };
enum { WARM_UP = 2, APART = 3 }; /* steps */

/* This rank's part of the loss. reached: when the first loss came. apart: waits for the device
 * where parts end. */
static double train_step(Model *m, const TrainPlan *p, const Tokens *micro, double *reached,
                         double *apart) {
  double rows = (double)micro[0].n_rows * p->micro_batches * p->rig.grid->world;
  StepLoss l = {.weight = 1 / rows};
  double start = clock_seconds(), forward = 0, begun = start;
  zeropp_zero_grad(model_zero(m));
  for (int k = 0; k < p->micro_batches; k++) {
    if (k == p->micro_batches - 1) zeropp_last_micro(model_zero(m));
    bench_micro_batch(m, &micro[k], &l);
    if (k == 0 && reached) *reached = l.reached;
    forward += l.reached - begun;
    if (apart) device_sync(model_device(m));
    begun = clock_seconds();
  }
  double trained = clock_seconds();
  zeropp_step(model_zero(m), bench_adamw(p->rig.lr), 1.0F);
  if (!apart) return l.sum * l.weight;
  device_sync(model_device(m));
  apart[FORWARD] = forward;
  apart[BACKWARD] = trained - start - forward;
  apart[OPTIMIZER] = clock_seconds() - trained;
  return l.sum * l.weight;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *x, int n) {
  qsort(x, (size_t)n, sizeof *x, by_size);
  return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* Steps one behind the other, as training has them: medians of the time from one's first loss to
 * the next one's. */
static double measure_steps(Model *m, const TrainPlan *p, const Tokens *micro, TrainTimes *out) {
  double *step = mem_alloc((size_t)p->steps, sizeof *step), loss = 0, before, now;
  for (int i = 0; i < WARM_UP; i++) train_step(m, p, micro, &before, NULL);
  comm_barrier(p->rig.grid->all);
  train_step(m, p, micro, &before, NULL);
  Count a = count_now();
  for (int k = 0; k < p->steps; k++, before = now) {
    loss = train_step(m, p, micro, &now, NULL);
    step[k] = now - before;
  }
  Count b = count_now();
  double sum[5] = {b.inter - a.inter, b.intra - a.intra, b.hidden - a.hidden, b.exposed - a.exposed,
                   loss};
  double mean = 1.0 / p->rig.grid->world / p->steps, median_step = median(step, p->steps);
  comm_all_reduce_f64(p->rig.grid->all, sum, 5, false);
  out->inter = sum[0] * mean;
  out->intra = sum[1] * mean;
  out->hidden = sum[2] * mean;
  out->exposed = sum[3] * mean;
  out->loss = sum[4];
  free(step);
  return median_step;
}

static void measure(Model *m, const TrainPlan *p, const Tokens *micro, TrainTimes *out) {
  double part[PARTS][APART], one[PARTS], most[PARTS + 2];
  most[PARTS] = measure_steps(m, p, micro, out);
  device_sync(p->rig.device);
  for (int k = 0; k < APART; k++) {
    train_step(m, p, micro, NULL, one);
    for (int i = 0; i < PARTS; i++) part[i][k] = one[i];
  }
  for (int i = 0; i < PARTS; i++) most[i] = median(part[i], APART);
  most[PARTS + 1] = (double)device_peak_bytes(p->rig.device);
  comm_all_reduce_f64(p->rig.grid->all, most, PARTS + 2, true);
  out->forward = most[FORWARD];
  out->backward = most[BACKWARD];
  out->optimizer = most[OPTIMIZER];
  out->step = most[PARTS];
  out->peak = most[PARTS + 1];
}

/* ---- one mode ---- */

static void fix_mode(const TrainPlan *p, ZeroPPConfig *zero) {
  zero->prefetch = p->given.prefetch;
  zero->compute = p->given.compute;
  zero->gradients = p->given.gradients;
  zero->offload = p->given.offload;
  if (p->micro_batches == 1) zero->accumulate_node = false; /* nothing to sum: hide both hops */
}

static PlannedStage plan_of(const TrainPlan *p, const ZeroPPConfig *zero) {
  int64_t tokens = (int64_t)p->n_seqs * p->length;
  return (PlannedStage){.name = "train",
                        .model = {{&p->config, HEAD_LM, true, false}},
                        .n_models = 1,
                        .nodes = p->rig.grid->nodes,
                        .local = p->rig.grid->local,
                        .zero = *zero,
                        .recompute = p->recompute,
                        .device = device_kind(p->rig.device),
                        .micro_tokens = tokens,
                        .longest = p->length,
                        .batch_tokens = tokens};
}

static int check_memory(const PlannedStage *s, uint64_t limit, Error *err) {
  const double gib = 1024.0 * 1024 * 1024;
  MemoryNeed need = memory_need(s);
  if (need.total <= limit) return 0;
  int64_t fits = memory_fit_micro(s, limit);
  char advice[96] = "no micro-batch fits";
  if (fits > 0)
    snprintf(advice, sizeof advice, "the largest micro-batch that fits has %lld tokens",
             (long long)fits);
  return error_set(err, "%lld tokens need %.1f GiB a rank and %.1f are there: %s",
                   (long long)s->micro_tokens, (double)need.total / gib, (double)limit / gib,
                   advice);
}

static int run_mode(const TrainPlan *p, const BenchMode *mode, TrainTimes *out, Error *err) {
  Device *d = p->rig.device;
  ModelOptions o = {.head = HEAD_LM, .trainable = true, .seed = 1, .zero = mode->zero};
  fix_mode(p, &o.zero);
  if (zeropp_check(&o.zero, device_kind(d), p->rig.grid->world, err)) return -1;
  PlannedStage plan = plan_of(p, &o.zero);
  memory_choose_recompute(&plan, memory_limit(d));
  if (check_memory(&plan, memory_limit(d), err)) return -1;
  o.recompute = plan.recompute.how;
  o.recompute_blocks = out->blocks = plan.recompute.blocks;
  out->recompute = plan.recompute.how;
  device_reset_peak(d);
  if (o.zero.prefetch) comm_queue_start();
  Arena *arena = arena_create(d, bench_take, bench_give);
  ArenaMark mark = arena_mark(arena);
  arena_push(arena, memory_need(&plan).arena); /* in one piece */
  arena_pop(arena, mark);
  Model *m = bench_model_create(d, p->rig.grid, arena, &p->config, &o);
  Tokens *micro = mem_alloc((size_t)p->micro_batches, sizeof *micro);
  for (int k = 0; k < p->micro_batches; k++) {
    uint64_t stream = (uint64_t)p->rig.grid->rank * (uint64_t)p->micro_batches + (uint64_t)k;
    micro[k] = tokens_draw(&p->config, p->n_seqs, p->n_seqs * p->length, stream);
  }
  measure(m, p, micro, out);
  for (int k = 0; k < p->micro_batches; k++) tokens_free(&micro[k]);
  free(micro);
  model_free(m);
  arena_free(arena);
  comm_queue_stop();
  return 0;
}

static int run_modes(const TrainPlan *p, Error *err) {
  bool root = p->rig.grid->rank == 0;
  if (root && !p->json) train_print_head(p);
  for (int i = 0; i < p->n_modes; i++) {
    const BenchMode *mode = &p->modes[i];
    TrainTimes t = {0};
    if (run_mode(p, mode, &t, err)) return -1;
    if (root && p->json) train_print_json(p, mode->name, &t);
    if (root && !p->json) train_print_row(p, mode->name, &t);
    if (root && !p->json) train_print_recompute(p, &t);
    if (comm_agree(p->rig.grid->all, root ? out_flush(err) : 0, err)) return -1;
  }
  if (root && !p->json) train_print_foot();
  return 0;
}

/* ---- arguments ---- */

static CliResult one_of(const Args *a, const char *option, const char *first, const char *second,
                        bool *is_second, Error *err) {
  const char *word = args_word(a, option);
  *is_second = strcmp(word, second) == 0;
  if (*is_second || strcmp(word, first) == 0) return CLI_OK;
  error_set(err, "%s: found \"%s\"; expected %s or %s", option, word, first, second);
  return CLI_USAGE;
}

static CliResult read_recompute(const Args *a, RecomputeChoice *out, Error *err) {
  const char *word = args_word(a, "--recompute");
  *out = recompute_parse(word);
  if (out->by_memory || out->how != RECOMPUTE_NONE || strcmp(word, "none") == 0) return CLI_OK;
  error_set(err, "--recompute: found \"%s\"; expected none, selective, full or auto", word);
  return CLI_USAGE;
}

static CliResult read_modes(TrainPlan *p, const Args *a, Error *err) {
  const char *names[] = {"stage 0", "stage 1", "stage 2", "stage 3"};
  const char *list = args_text(a, "--modes");
  if (list && args_given(a, "--stage")) {
    error_set(err, "found --stage with --modes; expected one of them");
    return CLI_USAGE;
  }
  if (list) {
    p->n_modes = bench_modes_parse(list, &p->modes, err);
    return p->n_modes < 0 ? CLI_USAGE : CLI_OK;
  }
  p->n_modes = 1;
  p->modes = mem_zalloc(1, sizeof *p->modes);
  p->modes->name = names[args_int(a, "--stage")];
  p->modes->zero.stage = (int)args_int(a, "--stage");
  return CLI_OK;
}

static CliResult read_args(TrainPlan *p, const Args *a, Error *err) {
  bool half_gradients;
  p->n_seqs = (int)args_int(a, "--seqs");
  p->length = (int)args_int(a, "--length");
  p->steps = (int)args_int(a, "--steps");
  p->micro_batches = (int)args_int(a, "--micro-batches");
  p->given.prefetch = (int)args_int(a, "--prefetch");
  p->json = args_given(a, "--json");
  if (one_of(a, "--gradients", "float32", "bfloat16", &half_gradients, err) ||
      one_of(a, "--offload", "off", "optimizer", &p->given.offload, err) ||
      read_recompute(a, &p->recompute, err) || read_modes(p, a, err))
    return CLI_USAGE;
  p->given.gradients = half_gradients ? DT_BF16 : DT_F32;
  if ((int64_t)p->n_seqs * p->length <= INT32_MAX) return CLI_OK;
  error_set(err, "--seqs x --length: expected at most %d tokens", INT32_MAX);
  return CLI_USAGE;
}

/* What travels has the width of what computes. */
static int open_plan(TrainPlan *p, const Args *a, Error *err) {
  p->given.compute = p->rig.compute;
  if (!args_text(a, "--modes") && p->rig.compute == DT_BF16) p->modes->zero.wire = WIRE_BF16;
  if (bench_model(args_text(a, "--model"), &p->model, &p->config, err)) return -1;
  if (p->length <= p->config.max_positions) return 0;
  return error_set(err, "--length is %d; %s takes at most %d positions", p->length, p->model,
                   p->config.max_positions);
}

CliResult bench_train(const Args *a, Error *err) {
  TrainPlan p = {0};
  CliResult rc = read_args(&p, a, err);
  if (rc == CLI_OK) rc = bench_rig_open(&p.rig, a, err);
  if (rc == CLI_OK && comm_agree(p.rig.grid->all, open_plan(&p, a, err), err)) rc = CLI_FAILED;
  if (rc == CLI_OK && run_modes(&p, err)) rc = CLI_FAILED;
  bench_rig_close(&p.rig);
  free(p.modes);
  return rc;
}
