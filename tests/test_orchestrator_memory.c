/* The memory plan: what it says fits does, one more does not, and ranks share the load. */
#include "orchestrator/memory_plan.h"
#include "tests/test.h"

static const ModelConfig config = {.family = "llama",
                                   .vocab_size = 300,
                                   .hidden = 64,
                                   .n_layers = 3,
                                   .n_heads = 4,
                                   .n_kv_heads = 2,
                                   .head_dim = 16,
                                   .ffn = 128,
                                   .max_positions = 256,
                                   .norm_eps = 1e-5f,
                                   .rope_theta = 10000,
                                   .init_std = 0.02f};

static PlannedStage ppo_stage(void) {
  return (PlannedStage){.name = "ppo",
                        .model = {{&config, HEAD_LM, true, true},
                                  {&config, HEAD_SCALAR, true, false},
                                  {&config, HEAD_LM, false, false},
                                  {&config, HEAD_SCALAR, false, false}},
                        .n_models = 4,
                        .nodes = 1,
                        .local = 1,
                        .zero = {.stage = 3},
                        .micro_tokens = 4096,
                        .longest = 100,
                        .batch_tokens = 6400,
                        .rollout_rows = 64,
                        .page_size = 16};
}

static void weights_are_counted(void **state) {
  (void)state;
  PlannedStage s = ppo_stage();
  MemoryNeed m = memory_need(&s);
  uint64_t lm = (uint64_t)model_config_params(&config, HEAD_LM) * 4;
  uint64_t scalar = (uint64_t)model_config_params(&config, HEAD_SCALAR) * 4;
  /* Shards are padded for alignment, by less than a tenth here. */
  assert_in_range(m.weights, 2 * (lm + scalar), 2 * (lm + scalar) * 11 / 10);
  assert_in_range(m.moments, 2 * (lm + scalar), 2 * (lm + scalar) * 11 / 10);
  assert_in_range(m.gradients, lm + scalar, (lm + scalar) * 11 / 10);
  assert_in_range(m.ema, lm, lm * 11 / 10);
  uint64_t stays = m.weights + m.moments + m.gradients + m.ema + m.gathered;
  uint64_t phase = m.activations > m.rollout ? m.activations : m.rollout;
  assert_int_equal(m.total, stays + phase); /* the two phases share, they do not add up */
}

static void the_cache_is_whole_pages(void **state) {
  (void)state;
  PlannedStage s = ppo_stage();
  assert_int_equal(memory_kv_tokens(&s), 64 * 112); /* 100 tokens: 7 pages of 16 */
  MemoryNeed more = memory_need(&s);
  s.penalty = true; /* a bit for every id */
  assert_int_equal(memory_need(&s).rollout - more.rollout, 64 * ((config.vocab_size + 7) / 8));
  s.penalty = false, s.kept = true; /* as many on the CPU, where a burst is one step */
  assert_int_equal(memory_need(&s).rollout - more.rollout, 64 * ((config.vocab_size + 7) / 8));
  s.rollout_rows = 0;
  assert_int_equal(memory_need(&s).rollout, 0);
  /* keys and values of 3 layers, 2 heads of 16 */
  assert_true(more.rollout > 64u * 112 * 2 * 4 * 3 * 2 * 16);
}

static void the_largest_that_fits_fits(void **state) {
  (void)state;
  PlannedStage s = ppo_stage();
  s.rollout_rows = 1;
  PlannedStage t = s;
  t.micro_tokens = 1000;
  uint64_t limit = memory_need(&t).total;
  assert_int_equal(memory_fit_micro(&s, limit), 1000);
  t.micro_tokens = 1001;
  assert_true(memory_need(&t).total > limit);
  assert_int_equal(memory_fit_micro(&s, UINT64_MAX), s.micro_tokens);
  assert_int_equal(memory_fit_micro(&s, 1000), 0);

  s = ppo_stage();
  s.micro_tokens = 1;
  t = s;
  t.rollout_rows = 40;
  assert_int_equal(memory_fit_rows(&s, memory_need(&t).total), 40);
}

/* With less and less memory: none, selective, selective with more and more blocks whole, full, all
 * whole; each choice fits, and the one before it does not. */
static void the_least_recomputation_that_fits(void **state) {
  (void)state;
  ModelConfig deep = config;
  deep.n_layers = 5;
  PlannedStage s = ppo_stage();
  for (int i = 0; i < s.n_models; i++) s.model[i].config = &deep;
  s.rollout_rows = 1;
  s.micro_tokens = 6400;
  s.recompute.by_memory = true;
  uint64_t limit = UINT64_MAX;
  static const struct {
    Recompute how;
    int blocks;
  } steps[] = {{RECOMPUTE_NONE, 0},
               {RECOMPUTE_SELECTIVE, 0},
               {RECOMPUTE_SELECTIVE, 2}, /* one block alone has nothing to share its buffers with */
               {RECOMPUTE_SELECTIVE, 3},
               {RECOMPUTE_FULL, 0}, /* four share buffers, the last one has its own */
               {RECOMPUTE_SELECTIVE, 5}};
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
    memory_choose_recompute(&s, limit);
    assert_int_equal(s.recompute.how, steps[i].how);
    assert_int_equal(s.recompute.blocks, steps[i].blocks);
    assert_true(memory_need(&s).total <= limit);
    limit = memory_need(&s).total - 1;
  }
  s.recompute = (RecomputeChoice){.how = RECOMPUTE_SELECTIVE};
  memory_choose_recompute(&s, 1);
  assert_int_equal(s.recompute.how, RECOMPUTE_SELECTIVE); /* what was asked for is not changed */
}

