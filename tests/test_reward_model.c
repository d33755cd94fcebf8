/* Scores and pairwise training on a tiny model. ranks: 1 2 3 4
 *
 * The reference runs one pair at a time on rank 0 alone, with formulas written out here. */
#include "reward/reward.h"
#include "tests/ppo_fixture.h"

#define PAIRS 5

/* Ten sequences of odd lengths; the fourth pair is the same sequence twice: a tie. */
typedef struct Pairs {
  int32_t offsets[2 * PAIRS + 1], tokens[128];
  float margins[PAIRS];
} Pairs;

static Pairs make_pairs(void) {
  static const int32_t lengths[2 * PAIRS] = {7, 9, 1, 4, 12, 3, 6, 6, 15, 14};
  Pairs p = {.margins = {0, 0.5f, -0.25f, 0, 1}};
  for (int b = 0; b < 2 * PAIRS; b++) p.offsets[b + 1] = p.offsets[b] + lengths[b];
  for (int t = 0; t < p.offsets[2 * PAIRS]; t++)
    p.tokens[t] = (int32_t)(rng_uniform(6, 0, (uint64_t)t) * TINY_VOCAB);
  memcpy(p.tokens + p.offsets[7], p.tokens + p.offsets[6], 6 * sizeof *p.tokens);
  return p;
}

/* The head at the last token of sequence b, run by all ranks. */
static double score_alone(Model *m, const int32_t *offsets, const int32_t *tokens, int b) {
  int32_t own[2] = {0, offsets[b + 1] - offsets[b]}, last = own[1] - 1;
  float score;
  model_values(m, (Batch){1, own, tokens + offsets[b]}, 1, &last, &score);
  return (double)score;
}

/* The score is that of the last token, whatever else is in the batch. */
static void scores_at_the_last_token(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_SCALAR, 31);
  Rollout *ro = tiny_rollout();
  int32_t lengths[9];
  for (int b = 0; b < 9; b++) lengths[b] = rollout_len(ro, b);
  const int micro_tokens[] = {1, 30, 1000};
  for (int k = 0; k < 3; k++) {
    BatchPlan plan = plan_batches(lengths, NULL, 9, w.grid->rank, w.grid->world, micro_tokens[k]);
    float scores[9];
    double sum[9];
    for (int b = 0; b < 9; b++) scores[b] = 0;
    reward_scores(m, &plan, ro, scores);
    for (int b = 0; b < 9; b++) sum[b] = (double)scores[b];
    comm_all_reduce_f64(w.grid->all, sum, 9, false);
    for (int b = 0; b < 9; b++) /* float, another batch composition */
      check_close(sum[b], score_alone(m, ro->offsets, ro->tokens, b), 1e-5);
    plan_free(&plan);
  }
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

typedef struct Reference {
  const PairBatch *b;
  int pair;
} Reference;

static double margin_of(const PairBatch *b, int i) {
  return b->margins ? (double)b->margins[i] : 0;
}

static double pair_reference(double chosen, double rejected, double margin) {
  return log(1 + exp(-(chosen - rejected - margin)));
}

static void reference_rows(void *ctx, int n, const float *values, float *dvalues) {
  const Reference *r = ctx;
  if (n == 0) return;
  double c = (double)values[0], j = (double)values[1], g = margin_of(r->b, r->pair), h = 1e-6;
  double scale = 1 / (2 * h) / r->b->n_pairs;
  dvalues[0] = (float)((pair_reference(c + h, j, g) - pair_reference(c - h, j, g)) * scale);
  dvalues[1] = (float)((pair_reference(c, j + h, g) - pair_reference(c, j - h, g)) * scale);
}

static float *reference_gradient(Model *m, const PairBatch *b) {
  zeropp_zero_grad(model_zero(m));
  for (int i = 0; i < b->n_pairs; i++) {
    const int32_t *at = &b->offsets[2 * i];
    int32_t own[3] = {0, at[1] - at[0], at[2] - at[0]}, rows[2] = {own[1] - 1, own[2] - 1};
    bool mine = model_grid(m)->rank == 0;
    Reference r = {b, i};
    model_train_values(m, (Batch){mine ? 2 : 0, own, b->tokens + at[0]}, mine ? 2 : 0, rows,
                       reference_rows, &r);
  }
  return tiny_state(m, STATE_GRAD);
}

static PairStats reference_statistics(Model *m, const PairBatch *b) {
  PairStats s = {0};
  double score[2 * PAIRS] = {0}, n = b->n_pairs;
  for (int i = 0; i < 2 * b->n_pairs; i++) score[i] = score_alone(m, b->offsets, b->tokens, i);
  for (int i = 0; i < b->n_pairs; i++) {
    double c = score[2 * i], j = score[2 * i + 1];
    s.loss += pair_reference(c, j, margin_of(b, i)) / n;
    /* The tied pair ties only up to rounding in this reference: it is told apart by its place. */
    s.accuracy += (i == 3 ? 0.5 : c > j) / n;
    s.margin_mean += (c - j) / n;
    s.score_mean += (c + j) / (2 * n);
  }
  for (int i = 0; i < 2 * b->n_pairs; i++)
    s.score_std += (score[i] - s.score_mean) * (score[i] - s.score_mean) / (2 * n);
  s.score_std = sqrt(s.score_std);
  return s;
}

