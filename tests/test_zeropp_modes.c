/* ZeRO++: every switch alone and together, for every way to part the ranks: the same full weights
 * everywhere, never stale; training that does not depend on switches that lose nothing; what is not
 * a number; memory.
 * ranks: 1 2 3 4 */
#include <math.h>

#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/zeropp.h"

/* ---- gathers ---- */

static float weight_of(int p, int64_t i) {
  return 0.01f * (float)((p * 37 + (int)i * 29) % 199 - 99) + 0.001f * (float)(i % 7);
}

static void set_weights(ZeroPP *z, float offset) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    float *x = zeropp_shard(z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++) x[i] = weight_of(p, start + i) + offset;
  }
  zeropp_weights_written(z);
}

/* x as it is after it went over the wire in one piece. */
static void over_the_wire(Device *d, WireFormat f, WireSpan s, float *x) {
  static char wire[1 << 16];
  WireData data = {wire, wire + wire_scale_bytes(f, s), 1, 0};
  WirePart part = {.span = s, .x = tensor_1d(x, DT_F32, s.count), .from = data, .to = data};
  assert_true(wire_scale_bytes(f, s) + wire_payload_bytes(f, s) <= sizeof wire);
  device_ops(d)->quantize(d, f, 1, &part);
  device_ops(d)->dequantize(d, f, 1, &part, false);
}

/* The full weight that every rank must hold after a write, whatever the grid and the stage. Where
 * the form of a refresh is chosen, it is exact then. */
static void expected_weight(const TestModel *m, int p, float offset, float *x) {
  const ZeroPPConfig *c = &mode->cfg;
  int64_t n = test_shapes[p].rows * test_shapes[p].width;
  WireSpan s = {test_shapes[p].ndim == 2 ? test_shapes[p].width : n, 0, n};
  for (int64_t i = 0; i < n; i++) x[i] = weight_of(p, i) + offset;
  bool coded = c->qwz && c->refresh != REFRESH_AUTO;
  WireKind kind = coded ? c->qwz : c->wire;
  over_the_wire(m->device, (WireFormat){kind, c->block, c->scale}, s, x);
  if (coded && c->hpz == HPZ_ON)
    over_the_wire(m->device, (WireFormat){c->wire, c->block, c->scale}, s, x);
}

static void assert_weights(const TestModel *m, int unit, float offset) {
  static float want[4096];
  for (int p = 0; p < TEST_PARAMS; p++) {
    if (test_shapes[p].unit != unit) continue;
    expected_weight(m, p, offset, want);
    Tensor w = zeropp_weight(m->z, p);
    check_true(memcmp(tensor_f32(w), want, tensor_bytes(w)) == 0);
  }
}

static void check_gather(int local) {
  TestModel m = test_model_of(local, mode->cfg), other = test_model_of(local, mode->cfg);
  for (int version = 0; version < 3; version++) { /* a secondary is never of an older one */
    float offset = 0.25f * (float)version;
    set_weights(m.z, offset);
    for (int round = 0; round < 2; round++)
      for (int u = TEST_UNITS - 1; u >= 0; u--) {
        if (u > 0) zeropp_prefetch(m.z, u - 1);
        zeropp_gather(m.z, u);
        zeropp_prefetch(m.z, u); /* at hand already */
        assert_weights(&m, u, offset);
        zeropp_release(m.z, u);
      }
    zeropp_prefetch(m.z, 0); /* for naught: new weights come in between */
  }
  zeropp_copy_weights(other.z, m.z);
  zeropp_gather_all(other.z);
  for (int u = 0; u < TEST_UNITS; u++) assert_weights(&other, u, 0.5f);
  zeropp_release_all(other.z);
  test_model_free(&m);
  test_model_free(&other);
}

static void gathers_bring_the_newest_weights_rounded_alike(void **state) {
  (void)state;
  for_each_mode(check_gather);
}

/* ---- frozen models ---- */

