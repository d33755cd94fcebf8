/* A result does not depend on company: packing, micro-batches, order of rows; the step for
 * generation equals the full forward; plans and counts agree with what happens. */
#include "tests/model_test.h"

static const int lengths[] = {9, 3, 17, 1, 6};
enum { N_SEQS = 5 };

/* Sums over other tokens' rows never mix, but a GEMM may take another path for another number of
 * rows: rounding only, 1e-5 by contract. */
#define COMPANY 1e-5

static void packing_does_not_matter(void **state) {
  (void)state;
  Bench bench = bench_open();
  ModelConfig c = tiny_config(false, true);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *m = tiny_model(&bench, bench.grid, &c, &o);
  TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
  float together[512], entropy[512];
  model_logprobs(m, as_batch(&b), b.n_rows, b.rows, b.targets, 0.8f, together, entropy);
  for (int s = 0, at = 0; s < N_SEQS; s++) {
    TestBatch one = one_sequence(&b, s);
    float lp[512], e[512];
    model_logprobs(m, as_batch(&one), one.n_rows, one.rows, one.targets, 0.8f, lp, e);
    for (int i = 0; i < one.n_rows; i++, at++) {
      assert_true(fabsf(lp[i] - together[at]) < COMPANY * 5);
      assert_true(fabsf(e[i] - entropy[at]) < COMPANY * 5);
    }
  }
  model_free(m);
  bench_close(&bench);
}

static void micro_batches_do_not_matter(void **state) {
  (void)state;
  Bench bench = bench_open();
  for (int head = 0; head < 2; head++) {
    ModelConfig c = tiny_config(true, true);
    ModelOptions o = tiny_options(head ? HEAD_SCALAR : HEAD_LM);
    Model *whole = tiny_model(&bench, bench.grid, &c, &o);
    Model *parts = tiny_model(&bench, bench.grid, &c, &o);
    TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
    zeropp_zero_grad(model_zero(whole));
    zeropp_zero_grad(model_zero(parts));
    double sum = 0, all = train_batch(whole, &b, WITH_ENTROPY);
    for (int s = N_SEQS - 1; s >= 0; s--) {
      TestBatch one = one_sequence(&b, s);
      sum += train_batch(parts, &one, WITH_ENTROPY);
    }
    assert_true(fabs(sum - all) < 1e-5);
    assert_true(shard_error(parts, whole, STATE_GRAD, NULL) < COMPANY);
    model_free(whole);
    model_free(parts);
  }
  bench_close(&bench);
}

/* Rows in any order, repeated, few of them or none; logits agree with log-probabilities. */
static void any_rows(void **state) {
  (void)state;
  Bench bench = bench_open();
  ModelConfig c = tiny_config(true, false);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *m = tiny_model(&bench, bench.grid, &c, &o);
  TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
  const int32_t rows[] = {20, 3, 3, 0, 35}, targets[] = {4, 36, 0, 7, 7};
  float lp[5], logits[5 * 37];
  model_logprobs(m, as_batch(&b), 5, rows, targets, 1, lp, NULL);
  model_logits(m, as_batch(&b), 5, rows, logits);
  for (int i = 0; i < 5; i++) {
    double sum = 0;
    for (int v = 0; v < 37; v++) sum += exp((double)logits[i * 37 + v]);
    double want = (double)logits[i * 37 + targets[i]] - log(sum);
    assert_true(fabs(want - (double)lp[i]) < 1e-5);
  }
  assert_true(fabsf(lp[1] - lp[2]) > 1e-4); /* other targets, other numbers */
  model_logprobs(m, as_batch(&b), 0, NULL, NULL, 1, NULL, NULL);
  zeropp_zero_grad(model_zero(m));
  model_train_lm(m, as_batch(&b), 0, NULL, NULL, 1, false, test_lm_loss, NULL);
  int64_t start, count;
  const float *g = zeropp_shard(model_zero(m), STATE_GRAD, 0, &start, &count);
  for (int64_t i = 0; i < count; i++) assert_true(g[i] == 0);
  model_free(m);
  bench_close(&bench);
}

