/* The pair loss, shaping, the KL controller, and the stored normalisation. */
#include <math.h>

#include "core/fs.h"
#include "reward/reward.h"
#include "tests/ppo_fixture.h"

static void close_to(double got, double want, double tolerance) {
  if (!(fabs(got - want) <= tolerance * fmax(1, fabs(want))))
    fail_msg("got %.9g, expected %.9g (tolerance %g)", got, want, tolerance);
}

/* ---- pairs ---- */

static double pair_reference(double c, double r, double margin) {
  return -log(1 / (1 + exp(-(c - r - margin))));
}

static void pair_gradient_by_differences(void **state) {
  (void)state;
  const float scores[] = {-3, -0.5f, 0, 0.25f, 4};
  const float margins[] = {0, 0.5f, -1};
  for (int i = 0; i < 5; i++)
    for (int j = 0; j < 5; j++)
      for (int k = 0; k < 3; k++) {
        double c = (double)scores[i], r = (double)scores[j], m = (double)margins[k], h = 1e-6;
        PairTerm t = pair_term(scores[i], scores[j], margins[k]);
        double dc = (pair_reference(c + h, r, m) - pair_reference(c - h, r, m)) / (2 * h);
        double dr = (pair_reference(c, r + h, m) - pair_reference(c, r - h, m)) / (2 * h);
        /* Rounded once to float; the differences lose some 1e-9. */
        close_to((double)t.loss, pair_reference(c, r, m), 2e-7);
        close_to((double)t.dchosen, dc, 2e-7);
        close_to((double)t.drejected, dr, 2e-7);
      }
}

static void pair_extremes(void **state) {
  (void)state;
  PairTerm t = pair_term(-2000, 2000, 0); /* log(sigmoid(-4000)) is -inf */
  assert_true(t.loss == 4000 && t.dchosen == -1 && t.drejected == 1);
  t = pair_term(2000, -2000, 0);
  assert_true(t.loss == 0 && t.dchosen == 0 && t.drejected == 0);
  t = pair_term(0, 0, 0);
  close_to((double)t.loss, log(2), 1e-7);
  assert_true(t.dchosen == -0.5f && t.drejected == 0.5f);
  t = pair_term(NAN, 0, 0);
  assert_true(isnan(t.loss) && isnan(t.dchosen) && isnan(t.drejected));
}

/* ---- shaping ---- */

/* Responses of 3 (ended), 0, 1 (cut) and 2 (ended) tokens. */
static Rollout *make_rollout(void) {
  const int32_t lengths[4] = {5, 3, 2, 5}, prompts[4] = {2, 3, 1, 3};
  Rollout *ro = rollout_create(4, lengths);
  for (int b = 0; b < 4; b++) ro->prompt_len[b] = prompts[b];
  ro->ended[0] = ro->ended[3] = 1;
  ro->scores[0] = 2, ro->scores[1] = 100, ro->scores[2] = 0, ro->scores[3] = -9;
  for (int t = 0; t < ro->n_tokens; t++) {
    ro->old_logprobs[t] = -1 - 0.125f * (float)t;
    ro->ref_logprobs[t] = -1.5f;
    ro->rewards[t] = 0;
  }
  ro->have = RO_SCORES | RO_OLD_LOGPROBS | RO_REF_LOGPROBS;
  return ro;
}

static double kl_at(const Rollout *ro, int t, int kind) {
  double r = (double)ro->old_logprobs[t] - (double)ro->ref_logprobs[t];
  return kind == 1 ? r : kind == 2 ? r * r / 2 : exp(-r) - 1 + r;
}

