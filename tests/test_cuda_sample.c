/* Sampling on the GPU against the CPU's: the same token and its log-probability for the same logits
 * and random numbers. */
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
    {1, 0, 1, false},       {0.7F, 0, 1, false},    {1.5F, 0, 1, false},    {1, 5, 1, false},
    {1, 1, 1, false},       {1, 0, 0.9F, false},    {1, 0, 0.05F, false},   {0.9F, 50, 0.7F, false},
    {1, 400, 0.95F, false}, {1, 1 << 30, 1, false}, {1, 0, 0.9999F, false}, {1, 0, 1, true},
};
enum { N_PARAMS = sizeof params / sizeof params[0] };

typedef struct Draw {
  SampleParams p;
  Pair logits, u, banned, token, logprob;
} Draw;

static void draw_gpu(void *arg) {
  Draw *x = arg;
  twin_state.gpu_ops->sample(twin_state.gpu, x->logits.gpu, x->p, x->u.gpu, x->banned.gpu,
                             x->token.gpu, x->logprob.gpu);
}

static Draw make(const Case *c, uint64_t seed) {
  Draw x = {.p = {1, 0, 1, false}};
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
  free(logits);
  free(u);
  free(none);
  return x;
}

/* Draws with both and compares. Weights are the same numbers on both, so tokens may only differ
 * where u lies within the rounding of double sums at an id's edge, which has no chance here; the
 * log-probability is one float rounding of a double. */
static void compare(const char *name, Draw *x) {
  const Twins *t = &twin_state;
  int64_t batch = x->token.cpu.dim[0];
  draw_gpu(x);
  t->cpu_ops->sample(t->cpu, x->logits.cpu, x->p, x->u.cpu, x->banned.cpu, x->token.cpu,
                     x->logprob.cpu);
  int32_t *token = mem_alloc((size_t)batch, sizeof *token);
  device_download(t->gpu, token, x->token.gpu.data, (size_t)batch * sizeof *token);
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
  free(token);
  free(logprob);
}

static void agrees(void **state) {
  (void)state;
  twins();
  int failures = 0;
  for (int i = 0; i < N_CASES; i++) {
    Draw x = make(cases + i, (uint64_t)i + 1);
    for (int k = 0; k < N_PARAMS; k++) {
      char name[128];
      x.p = params[k];
      snprintf(name, sizeof name, "V %lld%s%s, temperature %g top_k %d top_p %g%s",
               (long long)cases[i].v, cases[i].ties ? " ties" : "", cases[i].ban ? " banned" : "",
               (double)x.p.temperature, x.p.top_k, (double)x.p.top_p, x.p.greedy ? " greedy" : "");
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
        const float u[6] = {us[i], us[i], us[i], us[i], us[i], us[i]};
        const int32_t none[6] = {0};
        Draw x = {.p = params[k]};
        x.logits = twin_floats(DT_F32, rows, 2, 6, 4);
        x.u = twin_floats(DT_F32, u, 1, 6);
        x.banned = ban ? twin_bytes(DT_U8, banned, 4) : twin_absent();
        x.token = twin_ints(none, 6);
        x.logprob = twin_unwritten(DT_F32, 1, 6);
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

/* Equal weights: u picks the id at its share of the vocabulary, wherever it lies. */
static void u_picks_the_place(void **state) {
  (void)state;
  enum { V = 1000 };
  twins();
  float *u = mem_alloc(V, sizeof *u);
  int32_t *none = mem_zalloc(V, sizeof *none);
  for (int i = 0; i < V; i++) u[i] = ((float)i + 0.5F) / V;
  Draw x = {.p = {1, 0, 1, false}, .banned = twin_absent()};
  x.logits = twin_filled(DT_F32, 0.25F, 2, V, V);
  x.u = twin_floats(DT_F32, u, 1, V);
  x.token = twin_ints(none, V);
  x.logprob = twin_unwritten(DT_F32, 1, V);
  draw_gpu(&x);
  device_download(twin_state.gpu, none, x.token.gpu.data, V * sizeof *none);
  int wrong = 0;
  for (int i = 0; i < V; i++) wrong += none[i] != i;
  twin_check("u picks the id at its place", wrong == 0);
  free(u);
  free(none);
  twin_done();
}

static void rates(void **state) {
  (void)state;
  if (getenv("RLHF_NO_RATES")) skip(); /* under a memory checker */
  twins();
  static const Case sizes[] = {{64, 32000, 2, false, false},
                               {256, 32000, 2, false, false},
                               {1, 32000, 2, false, false},
                               {64, 128256, 2, false, false}};
  static const SampleParams timed[] = {{1, 0, 1, false},
                                       {1, 0, 1, true},
                                       {1, 50, 1, false},
                                       {1, 0, 0.9F, false},
                                       {1, 50, 0.9F, false}};
  static const char *what[] = {"plain", "greedy", "top_k 50", "top_p 0.9", "top_k 50 top_p 0.9"};
  for (int i = 0; i < 4; i++) {
    Draw x = make(sizes + i, 9);
    for (int k = 0; k < 5; k++) {
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
    cmocka_unit_test(u_picks_the_place),
    cmocka_unit_test(rates),
};
TEST_MAIN(tests)
