/* KL estimators and the policy loss of one token, against formulas in double precision. */
#include <math.h>

#include "actor/actor.h"
#include "tests/ppo_fixture.h"

/* A float formula of a few operations against the same in double: some units of 6e-8. */
#define ROUNDING 2e-6

static double kl_reference(int kind, double logp, double logq) {
  double r = logp - logq;
  return kind == 1 ? r : kind == 2 ? r * r / 2 : exp(-r) - 1 + r;
}

static void close_to(double got, double want, double tolerance) {
  if (!(fabs(got - want) <= tolerance * fmax(1, fabs(want))))
    fail_msg("got %.9g, expected %.9g (tolerance %g)", got, want, tolerance);
}

static void kl_names(void **state) {
  (void)state;
  assert_int_equal(kl_kind_parse("k1"), KL_K1);
  assert_int_equal(kl_kind_parse("k2"), KL_K2);
  assert_int_equal(kl_kind_parse("k3"), KL_K3);
  assert_int_equal(kl_kind_parse("k4"), -1);
  assert_int_equal(kl_kind_parse(""), -1);
  assert_int_equal(KL_K1, 1); /* ShapeConfig counts the same way */
}

static void kl_values_and_signs(void **state) {
  (void)state;
  const float lp[] = {-0.1f, -1.0f, -2.5f, -7.0f};
  for (int kind = KL_K1; kind <= KL_K3; kind++)
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 4; j++) {
        double want = kl_reference(kind, (double)lp[i], (double)lp[j]);
        close_to((double)kl_estimate((KlKind)kind, lp[i], lp[j]), want, ROUNDING);
        double h = 1e-6, slope = (kl_reference(kind, (double)lp[i] + h, (double)lp[j]) -
                                  kl_reference(kind, (double)lp[i] - h, (double)lp[j])) /
                                 (2 * h);
        close_to((double)kl_gradient((KlKind)kind, lp[i], lp[j]), slope, ROUNDING);
      }
  /* A policy that likes the token more than the reference does has a positive k1. */
  assert_true(kl_estimate(KL_K1, -1, -2) > 0);
  assert_true(kl_estimate(KL_K1, -2, -1) < 0);
}

/* With all outcomes counted by their probability, each estimator gives the divergence (k2: near).
 */
static void kl_expectation(void **state) {
  (void)state;
  const double p[3] = {0.5, 0.3, 0.2}, q[3] = {0.45, 0.33, 0.22};
  double exact = 0, mean[4] = {0};
  for (int i = 0; i < 3; i++) {
    exact += p[i] * log(p[i] / q[i]);
    for (int k = KL_K1; k <= KL_K3; k++)
      mean[k] += p[i] * (double)kl_estimate((KlKind)k, (float)log(p[i]), (float)log(q[i]));
  }
  assert_true(exact > 0);
  /* The divergence is a small difference of numbers near 1: float leaves about 1e-7 of it. */
  assert_true(fabs(mean[KL_K1] - exact) < 3e-7 && fabs(mean[KL_K3] - exact) < 3e-7);
  assert_true(fabs(mean[KL_K2] - exact) < 0.1 * exact);
}

static void kl_does_not_overflow(void **state) {
  (void)state;
  float far = kl_estimate(KL_K3, -200, 0), slope = kl_gradient(KL_K3, -200, 0);
  close_to((double)far, expm1(20) - 200, ROUNDING);
  close_to((double)slope, -expm1(20), ROUNDING); /* still pulls the token back up */
  assert_true(log_ratio_clamp(21) == 20 && log_ratio_clamp(-21) == -20 &&
              log_ratio_clamp(19) == 19);
  assert_true(isnan(log_ratio_clamp(NAN)));
  close_to((double)kl_estimate(KL_K3, 0, -200), 199, ROUNDING);
  close_to((double)kl_gradient(KL_K3, 0, -200), 1, ROUNDING);
  assert_true(isnan(kl_estimate(KL_K3, NAN, -1)));
}

typedef struct Case {
  PolicyLoss p;
  double old, ref, adv, entropy, sampled;
} Case;

static double importance_reference(const Case *c) {
  double cap = (double)c->p.importance_cap;
  return cap > 0 ? fmin(exp(c->old - c->sampled), cap) : 1;
}

