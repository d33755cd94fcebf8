/* Times of ops that memory sets the pace of: large tensors on the GPU alone, filled with random
 * numbers, and the share of the copy rate, which counts bytes read and written as the op's are. */
#ifndef BANDWIDTH_H
#define BANDWIDTH_H

#include "tests/twin.h"

enum { BIG_TENSORS = 16, BIG_BLOCK = 1 << 20 };
static struct {
  void *p[BIG_TENSORS];
  int n;
} big_tensors;

/* The same million numbers from N(0, scale^2) over and over: nothing is read twice because of it.
 */
static inline Tensor big_random_at(DType type, float scale, int ndim, const int64_t *dim) {
  Device *d = twin_state.gpu;
  Tensor t = twin_shape(NULL, type, ndim, dim);
  size_t bytes = tensor_bytes(t), block = BIG_BLOCK * dtype_size(type);
  static float normal[BIG_BLOCK];
  if (normal[0] == 0)
    for (int64_t i = 0; i < BIG_BLOCK; i++) normal[i] = rng_normal(77, 13, (uint64_t)i);
  float *x = mem_alloc(BIG_BLOCK, sizeof *x);
  void *typed = mem_alloc(BIG_BLOCK, sizeof *x);
  for (int64_t i = 0; i < BIG_BLOCK; i++) x[i] = scale * normal[i];
  if (convert_from_f32(x, typed, type, BIG_BLOCK)) die("F32 or BF16");
  require(big_tensors.n < BIG_TENSORS);
  t.data = big_tensors.p[big_tensors.n++] = device_alloc(d, bytes);
  device_upload(d, t.data, typed, block < bytes ? block : bytes);
  for (size_t at = block; at < bytes; at += block)
    device_copy(d, (char *)t.data + at, t.data, block < bytes - at ? block : bytes - at);
  free(x);
  free(typed);
  return t;
}
#define big_random(type, scale, ndim, ...) \
  big_random_at((type), (scale), (ndim), (const int64_t[]){__VA_ARGS__})

static inline Tensor big_ints(const int32_t *x, int64_t n) {
  require(big_tensors.n < BIG_TENSORS);
  size_t bytes = (size_t)n * sizeof *x;
  void *p = big_tensors.p[big_tensors.n++] = device_alloc(twin_state.gpu, bytes);
  device_upload(twin_state.gpu, p, x, bytes);
  return tensor_1d(p, DT_I32, n);
}

static inline void big_free(void) {
  for (int i = 0; i < big_tensors.n; i++) device_free(twin_state.gpu, big_tensors.p[i]);
  big_tensors.n = 0;
}

/* Prints; a share is the machine's matter, so that none fails. */
static inline void bandwidth(const char *what, void (*op)(void *), void *arg, double bytes) {
  static double copy;
  if (copy == 0) copy = device_measure(twin_state.gpu).copy_bytes;
  double seconds = twin_time(what, op, arg, bytes, 0);
  print_message("       %s: %.0f %% of the copy rate, %.0f GB/s\n", what,
                100 * bytes / seconds / copy, 1e-9 * copy);
}

/* ---- what twins of rows share ---- */

/* The pair from element `by` to its end, as a matrix: rows that do not begin on 16 bytes. */
static inline Pair twin_rows(Pair p, int64_t by, int64_t n, int64_t c) {
  require(tensor_numel(p.cpu) == by + n * c);
  return twin_view(p, by, 2, (const int64_t[]){n, c});
}

/* The bits of two GPU results must be the same. */
static inline void twin_same_bits(const char *what, Pair a, Pair b) {
  size_t bytes = tensor_bytes(a.gpu);
  char *x = mem_alloc(bytes + 1, 1), *y = mem_alloc(bytes + 1, 1);
  device_download(twin_state.gpu, x, a.gpu.data, bytes);
  device_download(twin_state.gpu, y, b.gpu.data, bytes);
  if (memcmp(x, y, bytes) != 0) print_message("FAILED %s: bits differ the second time\n", what);
  twin_state.failures += memcmp(x, y, bytes) != 0;
  free(x);
  free(y);
}

#endif
