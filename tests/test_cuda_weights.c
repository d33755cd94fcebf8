/* Weights of a rollout on the GPU: whole, in slices, streamed; full or in codes. Ranks may share
 * the GPU. Skips where there is none. ranks: 1 2
 *
 * F32: the CPU's tokens. BF16 with codes: recorded log-probabilities are those of training's
 * forward over the whole sequence, whose weights are what the codes stand for; and codes that a
 * rollout makes give in slices what they give whole, as far as samples agree. */
#include <math.h>

#include "generation/generation.h"
#include "tests/family_test.h"
#include "tests/two_devices.h"

enum { N = 20, NEW = 24, PROMPT = 40, VOCAB = 1000 };

static Model *make(Bench *b, bool odd, ZeroPPConfig zero) {
  ModelConfig c = two_config(odd, 131);
  ModelOptions o = {.head = HEAD_LM, .trainable = true, .seed = 6, .zero = zero};
  return tiny_model(b, b->grid, &c, &o);
}

static void fill(GenRequest *req, int32_t prompt[N][PROMPT]) {
  for (int i = 0; i < N; i++) {
    int len = 1 + i * 23 % PROMPT;
    for (int t = 0; t < len; t++)
      prompt[i][t] = (int32_t)(rng_block(3, (uint64_t)i, (uint64_t)t).v[0] % 997U);
    req[i] = (GenRequest){.prompt = prompt[i], .prompt_len = len, .prompt_id = i};
  }
}

static void run(Model *m, GenParams p, const GenRequest *req, int n, GenResult *out) {
  Error err = {""};
  if (generate(m, &p, req, n, out, NULL, &err)) fail_msg("%s", err.msg);
}

typedef struct Gap {
  double most, sum;
  int tokens;
} Gap;

static void gap_add(Gap *g, float a, float b) {
  double d = fabs((double)a - (double)b);
  g->most = fmax(g->most, d);
  g->sum += d;
  g->tokens++;
}

/* Up to the first token that differs. */
static Gap gap_of(const GenResult *a, const GenResult *b, int n, int *all) {
  Gap g = {0};
  *all = 0;
  for (int i = 0; i < n; i++) {
    *all += b[i].n;
    for (int t = 0; t < a[i].n && t < b[i].n && a[i].tokens[t] == b[i].tokens[t]; t++)
      gap_add(&g, a[i].logprobs[t], b[i].logprobs[t]);
  }
  return g;
}

static void expect_gap(const char *what, Gap g, int all, double most, int least_tokens) {
  bool fine = g.tokens >= least_tokens && (g.tokens == 0 || g.most <= most);
  print_message(
      "%s%s: %d of %d tokens, log-probabilities differ by %.2e at most, %.2e in the mean\n",
      fine ? "" : "too far, ", what, g.tokens, all, g.most, g.sum / fmax(1, g.tokens));
  two.failures += !fine;
}

/* What training's forward gives to the answers. All ranks score as many. */
static Gap gap_to_forward(Model *m, const GenRequest *req, const GenResult *r, int n) {
  Gap g = {0};
  for (int i = 0; i < N; i++) {
    int32_t tokens[PROMPT + NEW], rows[NEW], offsets[2] = {0};
    float want[NEW];
    int len = i < n ? r[i].n : 0;
    if (i < n) {
      offsets[1] = req[i].prompt_len + len;
      memcpy(tokens, req[i].prompt, (size_t)req[i].prompt_len * sizeof *tokens);
      memcpy(tokens + req[i].prompt_len, r[i].tokens, (size_t)len * sizeof *tokens);
    }
    for (int t = 0; t < len; t++) rows[t] = req[i].prompt_len + t - 1;
    model_logprobs(m, (Batch){i < n, offsets, tokens}, len, rows, i < n ? r[i].tokens : NULL, 1,
                   want, NULL);
    for (int t = 0; t < len; t++) gap_add(&g, r[i].logprobs[t], want[t]);
  }
  return g;
}

static void check_failures(void) {
  int failures = two.failures;
  two.failures = 0;
  if (failures) fail_msg("%d comparisons failed; see above", failures);
}

static GenParams params(int look) {
  return (GenParams){.sample = {.temperature = 1, .top_p = 1},
                     .max_new_tokens = test_is_watched_closely() ? 4 : NEW,
                     .n_eos = 1,
                     .eos_ids = {7},
                     .seed = 5,
                     .max_batch = 9,
                     .look = look};
}

static const RolloutWeights kinds[] = {ROLLOUT_REPLICA, ROLLOUT_TENSOR_PARALLEL, ROLLOUT_STREAM};
static const char *const names[] = {"replica", "tensor parallel", "stream"};

/* The last rank has fewer requests, which end earlier. */
static int own_requests(const GenRequest *all, GenRequest *own) {
  const Grid *g = two.gpu.grid;
  int n = 0;
  for (int i = 0; i < N; i++)
    if (i % 5 == 0 ? g->rank == g->world - 1 : i % g->world == 0 && g->rank == 0) own[n++] = all[i];
  return n;
}

