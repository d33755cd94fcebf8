/* Sampling: draws follow the filtered softmax (chi-square), greedy takes the first maximum, the
 * recorded log-probability is that of the draw, banned ids are never drawn. */
#include "tests/kernels_test.h"
#include "tests/sample_cases.h"

enum { DRAWS = 20000, BATCH = 50 };

static SeenTokens none_seen(void) { return (SeenTokens){0}; }
static KeptTokens none_kept(void) { return (KeptTokens){0}; }

/* The bits say of each id whether it has a probability. */
static void check_bits(const uint8_t *bits, const double *prob) {
  for (int j = 0; j < SAMPLE_W * 8; j++)
    assert_int_equal(bits[j / 8] >> j % 8 & 1, j < SAMPLE_V && prob[j] > 0);
}

/* Counts of what was drawn; each draw's log-probability must be that of `prob`, and what was kept
 * its ids. Every row has its own bits, from the last slot down. */
static void count_draws(Device *d, const SampleCase *c, uint64_t seed, const double *prob,
                        int *count) {
  float *logits = mem_alloc((size_t)BATCH * SAMPLE_V, sizeof(float)), u[BATCH], lp[BATCH];
  uint8_t banned[SAMPLE_V], bits[BATCH][SAMPLE_W], kept[3][BATCH][SAMPLE_W];
  int32_t token[BATCH], slot[BATCH], newest[BATCH];
  for (int j = 0; j < SAMPLE_V; j++) banned[j] = sample_banned(j);
  for (int b = 0; b < BATCH; b++) {
    sample_logits(logits + (ptrdiff_t)b * SAMPLE_V);
    slot[b] = BATCH - 1 - b;
    newest[b] = SAMPLE_NEWEST;
  }
  SeenTokens seen = {tensor_2d(bits, DT_U8, BATCH, SAMPLE_W), i32_1d(slot, BATCH),
                     i32_1d(newest, BATCH)};
  int32_t step = 0;
  KeptTokens keep = {tensor_3d(kept, DT_U8, 3, BATCH, SAMPLE_W), i32_1d(&step, 1)};
  memset(count, 0, SAMPLE_V * sizeof *count);
  for (int i = 0; i < DRAWS; i += BATCH) {
    for (int b = 0; b < BATCH; b++) {
      u[b] = (float)rng_uniform(seed, 3, (uint64_t)i + (uint64_t)b);
      sample_bits(bits[b]);
    }
    Tensor bans = c->ban ? tensor_1d(banned, DT_U8, SAMPLE_V) : absent();
    device_ops(d)->sample(d, f32_2d(logits, BATCH, SAMPLE_V), c->p, f32_1d(u, BATCH), bans, seen,
                          keep, i32_1d(token, BATCH), f32_1d(lp, BATCH));
    for (int b = 0; b < BATCH; b++) check_bits(kept[step][b], prob);
    step = (step + 1) % 3;
    for (int b = 0; b < BATCH; b++) {
      assert_in_range(token[b], 0, SAMPLE_V - 1);
      if (prob[token[b]] <= 0) fail_msg("id %d was filtered out, yet drawn", token[b]);
      assert_true(fabs((double)lp[b] - log(prob[token[b]])) < 2e-6); /* a few float roundings */
      count[token[b]]++;
    }
  }
  free(logits);
}

static void draws_follow_the_filtered_softmax(void **state) {
  (void)state;
  Device *d = open_cpu(2);
  float x[SAMPLE_V];
  double prob[SAMPLE_V], chi, bound;
  int count[SAMPLE_V];
  sample_logits(x);
  for (int i = 0; i < SAMPLE_CASES; i++) {
    sample_distribution(x, &sample_cases[i], prob);
    count_draws(d, &sample_cases[i], (uint64_t)i + 1, prob, count);
    if (!sample_follows(count, prob, &chi, &bound))
      fail_msg("case %d: chi-square %.1f, bound %.1f", i, chi, bound);
  }
  device_close(d);
}

/* The test above tells a distribution from its neighbours: a temperature a tenth off, another
 * penalty, other filters. */
static void draws_do_not_follow_another(void **state) {
  (void)state;
  static const SampleCase drawn = {{1.3F, 20, 0.97F, false, 0.03F, 1.5F}, false};
  Device *d = open_cpu(2);
  float x[SAMPLE_V];
  double prob[SAMPLE_V], chi, bound;
  int count[SAMPLE_V];
  sample_logits(x);
  sample_distribution(x, &drawn, prob);
  count_draws(d, &drawn, 77, prob, count);
  assert_true(sample_follows(count, prob, &chi, &bound));
  for (int k = 0; k < 5; k++) {
    SampleCase other = drawn;
    if (k == 0) other.p.temperature *= 1.1F;
    if (k == 1) other.p.repetition_penalty = 2;
    if (k == 2) other.p.top_k = 0, other.p.top_p = 1, other.p.min_p = 0;
    if (k == 3) other.p.top_p = 0.85F;
    if (k == 4) other.p.min_p = 0.1F;
    sample_distribution(x, &other, prob);
    if (sample_follows(count, prob, &chi, &bound))
      fail_msg("other distribution %d passes: chi-square %.1f, bound %.1f", k, chi, bound);
  }
  device_close(d);
}