static double policy_reference(const Case *c, double newlp, double entropy) {
  double r = exp(newlp - c->old), lo = 1 - (double)c->p.clip_low, hi = 1 + (double)c->p.clip_high;
  double clip = fmin(fmax(r, lo), hi);
  double loss = importance_reference(c) * fmax(-c->adv * r, -c->adv * clip) -
                (double)c->p.entropy_coef * entropy;
  if (c->p.kl_in_loss)
    loss += (double)c->p.kl_coef * kl_reference((int)c->p.kl_kind, newlp, c->ref);
  return loss;
}

static void check_policy_case(const Case *c, double newlp) {
  float weight = importance_weight(c->p.importance_cap, (float)c->old, (float)c->sampled);
  PolicyTerm t = policy_term(&c->p, (float)newlp, (float)c->old, (float)c->ref, (float)c->adv,
                             (float)c->entropy, weight);
  double h = 1e-6;
  double slope =
      (policy_reference(c, newlp + h, c->entropy) - policy_reference(c, newlp - h, c->entropy)) /
      (2 * h);
  double entropy_slope =
      (policy_reference(c, newlp, c->entropy + h) - policy_reference(c, newlp, c->entropy - h)) /
      (2 * h);
  close_to((double)t.loss, policy_reference(c, newlp, c->entropy), ROUNDING);
  close_to((double)t.dlogprob, slope, ROUNDING);
  close_to((double)t.dentropy, entropy_slope, ROUNDING);
  close_to((double)t.kl, kl_reference((int)c->p.kl_kind, newlp, c->ref), ROUNDING);
}

/* Log-ratios on both sides of both bounds, both signs of the advantage, every KL, entropy on and
 * off, importance weights off, below, near and above the cap. */
static void policy_gradient_by_differences(void **state) {
  (void)state;
  const double log_ratio[] = {-0.9, -0.3, -0.1, 0.0, 0.05, 0.2, 0.3, 0.8};
  const double adv[] = {-1.7, -0.2, 0.0, 0.6, 2.5};
  int stopped[2] = {0, 0}, flowing[2] = {0, 0}; /* by side: low, high */
  for (int kind = KL_K1; kind <= KL_K3; kind++)
    for (int options = 0; options < 16; options++)
      for (size_t i = 0; i < 8; i++)
        for (size_t j = 0; j < 5; j++) {
          Case c = {{.clip_low = 0.2f,
                     .clip_high = 0.28f,
                     .entropy_coef = options & 1 ? 0.01f : 0,
                     .kl_in_loss = (options & 2) != 0,
                     .kl_kind = (KlKind)kind,
                     .kl_coef = 0.3f,
                     .temperature = 1,
                     .importance_cap = options & 12 ? 2 : 0},
                    -1.25,
                    -1.5,
                    adv[j],
                    2.0,
                    options & 8 ? options & 4 ? -1.93 : -4 : -0.75};
          check_policy_case(&c, c.old + log_ratio[i]);
          PolicyTerm t =
              policy_term(&c.p, (float)(c.old + log_ratio[i]), -1.25f, -1.5f, (float)adv[j], 2, 1);
          bool outside = log_ratio[i] < log(0.8) || log_ratio[i] > log(1.28);
          assert_int_equal(t.clipped, outside);
          if (options == 0 && outside && adv[j] != 0)
            (t.dlogprob == 0 ? stopped : flowing)[log_ratio[i] > 0]++;
        }
  /* Each side both stops the gradient and, for the other sign, lets it through. */
  assert_true(stopped[0] && stopped[1] && flowing[0] && flowing[1]);
}

