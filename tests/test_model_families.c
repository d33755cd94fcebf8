/* Every family and flag on tiny random models: gradients against finite differences, packing,
 * recomputation, the step for generation, and what is planned. */
#include "tests/family_test.h"
#include "tests/model_gradient_test.h"

static const int lengths[] = {7, 1, 12, 2, 15}; /* on both sides of the rotary boundary at 9 */
enum { N_SEQS = 5 };

/* Adding the same to all keys changes no attention, unless positions turn the keys. */
static bool has_no_gradient(const ModelConfig *c, const char *name) {
  bool key = strstr(name, "k_proj.bias") || strstr(name, "c_attn.k.bias");
  return key && c->rope == ROPE_NONE;
}

static void check_gradients(int i, HeadKind head, int flags) {
  Bench bench = bench_open();
  ModelConfig c = family_config(i);
  c.score_bias = true;
  bool kinks = c.mlp == MLP_PLAIN && c.activation == ACT_RELU;
  ModelOptions o = tiny_options(head);
  Model *m = tiny_model(&bench, bench.grid, &c, &o);
  TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
  zeropp_zero_grad(model_zero(m));
  double trained = train_batch(m, &b, flags), scored = eval_batch(m, &b, flags);
  assert_true(fabs(trained - scored) < 2e-6);
  for (int p = 0; p < zeropp_n_params(model_zero(m)); p++) {
    const char *name = zeropp_spec(model_zero(m), p)->name;
    if (!has_no_gradient(&c, name)) {
      check_parameter(m, &b, flags, p, kinks ? PART_KINKS : PART_SMOOTH);
      continue;
    }
    int64_t start, count;
    const float *g = zeropp_shard(model_zero(m), STATE_GRAD, p, &start, &count);
    for (int64_t k = 0; k < count; k++) assert_true(fabsf(g[k]) < 1e-5f);
  }
  model_free(m);
  bench_close(&bench);
}

static void gradients(void **state) {
  (void)state;
  for (int i = 0; i < N_FAMILY_CASES; i++) check_gradients(i, HEAD_LM, WITH_ENTROPY);
}
static void scalar_gradients(void **state) {
  (void)state;
  for (int i = 0; i < N_FAMILY_CASES; i++) check_gradients(i, HEAD_SCALAR, 0);
}

static void recompute_same_bits(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int i = 0; i < N_FAMILY_CASES; i++) {
    ModelConfig c = family_config(i);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *kept = tiny_model(&bench, bench.grid, &c, &o);
    TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
    zeropp_zero_grad(model_zero(kept));
    double loss = train_batch(kept, &b, 0);
    for (int mode = 1; mode < RECOMPUTE_WAYS; mode++) {
      set_recompute(&o, mode);
      Model *again = tiny_model(&bench, bench.grid, &c, &o);
      zeropp_zero_grad(model_zero(again));
      assert_true(train_batch(again, &b, 0) == loss);
      /* Zero: what is recomputed repeats the same operations on the same values. */
      const char *where = "";
      if (shard_error(again, kept, STATE_GRAD, &where) != 0)
        fail_msg("%s, mode %d: %s", family_cases[i].name, mode, where);
      model_free(again);
    }
    model_free(kept);
  }
  bench_close(&bench);
}

/* Company changes roundings only: a GEMM may take another path for other numbers of rows. */
static void packing_does_not_matter(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int i = 0; i < N_FAMILY_CASES; i++) {
    ModelConfig c = family_config(i);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *m = tiny_model(&bench, bench.grid, &c, &o);
    TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
    float together[512], alone[512];
    model_logprobs(m, as_batch(&b), b.n_rows, b.rows, b.targets, 1, together, NULL);
    for (int s = 0, at = 0; s < N_SEQS; s++) {
      TestBatch one = one_sequence(&b, s);
      model_logprobs(m, as_batch(&one), one.n_rows, one.rows, one.targets, 1, alone, NULL);
      for (int k = 0; k < one.n_rows; k++, at++)
        if (!(fabsf(alone[k] - together[at]) < 5e-5f))
          fail_msg("%s: sequence %d, row %d: %g and %g", family_cases[i].name, s, k,
                   (double)alone[k], (double)together[at]);
    }
    model_free(m);
  }
  bench_close(&bench);
}

/* ---- generation ---- */

typedef struct Prefix {
  Bench *bench;
  Model *m;
  Segments seg;
} Prefix;

static void attend_prefix(void *ctx, int layer, Tensor qkv_NQ, Tensor out_NHD) {
  (void)layer;
  Prefix *p = ctx;
  device_ops(p->bench->device)
      ->attention_fwd(p->bench->device, qkv_NQ, p->seg, model_attn_shape(p->m), out_NHD,
                      (Tensor){0});
}

/* Every row of every sequence by model_step and by the packed forward. With a fixed length both
 * rotate alike, whatever the length of a sequence: what a rollout recorded is what is recomputed.
 */