static double reference_loss(Model *m, void *ctx) { return reference_statistics(m, ctx).loss; }

static void check_statistics(const PairStats *got, const PairStats *want) {
  /* Float scores near 1, computed in other batch compositions. */
  check_close(got->loss, want->loss, 1e-5);
  check_close(got->score_mean, want->score_mean, 1e-5);
  check_close(got->score_std, want->score_std, 1e-5);
  check_close(got->margin_mean, want->margin_mean, 1e-5);
  check_close(got->accuracy, want->accuracy, 1e-9);
}

static void gradient_does_not_depend_on_cutting(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_SCALAR, 32);
  Pairs p = make_pairs();
  for (int n = 4; n <= PAIRS; n++) {
    PairBatch b = {n, p.offsets, p.tokens, n == 4 ? NULL : p.margins};
    float *want = reference_gradient(m, &b);
    PairStats s = reference_statistics(m, &b), train, eval;
    const int micro_tokens[] = {1, 22, 1000};
    for (int i = 0; i < 3; i++) {
      reward_train_step(m, &b, micro_tokens[i], tiny_no_step(), 1, &train);
      check_gradient(m, want);
      check_statistics(&train, &s);
      reward_eval(m, &b, micro_tokens[2 - i], &eval);
      check_statistics(&eval, &s);
      assert_true(train.tokens == p.offsets[2 * n] && eval.tokens == train.tokens);
      assert_true(train.grad_norm > 0 && !train.skipped && eval.grad_norm == 0);
    }
    check_differences(m, reference_loss, &b, want);
    free(want);
  }
  model_free(m);
  world_close(&w);
}

static void learns_the_pairs(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_SCALAR, 33);
  Pairs p = make_pairs();
  PairBatch b = {PAIRS, p.offsets, p.tokens, NULL}, none = {0, p.offsets, p.tokens, NULL};
  AdamW opt = {.lr = 5e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
  PairStats s;
  reward_train_step(m, &none, 64, opt, 1, &s);
  assert_true(s.loss == 0 && s.accuracy == 0 && s.grad_norm == 0 && s.tokens == 0);
  reward_eval(m, &none, 64, &s);
  assert_true(s.loss == 0 && s.score_std == 0);
  for (int i = 0; i < 30; i++) reward_train_step(m, &b, 64, opt, 1, &s);
  reward_eval(m, &b, 64, &s);
  check_close(s.accuracy, 0.9, 1e-9); /* all but the tie, which counts half */
  assert_true(s.margin_mean > 0.5);
  model_free(m);
  world_close(&w);
}

static void fixture_pair_loss(void **state) {
  (void)state;
  Error err = {""};
  StFile *f = st_open(test_path("fixtures/llama-reward/reference.safetensors"), &err);
  if (!f) fail_msg("%s", err.msg);
  int32_t offsets[5] = {0}, tokens[256];
  for (int i = 0; i < 4; i++) {
    const StEntry *e = ppo_fixture_find(f, i, "input_ids");
    offsets[i + 1] = offsets[i] + (int32_t)e->numel;
    assert_int_equal(st_read_i32(f, e, 0, e->numel, tokens + offsets[i], NULL), 0);
  }
  World w = world_open();
  ModelOptions o = {.head = HEAD_SCALAR, .trainable = true, .zero = {.stage = 3}};
  Model *m = model_load(w.device, w.grid, w.arena, test_path("fixtures/llama-reward"), &o, &err);
  if (!m) fail_msg("%s", err.msg);
  PairBatch b = {2, offsets, tokens, NULL};
  PairStats s;
  double mean = 0;
  reward_train_step(m, &b, 30, tiny_no_step(), 1, &s);
  for (int i = 0; i < 4; i++) mean += (double)ppo_fixture_scalar(f, i, "score") / 4;
  /* 2e-5 for values, 1e-4 for gradients: the agreed bounds between two float implementations. */
  check_close(s.loss, (double)ppo_fixture_scalar(f, -1, "pair_loss"), 2e-5);
  check_close(s.score_mean, mean, 2e-5);
  check_fixture_gradient(f, "grad.", m);
  model_free(m);
  world_close(&w);
  st_close(f);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(scores_at_the_last_token),
    cmocka_unit_test(gradient_does_not_depend_on_cutting),
    cmocka_unit_test(learns_the_pairs),
    cmocka_unit_test(fixture_pair_loss),
};
TEST_MAIN(tests)