static void rewards_land_where_they_belong(void **state) {
  (void)state;
  for (int kind = 1; kind <= 3; kind++) {
    Rollout *ro = make_rollout();
    ShapeConfig c = {.kl_coef = 0.2,
                     .kl_in_reward = true,
                     .kl_kind = kind,
                     .reward_clip = 4,
                     .missing_eos_penalty = 1};
    const double paid[4] = {2, 0, -1 /* a score of 0, less the penalty */, -4 /* clipped */};
    ShapeStats s;
    shape_rewards(ro, &c, &s);
    assert_true(ro->have & RO_REWARDS);
    double kl = 0, whole = 0;
    for (int b = 0; b < 4; b++)
      for (int t = ro->offsets[b]; t < ro->offsets[b + 1]; t++) {
        double want = 0;
        if (t >= rollout_first(ro, b)) want = -0.2 * kl_at(ro, t, kind);
        if (t >= rollout_first(ro, b) && t == ro->offsets[b + 1] - 1) want += paid[b];
        if (t >= rollout_first(ro, b)) kl += kl_at(ro, t, kind), whole += want;
        close_to((double)ro->rewards[t], want, 1e-6); /* one rounding to float, near 1 */
      }
    /* Three sequences have an answer; the empty one, with its score of 100, weighs nothing. */
    close_to(s.kl_mean, kl / 3, 1e-6);
    close_to(s.kl_token_mean, kl / 6, 1e-6);
    close_to(s.reward_mean, whole / 3, 1e-6);
    close_to(s.score_mean, (2 + 0 - 9) / 3.0, 1e-12);
    double m = -7 / 3.0;
    double var = ((2 - m) * (2 - m) + m * m + (-9 - m) * (-9 - m)) / 3;
    close_to(s.score_std, sqrt(var), 1e-12);
    close_to(s.ended_fraction, 2 / 3.0, 1e-12);
    close_to(s.response_len_mean, 2, 1e-12);
    rollout_free(ro);
  }
}

/* The policy likes its tokens more than the reference does: KL positive, so the reward is lower. */
static void kl_lowers_the_reward(void **state) {
  (void)state;
  const int32_t length = 3;
  Rollout *ro = rollout_create(1, &length);
  ro->prompt_len[0] = 1;
  for (int t = 0; t < 3; t++) ro->old_logprobs[t] = -0.5f, ro->ref_logprobs[t] = -2;
  ro->have = RO_SCORES | RO_OLD_LOGPROBS | RO_REF_LOGPROBS;
  ShapeStats s;
  shape_rewards(ro, &(ShapeConfig){.kl_coef = 0.1, .kl_in_reward = true, .kl_kind = 1}, &s);
  assert_true(s.kl_mean == 3.0 && ro->rewards[0] == 0);
  close_to((double)ro->rewards[1], -0.15, 1e-7);
  close_to((double)ro->rewards[2], -0.15, 1e-7); /* the score is 0, and counts as 0 */
  rollout_free(ro);
}

static void kl_in_the_loss_leaves_rewards_alone(void **state) {
  (void)state;
  Rollout *ro = make_rollout();
  ShapeConfig c = {.kl_coef = 0.2, .kl_in_reward = false, .kl_kind = 3};
  ShapeStats s;
  shape_rewards(ro, &c, &s);
  const float want[] = {0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, -9};
  assert_memory_equal(ro->rewards, want, sizeof want); /* clip 0: none */
  double kl = 0;
  for (int b = 0; b < 4; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) kl += kl_at(ro, t, 3);
  close_to(s.kl_mean, kl / 3, 1e-6); /* still measured, for the controller */
  ro->have = RO_SCORES;
  shape_rewards(ro, &c, &s);
  assert_true(s.kl_mean == 0 && ro->rewards[4] == 2);
  rollout_free(ro);
}

/* Rewards that an earlier step left behind are not added to; NaN does not become the bound. */
static void shaping_twice_and_nan(void **state) {
  (void)state;
  Rollout *ro = make_rollout();
  ShapeConfig c = {.kl_coef = 0.2, .kl_in_reward = true, .kl_kind = 1, .reward_clip = 1};
  ShapeStats first, second;
  shape_rewards(ro, &c, &first);
  float last = ro->rewards[4];
  shape_rewards(ro, &c, &second);
  assert_true(ro->rewards[4] == last && first.reward_mean == second.reward_mean);
  ro->scores[0] = NAN;
  shape_rewards(ro, &c, &second);
  assert_true(isnan(ro->rewards[4]) && !isnan(ro->rewards[3]));
  rollout_free(ro);
}

static void only_empty_answers(void **state) {
  (void)state;
  const int32_t lengths[2] = {2, 1};
  Rollout *ro = rollout_create(2, lengths);
  ro->prompt_len[0] = 2, ro->prompt_len[1] = 1;
  ro->scores[0] = ro->scores[1] = 5;
  ro->have = RO_SCORES | RO_OLD_LOGPROBS | RO_REF_LOGPROBS;
  ShapeStats s;
  shape_rewards(ro, &(ShapeConfig){.kl_coef = 1, .kl_in_reward = true, .kl_kind = 1}, &s);
  for (int t = 0; t < 3; t++) assert_true(ro->rewards[t] == 0);
  assert_true(s.kl_mean == 0 && s.score_mean == 0 && s.score_std == 0 && s.reward_mean == 0 &&
              s.response_len_mean == 0 && s.kl_token_mean == 0);
  rollout_free(ro);
}

