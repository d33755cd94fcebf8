/* Rollouts on the GPU: the CPU's tokens, whatever the batch and however often the host looks, with
 * rows that end, wait and give way while steps are queued. Skips where there is no GPU.
 *
 * F32: tokens are equal, but for ties of greedy choices (two samples of one prompt are one tie).
 * Logits differ by some 1e-6 of the largest, and none of these random numbers lies so near to an
 * edge between two ids.
 * BF16: a row's bits do not depend on the others while there are at most 16, so tokens are equal
 * with one look and another. */
#include <math.h>
#include <string.h>

#include "generation/generation.h"
#include "tests/family_test.h"
#include "tests/two_devices.h"

enum { MOST = 70, NEW = 40, PROMPT = 60 };

static Model *make(Bench *b, bool odd, DType compute) {
  ModelConfig c = two_config(odd, 130);
  ModelOptions o = {.head = HEAD_LM, .seed = 6, .zero = {.stage = 3, .compute = compute}};
  return tiny_model(b, b->grid, &c, &o);
}

typedef struct Requests {
  GenRequest req[MOST];
  int32_t prompt[MOST][PROMPT];
} Requests;

/* Prompts of all lengths, two samples of each. */
static void fill(Requests *r, int vocab) {
  for (int i = 0; i < MOST; i++) {
    int id = i / 2, len = 1 + id * 23 % PROMPT;
    for (int t = 0; t < len; t++)
      r->prompt[i][t] = (int32_t)(rng_block(3, (uint64_t)id, (uint64_t)t).v[0] % (unsigned)vocab);
    r->req[i] = (GenRequest){
        .prompt = r->prompt[i], .prompt_len = len, .prompt_id = id, .sample_id = i % 2};
  }
}

/* Sampling ends a sequence at one id in fifty. */
static GenParams params(bool greedy) {
  GenParams p = {.sample = {.temperature = 1, .top_p = 1, .greedy = greedy},
                 .max_new_tokens = test_is_watched_closely() ? 5 : NEW,
                 .n_eos = MODEL_MAX_EOS,
                 .seed = 5,
                 .step = 3};
  for (int i = 0; i < p.n_eos; i++) p.eos_ids[i] = 17 + 40 * i;
  return p;
}

static GenStats run(Model *m, const GenParams *p, const Requests *r, int n, GenResult *out) {
  Error err = {""};
  GenStats s;
  if (generate(m, p, r->req, n, out, &s, &err)) fail_msg("%s", err.msg);
  return s;
}

typedef struct Differences {
  int tokens, ties; /* sequences that differ; those that do so from a tie on */
  double logprobs;  /* up to there, the most */
} Differences;

/* Greedy choices between two ids whose logits agree to rounding may fall either way. */
static void compare_one(const GenResult *got, const GenResult *want, bool greedy, double bound,
                        Differences *d) {
  int t = 0;
  for (; t < got->n && t < want->n && got->tokens[t] == want->tokens[t]; t++)
    d->logprobs = fmax(d->logprobs, fabs((double)got->logprobs[t] - (double)want->logprobs[t]));
  if (got->n == want->n && t == want->n && got->ended == want->ended) return;
  bool tie = greedy && t < got->n && t < want->n &&
             fabs((double)got->logprobs[t] - (double)want->logprobs[t]) < bound;
  d->tokens += !tie;
  d->ties += tie;
}

/* Also prints the time of a step. */
static void compare(const char *what, const GenParams *p, int n, const GenStats *s,
                    const GenResult *got, const GenResult *want, double bound) {
  Differences d = {0};
  for (int i = 0; i < n; i++) compare_one(&got[i], &want[i], p->sample.greedy, bound, &d);
  bool ok = d.tokens == 0 && d.ties <= 2 && d.logprobs <= bound;
  print_message(
      "%s %s, %d requests, %s, look %d, batch %d, page %d, kv %d: %d differ, %d after a "
      "tie, log-probabilities by %.1e; %.0f us a step of %.1f rows\n",
      ok ? "      " : "FAILED", what, n, p->sample.greedy ? "greedy" : "sampled", p->look,
      p->max_batch, p->page_size, (int)p->max_kv_tokens, d.tokens, d.ties, d.logprobs,
      1e6 * s->decode_seconds / (double)s->decode_steps,
      (double)s->step_rows / (double)s->decode_steps);
  two.failures += !ok;
}

static const struct Way {
  int n, look, batch, page, kv, min_new;
} ways[] = {{1, 1, 1, 16, 0, 0},     {1, 8, 1, 5, 0, 0},     {3, 8, 3, 16, 0, 0},
            {20, 1, 20, 16, 0, 0},   {20, 8, 20, 16, 0, 0},  {40, 8, 40, 7, 0, 0},
            {40, 8, 12, 16, 0, 0},   {40, 3, 40, 4, 500, 0}, {MOST, 8, MOST, 16, 0, 0},
            {MOST, 8, 66, 16, 0, 5}, {MOST, 50, 9, 32, 0, 0}};
enum { N_WAYS = sizeof ways / sizeof *ways };

