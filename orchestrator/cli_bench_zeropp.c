/* rlhf bench zeropp: one mode after the other, k steps of training, timed and counted.
 *
 * The tokens are the same in every step, so that the loss falls (by heart) and a mode that spoils
 * gradients shows. Clocks and traffic run over the steps only: the barrier in front and the sums
 * behind are not part of them. */
#include <stdlib.h>

#include "orchestrator/cli_bench.h"

static Tokens draw(const BenchPlan *p, int micro) {
  int longest = p->config.max_positions;
  uint64_t stream = (uint64_t)p->grid->rank * (uint64_t)p->micro_batches + (uint64_t)micro;
  return tokens_draw(&p->config, (p->tokens + longest - 1) / longest, p->tokens, stream);
}

/* This rank's part of the loss. */
static double train_step(Model *m, const BenchPlan *p, const Tokens *micro) {
  double rows = (double)micro[0].n_rows * p->micro_batches * p->grid->world;
  StepLoss l = {.weight = 1 / rows};
  zeropp_zero_grad(model_zero(m));
  for (int k = 0; k < p->micro_batches; k++) {
    if (k == p->micro_batches - 1) zeropp_last_micro(model_zero(m));
    bench_micro_batch(m, &micro[k], &l);
  }
  zeropp_step(model_zero(m), bench_adamw(p->lr), 1.0F);
  return l.sum * l.weight;
}

static void measure(Model *m, const BenchPlan *p, const Tokens *micro, BenchResult *out) {
  double loss = train_step(m, p, micro); /* buffers, threads and connections come into being */
  device_sync(model_device(m));
  comm_barrier(p->grid->all);
  Count a = count_now();
  for (int i = 0; i < p->steps; i++) loss = train_step(m, p, micro);
  device_sync(model_device(m));
  comm_barrier(p->grid->all); /* the next step's first weights have come, as at the start */
  Count b = count_now();
  double sum[5] = {b.inter - a.inter, b.intra - a.intra, b.hidden - a.hidden, b.exposed - a.exposed,
                   loss};
  double seconds = b.seconds - a.seconds, world = p->grid->world;
  comm_all_reduce_f64(p->grid->all, sum, 5, false);
  comm_all_reduce_f64(p->grid->all, &seconds, 1, true);
  *out = (BenchResult){.seconds = seconds / p->steps,
                       .inter_bytes = sum[0] / world / p->steps,
                       .intra_bytes = sum[1] / world / p->steps,
                       .hidden = sum[2] / world / p->steps,
                       .exposed = sum[3] / world / p->steps,
                       .loss = sum[4]};
  out->tokens_per_second = (double)p->tokens * p->micro_batches * world / out->seconds;
}

static void run_mode(const BenchPlan *p, const BenchMode *mode, BenchResult *out) {
  ModelOptions o = {.head = HEAD_LM, .trainable = true, .seed = 1, .zero = mode->zero};
  o.zero.prefetch = p->prefetch;
  o.zero.compute = p->compute;
  Arena *arena = arena_create(p->device, bench_take, bench_give);
  if (p->micro_batches == 1) o.zero.accumulate_node = false; /* nothing to sum: hide both hops */
  if (p->prefetch) comm_queue_start();
  Model *m = model_create(p->device, p->grid, arena, &p->config, &o);
  Tokens *micro = mem_alloc((size_t)p->micro_batches, sizeof *micro);
  for (int k = 0; k < p->micro_batches; k++) micro[k] = draw(p, k);
  measure(m, p, micro, out);
  for (int k = 0; k < p->micro_batches; k++) tokens_free(&micro[k]);
  free(micro);
  model_free(m);
  arena_free(arena);
  comm_queue_stop();
}

static int run_modes(const BenchPlan *p, const BenchMode *modes, int n, bool json, Error *err) {
  bool root = p->grid->rank == 0;
  BenchResult first = {0};
  if (root && !json) bench_print_head(p);
  for (int i = 0; i < n; i++) {
    BenchResult r;
    run_mode(p, &modes[i], &r);
    if (i == 0) first = r;
    if (root && json) bench_print_json(p, &modes[i], &r);
    if (root && !json) bench_print_row(p, &modes[i], &r, &first);
    if (comm_agree(p->grid->all, root ? out_flush(err) : 0, err)) return -1;
  }
  if (root && !json) bench_print_foot(p);
  return 0;
}

CliResult bench_zeropp(const Args *a, Error *err) {
  BenchMode *modes;
  BenchPlan p = {.steps = (int)args_int(a, "--steps"),
                 .tokens = (int)args_int(a, "--tokens"),
                 .micro_batches = (int)args_int(a, "--micro-batches"),
                 .prefetch = (int)args_int(a, "--prefetch")};
  int n = bench_modes_parse(args_text(a, "--modes"), &modes, err);
  if (n < 0) return CLI_USAGE;
  BenchRig rig;
  CliResult usage = bench_rig_open(&rig, a, err);
  int rc = usage == CLI_OK ? 0 : -1;
  p.grid = rig.grid;
  p.device = rig.device;
  p.compute = rig.compute;
  p.lr = rig.lr;
  if (rc == 0)
    rc = comm_agree(p.grid->all, bench_model(args_text(a, "--model"), &p.model, &p.config, err),
                    err);
  if (rc == 0) rc = run_modes(&p, modes, n, args_given(a, "--json"), err);
  bench_rig_close(&rig);
  free(modes);
  return usage != CLI_OK ? usage : rc ? CLI_FAILED : CLI_OK;
}
