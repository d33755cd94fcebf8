/* Rollout on several ranks: the requests are dealt out, some ranks get none, and every sample is
 * what one rank alone makes of it. An error on one rank is an error on all.
 * ranks: 1 2 3 4 */
#include "generation/pool.h"
#include "tests/generation_test.h"

enum { N = 13, NEW = 30 };

static GenParams sampled(void) {
  return (GenParams){.sample = {.temperature = 1, .top_p = 1},
                     .max_new_tokens = NEW,
                     .n_eos = 1,
                     .eos_ids = {11},
                     .seed = 7};
}

/* Each rank generates for the requests with deal(i) == rank, some ranks for none. */
static void deal_and_compare(World *w, const GenRequest *req, const GenResult *want,
                             int (*deal)(int i, int world)) {
  Grid *g = w->grid;
  GenRequest mine[N];
  int at[N], n = 0;
  for (int i = 0; i < N; i++)
    if (deal(i, g->world) == g->rank) mine[n] = req[i], at[n++] = i;
  GenParams p = sampled();
  GenResult *out = generate_ok(w, &p, mine, n);
  for (int k = 0; k < n; k++) expect_same(&out[k], &want[at[k]]);
  free_results(out, n);
}

static int in_turn(int i, int world) { return i % world; }
static int all_to_last(int i, int world) { return i * 0 + world - 1; }
static int in_blocks(int i, int world) { return i * world / N; }

static void test_any_deal(void **state) {
  (void)state;
  World w = world_random(tiny_config());
  GenRequest *req = make_requests(N, 30, 1, 97);
  GenParams p = sampled();
  GenResult *want = generate_ok(&w, &p, req, N);
  double tokens[N * NEW] = {0}, most[N * NEW];
  for (int i = 0; i < N; i++)
    for (int t = 0; t < want[i].n; t++) tokens[i * NEW + t] = want[i].tokens[t] + 1;
  memcpy(most, tokens, sizeof tokens);
  comm_all_reduce_f64(w.grid->all, most, N * NEW, true);
  assert_memory_equal(most, tokens, sizeof tokens); /* all ranks drew the same */
  deal_and_compare(&w, req, want, in_turn);
  deal_and_compare(&w, req, want, all_to_last);
  deal_and_compare(&w, req, want, in_blocks);
  free_results(want, N);
  free_requests(req, N);
  world_close(&w);
}

/* Constants that no number of ranks may change: the published greedy ids, and what one rank drew.
 */
static void test_any_world(void **state) {
  (void)state;
  enum { FIRST = 12 };
  static const int32_t greedy[FIRST] = {403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421};
  static const int32_t drawn[FIRST] = {385, 328, 432, 261, 308, 277, 428, 415, 413, 350, 313, 457};
  World w = world_load("data/stories260K");
  int32_t bos = 1;
  GenRequest req = {&bos, 1, 4, 2};
  GenParams p = sampled();
  p.sample.temperature = 1.5f;
  int n = w.grid->rank % 2 == 0; /* every second rank has nothing to do */
  GenResult *out = generate_ok(&w, &p, &req, n);
  if (n) assert_memory_equal(out->tokens, drawn, sizeof drawn);
  free_results(out, n);
  p.sample.greedy = true;
  out = generate_ok(&w, &p, &req, n);
  if (n) assert_memory_equal(out->tokens, greedy, sizeof greedy);
  free_results(out, n);
  world_close(&w);
}

static void test_error_on_one_rank(void **state) {
  (void)state;
  World w = world_random(tiny_config());
  GenRequest *req = make_requests(3, 30, 1, 97);
  int last = w.grid->world - 1;
  if (w.grid->rank == last) req[1].prompt_len = 0;
  Error err = {""};
  GenResult out[3];
  GenParams p = sampled();
  assert_int_equal(generate(w.model, &p, req, 3, out, NULL, &err), -1);
  assert_non_null(strstr(err.msg, "is empty"));
  for (int i = 0; i < 3; i++) assert_null(out[i].tokens);
  free_requests(req, 3);
  world_close(&w);
}

/* One rank has all, of which it has begun two: the others get what makes them even, the last first,
 * and nothing moves that would make them no more even. All ranks know whose each is. */
static void test_dealing_makes_even(void **state) {
  (void)state;
  Error err = {""};
  Grid *g = grid_create(0, &err);
  int last = g->local - 1;
  GenRequest req[N] = {{.prompt_len = 1}};
  GenResult out[N] = {{.n = 0}};
  int32_t owner[N], before[N], limits[N] = {0}, kept = 0;
  for (int i = 0; i < N; i++) owner[i] = last, out[i].n = i < 2;
  Scheduler s = sched_create(NULL, req, out, limits, N, owner, g->local_rank, N, 1);
  Pool p = {.group = g->intra, .owner = owner, .open = true};
  assert_false(pool_deal(&p, &s, 5, false));
  for (int i = 0; i < N; i++) kept += owner[i] == g->local_rank;
  assert_int_equal(s.n_waiting, kept);
  assert_in_range(kept, N / g->local, (N + g->local - 1) / g->local);
  for (int i = 0; i < N / g->local; i++) assert_int_equal(owner[i], last); /* the first stay */
  for (int k = 1; k < kept; k++) assert_true(s.waiting[k - 1] > s.waiting[k]);
  memcpy(before, owner, sizeof owner);
  assert_false(pool_deal(&p, &s, 6, false));
  assert_memory_equal(owner, before, sizeof owner);
  assert_true(p.open && !pool_is_due(&p, &s, 6 + 31) && pool_is_due(&p, &s, 6 + 32));
  assert_int_equal(pool_deal(&p, &s, 7, g->local_rank == last), true);
  sched_destroy(&s);
  grid_free(g);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_any_deal),
    cmocka_unit_test(test_any_world),
    cmocka_unit_test(test_error_on_one_rank),
    cmocka_unit_test(test_dealing_makes_even),
};
TEST_MAIN(tests)
