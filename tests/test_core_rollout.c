/* core/rollout.h: allocation, plans (balanced, complete, the same on all ranks), packs, weights. */
#include "core/rollout.h"

#include <math.h>

#include "core/minibatch.h"
#include "core/rng.h"
#include "tests/test.h"

static void fields_have_writers(void **state) {
  (void)state;
  const int32_t lengths[] = {3, 1, 5};
  Rollout *r = rollout_create(3, lengths);
  assert_int_equal(r->n_tokens, 9);
  assert_int_equal(r->offsets[3], 9);
  assert_int_equal(rollout_len(r, 2), 5);
  for (int b = 0; b < 3; b++) r->prompt_len[b] = 1;
  assert_int_equal(rollout_response_tokens(r), 6);
  assert_int_equal(rollout_first(r, 2), 5);
  for (unsigned f = RO_SAMPLED_LOGPROBS; f <= RO_RETURNS; f <<= 1) {
    if (f == RO_SCORES) continue;
    float *v = rollout_array(r, (RolloutField)f);
    for (int i = 0; i < 9; i++) assert_true(v[i] == 0);
    v[0] = (float)f; /* all distinct */
  }
  assert_true(r->sampled_logprobs[0] == RO_SAMPLED_LOGPROBS &&
              r->ref_logprobs[0] == RO_REF_LOGPROBS);
  assert_true(r->old_logprobs[0] == RO_OLD_LOGPROBS && r->values[0] == RO_VALUES);
  assert_true(r->rewards[0] == RO_REWARDS && r->returns[0] == RO_RETURNS);
  assert_true(r->advantages[0] == RO_ADVANTAGES);
  rollout_free(r);
  rollout_free(rollout_create(0, NULL));
}

static void need_missing(void *r) { rollout_need(r, RO_VALUES | RO_SCORES | RO_REWARDS, "gae"); }

static void missing_fields_are_named(void **state) {
  (void)state;
  const int32_t lengths[] = {2};
  Rollout *r = rollout_create(1, lengths);
  r->have = RO_SCORES;
  rollout_need(r, RO_SCORES, "nobody");
  const char *said = test_death(need_missing, r);
  assert_non_null(strstr(said, "gae"));
  assert_non_null(strstr(said, "values, rewards"));
  assert_null(strstr(said, "scores"));
  rollout_free(r);
}

/* ---- plans ---- */

enum { MAX_SEQS = 200, MAX_WORLD = 7 };

static int64_t plan_tokens(const BatchPlan *p, const int32_t *lengths) {
  int64_t n = 0;
  for (int m = 0; m < p->n_micro; m++)
    for (int i = 0; i < p->micro[m].n_seqs; i++) n += lengths[p->micro[m].ids[i]];
  return n;
}

static void check_micro(const MicroBatch *mb, const int32_t *lengths, int max_tokens, int width,
                        int *times) {
  int64_t tokens = 0;
  for (int i = 0; i < mb->n_seqs; i++) {
    if (i) assert_true(mb->ids[i] > mb->ids[i - 1]);
    times[mb->ids[i]]++;
    tokens += lengths[mb->ids[i]];
  }
  if (mb->n_seqs > width) assert_true(tokens <= max_tokens);
  if (width == 2) {
    assert_int_equal(mb->n_seqs % 2, 0);
    for (int i = 0; i < mb->n_seqs; i += 2) {
      assert_int_equal(mb->ids[i] % 2, 0);
      assert_int_equal(mb->ids[i + 1], mb->ids[i] + 1);
    }
  }
}

/* All promises of a plan for one set of lengths; n items of `width` sequences each. */
static void check_plan(const int32_t *lengths, const int32_t *ids, int n, int width, int world,
                       int max_tokens) {
  BatchPlan plan[MAX_WORLD] = {{0, NULL}};
  int times[MAX_SEQS] = {0};
  int64_t longest = 0, least = INT64_MAX, most = 0;
  int needed = 0;
  for (int r = 0; r < world; r++) {
    plan[r] = width == 2 ? plan_pairs(lengths, ids, n, r, world, max_tokens)
                         : plan_batches(lengths, ids, n, r, world, max_tokens);
    assert_int_equal(plan[r].n_micro, plan[0].n_micro);
    int used = 0;
    for (int m = 0; m < plan[r].n_micro; m++) {
      check_micro(&plan[r].micro[m], lengths, max_tokens, width, times);
      used += plan[r].micro[m].n_seqs > 0;
    }
    if (used > needed) needed = used;
    int64_t tokens = plan_tokens(&plan[r], lengths);
    if (tokens < least) least = tokens;
    if (tokens > most) most = tokens;
  }
  assert_int_equal(needed, plan[0].n_micro); /* no round in which all ranks idle */
  for (int i = 0; i < n; i++) {
    int64_t tokens = 0;
    for (int k = 0; k < width; k++) {
      int id = (ids ? ids[i] : i) * width + k;
      assert_int_equal(times[id], 1);
      times[id] = 0;
      tokens += lengths[id];
    }
    if (tokens > longest) longest = tokens;
  }
  for (int i = 0; i < MAX_SEQS; i++) assert_int_equal(times[i], 0); /* and nothing else */
  /* Greedy dealing: when the fullest rank took its last item it was the least loaded. */
  assert_true(most - least <= longest);
  for (int r = 0; r < world; r++) plan_free(&plan[r]);
}