static void float_tokens(void **state) {
  (void)state;
  int32_t prompt[N][PROMPT];
  GenRequest all[N], own[N];
  GenResult want[N], got[N];
  need_gpu();
  fill(all, prompt);
  int n = own_requests(all, own);
  for (int odd = 0; odd < 2; odd++) {
    ZeroPPConfig zero = {.stage = 3, .hpz = odd ? HPZ_OFF : HPZ_ON, .prefetch = odd};
    Model *cpu = make(&two.cpu, odd, zero), *gpu = make(&two.gpu, odd, zero);
    for (int k = 0; k < 6; k++) {
      if (test_is_watched() && k % 2 == odd) continue;
      if (test_is_watched_closely() && k / 2 != 1) continue;
      GenParams p = params(k < 3 ? 1 : 8);
      run(cpu, p, own, n, want);
      p.weights = kinds[k % 3];
      run(gpu, p, own, n, got);
      int tokens;
      Gap g = gap_of(got, want, n, &tokens);
      expect_gap(names[k % 3], g, tokens, 1e-4, tokens);
      gen_results_free(got, n);
      gen_results_free(want, n);
    }
    model_free(cpu);
    model_free(gpu);
  }
  check_failures();
}

/* Codes as training has them, or made of its full weights. */
static void codes_of(WireKind format, bool trained, const GenRequest *own, int n) {
  ZeroPPConfig zero = {.stage = 3, .compute = DT_BF16, .wire = WIRE_BF16, .block = 128};
  GenResult whole[N], got[N];
  Error err = {""};
  GenParams p = params(8);
  if (trained) zero.qwz = format, zero.hpz = HPZ_QUANTIZED;
  p.format = format;
  Model *m = make(&two.gpu, false, zero);
  if (model_rollout_check(m, ROLLOUT_REPLICA, format, &err)) {
    print_message("%s\n", err.msg);
    model_free(m);
    return;
  }
  run(m, p, own, n, whole);
  for (int k = 0; k < (trained ? 3 : 2); k++) {
    int tokens;
    p.weights = kinds[k];
    run(m, p, own, n, got);
    Gap g = gap_of(got, whole, n, &tokens);
    /* BF16: three layers of sums of 256 to 704 products, each rounded to 2^-9 of itself. Which of a
     * thousand ids a number draws hangs on less. */
    expect_gap(names[k], g, tokens, 0.1, n > 0 ? n / 2 : 0);
    if (trained) {
      g = gap_to_forward(m, own, got, n);
      expect_gap("  against the forward", g, g.tokens, 0.1, g.tokens);
      two.failures += g.tokens > 0 && g.sum / g.tokens > 0.02;
    }
    gen_results_free(got, n);
  }
  gen_results_free(whole, n);
  model_free(m);
}

/* BF16 in full: slices, which one node reads in place, and a stream, against a replica. */
static void half_numbers(void **state) {
  (void)state;
  int32_t prompt[N][PROMPT];
  GenRequest all[N], own[N];
  GenResult whole[N], got[N];
  need_gpu();
  fill(all, prompt);
  int n = own_requests(all, own), tokens;
  for (int hpz = 0; hpz < 2; hpz++) {
    ZeroPPConfig zero = {.stage = 3, .compute = DT_BF16, .wire = WIRE_BF16};
    if (hpz) zero.hpz = HPZ_ON;
    Model *m = make(&two.gpu, false, zero);
    GenParams p = params(8);
    run(m, p, own, n, whole);
    for (int k = 1; k < 3; k++) {
      p.weights = kinds[k];
      run(m, p, own, n, got);
      expect_gap(names[k], gap_of(got, whole, n, &tokens), tokens, 0.1, n > 0 ? n / 2 : 0);
      Gap g = gap_to_forward(m, own, got, n);
      expect_gap("  against the forward", g, g.tokens, 0.1, g.tokens);
      gen_results_free(got, n);
    }
    gen_results_free(whole, n);
    model_free(m);
  }
  check_failures();
}

static void codes(void **state) {
  (void)state;
  int32_t prompt[N][PROMPT];
  GenRequest all[N], own[N];
  need_gpu();
  fill(all, prompt);
  int n = own_requests(all, own);
  for (int f = 0; f < 4; f++) codes_of(f % 2 ? WIRE_FP8 : WIRE_INT8, f < 2, own, n);
  check_failures();
}

static int close_both(void **state) {
  (void)state;
  if (two.gpu.device) bench_close(&two.gpu);
  if (two.cpu.device) bench_close(&two.cpu);
  return 0;
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(float_tokens),
    cmocka_unit_test(half_numbers),
    cmocka_unit_test_teardown(codes, close_both),
};
TEST_MAIN(tests)
