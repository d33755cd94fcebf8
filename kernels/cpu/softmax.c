/* Log-softmax over the vocabulary with the chosen token picked out, its entropy, and the gradient
 * of both. Per row and with z = logits * inv_temp: log p_v = z_v - lse, H = lse - sum p_v z_v. */
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vecmath.h"

typedef struct RowStats {
  float max, sum; /* of z; of exp(z - max) */
  float mean;     /* sum of p (z - max): H = log(sum) - mean */
} RowStats;

static RowStats row_stats(const float *x, int64_t v, float inv_temp, bool want_mean) {
  RowStats s = {.max = -INFINITY};
  float max = -INFINITY, sum = 0, mean = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < v; j++) max = x[j] > max ? x[j] : max;
  s.max = max * inv_temp;
  if (want_mean) {
#pragma omp simd reduction(+ : sum, mean)
    for (int64_t j = 0; j < v; j++) {
      float z = x[j] * inv_temp - s.max, e = exp_f32(z);
      sum += e;
      mean += e > 0 ? e * z : e; /* 0 x -inf must not be NaN, and NaN must stay */
    }
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < v; j++) sum += exp_f32(x[j] * inv_temp - s.max);
  }
  s.sum = sum;
  s.mean = mean / sum;
  return s;
}

void cpu_logprob_fwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor logprob_R,
                     Tensor lse_R, Tensor entropy_R) {
  int64_t r = logits_RV.dim[0], v = logits_RV.dim[1];
  require(is_f32(logits_RV, 2) && is_i32_1d(target_R, r) && is_f32_1d(logprob_R, r));
  require(is_f32_1d(lse_R, r) && (!entropy_R.data || is_f32_1d(entropy_R, r)) && inv_temp > 0);
  const int32_t *target = tensor_i32(target_R);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (r * v >= PARALLEL_MIN)
  for (int64_t i = 0; i < r; i++) {
    if (target[i] < 0 || target[i] >= v)
      die("target id %d is outside [0, %lld)", target[i], (long long)v);
    const float *x = tensor_f32(logits_RV) + i * v;
    RowStats s = row_stats(x, v, inv_temp, entropy_R.data != NULL);
    float log_sum = logf(s.sum);
    tensor_f32(lse_R)[i] = s.max + log_sum;
    tensor_f32(logprob_R)[i] = x[target[i]] * inv_temp - s.max - log_sum;
    if (entropy_R.data) tensor_f32(entropy_R)[i] = log_sum - s.mean;
  }
}

/* d logprob / dz_v = [v = target] - p_v;  dH / dz_v = -p_v (log p_v + H). */
void cpu_logprob_bwd(Device *d, Tensor logits_RV, Tensor target_R, float inv_temp, Tensor lse_R,
                     Tensor entropy_R, Tensor dlogprob_R, Tensor dentropy_R, Tensor dlogits_RV) {
  int64_t r = logits_RV.dim[0], v = logits_RV.dim[1];
  require(is_f32(logits_RV, 2) && is_i32_1d(target_R, r) && is_f32_1d(dlogprob_R, r));
  require(is_f32_1d(lse_R, r) && inv_temp > 0 && is_f32_2d(dlogits_RV, r, v));
  require(!dentropy_R.data || (is_f32_1d(dentropy_R, r) && is_f32_1d(entropy_R, r)));
  const int32_t *target = tensor_i32(target_R);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (r * v >= PARALLEL_MIN)
  for (int64_t i = 0; i < r; i++) {
    const float *x = tensor_f32(logits_RV) + i * v;
    float *dx = tensor_f32(dlogits_RV) + i * v;
    float lse = tensor_f32(lse_R)[i], dlp = tensor_f32(dlogprob_R)[i] * inv_temp;
    if (dentropy_R.data) {
      float h = tensor_f32(entropy_R)[i], dh = tensor_f32(dentropy_R)[i] * inv_temp;
#pragma omp simd
      for (int64_t j = 0; j < v; j++) {
        float lp = x[j] * inv_temp - lse, p = exp_f32(lp);
        dx[j] = p > 0 ? -p * (dlp + dh * (lp + h)) : -p * dlp;
      }
    } else {
#pragma omp simd
      for (int64_t j = 0; j < v; j++) dx[j] = -dlp * exp_f32(x[j] * inv_temp - lse);
    }
    dx[target[i]] += dlp;
  }
}