static void fixture_rewards(void **state) {
  (void)state;
  StFile *f = ppo_fixture_open();
  Rollout *ro = ppo_fixture_rollout(f);
  ShapeConfig c = {
      .kl_coef = PPO_KL_COEF, .kl_in_reward = true, .kl_kind = 1, .reward_clip = PPO_REWARD_CLIP};
  ShapeStats s;
  shape_rewards(ro, &c, &s);
  /* 2e-5: the agreed bound for values. */
  assert_true(ppo_fixture_error(f, ro, "rewards", ro->rewards) < 2e-5);
  rollout_free(ro);
  st_close(f);
}

/* ---- controller ---- */

static void controller_by_hand(void **state) {
  (void)state;
  KlController c = {.adaptive = true, .coef = 0.2, .target = 6, .horizon = 10000};
  kl_controller_update(&c, 6.6, 256); /* error 0.1: 1 + 0.1 * 0.0256 = 1.00256 */
  close_to(c.coef, 0.200512, 1e-12);
  kl_controller_update(&c, 60, 256); /* error clipped at 0.2: 1.00512 */
  close_to(c.coef, 0.20153862144, 1e-12);
  kl_controller_update(&c, 5.4, 1000); /* error -0.1: 0.99 */
  close_to(c.coef, 0.1995232352256, 1e-12);
  kl_controller_update(&c, -50, 1000); /* error clipped at -0.2: 0.98 */
  close_to(c.coef, 0.195532770521088, 1e-12);
  kl_controller_update(&c, 6, 1000); /* on target */
  kl_controller_update(&c, 12, 0);   /* no sequences */
  kl_controller_update(&c, NAN, 1000);
  kl_controller_update(&c, INFINITY, 1000);
  close_to(c.coef, 0.195532770521088, 1e-12);
  c.adaptive = false;
  kl_controller_update(&c, 60, 1000);
  close_to(c.coef, 0.195532770521088, 1e-12);
}

/* ---- normalisation ---- */

static int read_norm(const char *config, ScoreNorm *out, Error *err) {
  char *file = fs_join(test_tmp(), "config.json");
  assert_int_equal(fs_write_atomic(file, config, strlen(config), NULL), 0);
  free(file);
  err->msg[0] = 0;
  return score_norm_read(test_tmp(), out, err);
}

static void refuses(const char *config, const char *word) {
  ScoreNorm n;
  Error err;
  assert_int_equal(read_norm(config, &n, &err), -1);
  if (!strstr(err.msg, word) || !strstr(err.msg, "config.json"))
    fail_msg("\"%s\" does not name %s and the file", err.msg, word);
}

static void stored_normalisation(void **state) {
  (void)state;
  ScoreNorm n;
  Error err;
  assert_int_equal(
      read_norm("{\"rlhf_score_mean\": 0, \"rlhf_score_std\": 2.5, \"x\": 1}", &n, &err), 0);
  assert_true(n.known && n.mean == 0 && n.std == 2.5); /* a mean of 0 is a mean */
  assert_int_equal(read_norm("{\"hidden_size\": 8}", &n, &err), 0);
  assert_false(n.known);
  refuses("{\"rlhf_score_mean\": 1}", "rlhf_score_std");
  refuses("{\"rlhf_score_std\": 1}", "rlhf_score_mean");
  refuses("{\"rlhf_score_mean\": 1, \"rlhf_score_std\": 0}", "above 0");
  refuses("{\"rlhf_score_mean\": 1, \"rlhf_score_std\": -2}", "above 0");
  refuses("{\"rlhf_score_mean\": \"1\", \"rlhf_score_std\": 2}", "rlhf_score_mean");
  refuses("{\"rlhf_score_mean\": 1, \"rlhf_score_std\": null}", "rlhf_score_std");
  refuses("[1]", "object");
  refuses("{", "config.json");
  assert_int_equal(score_norm_read("no/such/folder", &n, &err), -1);
  assert_non_null(strstr(err.msg, "no/such/folder"));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(pair_gradient_by_differences),
    cmocka_unit_test(pair_extremes),
    cmocka_unit_test(rewards_land_where_they_belong),
    cmocka_unit_test(kl_lowers_the_reward),
    cmocka_unit_test(kl_in_the_loss_leaves_rewards_alone),
    cmocka_unit_test(shaping_twice_and_nan),
    cmocka_unit_test(only_empty_answers),
    cmocka_unit_test(fixture_rewards),
    cmocka_unit_test(controller_by_hand),
    cmocka_unit_test(stored_normalisation),
};
TEST_MAIN(tests)
