/* Gather, release, reduce: exact values, bytes, and memory, for every way to part the ranks.
 * ranks: 1 2 3 4 */
#include "core/rng.h"
#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/zeropp.h"

static int64_t shape_numel(int p) { return test_shapes[p].rows * test_shapes[p].width; }

static void check_shards(int local) {
  TestModel m = test_model(local, true);
  int64_t total = 0;
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count, lstart, lcount;
    layout_owned(zeropp_spec(m.z, p), m.grid->nodes, local, m.grid->node, m.grid->local_rank,
                 &lstart, &lcount);
    for (int k = 0; k < STATE_EMA; k++) {
      const float *x = zeropp_shard(m.z, (StateKind)k, p, &start, &count);
      assert_int_equal(start, lstart);
      assert_int_equal(count, lcount);
      assert_int_equal(x != NULL, count > 0);
      for (int64_t i = 0; x && i < count && k != STATE_MASTER; i++) assert_true(x[i] == 0);
    }
    assert_int_equal(zeropp_find(m.z, test_shapes[p].name), p);
    total += shape_numel(p);
  }
  assert_int_equal(zeropp_find(m.z, "no.such.weight"), -1);
  assert_int_equal(zeropp_numel(m.z), total);
  assert_int_equal(zeropp_n_params(m.z), TEST_PARAMS);
  assert_int_equal(zeropp_n_units(m.z), TEST_UNITS);
  test_model_free(&m);
}

static void shards_are_what_the_layout_says(void **state) {
  (void)state;
  for_each_grid(check_shards);
}

static void assert_weights(const ZeroPP *z, int unit, float offset) {
  const float *first = NULL, *end = NULL;
  for (int p = 0; p < TEST_PARAMS; p++) {
    if (test_shapes[p].unit != unit) continue;
    Tensor w = zeropp_weight(z, p);
    const float *x = tensor_f32(w);
    assert_int_equal(w.dtype, DT_F32);
    assert_int_equal(w.ndim, test_shapes[p].ndim);
    assert_int_equal(w.dim[0], test_shapes[p].rows);
    assert_int_equal(w.dim[1], test_shapes[p].width);
    for (int64_t i = 0; i < shape_numel(p); i++)
      assert_true(x[i] == test_value(STATE_MASTER, p, i) + offset);
    if (test_shapes[p].joined) assert_ptr_equal(x, end);
    if (!test_shapes[p].joined && end) assert_int_equal((x - first) % 32, 0); /* 128 bytes */
    if (!end) first = x;
    end = x + shape_numel(p);
  }
}

static void check_gather(int local) {
  TestModel m = test_model(local, false);
  test_fill(m.z, STATE_MASTER);
  for (int round = 0; round < 2; round++) /* the second time in buffers that were used before */
    for (int u = TEST_UNITS - 1; u >= 0; u--) {
      zeropp_gather(m.z, u);
      assert_weights(m.z, u, 0);
      zeropp_release(m.z, u);
    }
  zeropp_gather_all(m.z);
  for (int u = 0; u < TEST_UNITS; u++) assert_weights(m.z, u, 0);
  int q = zeropp_find(m.z, "0.q.weight"), b = zeropp_find(m.z, "0.q.bias");
  Tensor qkv = zeropp_weight_joined(m.z, q, 3), bias = zeropp_weight_joined(m.z, b, 3);
  assert_true(qkv.ndim == 2 && qkv.dim[0] == 11 && qkv.dim[1] == 6);
  assert_true(bias.ndim == 1 && bias.dim[0] == 11);
  assert_true(tensor_f32(qkv)[8 * 6 + 1] == test_value(STATE_MASTER, q + 2, 1)); /* row 0 of v */
  assert_true(tensor_f32(bias)[5] == test_value(STATE_MASTER, b + 1, 0));
  zeropp_release_all(m.z);
  test_model_free(&m);
}

static void gather_returns_the_masters(void **state) {
  (void)state;
  for_each_grid(check_gather);
}