static void micro_batches_are_bounded_by_the_batch(void **state) {
  (void)state;
  PlannedStage s = ppo_stage(), t = s;
  s.micro_tokens = 6400;
  t.micro_tokens = 1 << 20; /* no step has so many tokens */
  assert_int_equal(memory_need(&s).total, memory_need(&t).total);
  s.micro_tokens = 1;
  t.micro_tokens = 100; /* the longest sequence runs all the same */
  assert_int_equal(memory_need(&s).total, memory_need(&t).total);
}

static void ranks_share(void **state) {
  (void)state;
  PlannedStage one = ppo_stage(), four = one;
  four.local = 2;
  four.nodes = 2;
  MemoryNeed a = memory_need(&one), b = memory_need(&four);
  assert_in_range(b.weights, a.weights / 4, a.weights / 4 * 12 / 10); /* padding of small pieces */
  assert_in_range(b.moments, a.moments / 4, a.moments / 4 * 12 / 10);
  assert_int_equal(a.activations, b.activations);
}

/* With less and less memory: a replica, slices, nothing that stays. */
static void weights_of_the_rollout(void **state) {
  (void)state;
  static const RolloutWeights order[] = {ROLLOUT_REPLICA, ROLLOUT_TENSOR_PARALLEL, ROLLOUT_STREAM};
  PlannedStage s = ppo_stage();
  s.local = 4;
  s.micro_tokens = 1;
  s.longest = 2; /* weights count, and not the cache */
  s.rollout_rows = 2;
  uint64_t before = UINT64_MAX;
  for (int i = 0; i < 3; i++) {
    s.weights = order[i];
    MemoryNeed need = memory_need(&s);
    assert_true(need.total < before);
    before = need.total;
    assert_int_equal(memory_choose_weights(&s, need.total), order[i]);
    if (i < 2) assert_int_not_equal(memory_choose_weights(&s, need.total - 1), order[i]);
  }
  assert_int_equal(memory_choose_weights(&s, 1000), ROLLOUT_REPLICA); /* it is refused anyway */
  s.local = 1;
  assert_int_equal(memory_choose_weights(&s, before), ROLLOUT_REPLICA); /* one rank has them all */
  s.nodes = 4;
  assert_int_equal(memory_choose_weights(&s, before), ROLLOUT_STREAM); /* no slices in a node */
  s.format = WIRE_INT8; /* which training does not have */
  assert_int_equal(memory_choose_weights(&s, before), ROLLOUT_REPLICA);
  s.format = WIRE_F32;
  s.zero.stage = 1;
  assert_int_equal(memory_choose_weights(&s, before), ROLLOUT_REPLICA);

  /* Slices: logits of the node's rows in this rank's columns, of its own as they came, and whole.
   */
  s = ppo_stage();
  s.local = 4;
  uint64_t logits = (uint64_t)s.rollout_rows * (uint64_t)config.vocab_size * 4;
  uint64_t whole = memory_need(&s).rollout;
  assert_true(s.rollout_rows * s.longest > gen_prefill_tokens(s.device)); /* prefills are alike */
  s.weights = ROLLOUT_TENSOR_PARALLEL;
  assert_int_equal(memory_need(&s).rollout - whole, 2 * logits);

  uint64_t lm = (uint64_t)model_config_params(&config, HEAD_LM) * 4;
  s = ppo_stage();
  assert_int_equal(memory_need(&s).replica, 0); /* masters are the weights */
  s.local = 4;
  assert_in_range(memory_need(&s).replica, lm, lm * 11 / 10);
  s.weights = ROLLOUT_TENSOR_PARALLEL;
  uint64_t embedding = (uint64_t)config.vocab_size * (uint64_t)config.hidden * 4;
  uint64_t slices = embedding + (lm - embedding) / 4;
  assert_in_range(memory_need(&s).replica, slices, slices * 12 / 10);
  s.zero.hpz = HPZ_ON; /* the secondary has them, but for norms */
  assert_in_range(memory_need(&s).replica, embedding, embedding * 12 / 10);
  s.zero.hpz = HPZ_OFF;
  s.format = WIRE_INT8;
  uint64_t codes = embedding + (lm - embedding) / 16;
  assert_in_range(memory_need(&s).replica, codes, codes * 12 / 10);
  s.weights = ROLLOUT_STREAM;
  assert_int_equal(memory_need(&s).replica, 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(weights_of_the_rollout),
    cmocka_unit_test(weights_are_counted),
    cmocka_unit_test(the_cache_is_whole_pages),
    cmocka_unit_test(the_largest_that_fits_fits),
    cmocka_unit_test(the_least_recomputation_that_fits),
    cmocka_unit_test(micro_batches_are_bounded_by_the_batch),
    cmocka_unit_test(ranks_share),
};
TEST_MAIN(tests)
