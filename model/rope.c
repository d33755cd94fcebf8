/* Tables of cos and sin for rotary positions.
 *
 * Every step is float32 in the order in which transformers takes it (inverse frequencies by powf,
 * the scaling rules, position * frequency, then cos and sin): at positions in the thousands one ulp
 * of a frequency already moves an angle by 1e-4, so a more exact table would agree less.
 * Rules: transformers modeling_rope_utils.py, `linear` and `llama3`. */
#include <math.h>

#include "model/internal.h"

static float llama3_scale(const ModelConfig *c, float inv_freq) {
  float factor = (float)c->rope_factor, low = (float)c->rope_low_freq;
  float high = (float)c->rope_high_freq, original = (float)c->rope_original_positions;
  float wavelen = (float)(2 * M_PI) / inv_freq;
  if (wavelen < (float)(c->rope_original_positions / c->rope_high_freq)) return inv_freq;
  if (wavelen > (float)(c->rope_original_positions / c->rope_low_freq)) return inv_freq / factor;
  float smooth = (original / wavelen - low) / (high - low);
  return (1 - smooth) * inv_freq / factor + smooth * inv_freq;
}

static float inverse_frequency(const ModelConfig *c, int i) {
  float exponent = (float)(2 * i) / (float)c->head_dim;
  float inv_freq = 1.0F / powf((float)c->rope_theta, exponent);
  if (c->rope == ROPE_LINEAR) return inv_freq / (float)c->rope_factor;
  if (c->rope == ROPE_LLAMA3) return llama3_scale(c, inv_freq);
  return inv_freq;
}

static Tensor table_upload(Model *m, Tensor old, const float *host, int positions, int half) {
  size_t bytes = (size_t)positions * (size_t)half * sizeof(float);
  device_free(m->device, old.data);
  void *data = device_alloc(m->device, bytes);
  device_upload(m->device, data, host, bytes);
  return tensor_2d(data, DT_F32, positions, half);
}

void rope_ensure(Model *m, int positions) {
  /* Built also when the first batch is empty: the kernels want a table to look at. */
  if (m->rope.positions > 0 && positions <= m->rope.positions) return;
  /* Doubling keeps the number of rebuilds small while sequences grow. */
  int64_t size = m->rope.positions ? m->rope.positions : 256;
  while (size < positions) size *= 2;
  if (size > m->config.max_positions) size = m->config.max_positions;
  require(size >= positions);
  int half = m->config.head_dim / 2;
  float *cos_host = mem_alloc((size_t)size * (size_t)half, sizeof(float));
  float *sin_host = mem_alloc((size_t)size * (size_t)half, sizeof(float));
  for (int i = 0; i < half; i++) {
    float inv_freq = inverse_frequency(&m->config, i);
    for (int64_t p = 0; p < size; p++) {
      float angle = (float)p * inv_freq;
      cos_host[p * half + i] = cosf(angle);
      sin_host[p * half + i] = sinf(angle);
    }
  }
  m->rope.cos_Pr = table_upload(m, m->rope.cos_Pr, cos_host, (int)size, half);
  m->rope.sin_Pr = table_upload(m, m->rope.sin_Pr, sin_host, (int)size, half);
  m->rope.positions = (int)size;
  free(cos_host);
  free(sin_host);
}
