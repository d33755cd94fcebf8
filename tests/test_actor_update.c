/* The policy's update on a tiny model. ranks: 1 2 3 4
 *
 * The reference runs one sequence at a time on rank 0 alone, with weights and formulas written out
 * here in double precision: what the update does must not depend on micro-batches, packing or
 * ranks. */
#include "actor/actor.h"
#include "tests/ppo_fixture.h"
#include "tests/tiny_model.h"

static const int32_t all_ids[9] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
static const int32_t some_ids[6] = {7, 2, 4, 0, 8, 3};

static PolicyLoss plain_loss(void) {
  return (PolicyLoss){.clip_low = 0.2f, .clip_high = 0.28f, .kl_kind = KL_K1, .temperature = 0.8f};
}

static PolicyLoss full_loss(KlKind kind) {
  PolicyLoss p = plain_loss();
  p.entropy_coef = 0.05f;
  p.kl_in_loss = true;
  p.kl_kind = kind;
  p.kl_coef = 0.3f;
  return p;
}

/* What a sequence's tokens were drawn from, where the rollout says so. */
static void restrict_to(Model *m, const Rollout *ro, int b) {
  if (ro->kept) model_restrict(m, ro->kept + rollout_first(ro, b) * ro->kept_width);
}

/* Runs one sequence on all ranks: log-probs and entropies of its response. */
static int score_alone(Model *m, const Rollout *ro, int b, float temperature, float *logprob,
                       float *entropy) {
  int32_t own[2] = {0, rollout_len(ro, b)}, rows[64], targets[64];
  int n = rollout_response_len(ro, b);
  for (int i = 0; i < n; i++) {
    rows[i] = ro->prompt_len[b] + i - 1;
    targets[i] = ro->tokens[rollout_first(ro, b) + i];
  }
  Batch batch = {1, own, ro->tokens + ro->offsets[b]};
  restrict_to(m, ro, b);
  model_logprobs(m, batch, n, rows, targets, temperature, logprob, entropy);
  model_restrict(m, NULL);
  return n;
}

/* A rollout whose old log-probs lie around the model's, so that ratios fall on both sides of both
 * bounds, with advantages of both signs. */
static Rollout *make_rollout(Model *m, float temperature) {
  Rollout *ro = tiny_rollout();
  for (int b = 0; b < ro->n_seqs; b++) {
    float logprob[64];
    int n = score_alone(m, ro, b, temperature, logprob, NULL), first = rollout_first(ro, b);
    for (int i = 0; i < n; i++) {
      size_t k = (size_t)first + (size_t)i;
      ro->old_logprobs[k] = logprob[i] - 0.3f * rng_normal(1, 1, k);
      ro->ref_logprobs[k] = logprob[i] - 0.5f * rng_normal(1, 2, k);
      ro->advantages[k] = rng_normal(1, 3, k);
      ro->sampled_logprobs[k] = ro->old_logprobs[k] - 0.6f * rng_normal(1, 4, k);
    }
  }
  ro->have = RO_SAMPLED_LOGPROBS | RO_OLD_LOGPROBS | RO_REF_LOGPROBS | RO_ADVANTAGES;
  return ro;
}

/* ---- the reference ---- */

typedef struct Token {
  double w, old, ref, adv, sampled;
} Token;

typedef struct Reference {
  const Rollout *ro;
  const int32_t *ids;
  int n;
  const PolicyLoss *p;
  bool sequence_mean;
  double tokens, answers;
  Token token[64]; /* of the sequence at hand */
} Reference;

static Reference reference_of(const Rollout *ro, const int32_t *ids, int n, const PolicyLoss *p,
                              bool sequence_mean) {
  Reference r = {.ro = ro, .ids = ids, .n = n, .p = p, .sequence_mean = sequence_mean};
  for (int i = 0; i < n; i++) {
    r.tokens += rollout_response_len(ro, ids[i]);
    r.answers += rollout_response_len(ro, ids[i]) > 0;
  }
  return r;
}