/* The bit of the newest token is set, no other; a row without a slot is not penalized; greedy
 * choices are. */
static void repetition_penalty(void **state) {
  (void)state;
  enum { ROWS = 4, IDS = 11, WIDTH = 2 };
  Device *d = open_cpu(1);
  float x[ROWS][IDS], lp[ROWS];
  uint8_t bits[3][WIDTH] = {{0x01, 0}, {0, 0}, {0xff, 0x07}};
  int32_t slot[ROWS] = {2, -1, 0, 1}, newest[ROWS] = {3, 5, 9, 5}, token[ROWS];
  for (int b = 0; b < ROWS; b++)
    for (int j = 0; j < IDS; j++) x[b][j] = j == 5 ? 3 : j == 7 ? 2 : j == 10 ? -1 : 0;
  SeenTokens seen = {tensor_2d(bits, DT_U8, 3, WIDTH), i32_1d(slot, ROWS), i32_1d(newest, ROWS)};
  SampleParams p = {.greedy = true, .repetition_penalty = 2};
  device_ops(d)->sample(d, f32_2d(&x[0][0], ROWS, IDS), p, absent(), absent(), seen, none_kept(),
                        i32_1d(token, ROWS), f32_1d(lp, ROWS));
  static const int32_t want[ROWS] = {5, 5, 5, 7}; /* all halved; none; others; 3 / 2 below 2 */
  assert_memory_equal(token, want, sizeof want);
  double rest = 8,
         all[ROWS] = {exp(1.5) + exp(1) + exp(-2) + rest, exp(3) + exp(2) + exp(-1) + rest, 0, 0};
  all[2] = all[1], all[3] = exp(1.5) + exp(2) + exp(-1) + rest;
  static const double best[ROWS] = {1.5, 3, 3, 2};
  for (int b = 0; b < ROWS; b++) assert_true(fabs((double)lp[b] - best[b] + log(all[b])) < 1e-6);
  static const uint8_t after[3][WIDTH] = {{0x01, 0x02}, {0x20, 0}, {0xff, 0x07}};
  assert_memory_equal(bits, after, sizeof after);
  device_close(d);
}

/* What keep_only leaves has the log-softmax, entropy and gradient of a smaller vocabulary. */
static void only_what_is_kept(void **state) {
  (void)state;
  enum { R = 5, V = 29, W = 4 };
  Device *d = open_cpu(2);
  float *x = random_floats(6, R * V, 2), lp[R], lse[R], entropy[R], one[R], none[R] = {0};
  float *dx = filled_floats(R * V, NAN);
  uint8_t bits[R][W] = {{0}};
  int32_t target[R];
  double want[R] = {0}, h[R] = {0}, p[R][V];
  for (int r = 0; r < R; r++) {
    double sum = 0;
    target[r] = 3 + 5 * r;
    one[r] = 1;
    for (int j = 0; j < V; j++) {
      bool keep = r == 0 || j == target[r] || (j * 7 + r) % 3 == 0; /* row 0: all */
      bits[r][j / 8] |= (uint8_t)(keep << j % 8);
      sum += p[r][j] = keep ? exp((double)x[r * V + j] / 0.7) : 0;
    }
    for (int j = 0; j < V; j++) p[r][j] /= sum;
    for (int j = 0; j < V; j++) h[r] -= p[r][j] > 0 ? p[r][j] * log(p[r][j]) : 0;
    want[r] = log(p[r][target[r]]);
  }
  const Ops *o = device_ops(d);
  Tensor logits = f32_2d(x, R, V), targets = i32_1d(target, R);
  o->keep_only(d, tensor_2d(bits, DT_U8, R, W), logits);
  o->logprob_fwd(d, logits, targets, 1 / 0.7F, f32_1d(lp, R), f32_1d(lse, R), f32_1d(entropy, R));
  for (int r = 0; r < R; r++) /* float sums of some 20 numbers */
    assert_true(fabs((double)lp[r] - want[r]) < 4e-6 && fabs((double)entropy[r] - h[r]) < 4e-6);
  for (int k = 0; k < 2; k++) { /* of the log-probability, of the entropy */
    o->logprob_bwd(d, logits, targets, 1 / 0.7F, f32_1d(lse, R), f32_1d(entropy, R),
                   f32_1d(k ? none : one, R), f32_1d(k ? one : none, R), f32_2d(dx, R, V));
    for (int r = 0; r < R; r++)
      for (int j = 0; j < V; j++) {
        double q = p[r][j], dz = k ? q > 0 ? -q * (log(q) + h[r]) : 0 : (j == target[r]) - q;
        assert_true(fabs((double)dx[r * V + j] - dz / 0.7) < 4e-6);
      }
  }
  free(x);
  free(dx);
  device_close(d);
}

