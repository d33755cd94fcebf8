/* Supervised fine-tuning on a tiny model. ranks: 1 2 3 4
 *
 * As in test_actor_update.c: the reference runs one sequence at a time on rank 0 alone, with
 * weights and formulas written out here. */
#include "actor/actor.h"
#include "tests/tiny_model.h"

/* Loss from the second token, from the middle, from behind the end, and so on; and every third
 * token before it. The caller frees. */
static uint8_t *make_loss(const Rollout *ro) {
  static const int32_t from[9] = {0, 1, 6, 10, 9, 4, 2, 16, 7};
  uint8_t *loss = mem_zalloc((size_t)ro->n_tokens, 1);
  for (int i = 0; i < 9; i++)
    for (int t = 0; t < ro->offsets[i + 1] - ro->offsets[i]; t++)
      loss[ro->offsets[i] + t] = t >= from[i] || t % 3 == 0;
  return loss;
}

typedef struct SftReference {
  const SftBatch *b;
  double tokens;
} SftReference;

static int sft_targets(const SftBatch *b, int i, int32_t *rows, int32_t *targets) {
  int n = 0, len = b->offsets[i + 1] - b->offsets[i];
  for (int t = 1; t < len; t++) {
    if (!b->loss[b->offsets[i] + t]) continue;
    rows[n] = t - 1;
    targets[n++] = b->tokens[b->offsets[i] + t];
  }
  return n;
}

static void sft_reference_rows(void *ctx, int first, int n, const float *logprob,
                               const float *entropy, float *dlogprob, float *dentropy) {
  (void)first, (void)logprob, (void)entropy, (void)dentropy;
  for (int i = 0; i < n; i++) dlogprob[i] = (float)(-1 / ((SftReference *)ctx)->tokens);
}

static double sft_reference_loss(Model *m, void *ctx) {
  SftReference *r = ctx;
  double loss = 0;
  for (int i = 0; i < r->b->n_seqs; i++) {
    int32_t rows[64], targets[64], own[2] = {0, r->b->offsets[i + 1] - r->b->offsets[i]};
    float logprob[64];
    int n = sft_targets(r->b, i, rows, targets);
    Batch batch = {1, own, r->b->tokens + r->b->offsets[i]};
    model_logprobs(m, batch, n, rows, targets, 1, logprob, NULL);
    for (int k = 0; k < n; k++) loss -= (double)logprob[k] / r->tokens;
  }
  return loss;
}

static void sft_gradient(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 17);
  Rollout *ro = tiny_rollout();
  uint8_t *loss = make_loss(ro);
  SftBatch b = {9, ro->offsets, ro->tokens, loss};
  SftReference r = {&b, 0};
  for (int i = 0; i < 9; i++) {
    int32_t rows[64], targets[64];
    r.tokens += sft_targets(&b, i, rows, targets);
  }
  zeropp_zero_grad(model_zero(m));
  for (int i = 0; i < 9; i++) {
    int32_t rows[64], targets[64], own[2];
    int n = sft_targets(&b, i, rows, targets);
    Batch batch = tiny_alone(w.grid, b.offsets, b.tokens, i, own);
    model_train_lm(m, batch, batch.n_seqs ? n : 0, rows, targets, 1, false, sft_reference_rows, &r);
  }
  float *want = tiny_state(m, STATE_GRAD);
  const int micro_tokens[] = {1, 20, 1000};
  SftStats s, e;
  for (int i = 0; i < 3; i++) {
    sft_step(m, &b, micro_tokens[i], tiny_no_step(), 1, &s);
    check_gradient(m, want);
    sft_eval(m, &b, micro_tokens[2 - i], &e);
    check_close(s.loss, sft_reference_loss(m, &r), 1e-5);
    check_close(e.loss, s.loss, 1e-5);
    assert_true(s.loss_tokens == (int64_t)r.tokens && s.tokens == 94 && e.tokens == 94);
    assert_true(s.grad_norm > 0 && e.grad_norm == 0);
  }
  check_differences(m, sft_reference_loss, &r, want);
  free(want);
  free(loss);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

static void sft_learns_or_has_nothing_to_learn(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 18);
  Rollout *ro = tiny_rollout();
  uint8_t *loss = make_loss(ro), *never = mem_zalloc((size_t)ro->n_tokens, 1);
  for (int i = 0; i < 9; i++) never[ro->offsets[i]] = 1; /* which nothing predicts */
  SftBatch b = {9, ro->offsets, ro->tokens, loss}, none = {9, ro->offsets, ro->tokens, never};
  AdamW opt = {.lr = 5e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
  float *before = tiny_state(m, STATE_MASTER);
  SftStats first, s;
  sft_step(m, &none, 64, opt, 1, &s);
  float *after = tiny_state(m, STATE_MASTER);
  assert_memory_equal(before, after, tiny_numel(m) * sizeof(float));
  assert_true(s.loss == 0 && s.loss_tokens == 0 && s.grad_norm == 0 && s.tokens == 94);
  sft_step(m, &b, 64, opt, 1, &first);
  for (int i = 0; i < 10; i++) sft_step(m, &b, 64, opt, 1, &s);
  assert_true(s.loss < 0.7 * first.loss);
  free(before);
  free(after);
  free(loss);
  free(never);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(sft_gradient),
    cmocka_unit_test(sft_learns_or_has_nothing_to_learn),
};
TEST_MAIN(tests)