static void reference_load(Reference *r, int b) {
  int first = rollout_first(r->ro, b), n = rollout_response_len(r->ro, b);
  for (int i = 0; i < n; i++)
    r->token[i] =
        (Token){r->sequence_mean ? 1 / (r->answers * n) : 1 / r->tokens,
                (double)r->ro->old_logprobs[first + i], (double)r->ro->ref_logprobs[first + i],
                (double)r->ro->advantages[first + i], (double)r->ro->sampled_logprobs[first + i]};
}

static double kl_reference(KlKind kind, double r) {
  return kind == KL_K1 ? r : kind == KL_K2 ? r * r / 2 : exp(-r) - 1 + r;
}

static double policy_reference(const PolicyLoss *p, const Token *t, double newlp) {
  double ratio = exp(newlp - t->old);
  double clip = fmin(fmax(ratio, 1 - (double)p->clip_low), 1 + (double)p->clip_high);
  double cap = (double)p->importance_cap, weight = exp(t->old - t->sampled);
  return (cap > 0 ? fmin(weight, cap) : 1) * fmax(-t->adv * ratio, -t->adv * clip);
}

static double token_reference(const PolicyLoss *p, const Token *t, double newlp, double entropy) {
  double loss = policy_reference(p, t, newlp) - (double)p->entropy_coef * entropy;
  if (p->kl_in_loss) loss += (double)p->kl_coef * kl_reference(p->kl_kind, newlp - t->ref);
  return loss;
}

static void reference_rows(void *ctx, int first, int n, const float *logprob, const float *entropy,
                           float *dlogprob, float *dentropy) {
  Reference *r = ctx;
  for (int i = 0; i < n; i++) {
    const Token *t = &r->token[first + i];
    double lp = (double)logprob[i], e = (double)entropy[i], h = 1e-6;
    dlogprob[i] =
        (float)(t->w * (token_reference(r->p, t, lp + h, e) - token_reference(r->p, t, lp - h, e)) /
                (2 * h));
    dentropy[i] = (float)(-t->w * (double)r->p->entropy_coef);
  }
}

static float *reference_gradient(Model *m, Reference *r) {
  zeropp_zero_grad(model_zero(m));
  for (int i = 0; i < r->n; i++) {
    int b = r->ids[i], n = rollout_response_len(r->ro, b);
    int32_t own[2], rows[64], targets[64];
    for (int k = 0; k < n; k++) {
      rows[k] = r->ro->prompt_len[b] + k - 1;
      targets[k] = r->ro->tokens[rollout_first(r->ro, b) + k];
    }
    reference_load(r, b);
    restrict_to(m, r->ro, b);
    Batch batch = tiny_alone(model_grid(m), r->ro->offsets, r->ro->tokens, b, own);
    model_train_lm(m, batch, batch.n_seqs ? n : 0, rows, targets, r->p->temperature, true,
                   reference_rows, r);
    model_restrict(m, NULL);
  }
  return tiny_state(m, STATE_GRAD);
}

static PolicyStats reference_statistics(Model *m, Reference *r) {
  PolicyStats s = {0};
  for (int i = 0; i < r->n; i++) {
    float logprob[64], entropy[64];
    int n = score_alone(m, r->ro, r->ids[i], r->p->temperature, logprob, entropy);
    reference_load(r, r->ids[i]);
    for (int k = 0; k < n; k++) {
      const Token *t = &r->token[k];
      double lp = (double)logprob[k], ratio = exp(lp - t->old);
      s.loss += t->w * token_reference(r->p, t, lp, (double)entropy[k]);
      s.policy_loss += t->w * policy_reference(r->p, t, lp);
      s.entropy += (double)entropy[k] / r->tokens;
      s.kl_ref += kl_reference(r->p->kl_kind, lp - t->ref) / r->tokens;
      s.kl_old_k1 += (t->old - lp) / r->tokens;
      s.kl_old_k3 += (ratio - 1 - (lp - t->old)) / r->tokens;
      s.clip_fraction +=
          (ratio < 1 - (double)r->p->clip_low || ratio > 1 + (double)r->p->clip_high) / r->tokens;
      s.ratio_max_dev = fmax(s.ratio_max_dev, fabs(ratio - 1));
    }
  }
  return s;
}