static void check_frozen(int local) {
  ZeroPPConfig cfg = mode->cfg;
  cfg.trainable = cfg.accumulate_node = cfg.error_feedback = false;
  TestModel m = test_model_of(local, cfg);
  set_weights(m.z, 0);
  uint64_t before = test_crossed();
  bool alone = cfg.hpz && !(m.grid->world == 1 && !cfg.qwz && cfg.wire == WIRE_F32);
  ParamSpec specs[TEST_PARAMS];
  test_specs(specs);
  ZeroPPMemory plan = zeropp_memory(&cfg, specs, TEST_PARAMS, m.grid->nodes, local, false);
  check_true((plan.master == 0) == alone); /* the masters are gone */
  check_true(device_bytes(m.device) <= plan.master + plan.secondary + plan.full_units);
  for (int u = 0; u < TEST_UNITS; u++) {
    zeropp_gather(m.z, u);
    assert_weights(&m, u, 0);
    zeropp_release(m.z, u);
  }
  if (cfg.hpz) check_true(test_crossed() == before);
  for (int p = 0; p < TEST_PARAMS; p++) { /* masters are there for who asks */
    static float want[4096];
    int64_t start, count;
    const float *x = zeropp_shard(m.z, STATE_MASTER, p, &start, &count);
    expected_weight(&m, p, 0, want);
    for (int64_t i = 0; i < count; i++)
      check_true(x[i] == (alone ? want[start + i] : weight_of(p, start + i)));
  }
  test_model_free(&m);
}

static void frozen_models_keep_the_secondary_alone(void **state) {
  (void)state;
  for_each_mode(check_frozen);
}

/* ---- training ---- */

/* A large eps: what is left of a sum that cancels must not decide the direction of a step. */
static const AdamW adam = {
    .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-4f, .weight_decay = 0.1f};

/* A step whose gradients depend on the full weights, the rank and the step. */
static StepResult train_step(TestModel *m, int step, int micros, float bad) {
  zeropp_zero_grad(m->z);
  for (int b = 0; b < micros; b++) {
    if (b == micros - 1 && step % 2) zeropp_last_micro(m->z); /* a hint */
    for (int u = TEST_UNITS - 1; u >= 0; u--) {
      zeropp_gather(m->z, u);
      if (u > 0) zeropp_prefetch(m->z, u - 1);
      zeropp_open_grad(m->z, u);
      for (int p = 0; p < TEST_PARAMS; p++) {
        if (test_shapes[p].unit != u) continue;
        const float *w = tensor_f32(zeropp_weight(m->z, p));
        float beta = 1; /* half of them are overwritten, as by a GEMM */
        Tensor g = p % 2 ? zeropp_grad_into(m->z, p, 1, &beta) : zeropp_grad(m->z, p);
        check_true(beta == 0 || beta == 1);
        for (int64_t i = 0; i < tensor_numel(g); i++) {
          float add = 0.1f * w[i] +
                      0.01f * (float)((p + step * 7 + (int)i * 3 + m->grid->rank * 5 + b) % 13 - 6);
          tensor_f32(g)[i] = beta == 0 ? add : tensor_f32(g)[i] + add;
        }
        if (p == 13) tensor_f32(g)[1400] += bad;
      }
      zeropp_reduce(m->z, u);
      zeropp_release(m->z, u);
    }
  }
  return zeropp_step(m->z, adam, 1);
}

/* Largest difference of masters and moments. */
static double difference(const TestModel *a, const TestModel *b) {
  double most = 0;
  for (int k = 0; k < STATE_GRAD; k++)
    for (int p = 0; p < TEST_PARAMS; p++) {
      int64_t start, count;
      const float *x = zeropp_shard(a->z, (StateKind)k, p, &start, &count);
      const float *y = zeropp_shard(b->z, (StateKind)k, p, &start, &count);
      for (int64_t i = 0; i < count; i++) most = fmax(most, fabs((double)x[i] - (double)y[i]));
    }
  comm_all_reduce_f64(a->grid->all, &most, 1, true);
  return most;
}

