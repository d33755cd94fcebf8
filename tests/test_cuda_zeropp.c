/* The engine on a GPU beside the engine on the CPU: full weights, gradient sums, steps, files, in
 * every mode, in F32 and BF16, for every way to part the ranks; offloaded state; and how long it
 * takes.
 * ranks: 1 2 */
#include "core/fs.h"
#include "tests/test.h"
#include "tests/twin.h"
#include "tests/zeropp_test.h"
#include "zeropp/zeropp.h"

typedef struct Engines {
  ZeroPP *cpu, *gpu;
} Engines;

static Grid *cpu_grid, *gpu_grid; /* of the same shape; gpu_grid has the GPU's collectives */
static ZeroPPConfig gpu_config;   /* of the running check */
static char place[160];           /* for messages: mode, types, grid */

static void verify(const char *what, bool ok) {
  char text[256];
  snprintf(text, sizeof text, "%s: %s", place, what);
  twin_check(text, ok);
}

static void open_grids(int local) {
  Error err = {""};
  cpu_grid = grid_create(local, &err);
  gpu_grid = grid_create(local, &err);
  if (!cpu_grid || !gpu_grid || grid_attach(gpu_grid, twins()->gpu, &err)) die("%s", err.msg);
}

static void close_grids(void) {
  grid_free(gpu_grid);
  grid_free(cpu_grid);
}

static ZeroPP *engine_on(Device *d, Grid *g, ZeroPPConfig cfg) {
  ParamSpec specs[TEST_PARAMS];
  test_specs(specs);
  return zeropp_create(d, g, &cfg, specs, TEST_PARAMS);
}

static Engines engines(void) {
  ZeroPPConfig plain = gpu_config;
  plain.compute = plain.gradients = DT_F32;
  plain.offload = false;
  return (Engines){engine_on(twins()->cpu, cpu_grid, plain),
                   engine_on(twins()->gpu, gpu_grid, gpu_config)};
}

static void engines_free(Engines e) {
  zeropp_destroy(e.cpu);
  zeropp_destroy(e.gpu);
}

/* ---- between host and device ---- */

static int64_t numel_of(int p) { return test_shapes[p].rows * test_shapes[p].width; }

static float *weight_of(ZeroPP *z, int p) {
  Tensor w = zeropp_weight(z, p);
  size_t n = (size_t)tensor_numel(w);
  void *raw = mem_alloc(n, sizeof(float));
  float *x = mem_alloc(n, sizeof *x);
  device_download(zeropp_device(z), raw, w.data, tensor_bytes(w));
  convert_to_f32(raw, w.dtype, x, n);
  free(raw);
  return x;
}

static void round_to(DType type, float *x, int64_t n) {
  if (type == DT_F32) return;
  uint16_t *half = mem_alloc((size_t)n, sizeof *half);
  convert_from_f32(x, half, type, (size_t)n);
  convert_to_f32(half, type, x, (size_t)n);
  free(half);
}

static void set_weights(ZeroPP *z, float offset) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    float *x = zeropp_shard(z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++) {
      int64_t k = start + i;
      x[i] = 0.01f * (float)((p * 37 + (int)k * 29) % 199 - 99) + 0.001f * (float)(k % 7) + offset;
    }
    zeropp_shard_written(z, STATE_MASTER, p);
  }
  zeropp_weights_written(z);
}

static void add_gradient(ZeroPP *z, int p, const float *x) {
  Device *d = zeropp_device(z);
  float beta;
  bool overwrite = p % 2 == 1; /* half of them as a GEMM does, half as a bias */
  Tensor g = overwrite ? zeropp_grad_into(z, p, 1, &beta) : zeropp_grad(z, p);
  if (!overwrite) beta = 1;
  Tensor term = g;
  size_t n = (size_t)tensor_numel(g);
  void *typed = mem_alloc(n, dtype_size(g.dtype));
  if (convert_from_f32(x, typed, g.dtype, n)) die("F32 or BF16");
  term.data = device_alloc(d, tensor_bytes(g));
  device_upload(d, term.data, typed, tensor_bytes(g));
  free(typed);
  if (beta == 0)
    device_copy(d, g.data, term.data, tensor_bytes(g));
  else
    device_ops(d)->axpy(d, 1, term, g);
  device_sync(d);
  device_free(d, term.data);
}

