/* The critic's values and update on a tiny model. ranks: 1 2 3 4
 *
 * As in test_actor_update.c: the reference runs one sequence at a time on rank 0 alone, with
 * weights and formulas written out here. */
#include "critic/critic.h"
#include "tests/ppo_fixture.h"

#define CLIP 0.2f
#define COEF 0.5f

static const int32_t all_ids[9] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
static const int32_t some_ids[6] = {7, 2, 4, 0, 8, 3};

/* The head at every token of one sequence, run by all ranks. */
static void values_alone(Model *m, const Rollout *ro, int b, float *value) {
  int32_t own[2] = {0, rollout_len(ro, b)}, rows[64];
  for (int t = 0; t < own[1]; t++) rows[t] = t;
  model_values(m, (Batch){1, own, ro->tokens + ro->offsets[b]}, own[1], rows, value);
}

/* Old values around the model's, returns around those, so that each side of the clip both stops
 * gradients and lets them through. */
static Rollout *make_rollout(Model *m) {
  Rollout *ro = tiny_rollout();
  for (int b = 0; b < ro->n_seqs; b++) {
    float value[64];
    values_alone(m, ro, b, value);
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++) {
      uint64_t k = (uint64_t)t;
      ro->values[t] = value[t - 1 - ro->offsets[b]] - 0.3f * rng_normal(2, 1, k);
      ro->returns[t] = ro->values[t] + 0.5f * rng_normal(2, 2, k);
    }
  }
  ro->have = RO_VALUES | RO_RETURNS;
  return ro;
}

typedef struct Reference {
  const Rollout *ro;
  const int32_t *ids;
  int n;
  bool sequence_mean;
  float clip;
  double tokens, answers;
  int b; /* the sequence at hand */
} Reference;

static Reference reference_of(const Rollout *ro, const int32_t *ids, int n, bool sequence_mean,
                              float clip) {
  Reference r = {.ro = ro, .ids = ids, .n = n, .sequence_mean = sequence_mean, .clip = clip};
  for (int i = 0; i < n; i++) {
    r.tokens += rollout_response_len(ro, ids[i]);
    r.answers += rollout_response_len(ro, ids[i]) > 0;
  }
  return r;
}

static double weight_of(const Reference *r, int b) {
  return r->sequence_mean ? 1 / (r->answers * rollout_response_len(r->ro, b)) : 1 / r->tokens;
}

static double value_reference(const Reference *r, int t, double v) {
  double old = (double)r->ro->values[t], ret = (double)r->ro->returns[t];
  double plain = (v - ret) * (v - ret), clip = (double)r->clip;
  if (clip == 0) return 0.5 * plain;
  double vc = old + fmin(fmax(v - old, -clip), clip);
  return 0.5 * fmax(plain, (vc - ret) * (vc - ret));
}

static void reference_rows(void *ctx, int n, const float *values, float *dvalues) {
  const Reference *r = ctx;
  for (int i = 0; i < n; i++) {
    int t = rollout_first(r->ro, r->b) + i;
    double v = (double)values[i], h = 1e-6;
    double slope = (value_reference(r, t, v + h) - value_reference(r, t, v - h)) / (2 * h);
    dvalues[i] = (float)((double)COEF * weight_of(r, r->b) * slope);
  }
}

static float *reference_gradient(Model *m, Reference *r) {
  zeropp_zero_grad(model_zero(m));
  for (int i = 0; i < r->n; i++) {
    r->b = r->ids[i];
    int n = rollout_response_len(r->ro, r->b);
    int32_t own[2], rows[64];
    for (int k = 0; k < n; k++) rows[k] = r->ro->prompt_len[r->b] + k - 1;
    Batch batch = tiny_alone(model_grid(m), r->ro->offsets, r->ro->tokens, r->b, own);
    model_train_values(m, batch, batch.n_seqs ? n : 0, rows, reference_rows, r);
  }
  return tiny_state(m, STATE_GRAD);
}

