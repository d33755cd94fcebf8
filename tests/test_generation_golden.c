/* Greedy decoding of stories260K from token 1 gives the published ids, whatever else is in the
 * batch and however the cache is cut into pages. */
#include "core/json.h"
#include "tests/generation_test.h"

static TokenList golden(void) {
  Error err = {""};
  json_t *root = json_read(test_path("data/stories260K/golden_greedy.json"), &err);
  if (!root) fail_msg("%s", err.msg);
  TokenList ids = {0};
  const json_t *v = json_object_get(root, "greedy_ids");
  for (size_t i = 0; i < json_array_size(v); i++)
    token_list_push(&ids, (int32_t)json_integer_value(json_array_get(v, i)));
  json_decref(root);
  assert_true(ids.n > 100);
  return ids;
}

static GenParams greedy(int max_new) {
  return (GenParams){.sample = {.greedy = true, .top_p = 1}, .max_new_tokens = max_new};
}

static void expect_golden(const GenResult *r, TokenList want) {
  assert_int_equal(r->n, want.n - 1);
  assert_memory_equal(r->tokens, want.v + 1, (size_t)r->n * sizeof *r->tokens);
  assert_false(r->ended);
}

static void test_alone(void **state) {
  (void)state;
  TokenList want = golden();
  World w = world_load("data/stories260K");
  static const int page_sizes[] = {1, 3, 16, 64};
  for (int i = 0; i < 4; i++) {
    GenParams p = greedy(want.n - 1);
    p.page_size = page_sizes[i];
    GenRequest req = {.prompt = want.v, .prompt_len = 1};
    GenResult *out = generate_ok(&w, &p, &req, 1);
    expect_golden(out, want);
    free_results(out, 1);
  }
  world_close(&w);
  token_list_free(&want);
}

/* Every start of the golden sequence goes on with the rest: prefill and decode agree. */
static void test_from_every_start(void **state) {
  (void)state;
  TokenList want = golden();
  World w = world_load("data/stories260K");
  enum { N = 64 };
  GenRequest req[N];
  for (int i = 0; i < N; i++)
    req[i] = (GenRequest){.prompt = want.v, .prompt_len = 1 + i * 3, .prompt_id = i};
  GenParams p = greedy(60);
  GenResult *out = generate_ok(&w, &p, req, N);
  for (int i = 0; i < N; i++) {
    int left = want.n - req[i].prompt_len, n = left < 60 ? left : 60;
    assert_true(out[i].n >= n);
    assert_memory_equal(out[i].tokens, want.v + req[i].prompt_len, (size_t)n * sizeof(int32_t));
  }
  free_results(out, N);
  world_close(&w);
  token_list_free(&want);
}

/* The golden request at place `at` among n others of all lengths. */
static void in_company(World *w, TokenList want, int n, int at, GenParams p) {
  GenRequest *others = make_requests(n, 90, 1, 512);
  GenRequest *req = mem_alloc((size_t)n + 1, sizeof *req);
  memcpy(req, others, (size_t)n * sizeof *req);
  memmove(req + at + 1, req + at, (size_t)(n - at) * sizeof *req);
  req[at] = (GenRequest){.prompt = want.v, .prompt_len = 1, .prompt_id = 1000};
  GenResult *out = generate_ok(w, &p, req, n + 1);
  expect_golden(&out[at], want);
  free_results(out, n + 1);
  free(req);
  free_requests(others, n);
}

static void test_in_company(void **state) {
  (void)state;
  TokenList want = golden();
  World w = world_load("data/stories260K");
  GenParams p = greedy(want.n - 1);
  p.eos_ids[0] = 2, p.n_eos = 1; /* the others may end early */
  in_company(&w, want, 1, 0, p);
  in_company(&w, want, 2, 2, p);
  in_company(&w, want, 7, 3, p);
  p.page_size = 3;
  in_company(&w, want, 20, 11, p);
  p.max_batch = 5; /* waiting for rows */
  in_company(&w, want, 12, 9, p);
  p.max_batch = 1;
  in_company(&w, want, 3, 1, p);
  p.max_batch = 0, p.max_kv_tokens = 700, p.page_size = 16; /* waiting for pages, and giving up */
  in_company(&w, want, 12, 12, p);
  p.max_kv_tokens = 3000, p.prefill_tokens = 64;
  in_company(&w, want, 40, 17, p);
  world_close(&w);
  token_list_free(&want);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_alone),
    cmocka_unit_test(test_from_every_start),
    cmocka_unit_test(test_in_company),
};
TEST_MAIN(tests)
