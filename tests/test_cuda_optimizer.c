/* AdamW, sums of squares, axpy, scale and lerp on the GPU against the CPU.
 *
 * Bounds relative to the largest value. AdamW in F32: a few roundings, 1e-6; its BF16 copy, 2^-9
 * exactly: it is the same weight rounded. Sums of squares are double: 1e-12. */
#include "tests/bandwidth.h"

static const DType types[] = {DT_F32, DT_BF16};
/* One element to several blocks; no multiple of an access. */
static const int64_t lengths[] = {0, 1, 3, 4, 7, 100, 4096, 300003};
enum { N_LENGTHS = sizeof lengths / sizeof lengths[0] };

/* The last n elements: shards begin anywhere, all at the same element; the copy perhaps elsewhere.
 */
static Pair last(Pair p, int64_t n) {
  return twin_view(p, tensor_numel(p.cpu) - n, 1, (const int64_t[]){n});
}

static void check_adamw(DType g_type, int64_t n, int64_t shift, int64_t g_shift,
                        int64_t out_shift) {
  Twins *t = twins();
  Pair w = last(twin_random(DT_F32, 1, 1, 1, n + shift), n);
  Pair g = last(twin_random(g_type, 2, 1, 1, n + g_shift), n);
  Pair m = last(twin_random(DT_F32, 3, 0.1F, 1, n + shift), n);
  Pair v = last(twin_filled(DT_F32, 0.01F, 1, n + shift), n);
  Pair out = last(twin_unwritten(DT_BF16, 1, n + out_shift), n), none = twin_absent();
  for (int64_t step = 1; step <= 3; step++) {
    AdamW p = {1e-2F, 0.9F, 0.95F, 1e-8F, 0.1F, 0.5F, step};
    t->cpu_ops->adamw(t->cpu, p, w.cpu, g.cpu, m.cpu, v.cpu, none.cpu);
    t->gpu_ops->adamw(t->gpu, p, w.gpu, g.gpu, m.gpu, v.gpu, step < 3 ? none.gpu : out.gpu);
  }
  print_message("adamw %s %lld\n", dtype_name(g_type), (long long)n);
  twin_compare("w", w, 1e-6);
  twin_compare("m", m, 1e-6);
  twin_compare("v", v, 1e-6);
  float *weight = twin_back(w), *copy = twin_back(out), *rounded = mem_alloc((size_t)n + 1, 4);
  uint16_t *half = mem_alloc((size_t)n + 1, 2);
  if (convert_from_f32(weight, half, DT_BF16, (size_t)n) ||
      convert_to_f32(half, DT_BF16, rounded, (size_t)n))
    die("BF16");
  twin_check("the copy is the weight, rounded", memcmp(copy, rounded, (size_t)n * 4) == 0);
  free(weight);
  free(copy);
  free(rounded);
  free(half);
  twin_done();
}

static void adamw(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_LENGTHS; i++) {
      check_adamw(types[k], lengths[i], 0, 0, 0);
      check_adamw(types[k], lengths[i], 3, 3, 3);
      check_adamw(types[k], lengths[i], 1, 1, 2);
      check_adamw(types[k], lengths[i], 1, 2, 0);
    }
}

static void check_squares(DType type, int64_t n, int64_t shift, float scale) {
  Twins *t = twins();
  Pair x = last(twin_random(type, 5, scale, 1, n + shift), n);
  double want = t->cpu_ops->sum_squares(t->cpu, x.cpu);
  double got = t->gpu_ops->sum_squares(t->gpu, x.gpu);
  double again = t->gpu_ops->sum_squares(t->gpu, x.gpu);
  print_message("sum_squares %s %lld: %.17g, cpu %.17g\n", dtype_name(type), (long long)n, got,
                want);
  twin_check("sum_squares", fabs(got - want) <= 1e-12 * want);
  twin_check("the same bits again", got == again);
  twin_done();
}

/* 1e30 squared is beyond F32, 1e-30 squared below. */
static void sums(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_LENGTHS; i++) {
      check_squares(types[k], lengths[i], 0, 1);
      check_squares(types[k], lengths[i], 3, 1e30F);
      check_squares(types[k], lengths[i], 1, 1e-30F);
    }
}

static void sums_are_not_finite(void **state) {
  (void)state;
  Twins *t = twins();
  static const float bad[] = {NAN, INFINITY, -INFINITY};
  static const int64_t at[] = {0, 2, 5000, 9999}; /* before, in and behind the whole accesses */
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < 12; i++) {
      float *x = mem_zalloc(10000, sizeof *x);
      x[at[i / 3]] = bad[i % 3];
      Pair p = twin_floats(types[k], x, 1, 10000);
      twin_check("not finite", !isfinite(t->gpu_ops->sum_squares(t->gpu, p.gpu)));
      p = last(p, 9999);
      bool inside = at[i / 3] >= 1;
      twin_check("not finite", isfinite(t->gpu_ops->sum_squares(t->gpu, p.gpu)) != inside);
      free(x);
    }
  twin_done();
}