static double reference_loss(Model *m, void *ctx) { return reference_statistics(m, ctx).loss; }

/* ---- the tests ---- */

static void check_update(Model *m, const Rollout *ro, const int32_t *ids, int n,
                         const PolicyLoss *p, bool sequence_mean) {
  Reference r = reference_of(ro, ids, n, p, sequence_mean);
  float *want = reference_gradient(m, &r);
  PolicyStats s = reference_statistics(m, &r), got;
  const int micro_tokens[] = {1, 16, 40, 100000};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(
        actor_update(m, ro, ids, n, p, sequence_mean, micro_tokens[i], tiny_no_step(), 1, &got), 0);
    check_gradient(m, want);
    /* Means of float log-probs near 1 to 10, of other batch compositions. */
    check_close(got.loss, s.loss, 1e-5);
    check_close(got.policy_loss, s.policy_loss, 1e-5);
    check_close(got.entropy, s.entropy, 1e-5);
    check_close(got.kl_ref, s.kl_ref, 1e-5);
    check_close(got.kl_old_k1, s.kl_old_k1, 1e-5);
    check_close(got.kl_old_k3, s.kl_old_k3, 1e-5);
    check_close(got.clip_fraction, s.clip_fraction, 1e-9);
    check_close(got.ratio_max_dev, s.ratio_max_dev, 1e-5);
    assert_true(got.grad_norm > 0 && !got.skipped);
  }
  assert_true(s.clip_fraction > 0.2 && s.clip_fraction < 0.9);
  free(want);
}

static void gradient_does_not_depend_on_cutting(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 11);
  Rollout *ro = make_rollout(m, 0.8f);
  PolicyLoss plain = plain_loss(), full = full_loss(KL_K3), k2 = full_loss(KL_K2);
  full.importance_cap = 1.3f; /* a third of the weights are beyond */
  check_update(m, ro, all_ids, 9, &plain, false);
  check_update(m, ro, some_ids, 6, &full, false);
  check_update(m, ro, some_ids, 6, &k2, true);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

static void gradient_by_differences(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 12);
  Rollout *ro = make_rollout(m, 0.8f);
  for (int kind = KL_K1; kind <= KL_K3; kind++) {
    PolicyLoss p = full_loss((KlKind)kind);
    p.importance_cap = kind == KL_K2 ? 0 : 1.5f;
    PolicyStats s;
    actor_update(m, ro, all_ids, 9, &p, kind == 2, 40, tiny_no_step(), 0, &s);
    float *gradient = tiny_state(m, STATE_GRAD);
    Reference r = reference_of(ro, all_ids, 9, &p, kind == 2);
    check_differences(m, reference_loss, &r, gradient);
    free(gradient);
  }
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* Every token may have been drawn from itself and a third of the others; first tokens from all. */
static void keep_some(Model *m, Rollout *ro) {
  int vocab = model_config(m)->vocab_size, width = (vocab + 7) / 8;
  rollout_keep(ro, width);
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = rollout_first(ro, b); t < ro->offsets[b + 1]; t++)
      for (int j = 0; j < vocab; j++)
        if (j == ro->tokens[t] || t == rollout_first(ro, b) || (t + j * 5) % 3 == 0)
          ro->kept[t * width + j / 8] |= (uint8_t)(1 << j % 8);
}

/* Log-probabilities over what was kept are the logits' softmax over it, and the update's loss,
 * statistics and gradient are those of that policy. */
