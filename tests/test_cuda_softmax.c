/* Log-probabilities, entropy and their gradient on the GPU against the CPU.
 *
 * Bounds relative to the largest value, of sums in another order and exponentials that are off by
 * |z| 2^-24: 1e-5. dlogits take lse and entropy of their own device, which differ as much, each as
 * a factor: 3e-5; in BF16 half of its spacing, 2^-8, for the rounding. */
#include "tests/bandwidth.h"

typedef struct Shape {
  int64_t r, v;
  float inv_temp, scale;
} Shape;
/* Whole accesses, odd vocabularies (whose rows begin anywhere), fewer logits than threads. */
static const Shape shapes[] = {{1, 1, 1, 1},        {3, 17, 1, 5},    {40, 1000, 0.5F, 5},
                               {5, 2, 2, 5},        {9, 50257, 1, 3}, {64, 32000, 1.3F, 3},
                               {0, 7, 1, 1},        {7, 4099, 1, 20}, {2, 151936, 0.7F, 4},
                               {300, 513, 1, 0.01F}};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct Problem {
  Pair logits, target, logprob, lse, entropy, dlogprob, dentropy;
} Problem;

static Problem problem_of(Shape s, bool entropy) {
  return (Problem){.logits = twin_random(DT_F32, 1, s.scale, 2, s.r, s.v),
                   .target = twin_random_ints(2, s.r, (int32_t)s.v),
                   .logprob = twin_unwritten(DT_F32, 1, s.r),
                   .lse = twin_unwritten(DT_F32, 1, s.r),
                   .entropy = entropy ? twin_unwritten(DT_F32, 1, s.r) : twin_absent(),
                   .dlogprob = twin_random(DT_F32, 3, 1, 1, s.r),
                   .dentropy = entropy ? twin_random(DT_F32, 4, 1, 1, s.r) : twin_absent()};
}

static void forward(Twins *w, Problem *p, float inv_temp) {
  w->cpu_ops->logprob_fwd(w->cpu, p->logits.cpu, p->target.cpu, inv_temp, p->logprob.cpu,
                          p->lse.cpu, p->entropy.cpu);
  w->gpu_ops->logprob_fwd(w->gpu, p->logits.gpu, p->target.gpu, inv_temp, p->logprob.gpu,
                          p->lse.gpu, p->entropy.gpu);
}

static void backward(Twins *w, Problem *p, float inv_temp, Pair dlogits) {
  w->cpu_ops->logprob_bwd(w->cpu, p->logits.cpu, p->target.cpu, inv_temp, p->lse.cpu,
                          p->entropy.cpu, p->dlogprob.cpu, p->dentropy.cpu, dlogits.cpu);
  w->gpu_ops->logprob_bwd(w->gpu, p->logits.gpu, p->target.gpu, inv_temp, p->lse.gpu,
                          p->entropy.gpu, p->dlogprob.gpu, p->dentropy.gpu, dlogits.gpu);
}

/* The bits do not depend on where in memory the rows lie. */
static void check_place(Twins *w, Shape s, Problem p, bool with_entropy) {
  Problem q = problem_of(s, with_entropy);
  q.logits = twin_rows(twin_unwritten(DT_F32, 1, s.r * s.v + 16), 16, s.r, s.v);
  device_copy(w->gpu, q.logits.gpu.data, p.logits.gpu.data, tensor_bytes(p.logits.gpu));
  w->gpu_ops->logprob_fwd(w->gpu, q.logits.gpu, q.target.gpu, s.inv_temp, q.logprob.gpu, q.lse.gpu,
                          q.entropy.gpu);
  twin_same_bits("logprob elsewhere", p.logprob, q.logprob);
  twin_same_bits("lse elsewhere", p.lse, q.lse);
  if (with_entropy) twin_same_bits("entropy elsewhere", p.entropy, q.entropy);
}

