/* AdamW against double precision, clipping, the skip that all ranks share, moving averages, weights
 * that travel as soon as they are updated.
 * ranks: 1 2 3 4 */
#include <math.h>

#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/internal.h"

enum { STEPS = 10, ELEMENTS = 1600 /* of the largest parameter, and more */ };

static float initial(int p, int64_t i) { return 0.01f * (float)((p * 7 + (int)i * 5) % 97 - 48); }
static float gradient(int step, int p, int64_t i) {
  return 0.001f * (float)((step * 31 + p * 11 + (int)i * 3) % 89 - 44);
}

static void set_shards(ZeroPP *z, StateKind kind, int step) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    float *x = zeropp_shard(z, kind, p, &start, &count);
    for (int64_t i = 0; i < count; i++)
      x[i] = kind == STATE_GRAD ? gradient(step, p, start + i) : initial(p, start + i);
  }
  if (kind == STATE_MASTER) zeropp_weights_written(z);
}

static const AdamW adam = {
    .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};

static double reference_norm(int step) {
  double sum = 0;
  for (int p = 0; p < TEST_PARAMS; p++)
    for (int64_t i = 0; i < test_shapes[p].rows * test_shapes[p].width; i++)
      sum += (double)gradient(step, p, i) * (double)gradient(step, p, i);
  return sqrt(sum);
}

typedef struct Reference {
  double w[ELEMENTS], m[ELEMENTS], v[ELEMENTS];
} Reference;

/* PyTorch's AdamW in double, one parameter. */
static void reference_step(Reference *r, int p, int step, double norm, double max_norm) {
  double b1 = (double)adam.beta1, b2 = (double)adam.beta2, lr = (double)adam.lr;
  double clip = max_norm > 0 && max_norm < norm + 1e-6 ? max_norm / (norm + 1e-6) : 1;
  double decay = test_shapes[p].ndim == 2 ? (double)adam.weight_decay : 0;
  for (int64_t i = 0; i < test_shapes[p].rows * test_shapes[p].width; i++) {
    double g = clip * (double)gradient(step, p, i);
    r->w[i] *= 1 - lr * decay;
    r->m[i] = b1 * r->m[i] + (1 - b1) * g;
    r->v[i] = b2 * r->v[i] + (1 - b2) * g * g;
    double m = r->m[i] / (1 - pow(b1, step + 1)), v = r->v[i] / (1 - pow(b2, step + 1));
    r->w[i] -= lr * m / (sqrt(v) + (double)adam.eps);
  }
}

static void check_adamw(int local, float max_norm) {
  static Reference refs[TEST_PARAMS];
  memset(refs, 0, sizeof refs);
  for (int p = 0; p < TEST_PARAMS; p++)
    for (int64_t i = 0; i < ELEMENTS; i++) refs[p].w[i] = (double)initial(p, i);
  TestModel m = test_model(local, true);
  set_shards(m.z, STATE_MASTER, 0);
  for (int step = 0; step < STEPS; step++) {
    uint64_t version = zeropp_version(m.z);
    set_shards(m.z, STATE_GRAD, step);
    StepResult result = zeropp_step(m.z, adam, max_norm);
    double norm = reference_norm(step);
    assert_false(result.skipped);
    assert_true(fabs(result.grad_norm - norm) < 1e-13 * norm); /* both sum 2000 terms in double */
    assert_int_equal(zeropp_steps(m.z), step + 1);
    assert_true(zeropp_version(m.z) > version);
    for (int p = 0; p < TEST_PARAMS; p++) reference_step(&refs[p], p, step, norm, (double)max_norm);
  }
  /* Ten steps of lr 1e-2 from |w| < 0.5: fp32 rounds each at 3e-8, the update itself at 1e-9. */
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    const float *w = zeropp_shard(m.z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++)
      assert_true(fabs((double)w[i] - refs[p].w[start + i]) < 5e-7);
  }
  test_model_free(&m);
}

static void check_unclipped(int local) { check_adamw(local, 0); }
static void check_clipped(int local) { check_adamw(local, 0.3f); }
static void check_not_reached(int local) { check_adamw(local, 1e6f); }

static void adamw_equals_double_precision(void **state) {
  (void)state;
  assert_true(reference_norm(0) > 0.6); /* so that 0.3 clips, in half */
  for_each_grid(check_unclipped);
  for_each_grid(check_clipped);
  for_each_grid(check_not_reached);
}

