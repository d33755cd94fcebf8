/* Log-probabilities, entropy and their gradient; and the exp they are made of. */
#include "kernels/cpu/vecmath.h"
#include "tests/kernels_test.h"

/* |got - want| in units of the last place of want's float, denormal floats included. */
static double exp_ulp_error(float x) {
  double want = exp((double)x), got = (double)exp_f32(x);
  if (want > 3.4028235677973366e38) return isinf(got) ? 0 : 1e9; /* rounds to infinity */
  int e;
  frexp(want, &e);
  return fabs(got - want) / ldexp(1, (e < -125 ? -125 : e) - 24);
}

static void exp_is_accurate(void **state) {
  (void)state;
  double worst = 0;
  for (uint64_t u = 0; u < 1ULL << 32; u += 2003) {
    float x = float_of_bits((uint32_t)u);
    if (!isnan(x) && exp_ulp_error(x) > worst) worst = exp_ulp_error(x);
  }
  for (int i = -200000; i <= 200000; i++) { /* -110 .. 110, finely */
    float x = (float)i * 0.00055F;
    if (exp_ulp_error(x) > worst) worst = exp_ulp_error(x);
  }
  if (worst > 2) fail_msg("exp is off by %.3f ulp", worst);
  assert_true(exp_f32(0) == 1 && isnan(exp_f32(NAN)));
  assert_true(exp_f32(-INFINITY) == 0 && isinf(exp_f32(INFINITY)));
}

typedef struct Shape {
  int64_t r, v;
  float inv_temp;
} Shape;

static const Shape shapes[] = {{1, 1, 1},      {3, 17, 1}, {5, 33, 0.5F}, {2, 130, 2},
                               {17, 65, 1.3F}, {0, 7, 1},  {1, 4097, 1},  {40, 1000, 1}};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct Problem {
  Shape s;
  float *logits;
  int32_t *target;
  double *x, *logprob, *lse, *entropy, *dlogprob, *dentropy;
} Problem;

static double reference(void *ctx) {
  Problem *p = ctx;
  double loss = 0, t = (double)p->s.inv_temp;
  for (int64_t i = 0; i < p->s.r; i++) {
    const double *x = p->x + i * p->s.v;
    double max = -INFINITY, sum = 0, mean = 0;
    for (int64_t j = 0; j < p->s.v; j++) max = fmax(max, x[j] * t);
    for (int64_t j = 0; j < p->s.v; j++) sum += exp(x[j] * t - max);
    p->lse[i] = max + log(sum);
    for (int64_t j = 0; j < p->s.v; j++) mean += exp(x[j] * t - p->lse[i]) * (x[j] * t);
    p->logprob[i] = x[p->target[i]] * t - p->lse[i];
    p->entropy[i] = p->lse[i] - mean;
    loss += p->dlogprob[i] * p->logprob[i] + p->dentropy[i] * p->entropy[i];
  }
  return loss;
}

static Problem problem_create(Shape s, const float *dlogprob, const float *dentropy) {
  Problem p = {.s = s};
  p.logits = random_floats(1, s.r * s.v, 5);
  p.target = random_ids(2, s.r, (int32_t)s.v);
  p.x = widen(p.logits, s.r * s.v);
  p.logprob = zeros(s.r);
  p.lse = zeros(s.r);
  p.entropy = zeros(s.r);
  p.dlogprob = widen(dlogprob, s.r);
  p.dentropy = dentropy ? widen(dentropy, s.r) : zeros(s.r);
  return p;
}

static void problem_free(Problem *p) {
  free(p->logits);
  free(p->target);
  free(p->x);
  free(p->logprob);
  free(p->lse);
  free(p->entropy);
  free(p->dlogprob);
  free(p->dentropy);
}

static void check_shape(Device *d, Shape s, bool with_entropy) {
  float *dlogprob = random_floats(3, s.r, 1), *dentropy = random_floats(4, s.r, 1);
  Problem p = problem_create(s, dlogprob, with_entropy ? dentropy : NULL);
  float *lp = filled_floats(s.r, NAN), *lse = filled_floats(s.r, NAN), *h = filled_floats(s.r, NAN);
  Tensor logits = f32_2d(p.logits, s.r, s.v), target = i32_1d(p.target, s.r);
  Tensor entropy = with_entropy ? f32_1d(h, s.r) : absent();
  device_ops(d)->logprob_fwd(d, logits, target, s.inv_temp, f32_1d(lp, s.r), f32_1d(lse, s.r),
                             entropy);
  reference(&p);
  /* Values up to about 40: the subtraction of the maximum and the sum each round once. */
  assert_close("logprob", lp, p.logprob, s.r, 1e-6, 1);
  assert_close("lse", lse, p.lse, s.r, 1e-6, 1);
  if (with_entropy) assert_close("entropy", h, p.entropy, s.r, 3e-6, 1);
  if (s.r * s.v < 2000) { /* finite differences cost the square */
    double *want = finite_differences(reference, &p, p.x, s.r * s.v);
    device_ops(d)->logprob_bwd(d, logits, target, s.inv_temp, f32_1d(lse, s.r), entropy,
                               f32_1d(dlogprob, s.r),
                               with_entropy ? f32_1d(dentropy, s.r) : absent(), logits);
    assert_close("dlogits", p.logits, want, s.r * s.v, 5e-6, 0.1); /* exp(z - lse) at |z| of 40 */
    free(want);
  }
  free(dlogprob);
  free(dentropy);
  free(lp);
  free(lse);
  free(h);
  problem_free(&p);
}

static void logprob(void **state) {
  (void)state;
  for (int threads = 1; threads <= 2; threads++) {
    Device *d = open_cpu(threads);
    for (int i = 0; i < N_SHAPES; i++) {
      check_shape(d, shapes[i], false);
      check_shape(d, shapes[i], true);
    }
    device_close(d);
  }
}

/* Logits of +-1e4 and -infinity: no overflow, no 0 x infinity; NaN stays in its row. */
static void logprob_extremes(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  float x[12] = {1e4F, -1e4F, -INFINITY, 0, -1e4F, -1e4F, -1e4F, -1e4F, NAN, 1, 2, 3};
  int32_t target[3] = {0, 3, 1};
  float lp[3], lse[3], h[3], one[3] = {1, 1, 1};
  device_ops(d)->logprob_fwd(d, f32_2d(x, 3, 4), i32_1d(target, 3), 1, f32_1d(lp, 3),
                             f32_1d(lse, 3), f32_1d(h, 3));
  assert_true(lp[0] == 0 && h[0] == 0 && lse[0] == 1e4F);
  assert_true(fabsf(lp[1] + logf(4)) < 1e-6F && fabsf(h[1] - logf(4)) < 1e-6F); /* a few ulp */
  assert_true(isnan(lp[2]) && isnan(lse[2]) && isnan(h[2]));
  device_ops(d)->logprob_bwd(d, f32_2d(x, 3, 4), i32_1d(target, 3), 1, f32_1d(lse, 3), f32_1d(h, 3),
                             f32_1d(one, 3), f32_1d(one, 3), f32_2d(x, 3, 4));
  for (int j = 0; j < 4; j++) assert_true(x[j] == 0 && isnan(x[8 + j]));
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(exp_is_accurate),
    cmocka_unit_test(logprob),
    cmocka_unit_test(logprob_extremes),
};
TEST_MAIN(tests)