/* A vocabulary of thousands, where selection works on blocks: against sorting. */
static void large_vocabulary(void **state) {
  (void)state;
  enum { LARGE = 5003 };
  static const SampleParams params[] = {{1, 0, 0.9F, false, 0, 1},
                                        {1, 50, 1, false, 0, 1},
                                        {0.6F, 400, 0.5F, false, 0, 1},
                                        {1, 0, 1, false, 0, 1},
                                        {3, 0, 0.99F, false, 0, 1}};
  Device *d = open_cpu(2);
  float *x = random_floats(4, LARGE, 2);
  for (int i = 0; i < 5; i++)
    for (int k = 0; k < 40; k++) {
      SampleParams p = params[i];
      float u = (float)rng_uniform(5, (uint64_t)i, (uint64_t)k), lp;
      int32_t token;
      device_ops(d)->sample(d, f32_2d(x, 1, LARGE), p, f32_1d(&u, 1), absent(), none_seen(),
                            none_kept(), i32_1d(&token, 1), f32_1d(&lp, 1));
      /* Everything above the drawn token must weigh less than top_p, and number less than top_k. */
      double above = 0, all = 0;
      int before = 0;
      for (int j = 0; j < LARGE; j++) {
        double w = exp((double)x[j] / (double)p.temperature);
        bool ahead = x[j] > x[token] || (x[j] >= x[token] && j < token);
        int rank = 0;
        for (int m = 0; p.top_k > 0 && m < LARGE; m++) rank += x[m] > x[j];
        if (p.top_k == 0 || rank < p.top_k) all += w;
        if (ahead) above += w, before++;
      }
      assert_true(p.top_k == 0 || before < p.top_k);
      assert_true(before == 0 || above < (double)p.top_p * all * (1 + 1e-5)); /* float weights */
      if (p.top_p >= 1) { /* the mass kept is all of it */
        double want = (double)x[token] / (double)p.temperature - log(all);
        assert_true(fabs((double)lp - want) < 3e-6);
      }
    }
  free(x);
  device_close(d);
}

/* Equal weights: u picks the id at its share of the vocabulary, wherever it lies. */
static void u_picks_the_place(void **state) {
  (void)state;
  enum { LARGE = 1000 };
  Device *d = open_cpu(1);
  float *x = filled_floats(LARGE, 0.25F);
  SampleParams p = {1, 0, 1, false, 0, 1};
  for (int i = 0; i < LARGE; i++) {
    float u = ((float)i + 0.5F) / LARGE, lp;
    int32_t token;
    device_ops(d)->sample(d, f32_2d(x, 1, LARGE), p, f32_1d(&u, 1), absent(), none_seen(),
                          none_kept(), i32_1d(&token, 1), f32_1d(&lp, 1));
    assert_int_equal(token, i);
  }
  free(x);
  device_close(d);
}

/* Of ids that weigh the same at the edge of a filter the lowest are kept. */
static void ties_at_the_edge(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  float x[6] = {0, 1, 2, 1, 1, 1};
  double heavy = exp(2), light = exp(1), all = heavy + 4 * light + 1;
  float half_way = (float)((heavy + 1.5 * light) / all); /* needs id 2 and two of the four */
  const SampleParams params[] = {
      {1, 3, 1, false, 0, 1}, {1, 0, half_way, false, 0, 1}, {1, 5, half_way, false, 0, 1}};
  for (int i = 0; i < 3; i++)
    for (int k = 0; k < 200; k++) {
      float u = ((float)k + 0.5F) / 200, lp;
      int32_t token;
      device_ops(d)->sample(d, f32_2d(x, 1, 6), params[i], f32_1d(&u, 1), absent(), none_seen(),
                            none_kept(), i32_1d(&token, 1), f32_1d(&lp, 1));
      assert_in_range(token, 1, 3);
      double want = (double)x[token] - log(heavy + 2 * light);
      assert_true(fabs((double)lp - want) < 1e-6); /* a few float roundings */
    }
  device_close(d);
}

/* Two ids weigh most, and alike: one of them is kept, though rounding makes them weigh more than 1
 * in places. */