/* Largest difference of a kind over its largest magnitude, all ranks; prints where it is beyond. */
static void compare_kind(ZeroPP *want, ZeroPP *got, StateKind kind, const char *what,
                         double bound) {
  double most[2] = {0, 1e-30};
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    const float *x = zeropp_shard(want, kind, p, &start, &count);
    const float *y = zeropp_shard(got, kind, p, &start, &count);
    for (int64_t i = 0; i < count; i++) {
      double difference = fabs((double)x[i] - (double)y[i]);
      if (!(difference <= most[0])) most[0] = isnan(difference) ? INFINITY : difference;
      most[1] = fmax(most[1], fabs((double)x[i]));
    }
  }
  comm_all_reduce_f64(cpu_grid->all, most, 2, true);
  if (most[0] > bound * most[1])
    print_message("%s: %s differ by %.3g of %.3g, bound %.1e\n", place, what, most[0], most[1],
                  bound);
  verify(what, most[0] <= bound * most[1]);
}

/* ---- every mode ---- */

/* Full weights are the CPU's to the bit, rounded to what the GPU computes in. */
static void compare_weights(Engines e) {
  for (int u = TEST_UNITS - 1; u >= 0; u--) {
    if (u > 0) zeropp_prefetch(e.gpu, u - 1);
    zeropp_gather(e.cpu, u);
    zeropp_gather(e.gpu, u);
    for (int p = 0; p < TEST_PARAMS; p++) {
      if (test_shapes[p].unit != u) continue;
      float *want = weight_of(e.cpu, p), *got = weight_of(e.gpu, p);
      round_to(gpu_config.compute, want, numel_of(p));
      int64_t differ = 0;
      for (int64_t i = 0; i < numel_of(p); i++) differ += want[i] != got[i];
      if (differ)
        print_message("%s: %lld of %lld weights of %s\n", place, (long long)differ,
                      (long long)numel_of(p), test_shapes[p].name);
      verify("full weights", differ == 0);
      verify("alignment",
             test_shapes[p].joined || (uintptr_t)zeropp_weight(e.gpu, p).data % 128 == 0);
      free(want);
      free(got);
    }
    zeropp_release(e.cpu, u);
    zeropp_release(e.gpu, u);
  }
}

static const AdamW adam = {
    .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-3f, .weight_decay = 0.1f};

static void micro_batch(ZeroPP *z, int step, int micro, float bad) {
  static float x[4096];
  int rank = zeropp_grid(z)->rank;
  for (int u = TEST_UNITS - 1; u >= 0; u--) {
    zeropp_gather(z, u);
    zeropp_open_grad(z, u);
    for (int p = 0; p < TEST_PARAMS; p++) {
      if (test_shapes[p].unit != u || (step == 1 && p == 5)) continue; /* no one adds to it */
      for (int64_t i = 0; i < numel_of(p); i++)
        x[i] = 0.013f * (float)((p + step * 7 + (int)i * 3 + rank * 5 + micro) % 23 - 11);
      if (p == 13) x[1400] += bad;
      add_gradient(z, p, x);
    }
    zeropp_reduce(z, u);
    zeropp_release(z, u);
  }
}

static StepResult train(ZeroPP *z, int step, float bad) {
  zeropp_zero_grad(z);
  for (int b = 0; b < 2; b++) micro_batch(z, step, b, bad);
  return zeropp_step(z, adam, 1);
}

/* The same gradients went in. F32 sums differ by their order (1e-7 a term); unquantized BF16 ones
 * by what the CPU rounds between its two hops and the GPU on one node does not, 2^-8 at most, and
 * by gradient sums in BF16, rounded twice here. */
static double gradient_bound(void) {
  bool half = gpu_config.gradients == DT_BF16;
  if (half || (gpu_config.wire == WIRE_BF16 && !gpu_config.qgz)) return 1.0 / 64;
  return 2e-6;
}

