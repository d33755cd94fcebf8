/* Decoding of every family is its forward cut otherwise, whatever ranks hold of the weights:
 * recorded log-probabilities are those of the whole sequence's forward.
 * ranks: 1 3 */
#include <math.h>

#include "generation/generation.h"
#include "tests/family_test.h"

enum { N = 5, NEW = 14, PROMPT = 9 };

static void fill(GenRequest *req, int32_t prompt[][PROMPT], int vocab) {
  for (int i = 0; i < N; i++) {
    for (int t = 0; t < PROMPT; t++)
      prompt[i][t] = (int32_t)(rng_block(3, (uint64_t)i, (uint64_t)t).v[0] % (unsigned)vocab);
    req[i] =
        (GenRequest){.prompt = prompt[i], .prompt_len = 1 + i * 2, .prompt_id = i, .sample_id = 0};
  }
}

/* 2e-5: float epsilon, times some tens of additions in two orders, times logits of up to 10. */
static void expect_forward(Model *m, const GenRequest *q, const GenResult *r, const char *name) {
  int32_t tokens[PROMPT + NEW], rows[NEW], offsets[] = {0, q->prompt_len + r->n};
  float want[NEW];
  memcpy(tokens, q->prompt, (size_t)q->prompt_len * sizeof *tokens);
  memcpy(tokens + q->prompt_len, r->tokens, (size_t)r->n * sizeof *tokens);
  for (int t = 0; t < r->n; t++) rows[t] = q->prompt_len + t - 1;
  model_logprobs(m, (Batch){1, offsets, tokens}, r->n, rows, r->tokens, 1, want, NULL);
  for (int t = 0; t < r->n; t++)
    if (!(fabsf(r->logprobs[t] - want[t]) < 2e-5f))
      fail_msg("%s, token %d: recorded %.9g, full forward %.9g", name, t, (double)r->logprobs[t],
               (double)want[t]);
}

static void expect_nothing(Model *m) {
  const int32_t none = 0;
  model_logprobs(m, (Batch){0, &none, NULL}, 0, NULL, NULL, 1, NULL, NULL);
}

static void test_families(void **state) {
  (void)state;
  Bench b = bench_open();
  static const RolloutWeights weights[] = {ROLLOUT_REPLICA, ROLLOUT_REPLICA,
                                           ROLLOUT_TENSOR_PARALLEL, ROLLOUT_STREAM};
  for (int k = 0; k < 4 * N_FAMILY_CASES; k++) {
    const char *name = family_cases[k / 4].name;
    ModelConfig c = family_config(k / 4);
    if (c.max_positions < 48) c.max_positions = 48;
    ModelOptions o = {.head = HEAD_LM, .seed = 4, .zero = {.stage = 3}};
    Model *m = tiny_model(&b, b.grid, &c, &o);
    model_rope_fix(m, PROMPT + NEW);
    GenRequest req[N];
    GenResult out[N];
    int32_t prompt[N][PROMPT];
    fill(req, prompt, c.vocab_size);
    GenParams p = {.sample = {.temperature = 1, .top_p = 1},
                   .max_new_tokens = NEW,
                   .weights = weights[k % 4],
                   .look = k % 2 ? 4 : 1,
                   .page_size = 5,
                   .seed = 1};
    Error err = {""};
    int n = N - b.grid->rank; /* the others go on with a rank that has nothing to do any more */
    if (generate(m, &p, req, n, out, NULL, &err)) fail_msg("%s: %s", name, err.msg);
    for (int i = 0; i < N; i++) { /* a forward is all ranks' */
      if (i >= n) {
        expect_nothing(m);
        continue;
      }
      assert_int_equal(out[i].n, NEW);
      expect_forward(m, &req[i], &out[i], name);
    }
    gen_results_free(out, n);
    model_free(m);
  }
  bench_close(&b);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_families)};
TEST_MAIN(tests)
