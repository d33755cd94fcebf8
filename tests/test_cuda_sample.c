/* Sampling on the GPU against the CPU's: the same token and its log-probability for the same logits
 * and random numbers. */
#include "tests/sample_cases.h"
#include "tests/twin.h"

typedef struct Case {
  int64_t batch, v;
  float scale; /* of the logits */
  bool ties;   /* logits rounded to halves */
  bool ban;
} Case;

static const Case cases[] = {
    {3, 1, 1, false, false},     {8, 8193, 2, true, true},     {64, 5, 1, false, false},
    {64, 37, 2, false, true},    {50, 129, 1, true, true},     {64, 1000, 3, true, false},
    {40, 5003, 2, false, true},  {64, 32000, 2, false, false}, {16, 32000, 3, true, true},
    {16, 50257, 4, false, true}, {8, 51300, 2, false, false},  {8, 70001, 2, true, true},
    {8, 151936, 3, false, true}, {4, 300001, 1, true, false},
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static const SampleParams params[] = {
    {1, 0, 1, false, 0, 1},
    {0.7F, 0, 1, false, 0, 1},
    {1.5F, 0, 1, false, 0, 1},
    {1, 5, 1, false, 0, 1},
    {1, 1, 1, false, 0, 1},
    {1, 0, 0.9F, false, 0, 1},
    {1, 0, 0.05F, false, 0, 1},
    {0.9F, 50, 0.7F, false, 0, 1},
    {1, 400, 0.95F, false, 0, 1},
    {1, 1 << 30, 1, false, 0, 1},
    {1, 0, 0.9999F, false, 0, 1},
    {1, 0, 1, true, 0, 1},
    {1, 0, 1, false, 0.1F, 1},
    {1, 0, 1, false, 1, 1},
    {1.3F, 300, 0.95F, false, 0.03F, 1},
    {1, 0, 1, false, 0, 1.2F},
    {0.8F, 40, 0.9F, false, 0.05F, 1.3F},
    {1, 0, 1, false, 0.02F, 0.7F},
    {1, 0, 1, true, 0, 1.5F},
};
enum { N_PARAMS = sizeof params / sizeof params[0] };

typedef struct Draw {
  SampleParams p;
  Pair logits, u, banned, token, logprob;
  Pair bits, slot, newest; /* of the ids that were there */
  Pair kept;               /* [1, batch, W]; absent where nobody asks */
} Draw;

static void draw_gpu(void *arg) {
  Draw *x = arg;
  SeenTokens seen = {x->bits.gpu, x->slot.gpu, x->newest.gpu};
  twin_state.gpu_ops->sample(twin_state.gpu, x->logits.gpu, x->p, x->u.gpu, x->banned.gpu, seen,
                             (KeptTokens){.bits_TBW = x->kept.gpu}, x->token.gpu, x->logprob.gpu);
}

static void draw_cpu(const Draw *x) {
  SeenTokens seen = {x->bits.cpu, x->slot.cpu, x->newest.cpu};
  twin_state.cpu_ops->sample(twin_state.cpu, x->logits.cpu, x->p, x->u.cpu, x->banned.cpu, seen,
                             (KeptTokens){.bits_TBW = x->kept.cpu}, x->token.cpu, x->logprob.cpu);
}

/* Half of all ids; slots in reverse, and every fifth row without. */
static void make_seen(Draw *x, uint64_t seed, int64_t batch, int64_t v) {
  int64_t width = (v + 7) / 8;
  uint8_t *bits = mem_zalloc((size_t)(batch * width), 1);
  int32_t *slot = mem_alloc((size_t)batch, sizeof *slot);
  for (int64_t b = 0; b < batch; b++) slot[b] = (int32_t)(b % 5 == 4 ? -1 : batch - 1 - b);
  for (int64_t i = 0; i < batch * width * 8; i++)
    if (i % (8 * width) < v && (rng_block(seed, 3, (uint64_t)i).v[0] & 1))
      bits[i / 8] |= (uint8_t)(1 << i % 8);
  x->bits = twin_bytes(DT_U8, bits, batch * width);
  x->bits = twin_view(x->bits, 0, 2, (const int64_t[]){batch, width});
  x->slot = twin_ints(slot, batch);
  x->newest = twin_random_ints(seed, batch, (int32_t)v);
  free(bits);
  free(slot);
}

static Pair make_kept(int64_t batch, int64_t v) {
  int64_t width = (v + 7) / 8;
  uint8_t *bits = mem_alloc((size_t)(batch * width), 1);
  memset(bits, 0x5a, (size_t)(batch * width));
  Pair kept = twin_bytes(DT_U8, bits, batch * width);
  free(bits);
  return twin_view(kept, 0, 3, (const int64_t[]){1, batch, width});
}

static Draw make(const Case *c, uint64_t seed) {
  Draw x = {.p = {1, 0, 1, false, 0, 1}};
  int64_t n = c->batch * c->v;
  float *logits = mem_alloc((size_t)n, sizeof *logits), *u = mem_alloc((size_t)c->batch, 4);
  for (int64_t i = 0; i < n; i++) {
    logits[i] = c->scale * rng_normal(seed, 1, (uint64_t)i);
    if (c->ties) logits[i] = 0.5F * rintf(2 * logits[i]);
  }
  for (int64_t b = 0; b < c->batch; b++) u[b] = (float)rng_uniform(seed, 2, (uint64_t)b);
  x.logits = twin_floats(DT_F32, logits, 2, c->batch, c->v);
  x.u = twin_floats(DT_F32, u, 1, c->batch);
  x.banned = twin_absent();
  if (c->ban) {
    uint8_t *banned = mem_alloc((size_t)c->v, 1);
    for (int64_t j = 0; j < c->v; j++) banned[j] = j % 5 == 2;
    x.banned = twin_bytes(DT_U8, banned, c->v);
    free(banned);
  }
  int32_t *none = mem_alloc((size_t)c->batch, sizeof *none);
  for (int64_t b = 0; b < c->batch; b++) none[b] = -7;
  x.token = twin_ints(none, c->batch);
  x.logprob = twin_unwritten(DT_F32, 1, c->batch);
  make_seen(&x, seed, c->batch, c->v);
  free(logits);
  free(u);
  free(none);
  return x;
}

/* Draws with both and compares. Weights are the same numbers on both, so tokens may only differ
 * where u lies within the rounding of double sums at an id's edge, which has no chance here; the
 * log-probability is one float rounding of a double. */
static void compare(const char *name, Draw *x) {
  int64_t batch = x->token.cpu.dim[0];
  draw_gpu(x);
  draw_cpu(x);
  int32_t *token = mem_alloc((size_t)batch, sizeof *token);
  device_download(twin_state.gpu, token, x->token.gpu.data, (size_t)batch * sizeof *token);
  float *logprob = twin_back(x->logprob);
  const int32_t *want = tensor_i32(x->token.cpu);
  const float *want_logprob = tensor_f32(x->logprob.cpu);
  int differ = 0;
  double worst = 0;
  for (int64_t b = 0; b < batch; b++) {
    double g = (double)logprob[b], w = (double)want_logprob[b];
    double error = isnan(w) && isnan(g) ? 0 : fabs(g - w) / fmax(1, fabs(w));
    bool bad = token[b] != want[b] || !(error <= 2e-6);
    if (bad && differ++ == 0)
      print_message("FAILED %s, row %lld: gpu %d at %.9g, cpu %d at %.9g\n", name, (long long)b,
                    token[b], g, want[b], w);
    if (!bad && error > worst) worst = error;
  }
  if (differ) print_message("       %d of %lld rows differ\n", differ, (long long)batch);
  twin_state.failures += differ > 0;
  if (sample_penalizes(x->p)) twin_compare_bytes(name, x->bits);
  if (x->kept.gpu.data) twin_compare_bytes(name, x->kept);
  free(token);
  free(logprob);
}

static void agrees(void **state) {
  (void)state;
  twins();
  int failures = 0;
  for (int i = 0; i < N_CASES; i++) {
    static const bool few[N_CASES] = {[1] = true, [11] = true, [12] = true, [13] = true};
    Case c = cases[i];
    if (test_is_watched_closely() && !few[i])
      continue; /* one for each number of ids a thread has */
    if (test_is_watched()) c.batch = test_is_watched_closely() ? 1 : c.batch < 3 ? c.batch : 3;
    Draw x = make(&c, (uint64_t)i + 1);
    Pair kept = make_kept(c.batch, c.v);
    for (int k = 0; k < N_PARAMS; k++) {
      if (twin_leaves_out(5, 16)) continue;
      char name[128];
      x.p = params[k];
      x.kept = x.p.greedy ? twin_absent() : kept;
      snprintf(name, sizeof name,
               "V %lld%s%s, temperature %g top_k %d top_p %g min_p %g penalty %g%s",
               (long long)cases[i].v, cases[i].ties ? " ties" : "", cases[i].ban ? " banned" : "",
               (double)x.p.temperature, x.p.top_k, (double)x.p.top_p, (double)x.p.min_p,
               (double)x.p.repetition_penalty, x.p.greedy ? " greedy" : "");
      if (test_is_watched_closely()) print_message("       %s\n", name);
      fflush(stdout);
      compare(name, &x);
    }
    failures += twin_state.failures;
    twin_state.failures = 0;
    twin_done();
  }
  twin_state.failures = failures;
  twin_done();
}

/* u at its ends, logits far apart, infinities, a row of NaN, NaN among numbers, zeros of both
 * signs. */
static void extremes(void **state) {
  (void)state;
  twins();
  static const float rows[] = {
      -3e4F, 0,    3e4F, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY,
      NAN,   NAN,  NAN,  NAN,       1,         NAN,       2,         0.5F,
      -0.0F, 0.0F, 0,    -0.0F,     -INFINITY, 5.0F,      NAN,       -INFINITY,
  };
  static const float us[] = {1e-38F, 0.5F, 0.99999994F};
  static const uint8_t banned[4] = {1, 0, 0, 0};
  for (int k = 0; k < N_PARAMS; k++)
    for (int i = 0; i < 3; i++)
      for (int ban = 0; ban < 2; ban++) {
        if (twin_leaves_out(5, 20)) continue;
        const float u[6] = {us[i], us[i], us[i], us[i], us[i], us[i]};
        const int32_t none[6] = {0};
        Draw x = {.p = params[k]};
        x.logits = twin_floats(DT_F32, rows, 2, 6, 4);
        x.u = twin_floats(DT_F32, u, 1, 6);
        x.banned = ban ? twin_bytes(DT_U8, banned, 4) : twin_absent();
        x.token = twin_ints(none, 6);
        x.logprob = twin_unwritten(DT_F32, 1, 6);
        make_seen(&x, 1, 6, 4);
        char name[64];
        snprintf(name, sizeof name, "extremes: params %d, u %g%s", k, (double)us[i],
                 ban ? ", banned" : "");
        compare(name, &x);
        int failures = twin_state.failures;
        twin_state.failures = 0;
        twin_done();
        twin_state.failures = failures;
      }
  twin_done();
}

/* Two ids weigh most, and alike, in places more than 1 by rounding. */
static void ties_at_the_top(void **state) {
  (void)state;
  enum { ROWS = 500, V = 40 };
  const int B = test_is_watched() ? 20 : ROWS;
  twins();
  float *logits = mem_alloc((size_t)ROWS * V, sizeof *logits), *u = mem_alloc(ROWS, sizeof *u);
  int32_t *none = mem_zalloc(ROWS, sizeof *none);
  for (int b = 0; b < B; b++) {
    u[b] = 0.99F;
    for (int j = 0; j < V; j++) logits[b * V + j] = 0.173F * (float)b - 1 - (float)j;
    logits[b * V + 3] = logits[b * V + 20] = 0.173F * (float)b;
  }
  const SampleParams ties[] = {
      {0.7F, 1, 1, false, 0, 1}, {0.7F, 0, 0.01F, false, 0, 1}, {0.7F, 1, 0.5F, false, 0, 1}};
  for (int i = 0; i < 3; i++) {
    Draw x = {.p = ties[i], .banned = twin_absent()};
    x.logits = twin_floats(DT_F32, logits, 2, (int64_t)B, (int64_t)V);
    x.u = twin_floats(DT_F32, u, 1, (int64_t)B);
    x.token = twin_ints(none, B);
    x.logprob = twin_unwritten(DT_F32, 1, (int64_t)B);
    x.kept = make_kept(B, V);
    compare("ties at the top", &x);
    const int32_t *token = tensor_i32(x.token.cpu);
    int wrong = 0;
    for (int b = 0; b < B; b++) wrong += token[b] != 3;
    twin_check("the first of two that weigh most", wrong == 0);
  }
  free(logits);
  free(u);
  free(none);
  twin_done();
}

/* Equal weights: u picks the id at its share of the vocabulary, wherever it lies. */
static void u_picks_the_place(void **state) {
  (void)state;
  const int V = test_is_watched() ? 100 : 1000;
  twins();
  float *u = mem_alloc((size_t)V, sizeof *u);
  int32_t *none = mem_zalloc((size_t)V, sizeof *none);
  for (int i = 0; i < V; i++) u[i] = ((float)i + 0.5F) / (float)V;
  Draw x = {.p = {1, 0, 1, false, 0, 1}, .banned = twin_absent()};
  x.logits = twin_filled(DT_F32, 0.25F, 2, V, V);
  x.u = twin_floats(DT_F32, u, 1, V);
  x.token = twin_ints(none, V);
  x.logprob = twin_unwritten(DT_F32, 1, V);
  draw_gpu(&x);
  device_download(twin_state.gpu, none, x.token.gpu.data, (size_t)V * sizeof *none);
  int wrong = 0;
  for (int i = 0; i < V; i++) wrong += none[i] != i;
  twin_check("u picks the id at its place", wrong == 0);
  free(u);
  free(none);
  twin_done();
}

static Tensor on(int gpu, Pair p) { return gpu ? p.gpu : p.cpu; }

/* Steps in one buffer, the number of the step on the device. */
static void kept_of_a_step(void **state) {
  (void)state;
  twins();
  Draw x = make(&(Case){7, 1001, 2, false, true}, 5);
  Pair steps = twin_view(make_kept(3 * 7, 1001), 0, 3, (const int64_t[]){3, 7, 126});
  Pair step = twin_ints((const int32_t[]){2}, 1);
  x.p = (SampleParams){.temperature = 1, .top_k = 20, .top_p = 0.9F};
  for (int gpu = 0; gpu < 2; gpu++) {
    const Ops *o = gpu ? twin_state.gpu_ops : twin_state.cpu_ops;
    Device *d = gpu ? twin_state.gpu : twin_state.cpu;
    o->sample(d, on(gpu, x.logits), x.p, on(gpu, x.u), on(gpu, x.banned), (SeenTokens){0},
              (KeptTokens){on(gpu, steps), on(gpu, step)}, on(gpu, x.token), on(gpu, x.logprob));
  }
  twin_compare_bytes("bits of step 2, the others untouched", steps);
  twin_done();
}

static void only_what_is_kept(void **state) {
  (void)state;
  Twins *t = twins();
  static const int64_t sizes[] = {1, 7, 8, 37, 1000, 32000, 50257};
  for (int i = 0; i < 7; i++) {
    int64_t v = sizes[i], rows = 33, width = (v + 7) / 8;
    uint8_t *bits = mem_alloc((size_t)(rows * width), 1);
    for (int64_t j = 0; j < rows * width; j++)
      bits[j] = (uint8_t)rng_block(8, (uint64_t)v, (uint64_t)j).v[0];
    Pair b = twin_bytes(DT_U8, bits, rows * width), x = twin_random(DT_F32, 3, 1, 2, rows, v);
    b = twin_view(b, 0, 2, (const int64_t[]){rows, width});
    t->cpu_ops->keep_only(t->cpu, b.cpu, x.cpu);
    t->gpu_ops->keep_only(t->gpu, b.gpu, x.gpu);
    twin_compare_bytes("keep_only", x);
    free(bits);
    int failures = t->failures;
    t->failures = 0;
    twin_release();
    t->failures += failures;
  }
  twin_done();
}

/* Enough rows of the same logits for a chi-square test of what each filter leaves. */
static void draws_follow_the_filtered_softmax(void **state) {
  (void)state;
  enum { ROWS = 65536, CALLS = 4, V = SAMPLE_V };
  Twins *t = twins();
  if (test_is_watched()) skip(); /* `agrees` runs the same kernels */
  float *logits = mem_alloc(ROWS * V, sizeof *logits), *u = mem_alloc(ROWS, sizeof *u);
  uint8_t banned[V], *bits = mem_alloc(ROWS * SAMPLE_W, 1);
  int32_t *ints = mem_alloc(ROWS, sizeof *ints);
  for (int j = 0; j < V; j++) banned[j] = sample_banned(j);
  for (int b = 0; b < ROWS; b++) {
    sample_logits(logits + (ptrdiff_t)b * V);
    sample_bits(bits + (ptrdiff_t)b * SAMPLE_W);
    ints[b] = b;
  }
  Draw x = {.logits = twin_floats(DT_F32, logits, 2, ROWS, V), .slot = twin_ints(ints, ROWS)};
  for (int b = 0; b < ROWS; b++) ints[b] = SAMPLE_NEWEST;
  x.newest = twin_ints(ints, ROWS);
  x.token = twin_ints(ints, ROWS);
  x.logprob = twin_unwritten(DT_F32, 1, ROWS);
  x.u = twin_filled(DT_F32, 0.5F, 1, ROWS);
  x.bits = twin_bytes(DT_U8, bits, (int64_t)ROWS * SAMPLE_W);
  x.bits = twin_view(x.bits, 0, 2, (const int64_t[]){ROWS, SAMPLE_W});
  Pair bans = twin_bytes(DT_U8, banned, V);
  for (int k = 0; k < SAMPLE_CASES; k++) {
    const SampleCase *c = &sample_cases[k];
    double prob[V], chi, bound, worst = 0;
    int count[V] = {0};
    char what[64];
    sample_distribution(logits, c, prob);
    x.p = c->p;
    x.banned = c->ban ? bans : twin_absent();
    for (int i = 0; i < CALLS; i++) {
      for (int b = 0; b < ROWS; b++)
        u[b] = (float)rng_uniform(60 + (uint64_t)k, (uint64_t)i, (uint64_t)b);
      device_upload(t->gpu, x.u.gpu.data, u, ROWS * sizeof *u);
      device_upload(t->gpu, x.bits.gpu.data, bits, (size_t)ROWS * SAMPLE_W);
      draw_gpu(&x);
      device_download(t->gpu, ints, x.token.gpu.data, ROWS * sizeof *ints);
      float *logprob = twin_back(x.logprob);
      for (int b = 0; b < ROWS; b++) {
        count[ints[b]]++;
        worst = fmax(worst, fabs((double)logprob[b] - log(prob[ints[b]])));
      }
      free(logprob);
    }
    bool follows = sample_follows(count, prob, &chi, &bound);
    snprintf(what, sizeof what, "case %d: draws follow the distribution", k);
    twin_check(what, follows);
    snprintf(what, sizeof what, "case %d: log-probabilities are its", k);
    twin_check(what, worst < 2e-6);
    print_message("       case %d: chi-square %.1f, bound %.1f; log-probabilities to %.1e\n", k,
                  chi, bound, worst);
  }
  free(logits);
  free(u);
  free(bits);
  free(ints);
  twin_done();
}

static void rates(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  twins();
  static const Case sizes[] = {{64, 32000, 2, false, false},
                               {256, 32000, 2, false, false},
                               {1, 32000, 2, false, false},
                               {64, 128256, 2, false, false}};
  static const SampleParams timed[] = {{1, 0, 1, false, 0, 1},     {1, 0, 1, true, 0, 1},
                                       {1, 50, 1, false, 0, 1},    {1, 0, 0.9F, false, 0, 1},
                                       {1, 50, 0.9F, false, 0, 1}, {1, 0, 1, false, 0.05F, 1},
                                       {1, 0, 1, false, 0, 1.2F}};
  static const char *what[] = {
      "plain",      "greedy",     "top_k 50", "top_p 0.9", "top_k 50 top_p 0.9",
      "min_p 0.05", "penalty 1.2"};
  for (int i = 0; i < 4; i++) {
    Draw x = make(sizes + i, 9);
    for (int k = 0; k < 7; k++) {
      char name[96];
      x.p = timed[k];
      snprintf(name, sizeof name, "sample %d x %d %s", (int)sizes[i].batch, (int)sizes[i].v,
               what[k]);
      twin_time(name, draw_gpu, &x, 4.0 * (double)sizes[i].batch * (double)sizes[i].v, 0);
    }
    twin_done();
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(agrees),
    cmocka_unit_test(extremes),
    cmocka_unit_test(ties_at_the_top),
    cmocka_unit_test(u_picks_the_place),
    cmocka_unit_test(kept_of_a_step),
    cmocka_unit_test(only_what_is_kept),
    cmocka_unit_test(draws_follow_the_filtered_softmax),
    cmocka_unit_test(rates),
};
TEST_MAIN(tests)
