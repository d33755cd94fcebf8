/* Twin tests: an op on the CPU and on the GPU, from the same numbers.
 *
 *   static void norm_agrees(void **state) {
 *     Twins *t = twins();                                     // skips where there is no GPU
 *     Pair x = twin_random(DT_BF16, 1, 1.0f, 2, n, c);        // the same numbers on both
 *     Pair y = twin_unwritten(DT_BF16, 2, n, c);              // outputs: NaN until written
 *     t->cpu_ops->op(t->cpu, x.cpu, y.cpu);
 *     t->gpu_ops->op(t->gpu, x.gpu, y.gpu);
 *     twin_compare("op's y", y, 1.0 / 256);                   // prints, counts, goes on
 *     twin_time("op", run, &args, bytes, flops);
 *     twin_done();                                            // frees; fails when any differed
 *   }
 *
 * The CPU's copy of a BF16 pair is F32 holding the rounded values, so that the CPU computes in F32
 * from what the GPU sees, and a BF16 output differs by its last rounding (half of 2^-8 of itself)
 * and what the op's order of sums adds. Behind every buffer of the GPU lies a guard that
 * twin_compare and twin_done look at. A program includes it in one file: its state is static. */
#ifndef TWIN_H
#define TWIN_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/rng.h"
#include "kernels/kernels.h"
#include "tests/test.h"

typedef struct Twins {
  Device *cpu, *gpu;
  const Ops *cpu_ops, *gpu_ops;
  int failures;
} Twins;

typedef struct Pair {
  Tensor cpu, gpu;
} Pair;

/* Few threads: those of several test programs at once must not wait for each other's spinning. */
enum { TWIN_THREADS = 4 };
enum { TWIN_PAIRS = 256, TWIN_GUARD = 256, TWIN_GUARD_BYTE = 0xa5 };
static Twins twin_state;
static struct {
  Pair pair[TWIN_PAIRS];
  int n;
} twin_pairs;

/* Both devices, opened once, or skips the running test. */
static inline Twins *twins(void) {
  Twins *t = &twin_state;
  if (t->gpu) return t;
  Error err = {""};
  t->gpu = device_open(DEVICE_CUDA, TWIN_THREADS, &err);
  if (!t->gpu) {
    print_message("%s\n", err.msg);
    skip();
  }
  t->cpu = device_open(DEVICE_CPU, TWIN_THREADS, &err);
  if (!t->cpu) fail_msg("%s", err.msg);
  t->cpu_ops = device_ops(t->cpu);
  t->gpu_ops = device_ops(t->gpu);
  print_message("%s | %s\n", device_describe(t->gpu), device_describe(t->cpu));
  return t;
}

/* Where a checker looks on, whether to leave out the next of many cases, counted over the program:
 * all but every `of`-th, or closely all but every `closely`-th. */
static inline bool twin_leaves_out(int of, int closely) {
  static int cases;
  return test_is_watched() && cases++ % (test_is_watched_closely() ? closely : of) != 0;
}

/* ---- pairs ---- */

static inline Tensor twin_shape(void *data, DType type, int ndim, const int64_t *dim) {
  Tensor t = {data, type, ndim, {1, 1, 1, 1}};
  for (int i = 0; i < ndim; i++) t.dim[i] = dim[i];
  return t;
}

static inline void *twin_gpu_alloc(size_t bytes) {
  char *p = device_alloc(twin_state.gpu, bytes + TWIN_GUARD), guard[TWIN_GUARD];
  memset(guard, TWIN_GUARD_BYTE, sizeof guard);
  device_upload(twin_state.gpu, p + bytes, guard, sizeof guard);
  return p;
}

/* From host floats, which are rounded to `type` in place of what they were. Takes x over. */
static inline Pair twin_take(DType type, float *x, int ndim, const int64_t *dim) {
  require(twin_pairs.n < TWIN_PAIRS);
  Pair p;
  p.cpu = twin_shape(x, DT_F32, ndim, dim);
  p.gpu = twin_shape(NULL, type, ndim, dim);
  size_t n = (size_t)tensor_numel(p.cpu), bytes = tensor_bytes(p.gpu);
  void *typed = mem_alloc(n + 1, sizeof *x);
  if (convert_from_f32(x, typed, type, n) || convert_to_f32(typed, type, x, n))
    die("pairs are F32 or BF16");
  p.gpu.data = twin_gpu_alloc(bytes);
  device_upload(twin_state.gpu, p.gpu.data, typed, bytes);
  free(typed);
  twin_pairs.pair[twin_pairs.n++] = p;
  return p;
}

static inline Pair twin_random_at(DType type, uint64_t seed, float scale, int ndim,
                                  const int64_t *dim) {
  int64_t n = 1;
  for (int i = 0; i < ndim; i++) n *= dim[i];
  float *x = mem_alloc((size_t)n + 1, sizeof *x);
#pragma omp parallel for num_threads(TWIN_THREADS)
  for (int64_t i = 0; i < n; i++) x[i] = scale * rng_normal(seed, 11, (uint64_t)i);
  return twin_take(type, x, ndim, dim);
}