static void only_what_was_kept_counts(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 13);
  Rollout *ro = tiny_rollout();
  keep_some(m, ro);
  int vocab = model_config(m)->vocab_size;
  float *logits = mem_alloc((size_t)(64 * vocab), sizeof *logits), logprob[64], entropy[64];
  for (int b = 0; b < ro->n_seqs; b++) {
    int n = score_alone(m, ro, b, 0.8f, logprob, entropy), first = rollout_first(ro, b);
    int32_t own[2] = {0, rollout_len(ro, b)}, rows[64];
    for (int i = 0; i < n; i++) rows[i] = ro->prompt_len[b] + i - 1;
    model_logits(m, (Batch){1, own, ro->tokens + ro->offsets[b]}, n, rows, logits);
    for (int i = 0; i < n; i++) {
      const uint8_t *kept = ro->kept + (first + i) * ro->kept_width;
      double sum = 0, mean = 0, z = (double)logits[i * vocab + ro->tokens[first + i]] / 0.8;
      for (int j = 0; j < vocab; j++) {
        double x = (double)logits[i * vocab + j] / 0.8, e = exp(x - z);
        if (!(kept[j / 8] >> j % 8 & 1)) continue;
        sum += e;
        mean += e * (x - z);
      }
      check_close((double)logprob[i], -log(sum), 1e-5);
      check_close((double)entropy[i], log(sum) - mean / sum, 1e-5);
    }
  }
  free(logits);
  rollout_free(ro);
  ro = make_rollout(m, 0.8f);
  keep_some(m, ro);
  for (int b = 0; b < ro->n_seqs; b++) { /* around the renormalized ones */
    int n = score_alone(m, ro, b, 0.8f, logprob, NULL), first = rollout_first(ro, b);
    for (int i = 0; i < n; i++)
      ro->old_logprobs[first + i] = logprob[i] - 0.3f * rng_normal(1, 1, (uint64_t)(first + i));
  }
  PolicyLoss p = full_loss(KL_K3);
  PolicyStats s;
  check_update(m, ro, some_ids, 6, &p, false);
  actor_update(m, ro, all_ids, 9, &p, false, 40, tiny_no_step(), 0, &s);
  float *gradient = tiny_state(m, STATE_GRAD);
  Reference r = reference_of(ro, all_ids, 9, &p, false);
  check_differences(m, reference_loss, &r, gradient);
  free(gradient);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* More rows than the head takes at a time: each has its own bits. */
static void every_row_is_restricted_by_its_own_bits(void **state) {
  (void)state;
  enum { ROWS = 1100, LAST = 100, WIDTH = (TINY_VOCAB + 7) / 8 };
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 17);
  Rollout *ro = tiny_rollout();
  int32_t own[2] = {0, rollout_len(ro, 3)}, rows[ROWS], targets[ROWS];
  Batch batch = {1, own, ro->tokens + ro->offsets[3]};
  uint8_t *bits_RW = mem_zalloc((size_t)ROWS * WIDTH, 1);
  float all[ROWS], last[LAST];
  for (int i = 0; i < ROWS; i++) {
    rows[i] = i % own[1];
    targets[i] = i % TINY_VOCAB;
    for (int j = 0; j < TINY_VOCAB; j++)
      if (j == targets[i] || (i + j) % 3 == 0) bits_RW[i * WIDTH + j / 8] |= (uint8_t)(1 << j % 8);
  }
  model_restrict(m, bits_RW);
  model_logprobs(m, batch, ROWS, rows, targets, 1, all, NULL);
  model_restrict(m, bits_RW + (ptrdiff_t)(ROWS - LAST) * WIDTH);
  model_logprobs(m, batch, LAST, rows + ROWS - LAST, targets + ROWS - LAST, 1, last, NULL);
  model_restrict(m, NULL);
  for (int i = 0; i < LAST; i++) check_close((double)all[ROWS - LAST + i], (double)last[i], 1e-6);
  free(bits_RW);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* This rank's log-probs of all sequences, then everyone's: what the loop's sharing does. */
static void fill_logprobs(Model *m, Rollout *ro, RolloutField field, float temperature,
                          int micro_tokens) {
  int32_t lengths[64];
  for (int b = 0; b < ro->n_seqs; b++) lengths[b] = rollout_len(ro, b);
  Grid *g = model_grid(m);
  BatchPlan plan = plan_batches(lengths, NULL, ro->n_seqs, g->rank, g->world, micro_tokens);
  float *field_N = rollout_array(ro, field);
  memset(field_N, 0, (size_t)ro->n_tokens * sizeof *field_N);
  actor_logprobs(m, &plan, ro, field, temperature);
  double *sum = mem_alloc((size_t)ro->n_tokens, sizeof *sum);
  for (int t = 0; t < ro->n_tokens; t++) sum[t] = (double)field_N[t];
  comm_all_reduce_f64(g->all, sum, ro->n_tokens, false);
  for (int t = 0; t < ro->n_tokens; t++) field_N[t] = (float)sum[t];
  ro->have |= field;
  free(sum);
  plan_free(&plan);
}

