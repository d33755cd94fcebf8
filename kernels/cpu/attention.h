/* One query against a run of keys: what full attention and decoding share. Internal to kernels/cpu.
 */
#ifndef KERNELS_CPU_ATTENTION_H
#define KERNELS_CPU_ATTENTION_H

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vecmath.h"

/* score[j] = scale q.k_j for n keys that lie stride floats apart. */
static inline void score_keys(int64_t D, float scale, const float *q, int64_t n, const float *k,
                              int64_t stride, float *score) {
  for (int64_t j = 0; j < n; j++) {
    const float *kj = k + j * stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < D; i++) sum += q[i] * kj[i];
    score[j] = sum * scale;
  }
}

/* score becomes exp(score - max); returns max and their sum. */
static inline float softmax_scores(int64_t n, float *score, float *sum_out) {
  float max = -INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < n; j++) max = score[j] > max ? score[j] : max;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; j++) {
    score[j] = exp_f32(score[j] - max);
    sum += score[j];
  }
  *sum_out = sum;
  return max;
}

/* out += sum of score[j] v_j. */
static inline void add_values(int64_t D, int64_t n, const float *score, const float *v,
                              int64_t stride, float *out) {
  for (int64_t j = 0; j < n; j++) {
    const float *vj = v + j * stride;
#pragma omp simd
    for (int64_t i = 0; i < D; i++) out[i] += score[j] * vj[i];
  }
}

/* out = softmax(scale q.K) V; returns log sum exp of the scores. score is scratch of n. */
static inline float attend_row(int64_t D, float scale, const float *q, int64_t n, const float *k,
                               const float *v, int64_t stride, float *score, float *out) {
  float sum;
  score_keys(D, scale, q, n, k, stride, score);
  float max = softmax_scores(n, score, &sum);
  for (int64_t i = 0; i < D; i++) out[i] = 0;
  add_values(D, n, score, v, stride, out);
  for (int64_t i = 0; i < D; i++) out[i] /= sum;
  return max + logf(sum);
}

#endif