/* N(0, scale^2). Dims are int64_t: the macro makes them so. */
#define twin_random(type, seed, scale, ndim, ...) \
  twin_random_at((type), (seed), (scale), (ndim), (const int64_t[]){__VA_ARGS__})

static inline Pair twin_filled_at(DType type, float value, int ndim, const int64_t *dim) {
  int64_t n = 1;
  for (int i = 0; i < ndim; i++) n *= dim[i];
  float *x = mem_alloc((size_t)n + 1, sizeof *x);
  for (int64_t i = 0; i < n; i++) x[i] = value;
  return twin_take(type, x, ndim, dim);
}
#define twin_filled(type, value, ndim, ...) \
  twin_filled_at((type), (value), (ndim), (const int64_t[]){__VA_ARGS__})
#define twin_unwritten(type, ndim, ...) \
  twin_filled_at((type), NAN, (ndim), (const int64_t[]){__VA_ARGS__})

/* A copy of host floats. */
static inline Pair twin_floats_at(DType type, const float *from, int ndim, const int64_t *dim) {
  int64_t n = 1;
  for (int i = 0; i < ndim; i++) n *= dim[i];
  float *x = mem_alloc((size_t)n + 1, sizeof *x);
  memcpy(x, from, (size_t)n * sizeof *x);
  return twin_take(type, x, ndim, dim);
}
#define twin_floats(type, from, ndim, ...) \
  twin_floats_at((type), (from), (ndim), (const int64_t[]){__VA_ARGS__})

/* Bytes of another type (I32 ids, U8 flags, wire data): the same on both. */
static inline Pair twin_bytes(DType type, const void *from, int64_t n) {
  require(twin_pairs.n < TWIN_PAIRS);
  size_t bytes = (size_t)n * dtype_size(type);
  void *x = mem_alloc(bytes + 1, 1);
  memcpy(x, from, bytes);
  Pair p = {tensor_1d(x, type, n), tensor_1d(twin_gpu_alloc(bytes), type, n)};
  device_upload(twin_state.gpu, p.gpu.data, x, bytes);
  twin_pairs.pair[twin_pairs.n++] = p;
  return p;
}
static inline Pair twin_ints(const int32_t *ids, int64_t n) { return twin_bytes(DT_I32, ids, n); }
static inline Pair twin_random_ints(uint64_t seed, int64_t n, int32_t below) {
  int32_t *x = mem_alloc((size_t)n + 1, sizeof *x);
  for (int64_t i = 0; i < n; i++)
    x[i] = (int32_t)(rng_uniform(seed, 12, (uint64_t)i) * (double)below);
  Pair p = twin_ints(x, n);
  free(x);
  return p;
}
/* Part of a pair, from element `first` on. Compare the whole: the guard is behind that. */
static inline Pair twin_view(Pair whole, int64_t first, int ndim, const int64_t *dim) {
  char *c = whole.cpu.data, *g = whole.gpu.data;
  return (Pair){
      twin_shape(c + (size_t)first * dtype_size(whole.cpu.dtype), whole.cpu.dtype, ndim, dim),
      twin_shape(g + (size_t)first * dtype_size(whole.gpu.dtype), whole.gpu.dtype, ndim, dim)};
}
static inline Pair twin_absent(void) {
  Tensor none = tensor_1d(NULL, DT_F32, 0);
  return (Pair){none, none};
}

/* Rounds the CPU's copy as a tensor of that type would have. */
static inline void twin_round(DType type, Pair p) {
  size_t n = (size_t)tensor_numel(p.cpu);
  void *typed = mem_alloc(n + 1, sizeof(float));
  convert_from_f32(tensor_f32(p.cpu), typed, type, n);
  convert_to_f32(typed, type, tensor_f32(p.cpu), n);
  free(typed);
}

/* ---- comparison ---- */

/* What the GPU has, as floats (F32, BF16); the caller frees it. */
static inline float *twin_back(Pair p) {
  size_t n = (size_t)tensor_numel(p.gpu), bytes = tensor_bytes(p.gpu);
  void *typed = mem_alloc(bytes + 1, 1);
  float *x = mem_alloc(n + 1, sizeof *x);
  device_download(twin_state.gpu, typed, p.gpu.data, bytes);
  if (convert_to_f32(typed, p.gpu.dtype, x, n)) die("pairs are F32 or BF16");
  free(typed);
  return x;
}

static inline void twin_check_guard(const char *what, Pair p) {
  unsigned char guard[TWIN_GUARD];
  if (!p.gpu.data) return;
  device_download(twin_state.gpu, guard, (char *)p.gpu.data + tensor_bytes(p.gpu), sizeof guard);
  for (int i = 0; i < TWIN_GUARD; i++) {
    if (guard[i] == TWIN_GUARD_BYTE) continue;
    print_message("FAILED %s: byte %d behind the tensor was written\n", what, i);
    twin_state.failures++;
    return;
  }
}

