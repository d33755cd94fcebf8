/* zeropp.refresh: auto: what each unit's refresh sends, and the weights that come of it: those of
 * refreshes by delta while little changes, those of qwz while much does, bit for bit; one switch
 * where a schedule crosses over; what a state file keeps of it. ranks: 1 2 3 4 6 8 */
#include <math.h>
#include <unistd.h>

#include "core/fs.h"
#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/internal.h"

/* ---- the rule ---- */

/* A unit of 1000 bytes in BF16 and 500 coded. */
static RefreshForm choose(RefreshRule *r, double changes) {
  return refresh_choose(r, (RefreshCosts){changes, 1000, 500, true, true});
}

static void a_unit_pays_for_its_way_back(void **state) {
  (void)state;
  RefreshRule r = {0};
  RefreshCosts first = {.changes = 900, .exact = 1000, .coded = 500};
  assert_int_equal(refresh_choose(&r, first), REFRESH_EXACT);
  assert_int_equal(choose(&r, 499), REFRESH_CHANGES);
  assert_int_equal(choose(&r, 500), REFRESH_CODED);           /* no shorter */
  assert_int_equal(choose(&r, 300), REFRESH_CODED);           /* 200 saved */
  assert_int_equal(choose(&r, 600), REFRESH_CODED);           /* 100 */
  assert_int_equal(choose(&r, 101), REFRESH_CODED);           /* 499 */
  assert_int_equal(refresh_choose(&r, first), REFRESH_CODED); /* nothing known: nothing counted */
  assert_int_equal(choose(&r, 499), REFRESH_EXACT);
  assert_false(r.coded);
  assert_int_equal(choose(&r, 10), REFRESH_CHANGES);
  assert_int_equal(choose(&r, INFINITY), REFRESH_CODED);
  assert_int_equal(choose(&r, 100), REFRESH_CODED);
  assert_int_equal(choose(&r, 9000), REFRESH_CODED); /* never below zero */
  assert_int_equal(r.saved, 0);
  assert_int_equal(choose(&r, 100), REFRESH_CODED);
  assert_int_equal(choose(&r, INFINITY), REFRESH_CODED);
  assert_int_equal(r.saved, 0);
  assert_int_equal(choose(&r, 16), REFRESH_CODED);
  assert_int_equal(choose(&r, 16), REFRESH_EXACT);
}

static void no_dense_form_is_longer_than_exact(void **state) {
  (void)state;
  RefreshRule r = {0};
  RefreshCosts c = {.exact = 1000, .coded = 1500, .known = true, .follows = true};
  c.changes = 1200;
  assert_int_equal(refresh_choose(&r, c), REFRESH_EXACT);
  c.changes = 800;
  assert_int_equal(refresh_choose(&r, c), REFRESH_CHANGES);
  c.follows = false; /* a unit whose replicas missed a version */
  assert_int_equal(refresh_choose(&r, c), REFRESH_EXACT);
  c.follows = true;
  c.coded = c.exact; /* no qwz */
  assert_int_equal(refresh_choose(&r, c), REFRESH_CHANGES);
  c.changes = 1000;
  assert_int_equal(refresh_choose(&r, c), REFRESH_EXACT);
  assert_false(r.coded);
}

/* Changes that go up and down about the length of the coded form: it does not go to and fro. */
static void near_the_crossing_nothing_flickers(void **state) {
  (void)state;
  RefreshRule r = {0};
  int switches = 0;
  for (int i = 0; i < 1000; i++) {
    bool was = r.coded;
    choose(&r, i % 2 ? 600 : 400);
    switches += r.coded != was;
  }
  assert_int_equal(switches, 1);
}

/* ---- a model ---- */

enum { UNITS = 3, PARAMS = 4 };
static const struct {
  int unit, ndim;
  int64_t rows, width;
} shapes[PARAMS] = {{0, 2, 61, 130}, {1, 2, 33, 97}, {1, 1, 801, 1}, {2, 2, 128, 64}};

