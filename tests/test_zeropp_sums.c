/* ZeRO++: every switch alone and together, for every way to part the ranks: sums are exact where
 * the codes are, and what crosses nodes is what the paper says. ranks: 1 2 3 4 6 8 */
#include <math.h>

#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/zeropp.h"

/* ---- sums ---- */

/* Whole numbers that the codes hold exactly: every block has one at the end of their range, and
 * ranks send multiples of it. Sums over ranks and micro-batches are multiples too. */
static float pattern(const ZeroPPConfig *c, int p, int64_t i) {
  int most = c->qgz == WIRE_INT8 ? 127 : 7;
  int64_t n = test_shapes[p].rows * test_shapes[p].width;
  int64_t column = i % (test_shapes[p].ndim == 2 ? test_shapes[p].width : n);
  int sign = (p + (int)i) % 3 == 0 ? -1 : 1;
  if (column % c->block == 0) return (float)(sign * most);
  return (float)(sign * (int)((p * 5 + i * 3) % (most + 1)));
}
static int share(int rank, int micro) { return 1 + (rank + micro) % 2; }

static bool only_some; /* gradients of most parameters are never asked for */
static bool has_gradient(int p) { return !only_some || (p % 3 == 0 && test_shapes[p].unit != 2); }

static void add_pattern(TestModel *m, int unit, int micro) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    if (test_shapes[p].unit != unit || !has_gradient(p)) continue;
    Tensor g = zeropp_grad(m->z, p);
    for (int64_t i = 0; i < tensor_numel(g); i++)
      tensor_f32(g)[i] += (float)share(m->grid->rank, micro) * pattern(&mode->cfg, p, i);
  }
}

static void micro_batch(TestModel *m, int micro) {
  for (int u = TEST_UNITS - 1; u >= 0; u--) {
    if (only_some && u == 2) continue; /* and this unit's not opened */
    zeropp_open_grad(m->z, u);
    add_pattern(m, u, micro);
    zeropp_reduce(m->z, u);
  }
}

static void assert_sums(TestModel *m, int micros) {
  int factor = 0;
  for (int r = 0; r < m->grid->world; r++)
    for (int b = 0; b < micros; b++) factor += share(r, b);
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    const float *g = zeropp_shard(m->z, STATE_GRAD, p, &start, &count);
    for (int64_t i = 0; i < count; i++)
      check_true(g[i] == (has_gradient(p) ? (float)factor : 0) * pattern(&mode->cfg, p, start + i));
  }
}

static void check_sums(int local) {
  TestModel m = test_model_of(local, mode->cfg);
  test_fill(m.z, STATE_MASTER);
  micro_batch(&m, 0); /* thrown away */
  zeropp_zero_grad(m.z);
  micro_batch(&m, 0);
  micro_batch(&m, 1);
  assert_sums(&m, 2);
  micro_batch(&m, 2); /* on top of what was summed */
  assert_sums(&m, 3);
  zeropp_zero_grad(m.z);
  micro_batch(&m, 0);
  zeropp_last_micro(m.z);
  micro_batch(&m, 1);
  micro_batch(&m, 2); /* after all */
  assert_sums(&m, 3);
  only_some = true; /* what nobody adds to is zero, whatever was there before */
  zeropp_zero_grad(m.z);
  micro_batch(&m, 0);
  micro_batch(&m, 1);
  assert_sums(&m, 2);
  zeropp_zero_grad(m.z);
  assert_sums(&m, 0);
  only_some = false;
  test_model_free(&m);
}

static void sums_have_the_exact_scale(void **state) {
  (void)state;
  for_each_mode(check_sums);
}

/* ---- traffic ---- */

static const AdamW adam = {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};

enum { BIG_UNITS = 4, BIG_ROWS = 96, BIG_WIDTH = 512 };

static ZeroPP *big_model(TestModel *m, ZeroPPConfig cfg) {
  ParamSpec specs[BIG_UNITS];
  for (int u = 0; u < BIG_UNITS; u++) {
    specs[u] = (ParamSpec){.unit = u, .ndim = 2, .dim = {BIG_ROWS, BIG_WIDTH}, .init_std = 0.02f};
    snprintf(specs[u].name, sizeof specs[u].name, "%d.weight", u);
  }
  cfg.trainable = true;
  ZeroPP *z = zeropp_create(m->device, m->grid, &cfg, specs, BIG_UNITS);
  zeropp_init_random(z, 1);
  return z;
}

/* Bytes that entered nodes in a step of k micro-batches, as the paper counts: over (nodes - 1) /
 * nodes, in units of 2 bytes x parameters, for one node. */
static double step_traffic(TestModel *m, ZeroPPConfig cfg, int k) {
  ZeroPP *z = big_model(m, cfg);
  double nodes = m->grid->nodes, bytes = 0;
  for (int step = 0; step < 2; step++) { /* the second one: a secondary is there, and stale */
    uint64_t before = test_crossed();
    zeropp_zero_grad(z);
    for (int b = 0; b < k; b++) {
      for (int u = 0; u < BIG_UNITS; u++) {
        zeropp_gather(z, u);
        zeropp_release(z, u);
      }
      for (int u = BIG_UNITS - 1; u >= 0; u--) {
        zeropp_gather(z, u);
        zeropp_open_grad(z, u);
        tensor_f32(zeropp_grad(z, u))[m->grid->rank] = 1;
        zeropp_reduce(z, u);
        zeropp_release(z, u);
      }
    }
    zeropp_step(z, adam, 1);
    bytes = (double)(test_crossed() - before);
  }
  comm_all_reduce_f64(m->grid->all, &bytes, 1, false);
  double params = (double)zeropp_numel(z);
  zeropp_destroy(z);
  return nodes > 1 ? bytes / nodes / ((nodes - 1) / nodes) / (2 * params) : 0;
}

static void check_traffic(int local) {
  if (local == launch_world() && local > 1) return; /* one node: nothing crosses */
  TestModel m = test_model(local, true);
  const ZeroPPConfig plain = {.stage = 3, .wire = WIRE_BF16};
  ZeroPPConfig all = {.stage = 3,
                      .wire = WIRE_BF16,
                      .qwz = WIRE_INT8,
                      .hpz = HPZ_ON,
                      .qgz = WIRE_INT4,
                      .accumulate_node = true};
  ZeroPPConfig qwz = plain, hpz = plain, qgz = plain;
  qwz.qwz = WIRE_INT8;
  hpz.hpz = HPZ_ON;
  qgz.qgz = WIRE_INT4;
  double one = m.grid->nodes > 1;
  /* The norm's all-reduce is 8 bytes a rank: below 0.001 M here. */
  assert_true(fabs(step_traffic(&m, plain, 1) - 3 * one) < 0.002);
  assert_true(fabs(step_traffic(&m, plain, 2) - 6 * one) < 0.002);
  assert_true(fabs(step_traffic(&m, hpz, 1) - 2 * one) < 0.002);
  assert_true(step_traffic(&m, qwz, 1) < 2.02 * one + 0.002);
  assert_true(step_traffic(&m, qgz, 1) < 2.27 * one + 0.002);
  double once = step_traffic(&m, all, 1);
  assert_true(once <= 0.78 * one);
  assert_true(once >= 0.75 * one);
  assert_true(step_traffic(&m, all, 3) == once);
  test_model_free(&m);
}

static void traffic_between_nodes_is_the_papers(void **state) {
  (void)state;
  for_each_grid(check_traffic);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(sums_have_the_exact_scale),
    cmocka_unit_test(traffic_between_nodes_is_the_papers),
};
TEST_MAIN(tests)