/* A step moves a weight by lr at most; what a gradient is off by moves it that part of lr. Four
 * steps from |w| < 1. */
static double weight_bound(void) {
  return 1e-6 + 4 * (double)adam.lr * 4 * (gradient_bound() > 1e-5 ? gradient_bound() : 1e-5);
}

static void compare_states(Engines e, double factor) {
  compare_kind(e.cpu, e.gpu, STATE_MASTER, "masters", factor * weight_bound());
  compare_kind(e.cpu, e.gpu, STATE_MOMENT1, "first moments", factor * 2 * gradient_bound());
  compare_kind(e.cpu, e.gpu, STATE_MOMENT2, "second moments", factor * 4 * gradient_bound());
}

static void compare_training(Engines e) {
  for (int step = 0; step < 3; step++) {
    zeropp_zero_grad(e.cpu);
    zeropp_zero_grad(e.gpu);
    for (int b = 0; b < 2; b++) {
      micro_batch(e.cpu, step, b, 0);
      micro_batch(e.gpu, step, b, 0);
    }
    compare_kind(e.cpu, e.gpu, STATE_GRAD, "gradients", gradient_bound());
    StepResult want = zeropp_step(e.cpu, adam, 1), got = zeropp_step(e.gpu, adam, 1);
    verify("a step", !want.skipped && !got.skipped);
    verify("norm", fabs(want.grad_norm - got.grad_norm) <= gradient_bound() * want.grad_norm);
  }
  compare_states(e, 1);
}

/* What one writes the other reads, to the bit, and both go on alike. */
static void compare_files(Engines e) {
  Error err = {""};
  char *path = fs_join(test_tmp(), "state");
  if (zeropp_save_state(e.gpu, path, &err) || zeropp_load_state(e.cpu, path, &err))
    die("%s", err.msg);
  for (StateKind k = 0; k < STATE_GRAD; k++) compare_kind(e.cpu, e.gpu, k, "what was saved", 0);
  train(e.cpu, 3, 0);
  train(e.gpu, 3, 0);
  compare_states(e, 1);
  if (zeropp_save_state(e.cpu, path, &err) || zeropp_load_state(e.gpu, path, &err))
    die("%s", err.msg);
  for (StateKind k = 0; k < STATE_GRAD; k++) compare_kind(e.cpu, e.gpu, k, "what was loaded", 0);
  verify("steps", zeropp_steps(e.cpu) == zeropp_steps(e.gpu));
  free(path);
}

/* One rank's NaN changes nothing anywhere. */
static void compare_skip(Engines e) {
  float bad = gpu_grid->rank == 0 ? NAN : 0;
  verify("the skip", train(e.cpu, 5, bad).skipped && train(e.gpu, 5, bad).skipped);
  for (StateKind k = 0; k < STATE_GRAD; k++) compare_kind(e.cpu, e.gpu, k, "what a skip left", 0);
}

static void compare_average(Engines e) {
  zeropp_ema_enable(e.cpu);
  zeropp_ema_enable(e.gpu);
  train(e.cpu, 6, 0);
  train(e.gpu, 6, 0);
  zeropp_ema_update(e.cpu, 0.5f);
  zeropp_ema_update(e.gpu, 0.5f);
  compare_kind(e.cpu, e.gpu, STATE_EMA, "averages", weight_bound());
  Engines other = engines();
  zeropp_copy_weights(other.gpu, e.gpu);
  compare_kind(e.gpu, other.gpu, STATE_MASTER, "copies", 0);
  engines_free(other);
}