static void check_random(int local) {
  TestModel m = test_model(local, false), other = test_model(local, false);
  zeropp_init_random(m.z, 77);
  zeropp_init_random(other.z, 78);
  zeropp_gather_all(m.z);
  zeropp_gather_all(other.z);
  int differ = 0;
  for (int p = 0; p < TEST_PARAMS; p++) {
    const float *x = tensor_f32(zeropp_weight(m.z, p)), *y = tensor_f32(zeropp_weight(other.z, p));
    uint64_t stream = rng_hash(test_shapes[p].name);
    for (int64_t i = 0; i < shape_numel(p); i++) {
      float normal = 0.5f * rng_normal(77, stream, (uint64_t)i);
      assert_true(x[i] == (test_shapes[p].ndim == 2 ? normal : 1));
      differ += x[i] != y[i];
    }
  }
  assert_true(differ > 1000);
  zeropp_release_all(m.z);
  zeropp_release_all(other.z);
  test_model_free(&m);
  test_model_free(&other);
}

static void random_weights_do_not_depend_on_ranks(void **state) {
  (void)state;
  for_each_grid(check_random);
}

static void check_repeated(int local) {
  TestModel m = test_model(local, false);
  const float x[7] = {3, 1, 4, 1.5F, 9, 2, 6};
  for (int p = 0; p < TEST_PARAMS; p++) zeropp_init_repeated(m.z, p, x, 1 + p % 7);
  zeropp_weights_written(m.z);
  zeropp_gather_all(m.z);
  for (int p = 0; p < TEST_PARAMS; p++)
    for (int64_t i = 0; i < shape_numel(p); i++)
      assert_true(tensor_f32(zeropp_weight(m.z, p))[i] == x[i % (1 + p % 7)]);
  zeropp_release_all(m.z);
  test_model_free(&m);
}

static void repeated_weights_do_not_depend_on_ranks(void **state) {
  (void)state;
  for_each_grid(check_repeated);
}

static void check_stale(int local) {
  TestModel m = test_model(local, true), copy = test_model(local, false);
  test_fill(m.z, STATE_MASTER);
  uint64_t version = zeropp_version(m.z);
  zeropp_gather_all(m.z);
  zeropp_release_all(m.z);
  assert_int_equal(zeropp_version(m.z), version);
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    float *x = zeropp_shard(m.z, STATE_MASTER, p, &start, &count);
    for (int64_t i = 0; i < count; i++) x[i] += 0.5f;
  }
  zeropp_weights_written(m.z);
  assert_true(zeropp_version(m.z) > version);
  zeropp_gather_all(m.z);
  for (int u = 0; u < TEST_UNITS; u++) assert_weights(m.z, u, 0.5f);
  zeropp_release_all(m.z);
  zeropp_copy_weights(copy.z, m.z);
  assert_true(zeropp_version(copy.z) > 0);
  zeropp_gather_all(copy.z);
  for (int u = 0; u < TEST_UNITS; u++) assert_weights(copy.z, u, 0.5f);
  zeropp_release_all(copy.z);
  test_model_free(&m);
  test_model_free(&copy);
}

static void new_weights_reach_the_next_gather(void **state) {
  (void)state;
  for_each_grid(check_stale);
}

/* Small integers, so that sums over ranks and micro-batches are exact in any order. */
static float grad_term(int rank, int micro, int param, int64_t i) {
  return (float)((rank + 1) * (micro + 2) + param % 5 + (int)(i % 11));
}

static void add_grads(ZeroPP *z, int unit, int rank, int micro) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    if (test_shapes[p].unit != unit) continue;
    Tensor g = zeropp_grad(z, p);
    for (int64_t i = 0; i < tensor_numel(g); i++) tensor_f32(g)[i] += grad_term(rank, micro, p, i);
  }
}

static void assert_grad_sums(ZeroPP *z, int world, int micros, float factor) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    const float *g = zeropp_shard(z, STATE_GRAD, p, &start, &count);
    for (int64_t i = 0; i < count; i++) {
      float sum = 0;
      for (int r = 0; r < world; r++)
        for (int b = 0; b < micros; b++) sum += grad_term(r, b, p, start + i);
      assert_true(g[i] == factor * sum);
    }
  }
}

static void check_reduce(int local) {
  TestModel m = test_model(local, true);
  test_fill(m.z, STATE_MASTER);
  for (int step = 0; step < 2; step++) {
    zeropp_zero_grad(m.z);
    for (int micro = 0; micro < 3; micro++) {
      zeropp_open_grad(m.z, 0); /* as a tied head does */
      for (int u = TEST_UNITS - 1; u >= 0; u--) {
        zeropp_gather(m.z, u);
        zeropp_open_grad(m.z, u);
        add_grads(m.z, u, m.grid->rank, micro);
        zeropp_reduce(m.z, u);
        zeropp_release(m.z, u);
      }
    }
    assert_grad_sums(m.z, m.grid->world, 3, 1);
  }
  zeropp_scale_grad(m.z, 0.25f);
  assert_grad_sums(m.z, m.grid->world, 3, 0.25f);
  zeropp_gather_all(m.z); /* gradients went nowhere near the weights */
  for (int u = 0; u < TEST_UNITS; u++) assert_weights(m.z, u, 0);
  zeropp_release_all(m.z);
  test_model_free(&m);
}