static const ZeroPPConfig exact = {
    .stage = 3, .trainable = true, .wire = WIRE_BF16, .hpz = HPZ_ON, .block = 32};

static ZeroPPConfig coded_as(WireKind kind) {
  ZeroPPConfig c = exact;
  c.qwz = kind;
  return c;
}

static ZeroPPConfig chosen(WireKind kind) {
  ZeroPPConfig c = coded_as(kind);
  c.refresh = REFRESH_AUTO;
  c.refresh_check = 1;
  return c;
}

typedef struct Rig {
  Device *device;
  Grid *grid;
} Rig;

static Rig rig_open(int local) {
  Error err = {""};
  Rig r = {.device = device_open(DEVICE_CPU, 1, &err)};
  if (!r.device) die("%s", err.msg);
  r.grid = grid_create(local, &err);
  if (!r.grid) die("%s", err.msg);
  return r;
}

static void rig_close(Rig *r) {
  if (device_bytes(r->device)) die("%zu bytes were not given back", device_bytes(r->device));
  grid_free(r->grid);
  device_close(r->device);
}

static ZeroPP *model(const Rig *r, ZeroPPConfig cfg) {
  ParamSpec specs[PARAMS];
  for (int p = 0; p < PARAMS; p++) {
    specs[p] = (ParamSpec){.unit = shapes[p].unit,
                           .ndim = shapes[p].ndim,
                           .dim = {shapes[p].rows, shapes[p].width},
                           .init_std = 0.02f};
    snprintf(specs[p].name, sizeof specs[p].name, "%d", p);
  }
  ZeroPP *z = zeropp_create(r->device, r->grid, &cfg, specs, PARAMS);
  zeropp_init_random(z, 5);
  return z;
}