static void check_plan(size_t before) {
  ParamSpec specs[TEST_PARAMS];
  test_specs(specs);
  ZeroPPMemory plan =
      zeropp_memory(&gpu_config, specs, TEST_PARAMS, gpu_grid->nodes, gpu_grid->local, true);
  uint64_t planned = plan.master + plan.moments + plan.gradients + plan.full_units + plan.ema +
                     plan.secondary + plan.errors;
  ZeroPP *z = engine_on(twins()->gpu, gpu_grid, gpu_config);
  zeropp_init_random(z, 7);
  zeropp_ema_enable(z);
  device_reset_peak(twins()->gpu);
  size_t own = device_bytes(twins()->gpu); /* with scratch, which is the kernels' */
  zeropp_zero_grad(z);
  for (int u = TEST_UNITS - 1; u >= 0; u--) {
    zeropp_gather(z, u);
    zeropp_open_grad(z, u);
    zeropp_reduce(z, u);
    zeropp_release(z, u);
  }
  zeropp_step(z, adam, 1);
  size_t scratch = before < own ? before : own;
  verify("the memory plan", device_peak_bytes(twins()->gpu) - scratch <= planned);
  zeropp_destroy(z);
}

static void check_frozen(void) {
  ZeroPPConfig kept = gpu_config;
  gpu_config.trainable = gpu_config.accumulate_node = gpu_config.error_feedback = false;
  gpu_config.gradients = DT_F32;
  Engines e = engines();
  for (int version = 0; version < 2; version++) {
    set_weights(e.cpu, 0.25f * (float)version);
    set_weights(e.gpu, 0.25f * (float)version);
    compare_weights(e);
  }
  engines_free(e);
  gpu_config = kept;
}

static void compare_repeated(Engines e) {
  float x[100];
  for (int i = 0; i < 100; i++) x[i] = 0.5f * (float)i;
  for (int p = 0; p < TEST_PARAMS; p++) {
    zeropp_init_repeated(e.cpu, p, x, 1 + 33 * (p % 4)); /* of few as of many */
    zeropp_init_repeated(e.gpu, p, x, 1 + 33 * (p % 4));
  }
  zeropp_weights_written(e.cpu);
  zeropp_weights_written(e.gpu);
  compare_kind(e.cpu, e.gpu, STATE_MASTER, "repeated numbers", 0);
}

static void check_mode(void) {
  size_t before = device_bytes(twins()->gpu);
  Engines e = engines();
  compare_repeated(e);
  for (int version = 0; version < 2; version++) {
    if (version == 1) zeropp_prefetch(e.gpu, 0); /* for naught: new weights come */
    set_weights(e.cpu, 0.25f * (float)version);
    set_weights(e.gpu, 0.25f * (float)version);
    compare_weights(e);
  }
  compare_training(e);
  compare_files(e);
  compare_skip(e);
  compare_average(e);
  engines_free(e);
  check_frozen();
  check_plan(before);
}

/* Sums in BF16 touch a few lines only: every third mode will do. */
static void check_types(int i) {
  static const char *const name[2] = {"F32", "BF16"};
  const TestMode *m = &test_modes[i];
  int local = gpu_grid->local, world = gpu_grid->world;
  for (int compute = 0; compute < 2; compute++)
    for (int half = 0; half < 2; half++) {
      if (half && (m->cfg.stage == 0 || !compute || i % 3 != 1)) continue;
      gpu_config = m->cfg;
      gpu_config.compute = compute ? DT_BF16 : DT_F32;
      gpu_config.gradients = half ? DT_BF16 : DT_F32;
      snprintf(place, sizeof place, "%s, %s, sums %s, %d x %d", m->name, name[compute], name[half],
               world / local, local);
      check_mode();
    }
}

static void every_mode_agrees(void **state) {
  (void)state;
  twins();
  double start = clock_seconds();
  for (int local = 1; local <= launch_world(); local++) {
    if (launch_world() % local) continue;
    open_grids(local);
    for (int i = 0; i < TEST_MODES; i++) {
      if (test_is_watched_closely() ? i != 14 : twin_leaves_out(3, 3)) continue;
      if (i % 2) comm_queue_start(); /* behind compute, or not */
      check_types(i);
      comm_queue_stop();
    }
    close_grids();
  }
  print_message("%.1f s\n", clock_seconds() - start);
  twin_done();
}

/* ---- offload: the same bits ---- */

