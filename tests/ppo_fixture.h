/* The ppo-llama fixture as a Rollout: what PyTorch computed for one minibatch of four sequences. */
#ifndef TESTS_PPO_FIXTURE_H
#define TESTS_PPO_FIXTURE_H

#include <stdio.h>

#include "core/rollout.h"
#include "core/safetensors.h"
#include "tests/tiny_model.h"

#define PPO_SEQS 4
#define PPO_KL_COEF 0.1
#define PPO_GAMMA 0.99f
#define PPO_LAMBDA 0.95f
#define PPO_CLIP 0.2f
#define PPO_REWARD_CLIP 5.0
#define PPO_VF_COEF 0.1f

static inline StFile *ppo_fixture_open(void) {
  Error err = {""};
  StFile *f = st_open(test_path("fixtures/ppo-llama/reference.safetensors"), &err);
  if (!f) fail_msg("%s", err.msg);
  return f;
}

static inline const StEntry *ppo_fixture_find(const StFile *f, int seq, const char *what) {
  char name[192];
  if (seq < 0)
    snprintf(name, sizeof name, "%s", what);
  else
    snprintf(name, sizeof name, "seq%d.%s", seq, what);
  const StEntry *e = st_find(f, name);
  if (!e) fail_msg("the fixture has no %s", name);
  return e;
}

static inline float ppo_fixture_scalar(const StFile *f, int seq, const char *what) {
  float x = 0;
  assert_int_equal(st_read_f32(f, ppo_fixture_find(f, seq, what), 0, 1, &x, NULL), 0);
  return x;
}

/* A per-token field of all sequences into dst_N, at the response tokens. */
static inline void ppo_fixture_field(const StFile *f, const Rollout *ro, const char *what,
                                     float *dst_N) {
  for (int b = 0; b < PPO_SEQS; b++) {
    const StEntry *e = ppo_fixture_find(f, b, what);
    assert_int_equal(e->numel, rollout_response_len(ro, b));
    assert_int_equal(st_read_f32(f, e, 0, e->numel, dst_N + rollout_first(ro, b), NULL), 0);
  }
}

/* Tokens, prompts, old and reference log-probs, old values and scores. */
static inline Rollout *ppo_fixture_rollout(const StFile *f) {
  int32_t lengths[PPO_SEQS];
  for (int b = 0; b < PPO_SEQS; b++)
    lengths[b] = (int32_t)ppo_fixture_find(f, b, "input_ids")->numel;
  Rollout *ro = rollout_create(PPO_SEQS, lengths);
  for (int b = 0; b < PPO_SEQS; b++) {
    const StEntry *e = ppo_fixture_find(f, b, "input_ids");
    assert_int_equal(st_read_i32(f, e, 0, e->numel, ro->tokens + ro->offsets[b], NULL), 0);
    e = ppo_fixture_find(f, b, "prompt_len");
    assert_int_equal(st_read_i32(f, e, 0, 1, &ro->prompt_len[b], NULL), 0);
    ro->scores[b] = ppo_fixture_scalar(f, b, "score");
  }
  ppo_fixture_field(f, ro, "old_logprobs", ro->old_logprobs);
  ppo_fixture_field(f, ro, "ref_logprobs", ro->ref_logprobs);
  ppo_fixture_field(f, ro, "old_values", ro->values);
  ro->have = RO_OLD_LOGPROBS | RO_REF_LOGPROBS | RO_VALUES | RO_SCORES;
  return ro;
}

/* Largest relative error of one of our per-token arrays against the fixture's. */
static inline double ppo_fixture_error(const StFile *f, const Rollout *ro, const char *what,
                                       const float *ours_N) {
  float *want_N = mem_zalloc((size_t)ro->n_tokens, sizeof *want_N);
  ppo_fixture_field(f, ro, what, want_N);
  double e = test_rel_error(ours_N, want_N, (size_t)ro->n_tokens);
  free(want_N);
  return e;
}

/* Every parameter's gradient against the fixture's, relative to the tensor's largest magnitude. */
static inline void check_fixture_gradient(const StFile *f, const char *prefix, Model *m) {
  ZeroPP *z = model_zero(m);
  float *ours = tiny_state(m, STATE_GRAD), *at = ours;
  for (int p = 0; p < zeropp_n_params(z); p++) {
    char name[128];
    snprintf(name, sizeof name, "%s%s", prefix, zeropp_spec(z, p)->name);
    const StEntry *e = ppo_fixture_find(f, -1, name);
    float *want = mem_alloc((size_t)e->numel, sizeof *want);
    assert_int_equal(st_read_f32(f, e, 0, e->numel, want, NULL), 0);
    double error = test_rel_error(at, want, (size_t)e->numel);
    if (!(error < 1e-4)) fail_msg("%s is off by %.3g", name, error);
    at += e->numel;
    free(want);
  }
  free(ours);
}

#endif