/* Everything of the model, bit for bit. */
static uint64_t fingerprint(ZeroPP *z) {
  uint64_t h = 14695981039346656037u;
  for (int k = 0; k < STATE_KINDS; k++) {
    if (k == STATE_GRAD || (k == STATE_EMA && !zeropp_has_ema(z))) continue;
    for (int p = 0; p < TEST_PARAMS; p++) {
      int64_t start, count;
      const float *x = zeropp_shard(z, (StateKind)k, p, &start, &count);
      for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        h = (h ^ bits) * 1099511628211u;
      }
    }
  }
  return h;
}

static void check_skip(int local) {
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  TestModel m = test_model(local, true);
  set_shards(m.z, STATE_MASTER, 0);
  set_shards(m.z, STATE_GRAD, 0);
  zeropp_step(m.z, adam, 1);
  for (int owner = 0; owner < m.grid->world; owner++)
    for (int b = 0; b < 3; b++) {
      uint64_t before = fingerprint(m.z), version = zeropp_version(m.z);
      set_shards(m.z, STATE_GRAD, 1);
      int64_t start, count;
      float *g = zeropp_shard(m.z, STATE_GRAD, zeropp_find(m.z, "1.o.weight"), &start, &count);
      if (m.grid->rank == owner) g[count - 1] = bad[b];
      StepResult result = zeropp_step(m.z, adam, 1);
      assert_true(result.skipped);
      assert_true(!isfinite(result.grad_norm));
      assert_true(fingerprint(m.z) == before);
      assert_int_equal(zeropp_version(m.z), version);
      assert_int_equal(zeropp_steps(m.z), 1);
      zeropp_gather_all(m.z); /* nothing is left held or half done */
      zeropp_release_all(m.z);
    }
  set_shards(m.z, STATE_GRAD, 1);
  assert_false(zeropp_step(m.z, adam, 1).skipped);
  assert_int_equal(zeropp_steps(m.z), 2);
  test_model_free(&m);
}

static void not_a_number_on_one_rank_skips_on_all(void **state) {
  (void)state;
  for_each_grid(check_skip);
}

/* One rank's NaN comes in through its own full gradient and the reduction, as in training. */
static void check_reduced_nan(int local) {
  TestModel m = test_model(local, true);
  set_shards(m.z, STATE_MASTER, 0);
  for (int r = 0; r < m.grid->world; r++) {
    uint64_t before = fingerprint(m.z);
    zeropp_zero_grad(m.z);
    zeropp_open_grad(m.z, 3);
    if (m.grid->rank == r) tensor_f32(zeropp_grad(m.z, TEST_PARAMS - 1))[0] = NAN;
    zeropp_reduce(m.z, 3);
    assert_true(zeropp_step(m.z, adam, 0).skipped);
    assert_true(fingerprint(m.z) == before);
  }
  zeropp_zero_grad(m.z); /* forgets it */
  assert_false(zeropp_step(m.z, adam, 0).skipped);
  test_model_free(&m);
}

static void not_a_number_survives_the_reduction(void **state) {
  (void)state;
  for_each_grid(check_reduced_nan);
}

/* The square of 1e30 is beyond fp32: a norm in double still clips it, and the step is not lost. */
static void check_huge(int local) {
  TestModel m = test_model(local, true);
  set_shards(m.z, STATE_MASTER, 0);
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    float *g = zeropp_shard(m.z, STATE_GRAD, p, &start, &count);
    for (int64_t i = 0; i < count; i++) g[i] = 1e30f;
  }
  StepResult result = zeropp_step(m.z, adam, 1);
  double norm = (double)1e30f * sqrt((double)zeropp_numel(m.z));
  assert_false(result.skipped);
  assert_true(fabs(result.grad_norm - norm) < 1e-12 * norm);
  int64_t start, count;
  const float *m1 = zeropp_shard(m.z, STATE_MOMENT1, 0, &start, &count);
  /* 0.1 * 1e30 * (1 / norm), each factor rounded to fp32 */
  double expected = 0.1 / sqrt((double)zeropp_numel(m.z));
  for (int64_t i = 0; i < count; i++) assert_true(fabs((double)m1[i] - expected) < 1e-6 * expected);
  test_model_free(&m);
}

static void huge_gradients_are_clipped_not_lost(void **state) {
  (void)state;
  for_each_grid(check_huge);
}

