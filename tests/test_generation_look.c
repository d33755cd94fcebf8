/* How often the host looks at what was drawn changes nothing: the same tokens, whatever ends, waits
 * or gives way between two looks, and rows that fill up a bucket draw nothing. */
#include "tests/generation_test.h"

enum { N = 90, NEW = 40, VOCAB = 97 };

/* A sequence goes on for some 16 tokens, so that most end by an EOS, anywhere in a burst. */
static GenParams sampled(void) {
  return (GenParams){.sample = {.temperature = 1.3f, .top_p = 1},
                     .max_new_tokens = NEW,
                     .n_eos = 6,
                     .eos_ids = {3, 14, 15, 92, 65, 35},
                     .seed = 7,
                     .step = 2};
}

static const struct Way {
  int look, batch, page, kv, prefill;
} ways[] = {{1, 0, 0, 0, 0},    {3, 0, 0, 0, 0},     {8, 0, 0, 0, 0},    {8, 1, 0, 0, 0},
            {3, 5, 1, 0, 0},    {8, 13, 3, 0, 1},    {8, 30, 4, 110, 0}, {3, 30, 1, 101, 0},
            {50, 30, 2, 0, 0},  {50, 20, 7, 130, 0}, {2, 48, 8, 0, 0},   {8, 70, 16, 0, 0},
            {3, 64, 4, 900, 0}, {8, 3, 64, 0, 50},   {1, 30, 5, 120, 0}};
enum { N_WAYS = sizeof ways / sizeof *ways };

static void use(GenParams *p, const struct Way *w) {
  p->look = w->look;
  p->max_batch = w->batch;
  p->page_size = w->page;
  p->max_kv_tokens = w->kv;
  p->prefill_tokens = w->prefill;
}

static void expect_all_ways(World *w, GenParams p, const GenRequest *req) {
  use(&p, &(struct Way){1, 1, 0, 0, 0});
  GenResult *alone = generate_ok(w, &p, req, N);
  int ended = 0;
  for (int i = 0; i < N; i++) ended += alone[i].ended && alone[i].n > 3;
  if (p.n_eos > 0) assert_in_range(ended, N / 3, N - 1);
  for (int k = 0; k < N_WAYS; k++) {
    use(&p, &ways[k]);
    GenResult *out = generate_ok(w, &p, req, N);
    expect_all_same(out, alone, N);
    free_results(out, N);
  }
  free_results(alone, N);
}

static void test_tokens_are_the_same(void **state) {
  (void)state;
  World w = world_random(tiny_config());
  GenRequest *req = make_requests(N, 50, 3, VOCAB); /* three samples of each prompt */
  GenParams p = sampled();
  expect_all_ways(&w, p, req);
  p.sample = (SampleParams){
      .temperature = 1, .top_k = 20, .top_p = 0.9f, .min_p = 0.01f, .repetition_penalty = 1.3f};
  expect_all_ways(&w, p, req);
  free_requests(req, N);
  world_close(&w);
}

/* Steps in which some rows may not end yet, beside bursts. */
static void test_bans(void **state) {
  (void)state;
  World w = world_random(tiny_config());
  GenRequest *req = make_requests(N, 50, 1, VOCAB);
  GenParams p = sampled();
  p.min_new_tokens = 6;
  expect_all_ways(&w, p, req);
  free_requests(req, N);
  world_close(&w);
}

/* Limits of their own, also of one token, which the prefill draws. */
static void test_limits(void **state) {
  (void)state;
  World w = world_random(tiny_config());
  GenRequest *req = make_requests(N, 50, 1, VOCAB);
  int32_t most[N];
  for (int i = 0; i < N; i++) most[i] = 1 + i * 7 % NEW;
  GenParams p = sampled();
  p.n_eos = 0;
  p.max_new_of = most;
  expect_all_ways(&w, p, req);
  p.look = 8;
  GenResult *out = generate_ok(&w, &p, req, N);
  for (int i = 0; i < N; i++) assert_int_equal(out[i].n, most[i]);
  free_results(out, N);
  free_requests(req, N);
  world_close(&w);
}

/* Every token but a sequence's first is drawn by a decode step; rows that were filled up or went on
 * behind an EOS are told apart. */
static void test_what_is_counted(void **state) {
  (void)state;
  World w = world_random(tiny_config());
  GenRequest *req = make_requests(N, 50, 1, VOCAB);
  GenParams p = sampled();
  GenStats one, many;
  GenResult out[N];
  Error err = {""};
  double before = model_flops_done(w.model);
  p.look = 1;
  assert_int_equal(generate(w.model, &p, req, N, out, &one, &err), 0);
  double flops = model_flops_done(w.model) - before;
  assert_int_equal(one.drawn_rows, one.generated_tokens - N);
  assert_int_equal(one.step_rows, one.drawn_rows);
  int64_t cached = 0;
  for (int i = 0; i < N; i++)
    for (int t = 1; t < out[i].n; t++) cached += req[i].prompt_len + t;
  assert_int_equal(one.cached_tokens, cached);
  gen_results_free(out, N);
  p.look = 8;
  assert_int_equal(generate(w.model, &p, req, N, out, &many, &err), 0);
  assert_int_equal(many.drawn_rows, one.drawn_rows);
  assert_int_equal(many.cached_tokens, cached);
  assert_true(many.step_rows > many.drawn_rows);
  assert_in_range(many.decode_steps, one.decode_steps, one.decode_steps + 7);
  assert_true(model_flops_done(w.model) - before - flops == flops); /* of kept tokens only */
  gen_results_free(out, N);
  free_requests(req, N);
  world_close(&w);
}

static void test_refusal(void **state) {
  (void)state;
  World w = world_random(tiny_config());
  GenRequest *req = make_requests(1, 5, 1, VOCAB);
  GenParams p = sampled();
  GenResult out;
  Error err = {""};
  p.look = -1;
  assert_int_equal(generate(w.model, &p, req, 1, &out, NULL, &err), -1);
  assert_non_null(strstr(err.msg, "look"));
  free_requests(req, 1);
  world_close(&w);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_tokens_are_the_same),
    cmocka_unit_test(test_bans),
    cmocka_unit_test(test_limits),
    cmocka_unit_test(test_what_is_counted),
    cmocka_unit_test(test_refusal),
};
TEST_MAIN(tests)
