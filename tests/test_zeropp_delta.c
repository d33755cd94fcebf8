/* Refreshes by delta: the weights of dense refreshes, bit for bit, whatever changed and whatever
 * was gathered in between; what crosses nodes; copies that differ are found. ranks: 1 2 3 4 6 */
#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/internal.h"

static const ZeroPPConfig dense = {
    .stage = 3, .trainable = true, .wire = WIRE_BF16, .hpz = HPZ_ON, .block = 4};

static ZeroPPConfig by_delta(void) {
  ZeroPPConfig c = dense;
  c.refresh = REFRESH_DELTA;
  c.refresh_check = 2;
  return c;
}

static float weight_of(int p, int64_t i) {
  return 0.01f * (float)((p * 37 + (int)i * 29) % 199 - 99) + 0.001f * (float)(i % 7);
}

static void set_weights(ZeroPP *z, float offset) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    float *x = zeropp_shard(z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++) x[i] = weight_of(p, start + i) + offset;
    zeropp_shard_written(z, STATE_MASTER, p);
  }
  zeropp_weights_written(z);
}

static void step(ZeroPP *z, int number, double lr) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    float *g = zeropp_shard(z, STATE_GRAD, p, &start, &count);
    for (int64_t i = 0; i < count; i++)
      g[i] = 0.01f * (float)((p + number * 7 + (int)(start + i) * 3) % 13 - 6);
    zeropp_shard_written(z, STATE_GRAD, p);
  }
  AdamW adam = {.lr = (float)lr, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
  assert_false(zeropp_step(z, adam, 1).skipped);
}

static void compare_unit(ZeroPP *a, ZeroPP *b, int unit) {
  zeropp_gather(a, unit);
  zeropp_gather(b, unit);
  for (int p = 0; p < TEST_PARAMS; p++) {
    if (test_shapes[p].unit != unit) continue;
    Tensor x = zeropp_weight(a, p), y = zeropp_weight(b, p);
    assert_memory_equal(x.data, y.data, tensor_bytes(x));
  }
  zeropp_release(a, unit);
  zeropp_release(b, unit);
}

/* Steps of all sizes; in some versions a unit is not gathered, in some none, one is written anew.
 */
static void check_bits(int local) {
  static const double rates[] = {1e-6, 1e-6, 1e-4, 1e-2, 0, 1e-5, 1e-6, 3e-3, 1e-6, 1e-6, 1e-6};
  TestModel a = test_model_of(local, dense), b = test_model_of(local, by_delta());
  set_weights(a.z, 0);
  set_weights(b.z, 0);
  for (int u = 0; u < TEST_UNITS; u++) compare_unit(a.z, b.z, u);
  for (int s = 0; s < (int)(sizeof rates / sizeof *rates); s++) {
    step(a.z, s, rates[s]);
    step(b.z, s, rates[s]);
    if (s == 5) set_weights(a.z, 0.25f), set_weights(b.z, 0.25f);
    if (s == 8) continue;
    if (s % 2) zeropp_prefetch(b.z, TEST_UNITS - 1);
    for (int u = 0; u < TEST_UNITS; u++)
      if (s % 3 != 1 || u != 2) compare_unit(a.z, b.z, u);
  }
  for (int u = 0; u < TEST_UNITS; u++) compare_unit(a.z, b.z, u);
  test_model_free(&a);
  test_model_free(&b);
}

static void weights_are_those_of_dense_refreshes(void **state) {
  (void)state;
  for_each_grid(check_bits);
  comm_queue_start();
  for_each_grid(check_bits);
  comm_queue_stop();
}

static uint64_t refresh_bytes(ZeroPP *z, int number, double lr) {
  step(z, number, lr);
  uint64_t before = test_crossed();
  zeropp_gather_all(z);
  zeropp_release_all(z);
  return test_crossed() - before;
}

/* This rank's weights in BF16, one after the other, to `bits`; how many differ from what was there.
 */
static uint64_t take_bits(ZeroPP *z, uint16_t *bits) {
  uint64_t differ = 0;
  for (int p = 0; p < zeropp_n_params(z); p++) {
    int64_t start, count;
    const float *w = zeropp_shard(z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++, bits++) {
      uint16_t now;
      assert_int_equal(convert_from_f32(w + i, &now, DT_BF16, 1), 0);
      differ += now != *bits;
      *bits = now;
    }
  }
  return differ;
}

/* 100 thousand weights a unit. A rank receives its slice from other nodes but for its own piece;
 * the sizes of streams go round besides, 8 bytes for each unit. */