static GenParams params_of(const struct Way *w, bool greedy) {
  GenParams p = params(greedy);
  p.look = w->look;
  p.max_batch = w->batch;
  p.page_size = w->page;
  p.max_kv_tokens = w->kv;
  p.min_new_tokens = w->min_new;
  return p;
}

/* Where a checker looks on, every fourth way, counted over the program; closely, every seventh, and
 * few requests of few tokens. */
static bool leaves_out(void) {
  static int ways_so_far;
  return test_is_watched() && ways_so_far++ % (test_is_watched_closely() ? 7 : 4) != 0;
}
static int requests_of(const struct Way *w) {
  return test_is_watched_closely() && w->n > 9 ? 9 : w->n;
}

/* A penalty looks at what a sequence has had: on the device through bursts, rows that move, wait
 * and come back. */
static void penalties_are_the_cpus(void **state) {
  (void)state;
  need_gpu();
  Model *cpu = make(&two.cpu, false, DT_F32), *gpu = make(&two.gpu, false, DT_F32);
  Requests *r = mem_zalloc(1, sizeof *r);
  fill(r, model_config(cpu)->vocab_size);
  GenResult want[MOST], got[MOST];
  for (int k = 0; k < 2 * N_WAYS; k++) {
    if (leaves_out()) continue;
    const struct Way *way = &ways[k / 2];
    GenParams p = params_of(way, k % 2), alone = p;
    p.sample.repetition_penalty = alone.sample.repetition_penalty = 1.4f;
    alone.look = 1;
    int n = requests_of(way);
    GenStats s = run(gpu, &p, r, n, got);
    run(cpu, &alone, r, n, want);
    compare("F32, penalty", &p, n, &s, got, want, 1e-4);
    gen_results_free(got, n);
    gen_results_free(want, n);
  }
  free(r);
  model_free(cpu);
  model_free(gpu);
  done();
}

/* How far an answer agrees: up to an id that rounding puts on the other side of a filter's edge. */
typedef struct KeptDifferences {
  int tokens, missing, edges;
  double logprobs;
} KeptDifferences;

static void compare_kept_one(const GenResult *a, const GenResult *b, int width,
                             KeptDifferences *d) {
  for (int t = 0; t < a->n && t < b->n; t++) {
    const uint8_t *kept = a->kept + t * width;
    if (memcmp(kept, b->kept + t * width, (size_t)width) != 0) {
      d->edges++;
      return;
    }
    d->tokens += a->tokens[t] != b->tokens[t];
    d->missing += !(kept[a->tokens[t] / 8] >> a->tokens[t] % 8 & 1);
    d->logprobs = fmax(d->logprobs, fabs((double)a->logprobs[t] - (double)b->logprobs[t]));
  }
  d->tokens += a->n != b->n;
}

/* Logits differ by 1e-6 of the largest, so of a thousand ids some 1e-4 at a time lie that near to
 * the edge of min_p; a few of 2800 tokens do. */
static void kept_ids_are_the_cpus(void **state) {
  (void)state;
  need_gpu();
  Model *cpu = make(&two.cpu, false, DT_F32), *gpu = make(&two.gpu, false, DT_F32);
  Requests *r = mem_zalloc(1, sizeof *r);
  fill(r, model_config(cpu)->vocab_size);
  GenResult want[MOST], got[MOST];
  for (int k = 0; k < N_WAYS; k++) {
    if (leaves_out()) continue;
    GenParams p = params_of(&ways[k], false);
    p.sample.min_p = 0.02f;
    p.keep = true;
    KeptDifferences d = {0};
    int n = requests_of(&ways[k]);
    run(gpu, &p, r, n, got);
    p.look = 1;
    run(cpu, &p, r, n, want);
    for (int i = 0; i < n; i++) compare_kept_one(&got[i], &want[i], 125, &d);
    bool ok = d.tokens == 0 && d.missing == 0 && d.edges <= 7 && d.logprobs < 1e-4;
    print_message(
        "%s kept, %d requests, look %d: %d tokens differ, %d not kept, %d at an edge, "
        "log-probabilities by %.1e\n",
        ok ? "      " : "FAILED", n, ways[k].look, d.tokens, d.missing, d.edges, d.logprobs);
    two.failures += !ok;
    gen_results_free(got, n);
    gen_results_free(want, n);
  }
  free(r);
  model_free(cpu);
  model_free(gpu);
  done();
}

static void compare_devices(bool odd, bool greedy) {
  Model *cpu = make(&two.cpu, odd, DT_F32), *gpu = make(&two.gpu, odd, DT_F32);
  Requests *r = mem_zalloc(1, sizeof *r);
  fill(r, model_config(cpu)->vocab_size);
  GenResult want[2][MOST], got[MOST];
  for (int ban = 0; ban < 2; ban++) {
    GenParams p = params(greedy);
    p.look = 1;
    p.min_new_tokens = ban ? 5 : 0;
    run(cpu, &p, r, MOST, want[ban]);
  }
  for (int k = 0; k < N_WAYS; k++) {
    if (leaves_out()) continue;
    GenParams p = params_of(&ways[k], greedy);
    int n = requests_of(&ways[k]);
    GenStats s = run(gpu, &p, r, n, got);
    compare(odd ? "F32, odd sizes" : "F32", &p, n, &s, got, want[ways[k].min_new > 0], 1e-4);
    gen_results_free(got, n);
  }
  for (int ban = 0; ban < 2; ban++) gen_results_free(want[ban], MOST);
  free(r);
  model_free(cpu);
  model_free(gpu);
}