static void reduce_sums_ranks_and_micro_batches(void **state) {
  (void)state;
  for_each_grid(check_reduce);
}

/* The tied embedding: its gradient is opened by the head and added to twice, reduced once. */
static void check_tied(int local) {
  TestModel m = test_model(local, true);
  test_fill(m.z, STATE_MASTER);
  zeropp_zero_grad(m.z);
  zeropp_open_grad(m.z, 0);
  add_grads(m.z, 0, m.grid->rank, 0);
  for (int u = TEST_UNITS - 1; u > 0; u--) {
    zeropp_open_grad(m.z, u);
    add_grads(m.z, u, m.grid->rank, 0);
    add_grads(m.z, u, m.grid->rank, 1);
    zeropp_reduce(m.z, u);
  }
  zeropp_open_grad(m.z, 0);
  add_grads(m.z, 0, m.grid->rank, 1);
  zeropp_reduce(m.z, 0);
  assert_grad_sums(m.z, m.grid->world, 2, 1);
  zeropp_open_grad(m.z, 1);
  Tensor joined = zeropp_grad_joined(m.z, zeropp_find(m.z, "0.gate.weight"), 2);
  assert_true(joined.dim[0] == 18 && joined.dim[1] == 6);
  zeropp_reduce(m.z, 1);
  assert_grad_sums(m.z, m.grid->world, 2, 1); /* an empty gradient adds nothing */
  test_model_free(&m);
}

static void a_gradient_may_stay_open(void **state) {
  (void)state;
  for_each_grid(check_tied);
}

static uint64_t received(Traffic a, Traffic b, CollKind k, bool inter) {
  return inter ? b.of[k].inter_bytes - a.of[k].inter_bytes
               : b.of[k].intra_bytes - a.of[k].intra_bytes;
}

/* What a rank receives. A gather brings the other pieces of its slice from other nodes, then the
 * other slices from its own; a reduction brings its slice from every rank of its node, then its
 * piece from every other node. */
static void check_traffic(int local) {
  TestModel m = test_model(local, true);
  const Grid *g = m.grid;
  uint64_t owned[16] = {0}, slice[16] = {0}, all = 0;
  test_fill(m.z, STATE_MASTER);
  for (int r = 0; r < g->world; r++)
    for (int p = 0; p < TEST_PARAMS; p++) {
      int64_t start, count;
      layout_owned(zeropp_spec(m.z, p), g->nodes, local, r / local, r % local, &start, &count);
      owned[r] += (uint64_t)count * 4;
      slice[r % local] += (uint64_t)count * 4;
      all += (uint64_t)count * 4;
    }
  uint64_t mine = owned[g->rank], my_slice = slice[g->local_rank];
  Traffic t0 = traffic_now();
  zeropp_gather_all(m.z);
  zeropp_gather_all(m.z); /* nested: nothing moves */
  zeropp_gather(m.z, 1);
  zeropp_release(m.z, 1);
  zeropp_release_all(m.z);
  zeropp_release_all(m.z);
  Traffic t1 = traffic_now();
  assert_int_equal(received(t0, t1, COLL_ALL_GATHER, false), all - my_slice);
  assert_int_equal(received(t0, t1, COLL_ALL_GATHER, true), my_slice - mine);
  for (int u = 0; u < TEST_UNITS; u++) {
    zeropp_open_grad(m.z, u);
    zeropp_reduce(m.z, u);
  }
  Traffic t2 = traffic_now();
  assert_int_equal(received(t1, t2, COLL_ALL_TO_ALL, false), my_slice * (uint64_t)(local - 1));
  assert_int_equal(received(t1, t2, COLL_ALL_TO_ALL, true), mine * (uint64_t)(g->nodes - 1));
  assert_int_equal(t2.of[COLL_ALL_GATHER].calls, t1.of[COLL_ALL_GATHER].calls);
  test_model_free(&m);
}