static void step_is_the_forward(void **state) {
  (void)state;
  enum { VOCAB = 37, LONGEST = 15 };
  Bench bench = bench_open();
  for (int i = 0; i < N_FAMILY_CASES; i++) {
    ModelConfig c = family_config(i);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *m = tiny_model(&bench, bench.grid, &c, &o);
    model_rope_fix(m, LONGEST);
    TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
    int32_t positions[512], rows[512];
    for (int s = 0; s < N_SEQS; s++)
      for (int t = b.offsets[s]; t < b.offsets[s + 1]; t++) {
        positions[t] = t - b.offsets[s];
        rows[t] = t;
      }
    float want[64 * VOCAB], got[64 * VOCAB];
    double before = model_flops_done(m);
    model_logits(m, as_batch(&b), b.n_tokens, rows, want);
    double forward = model_flops_done(m) - before;
    Prefix p = {&bench, m, {.n_seqs = N_SEQS, .offsets = b.offsets}};
    Tensor logits_RV = tensor_2d(device_alloc(bench.device, sizeof got), DT_F32, b.n_tokens, VOCAB);
    model_step(m, b.n_tokens, b.tokens, positions, attend_prefix, &p, b.n_tokens, rows, logits_RV);
    size_t n = (size_t)b.n_tokens * VOCAB;
    device_download(bench.device, got, logits_RV.data, n * sizeof(float));
    if (!(test_rel_error(got, want, n) < 1e-5)) fail_msg("%s", family_cases[i].name);
    assert_true(fabs(model_flops_done(m) - before - 2 * forward) < 1e-6 * forward);
    device_free(bench.device, logits_RV.data);
    model_free(m);
  }
  bench_close(&bench);
}

/* The first tokens of a long sequence, and a short sequence of the same tokens: rotated alike only
 * where the length is fixed. */
static void fixed_length(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int i = 0; i < N_FAMILY_CASES; i++) {
    ModelConfig c = family_config(i);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *m = tiny_model(&bench, bench.grid, &c, &o);
    const int length[] = {15};
    TestBatch b = test_batch(1, length, c.vocab_size);
    Batch whole = as_batch(&b), start = whole;
    const int32_t short_offsets[] = {0, 6}, row = 5;
    start.offsets = short_offsets;
    double difference[2];
    for (int fixed = 0; fixed < 2; fixed++) {
      float in_whole[37], in_start[37];
      model_rope_fix(m, fixed ? 15 : 0);
      model_logits(m, whole, 1, &row, in_whole);
      model_logits(m, start, 1, &row, in_start);
      difference[fixed] = test_rel_error(in_start, in_whole, 37);
    }
    assert_true(difference[1] < 1e-5);
    assert_true(model_rope_varies(&c) == (difference[0] > 1e-3));
    model_free(m);
  }
  bench_close(&bench);
}

/* ---- plans ---- */

static void activations_as_planned(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int i = 0; i < N_FAMILY_CASES; i++)
    for (int kind = 0; kind < PASS_KINDS; kind++)
      check_activation_plan(&bench, family_config(i), kind, 0.8, family_cases[i].name);
  bench_close(&bench);
}

static void flops_by_hand(void **state) {
  (void)state;
  ModelConfig c = family_config(7);
  assert_string_equal(c.family, "opt");
  const int32_t len[] = {3, 2};
  /* Per token and layer: q, k, v 15 x 45, out 15 x 15, up and down 2 x 15 x 22. Per token 7 x 15
   * in, per row 15 x 7 out. Keys seen: 6 and 3; q.k and p.v over 15 channels. Head: 4 rows of 7
   * x 37. */
  double matrices = 2.0 * 5 * (15 * 45 + 15 * 15 + 2 * 15 * 22), attention = 2.0 * 2 * 9 * 15;
  double want = 2 * (matrices + attention) + 2.0 * 5 * 7 * 15 + 2.0 * 4 * (15 * 7 + 7 * 37);
  assert_true(fabs(model_forward_flops(&c, HEAD_LM, 2, len, 4) - want) < 0.5);
  c = family_config(1); /* a window of 4 keys: 1 + 2 + 3 + 4 + 4 of 5 tokens */
  const int32_t five[] = {5};
  ModelConfig open = c;
  open.window = 0;
  double hidden_keys = model_forward_flops(&open, HEAD_LM, 1, five, 0) -
                       model_forward_flops(&c, HEAD_LM, 1, five, 0);
  assert_true(fabs(hidden_keys - 2 * 4.0 * 1 * 24) < 0.5);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(gradients),
    cmocka_unit_test(scalar_gradients),
    cmocka_unit_test(recompute_same_bits),
    cmocka_unit_test(packing_does_not_matter),
    cmocka_unit_test(step_is_the_forward),
    cmocka_unit_test(fixed_length),
    cmocka_unit_test(activations_as_planned),
    cmocka_unit_test(flops_by_hand),
};
TEST_MAIN(tests)
