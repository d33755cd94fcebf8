/* Whole models on the GPU beside the CPU: every family, F32 and BF16, all ways to recompute,
 * training, generation and files. Skips where there is no GPU.
 *
 * F32: the same sums in another order, twice through two layers and their backward: 1e-5 of the
 * largest logit, 1e-4 of a parameter's largest gradient, as for the CPU against PyTorch.
 * BF16: weights, activations and their gradients are rounded to 8 bits, an error of up to 2^-9 each
 * time that is as often up as down. Some 20 roundings lie between a token and its logits, twice as
 * many between it and its gradient: sqrt(40) 2^-9 / sqrt(3) = 0.7 %, a few times that where
 * activations cancel. Measured as a whole vector's error over its length. */
#include "generation/generation.h"
#include "tests/family_test.h"
#include "tests/two_devices.h"

enum { N_SEQS = 5, VOCAB_MOST = 1000 };
static const int short_lengths[N_SEQS] = {7, 1, 12, 2, 15};
static const double BF16_LOGITS = 0.03, BF16_GRADIENT = 0.06;
/* Some one in a hundred of ReLU's inputs is so near to 0 that rounding opens or closes the gate,
 * and with it a whole term of a gradient: sqrt(1 %). */
static const double BF16_KINKS = 0.2;

static void check(bool ok, const char *what, const char *of, double error, double bound) {
  print_message("%s %s, %s: %.2e, bound %.0e\n", ok ? "      " : "FAILED", what, of, error, bound);
  two.failures += !ok;
}

/* |got - want| / |want|, as vectors; infinite where anything is not finite. */
static double length_error(const float *got, const float *want, size_t n) {
  double error = 0, size = 1e-30;
  for (size_t i = 0; i < n; i++) {
    double d = (double)got[i] - (double)want[i];
    if (!isfinite(d)) return INFINITY;
    error += d * d;
    size += (double)want[i] * (double)want[i];
  }
  return sqrt(error / size);
}

/* ---- cases ---- */

/* Sizes at which the GPU takes its fast paths: heads of 64, rows of whole 16-byte words. */
static ModelConfig wide_config(void) {
  return (ModelConfig){.family = "llama",
                       .vocab_size = VOCAB_MOST,
                       .hidden = 256,
                       .n_layers = 3,
                       .n_heads = 4,
                       .n_kv_heads = 2,
                       .head_dim = 64,
                       .ffn = 688,
                       .max_positions = 512,
                       .norm_eps = 1e-5f,
                       .rope_theta = 10000,
                       .init_std = 0.06f,
                       .bos_id = 1,
                       .pad_id = -1};
}
enum { N_CASES = N_FAMILY_CASES + 1 };

/* Where a checker looks on, long tests have some families and the wide model; closely, all tests
 * have two and that. */
static bool leaves_out(int i, bool long_test) {
  if (i == N_FAMILY_CASES) return false;
  if (test_is_watched_closely()) return i != 4 && i != 7;
  return long_test && test_is_watched() && i % 4 != 1;
}

static const char *case_name(int i) { return i < N_FAMILY_CASES ? family_cases[i].name : "wide"; }
static ModelConfig case_config(int i) {
  ModelConfig c = i < N_FAMILY_CASES ? family_config(i) : wide_config();
  c.score_bias = true;
  return c;
}
static TestBatch case_batch(int i, const ModelConfig *c) {
  static const int wide_lengths[N_SEQS] = {130, 1, 77, 2, 300}, closely[N_SEQS] = {70, 1, 9, 2, 65};
  const int *wide = test_is_watched_closely() ? closely : wide_lengths;
  return test_batch(N_SEQS, i < N_FAMILY_CASES ? short_lengths : wide, c->vocab_size);
}

static Model *make(Bench *b, const ModelConfig *c, HeadKind head, DType compute, int way) {
  ModelOptions o = tiny_options(head);
  set_recompute(&o, way);
  o.zero.compute = compute;
  return tiny_model(b, b->grid, c, &o);
}

/* ---- forward and backward ---- */

/* Where a parameter's gradient is nothing but rounding (keys' biases without rotation), its scale
 * is that of the others. */