/* Attention over the whole prefix without a cache, by the packed kernel: what generation does with
 * one. */
typedef struct Prefix {
  Bench *bench;
  Model *m;
  const int32_t *offsets;
  int n_seqs;
} Prefix;

static void attend_prefix(void *ctx, int layer, Tensor qkv_NQ, Tensor out_NHD) {
  (void)layer;
  Prefix *p = ctx;
  Segments seg = {.n_seqs = p->n_seqs, .offsets = p->offsets};
  device_ops(p->bench->device)
      ->attention_fwd(p->bench->device, qkv_NQ, seg, model_attn_shape(p->m), out_NHD, (Tensor){0});
}

static void step_is_the_forward(void **state) {
  (void)state;
  Bench bench = bench_open();
  ModelConfig c = tiny_config(false, true);
  ModelOptions o = tiny_options(HEAD_LM);
  Model *m = tiny_model(&bench, bench.grid, &c, &o);
  TestBatch b = test_batch(N_SEQS, lengths, c.vocab_size);
  int32_t positions[512], last[N_SEQS];
  for (int s = 0; s < N_SEQS; s++) {
    for (int t = b.offsets[s]; t < b.offsets[s + 1]; t++) positions[t] = t - b.offsets[s];
    last[s] = b.offsets[s + 1] - 1;
  }
  float want[N_SEQS * 37], got[N_SEQS * 37];
  double before = model_flops_done(m);
  model_logits(m, as_batch(&b), N_SEQS, last, want);
  double forward = model_flops_done(m) - before;
  Prefix p = {&bench, m, b.offsets, N_SEQS};
  Tensor logits_RV = tensor_2d(device_alloc(bench.device, sizeof got), DT_F32, N_SEQS, 37);
  model_step(m, b.n_tokens, b.tokens, positions, attend_prefix, &p, N_SEQS, last, logits_RV);
  device_download(bench.device, got, logits_RV.data, sizeof got);
  assert_true(test_rel_error(got, want, N_SEQS * 37) < COMPANY);
  /* The same tokens see the same keys. */
  assert_true(fabs(model_flops_done(m) - before - 2 * forward) < 1e-6 * forward);
  device_free(bench.device, logits_RV.data);
  model_free(m);
  bench_close(&bench);
}

static void flops_by_hand(void **state) {
  (void)state;
  ModelConfig c = tiny_config(false, false);
  const int32_t len[] = {3, 2};
  /* Per token and layer: q, k, v 15 x 40, out 24 x 15, gate, up and down 3 x 15 x 22. Keys seen:
   * 1 + 2 + 3 and 1 + 2; q.k and p.v over 24 channels. Head: 4 rows of 15 x 37. */
  double matrices = 2.0 * 5 * (15 * 40 + 24 * 15 + 3 * 15 * 22), attention = 2.0 * 2 * 9 * 24;
  double want = 2 * (matrices + attention) + 2.0 * 4 * 15 * 37;
  assert_true(fabs(model_forward_flops(&c, HEAD_LM, 2, len, 4) - want) < 0.5);
  assert_true(fabs(model_forward_flops(&c, HEAD_SCALAR, 2, len, 4) - want + 2.0 * 4 * 15 * 36) <
              0.5);
}

static void activations_as_planned(void **state) {
  (void)state;
  Bench bench = bench_open();
  ModelConfig c = tiny_config(false, true);
  for (int kind = 0; kind < PASS_KINDS; kind++)
    check_activation_plan(&bench, c, kind, 0.85, "llama");
  bench_close(&bench);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(packing_does_not_matter),
    cmocka_unit_test(micro_batches_do_not_matter),
    cmocka_unit_test(any_rows),
    cmocka_unit_test(step_is_the_forward),
    cmocka_unit_test(flops_by_hand),
    cmocka_unit_test(activations_as_planned),
};
TEST_MAIN(tests)