static double after_training(int local, ZeroPPConfig one, ZeroPPConfig two, int micros) {
  TestModel a = test_model_of(local, one), b = test_model_of(local, two);
  set_weights(a.z, 0);
  set_weights(b.z, 0);
  for (int step = 0; step < 4; step++) {
    assert_false(train_step(&a, step, micros, 0).skipped);
    assert_false(train_step(&b, step, micros, 0).skipped);
    zeropp_gather_all(a.z); /* as a rollout does */
    zeropp_gather_all(b.z);
    for (int p = 0; p < TEST_PARAMS && micros == 1; p++) {
      Tensor x = zeropp_weight(a.z, p), y = zeropp_weight(b.z, p);
      assert_memory_equal(tensor_f32(x), tensor_f32(y), tensor_bytes(x));
    }
    zeropp_release_all(a.z);
    zeropp_release_all(b.z);
  }
  double most = difference(&a, &b);
  test_model_free(&a);
  test_model_free(&b);
  return most;
}

static void check_hpz(int local) {
  ZeroPPConfig plain = {.stage = 3, .trainable = true, .block = 4}, hpz = plain;
  for (int wire = 0; wire < 2; wire++) {
    plain.wire = hpz.wire = wire ? WIRE_BF16 : WIRE_F32;
    plain.qwz = hpz.qwz = WIRE_F32;
    hpz.hpz = HPZ_ON;
    assert_true(after_training(local, plain, hpz, 1) == 0);
    plain.qwz = hpz.qwz = WIRE_INT8; /* kept as it came: that of qwZ alone */
    hpz.hpz = HPZ_QUANTIZED;
    assert_true(after_training(local, plain, hpz, 1) == 0);
  }
}

static void hpz_gives_the_same_bits(void **state) {
  (void)state;
  for_each_grid(check_hpz);
}

/* One micro-batch: all stages add the same numbers in the same order. Two: stages 0 and 1 add them
 * before they travel, so sums near 1 differ in the last bit, 1e-7; over eps, times the learning
 * rate, that is 1e-5 of a weight at most. */
static void check_stages(int local) {
  ZeroPPConfig three = {.stage = 3, .trainable = true};
  for (int stage = 0; stage < 3; stage++) {
    ZeroPPConfig less = {.stage = stage, .trainable = true};
    assert_true(after_training(local, three, less, 1) == 0);
    assert_true(after_training(local, three, less, 2) < 1e-5);
  }
  ZeroPPConfig node = three;
  node.accumulate_node = true;
  assert_true(after_training(local, three, node, 1) == 0);
  assert_true(after_training(local, three, node, 2) < 1e-5);
}

static void all_stages_train_alike(void **state) {
  (void)state;
  for_each_grid(check_stages);
}

/* Behind compute: the same bits as at once. */
static void check_queue(int local) {
  TestModel a = test_model_of(local, mode->cfg);
  set_weights(a.z, 0);
  for (int step = 0; step < 3; step++) train_step(&a, step, 2, 0);
  comm_queue_start();
  TestModel b = test_model_of(local, mode->cfg);
  set_weights(b.z, 0);
  for (int step = 0; step < 3; step++) train_step(&b, step, 2, 0);
  check_true(difference(&a, &b) == 0);
  test_model_free(&b);
  comm_queue_stop();
  test_model_free(&a);
}

static void the_queue_changes_no_bit(void **state) {
  (void)state;
  for_each_mode(check_queue);
}