/* Every weight moves by about the rate. */
static void step(ZeroPP *z, int number, double lr) {
  for (int p = 0; p < PARAMS; p++) {
    int64_t start, count;
    float *g = zeropp_shard(z, STATE_GRAD, p, &start, &count);
    for (int64_t i = 0; i < count; i++)
      g[i] = (number + p + (int)(start + i) * 3) % 5 < 2 ? 0.01f : -0.01f;
    zeropp_shard_written(z, STATE_GRAD, p);
  }
  AdamW adam = {.lr = (float)lr, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
  assert_false(zeropp_step(z, adam, 0).skipped);
}

/* Whether a unit's full weights are the same bits, on all ranks. */
static bool same_unit(ZeroPP *a, ZeroPP *b, int unit) {
  double differ = 0;
  zeropp_gather(a, unit);
  zeropp_gather(b, unit);
  for (int p = 0; p < PARAMS; p++) {
    if (shapes[p].unit != unit) continue;
    Tensor x = zeropp_weight(a, p), y = zeropp_weight(b, p);
    if (memcmp(x.data, y.data, tensor_bytes(x)) != 0) differ = 1;
  }
  zeropp_release(a, unit);
  zeropp_release(b, unit);
  comm_all_reduce_f64(zeropp_grid(a)->all, &differ, 1, true);
  return differ == 0;
}

static bool same(ZeroPP *a, ZeroPP *b) {
  int n = 0;
  for (int u = 0; u < UNITS; u++) n += same_unit(a, b, u);
  return n == UNITS;
}

/* ---- runs ---- */

typedef struct Three {
  ZeroPP *automatic, *exact, *coded;
} Three;

static Three three(const Rig *r, WireKind kind) {
  return (Three){model(r, chosen(kind)), model(r, exact), model(r, coded_as(kind))};
}

static void three_free(Three *t) {
  zeropp_destroy(t->automatic);
  zeropp_destroy(t->exact);
  zeropp_destroy(t->coded);
}

static void step_three(Three *t, int number, double lr) {
  step(t->automatic, number, lr);
  step(t->exact, number, lr);
  step(t->coded, number, lr);
}

static void check_small(int local) {
  Rig r = rig_open(local);
  Three t = three(&r, WIRE_INT8);
  assert_true(same(t.automatic, t.exact));
  for (int s = 0; s < 4; s++) {
    step_three(&t, s, 1e-6);
    assert_true(same(t.automatic, t.exact));
    assert_false(same(t.automatic, t.coded));
  }
  ZeroPPRefresh x = zeropp_refreshed(t.automatic);
  if (r.grid->nodes > 1) {
    assert_int_equal(x.dense_units, UNITS); /* once */
    assert_int_equal(x.delta_units, 4 * UNITS);
    assert_true(x.bytes < x.dense_bytes / 2);
  }
  three_free(&t);
  rig_close(&r);
}

static void small_steps_are_those_of_delta(void **state) {
  (void)state;
  for_each_grid(check_small);
  comm_queue_start();
  for_each_grid(check_small);
  comm_queue_stop();
}

/* On one node nothing is coded, whatever the rate. */
static void check_large(int local) {
  static const WireKind kinds[] = {WIRE_INT8, WIRE_FP8};
  for (int k = 0; k < 2; k++) {
    Rig r = rig_open(local);
    Three t = three(&r, kinds[k]);
    assert_true(same(t.automatic, t.exact));
    uint64_t first = zeropp_refreshed(t.automatic).bytes;
    for (int s = 0; s < 4; s++) {
      step_three(&t, s, 1e-2);
      assert_true(same(t.automatic, r.grid->nodes > 1 ? t.coded : t.exact));
    }
    ZeroPPRefresh x = zeropp_refreshed(t.automatic);
    assert_int_equal(x.delta_units, 0);
    if (r.grid->nodes > 1) assert_true(x.bytes - first < x.dense_bytes * 4 / 5 * 3 / 5);
    three_free(&t);
    rig_close(&r);
  }
}

static void large_steps_are_those_of_qwz(void **state) {
  (void)state;
  for_each_grid(check_large);
}

/* Without qwz the dense form is BF16: exact whatever happens. */
static void check_bf16(int local) {
  static const double rates[] = {1e-6, 1e-2, 1e-6, 3e-4, 1e-6};
  Rig r = rig_open(local);
  ZeroPP *a = model(&r, chosen(WIRE_F32)), *b = model(&r, exact);
  ZeroPPRefresh before = zeropp_refreshed(a);
  assert_true(same(a, b));
  for (int s = 0; s < 5; s++) {
    step(a, s, rates[s]);
    step(b, s, rates[s]);
    assert_true(same(a, b));
    ZeroPPRefresh x = zeropp_refreshed(a);
    uint64_t deltas = x.delta_units - before.delta_units;
    if (r.grid->nodes > 1) assert_int_equal(deltas, rates[s] == 1e-2 ? 0 : UNITS);
    before = x;
  }
  zeropp_destroy(a);
  zeropp_destroy(b);
  rig_close(&r);
}

static void without_qwz_the_dense_form_is_exact(void **state) {
  (void)state;
  for_each_grid(check_bf16);
}

/* A schedule that falls: every unit is exact once more, and once only. */
static void check_crossing(int local) {
  enum { STEPS = 14 };
  Rig r = rig_open(local);
  if (r.grid->nodes > 1) {
    Three t = three(&r, WIRE_INT8);
    bool was_coded[UNITS];
    int switches[UNITS] = {0};
    same(t.automatic, t.exact);
    for (int s = 0; s < STEPS; s++) {
      step_three(&t, s, 1e-2 * pow(10, -0.5 * s));
      for (int u = 0; u < UNITS; u++) {
        bool as_exact = same_unit(t.automatic, t.exact, u);
        bool as_coded = same_unit(t.automatic, t.coded, u);
        assert_true(as_exact != as_coded);
        if (s > 0) switches[u] += as_coded != was_coded[u];
        was_coded[u] = as_coded;
        if (s == 0) assert_true(as_coded);
        if (s == STEPS - 1) assert_true(as_exact);
      }
    }
    for (int u = 0; u < UNITS; u++) assert_int_equal(switches[u], 1);
    three_free(&t);
  }
  rig_close(&r);
}

static void a_falling_rate_switches_once(void **state) {
  (void)state;
  for_each_grid(check_crossing);
}

/* ---- writes that are no steps, and the state ---- */

static void check_write(int local) {
  Rig r = rig_open(local);
  Three t = three(&r, WIRE_INT8);
  same(t.automatic, t.exact);
  step_three(&t, 0, 1e-6);
  same(t.automatic, t.exact);
  ZeroPPRefresh before = zeropp_refreshed(t.automatic);
  zeropp_init_random(t.automatic, 9);
  zeropp_init_random(t.exact, 9);
  assert_true(same(t.automatic, t.exact));
  ZeroPPRefresh after = zeropp_refreshed(t.automatic);
  if (r.grid->nodes > 1) assert_int_equal(after.dense_units - before.dense_units, UNITS);
  zeropp_init_random(t.coded, 9);
  zeropp_copy_weights(t.automatic, t.coded); /* the same weights: nobody may know */
  assert_true(same(t.automatic, t.exact));
  before = zeropp_refreshed(t.automatic);
  if (r.grid->nodes > 1) assert_int_equal(before.dense_units - after.dense_units, UNITS);
  three_free(&t);
  rig_close(&r);
}

static void another_write_goes_dense_once(void **state) {
  (void)state;
  for_each_grid(check_write);
}

static int load(ZeroPP *z, const char *path, Error *err) {
  int rc = zeropp_load_state(z, path, err);
  comm_barrier(zeropp_grid(z)->all);
  return rc;
}

/* Saved while coded with something saved already, on the step that switches, and exact: what
 * follows is the same in a model that reads the file. */
static void check_resume(int local) {
  static const double rates[] = {1e-2, 1e-2, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-2, 1e-2};
  enum { STEPS = sizeof rates / sizeof *rates };
  char *path = fs_join(test_tmp(), "refresh");
  Rig r = rig_open(local);
  for (int at = 1; at < STEPS - 1; at++) {
    ZeroPP *a = model(&r, chosen(WIRE_INT8)), *b = model(&r, chosen(WIRE_INT8));
    zeropp_gather_all(a);
    zeropp_release_all(a);
    for (int s = 0; s < STEPS; s++) {
      step(a, s, rates[s]);
      if (s == at) {
        Error err = {""};
        if (zeropp_save_state(a, path, &err) || load(b, path, &err)) die("%s", err.msg);
      }
      if (s > at) step(b, s, rates[s]);
      if (s < at) {
        zeropp_gather_all(a);
        zeropp_release_all(a);
      } else {
        assert_true(same(a, b));
      }
    }
    zeropp_destroy(a);
    zeropp_destroy(b);
  }
  rig_close(&r);
  free(path);
}

static void a_resumed_run_goes_on_with_its_forms(void **state) {
  (void)state;
  for_each_grid(check_resume);
}

/* A file of another mode starts as a new run does; one of another model is refused. */
static void check_files(int local) {
  char *path = fs_join(test_tmp(), "forms");
  Rig r = rig_open(local);
  if (r.grid->nodes > 1) {
    Error err = {""};
    ZeroPP *a = model(&r, chosen(WIRE_INT8)), *b = model(&r, exact);
    if (zeropp_save_state(b, path, &err)) die("%s", err.msg);
    comm_barrier(r.grid->all);
    delta_rules(a)[1] = (RefreshRule){true, 8};
    if (load(a, path, &err)) die("%s", err.msg);
    assert_false(delta_rules(a)[1].coded);
    delta_rules(a)[1] = (RefreshRule){true, 8};
    if (zeropp_save_state(a, path, &err)) die("%s", err.msg);
    comm_barrier(r.grid->all);
    if (load(b, path, &err)) die("%s", err.msg); /* of no use there */
    delta_rules(a)[1] = delta_rules(a)[2] = (RefreshRule){0};
    if (load(a, path, &err)) die("%s", err.msg);
    assert_true(delta_rules(a)[1].coded && delta_rules(a)[1].saved == 8);
    assert_false(delta_rules(a)[0].coded || delta_rules(a)[2].coded);
    delta_rules(a)[1].saved = -8; /* what no run writes */
    if (zeropp_save_state(a, path, &err)) die("%s", err.msg);
    comm_barrier(r.grid->all);
    assert_int_equal(load(a, path, &err), -1);
    assert_non_null(strstr(err.msg, "zeropp/refresh [1]: found -2, expected -1 or more"));
    zeropp_destroy(a);
    zeropp_destroy(b);
  }
  rig_close(&r);
  free(path);
}

static void forms_of_other_runs(void **state) {
  (void)state;
  for_each_grid(check_files);
}

/* ---- one choice ---- */

/* Where one rank of a node has all the changes and the others none, all of them choose the same:
 * each alone would choose otherwise. */
static void check_one_choice(int local) {
  Rig r = rig_open(local);
  ZeroPP *z = model(&r, chosen(WIRE_INT8));
  for (int s = 0; s < 4; s++) {
    for (int u = 0; u < UNITS; u++) {
      zeropp_gather(z, u);
      zeropp_release(z, u);
    }
    step(z, s, r.grid->local_rank == 0 ? 1e-2 : 1e-9);
    double most = (double)zeropp_refreshed(z).dense_units, least = -most;
    comm_all_reduce_f64(r.grid->all, &most, 1, true);
    comm_all_reduce_f64(r.grid->all, &least, 1, true);
    assert_true(most == -least);
  }
  zeropp_destroy(z);
  rig_close(&r);
}

static void ranks_of_a_node_choose_together(void **state) {
  (void)state;
  for_each_grid(check_one_choice);
}

/* ---- memory ---- */

/* Through both forms and the way back, nothing is beyond the plan. */
static void check_memory(int local) {
  static const double rates[] = {1e-6, 1e-2, 1e-2, 1e-6, 1e-6, 1e-6, 3e-4};
  Rig r = rig_open(local);
  ZeroPPConfig cfg = chosen(WIRE_INT8);
  ZeroPP *z = model(&r, cfg);
  ZeroPPMemory m = zeropp_memory(&cfg, z->specs, PARAMS, r.grid->nodes, local, false);
  size_t plan = m.master + m.moments + m.gradients + m.full_units + m.secondary + m.errors;
  device_reset_peak(r.device);
  for (int s = 0; s < (int)(sizeof rates / sizeof *rates); s++) {
    step(z, s, rates[s]);
    for (int u = 0; u < UNITS; u++) {
      zeropp_gather(z, u);
      zeropp_release(z, u);
    }
  }
  assert_true(device_peak_bytes(r.device) <= plan);
  zeropp_destroy(z);
  rig_close(&r);
}

static void both_forms_fit_the_plan(void **state) {
  (void)state;
  for_each_grid(check_memory);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(a_unit_pays_for_its_way_back),
    cmocka_unit_test(no_dense_form_is_longer_than_exact),
    cmocka_unit_test(near_the_crossing_nothing_flickers),
    cmocka_unit_test(small_steps_are_those_of_delta),
    cmocka_unit_test(large_steps_are_those_of_qwz),
    cmocka_unit_test(without_qwz_the_dense_form_is_exact),
    cmocka_unit_test(a_falling_rate_switches_once),
    cmocka_unit_test(another_write_goes_dense_once),
    cmocka_unit_test(a_resumed_run_goes_on_with_its_forms),
    cmocka_unit_test(forms_of_other_runs),
    cmocka_unit_test(ranks_of_a_node_choose_together),
    cmocka_unit_test(both_forms_fit_the_plan),
};
TEST_MAIN(tests)