static void ties_at_the_top(void **state) {
  (void)state;
  enum { V = 40, FIRST = 3, SECOND = 20 };
  Device *d = open_cpu(1);
  const SampleParams params[] = {
      {0.7F, 1, 1, false, 0, 1}, {0.7F, 0, 0.01F, false, 0, 1}, {0.7F, 1, 0.5F, false, 0, 1}};
  uint8_t bits[5];
  for (int i = 0; i < 3; i++)
    for (int k = 0; k < 500; k++) {
      float x[V], u = 0.99F, lp;
      int32_t token;
      for (int j = 0; j < V; j++) x[j] = 0.173F * (float)k - 1 - (float)j;
      x[FIRST] = x[SECOND] = 0.173F * (float)k;
      KeptTokens kept = {.bits_TBW = tensor_3d(bits, DT_U8, 1, 1, 5)};
      device_ops(d)->sample(d, f32_2d(x, 1, V), params[i], f32_1d(&u, 1), absent(), none_seen(),
                            kept, i32_1d(&token, 1), f32_1d(&lp, 1));
      assert_int_equal(token, FIRST);
      assert_true(fabsf(lp) < 1e-5F);
      for (int b = 0; b < 5; b++) assert_int_equal(bits[b], b == FIRST / 8 ? 1 << FIRST % 8 : 0);
    }
  device_close(d);
}

static void greedy(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  float x[12] = {1, 3, 2, 3, -5, -5, -5, -5, 0, 7, 7, 8}, lp[3];
  uint8_t banned[4] = {0, 1, 0, 0};
  int32_t token[3];
  SampleParams p = {.greedy = true};
  device_ops(d)->sample(d, f32_2d(x, 3, 4), p, absent(), absent(), none_seen(), none_kept(),
                        i32_1d(token, 3), f32_1d(lp, 3));
  assert_int_equal(token[0], 1); /* ties to the lowest id */
  assert_int_equal(token[1], 0);
  assert_int_equal(token[2], 3);
  assert_true(fabsf(lp[1] + logf(4)) < 1e-6F);
  double want = 3 - log(exp(1) + exp(3) + exp(2) + exp(3));
  assert_true(fabs((double)lp[0] - want) < 1e-6);
  device_ops(d)->sample(d, f32_2d(x, 3, 4), p, absent(), tensor_1d(banned, DT_U8, 4), none_seen(),
                        none_kept(), i32_1d(token, 3), f32_1d(lp, 3));
  assert_int_equal(token[0], 3);
  assert_true(fabs((double)lp[0] - want) < 1e-6); /* still of the whole softmax */
  device_close(d);
}

/* u at its ends and logits far apart: always a valid id, and u = 0+ draws the first kept one. */
static void extremes(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  float x[4] = {-3e4F, 0, 3e4F, -INFINITY}, lp;
  const float us[] = {1e-38F, 0.5F, 0.99999994F};
  for (int i = 0; i < 3; i++)
    for (int filter = 0; filter < 2; filter++) {
      SampleParams p = {1, 0, filter ? 0.9F : 1, false, 0, 1};
      float u = us[i];
      int32_t token;
      device_ops(d)->sample(d, f32_2d(x, 1, 4), p, f32_1d(&u, 1), absent(), none_seen(),
                            none_kept(), i32_1d(&token, 1), f32_1d(&lp, 1));
      assert_int_equal(token, 2);
      assert_true(lp == 0);
    }
  float nan_row[4] = {NAN, NAN, NAN, NAN}, u = 0.5F; /* a diverged model: a valid id, NaN logged */
  uint8_t banned[4] = {1, 0, 0, 0};
  for (int filter = 0; filter < 2; filter++) {
    int32_t token;
    SampleParams p = {1, filter ? 2 : 0, 1, false, 0, 1};
    device_ops(d)->sample(d, f32_2d(nan_row, 1, 4), p, f32_1d(&u, 1), tensor_1d(banned, DT_U8, 4),
                          none_seen(), none_kept(), i32_1d(&token, 1), f32_1d(&lp, 1));
    assert_true(token >= 1 && token < 4 && isnan(lp));
  }
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(draws_follow_the_filtered_softmax),
    cmocka_unit_test(draws_do_not_follow_another),
    cmocka_unit_test(repetition_penalty),
    cmocka_unit_test(only_what_is_kept),
    cmocka_unit_test(large_vocabulary),
    cmocka_unit_test(u_picks_the_place),
    cmocka_unit_test(ties_at_the_edge),
    cmocka_unit_test(ties_at_the_top),
    cmocka_unit_test(greedy),
    cmocka_unit_test(extremes),
};
TEST_MAIN(tests)