static ValueStats reference_statistics(Model *m, Reference *r) {
  ValueStats s = {0};
  double ret[128], error[128], mean[2] = {0, 0}, var[2] = {0, 0};
  int n = 0;
  for (int i = 0; i < r->n; i++) {
    int b = r->ids[i];
    float value[64];
    values_alone(m, r->ro, b, value);
    for (int t = rollout_first(r->ro, b); t < r->ro->offsets[b + 1]; t++) {
      double v = (double)value[t - 1 - r->ro->offsets[b]];
      s.loss += weight_of(r, b) * value_reference(r, t, v);
      s.clip_fraction +=
          (r->clip > 0 && fabs(v - (double)r->ro->values[t]) > (double)r->clip) / r->tokens;
      ret[n] = (double)r->ro->returns[t];
      error[n++] = (double)r->ro->returns[t] - v;
    }
  }
  for (int i = 0; i < n; i++) mean[0] += ret[i] / n, mean[1] += error[i] / n;
  for (int i = 0; i < n; i++) {
    var[0] += (ret[i] - mean[0]) * (ret[i] - mean[0]) / n;
    var[1] += (error[i] - mean[1]) * (error[i] - mean[1]) / n;
  }
  s.explained_variance = 1 - var[1] / var[0];
  return s;
}

static double reference_loss(Model *m, void *ctx) {
  return (double)COEF * reference_statistics(m, ctx).loss;
}

static void check_update(Model *m, const Rollout *ro, const int32_t *ids, int n, bool sequence_mean,
                         float clip) {
  Reference r = reference_of(ro, ids, n, sequence_mean, clip);
  float *want = reference_gradient(m, &r);
  ValueStats s = reference_statistics(m, &r), got;
  const int micro_tokens[] = {1, 16, 40, 100000};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(critic_update(m, ro, ids, n, clip, COEF, sequence_mean, micro_tokens[i],
                                   tiny_no_step(), 1, &got),
                     0);
    check_gradient(m, want);
    /* Float values near 1 to 10, computed in other batch compositions. */
    check_close(got.loss, s.loss, 1e-5);
    check_close(got.explained_variance, s.explained_variance, 1e-5);
    check_close(got.clip_fraction, s.clip_fraction, 1e-9);
    assert_true(got.grad_norm > 0 && !got.skipped);
  }
  assert_true(clip == 0 || (s.clip_fraction > 0.2 && s.clip_fraction < 0.8));
  check_differences(m, reference_loss, &r, want);
  free(want);
}

static void gradient_does_not_depend_on_cutting(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_SCALAR, 21);
  Rollout *ro = make_rollout(m);
  check_update(m, ro, all_ids, 9, false, CLIP);
  check_update(m, ro, some_ids, 6, true, CLIP);
  check_update(m, ro, some_ids, 6, false, 0);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* values[t] is the head at token t - 1, for response tokens only, whatever the company. */
static void values_of_the_state_before(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_SCALAR, 22);
  Rollout *ro = tiny_rollout();
  int32_t lengths[9];
  for (int b = 0; b < 9; b++) lengths[b] = rollout_len(ro, b);
  BatchPlan plan = plan_batches(lengths, NULL, 9, w.grid->rank, w.grid->world, 30);
  critic_values(m, &plan, ro);
  for (int b = 0; b < 9; b++) {
    float value[64];
    values_alone(m, ro, b, value);
    bool mine = false;
    for (int i = 0; i < plan.n_micro; i++)
      for (int k = 0; k < plan.micro[i].n_seqs; k++) mine |= plan.micro[i].ids[k] == b;
    for (int t = ro->offsets[b]; t < ro->offsets[b + 1]; t++) {
      bool filled = mine && t >= rollout_first(ro, b);
      double want = filled ? (double)value[t - 1 - ro->offsets[b]] : 0;
      check_close((double)ro->values[t], want, 1e-5); /* float, another batch composition */
    }
  }
  plan_free(&plan);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