static double gradient_error(Model *gpu, Model *cpu, bool by_length, const char **where) {
  double worst = 0, most = 0;
  for (int pass = 0; pass < 2; pass++)
    for (int p = 0; p < zeropp_n_params(model_zero(cpu)); p++) {
      int64_t start, count;
      const float *want = zeropp_shard(model_zero(cpu), STATE_GRAD, p, &start, &count);
      const float *got = zeropp_shard(model_zero(gpu), STATE_GRAD, p, &start, &count);
      double largest = 0, e;
      for (int64_t k = 0; k < count; k++) largest = fmax(largest, fabs((double)want[k]));
      most = fmax(most, largest);
      if (pass == 0) continue;
      if (by_length)
        e = largest > 1e-3 * most ? length_error(got, want, (size_t)count) : 0;
      else
        e = test_rel_error(got, want, (size_t)count) * largest / fmax(largest, 1e-3 * most);
      if (e <= worst) continue;
      worst = e;
      *where = zeropp_spec(model_zero(cpu), p)->name;
    }
  return worst;
}

static void compare_logits(int i, Model *gpu, Model *cpu, const TestBatch *b, DType compute) {
  size_t n = (size_t)b->n_tokens * (size_t)model_config(cpu)->vocab_size;
  float *got = mem_alloc(n, sizeof *got), *want = mem_alloc(n, sizeof *want);
  int32_t rows[512];
  for (int t = 0; t < b->n_tokens; t++) rows[t] = t;
  model_logits(gpu, as_batch(b), b->n_tokens, rows, got);
  model_logits(cpu, as_batch(b), b->n_tokens, rows, want);
  bool f32 = compute == DT_F32;
  double bound = f32 ? 1e-5 : BF16_LOGITS;
  double e = f32 ? test_rel_error(got, want, n) : length_error(got, want, n);
  check(e < bound, f32 ? "F32 logits" : "BF16 logits", case_name(i), e, bound);
  free(got);
  free(want);
}

static void compare_case(int i, HeadKind head, DType compute) {
  bool f32 = compute == DT_F32;
  ModelConfig c = case_config(i);
  TestBatch b = case_batch(i, &c);
  Model *cpu = make(&two.cpu, &c, head, DT_F32, RECOMPUTE_NONE);
  Model *gpu = make(&two.gpu, &c, head, compute, RECOMPUTE_NONE);
  if (head == HEAD_LM) compare_logits(i, gpu, cpu, &b, compute);
  int flags = head == HEAD_LM ? WITH_ENTROPY | COLD : 0;
  double scored = eval_batch(gpu, &b, flags);
  zeropp_zero_grad(model_zero(cpu));
  zeropp_zero_grad(model_zero(gpu));
  double want = train_batch(cpu, &b, flags), got = train_batch(gpu, &b, flags);
  double e = fabs(got - want) / b.n_rows, bound = f32 ? 1e-5 : 2e-2;
  check(e < bound, f32 ? "F32 loss" : "BF16 loss", case_name(i), e, bound);
  check(fabs(got - scored) < 1e-4, "scored as trained", case_name(i), fabs(got - scored), 1e-4);
  const char *where = case_name(i);
  e = gradient_error(gpu, cpu, !f32, &where);
  bool kinks = c.mlp == MLP_PLAIN && c.activation == ACT_RELU;
  bound = f32 ? 1e-4 : kinks ? BF16_KINKS : BF16_GRADIENT;
  check(e < bound, f32 ? "F32 gradient" : "BF16 gradient", where, e, bound);
  model_free(cpu);
  model_free(gpu);
}

static void compare_all(HeadKind head, DType compute) {
  need_gpu();
  for (int i = 0; i < N_CASES; i++)
    if (!leaves_out(i, false)) compare_case(i, head, compute);
  done();
}
static void lm_f32(void **state) {
  (void)state;
  compare_all(HEAD_LM, DT_F32);
}
static void lm_bf16(void **state) {
  (void)state;
  compare_all(HEAD_LM, DT_BF16);
}
static void scalar_f32(void **state) {
  (void)state;
  compare_all(HEAD_SCALAR, DT_F32);
}
static void scalar_bf16(void **state) {
  (void)state;
  compare_all(HEAD_SCALAR, DT_BF16);
}

