/* Units gathered ahead and reductions behind compute change when something travels, and no bit of
 * what comes out. Under TSAN=1 this is also where the compute and the queue's threads meet.
 * ranks: 1 2 4 */
#include "tests/model_test.h"

static const int lengths[] = {9, 3, 17, 1, 6};
enum { N_SEQS = 5, LAYERS = 4, MAX_NUMEL = 1 << 14 };

typedef struct Case {
  HeadKind head;
  bool tied, recompute;
  ZeroPPConfig zero;
} Case;

static const Case cases[] = {
    {HEAD_LM, true, false, {.stage = 3}},
    {HEAD_LM, false, true, {.stage = 3, .hpz = HPZ_ON, .accumulate_node = true}},
    {HEAD_SCALAR, false, false, {.stage = 2, .wire = WIRE_BF16}},
    {HEAD_LM,
     true,
     true,
     {.stage = 3,
      .qwz = WIRE_INT8,
      .hpz = HPZ_QUANTIZED,
      .qgz = WIRE_INT4,
      .block = 8,
      .error_feedback = true}},
};
enum { N_CASES = sizeof cases / sizeof *cases };

/* What training left: the losses of two steps, this rank's weights, and one more gradient. */
typedef struct Outcome {
  double loss[2];
  float state[2 * MAX_NUMEL];
  int64_t n;
} Outcome;

static void take_shards(ZeroPP *z, StateKind kind, Outcome *out) {
  for (int p = 0; p < zeropp_n_params(z); p++) {
    int64_t start, count;
    const float *x = zeropp_shard(z, kind, p, &start, &count);
    assert_true(out->n + count <= 2 * MAX_NUMEL);
    if (count) memcpy(out->state + out->n, x, (size_t)count * sizeof *x);
    out->n += count;
  }
}

/* Two steps of two micro-batches each, every rank with a sequence of its own or none. */
static void train(Bench *b, Grid *g, const Case *c, int prefetch, Outcome *out) {
  ModelConfig config = tiny_config(c->tied, true);
  ModelOptions o = tiny_options(c->head);
  config.n_layers = LAYERS;
  o.recompute = c->recompute;
  o.zero = c->zero;
  o.zero.prefetch = prefetch;
  memset(out, 0, sizeof *out);
  if (prefetch) comm_queue_start();
  Model *m = tiny_model(b, g, &config, &o);
  ZeroPP *z = model_zero(m);
  TestBatch all = test_batch(N_SEQS, lengths, config.vocab_size), none = {.n_seqs = 0};
  for (int step = 0; step < 2; step++) {
    zeropp_zero_grad(z);
    for (int micro = 0; micro < 2; micro++) {
      int s = (g->rank + micro) % (N_SEQS + 1);
      TestBatch mine = s < N_SEQS ? one_sequence(&all, s) : none;
      out->loss[step] += train_batch(m, &mine, c->head == HEAD_LM ? WITH_ENTROPY : 0);
    }
    if (step == 0)
      zeropp_step(z, (AdamW){.lr = 0.01f, .beta1 = 0.9f, .beta2 = 0.99f, .eps = 1e-8f}, 1);
  }
  take_shards(z, STATE_GRAD, out);
  take_shards(z, STATE_MASTER, out);
  model_free(m);
  comm_queue_stop();
}

static void check_case(Bench *b, Grid *g, const Case *c) {
  static const int ahead[] = {1, 2, LAYERS + 5};
  Outcome *plain = mem_alloc(1, sizeof *plain), *early = mem_alloc(1, sizeof *early);
  train(b, g, c, 0, plain);
  assert_true(plain->loss[0] != 0 && plain->loss[1] != plain->loss[0]);
  for (int i = 0; i < 3; i++) {
    train(b, g, c, ahead[i], early);
    assert_memory_equal(early->loss, plain->loss, sizeof plain->loss);
    assert_int_equal(early->n, plain->n);
    assert_memory_equal(early->state, plain->state, (size_t)plain->n * sizeof(float));
  }
  free(plain);
  free(early);
}

static void the_same_bits_however_far_ahead(void **state) {
  (void)state;
  Bench b = bench_open();
  Error err = {""};
  for (int local = 1; local <= b.grid->world; local *= 2) {
    Grid *g = grid_create(local, &err);
    assert_non_null(g);
    for (int i = 0; i < N_CASES; i++) check_case(&b, g, &cases[i]);
    grid_free(g);
  }
  bench_close(&b);
}

/* A forward with units ahead hides what one without waits for. Seconds are small and the machine
 * may be busy, so only that something hides, and that without a queue nothing does. */
static void something_hides(void **state) {
  (void)state;
  Bench b = bench_open();
  double hidden[2];
  for (int ahead = 0; ahead < 2; ahead++) {
    Traffic before = traffic_now();
    Outcome *out = mem_alloc(1, sizeof *out);
    train(&b, b.grid, &cases[0], ahead, out);
    free(out);
    Traffic after = traffic_now();
    hidden[ahead] =
        after.of[COLL_ALL_GATHER].hidden_seconds - before.of[COLL_ALL_GATHER].hidden_seconds;
  }
  assert_true(hidden[0] == 0);
  assert_true(hidden[1] > 0 || b.grid->world == 1);
  bench_close(&b);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(the_same_bits_however_far_ahead),
    cmocka_unit_test(something_hides),
};
TEST_MAIN(tests)