static void check_traffic(int local) {
  if (local == launch_world()) return;
  enum { UNITS = 3, ROWS = 240, WIDTH = 400 };
  TestModel m = test_model(local, true);
  ParamSpec specs[UNITS];
  for (int u = 0; u < UNITS; u++) {
    specs[u] = (ParamSpec){.unit = u, .ndim = 2, .dim = {ROWS, WIDTH}, .init_std = 0.02f};
    snprintf(specs[u].name, sizeof specs[u].name, "%d", u);
  }
  ZeroPPConfig cfg = by_delta();
  cfg.refresh_check = 0;
  cfg.block = 256;
  ZeroPP *z = zeropp_create(m.device, m.grid, &cfg, specs, UNITS);
  zeropp_init_random(z, 3);
  zeropp_gather_all(z);
  zeropp_release_all(z);
  AdamW adam = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
  uint64_t whole = 0, sizes = (uint64_t)(m.grid->nodes - 1) * UNITS * 8;
  static const double rates[] = {1e-6, 1e-6, 1e-1};
  uint16_t *bits = mem_zalloc((size_t)UNITS * ROWS * WIDTH, sizeof *bits);
  take_bits(z, bits);
  for (int s = 0; s < 3; s++) {
    zeropp_zero_grad(z);
    for (int u = 0; u < UNITS; u++) {
      zeropp_open_grad(z, u);
      Tensor g = zeropp_grad(z, u);
      for (int64_t i = 0; i < tensor_numel(g); i++) tensor_f32(g)[i] = i * 7 % 13 < 6 ? 1 : -1;
      zeropp_reduce(z, u);
    }
    adam.lr = (float)rates[s];
    ZeroPPRefresh r0 = zeropp_refreshed(z);
    zeropp_step(z, adam, 1);
    uint64_t differ = take_bits(z, bits), before = test_crossed();
    zeropp_gather_all(z);
    zeropp_release_all(z);
    uint64_t crossed = test_crossed() - before;
    ZeroPPRefresh r = zeropp_refreshed(z);
    assert_int_equal(r.changed - r0.changed, differ);
    double share = (double)(r.changed - r0.changed) / (double)(r.weights - r0.weights);
    uint64_t sent = r.bytes - r0.bytes, dense_bytes = r.dense_bytes - r0.dense_bytes;
    whole = dense_bytes;
    /* Two scales of 256 numbers to a row of 400; a piece may end within a row. */
    uint64_t as_int8 = r.int8_bytes - r0.int8_bytes, own = dense_bytes / 2;
    uint64_t least = own + own * 2 / WIDTH * 4;
    assert_true(as_int8 >= least && as_int8 <= least + (uint64_t)UNITS * 8);
    assert_true(rates[s] > 1e-2 ? share > 0.9 : share > 0.01 && share < 0.1);
    assert_true(rates[s] > 1e-2 ? sent == whole : sent < whole / 10);
    if (m.grid->nodes == 2 && local * 2 == launch_world() && ROWS % launch_world() == 0)
      assert_true(rates[s] > 1e-2 ? crossed == whole + sizes : crossed < whole / 10 + sizes);
  }
  free(bits);
  zeropp_destroy(z);
  test_model_free(&m);
}

static void few_bytes_cross_nodes(void **state) {
  (void)state;
  for_each_grid(check_traffic);
}

/* One bit of one rank's copy. */
static void check_mismatch(int local) {
  TestModel m = test_model_of(local, by_delta());
  set_weights(m.z, 0);
  refresh_bytes(m.z, 0, 1e-6);
  bool on = delta_is_on(m.z);
  assert_true(on == (m.grid->nodes > 1));
  if (on) {
    assert_int_equal(delta_mismatch(m.z).unit, -1);
    const Unit *u = &m.z->units[2];
    bool damaged = m.grid->node == m.grid->nodes - 1 && u->slice_numel > 0;
    if (damaged) u->secondary[0] ^= 1; /* of the piece that the first node owns */
    DeltaMismatch found = delta_mismatch(m.z);
    assert_int_equal(found.unit, u->slice_numel > 0 ? 2 : -1);
    if (found.unit == 2) {
      assert_int_equal(found.owner, m.grid->local_rank);
      assert_int_equal(found.holder, launch_world() - local + m.grid->local_rank);
    }
    if (damaged) u->secondary[0] ^= 1;
    assert_int_equal(delta_mismatch(m.z).unit, -1);
  }
  test_model_free(&m);
}

static void copies_that_differ_are_found(void **state) {
  (void)state;
  for_each_grid(check_mismatch);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(weights_are_those_of_dense_refreshes),
    cmocka_unit_test(few_bytes_cross_nodes),
    cmocka_unit_test(copies_that_differ_are_found),
};
TEST_MAIN(tests)