static void check_shape(Shape s, bool with_entropy) {
  Twins *w = twins();
  Problem p = problem_of(s, with_entropy);
  forward(w, &p, s.inv_temp);
  print_message("[%lld, %lld]%s\n", (long long)s.r, (long long)s.v,
                with_entropy ? ", entropy" : "");
  twin_compare("logprob", p.logprob, 1e-5);
  twin_compare("lse", p.lse, 1e-5);
  if (with_entropy) twin_compare("entropy", p.entropy, 1e-5);
  check_place(w, s, p, with_entropy);
  Pair half = twin_unwritten(DT_BF16, 2, s.r, s.v), whole = twin_unwritten(DT_F32, 2, s.r, s.v);
  backward(w, &p, s.inv_temp, half);
  twin_compare("dlogits BF16", half, 1.0 / 256);
  backward(w, &p, s.inv_temp, whole);
  twin_compare("dlogits F32", whole, 3e-5);
  /* A row that is 4 bytes off what the logits' row is: other alignments than theirs. */
  Pair off = twin_rows(twin_unwritten(DT_F32, 1, s.r * s.v + 1), 1, s.r, s.v);
  backward(w, &p, s.inv_temp, off);
  twin_compare("dlogits elsewhere", off, 3e-5);
  backward(w, &p, s.inv_temp, p.logits);
  twin_compare("dlogits in place", p.logits, 3e-5);
  twin_same_bits("dlogits in place", whole, p.logits);
  twin_done();
}

static void logprobs(void **state) {
  (void)state;
  for (int i = 0; i < N_SHAPES; i++) {
    check_shape(shapes[i], false);
    check_shape(shapes[i], true);
  }
}

/* Logits of +-1e4 and -infinity, rows that begin with -infinity: no overflow, no 0 x infinity; NaN
 * stays in its row. */
static void extremes(void **state) {
  (void)state;
  Twins *w = twins();
  enum { R = 5, V = 4 };
  const float x[R * V] = {1e4F,      -1e4F, -INFINITY, 0,      -1e4F, -1e4F,     -1e4F,
                          -1e4F,     NAN,   1,         2,      3,     -INFINITY, -INFINITY,
                          -INFINITY, 2,     -3e38F,    -3e38F, 1e30F, 0};
  const int32_t target[R] = {0, 3, 1, 3, 2};
  Problem p = problem_of((Shape){R, V, 1, 1}, true);
  p.logits = twin_floats(DT_F32, x, 2, R, V);
  p.target = twin_ints(target, R);
  forward(w, &p, 1);
  twin_compare("extreme logprob", p.logprob, 1e-6);
  twin_compare("extreme lse", p.lse, 1e-6);
  twin_compare("extreme entropy", p.entropy, 1e-6);
  Pair dlogits = twin_unwritten(DT_BF16, 2, R, V);
  backward(w, &p, 1, dlogits);
  twin_compare("extreme dlogits", dlogits, 1.0 / 256);
  twin_done();
}

typedef struct Big {
  Tensor logits, target, logprob, lse, entropy, dlogprob, dentropy, dlogits;
} Big;
static void run_forward(void *x) {
  Big *b = x;
  twin_state.gpu_ops->logprob_fwd(twin_state.gpu, b->logits, b->target, 1, b->logprob, b->lse,
                                  b->entropy);
}
static void run_backward(void *x) {
  Big *b = x;
  twin_state.gpu_ops->logprob_bwd(twin_state.gpu, b->logits, b->target, 1, b->lse, b->entropy,
                                  b->dlogprob, b->dentropy, b->dlogits);
}

static void time_vocabulary(int64_t r, int64_t v) {
  int32_t *ids = mem_zalloc((size_t)r, sizeof *ids);
  Big b = {.logits = big_random(DT_F32, 1, 2, r, v),
           .target = big_ints(ids, r),
           .logprob = big_random(DT_F32, 1, 1, r),
           .lse = big_random(DT_F32, 1, 1, r),
           .entropy = big_random(DT_F32, 1, 1, r),
           .dlogprob = big_random(DT_F32, 1, 1, r),
           .dentropy = big_random(DT_F32, 1, 1, r),
           .dlogits = big_random(DT_BF16, 1, 2, r, v)};
  free(ids);
  double size = (double)(r * v);
  print_message("[%lld, %lld]\n", (long long)r, (long long)v);
  bandwidth("logprob_fwd with entropy", run_forward, &b, 4 * size);
  bandwidth("logprob_bwd with entropy, BF16", run_backward, &b, 6 * size);
  b.entropy.data = b.dentropy.data = NULL;
  bandwidth("logprob_fwd", run_forward, &b, 4 * size);
  bandwidth("logprob_bwd, BF16", run_backward, &b, 6 * size);
  b.dlogits = b.logits;
  bandwidth("logprob_bwd, F32 in place", run_backward, &b, 8 * size);
  big_free();
}

static void speed(void **state) {
  (void)state;
  twins();
  if (test_is_watched()) skip();
  time_vocabulary(8192, 32000);
  time_vocabulary(4096, 50257);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(logprobs), cmocka_unit_test(extremes),
                                          cmocka_unit_test(speed)};
TEST_MAIN(tests)