static void check_offload(ZeroPPConfig cfg, const char *name) {
  snprintf(place, sizeof place, "offload, %s", name);
  gpu_config = cfg;
  Device *gpu = twins()->gpu;
  ZeroPP *plain = engine_on(gpu, gpu_grid, cfg);
  cfg.offload = true;
  size_t before = device_bytes(gpu);
  ZeroPP *away = engine_on(gpu, gpu_grid, cfg);
  size_t resident = device_bytes(gpu) - before;
  ParamSpec specs[TEST_PARAMS];
  test_specs(specs);
  ZeroPPMemory plan =
      zeropp_memory(&cfg, specs, TEST_PARAMS, gpu_grid->nodes, gpu_grid->local, false);
  verify("resident bytes", resident <= plan.master + plan.moments + plan.gradients +
                                           plan.full_units + plan.secondary + plan.errors);
  verify("moments are away", plan.moments == 0 && plan.host > 0);
  set_weights(plain, 0);
  set_weights(away, 0);
  for (int step = 0; step < 3; step++) {
    train(plain, step, 0);
    train(away, step, 0);
  }
  for (StateKind k = 0; k < STATE_GRAD; k++) compare_kind(plain, away, k, "offloaded state", 0);
  zeropp_ema_enable(away);
  compare_kind(plain, away, STATE_MASTER, "masters", 0);
  zeropp_destroy(plain);
  zeropp_destroy(away);
}

static void offloaded_state_has_the_same_bits(void **state) {
  (void)state;
  twins();
  const ZeroPPConfig base = {.stage = 3, .trainable = true, .block = 4};
  for (int local = 1; local <= launch_world(); local++) {
    if (launch_world() % local) continue;
    open_grids(local);
    for (int compute = 0; compute < 2; compute++)
      for (int wire = 0; wire < 2; wire++) {
        if (test_is_watched() && wire != compute) continue;
        if (test_is_watched_closely() && !wire) continue;
        ZeroPPConfig cfg = base;
        cfg.compute = compute ? DT_BF16 : DT_F32;
        cfg.wire = wire ? WIRE_BF16 : WIRE_F32;
        check_offload(cfg, compute ? "BF16" : "F32");
        cfg.hpz = HPZ_ON;
        check_offload(cfg, "hpz");
        bool half = compute || wire;
        if (half) cfg.refresh = REFRESH_DELTA;
        if (half) check_offload(cfg, "deltas");
        cfg.refresh = REFRESH_DENSE;
        cfg.qwz = WIRE_INT8;
        check_offload(cfg, "hpz and qwz");
        if (half) cfg.refresh = REFRESH_AUTO;
        if (half) check_offload(cfg, "hpz, qwz or deltas");
        cfg = base;
        cfg.stage = 0;
        cfg.compute = compute ? DT_BF16 : DT_F32;
        cfg.wire = wire ? WIRE_BF16 : WIRE_F32;
        check_offload(cfg, "stage 0");
      }
    close_grids();
  }
  twin_done();
}

/* ---- time ---- */

enum { BIG_UNITS = 6, BIG_SIDE = 5632, BIG_WIDTH = 8192 }; /* 46 M parameters a unit, as a block */

static ZeroPP *big_engine(ZeroPPConfig cfg) {
  ParamSpec specs[2 * BIG_UNITS];
  for (int i = 0; i < 2 * BIG_UNITS; i++) {
    bool norm = i % 2 == 0;
    specs[i] = (ParamSpec){.unit = i / 2,
                           .ndim = norm ? 1 : 2,
                           .dim = {norm ? BIG_WIDTH : BIG_SIDE, norm ? 1 : BIG_WIDTH},
                           .decay = !norm,
                           .init = norm ? INIT_ONES : INIT_NORMAL,
                           .init_std = 0.02F};
    snprintf(specs[i].name, sizeof specs[i].name, "%d", i);
  }
  return zeropp_create(twins()->gpu, gpu_grid, &cfg, specs, 2 * BIG_UNITS);
}

static void gather_each(void *arg) {
  for (int u = 0; u < BIG_UNITS; u++) {
    if (u + 1 < BIG_UNITS) zeropp_prefetch(arg, u + 1);
    zeropp_gather(arg, u);
    zeropp_release(arg, u);
  }
}