static void check_pairs(DType type, int64_t n, int64_t x_shift, int64_t y_shift) {
  Twins *t = twins();
  double bound = type == DT_F32 ? 1e-6 : 1.0 / 256; /* one or two roundings; BF16's half of 2^-7 */
  Pair x = last(twin_random(type, 1, 1, 1, n + x_shift), n);
  Pair y = last(twin_random(type, 2, 1, 1, n + y_shift), n);
  t->cpu_ops->axpy(t->cpu, -0.7F, x.cpu, y.cpu);
  t->gpu_ops->axpy(t->gpu, -0.7F, x.gpu, y.gpu);
  twin_compare("axpy", y, bound);
  Pair z = last(twin_random(type, 3, 1, 1, n + y_shift), n);
  t->cpu_ops->lerp(t->cpu, 0.9F, x.cpu, z.cpu);
  t->gpu_ops->lerp(t->gpu, 0.9F, x.gpu, z.gpu);
  twin_compare("lerp", z, bound);
  t->cpu_ops->scale(t->cpu, 0.3F, x.cpu);
  t->gpu_ops->scale(t->gpu, 0.3F, x.gpu);
  twin_compare("scale", x, bound);
  Pair nan = last(twin_unwritten(type, 1, n + x_shift), n);
  t->cpu_ops->scale(t->cpu, 0, nan.cpu);
  t->gpu_ops->scale(t->gpu, 0, nan.gpu);
  twin_compare("scale by 0", nan, 0);
  twin_done();
}

static void pairs(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_LENGTHS; i++) {
      check_pairs(types[k], lengths[i], 0, 0);
      check_pairs(types[k], lengths[i], 3, 3);
      check_pairs(types[k], lengths[i], 1, 2);
    }
}

typedef struct Big {
  Tensor w, g, m, v, out;
} Big;
static void run_adamw(void *p) {
  Big *b = p;
  AdamW a = {1e-4F, 0.9F, 0.95F, 1e-8F, 0.1F, 0.5F, 10};
  twin_state.gpu_ops->adamw(twin_state.gpu, a, b->w, b->g, b->m, b->v, b->out);
}
static void run_squares(void *p) {
  Big *b = p;
  twin_state.gpu_ops->sum_squares(twin_state.gpu, b->g);
}
static void run_axpy(void *p) {
  Big *b = p;
  twin_state.gpu_ops->axpy(twin_state.gpu, 1e-6F, b->g, b->w);
}
static void run_scale(void *p) {
  Big *b = p;
  twin_state.gpu_ops->scale(twin_state.gpu, 1.0001F, b->w);
}
static void run_lerp(void *p) {
  Big *b = p;
  twin_state.gpu_ops->lerp(twin_state.gpu, 0.999F, b->m, b->w);
}

static void speed(void **state) {
  (void)state;
  Twins *t = twins();
  const int64_t n = 1000000000, few = 1000003;
  if (test_is_watched() || device_total_memory(t->gpu) < (size_t)30 << 30) skip();
  Big b = {.w = big_random(DT_F32, 1, 1, n),
           .g = big_random(DT_F32, 1, 1, n),
           .m = big_random(DT_F32, 1, 1, n),
           .v = big_random(DT_F32, 0, 1, n),
           .out = big_random(DT_BF16, 1, 1, n)};
  double size = (double)n;
  bandwidth("sum_squares F32", run_squares, &b, 4 * size);
  bandwidth("adamw F32 with copy", run_adamw, &b, 30 * size);
  Tensor out = b.out, g = b.g;
  b.g = b.out;
  b.out = (Tensor){0};
  bandwidth("sum_squares BF16", run_squares, &b, 2 * size);
  bandwidth("adamw BF16", run_adamw, &b, 26 * size);
  b.g = g;
  bandwidth("axpy F32", run_axpy, &b, 12 * size);
  bandwidth("scale F32", run_scale, &b, 8 * size);
  bandwidth("lerp F32", run_lerp, &b, 12 * size);
  b.w = b.m = out;
  bandwidth("scale BF16", run_scale, &b, 4 * size);
  b.g.dim[0] = few;
  twin_time("sum_squares of a million", run_squares, &b, 0, 0);
  big_free();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(adamw), cmocka_unit_test(sums),  cmocka_unit_test(sums_are_not_finite),
    cmocka_unit_test(pairs), cmocka_unit_test(speed),
};
TEST_MAIN(tests)
