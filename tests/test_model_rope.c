/* Rotary tables against the formulas of the papers, and how they grow. */
#include "model/internal.h"
#include "tests/model_test.h"

enum { HEAD = 16, PAIRS = 8 };

/* In double; the table's float32 steps are a few ulp of an angle below 64 away: 64 * 1e-7 * 3.
 * Wavelengths run from 6 to 60000, so that the llama3 case has all three ranges (kept, blended,
 * divided). */
static double wanted_frequency(const ModelConfig *c, int length, int i) {
  double theta = c->rope_theta, n = c->rope_original_positions, dim = rotary_width(c);
  if (c->rope == ROPE_DYNAMIC && length > n)
    theta *= pow(c->rope_factor * length / n - (c->rope_factor - 1), dim / (dim - 2));
  double f = pow(theta, -2.0 * i / dim), wavelen = 2 * M_PI / f;
  if (c->rope == ROPE_LINEAR) return f / c->rope_factor;
  if (c->rope == ROPE_LONGROPE)
    return f / (double)(length > n ? c->rope_long[i] : c->rope_short[i]);
  if (c->rope != ROPE_LLAMA3) return f;
  if (wavelen < n / c->rope_high_freq) return f;
  if (wavelen > n / c->rope_low_freq) return f / c->rope_factor;
  double blend = (n / wavelen - c->rope_low_freq) / (c->rope_high_freq - c->rope_low_freq);
  return (1 - blend) * f / c->rope_factor + blend * f;
}

static ModelConfig config_of(RopeKind kind) {
  ModelConfig c = tiny_config(true, false);
  c.head_dim = HEAD;
  c.max_positions = 2000;
  c.rope = kind;
  c.rope_factor = kind == ROPE_LONGROPE ? 0 : 8;
  c.rope_low_freq = 1;
  c.rope_high_freq = 4;
  c.rope_original_positions = kind == ROPE_LLAMA3 ? 1024 : 100;
  for (int i = 0; i < PAIRS; i++) {
    c.rope_short[i] = 1 + 0.1f * (float)i;
    c.rope_long[i] = 2 + (float)i;
  }
  return c;
}

/* 64 positions of a sequence of this length. */
static void check_rows(const Model *m, int length, double factor) {
  int first = rope_first(m, length), half = rotary_width(&m->config) / 2;
  for (int p = 0; p < 64; p++)
    for (int i = 0; i < half; i++) {
      double angle = p * wanted_frequency(&m->config, length, i);
      int64_t at = (int64_t)(first + p) * half + i;
      if (!(fabs((double)tensor_f32(m->rope.cos_Pr)[at] - factor * cos(angle)) < 3e-5) ||
          !(fabs((double)tensor_f32(m->rope.sin_Pr)[at] - factor * sin(angle)) < 3e-5))
        fail_msg("kind %d, length %d, position %d, pair %d", (int)m->config.rope, length, p, i);
    }
}

static void ensure(Model *m, int length) {
  int32_t n = length;
  rope_ensure(m, 1, &n, &n);
}

static void tables(void **state) {
  (void)state;
  Bench b = bench_open();
  const RopeKind kinds[] = {ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_DYNAMIC, ROPE_LONGROPE};
  for (int k = 0; k < 5; k++) {
    ModelConfig c = config_of(kinds[k]);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *m = tiny_model(&b, b.grid, &c, &o);
    /* sqrt(1 + ln(2000 / 100) / ln 100), longrope's own rule. */
    double factor = kinds[k] == ROPE_LONGROPE ? sqrt(1 + log(20) / log(100)) : 1;
    const int32_t length[] = {70, 400, 100, 101, 1999};
    rope_ensure(m, 5, length, length);
    for (int i = 0; i < 5; i++) check_rows(m, length[i], factor);
    for (int i = 0; i < m->rope.n; i++) assert_true(m->rope.set[i].positions <= 2000);
    if (!model_rope_varies(&c)) assert_true(m->rope.n == 1 && m->rope.set[0].positions >= 1999);
    model_free(m);
  }
  bench_close(&b);
}

/* A set that is there stays while others come; dynamic forgets lengths that are not wanted. */
static void growth(void **state) {
  (void)state;
  Bench b = bench_open();
  const RopeKind kinds[] = {ROPE_DYNAMIC, ROPE_LONGROPE};
  for (int k = 0; k < 2; k++) {
    ModelConfig c = config_of(kinds[k]);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *m = tiny_model(&b, b.grid, &c, &o);
    rope_ensure(m, 0, NULL, NULL); /* an empty batch still has a table to look at */
    assert_true(m->rope.cos_Pr.data != NULL);
    ensure(m, 400);
    ensure(m, 500);
    assert_int_equal(m->rope.n, 2);
    ensure(m, 50);
    assert_int_equal(m->rope.n, 2); /* nothing was missing */
    check_rows(m, 50, kinds[k] == ROPE_LONGROPE ? sqrt(1 + log(20) / log(100)) : 1);
    model_rope_fix(m, 1200); /* short sequences, too, are now rotated as long ones */
    ensure(m, 70);
    int first = rope_first(m, 70);
    assert_int_equal(first, rope_first(m, 1200));
    assert_int_equal(model_rope_fixed(m), 1200);
    model_free(m);
  }
  bench_close(&b);
}

static void factors(void **state) {
  (void)state;
  Bench b = bench_open();
  for (int given = 0; given < 3; given++) {
    ModelConfig c = config_of(ROPE_LONGROPE);
    c.rotary_dim = 6;
    if (given == 0) c.rope_attention_factor = 1.5;
    if (given == 1) c.rope_factor = 4;
    if (given == 2) c.rope_original_positions = 2000; /* nothing is stretched */
    double want = given == 0 ? 1.5 : given == 1 ? sqrt(1 + log(4) / log(100)) : 1;
    ModelOptions o = tiny_options(HEAD_LM);
    Model *m = tiny_model(&b, b.grid, &c, &o);
    ensure(m, 70);
    assert_int_equal(m->rope.cos_Pr.dim[1], 3);
    check_rows(m, 70, want);
    model_free(m);
  }
  bench_close(&b);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(tables),
    cmocka_unit_test(growth),
    cmocka_unit_test(factors),
};
TEST_MAIN(tests)