static void plans_hold_their_promises(void **state) {
  (void)state;
  for (int trial = 0; trial < 300; trial++) {
    int32_t lengths[MAX_SEQS], order[MAX_SEQS];
    uint64_t t = (uint64_t)trial;
    int n = (int)(rng_uniform(1, t, 0) * MAX_SEQS * 0.5), world = 1 + trial % MAX_WORLD;
    int max_tokens = 1 + (int)(rng_uniform(1, t, 1) * 300);
    for (int i = 0; i < MAX_SEQS; i++)
      lengths[i] = 1 + (int)(rng_uniform(2, t, (uint64_t)i) * (trial % 3 ? 100 : 2));
    check_plan(lengths, NULL, n, 1, world, max_tokens);
    check_plan(lengths, NULL, n, 2, world, max_tokens);
    rng_permute(3, t, order, MAX_SEQS / 2);
    check_plan(lengths, order, n / 2, 1, world, max_tokens);
    check_plan(lengths, order, n / 2, 2, world, max_tokens);
  }
}

static void plans_are_known(void **state) {
  (void)state;
  const int32_t lengths[] = {5, 9, 2, 9, 4};
  /* Dealt longest first: 1 -> rank 0, 3 -> rank 1, 0 -> rank 0, 4 -> rank 1, 2 -> rank 1. */
  BatchPlan p = plan_batches(lengths, NULL, 5, 1, 2, 12);
  assert_int_equal(p.n_micro, 2);
  assert_int_equal(p.micro[0].n_seqs, 2);
  assert_int_equal(p.micro[0].ids[0], 2);
  assert_int_equal(p.micro[0].ids[1], 3);
  assert_int_equal(p.micro[1].n_seqs, 1);
  assert_int_equal(p.micro[1].ids[0], 4);
  plan_free(&p);
  p = plan_batches(lengths, NULL, 5, 0, 2, 3); /* each is longer than the budget: alone */
  assert_int_equal(p.n_micro, 3);              /* what rank 1 needs */
  assert_int_equal(p.micro[2].n_seqs, 0);
  plan_free(&p);
  p = plan_batches(lengths, NULL, 0, 2, 3, 10);
  assert_int_equal(p.n_micro, 0);
  plan_free(&p);
}

/* ---- packs ---- */

static const int32_t offsets[] = {0, 3, 4, 8, 10},
                     tokens[] = {10, 11, 12, 20, 30, 31, 32, 33, 40, 41};

static void targets_follow_their_rows(void **state) {
  (void)state;
  const int32_t from[] = {1, 1, 3, 2};
  int32_t ids[] = {0, 1, 2, 3};
  MicroBatch mb = {4, ids};
  Pack p = pack_targets(offsets, tokens, from, &mb);
  assert_int_equal(p.batch.n_seqs, 4);
  assert_memory_equal(p.batch.offsets, offsets, sizeof offsets);
  assert_memory_equal(p.batch.tokens, tokens, sizeof tokens);
  const int32_t rows[] = {0, 1, 6}, targets[] = {11, 12, 33}, index[] = {1, 2, 7};
  assert_int_equal(p.n_rows, 3); /* one token, and a prompt without an answer, have none */
  assert_memory_equal(p.rows, rows, sizeof rows);
  assert_memory_equal(p.targets, targets, sizeof targets);
  assert_memory_equal(p.index, index, sizeof index);
  pack_free(&p);
  int32_t some[] = {2, 3};
  mb = (MicroBatch){2, some};
  p = pack_targets(offsets, tokens, (const int32_t[]){1, 1, 1, 1}, &mb);
  assert_int_equal(p.n_rows, 4);
  for (int i = 0; i < 4; i++) { /* in general: the row before the target, the target at its index */
    assert_int_equal(p.tokens[p.rows[i] + 1], p.targets[i]);
    assert_int_equal(tokens[p.index[i]], p.targets[i]);
  }
  pack_select(&p, NULL);
  assert_int_equal(p.n_rows, 4);
  const uint8_t mask[] = {1, 1, 1, 1, 1, 1, 0, 1, 1, 0}; /* by index, the prompts' too */
  pack_select(&p, mask);
  assert_int_equal(p.n_rows, 2);
  assert_true(p.targets[0] == 31 && p.rows[0] == 0 && p.index[0] == 5);
  assert_true(p.targets[1] == 33 && p.rows[1] == 2 && p.index[1] == 7);
  pack_free(&p);
}

