/* Several ranks against one: log-probabilities, values, losses and gradients of odd sizes.
 * ranks: 1 2 3 4 */
#include "tests/model_test.h"

static const int lengths[] = {9, 3, 17, 1, 6};
enum { N_SEQS = 5 };

static TestBatch empty_batch(void) { return (TestBatch){.n_seqs = 0}; }

static void inference_equals_one_rank(void **state) {
  (void)state;
  Bench bench = bench_open();
  ModelConfig c = tiny_config(true, true);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *all = tiny_model(&bench, bench.grid, &c, &o);
  Model *one = tiny_model(&bench, &bench.alone, &c, &o);
  TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size), none = empty_batch();
  /* Ranks other than the first two have nothing to do but take part. */
  TestBatch *mine = bench.grid->rank < 2 ? &b : &none;
  float got[512], want[512];
  model_logprobs(all, as_batch(mine), mine->n_rows, mine->rows, mine->targets, 1, got, NULL);
  model_logprobs(one, as_batch(mine), mine->n_rows, mine->rows, mine->targets, 1, want, NULL);
  /* Zero: gathered weights are the same bits. */
  for (int i = 0; i < mine->n_rows; i++) assert_true(got[i] == want[i]);
  model_free(all);
  model_free(one);
  bench_close(&bench);
}

/* Sequences dealt over the ranks, some of which get none in a round. */
static double train_dealt(Model *m, const TestBatch *b, const Grid *g) {
  double sum = 0;
  for (int first = 0; first < b->n_seqs; first += g->world) {
    int s = first + g->rank;
    TestBatch mine = s < b->n_seqs ? one_sequence(b, s) : empty_batch();
    sum += train_batch(m, &mine, WITH_ENTROPY);
  }
  comm_all_reduce_f64(g->all, &sum, 1, false);
  return sum;
}

static void check_training(HeadKind head, bool tied, bool recompute) {
  Bench bench = bench_open();
  ModelConfig c = tiny_config(tied, true);
  ModelOptions o = tiny_options(head);
  o.recompute = recompute;
  Model *all = tiny_model(&bench, bench.grid, &c, &o);
  Model *one = tiny_model(&bench, &bench.alone, &c, &o);
  TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
  zeropp_zero_grad(model_zero(all));
  zeropp_zero_grad(model_zero(one));
  double want = train_batch(one, &b, WITH_ENTROPY), got = train_dealt(all, &b, bench.grid);
  assert_true(fabs(got - want) < 1e-5);
  const char *where = "";
  /* The sums over sequences are taken in another order: a few float32 roundings. */
  double error = shard_error(all, one, STATE_GRAD, &where);
  if (error > 1e-5) fail_msg("%s: gradients differ by %g", where, error);
  model_free(all);
  model_free(one);
  bench_close(&bench);
}

static void lm_gradients(void **state) {
  (void)state;
  check_training(HEAD_LM, false, false);
}
static void tied_gradients(void **state) {
  (void)state;
  check_training(HEAD_LM, true, true);
}
static void scalar_gradients(void **state) {
  (void)state;
  check_training(HEAD_SCALAR, false, false);
}

/* Every rank empty: nothing to compute, nothing to hang on, a gradient of zero. */
static void all_ranks_empty(void **state) {
  (void)state;
  Bench bench = bench_open();
  ModelConfig c = tiny_config(true, true);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *m = tiny_model(&bench, bench.grid, &c, &o);
  TestBatch none = empty_batch();
  zeropp_zero_grad(model_zero(m));
  assert_true(train_batch(m, &none, 0) == 0);
  for (int p = 0; p < zeropp_n_params(model_zero(m)); p++) {
    int64_t start, count;
    const float *g = zeropp_shard(model_zero(m), STATE_GRAD, p, &start, &count);
    for (int64_t i = 0; i < count; i++) assert_true(g[i] == 0);
  }
  model_free(m);
  bench_close(&bench);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(inference_equals_one_rank),
    cmocka_unit_test(lm_gradients),
    cmocka_unit_test(tied_gradients),
    cmocka_unit_test(scalar_gradients),
    cmocka_unit_test(all_ranks_empty),
};
TEST_MAIN(tests)
