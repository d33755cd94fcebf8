/* A rollout shared between ranks is the same on every rank and for any number of ranks.
 * ranks: 1 2 3 4 */
#include <math.h>

#include "orchestrator/orchestrator.h"
#include "tests/test.h"

enum { MAX_SEQS = 13, MAX_LEN = 40, WIDTH = 5 };

/* Everything about request g is a function of g, so each rank can make its own part and knows what
 * the others must have sent. */
static int prompt_len(int g) { return 1 + g % 5; }
static int response_len(int g) { return (g * 7) % 11; } /* 0 included: an empty answer */
static uint8_t kept_at(int g, int t, int i) { return (uint8_t)(g * 31 + t * 7 + i); }
static int32_t token_at(int g, int t) { return g * 100 + t; }
static float logprob_at(int g, int t) { return -0.25f * (float)(g + 1) - (float)t; }

typedef struct Case {
  Grid *grid;
  int n;
  int32_t prompt[MAX_SEQS][MAX_LEN];
  GenRequest req[MAX_SEQS];
  int32_t owner[MAX_SEQS];
  GenResult result[MAX_SEQS];
} Case;

static Case *case_create(int n) {
  Error err = {""};
  Case *c = mem_zalloc(1, sizeof *c);
  c->grid = grid_create(0, &err);
  assert_non_null(c->grid);
  c->n = n;
  for (int g = 0; g < n; g++) {
    for (int t = 0; t < prompt_len(g); t++) c->prompt[g][t] = token_at(g, t);
    c->req[g] = (GenRequest){c->prompt[g], prompt_len(g), 1000 + g, g % 3};
  }
  for (int g = 0; g < n; g++) {
    GenResult *r = &c->result[g];
    c->owner[g] = g * g % 7 % c->grid->world; /* some ranks have more than others */
    if (c->owner[g] != c->grid->rank) continue;
    r->n = response_len(g);
    r->ended = g % 2 == 1;
    r->tokens = mem_alloc((size_t)r->n, sizeof *r->tokens);
    r->logprobs = mem_alloc((size_t)r->n, sizeof *r->logprobs);
    r->kept = mem_alloc((size_t)r->n, WIDTH);
    for (int k = 0; k < r->n * WIDTH; k++) r->kept[k] = kept_at(g, k / WIDTH, k % WIDTH);
    for (int t = 0; t < r->n; t++) {
      r->tokens[t] = token_at(g, prompt_len(g) + t);
      r->logprobs[t] = logprob_at(g, t);
    }
  }
  return c;
}

static void case_free(Case *c) {
  gen_results_free(c->result, MAX_SEQS);
  grid_free(c->grid);
  free(c);
}

static void check_rollout(const Case *c, const Rollout *ro) {
  assert_int_equal(ro->n_seqs, c->n);
  assert_int_equal(ro->have, RO_SAMPLED_LOGPROBS);
  for (int g = 0; g < c->n; g++) {
    assert_int_equal(ro->prompt_len[g], prompt_len(g));
    assert_int_equal(rollout_response_len(ro, g), response_len(g));
    assert_int_equal(ro->prompt_id[g], 1000 + g);
    assert_int_equal(ro->sample_id[g], g % 3);
    assert_int_equal(ro->ended[g], g % 2);
    for (int t = 0; t < rollout_len(ro, g); t++) {
      int at = ro->offsets[g] + t, k = t - prompt_len(g);
      assert_int_equal(ro->tokens[at], token_at(g, t));
      assert_true(ro->sampled_logprobs[at] == (k < 0 ? 0 : logprob_at(g, k)));
    }
  }
}

static void check_kept(const Case *c, const Rollout *ro) {
  assert_int_equal(ro->kept_width, WIDTH);
  for (int g = 0; g < c->n; g++)
    for (int t = 0; t < rollout_len(ro, g); t++)
      for (int i = 0; i < WIDTH; i++) {
        int at = ro->offsets[g] + t, k = t - prompt_len(g);
        assert_int_equal(ro->kept[at * WIDTH + i], k < 0 ? 0 : kept_at(g, k, i));
      }
}