static void steps_and_nothing_to_train(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_SCALAR, 23);
  Rollout *ro = make_rollout(m);
  AdamW opt = {.lr = 3e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
  ValueStats first, s;
  float *before = tiny_state(m, STATE_MASTER);
  assert_int_equal(critic_update(m, ro, (const int32_t[]){2}, 1, CLIP, COEF, true, 64, opt, 1, &s),
                   1);
  assert_true(s.loss == 0 && s.explained_variance == 0 && s.grad_norm == 0 && !s.skipped);
  ro->returns[rollout_first(ro, 3)] = INFINITY; /* skipped on every rank */
  assert_int_equal(critic_update(m, ro, all_ids, 9, 0, COEF, false, 16, opt, 1, &s), 0);
  assert_true(s.skipped);
  float *after = tiny_state(m, STATE_MASTER);
  assert_memory_equal(before, after, tiny_numel(m) * sizeof(float));
  ro->returns[rollout_first(ro, 3)] = 0;
  critic_update(m, ro, all_ids, 9, 0, COEF, false, 64, opt, 1, &first);
  for (int i = 0; i < 12; i++) critic_update(m, ro, all_ids, 9, 0, COEF, false, 64, opt, 1, &s);
  assert_true(s.loss < 0.7 * first.loss && s.explained_variance > first.explained_variance);
  free(before);
  free(after);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* Returns that do not vary, far from 0: no division by 0, and no digits lost to the offset. */
static void explained_variance_of_constants(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_SCALAR, 24);
  Rollout *ro = make_rollout(m);
  ValueStats s;
  for (int t = 0; t < ro->n_tokens; t++) ro->returns[t] = 1000;
  critic_update(m, ro, all_ids, 9, 0, COEF, false, 64, tiny_no_step(), 1, &s);
  assert_true(s.explained_variance == 0);
  for (int t = 0; t < ro->n_tokens; t++) ro->returns[t] = 4e6f + (float)(t % 3);
  Reference r = reference_of(ro, all_ids, 9, false, 0);
  double want = reference_statistics(m, &r).explained_variance;
  critic_update(m, ro, all_ids, 9, 0, COEF, false, 64, tiny_no_step(), 1, &s);
  /* 1 - var(returns - v) / var(returns) with both near 1; v is good to 1e-6. */
  check_close(s.explained_variance, want, 1e-5);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

static void fixture_update(void **state) {
  (void)state;
  StFile *f = ppo_fixture_open();
  Rollout *ro = ppo_fixture_rollout(f);
  ppo_fixture_field(f, ro, "returns", ro->returns);
  ro->have |= RO_RETURNS;
  World w = world_open();
  Error err = {""};
  ModelOptions o = {.head = HEAD_SCALAR, .trainable = true, .zero = {.stage = 3}};
  Model *m = model_load(w.device, w.grid, w.arena, test_path("fixtures/llama-reward"), &o, &err);
  if (!m) fail_msg("%s", err.msg);
  ValueStats s;
  critic_update(m, ro, NULL, PPO_SEQS, PPO_CLIP, PPO_VF_COEF, false, 20, tiny_no_step(), 1, &s);
  /* 2e-5 for values, 1e-4 for gradients: the agreed bounds between two float implementations. */
  check_close(s.loss, (double)ppo_fixture_scalar(f, -1, "value_loss"), 2e-5);
  check_fixture_gradient(f, "grad.critic.", m);
  model_free(m);
  world_close(&w);
  rollout_free(ro);
  st_close(f);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(gradient_does_not_depend_on_cutting),
    cmocka_unit_test(values_of_the_state_before),
    cmocka_unit_test(steps_and_nothing_to_train),
    cmocka_unit_test(explained_variance_of_constants),
    cmocka_unit_test(fixture_update),
};
TEST_MAIN(tests)
