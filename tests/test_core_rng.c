/* core/rng.h: the published Philox vectors, the distributions, and permutations. */
#include "core/rng.h"

#include <math.h>

#include "tests/test.h"

static void known_answers(void **state) {
  (void)state;
  /* Random123's kat_vectors, philox4x32 with 10 rounds. */
  static const struct {
    uint64_t seed, stream, index;
    uint32_t want[4];
  } kat[] = {
      {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {0x299f31d0a4093822,
       0x0370734413198a2e,
       0x85a308d3243f6a88,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (size_t i = 0; i < sizeof kat / sizeof *kat; i++) {
    RngBlock b = rng_block(kat[i].seed, kat[i].stream, kat[i].index);
    for (int k = 0; k < 4; k++) assert_int_equal(b.v[k], kat[i].want[k]);
  }
}

enum { N = 200000 };

/* Largest distance between the empirical and the true distribution function, scaled: it passes 2.2
 * with probability 2 exp(-2 * 2.2^2) = 1e-4 for a right generator, and the seed is fixed. */
static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
static double ks_distance(double *cdf) {
  qsort(cdf, N, sizeof *cdf, by_value);
  double worst = 0;
  for (int i = 0; i < N; i++) {
    worst = fmax(worst, cdf[i] - (double)i / N);
    worst = fmax(worst, (i + 1.0) / N - cdf[i]);
  }
  return worst * sqrt(N);
}

static void uniform_is_uniform(void **state) {
  (void)state;
  double *u = malloc(N * sizeof *u);
  for (int i = 0; i < N; i++) {
    u[i] = rng_uniform(1, 2, (uint64_t)i);
    assert_true(u[i] > 0 && u[i] < 1);
  }
  assert_true(ks_distance(u) < 2.2);
  free(u);
}

/* Rows are the numbers one by one, bit for bit: also where a float lies next to the middle between
 * two, which one in two million does. */
static void rows_are_the_same_numbers(void **state) {
  (void)state;
  enum { ROW = 1 << 22 };
  static const uint64_t at[] = {0, 1, 0xfffffff0, UINT64_MAX - 2 * 77};
  float *x = malloc(ROW * sizeof *x);
  for (int i = 0; i < 4; i++) {
    for (int n = 0; n < 77; n += 19) {
      x[n] = 9;
      rng_normals(7 + (uint64_t)i, rng_hash("row"), at[i], n, x);
      assert_true(x[n] == 9);
      for (int k = 0; k < n; k++)
        assert_true(x[k] == rng_normal(7 + (uint64_t)i, rng_hash("row"), at[i] + (uint64_t)k));
    }
  }
  rng_normals(1, 2, 3, ROW, x);
  for (int k = 0; k < ROW; k++) assert_true(x[k] == rng_normal(1, 2, 3 + (uint64_t)k));
  free(x);
}

static void normal_is_normal(void **state) {
  (void)state;
  double *u = malloc(N * sizeof *u), sum = 0, squares = 0;
  for (int i = 0; i < N; i++) {
    double x = (double)rng_normal(1, 2, (uint64_t)i);
    sum += x;
    squares += x * x;
    u[i] = 0.5 * erfc(-x / sqrt(2));
  }
  assert_true(fabs(sum / N) < 4 / sqrt(N)); /* four standard errors of the mean, and the variance */
  assert_true(fabs(squares / N - 1) < 4 * sqrt(2.0 / N));
  assert_true(ks_distance(u) < 2.2);
  free(u);
}

static void streams_differ(void **state) {
  (void)state;
  assert_true(rng_hash("a") != rng_hash("b") && rng_hash("") == 0xcbf29ce484222325u);
  assert_true(rng_hash("foobar") == 0x85944171f73967e8u); /* published FNV-1a value */
  assert_true(rng_mix(1, 2) != rng_mix(2, 1) && rng_mix(0, 0) != 0);
  double a = rng_uniform(1, rng_mix(5, 1), 0), b = rng_uniform(1, rng_mix(5, 2), 0);
  assert_true(a != b && a == rng_uniform(1, rng_mix(5, 1), 0));
  assert_true(rng_uniform(2, rng_mix(5, 1), 0) != a);
}

static void permutation_is_valid(void **state) {
  (void)state;
  for (int32_t n = 0; n < 300; n++) {
    int32_t v[300];
    char seen[300] = "";
    rng_permute(9, (uint64_t)n, v, n);
    for (int32_t i = 0; i < n; i++) {
      assert_in_range(v[i], 0, n - 1);
      assert_false(seen[v[i]]);
      seen[v[i]] = 1;
    }
  }
}

/* Each of 7 items in each of 7 places equally often: chi-square with 36 degrees of freedom stays
 * below 73 with probability 1 - 3e-4, and the seed is fixed. */
static void permutation_is_fair(void **state) {
  (void)state;
  enum { ROUNDS = 7000, K = 7 };
  int count[K][K] = {{0}};
  for (int r = 0; r < ROUNDS; r++) {
    int32_t v[K];
    rng_permute(3, (uint64_t)r, v, K);
    for (int i = 0; i < K; i++) count[i][v[i]]++;
  }
  double chi = 0, want = (double)ROUNDS / K;
  for (int i = 0; i < K; i++)
    for (int j = 0; j < K; j++) chi += (count[i][j] - want) * (count[i][j] - want) / want;
  assert_true(chi < 73);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(known_answers),
    cmocka_unit_test(uniform_is_uniform),
    cmocka_unit_test(rows_are_the_same_numbers),
    cmocka_unit_test(normal_is_normal),
    cmocka_unit_test(streams_differ),
    cmocka_unit_test(permutation_is_valid),
    cmocka_unit_test(permutation_is_fair),
};
TEST_MAIN(tests)