static void shares_answers(void **state) {
  (void)state;
  int sizes[] = {MAX_SEQS, 4, 1}; /* 1: more ranks than requests */
  for (int i = 0; i < 3; i++) {
    Case *c = case_create(sizes[i]);
    Rollout *ro = rollout_share(c->grid->all, c->req, c->n, c->owner, c->result);
    check_rollout(c, ro);
    assert_null(ro->kept);
    rollout_share_kept(c->grid->all, ro, c->owner, c->result, WIDTH);
    check_kept(c, ro);
    rollout_free(ro);
    case_free(c);
  }
}

/* Writes this rank's sequences of the plan only; what others own is poisoned. */
static void fill_own(const Case *c, Rollout *ro, int max_tokens, float *values, float *scores) {
  int32_t lengths[MAX_SEQS];
  for (int g = 0; g < c->n; g++) {
    lengths[g] = rollout_len(ro, g);
    scores[g] = -1e9f;
    for (int t = rollout_first(ro, g); t < ro->offsets[g + 1]; t++) values[t] = -1e9f;
  }
  BatchPlan plan = plan_batches(lengths, NULL, c->n, c->grid->rank, c->grid->world, max_tokens);
  for (int m = 0; m < plan.n_micro; m++)
    for (int i = 0; i < plan.micro[m].n_seqs; i++) {
      int g = plan.micro[m].ids[i];
      scores[g] = (float)g + 0.5f;
      for (int t = rollout_first(ro, g); t < ro->offsets[g + 1]; t++) values[t] = (float)t * 0.125f;
    }
  plan_free(&plan);
}

static void shares_fields_and_scores(void **state) {
  (void)state;
  int budgets[] = {1, 12, 1000}; /* each sequence alone; some together; all in one */
  Case *c = case_create(MAX_SEQS);
  for (int i = 0; i < 3; i++) {
    Rollout *ro = rollout_share(c->grid->all, c->req, c->n, c->owner, c->result);
    float scores[MAX_SEQS];
    fill_own(c, ro, budgets[i], rollout_array(ro, RO_VALUES), scores);
    rollout_share_field(c->grid->all, ro, RO_VALUES, budgets[i]);
    rollout_share_scores(c->grid->all, ro, scores, budgets[i]);
    assert_true(ro->have & RO_VALUES);
    for (int g = 0; g < c->n; g++) {
      assert_true(scores[g] == (float)g + 0.5f);
      for (int t = ro->offsets[g]; t < ro->offsets[g + 1]; t++)
        assert_true(ro->values[t] == (t < rollout_first(ro, g) ? 0 : (float)t * 0.125f));
    }
    rollout_free(ro);
  }
  case_free(c);
}

/* What is broken on one rank must reach the others, not disappear. */
static void not_a_number_travels(void **state) {
  (void)state;
  Case *c = case_create(3);
  Rollout *ro = rollout_share(c->grid->all, c->req, c->n, c->owner, c->result);
  float scores[MAX_SEQS];
  fill_own(c, ro, 1000, rollout_array(ro, RO_VALUES), scores);
  for (int g = 0; g < c->n; g++) scores[g] = scores[g] < 0 ? scores[g] : (float)NAN;
  rollout_share_scores(c->grid->all, ro, scores, 1000);
  for (int g = 0; g < c->n; g++) assert_true(scores[g] != scores[g]);
  rollout_free(ro);
  case_free(c);
}

/* Rank r works for r + 1 seconds and waits for the last one. */
static void the_least_busy_rank(void **state) {
  (void)state;
  Error err = {""};
  Grid *g = grid_create(0, &err);
  assert_non_null(g);
  RolloutShare s = {.n = 0};
  assert_true(rollout_busy(&s, g->all) == 1); /* nobody had anything to do */
  s.stats = (GenStats){.prefill_seconds = 0.25 * (g->rank + 1),
                       .decode_seconds = 0.75 * (g->rank + 1),
                       .wait_seconds = g->world - g->rank};
  assert_true(fabs(rollout_busy(&s, g->all) - 1.0 / (g->world + 1)) < 1e-12);
  grid_free(g);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(the_least_busy_rank),
    cmocka_unit_test(shares_answers),
    cmocka_unit_test(shares_fields_and_scores),
    cmocka_unit_test(not_a_number_travels),
};
TEST_MAIN(tests)