/* ---- same bits ---- */

/* Two passes over the same batch, so that gradients are also added to. */
static double train_twice(Model *m, const TestBatch *b) {
  zeropp_zero_grad(model_zero(m));
  double loss = train_batch(m, b, WITH_ENTROPY);
  return loss + train_batch(m, b, WITH_ENTROPY);
}

static void same_bits(void **state) {
  (void)state;
  need_gpu();
  for (int i = 0; i < N_CASES; i++)
    for (int bf16 = 0; bf16 < 2; bf16++) {
      if (leaves_out(i, true)) continue;
      DType compute = bf16 ? DT_BF16 : DT_F32;
      ModelConfig c = case_config(i);
      TestBatch b = case_batch(i, &c);
      Model *first = make(&two.gpu, &c, HEAD_LM, compute, RECOMPUTE_NONE);
      double loss = train_twice(first, &b);
      for (int k = 0; k < RECOMPUTE_WAYS; k++) {
        if (test_is_watched_closely() && k != i % RECOMPUTE_WAYS) continue;
        Model *again = make(&two.gpu, &c, HEAD_LM, compute, k);
        bool same = train_twice(again, &b) == loss;
        const char *where = case_name(i);
        double e = shard_error(again, first, STATE_GRAD, &where);
        if (!same || e != 0) {
          print_message("FAILED %s, %s, mode %d: %s, %.2e\n", case_name(i), dtype_name(compute), k,
                        where, e);
          two.failures++;
        }
        model_free(again);
      }
      model_free(first);
    }
  done();
}

/* Sums in BF16 are those in F32 but for roundings: one of 2^-9 of each micro-batch's, and of the
 * sum. */
static void gradients_in_half(void **state) {
  (void)state;
  need_gpu();
  for (int i = 0; i < N_CASES; i++) {
    if (leaves_out(i, true)) continue;
    ModelConfig c = case_config(i);
    TestBatch b = case_batch(i, &c);
    ModelOptions o = tiny_options(HEAD_LM);
    o.zero.compute = DT_BF16;
    Model *whole = tiny_model(&two.gpu, two.gpu.grid, &c, &o);
    o.zero.gradients = DT_BF16;
    Model *half = tiny_model(&two.gpu, two.gpu.grid, &c, &o);
    for (int step = 0; step < 2; step++) {
      zeropp_zero_grad(model_zero(whole));
      zeropp_zero_grad(model_zero(half));
      for (int micro = 0; micro < 2; micro++) {
        train_batch(whole, &b, 0);
        train_batch(half, &b, 0);
        const char *where = "";
        double e = gradient_error(half, whole, false, &where);
        check(e < 1.0 / 100, "sums in BF16", where, e, 1.0 / 100);
      }
    }
    model_free(whole);
    model_free(half);
  }
  done();
}

/* ---- steps ---- */

static void steps_agree(void **state) {
  (void)state;
  need_gpu();
  for (int bf16 = 0; bf16 < 2; bf16++) {
    ModelConfig c = wide_config();
    TestBatch b = case_batch(N_FAMILY_CASES, &c);
    Model *m[2] = {make(&two.cpu, &c, HEAD_LM, DT_F32, RECOMPUTE_NONE),
                   make(&two.gpu, &c, HEAD_LM, bf16 ? DT_BF16 : DT_F32, RECOMPUTE_NONE)};
    double loss[2] = {0};
    for (int s = 0; s < (test_is_watched_closely() ? 2 : 8); s++)
      for (int k = 0; k < 2; k++) {
        AdamW p = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
        zeropp_zero_grad(model_zero(m[k]));
        loss[k] = train_batch(m[k], &b, 0) / b.n_rows;
        StepResult r = zeropp_step(model_zero(m[k]), p, 1);
        if (r.skipped) two.failures++;
      }
    /* AdamW's first steps move every weight by the learning rate whatever the gradient's size, so
     * that elements whose gradient is rounding go either way: a few per mille of the loss. */
    double e = fabs(loss[1] - loss[0]) / fabs(loss[0]), bound = bf16 ? 3e-2 : 1e-3;
    check(e < bound, "loss after 8 steps", bf16 ? "BF16" : "F32", e, bound);
    model_free(m[0]);
    model_free(m[1]);
  }
  done();
}

