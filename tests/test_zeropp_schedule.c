/* Learning-rate schedules, step by step. */
#include <math.h>

#include "tests/test.h"
#include "zeropp/zeropp.h"

/* Rounding of a handful of double operations. */
#define EPS 1e-15

static const char *const schedules[] = {"constant", "linear", "cosine"};

static OptimizerConfig config(const char *schedule, int64_t warmup, double min_ratio) {
  return (OptimizerConfig){
      .lr = 0.5, .schedule = schedule, .warmup_steps = warmup, .min_lr_ratio = min_ratio};
}

static void first_step_moves_and_last_reaches_the_minimum(void **state) {
  (void)state;
  for (int k = 0; k < 3; k++)
    for (int64_t warmup = 0; warmup < 5; warmup++)
      for (int64_t total = warmup + 1; total < 40; total++)
        for (int r = 0; r < 3; r++) {
          double ratio = r * 0.25, min = k == 0 ? 0.5 : 0.5 * ratio;
          OptimizerConfig o = config(schedules[k], warmup, ratio);
          assert_true(optimizer_lr(&o, 0, total) > 0);
          if (total > 1) assert_true(fabs(optimizer_lr(&o, total - 1, total) - min) < EPS);
          for (int64_t s = 0; s < total - 1; s++) { /* not before the last step */
            double lr = optimizer_lr(&o, s, total);
            assert_true(lr > 0 && lr <= 0.5);
            if (s >= warmup) assert_true(k == 0 ? lr == 0.5 : lr > min);
          }
        }
}

static void warmup_is_linear_and_counts_from_one(void **state) {
  (void)state;
  for (int k = 0; k < 3; k++) {
    OptimizerConfig o = config(schedules[k], 4, 0.1);
    for (int64_t s = 0; s < 4; s++)
      assert_true(fabs(optimizer_lr(&o, s, 100) - 0.5 * (double)(s + 1) / 4) < EPS);
    assert_true(fabs(optimizer_lr(&o, 4, 100) - 0.5) < EPS); /* no jump behind it */
  }
}

static void decay_has_its_shape(void **state) {
  (void)state;
  OptimizerConfig lin = config("linear", 2, 0.2), cosine = config("cosine", 2, 0.2);
  for (int64_t s = 2; s <= 12; s++) { /* total 13: ten equal parts */
    double x = (double)(s - 2) / 10;
    assert_true(fabs(optimizer_lr(&lin, s, 13) - 0.5 * (0.2 + 0.8 * (1 - x))) < EPS);
    double c = 0.5 * (0.2 + 0.8 * (0.5 + 0.5 * cos(M_PI * x)));
    assert_true(fabs(optimizer_lr(&cosine, s, 13) - c) < EPS);
  }
  assert_true(optimizer_lr(&cosine, 500, 13) == optimizer_lr(&cosine, 12, 13)); /* stays there */
}

static void a_restart_continues_it(void **state) {
  (void)state; /* the rate is a function of the step alone: asking out of order changes nothing */
  OptimizerConfig o = config("cosine", 3, 0);
  double straight[20];
  for (int64_t s = 0; s < 20; s++) straight[s] = optimizer_lr(&o, s, 20);
  for (int64_t s = 19; s >= 0; s--) assert_true(optimizer_lr(&o, s, 20) == straight[s]);
}

static void adamw_takes_the_recipe(void **state) {
  (void)state;
  OptimizerConfig o = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  AdamW a = optimizer_adamw(&o, 0.25);
  assert_true(a.lr == 0.25f && a.beta1 == 0.9f && a.beta2 == 0.95f);
  assert_true(a.eps == 1e-8f && a.weight_decay == 0.1f);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(first_step_moves_and_last_reaches_the_minimum),
    cmocka_unit_test(warmup_is_linear_and_counts_from_one),
    cmocka_unit_test(decay_has_its_shape),
    cmocka_unit_test(a_restart_continues_it),
    cmocka_unit_test(adamw_takes_the_recipe),
};
TEST_MAIN(tests)
