/* Advantages against a direct double sum, whitening, and the value loss of one token. */
#include <math.h>

#include "core/rng.h"
#include "critic/critic.h"
#include "tests/ppo_fixture.h"

static double rnd(uint64_t i) { return (double)rng_normal(7, 1, i); }

/* Responses of 7, 0, 1 and 12 tokens. Prompt positions hold NaN where gae must not look. */
static Rollout *make_rollout(void) {
  const int32_t lengths[4] = {10, 4, 3, 13}, prompts[4] = {3, 4, 2, 1};
  Rollout *ro = rollout_create(4, lengths);
  for (int b = 0; b < 4; b++) {
    ro->prompt_len[b] = prompts[b];
    for (int t = ro->offsets[b]; t < ro->offsets[b + 1]; t++) {
      bool response = t >= rollout_first(ro, b);
      ro->values[t] = response ? (float)rnd((uint64_t)t) : NAN;
      ro->rewards[t] = response ? (float)rnd(1000 + (uint64_t)t) : NAN;
    }
  }
  ro->have = RO_VALUES | RO_REWARDS;
  return ro;
}

/* A_t = sum over l of (gamma lambda)^l delta_{t+l}, straight from the definition. */
static double advantage_reference(const Rollout *ro, int b, int t, double gamma, double lambda) {
  double sum = 0;
  for (int k = t; k < ro->offsets[b + 1]; k++) {
    double next = k + 1 < ro->offsets[b + 1] ? (double)ro->values[k + 1] : 0;
    double delta = (double)ro->rewards[k] + gamma * next - (double)ro->values[k];
    sum += pow(gamma * lambda, k - t) * delta;
  }
  return sum;
}

static void gae_by_double_sum(void **state) {
  (void)state;
  const float settings[][2] = {{1, 1}, {0.99f, 0.95f}, {0.9f, 0}, {0, 0.5f}, {1, 0.95f}};
  for (size_t s = 0; s < 5; s++) {
    Rollout *ro = make_rollout();
    gae(ro, settings[s][0], settings[s][1]);
    assert_true((ro->have & RO_ADVANTAGES) && (ro->have & RO_RETURNS));
    for (int b = 0; b < ro->n_seqs; b++)
      for (int t = ro->offsets[b]; t < ro->offsets[b + 1]; t++) {
        bool response = t >= rollout_first(ro, b);
        double want =
            response ? advantage_reference(ro, b, t, (double)settings[s][0], (double)settings[s][1])
                     : 0;
        /* Sums of a dozen numbers near 1 in double, rounded once to float. */
        assert_true(fabs((double)ro->advantages[t] - want) < 1e-6 * fmax(1, fabs(want)));
        double ret = response ? want + (double)ro->values[t] : 0;
        assert_true(fabs((double)ro->returns[t] - ret) < 1e-6 * fmax(1, fabs(ret)));
      }
    rollout_free(ro);
  }
}

/* gamma = lambda = 1: the return is the plain sum of rewards to come, so the first response token
 * sees the score on the last one, and nothing of the next sequence. */
static void last_reward_reaches_first_token(void **state) {
  (void)state;
  const int32_t lengths[2] = {6, 5};
  Rollout *ro = rollout_create(2, lengths);
  ro->prompt_len[0] = ro->prompt_len[1] = 2;
  ro->rewards[5] = 3;
  ro->rewards[10] = -8;
  for (int t = 0; t < 11; t++) ro->values[t] = 0.5f;
  ro->have = RO_VALUES | RO_REWARDS;
  gae(ro, 1, 1);
  for (int t = 2; t < 6; t++) assert_true(ro->returns[t] == 3 && ro->advantages[t] == 2.5f);
  for (int t = 8; t < 11; t++) assert_true(ro->returns[t] == -8);
  rollout_free(ro);
}

static void whitening(void **state) {
  (void)state;
  Rollout *ro = make_rollout();
  gae(ro, 0.99f, 0.95f);
  /* A large offset: E[x^2] - E[x]^2 in float would have no digit left. */
  double mean = 0, var = 0, n = (double)rollout_response_tokens(ro);
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) ro->advantages[t] += 30000;
  float *raw_N = mem_alloc((size_t)ro->n_tokens, sizeof *raw_N);
  float *returns_N = mem_alloc((size_t)ro->n_tokens, sizeof *returns_N);
  memcpy(raw_N, ro->advantages, (size_t)ro->n_tokens * sizeof *raw_N);
  memcpy(returns_N, ro->returns, (size_t)ro->n_tokens * sizeof *returns_N);
  whiten_advantages(ro);
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) mean += (double)raw_N[t] / n;
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++)
      var += ((double)raw_N[t] - mean) * ((double)raw_N[t] - mean) / n;
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = ro->offsets[b]; t < ro->offsets[b + 1]; t++) {
      bool response = t >= rollout_first(ro, b);
      double want = response ? ((double)raw_N[t] - mean) / sqrt(var + 1e-8) : 0;
      assert_true(fabs((double)ro->advantages[t] - want) < 1e-6 * fmax(1, fabs(want)));
    }
  assert_memory_equal(ro->returns, returns_N, (size_t)ro->n_tokens * sizeof(float));
  free(raw_N);
  free(returns_N);
  rollout_free(ro);
}