static void last_rows_and_empty_packs(void **state) {
  (void)state;
  int32_t ids[] = {0, 2, 1};
  MicroBatch mb = {3, ids};
  Pack p = pack_last(offsets, tokens, &mb);
  assert_int_equal(p.n_rows, 3);
  assert_int_equal(p.tokens[p.rows[0]], 12);
  assert_int_equal(p.tokens[p.rows[1]], 33);
  assert_int_equal(p.tokens[p.rows[2]], 20);
  assert_null(p.targets);
  pack_free(&p);
  mb = (MicroBatch){0, NULL};
  p = pack_last(offsets, tokens, &mb);
  assert_true(p.n_rows == 0 && p.batch.n_seqs == 0 && p.batch.offsets[0] == 0);
  pack_free(&p);
  p = pack_targets(offsets, tokens, NULL, &mb);
  assert_true(p.n_rows == 0 && p.batch.n_seqs == 0);
  pack_free(&p);
}

/* ---- weights ---- */

static void weights_make_means(void **state) {
  (void)state;
  const int32_t lengths[] = {4, 3, 9, 2};
  Rollout *r = rollout_create(4, lengths);
  const int32_t prompt[] = {1, 3, 2, 1}; /* responses of 3, 0, 7, 1 */
  memcpy(r->prompt_len, prompt, sizeof prompt);
  double w[4] = {-1, -1, -1, -1};
  rollout_weights(r, NULL, 4, false, w);
  assert_true(w[0] == 1.0 / 11 && w[1] == 0 && w[2] == 1.0 / 11 && w[3] == 1.0 / 11);
  rollout_weights(r, NULL, 4, true, w);
  assert_true(w[0] == 1.0 / 9 && w[1] == 0 && w[2] == 1.0 / 21 && w[3] == 1.0 / 3);
  const int32_t some[] = {2, 1};
  w[0] = w[3] = -1;
  rollout_weights(r, some, 2, true, w);
  assert_true(w[2] == 1.0 / 7 && w[1] == 0 && w[0] == -1 && w[3] == -1);
  const int32_t empty[] = {1};
  rollout_weights(r, empty, 1, false, w);
  rollout_weights(r, empty, 1, true, w);
  assert_true(w[1] == 0); /* not 0/0 */
  rollout_free(r);
}

/* Every epoch of every step, and every seed, has a permutation of its own, the same each time. */
static void minibatches_are_new_each_epoch(void **state) {
  (void)state;
  enum { SEQS = 40, STEPS = 3, EPOCHS = 2, ORDERS = STEPS * EPOCHS + 1 };
  int32_t order[ORDERS][SEQS], again[SEQS];
  for (int k = 0; k < ORDERS; k++) {
    uint64_t seed = k < STEPS * EPOCHS ? 5 : 6;
    bool seen[SEQS] = {false};
    minibatch_order(seed, k / EPOCHS % STEPS, EPOCHS, k % EPOCHS, order[k], SEQS);
    minibatch_order(seed, k / EPOCHS % STEPS, EPOCHS, k % EPOCHS, again, SEQS);
    assert_memory_equal(order[k], again, sizeof again);
    for (int i = 0; i < SEQS; i++) {
      assert_in_range(order[k][i], 0, SEQS - 1);
      assert_false(seen[order[k][i]]);
      seen[order[k][i]] = true;
    }
    for (int j = 0; j < k; j++) assert_memory_not_equal(order[j], order[k], sizeof again);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(fields_have_writers),       cmocka_unit_test(missing_fields_are_named),
    cmocka_unit_test(plans_hold_their_promises), cmocka_unit_test(plans_are_known),
    cmocka_unit_test(targets_follow_their_rows), cmocka_unit_test(last_rows_and_empty_packs),
    cmocka_unit_test(weights_make_means),        cmocka_unit_test(minibatches_are_new_each_epoch),
};
TEST_MAIN(tests)
