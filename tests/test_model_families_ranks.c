/* Every family on several ranks: gradients as on one, saved folders that load with the same bits
 * and in the layout that Hugging Face has, critics from actors. ranks: 1 2 3 4 */
#include "tests/family_test.h"
#include "tests/model_files_test.h"

static const int lengths[] = {7, 1, 12, 2, 15};
enum { N_SEQS = 5 };

static double train_dealt(Model *m, const TestBatch *b, const Grid *g) {
  double sum = 0;
  for (int first = 0; first < b->n_seqs; first += g->world) {
    int s = first + g->rank;
    TestBatch mine = s < b->n_seqs ? one_sequence(b, s) : (TestBatch){.n_seqs = 0};
    sum += train_batch(m, &mine, 0);
  }
  comm_all_reduce_f64(g->all, &sum, 1, false);
  return sum;
}

static void same_gradients(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int i = 0; i < N_FAMILY_CASES; i++) {
    ModelConfig c = family_config(i);
    ModelOptions o = tiny_options(HEAD_LM);
    o.recompute = i % 2;
    Model *all = tiny_model(&bench, bench.grid, &c, &o);
    Model *one = tiny_model(&bench, &bench.alone, &c, &o);
    TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
    zeropp_zero_grad(model_zero(all));
    zeropp_zero_grad(model_zero(one));
    double want = train_batch(one, &b, 0), got = train_dealt(all, &b, bench.grid);
    assert_true(fabs(got - want) < 1e-5);
    /* The sums over sequences are taken in another order: a few float32 roundings. Key biases whose
     * gradient is 0 in exact arithmetic are all rounding. */
    for (int p = 0; p < zeropp_n_params(model_zero(all)); p++) {
      const char *name = zeropp_spec(model_zero(all), p)->name;
      bool zero = c.rope == ROPE_NONE && (strstr(name, "k_proj.bias") || strstr(name, ".k.bias"));
      int64_t start, count, first, whole;
      const float *x = zeropp_shard(model_zero(all), STATE_GRAD, p, &start, &count);
      const float *y = zeropp_shard(model_zero(one), STATE_GRAD, p, &first, &whole);
      double most = zero ? 1 : 1e-12;
      for (int64_t k = 0; k < whole; k++) most = fmax(most, fabs((double)y[k]));
      for (int64_t k = 0; k < count; k++)
        if (!(fabs((double)x[k] - (double)y[start + k]) < 1e-5 * most))
          fail_msg("%s: %s: %g and %g", family_cases[i].name, name, (double)x[k],
                   (double)y[start + k]);
    }
    model_free(all);
    model_free(one);
  }
  bench_close(&bench);
}

static void assert_same_config(const ModelConfig *a, const ModelConfig *b, const char *name) {
  ModelConfig x = *a, y = *b;
  x.head = y.head; /* what config.json says of a head that was chosen otherwise */
  /* Both start as zeros and are filled field by field: padding is equal, too. */
  if (memcmp(&x, &y, sizeof x) != 0) fail_msg("%s: another config comes back", name);
}

static void round_trip(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int i = 0; i < 2 * N_FAMILY_CASES; i++) {
    HeadKind head = i % 2 ? HEAD_SCALAR : HEAD_LM;
    const char *name = family_cases[i / 2].name;
    ModelConfig c = family_config(i / 2);
    ModelOptions o = tiny_options(head);
    c.score_bias = head == HEAD_SCALAR && i % 4 == 1;
    Model *m = tiny_model(&bench, bench.grid, &c, &o);
    SaveOptions s = as_f32;
    s.max_shard_bytes = i % 3 ? 0 : 3000; /* fused tensors stay whole in several files, too */
    save(m, place("families"), &s);
    Model *back = load(&bench, place("families"), head);
    assert_same_weights(m, back, DT_F32);
    assert_same_config(&c, model_config(back), name);
    TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
    assert_true(eval_batch(m, &b, 0) == eval_batch(back, &b, 0));
    model_free(m);
    model_free(back);
  }
  bench_close(&bench);
}

/* The tensor that the parameter `name` should be in: rows and columns of the file. */
static void check_tensor(const StSet *set, const char *name, int64_t rows, int64_t columns) {
  const StEntry *e = stset_find(set, name, NULL);
  if (!e) fail_msg("%s is missing", name);
  assert_int_equal(e->dim[0], rows);
  if (columns) assert_int_equal(e->dim[1], columns);
  assert_int_equal(e->ndim, columns ? 2 : 1);
}