static void reduce_each(void *arg) {
  float beta;
  zeropp_zero_grad(arg);
  for (int u = BIG_UNITS - 1; u >= 0; u--) {
    zeropp_open_grad(arg, u);
    zeropp_grad_into(arg, 2 * u + 1, 1, &beta);
    zeropp_reduce(arg, u);
  }
  zeropp_scale_grad(arg, 0); /* waits for the sums, and what was never written is no NaN */
}

static void step_once(void *arg) { zeropp_step(arg, adam, 1); }

/* twin_time for calls that all ranks must make equally often: the slowest rank's time says how
 * often, and what they take. bytes: 0 for no rate. */
static void time_together(const char *name, const char *what, void (*op)(void *), ZeroPP *z,
                          double bytes) {
  double best = 1e30, each = 0;
  for (int batch = 0, calls = 1; batch < 5; batch++) {
    double start = clock_seconds();
    for (int i = 0; i < calls; i++) op(z);
    device_sync(twins()->gpu);
    each = (clock_seconds() - start) / calls;
    comm_all_reduce_f64(cpu_grid->all, &each, 1, true);
    if (batch == 1) calls = each > 0.02 ? 1 : (int)(0.02 / each) + 1;
    if (batch > 1 && each < best) best = each;
  }
  print_message("       %s, %s: %.1f us", name, what, 1e6 * best);
  if (bytes > 0) print_message(", %.0f GB/s", 1e-9 * bytes / best);
  print_message("\n");
}

static bool through_host; /* ranks share a GPU: what that takes is of no interest */

static void time_engine(ZeroPPConfig cfg, const char *name) {
  if (through_host) return;
  ZeroPP *z = big_engine(cfg);
  double once = clock_seconds();
  zeropp_init_random(z, 1);
  device_sync(twins()->gpu);
  print_message("random weights: %.1f ns each, %d threads\n",
                1e9 * (clock_seconds() - once) / (double)zeropp_numel(z) * launch_world(),
                device_threads(twins()->gpu));
  once = clock_seconds();
  gather_each(z);
  device_sync(twins()->gpu);
  once = clock_seconds() - once;
  comm_all_reduce_f64(cpu_grid->all, &once, 1, true);
  through_host = launch_world() > 1 && once > 0.1;
  if (through_host) {
    print_message("a gather of all units takes %.0f ms: not timed\n", 1e3 * once);
    zeropp_destroy(z);
    return;
  }
  double numel = (double)zeropp_numel(z), own = numel / gpu_grid->world;
  time_together(name, "gathers", gather_each, z, 0);
  time_together(name, "reductions", reduce_each, z, 0);
  time_together(name, "step (30 bytes of each own parameter counted)", step_once, z, 30 * own);
  zeropp_destroy(z);
}

static void how_long_it_takes(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  twins();
  comm_queue_start();
  for (int local = launch_world(); local >= 1; local--) {
    if (launch_world() % local) continue;
    open_grids(local);
    print_message("%d nodes of %d: %d units of %.1f M parameters\n", gpu_grid->nodes, local,
                  BIG_UNITS, 1e-6 * BIG_SIDE * BIG_WIDTH);
    ZeroPPConfig cfg = {.stage = 3, .trainable = true, .compute = DT_BF16};
    if (launch_world() == 1) time_engine(cfg, "one rank");
    cfg.wire = WIRE_BF16;
    if (launch_world() > 1) time_engine(cfg, "stage 3, bfloat16");
    if (launch_world() > 1) cfg.gradients = DT_BF16;
    if (launch_world() > 1) time_engine(cfg, "stage 3, bfloat16 sums");
    cfg.offload = true;
    time_engine(cfg, "offloaded");
    cfg.offload = false;
    cfg.hpz = HPZ_ON;
    cfg.qwz = WIRE_INT8;
    cfg.qgz = WIRE_INT4;
    time_engine(cfg, "hpz, qwz, qgz");
    close_grids();
  }
  comm_queue_stop();
  twin_done();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_mode_agrees),
    cmocka_unit_test(offloaded_state_has_the_same_bits),
    cmocka_unit_test(how_long_it_takes),
};
TEST_MAIN(tests)