/* ---- generation ---- */

enum { N_REQUESTS = 9, MOST_NEW = 24 };

static void run_greedy(Model *m, GenResult *out, int pages) {
  static const int prompt_lengths[N_REQUESTS] = {1, 4, 4, 9, 2, 17, 5, 5, 3};
  static int32_t prompt[N_REQUESTS][32];
  GenRequest req[N_REQUESTS];
  for (int i = 0; i < N_REQUESTS; i++) {
    int same = i == 2 || i == 7 ? i - 1 : i; /* two samples of one prompt */
    for (int t = 0; t < prompt_lengths[i]; t++)
      prompt[i][t] = (int32_t)(rng_block(3, (uint64_t)same, (uint64_t)t).v[0] %
                               (uint32_t)model_config(m)->vocab_size);
    req[i] = (GenRequest){prompt[i], prompt_lengths[i], same, i - same};
  }
  GenParams p = {.sample = {.greedy = true, .top_p = 1},
                 .max_new_tokens = test_is_watched_closely() ? 4 : MOST_NEW,
                 .max_batch = 4,
                 .page_size = pages};
  Error err = {""};
  if (generate(m, &p, req, N_REQUESTS, out, NULL, &err)) fail_msg("%s", err.msg);
}

static void greedy_is_identical(void **state) {
  (void)state;
  need_gpu();
  for (int i = 0; i < N_CASES; i++) {
    if (leaves_out(i, true)) continue;
    ModelConfig c = case_config(i);
    if (c.max_positions < 48) c.max_positions = 48;
    Model *cpu = make(&two.cpu, &c, HEAD_LM, DT_F32, RECOMPUTE_NONE);
    Model *gpu = make(&two.gpu, &c, HEAD_LM, DT_F32, RECOMPUTE_NONE);
    GenResult want[N_REQUESTS], got[N_REQUESTS];
    run_greedy(cpu, want, 16);
    run_greedy(gpu, got, i % 2 ? 16 : 5);
    double worst = 0;
    for (int r = 0; r < N_REQUESTS; r++) {
      bool same = got[r].n == want[r].n;
      for (int t = 0; t < want[r].n && same; t++) {
        same = got[r].tokens[t] == want[r].tokens[t];
        worst = fmax(worst, fabs((double)got[r].logprobs[t] - (double)want[r].logprobs[t]));
      }
      if (same) continue;
      print_message("FAILED greedy, %s: request %d differs\n", case_name(i), r);
      two.failures++;
    }
    check(worst < 1e-4, "greedy log-probabilities", case_name(i), worst, 1e-4);
    gen_results_free(want, N_REQUESTS);
    gen_results_free(got, N_REQUESTS);
    model_free(cpu);
    model_free(gpu);
  }
  done();
}

/* A sampled answer's recorded log-probability is the one that scoring finds, to rounding: the
 * phases compute alike. */
static void sampled_is_scored(void **state) {
  (void)state;
  need_gpu();
  ModelConfig c = wide_config();
  for (int bf16 = 0; bf16 < 2; bf16++) {
    Model *m = make(&two.gpu, &c, HEAD_LM, bf16 ? DT_BF16 : DT_F32, RECOMPUTE_NONE);
    int32_t tokens[64] = {5, 9, 300, 2};
    GenRequest q = {tokens, 4, 0, 0};
    GenParams p = {.sample = {.temperature = 0.7f, .top_p = 1},
                   .max_new_tokens = test_is_watched_closely() ? 5 : 50,
                   .seed = 4};
    GenResult out;
    Error err = {""};
    if (generate(m, &p, &q, 1, &out, NULL, &err)) fail_msg("%s", err.msg);
    int32_t offsets[2] = {0, 4 + out.n}, rows[64];
    float logprobs[64];
    for (int t = 0; t < out.n; t++) {
      tokens[4 + t] = out.tokens[t];
      rows[t] = 3 + t;
    }
    model_logprobs(m, (Batch){1, offsets, tokens}, out.n, rows, out.tokens, 0.7f, logprobs, NULL);
    double worst = 0;
    for (int t = 0; t < out.n; t++)
      worst = fmax(worst, fabs((double)logprobs[t] - (double)out.logprobs[t]));
    double bound = bf16 ? 0.1 : 1e-4;
    check(worst < bound, "sampled against scored", bf16 ? "BF16" : "F32", worst, bound);
    gen_results_free(&out, 1);
    model_free(m);
  }
  done();
}