static int case_of(const char *name) {
  for (int i = 0; i < N_FAMILY_CASES; i++)
    if (!strcmp(family_cases[i].name, name)) return i;
  die("no case %s", name);
}

static void layout_of_files(void **state) {
  (void)state;
  Bench bench = bench_open();
  static const char *const cases[] = {"gpt2", "phi3, longrope", "opt, post-norm, projected"};
  for (int i = 0; i < 3; i++) {
    ModelConfig c = family_config(case_of(cases[i]));
    ModelOptions o = tiny_options(HEAD_LM);
    Model *m = tiny_model(&bench, bench.grid, &c, &o);
    save(m, place("layout"), &as_f32);
    Error err = {""};
    StSet *set = stset_open(place("layout"), &err);
    assert_non_null(set);
    if (i == 0) {
      check_tensor(set, "transformer.h.1.attn.c_attn.weight", 15, 45); /* [in, out] */
      check_tensor(set, "transformer.h.1.attn.c_attn.bias", 45, 0);
      check_tensor(set, "transformer.h.1.mlp.c_fc.weight", 15, 60);
      check_tensor(set, "transformer.wpe.weight", 64, 15);
      assert_int_equal(stset_count(set), 2 + 2 * 12 + 2);
    } else if (i == 1) {
      check_tensor(set, "model.layers.0.self_attn.qkv_proj.weight", (6 + 2 + 2) * 8, 15);
      check_tensor(set, "model.layers.0.mlp.gate_up_proj.weight", 44, 15);
      assert_int_equal(stset_count(set), 1 + 2 * 6 + 2);
    } else {
      check_tensor(set, "model.decoder.embed_positions.weight", 66, 15);
      check_tensor(set, "model.decoder.project_in.weight", 15, 7);
      check_tensor(set, "model.decoder.project_out.weight", 7, 15);
      assert_null(stset_find(set, "model.decoder.final_layer_norm.weight", NULL));
    }
    stset_close(set);
    model_free(m);
  }
  bench_close(&bench);
}

/* This rank's part of every weight but the scalar head's, bit for bit. */
static void check_same_trunk(ZeroPP *critic, ZeroPP *actor) {
  int heads = 0;
  for (int i = 0; i < zeropp_n_params(critic); i++) {
    const char *name = zeropp_spec(critic, i)->name;
    int source = zeropp_find(actor, name);
    int64_t start, count, actor_start, actor_count;
    if (source < 0) {
      assert_int_equal(strncmp(name, "score.", 6), 0);
      heads++;
      continue;
    }
    const float *x = zeropp_shard(critic, STATE_MASTER, i, &start, &count);
    const float *y = zeropp_shard(actor, STATE_MASTER, source, &actor_start, &actor_count);
    assert_true(start == actor_start && count == actor_count);
    if (count > 0) assert_memory_equal(x, y, (size_t)count * sizeof *x);
  }
  assert_int_equal(heads, 1); /* an actor has no bias of a head to start from */
}

static void critic_from_actor(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int i = 0; i < N_FAMILY_CASES; i++) {
    Error err = {""};
    ModelConfig c = family_config(i);
    ModelOptions lm = tiny_options(HEAD_LM), scalar = tiny_options(HEAD_SCALAR);
    Model *actor = tiny_model(&bench, bench.grid, &c, &lm);
    save(actor, place("actor"), &as_f32);
    assert_null(model_load(bench.device, bench.grid, bench.arena, place("actor"), &scalar, &err));
    assert_non_null(strstr(err.msg, "init_head"));
    scalar.init_head = true;
    Model *critic =
        model_load(bench.device, bench.grid, bench.arena, place("actor"), &scalar, &err);
    if (!critic) fail_msg("%s: %s", family_cases[i].name, err.msg);
    check_same_trunk(model_zero(critic), model_zero(actor));
    TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
    assert_true(fabs(eval_batch(critic, &b, 0)) > 1e-6);
    model_free(actor);
    model_free(critic);
  }
  bench_close(&bench);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(same_gradients),
    cmocka_unit_test(round_trip),
    cmocka_unit_test(layout_of_files),
    cmocka_unit_test(critic_from_actor),
};
TEST_MAIN(tests)