/* log softmax(logits / temperature) at the token before; nothing at prompts. */
static void logprobs_at_temperature(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 13);
  Rollout *ro = tiny_rollout();
  fill_logprobs(m, ro, RO_OLD_LOGPROBS, 0.5f, 25);
  fill_logprobs(m, ro, RO_REF_LOGPROBS, 1.0f, 25);
  for (int b = 0; b < ro->n_seqs; b++) {
    int32_t own[2] = {0, rollout_len(ro, b)}, rows[64];
    float logits[64 * TINY_VOCAB];
    for (int t = 0; t < own[1]; t++) rows[t] = t;
    model_logits(m, (Batch){1, own, ro->tokens + ro->offsets[b]}, own[1], rows, logits);
    for (int t = 0; t < own[1]; t++) {
      float old = ro->old_logprobs[ro->offsets[b] + t], ref = ro->ref_logprobs[ro->offsets[b] + t];
      if (t < ro->prompt_len[b]) {
        assert_true(old == 0 && ref == 0);
        continue;
      }
      double hot = 0, plain = 0;
      const float *l = logits + (size_t)(t - 1) * TINY_VOCAB;
      for (int v = 0; v < TINY_VOCAB; v++) {
        hot += exp((double)l[v] / 0.5);
        plain += exp((double)l[v]);
      }
      double own_logit = (double)l[ro->tokens[ro->offsets[b] + t]];
      check_close((double)old, own_logit / 0.5 - log(hot), 1e-5); /* float logits near 10 */
      check_close((double)ref, own_logit - log(plain), 1e-5);
    }
  }
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* Old log-probs were computed in another batch composition: still every ratio is 1 at the first
 * minibatch, and only there. A step then lowers the loss. */