static void check_skip(int local) {
  static const float bad[] = {NAN, INFINITY};
  TestModel m = test_model_of(local, mode->cfg), twin = test_model_of(local, mode->cfg);
  set_weights(m.z, 0);
  set_weights(twin.z, 0);
  for (int i = 0; i < 2; i++) {
    int culprit = i == 0 ? 0 : m.grid->world - 1;
    uint64_t version = zeropp_version(m.z);
    StepResult r = train_step(&m, i, 2, m.grid->rank == culprit ? bad[i] : 0);
    check_true(r.skipped && !isfinite(r.grad_norm) && zeropp_version(m.z) == version);
    check_true(difference(&m, &twin) == 0);
  }
  check_true(!train_step(&m, 5, 1, 0).skipped); /* nothing of it is left */
  check_true(!train_step(&twin, 5, 1, 0).skipped);
  check_true(difference(&m, &twin) == 0);
  test_model_free(&m);
  test_model_free(&twin);
}

static void not_a_number_on_one_rank_skips_on_all(void **state) {
  (void)state;
  for_each_mode(check_skip);
}

/* ---- memory ---- */

static void check_memory(int local) {
  TestModel m = test_model_of(local, mode->cfg);
  ParamSpec specs[TEST_PARAMS];
  test_specs(specs);
  ZeroPPMemory plan = zeropp_memory(&mode->cfg, specs, TEST_PARAMS, m.grid->nodes, local, false);
  size_t planned =
      plan.master + plan.moments + plan.gradients + plan.full_units + plan.secondary + plan.errors;
  set_weights(m.z, 0);
  device_reset_peak(m.device);
  for (int step = 0; step < 2; step++) {
    zeropp_zero_grad(m.z);
    zeropp_open_grad(m.z, 0); /* as a tied head does */
    for (int u = TEST_UNITS - 1; u >= 0; u--) {
      zeropp_gather(m.z, u);
      zeropp_open_grad(m.z, u);
      zeropp_reduce(m.z, u);
      zeropp_release(m.z, u);
    }
    zeropp_step(m.z, adam, 1);
  }
  check_true(device_peak_bytes(m.device) <= planned);
  for (int step = 0; step < 3; step++) train_step(&m, step, 2, 0);
  check_true(device_peak_bytes(m.device) <= planned); /* steps leave nothing behind */
  test_model_free(&m);
}

static void memory_stays_within_the_plan(void **state) {
  (void)state;
  for_each_mode(check_memory);
}

/* A rollout that holds everything gives back what is beyond the plan. */
static void check_pool(int local) {
  TestModel m = test_model(local, true);
  ParamSpec specs[12];
  for (int u = 0; u < 12; u++) {
    specs[u] = (ParamSpec){.unit = u, .ndim = 2, .dim = {8, 64}};
    snprintf(specs[u].name, sizeof specs[u].name, "%d", u);
  }
  ZeroPPConfig cfg = {.stage = 3, .trainable = true};
  ZeroPP *z = zeropp_create(m.device, m.grid, &cfg, specs, 12);
  size_t empty = device_bytes(m.device);
  zeropp_init_random(z, 1);
  zeropp_gather_all(z);
  size_t full = device_bytes(m.device);
  zeropp_release_all(z);
  uint64_t limit = zeropp_memory(&cfg, specs, 12, m.grid->nodes, local, false).full_units;
  if (m.grid->world > 1) assert_true(full > empty + limit);
  assert_true(device_bytes(m.device) <= empty + limit);
  zeropp_destroy(z);
  test_model_free(&m);
}

static void idle_memory_goes_back(void **state) {
  (void)state;
  for_each_grid(check_pool);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(gathers_bring_the_newest_weights_rounded_alike),
    cmocka_unit_test(frozen_models_keep_the_secondary_alone),
    cmocka_unit_test(hpz_gives_the_same_bits),
    cmocka_unit_test(all_stages_train_alike),
    cmocka_unit_test(the_queue_changes_no_bit),
    cmocka_unit_test(not_a_number_on_one_rank_skips_on_all),
    cmocka_unit_test(memory_stays_within_the_plan),
    cmocka_unit_test(idle_memory_goes_back),
};
TEST_MAIN(tests)