/* Largest |gpu - cpu| over largest finite |cpu| must be at most tolerance; what is not finite must
 * be so on both, NaN for NaN and the same infinity. Prints either way, goes on after a failure, and
 * returns the error. */
static inline double twin_compare(const char *what, Pair p, double tolerance) {
  int64_t n = tensor_numel(p.cpu), worst = -1, odd = -1;
  const float *want = tensor_f32(p.cpu);
  float *got = twin_back(p);
  double largest = 0, difference = 0;
  for (int64_t i = 0; i < n; i++) {
    double w = (double)want[i], g = (double)got[i];
    if (!isfinite(w) || !isfinite(g)) {
      bool same = isnan(w) ? isnan(g) : w == g;
      if (!same && odd < 0) odd = i;
      continue;
    }
    if (fabs(w) > largest) largest = fabs(w);
    if (fabs(g - w) > difference) difference = fabs(g - w), worst = i;
  }
  double error = difference / (largest > 0 ? largest : 1);
  bool bad = odd >= 0 || !(error <= tolerance);
  print_message("%s %s: error %.2e of %.3g, bound %.1e\n", bad ? "FAILED" : "      ", what, error,
                largest, tolerance);
  if (odd >= 0)
    print_message("       at %lld of %lld: gpu %g, cpu %g\n", (long long)odd, (long long)n,
                  (double)got[odd], (double)want[odd]);
  if (bad && worst >= 0)
    print_message("       at %lld of %lld: gpu %.9g, cpu %.9g\n", (long long)worst, (long long)n,
                  (double)got[worst], (double)want[worst]);
  fflush(stdout);
  twin_state.failures += bad;
  twin_check_guard(what, p);
  free(got);
  return error;
}

/* Bytes must be the same (ids, flags, wire data). */
static inline void twin_compare_bytes(const char *what, Pair p) {
  size_t bytes = tensor_bytes(p.gpu), differ = 0, first = 0;
  unsigned char *got = mem_alloc(bytes + 1, 1), *want = p.cpu.data;
  device_download(twin_state.gpu, got, p.gpu.data, bytes);
  for (size_t i = 0; i < bytes; i++)
    if (got[i] != want[i] && differ++ == 0) first = i;
  if (differ)
    print_message("FAILED %s: %zu of %zu bytes differ, first at %zu: gpu %u, cpu %u\n", what,
                  differ, bytes, first, got[first], want[first]);
  twin_state.failures += differ > 0;
  twin_check_guard(what, p);
  free(got);
}

/* A condition of any kind, counted like the comparisons. */
static inline void twin_check(const char *what, bool ok) {
  if (!ok) print_message("FAILED %s\n", what);
  twin_state.failures += !ok;
}

/* ---- time ---- */

/* Seconds of one call: many are queued, then waited for; the best of three batches. Use tensors
 * well beyond the GPU's cache (60 MB) where memory is what counts. Prints GB/s and TFLOP/s where
 * bytes and flops are given. */
static inline double twin_time(const char *what, void (*op)(void *), void *arg, double bytes,
                               double flops) {
  Device *d = twin_state.gpu;
  double best = 1e30;
  op(arg);
  device_sync(d);
  double start = clock_seconds();
  op(arg);
  device_sync(d);
  double once = clock_seconds() - start;
  int calls = once > 0.02 ? 1 : (int)(0.02 / once) + 1;
  if (calls > 500) calls = 500;
  for (int batch = 0; batch < 3; batch++) {
    start = clock_seconds();
    for (int i = 0; i < calls; i++) op(arg);
    device_sync(d);
    double each = (clock_seconds() - start) / calls;
    if (each < best) best = each;
  }
  print_message("       %s: %.1f us", what, 1e6 * best);
  if (bytes > 0) print_message(", %.0f GB/s", 1e-9 * bytes / best);
  if (flops > 0) print_message(", %.1f TFLOP/s", 1e-12 * flops / best);
  print_message("\n");
  fflush(stdout);
  return best;
}

/* Frees all pairs made so far: for tests of many shapes. */
static inline void twin_release(void) {
  for (int i = 0; i < twin_pairs.n; i++) {
    Pair p = twin_pairs.pair[i];
    twin_check_guard("a buffer", p);
    free(p.cpu.data);
    device_free(twin_state.gpu, p.gpu.data);
  }
  twin_pairs.n = 0;
}

/* Frees all pairs and fails the running test when anything in it differed. */
static inline void twin_done(void) {
  twin_release();
  int failures = twin_state.failures;
  twin_state.failures = 0;
  if (failures) fail_msg("%d comparisons failed; see above", failures);
}

#endif
