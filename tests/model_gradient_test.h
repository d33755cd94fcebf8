/* A parameter's gradient against finite differences of the loss. */
#ifndef MODEL_GRADIENT_TEST_H
#define MODEL_GRADIENT_TEST_H

#include "tests/model_test.h"

/* Moves parameter p by h along the direction. */
static inline void move(Model *m, int p, const float *direction, double h) {
  int64_t start, count;
  float *w = zeropp_shard(model_zero(m), STATE_MASTER, p, &start, &count);
  for (int64_t i = 0; i < count; i++) w[i] += (float)(h * (double)direction[i]);
  zeropp_weights_written(model_zero(m));
}

static inline double slope(Model *m, const TestBatch *b, int flags, int p, const float *direction,
                           double h) {
  move(m, p, direction, h);
  double up = eval_batch(m, b, flags);
  move(m, p, direction, -2 * h);
  double down = eval_batch(m, b, flags);
  move(m, p, direction, h);
  return (up - down) / (2 * h);
}

/* Along the gradient itself the slope is its length; along a random direction, the dot product.
 * Step 4e-3 in a unit direction: the loss's float32 noise, about 4e-7, is then 1e-4 of slope. What
 * the step itself is off by is a part of |g|: with smooth functions the third-order term, which
 * falls with the square of the step; with ReLUs the kinks that it steps over, of the first order.
 */
#define PART_SMOOTH 2e-3
#define PART_KINKS 1e-2
static inline void check_parameter(Model *m, const TestBatch *b, int flags, int p, double part) {
  int64_t start, count;
  const float *g = zeropp_shard(model_zero(m), STATE_GRAD, p, &start, &count);
  float *unit = mem_alloc((size_t)count, sizeof *unit);
  float *random = mem_alloc((size_t)count, sizeof *random);
  double norm = 0, size = 0, dot = 0;
  for (int64_t i = 0; i < count; i++) {
    random[i] = rng_normal(3, (uint64_t)p, (uint64_t)i);
    norm += (double)g[i] * (double)g[i];
    size += (double)random[i] * (double)random[i];
  }
  norm = sqrt(norm);
  size = sqrt(size);
  if (norm < 1e-3) fail_msg("%s has no gradient", zeropp_spec(model_zero(m), p)->name);
  for (int64_t i = 0; i < count; i++) {
    unit[i] = (float)((double)g[i] / norm);
    random[i] = (float)((double)random[i] / size);
    dot += (double)random[i] * (double)g[i];
  }
  double along = slope(m, b, flags, p, unit, 4e-3), across = slope(m, b, flags, p, random, 4e-3);
  double tolerance = part * norm + 1e-4;
  if (fabs(along - norm) > tolerance || fabs(across - dot) > tolerance)
    fail_msg("%s: |g| %.6f, slope %.6f; random: g.r %.6f, slope %.6f",
             zeropp_spec(model_zero(m), p)->name, norm, along, dot, across);
  free(unit);
  free(random);
}

#endif