static void traffic_is_what_arithmetic_says(void **state) {
  (void)state;
  for_each_grid(check_traffic);
}

static void check_memory(int local) {
  TestModel m = test_model(local, true);
  ParamSpec specs[TEST_PARAMS];
  test_specs(specs);
  ZeroPPConfig cfg = {.stage = 3, .trainable = true};
  ZeroPPMemory plan = zeropp_memory(&cfg, specs, TEST_PARAMS, m.grid->nodes, local, true);
  uint64_t planned = plan.master + plan.moments + plan.gradients + plan.full_units + plan.ema;
  size_t before = 0;
  test_fill(m.z, STATE_MASTER);
  zeropp_ema_enable(m.z);
  device_reset_peak(m.device);
  zeropp_open_grad(m.z, 0);
  for (int u = TEST_UNITS - 1; u >= 0; u--) {
    zeropp_gather(m.z, u);
    zeropp_open_grad(m.z, u);
    zeropp_reduce(m.z, u);
    zeropp_release(m.z, u);
  }
  if (m.grid->world == 1) assert_int_equal(device_peak_bytes(m.device), planned);
  assert_true(device_peak_bytes(m.device) <= planned);
  zeropp_gather_all(m.z); /* everything at once; then what is beyond the plan is given back */
  for (int u = 0; u < TEST_UNITS; u++) zeropp_open_grad(m.z, u);
  for (int u = 0; u < TEST_UNITS; u++) zeropp_reduce(m.z, u);
  zeropp_release_all(m.z);
  assert_true(device_bytes(m.device) <= planned);
  for (int step = 0; step < 3; step++) { /* and a training step allocates nothing */
    device_reset_peak(m.device);
    zeropp_gather(m.z, 2);
    zeropp_open_grad(m.z, 2);
    zeropp_reduce(m.z, 2);
    zeropp_release(m.z, 2);
    if (step > 0) assert_int_equal(device_peak_bytes(m.device), before);
    before = device_bytes(m.device);
  }
  test_model_free(&m);
}

static void memory_stays_within_the_plan(void **state) {
  (void)state;
  for_each_grid(check_memory);
}

/* The first to write a gradient may overwrite it; what is joined is fresh only if all of it is. */
static void check_fresh(int local) {
  TestModel m = test_model(local, true);
  int q = zeropp_find(m.z, "0.q.weight"), up = zeropp_find(m.z, "0.up.weight");
  test_fill(m.z, STATE_MASTER);
  for (int micro = 0; micro < 2; micro++) {
    float beta = -1;
    zeropp_open_grad(m.z, 1);
    if (micro == 0) zeropp_grad_into(m.z, q, 3, &beta); /* shards start with zeros */
    zeropp_reduce(m.z, 1);
    zeropp_zero_grad(m.z);
    zeropp_open_grad(m.z, 1);
    tensor_f32(zeropp_grad_into(m.z, up - 1, 1, &beta))[0] = 1;
    assert_true(beta == 0);
    Tensor both = zeropp_grad_into(m.z, up - 1, 2, &beta);
    assert_true(beta == 1);
    for (int64_t i = both.dim[0] / 2 * both.dim[1]; i < tensor_numel(both); i++)
      assert_true(tensor_f32(both)[i] == 0);
    zeropp_grad_into(m.z, q, 3, &beta);
    assert_true(beta == 0);
    zeropp_grad_into(m.z, q, 3, &beta);
    assert_true(beta == 1);
    zeropp_reduce(m.z, 1);
  }
  test_model_free(&m);
}

static void a_fresh_gradient_is_overwritten_once(void **state) {
  (void)state;
  for_each_grid(check_fresh);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(shards_are_what_the_layout_says),
    cmocka_unit_test(gather_returns_the_masters),
    cmocka_unit_test(random_weights_do_not_depend_on_ranks),
    cmocka_unit_test(repeated_weights_do_not_depend_on_ranks),
    cmocka_unit_test(new_weights_reach_the_next_gather),
    cmocka_unit_test(reduce_sums_ranks_and_micro_batches),
    cmocka_unit_test(a_gradient_may_stay_open),
    cmocka_unit_test(a_fresh_gradient_is_overwritten_once),
    cmocka_unit_test(traffic_is_what_arithmetic_says),
    cmocka_unit_test(memory_stays_within_the_plan),
};
TEST_MAIN(tests)