static void whitening_without_variance(void **state) {
  (void)state;
  Rollout *ro = make_rollout();
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) ro->advantages[t] = 0.1f;
  ro->have |= RO_ADVANTAGES;
  whiten_advantages(ro);
  for (int t = 0; t < ro->n_tokens; t++) assert_true(ro->advantages[t] == 0);
  rollout_free(ro);
}

/* Only empty answers: no 0/0. */
static void nothing_to_whiten(void **state) {
  (void)state;
  const int32_t lengths[2] = {3, 2};
  Rollout *ro = rollout_create(2, lengths);
  ro->prompt_len[0] = 3;
  ro->prompt_len[1] = 2;
  ro->have = RO_VALUES | RO_REWARDS;
  gae(ro, 1, 1);
  whiten_advantages(ro);
  for (int t = 0; t < 5; t++) assert_true(ro->advantages[t] == 0 && ro->returns[t] == 0);
  rollout_free(ro);
}

static double value_reference(double v, double old, double ret, double clip) {
  double plain = (v - ret) * (v - ret);
  if (clip == 0) return 0.5 * plain;
  double vc = old + fmin(fmax(v - old, -clip), clip);
  return 0.5 * fmax(plain, (vc - ret) * (vc - ret));
}

static void value_gradient_by_differences(void **state) {
  (void)state;
  const double moves[] = {-0.7, -0.21, -0.1, 0, 0.05, 0.19, 0.4, 1.1};
  const double errors[] = {-1.3, -0.3, -0.05, 0.0, 0.12, 0.6, 2.0};
  int stopped[2] = {0, 0}, flowing[2] = {0, 0};
  for (int c = 0; c < 2; c++)
    for (size_t i = 0; i < 8; i++)
      for (size_t j = 0; j < 7; j++) {
        double clip = c ? 0.2 : 0, old = 0.3, v = old + moves[i], ret = old + errors[j], h = 1e-6;
        ValueTerm t = value_term((float)v, (float)old, (float)ret, (float)clip);
        double slope =
            (value_reference(v + h, old, ret, clip) - value_reference(v - h, old, ret, clip)) /
            (2 * h);
        /* Differences of floats near 1: 1e-7, grown by the square. */
        assert_true(fabs((double)t.loss - value_reference(v, old, ret, clip)) < 1e-6);
        assert_true(fabs((double)t.dvalue - slope) < 1e-6);
        bool outside = c && fabs(moves[i]) > 0.2;
        assert_int_equal(t.clipped, outside);
        if (outside) (t.dvalue == 0 ? stopped : flowing)[moves[i] > 0]++;
      }
  assert_true(stopped[0] && stopped[1] && flowing[0] && flowing[1]);
  assert_true(isnan(value_term(NAN, 0, 1, 0.2f).dvalue));
  assert_true(isnan(value_term(0, 0, NAN, 0.2f).dvalue));
}

static void fixture_advantages_and_value_loss(void **state) {
  (void)state;
  StFile *f = ppo_fixture_open();
  Rollout *ro = ppo_fixture_rollout(f);
  ppo_fixture_field(f, ro, "rewards", ro->rewards);
  ro->have |= RO_REWARDS;
  gae(ro, PPO_GAMMA, PPO_LAMBDA);
  /* 2e-5: the agreed bound for values; PyTorch's recursion is in float. */
  assert_true(ppo_fixture_error(f, ro, "advantages_raw", ro->advantages) < 2e-5);
  assert_true(ppo_fixture_error(f, ro, "returns", ro->returns) < 2e-5);
  whiten_advantages(ro);
  assert_true(ppo_fixture_error(f, ro, "advantages", ro->advantages) < 2e-5);

  float *v_N = mem_zalloc((size_t)ro->n_tokens, sizeof *v_N);
  ppo_fixture_field(f, ro, "new_values", v_N);
  double loss = 0, n = (double)rollout_response_tokens(ro);
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++)
      loss += (double)value_term(v_N[t], ro->values[t], ro->returns[t], PPO_CLIP).loss / n;
  double want = (double)ppo_fixture_scalar(f, -1, "value_loss");
  assert_true(fabs(loss - want) < 2e-5 * fabs(want));
  free(v_N);
  rollout_free(ro);
  st_close(f);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(gae_by_double_sum),
    cmocka_unit_test(last_reward_reaches_first_token),
    cmocka_unit_test(whitening),
    cmocka_unit_test(whitening_without_variance),
    cmocka_unit_test(nothing_to_whiten),
    cmocka_unit_test(value_gradient_by_differences),
    cmocka_unit_test(fixture_advantages_and_value_loss),
};
TEST_MAIN(tests)