static void check_ema(int local) {
  TestModel m = test_model(local, true);
  set_shards(m.z, STATE_MASTER, 0);
  assert_false(zeropp_has_ema(m.z));
  zeropp_ema_enable(m.z);
  assert_true(zeropp_has_ema(m.z));
  static double average[TEST_PARAMS][ELEMENTS];
  for (int p = 0; p < TEST_PARAMS; p++)
    for (int64_t i = 0; i < ELEMENTS; i++) average[p][i] = (double)initial(p, i);
  for (int step = 0; step < 4; step++) {
    set_shards(m.z, STATE_GRAD, step);
    zeropp_step(m.z, adam, 0);
    zeropp_ema_update(m.z, 0.75f);
    for (int p = 0; p < TEST_PARAMS; p++) {
      int64_t start, count;
      const float *w = zeropp_shard(m.z, STATE_MASTER, p, &start, &count);
      const float *e = zeropp_shard(m.z, STATE_EMA, p, &start, &count);
      for (int64_t i = 0; i < count; i++) {
        double *a = &average[p][start + i];
        *a = 0.75 * *a + 0.25 * (double)w[i];
        assert_true(fabs((double)e[i] - *a) < 1e-7); /* |w| < 0.6, a few roundings at 3e-8 */
      }
    }
  }
  test_model_free(&m);
}

static void moving_average_follows(void **state) {
  (void)state;
  for_each_grid(check_ema);
}

/* What of a rollout's slices differs from full weights that are gathered behind it. */
static int wrong_slices(ZeroPP *z, float *rows) {
  int wrong = 0;
  zeropp_rollout_begin(z, (ZeroPPRollout){.weights = ROLLOUT_TENSOR_PARALLEL});
  for (int p = 0, at = 0; p < TEST_PARAMS; p++) {
    Tensor here = zeropp_weight(z, p);
    memcpy(rows + at, here.data, tensor_bytes(here));
    at += (int)tensor_numel(here);
  }
  zeropp_rollout_end(z);
  zeropp_gather_all(z);
  for (int p = 0, at = 0; p < TEST_PARAMS; p++) {
    int64_t first = 0, count = test_shapes[p].rows, width = test_shapes[p].width;
    if (test_shapes[p].ndim == 2) /* vectors are there as a whole */
      zeropp_slice_rows(z, p, zeropp_grid(z)->local_rank, &first, &count);
    const float *full = (const float *)zeropp_weight(z, p).data + first * width;
    wrong += memcmp(full, rows + at, (size_t)(count * width) * sizeof *full) != 0;
    at += (int)(count * width);
  }
  zeropp_release_all(z);
  return wrong;
}

/* How many units are on their way; they are the first ones. */
static int under_way(const ZeroPP *z) {
  int n = 0;
  while (n < z->n_units && z->units[n].gather.active) n++;
  for (int u = n; u < z->n_units; u++) assert_false(z->units[u].gather.active);
  return n;
}

/* The first units are under way when a step returns: they bring its weights, to a rollout too, and
 * those that are written then are newer. */
static void check_early_units(int local) {
  static float rows[TEST_PARAMS * ELEMENTS];
  for (int hpz = 0; hpz < 2; hpz++) {
    ZeroPPConfig cfg = {.stage = 3, .trainable = true, .hpz = hpz ? HPZ_ON : HPZ_OFF};
    for (int ahead = 1; ahead < 2 * TEST_UNITS; ahead += 2) {
      cfg.prefetch = ahead;
      TestModel m = test_model_of(local, cfg);
      comm_queue_start();
      set_shards(m.z, STATE_MASTER, 0);
      for (int step = 0; step < 3; step++) {
        set_shards(m.z, STATE_GRAD, step);
        assert_false(zeropp_step(m.z, adam, 0).skipped);
        assert_int_equal(under_way(m.z), launch_world() == 1 ? 0 : ahead == 1 ? 2 : TEST_UNITS);
        if (step == 1) zeropp_weights_written(m.z);
        assert_int_equal(wrong_slices(m.z, rows), 0);
      }
      set_shards(m.z, STATE_GRAD, 3);
      zeropp_step(m.z, adam, 0);
      test_model_free(&m);
      comm_queue_stop();
    }
  }
}

static void a_rollout_behind_a_step_has_its_weights(void **state) {
  (void)state;
  for_each_grid(check_early_units);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(adamw_equals_double_precision),
    cmocka_unit_test(not_a_number_on_one_rank_skips_on_all),
    cmocka_unit_test(not_a_number_survives_the_reduction),
    cmocka_unit_test(huge_gradients_are_clipped_not_lost),
    cmocka_unit_test(moving_average_follows),
    cmocka_unit_test(a_rollout_behind_a_step_has_its_weights),
};
TEST_MAIN(tests)