static void policy_extremes(void **state) {
  (void)state;
  PolicyLoss p = {0.2f, 0.2f, 0.01f, true, KL_K3, 0.1f, 1.0f, 0};
  PolicyTerm t = policy_term(&p, -0.01f, -150, -150, -1, 1, 1); /* exp(150) is beyond float */
  assert_true(isfinite(t.loss) && isfinite(t.dlogprob) && isfinite(t.ratio) && t.dlogprob > 0);
  t = policy_term(&p, -150, -0.01f, -0.01f, 1, 1, 1);
  assert_true(isfinite(t.loss) && isfinite(t.dlogprob));
  /* Ratio 1: nothing is clipped and the gradient is the plain policy gradient. */
  p.kl_in_loss = false;
  t = policy_term(&p, -2, -2, -9, 0.75f, 0, 1);
  assert_true(t.ratio == 1.0f && !t.clipped && t.dlogprob == -0.75f);
  /* A broken number must reach the gradient, where the step is skipped, and not be clamped away. */
  assert_true(isnan(policy_term(&p, NAN, -1, -1, 1, 0, 1).dlogprob));
  assert_true(isnan(policy_term(&p, -1, -1, -1, NAN, 0, 1).dlogprob));
  p.kl_in_loss = true;
  assert_true(isnan(policy_term(&p, -1, -1, NAN, 1, 0, 1).dlogprob));
}

/* The weight alone: its cap, both directions, what is broken; and that it multiplies the policy's
 * part and nothing else. */
static void importance_weights(void **state) {
  (void)state;
  close_to((double)importance_weight(2, -1, -1.25f), exp(0.25), ROUNDING);
  close_to((double)importance_weight(2, -1.25f, -1), exp(-0.25), ROUNDING); /* no lower bound */
  assert_true(importance_weight(2, -1, -1) == 1 && importance_weight(0.5f, -1, -1) == 0.5f);
  assert_true(importance_weight(2, -1, -1.7f) == 2 && importance_weight(2, -1, -200) == 2);
  assert_true(importance_weight(0, -1, -9) == 1 && importance_weight(0, -9, -1) == 1); /* off */
  assert_true(importance_weight(2, -200, -1) > 0);
  assert_true(isnan(importance_weight(2, NAN, -1)) && isnan(importance_weight(2, -1, NAN)));
  PolicyLoss p = {0.2f, 0.2f, 0.25f, true, KL_K1, 0.5f, 1, 2};
  PolicyTerm one = policy_term(&p, -1, -1, -1.5f, 2, 3, 1);
  PolicyTerm half = policy_term(&p, -1, -1, -1.5f, 2, 3, 0.5f);
  assert_true(one.policy == -2 && half.policy == -1);
  assert_true(half.loss - half.policy == one.loss - one.policy && half.kl == one.kl);
  assert_true(half.dlogprob - 0.5f == (one.dlogprob - 0.5f) / 2); /* 0.5: k1's */
  assert_true(half.dentropy == one.dentropy && half.ratio == 1);
}

static void fixture_policy_loss(void **state) {
  (void)state;
  StFile *f = ppo_fixture_open();
  Rollout *ro = ppo_fixture_rollout(f);
  ppo_fixture_field(f, ro, "advantages", ro->advantages);
  float *new_N = mem_zalloc((size_t)ro->n_tokens, sizeof *new_N);
  ppo_fixture_field(f, ro, "new_logprobs", new_N);
  PolicyLoss p = {PPO_CLIP, PPO_CLIP, 0, false, KL_K1, 0, 1, 0};
  double loss = 0, k1 = 0, clipped = 0, n = (double)rollout_response_tokens(ro);
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) {
      PolicyTerm term = policy_term(&p, new_N[t], ro->old_logprobs[t], ro->ref_logprobs[t],
                                    ro->advantages[t], 0, 1);
      loss += (double)term.policy / n;
      clipped += term.clipped / n;
      k1 += (double)kl_estimate(KL_K1, ro->old_logprobs[t], new_N[t]) / n;
    }
  /* PyTorch's own sums are float: 2e-5 is the agreed bound for values. */
  close_to(loss, (double)ppo_fixture_scalar(f, -1, "policy_loss"), 2e-5);
  close_to(k1, (double)ppo_fixture_scalar(f, -1, "approx_kl_k1"), 2e-5);
  close_to(clipped, (double)ppo_fixture_scalar(f, -1, "clip_fraction"), 2e-5);
  free(new_N);
  rollout_free(ro);
  st_close(f);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(kl_names),
    cmocka_unit_test(kl_values_and_signs),
    cmocka_unit_test(kl_expectation),
    cmocka_unit_test(kl_does_not_overflow),
    cmocka_unit_test(policy_gradient_by_differences),
    cmocka_unit_test(policy_extremes),
    cmocka_unit_test(importance_weights),
    cmocka_unit_test(fixture_policy_loss),
};
TEST_MAIN(tests)
