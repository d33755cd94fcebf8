/* Gradients of the whole model against finite differences, with everything on: biases, grouped
 * heads, tied and untied heads, temperature, entropy; and recomputation gives the same bits. */
#include "tests/model_gradient_test.h"

static const int lengths[] = {7, 1, 12, 2};

static void check_model(HeadKind head, bool tied, bool biases, int flags) {
  Bench bench = bench_open();
  ModelConfig c = tiny_config(tied, biases);
  ModelOptions o = tiny_options(head);
  Model *m = tiny_model(&bench, bench.grid, &c, &o);
  TestBatch b = test_batch(4, lengths, c.vocab_size);
  zeropp_zero_grad(model_zero(m));
  double trained = train_batch(m, &b, flags), scored = eval_batch(m, &b, flags);
  /* The same kernels on the same rows. */
  assert_true(fabs(trained - scored) < 1e-6);
  for (int p = 0; p < zeropp_n_params(model_zero(m)); p++)
    check_parameter(m, &b, flags, p, PART_SMOOTH);
  model_free(m);
  bench_close(&bench);
}

static void untied_with_biases(void **state) {
  (void)state;
  check_model(HEAD_LM, false, true, WITH_ENTROPY | COLD);
}
static void tied_without_biases(void **state) {
  (void)state;
  check_model(HEAD_LM, true, false, WITH_ENTROPY);
}
static void tied_with_biases(void **state) {
  (void)state;
  check_model(HEAD_LM, true, true, 0);
}
static void scalar_head(void **state) {
  (void)state;
  check_model(HEAD_SCALAR, false, true, 0);
}

static void recompute_same_bits(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int tied = 0; tied < 2; tied++) {
    ModelConfig c = tiny_config(tied, !tied);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *kept = tiny_model(&bench, bench.grid, &c, &o);
    o.recompute = RECOMPUTE_FULL;
    Model *again = tiny_model(&bench, bench.grid, &c, &o);
    TestBatch b = test_batch(4, lengths, c.vocab_size);
    zeropp_zero_grad(model_zero(kept));
    zeropp_zero_grad(model_zero(again));
    double x = train_batch(kept, &b, WITH_ENTROPY), y = train_batch(again, &b, WITH_ENTROPY);
    assert_true(x == y);
    /* Zero: the recomputed block repeats the same operations on the same values. */
    assert_true(shard_error(again, kept, STATE_GRAD, NULL) == 0);
    model_free(kept);
    model_free(again);
  }
  bench_close(&bench);
}

/* A gradient is added to what is there, and a second batch doubles it. */
static void gradients_accumulate(void **state) {
  (void)state;
  Bench bench = bench_open();
  ModelConfig c = tiny_config(true, true);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *once = tiny_model(&bench, bench.grid, &c, &o);
  Model *twice = tiny_model(&bench, bench.grid, &c, &o);
  TestBatch b = test_batch(4, lengths, c.vocab_size);
  zeropp_zero_grad(model_zero(once));
  zeropp_zero_grad(model_zero(twice));
  train_batch(once, &b, 0);
  train_batch(twice, &b, 0);
  train_batch(twice, &b, 0);
  zeropp_scale_grad(model_zero(once), 2);
  /* Partial sums round differently once they stand on the first batch's. */
  assert_true(shard_error(twice, once, STATE_GRAD, NULL) < 2e-6);
  model_free(once);
  model_free(twice);
  bench_close(&bench);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(untied_with_biases),  cmocka_unit_test(tied_without_biases),
    cmocka_unit_test(tied_with_biases),    cmocka_unit_test(scalar_head),
    cmocka_unit_test(recompute_same_bits), cmocka_unit_test(gradients_accumulate),
};
TEST_MAIN(tests)