/* ---- memory ---- */

/* What a pass takes of the arena is what the plan says, or little less: a pass's longest moment. */
static void activations_as_planned(void **state) {
  (void)state;
  need_gpu();
  for (int kind = 0; kind < 12; kind++) {
    if (test_is_watched_closely() && kind % 4 != 1) continue;
    PassPlan p = {.device = DEVICE_CUDA,
                  .compute = kind % 2 ? DT_BF16 : DT_F32,
                  .train = kind < 6,
                  .recompute = (Recompute)(kind / 2 % 3)};
    ModelConfig c = wide_config();
    TestBatch b = case_batch(N_FAMILY_CASES, &c);
    Model *m = make(&two.gpu, &c, HEAD_LM, p.compute, p.recompute);
    zeropp_zero_grad(model_zero(m));
    arena_reset_peak(two.gpu.arena);
    if (p.train)
      train_batch(m, &b, 0);
    else
      eval_batch(m, &b, 0);
    double used = (double)arena_peak(two.gpu.arena);
    double plan = (double)model_activation_bytes(&c, HEAD_LM, b.n_tokens, p);
    check(used <= plan && used > 0.9 * plan, "arena over plan", p.train ? "training" : "inference",
          used / plan, 1);
    model_free(m);
  }
  done();
}

/* ---- files ---- */

static void files_go_round(void **state) {
  (void)state;
  need_gpu();
  const char *dir = test_file("saved");
  ModelConfig c = case_config(N_FAMILY_CASES);
  for (int bf16 = 0; bf16 < 2; bf16++) {
    Model *gpu = make(&two.gpu, &c, HEAD_LM, bf16 ? DT_BF16 : DT_F32, RECOMPUTE_NONE);
    Error err = {""};
    fs_remove_tree(dir, NULL);
    if (model_save(gpu, dir, &(SaveOptions){.dtype = DT_F32, .kind = STATE_MASTER}, &err))
      fail_msg("%s", err.msg);
    ModelOptions o = tiny_options(HEAD_LM);
    Model *cpu = model_load(two.cpu.device, two.cpu.grid, two.cpu.arena, dir, &o, &err);
    o.zero.compute = bf16 ? DT_BF16 : DT_F32;
    Model *back =
        cpu ? model_load(two.gpu.device, two.gpu.grid, two.gpu.arena, dir, &o, &err) : cpu;
    if (!back) fail_msg("%s", err.msg);
    double e = shard_error(cpu, gpu, STATE_MASTER, NULL);
    check(e == 0, "saved, loaded on the CPU", dtype_name(o.zero.compute), e, 0);
    e = shard_error(back, cpu, STATE_MASTER, NULL);
    check(e == 0, "and on the GPU again", dtype_name(o.zero.compute), e, 0);
    model_free(gpu);
    model_free(cpu);
    model_free(back);
  }
  done();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(lm_f32),
    cmocka_unit_test(scalar_f32),
    cmocka_unit_test(lm_bf16),
    cmocka_unit_test(scalar_bf16),
    cmocka_unit_test(same_bits),
    cmocka_unit_test(gradients_in_half),
    cmocka_unit_test(steps_agree),
    cmocka_unit_test(greedy_is_identical),
    cmocka_unit_test(sampled_is_scored),
    cmocka_unit_test(activations_as_planned),
    cmocka_unit_test(files_go_round),
};
TEST_MAIN(tests)
