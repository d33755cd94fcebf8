/* Sampling: draws follow the filtered softmax (chi-square), greedy takes the first maximum, the
 * recorded log-probability is that of the draw, banned ids are never drawn. */
#include "tests/kernels_test.h"

enum { V = 37, DRAWS = 20000, BATCH = 50 };

typedef struct Case {
  SampleParams p;
  bool ban;
} Case;

static const Case cases[] = {
    {{1, 0, 1, false}, false},     {{0.7F, 0, 1, false}, false},    {{2, 0, 1, false}, true},
    {{1, 5, 1, false}, false},     {{1, 1, 1, false}, false},       {{1, 0, 0.8F, false}, false},
    {{1, 0, 0.05F, false}, false}, {{0.9F, 12, 0.7F, false}, true}, {{1, 100, 0.95F, false}, true},
    {{1, 37, 1, false}, false},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static void make_logits(float *x) {
  for (int j = 0; j < V; j++) x[j] = 1.5F * rng_normal(9, 1, (uint64_t)j);
  x[20] = x[10]; /* equal weights: the lower id comes first */
}

static void make_bans(uint8_t *banned) {
  for (int j = 0; j < V; j++) banned[j] = j % 5 == 2;
}

/* The distribution by its definition: sort, cut to top_k, renormalise, keep the smallest head whose
 * mass reaches top_p, renormalise. */
static void filtered(const float *x, SampleParams p, const uint8_t *banned, double *prob) {
  bool taken[V] = {false};
  int order[V], n = 0;
  double sum = 0;
  for (;; n++) {
    int best = -1;
    for (int j = 0; j < V; j++)
      if (!taken[j] && !(banned && banned[j]) && (best < 0 || x[j] > x[best])) best = j;
    if (best < 0 || (p.top_k > 0 && n >= p.top_k)) break;
    taken[best] = true;
    order[n] = best;
  }
  for (int j = 0; j < V; j++) prob[j] = 0;
  for (int i = 0; i < n; i++)
    sum += prob[order[i]] =
        exp(((double)x[order[i]] - (double)x[order[0]]) / (double)p.temperature);
  double mass = 0, kept = 0;
  for (int i = 0; i < n; i++) {
    bool keep = i == 0 || p.top_p >= 1 || mass < (double)p.top_p * sum;
    mass += prob[order[i]];
    if (keep) kept += prob[order[i]];
    if (!keep) prob[order[i]] = 0;
  }
  for (int j = 0; j < V; j++) prob[j] /= kept;
}

/* Upper bound of chi-square with n degrees of freedom at a probability of about 1e-6
 * (Wilson-Hilferty with 4.75 standard deviations); seeds are fixed, so this either holds or not. */
static double chi_square_bound(int n) {
  double a = 2.0 / (9.0 * n), c = 1 - a + 4.75 * sqrt(a);
  return n * c * c * c;
}

static void check_draws(Device *d, const Case *c, uint64_t seed) {
  float x[V], *logits = mem_alloc((size_t)BATCH * V, sizeof(float)), u[BATCH], lp[BATCH];
  uint8_t banned[V];
  double prob[V], chi = 0;
  int32_t token[BATCH];
  int count[V] = {0}, cells = 0;
  make_logits(x);
  make_bans(banned);
  for (int b = 0; b < BATCH; b++) memcpy(logits + (ptrdiff_t)b * V, x, sizeof x);
  filtered(x, c->p, c->ban ? banned : NULL, prob);
  for (int i = 0; i < DRAWS; i += BATCH) {
    for (int b = 0; b < BATCH; b++) u[b] = (float)rng_uniform(seed, 3, (uint64_t)i + (uint64_t)b);
    Tensor bans = c->ban ? tensor_1d(banned, DT_U8, V) : absent();
    device_ops(d)->sample(d, f32_2d(logits, BATCH, V), c->p, f32_1d(u, BATCH), bans,
                          i32_1d(token, BATCH), f32_1d(lp, BATCH));
    for (int b = 0; b < BATCH; b++) {
      assert_in_range(token[b], 0, V - 1);
      if (prob[token[b]] == 0) fail_msg("id %d was filtered out, yet drawn", token[b]);
      assert_true(fabs((double)lp[b] - log(prob[token[b]])) < 2e-6); /* a few float roundings */
      count[token[b]]++;
    }
  }
  for (int j = 0; j < V; j++) {
    double expected = prob[j] * DRAWS;
    if (expected == 0) continue;
    chi += (count[j] - expected) * (count[j] - expected) / expected;
    cells++;
  }
  if (cells > 1 && chi > chi_square_bound(cells - 1))
    fail_msg("chi-square %.1f over %d cells, bound %.1f", chi, cells, chi_square_bound(cells - 1));
  free(logits);
}

static void draws_follow_the_filtered_softmax(void **state) {
  (void)state;
  Device *d = open_cpu(2);
  for (int i = 0; i < N_CASES; i++) check_draws(d, cases + i, (uint64_t)i + 1);
  device_close(d);
}

/* A vocabulary of thousands, where selection works on blocks: against sorting. */
static void large_vocabulary(void **state) {
  (void)state;
  enum { LARGE = 5003 };
  static const SampleParams params[] = {{1, 0, 0.9F, false},
                                        {1, 50, 1, false},
                                        {0.6F, 400, 0.5F, false},
                                        {1, 0, 1, false},
                                        {3, 0, 0.99F, false}};
  Device *d = open_cpu(2);
  float *x = random_floats(4, LARGE, 2);
  for (int i = 0; i < 5; i++)
    for (int k = 0; k < 40; k++) {
      SampleParams p = params[i];
      float u = (float)rng_uniform(5, (uint64_t)i, (uint64_t)k), lp;
      int32_t token;
      device_ops(d)->sample(d, f32_2d(x, 1, LARGE), p, f32_1d(&u, 1), absent(), i32_1d(&token, 1),
                            f32_1d(&lp, 1));
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
  SampleParams p = {1, 0, 1, false};
  for (int i = 0; i < LARGE; i++) {
    float u = ((float)i + 0.5F) / LARGE, lp;
    int32_t token;
    device_ops(d)->sample(d, f32_2d(x, 1, LARGE), p, f32_1d(&u, 1), absent(), i32_1d(&token, 1),
                          f32_1d(&lp, 1));
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
      {1, 3, 1, false}, {1, 0, half_way, false}, {1, 5, half_way, false}};
  for (int i = 0; i < 3; i++)
    for (int k = 0; k < 200; k++) {
      float u = ((float)k + 0.5F) / 200, lp;
      int32_t token;
      device_ops(d)->sample(d, f32_2d(x, 1, 6), params[i], f32_1d(&u, 1), absent(),
                            i32_1d(&token, 1), f32_1d(&lp, 1));
      assert_in_range(token, 1, 3);
      double want = (double)x[token] - log(heavy + 2 * light);
      assert_true(fabs((double)lp - want) < 1e-6); /* a few float roundings */
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
  device_ops(d)->sample(d, f32_2d(x, 3, 4), p, absent(), absent(), i32_1d(token, 3), f32_1d(lp, 3));
  assert_int_equal(token[0], 1); /* ties to the lowest id */
  assert_int_equal(token[1], 0);
  assert_int_equal(token[2], 3);
  assert_true(fabsf(lp[1] + logf(4)) < 1e-6F);
  double want = 3 - log(exp(1) + exp(3) + exp(2) + exp(3));
  assert_true(fabs((double)lp[0] - want) < 1e-6);
  device_ops(d)->sample(d, f32_2d(x, 3, 4), p, absent(), tensor_1d(banned, DT_U8, 4),
                        i32_1d(token, 3), f32_1d(lp, 3));
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
      SampleParams p = {1, 0, filter ? 0.9F : 1, false};
      float u = us[i];
      int32_t token;
      device_ops(d)->sample(d, f32_2d(x, 1, 4), p, f32_1d(&u, 1), absent(), i32_1d(&token, 1),
                            f32_1d(&lp, 1));
      assert_int_equal(token, 2);
      assert_true(lp == 0);
    }
  float nan_row[4] = {NAN, NAN, NAN, NAN}, u = 0.5F; /* a diverged model: a valid id, NaN logged */
  uint8_t banned[4] = {1, 0, 0, 0};
  for (int filter = 0; filter < 2; filter++) {
    int32_t token;
    SampleParams p = {1, filter ? 2 : 0, 1, false};
    device_ops(d)->sample(d, f32_2d(nan_row, 1, 4), p, f32_1d(&u, 1), tensor_1d(banned, DT_U8, 4),
                          i32_1d(&token, 1), f32_1d(&lp, 1));
    assert_true(token >= 1 && token < 4 && isnan(lp));
  }
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(draws_follow_the_filtered_softmax),
    cmocka_unit_test(large_vocabulary),
    cmocka_unit_test(u_picks_the_place),
    cmocka_unit_test(ties_at_the_edge),
    cmocka_unit_test(greedy),
    cmocka_unit_test(extremes),
};
TEST_MAIN(tests)