static void check_first_ratio(Model *m, bool kept, float importance_cap) {
  Rollout *ro = make_rollout(m, 0.7f);
  if (kept) keep_some(m, ro);
  fill_logprobs(m, ro, RO_OLD_LOGPROBS, 0.7f, 23);
  PolicyLoss p = plain_loss();
  p.temperature = 0.7f;
  p.importance_cap = importance_cap;
  AdamW opt = {.lr = 2e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
  PolicyStats first, second;
  actor_update(m, ro, some_ids, 6, &p, false, 64, opt, 1, &first);
  assert_true(first.ratio_max_dev < 1e-5);
  assert_true(first.clip_fraction == 0 && fabs(first.kl_old_k1) < 1e-6);
  check_close(first.lr, 2e-3, 1e-6);
  actor_update(m, ro, some_ids, 6, &p, false, 64, opt, 1, &second);
  assert_true(second.ratio_max_dev > 1e-3 && second.policy_loss < first.policy_loss);
  assert_true(second.kl_old_k3 > 0);
  /* Forgetting the temperature would show here. */
  p.temperature = 1;
  actor_update(m, ro, some_ids, 6, &p, false, 64, opt, 1, &second);
  assert_true(second.ratio_max_dev > 0.05);
  rollout_free(ro);
}

/* Whatever the answers were drawn with: old log-probabilities are the update's own. */
static void first_ratio_is_one(void **state) {
  (void)state;
  World w = world_open();
  for (int k = 0; k < 3; k++) {
    Model *m = tiny_model(&w, HEAD_LM, 14);
    check_first_ratio(m, k == 1, k == 2 ? 1.5f : 0);
    model_free(m);
  }
  world_close(&w);
}

static void nothing_to_train(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 15);
  Rollout *ro = make_rollout(m, 1);
  float *before = tiny_state(m, STATE_MASTER);
  PolicyLoss p = plain_loss();
  AdamW opt = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
  PolicyStats s;
  assert_int_equal(actor_update(m, ro, (const int32_t[]){2}, 1, &p, false, 64, opt, 1, &s), 1);
  assert_true(s.loss == 0 && s.entropy == 0 && s.grad_norm == 0 && !s.skipped);
  assert_int_equal(actor_update(m, ro, NULL, 0, &p, true, 64, opt, 1, &s), 1);
  /* NaN in one token's advantage: the step is skipped on every rank. */
  ro->advantages[rollout_first(ro, 3)] = NAN;
  assert_int_equal(actor_update(m, ro, all_ids, 9, &p, false, 16, opt, 1, &s), 0);
  assert_true(s.skipped && isnan(s.loss));
  float *after = tiny_state(m, STATE_MASTER);
  assert_memory_equal(before, after, tiny_numel(m) * sizeof(float));
  free(before);
  free(after);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* What stands outside the responses, NaN included, cannot reach the loss. */
static void prompts_are_not_read(void **state) {
  (void)state;
  World w = world_open();
  Model *m = tiny_model(&w, HEAD_LM, 16);
  Rollout *ro = make_rollout(m, 0.8f);
  PolicyLoss p = full_loss(KL_K3);
  PolicyStats clean, dirty;
  actor_update(m, ro, all_ids, 9, &p, false, 40, tiny_no_step(), 1, &clean);
  float *want = tiny_state(m, STATE_GRAD);
  for (int b = 0; b < ro->n_seqs; b++)
    for (int t = ro->offsets[b]; t < rollout_first(ro, b); t++)
      ro->old_logprobs[t] = ro->ref_logprobs[t] = ro->advantages[t] = NAN;
  actor_update(m, ro, all_ids, 9, &p, false, 40, tiny_no_step(), 1, &dirty);
  check_gradient(m, want);
  assert_true(clean.loss == dirty.loss && clean.kl_ref == dirty.kl_ref);
  free(want);
  rollout_free(ro);
  model_free(m);
  world_close(&w);
}

/* ---- what PyTorch computes ---- */

static void fixture_update(void **state) {
  (void)state;
  StFile *f = ppo_fixture_open();
  Rollout *ro = ppo_fixture_rollout(f);
  ppo_fixture_field(f, ro, "advantages", ro->advantages);
  ro->have |= RO_ADVANTAGES;
  World w = world_open();
  Error err = {""};
  ModelOptions o = {.head = HEAD_LM, .trainable = true, .zero = {.stage = 3}};
  Model *m = model_load(w.device, w.grid, w.arena, test_path("fixtures/llama"), &o, &err);
  if (!m) fail_msg("%s", err.msg);
  PolicyLoss p = {.clip_low = PPO_CLIP, .clip_high = PPO_CLIP, .kl_kind = KL_K1, .temperature = 1};
  PolicyStats s;
  actor_update(m, ro, NULL, PPO_SEQS, &p, false, 20, tiny_no_step(), 1, &s);
  /* 2e-5 for values, 1e-4 for gradients: the agreed bounds between two float implementations. */
  check_close(s.policy_loss, (double)ppo_fixture_scalar(f, -1, "policy_loss"), 2e-5);
  check_close(s.kl_old_k1, (double)ppo_fixture_scalar(f, -1, "approx_kl_k1"), 2e-5);
  check_close(s.clip_fraction, (double)ppo_fixture_scalar(f, -1, "clip_fraction"), 2e-5);
  check_close(s.entropy, (double)ppo_fixture_scalar(f, -1, "entropy"), 2e-5);
  check_fixture_gradient(f, "grad.actor.", m);
  model_free(m);
  world_close(&w);
  rollout_free(ro);
  st_close(f);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(gradient_does_not_depend_on_cutting),
    cmocka_unit_test(gradient_by_differences),
    cmocka_unit_test(only_what_was_kept_counts),
    cmocka_unit_test(every_row_is_restricted_by_its_own_bits),
    cmocka_unit_test(logprobs_at_temperature),
    cmocka_unit_test(first_ratio_is_one),
    cmocka_unit_test(nothing_to_train),
    cmocka_unit_test(prompts_are_not_read),
    cmocka_unit_test(fixture_update),
};
TEST_MAIN(tests)