static void tokens_are_the_cpus(void **state) {
  (void)state;
  need_gpu();
  for (int k = 0; k < 4; k++) compare_devices(k / 2, k % 2);
  done();
}

/* All requests enter at once; the look of the first rollout is p's. */
static void compare_looks(const char *what, Model *m, const Requests *r, GenParams p,
                          const int looks[3]) {
  GenResult want[MOST], got[MOST];
  int n = p.max_batch;
  run(m, &p, r, n, want);
  for (int k = 0; k < (test_is_watched() ? 1 : 3); k++) {
    p.look = looks[k];
    GenStats s = run(m, &p, r, n, got);
    compare(what, &p, n, &s, got, want, 0);
    gen_results_free(got, n);
  }
  gen_results_free(want, n);
}

/* At most 16 rows. */
static void a_look_changes_no_bit(void **state) {
  (void)state;
  need_gpu();
  Model *m = make(&two.gpu, false, DT_BF16);
  Requests *r = mem_zalloc(1, sizeof *r);
  fill(r, model_config(m)->vocab_size);
  static const int sizes[] = {1, 7, 12, 16}, looks[] = {3, 8, 50};
  for (int i = 0; i < 8; i++) {
    if (leaves_out()) continue;
    GenParams p = params(i % 2);
    p.max_batch = sizes[i / 2];
    p.look = 1;
    compare_looks("BF16", m, r, p, looks);
  }
  free(r);
  model_free(m);
  done();
}

/* A model whose head and products are of the kinds that models of a billion parameters use. What
 * was drawn is compared, and its log-probabilities, by bits: a sum in another order shows in them.
 */
static void runs_are_the_same_bits(void **state) {
  (void)state;
  need_gpu();
  ModelConfig c = two_config(false, 0);
  c.vocab_size = 32000;
  c.hidden = 2048;
  c.n_heads = 32;
  c.n_kv_heads = 4;
  c.ffn = 5632;
  ModelOptions o = {.head = HEAD_LM, .seed = 6, .zero = {.stage = 3, .compute = DT_BF16}};
  Model *m = tiny_model(&two.gpu, two.gpu.grid, &c, &o);
  Requests *r = mem_zalloc(1, sizeof *r);
  fill(r, c.vocab_size);
  static const int sizes[] = {1, 4, 16, 64}, looks[] = {0, 0, 0};
  for (int i = 0; i < 4; i += test_is_watched_closely() ? 2 : 1) {
    GenParams p = params(false);
    GenResult first[MOST];
    if (test_is_watched()) p.max_new_tokens = 3;
    int n = p.max_batch = sizes[i];
    run(m, &p, r, n, first); /* products are tuned */
    gen_results_free(first, n);
    compare_looks("BF16, once more", m, r, p, looks);
  }
  free(r);
  model_free(m);
  done();
}

/* New weights in the same buffers, and other buffers: no step of an earlier call is run again. */
static void weights_are_current(void **state) {
  (void)state;
  need_gpu();
  Requests *r = mem_zalloc(1, sizeof *r);
  fill(r, 1000);
  GenParams p = params(true);
  p.max_batch = 20;
  GenResult want[MOST], got[MOST];
  int n = test_is_watched_closely() ? 9 : 20;
  for (int k = 0; k < (test_is_watched_closely() ? 1 : 3); k++) {
    Model *cpu = make(&two.cpu, false, DT_F32), *gpu = make(&two.gpu, false, DT_F32);
    for (int round = 0; round < 2; round++) {
      GenStats s = run(gpu, &p, r, n, got);
      run(cpu, &p, r, n, want);
      compare("F32, new weights", &p, n, &s, got, want, 1e-4);
      gen_results_free(got, n);
      gen_results_free(want, n);
      Model *both[] = {cpu, gpu};
      for (int i = 0; i < 2; i++) {
        int64_t start, count;
        float *w = zeropp_shard(model_zero(both[i]), STATE_MASTER, 0, &start, &count);
        for (int64_t j = 0; j < count; j++) w[j] = -w[j];
        zeropp_shard_written(model_zero(both[i]), STATE_MASTER, 0);
        zeropp_weights_written(model_zero(both[i]));
      }
    }
    model_free(cpu);
    model_free(gpu);
  }
  free(r);
  done();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(tokens_are_the_cpus),    cmocka_unit_test(penalties_are_the_cpus),
    cmocka_unit_test(kept_ids_are_the_cpus),  cmocka_unit_test(a_look_changes_no_bit),
    cmocka_unit_test(runs_are_the_same_bits), cmocka_unit_test(weights_are_current),
};
TEST_MAIN(tests)
