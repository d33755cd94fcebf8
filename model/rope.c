/* Tables of cos and sin for rotary positions.
 *
 * Every step is float32 in the order in which transformers takes it (inverse frequencies by powf,
 * the scaling rules, position * frequency, then cos and sin): at positions in the thousands one ulp
 * of a frequency already moves an angle by 1e-4, so a more exact table would agree less.
 * Rules: transformers modeling_rope_utils.py, `linear`, `dynamic`, `llama3` and `longrope`.
 *
 * The table holds one set of rows for each set of frequencies in use. Most kinds have one; longrope
 * has two; dynamic has one for each length beyond the original positions, and forgets those that
 * a batch does not need. */
#include <math.h>
#include <string.h>

#include "model/internal.h"

/* ---- frequencies ---- */

bool model_rope_varies(const ModelConfig *c) {
  return c->rope == ROPE_DYNAMIC || c->rope == ROPE_LONGROPE;
}

/* What the frequencies of a sequence of this length depend on: 0, the usual ones; longrope, 1: the
 * long factors; dynamic: the length. */
static int rope_key(const Model *m, int length) {
  const ModelConfig *c = &m->config;
  if (m->rope_fixed) {
    if (model_rope_varies(c) && length > m->rope_fixed)
      die("a sequence of %d tokens; rotary positions are fixed for at most %d", length,
          m->rope_fixed);
    length = m->rope_fixed;
  }
  if (!model_rope_varies(c) || length <= c->rope_original_positions) return 0;
  return c->rope == ROPE_LONGROPE ? 1 : length;
}

static float llama3_scale(const ModelConfig *c, float inv_freq) {
  float factor = (float)c->rope_factor, low = (float)c->rope_low_freq;
  float high = (float)c->rope_high_freq, original = (float)c->rope_original_positions;
  float wavelen = (float)(2 * M_PI) / inv_freq;
  if (wavelen < (float)(c->rope_original_positions / c->rope_high_freq)) return inv_freq;
  if (wavelen > (float)(c->rope_original_positions / c->rope_low_freq)) return inv_freq / factor;
  float smooth = (original / wavelen - low) / (high - low);
  return (1 - smooth) * inv_freq / factor + smooth * inv_freq;
}

/* The base that grows with the length (NTK). */
static float dynamic_theta(const ModelConfig *c, int length) {
  float factor = (float)c->rope_factor, dim = (float)rotary_width(c);
  float stretch = factor * (float)length / (float)c->rope_original_positions;
  return (float)c->rope_theta * powf(stretch - (factor - 1), dim / (dim - 2));
}

static float inverse_frequency(const ModelConfig *c, int key, int i) {
  float exponent = (float)(2 * i) / (float)rotary_width(c), theta = (float)c->rope_theta;
  if (c->rope == ROPE_DYNAMIC && key > 0) theta = dynamic_theta(c, key);
  if (c->rope == ROPE_LONGROPE)
    return 1.0F / ((key ? c->rope_long[i] : c->rope_short[i]) * powf(theta, exponent));
  float inv_freq = 1.0F / powf(theta, exponent);
  if (c->rope == ROPE_LINEAR) return inv_freq / (float)c->rope_factor;
  if (c->rope == ROPE_LLAMA3) return llama3_scale(c, inv_freq);
  return inv_freq;
}

/* What cos and sin are multiplied by. */
static float attention_factor(const ModelConfig *c) {
  if (c->rope != ROPE_LONGROPE) return 1;
  if (c->rope_attention_factor > 0) return (float)c->rope_attention_factor;
  double original = c->rope_original_positions;
  double factor = c->rope_factor > 0 ? c->rope_factor : c->max_positions / original;
  return factor <= 1 ? 1 : (float)sqrt(1 + log(factor) / log(original));
}

/* ---- the table ---- */

static RopeSet *find_set(const RopeTable *t, int key) {
  for (int i = 0; i < t->n; i++)
    if (t->set[i].key == key) return &t->set[i];
  return NULL;
}

static void want(RopeTable *t, int key, int positions) {
  RopeSet *s = find_set(t, key);
  if (!s) {
    t->set = mem_grow(t->set, (size_t)t->n + 1, sizeof *t->set);
    s = &t->set[t->n++];
    *s = (RopeSet){.key = key};
  }
  if (positions > s->positions) s->positions = positions;
}

static bool holds(const RopeTable *t, const RopeTable *wanted) {
  for (int i = 0; i < wanted->n; i++) {
    const RopeSet *s = find_set(t, wanted->set[i].key);
    if (!s || s->positions < wanted->set[i].positions) return false;
  }
  return true;
}

/* Doubling keeps the number of rebuilds small while sequences grow; a set of dynamic's serves one
 * length. The usual sets that are there already stay. */
static void plan_rows(const ModelConfig *c, const RopeTable *old, RopeTable *t) {
  for (int i = 0; i < old->n; i++)
    if (c->rope != ROPE_DYNAMIC || old->set[i].key == 0)
      want(t, old->set[i].key, old->set[i].positions);
  int first = 0;
  for (int i = 0; i < t->n; i++) {
    RopeSet *s = &t->set[i];
    int64_t size = 256;
    while (size < s->positions) size *= 2;
    if (size > c->max_positions) size = c->max_positions;
    if (c->rope == ROPE_DYNAMIC && s->key > 0) size = s->positions;
    require(size >= s->positions);
    s->positions = (int)size;
    s->first = first;
    first += s->positions;
  }
}

static void fill_set(const ModelConfig *c, const RopeSet *s, float *cos_Pr, float *sin_Pr) {
  int half = rotary_width(c) / 2;
  float factor = attention_factor(c);
  for (int i = 0; i < half; i++) {
    float inv_freq = inverse_frequency(c, s->key, i);
    for (int64_t p = 0; p < s->positions; p++) {
      float angle = (float)p * inv_freq;
      cos_Pr[(s->first + p) * half + i] = cosf(angle) * factor;
      sin_Pr[(s->first + p) * half + i] = sinf(angle) * factor;
    }
  }
}

static Tensor table_upload(Model *m, const float *host, int64_t rows, int64_t half) {
  size_t bytes = (size_t)(rows * half) * sizeof(float);
  void *data = device_alloc(m->device, bytes);
  device_upload(m->device, data, host, bytes);
  return tensor_2d(data, DT_F32, rows, half);
}

void rope_free(Model *m) {
  device_free(m->device, m->rope.cos_Pr.data);
  device_free(m->device, m->rope.sin_Pr.data);
  free(m->rope.set);
  m->rope = (RopeTable){0};
}

static void build(Model *m, RopeTable t) {
  const RopeSet *last = &t.set[t.n - 1];
  int64_t rows = last->first + last->positions, half = rotary_width(&m->config) / 2;
  float *cos_host = mem_alloc((size_t)(rows * half), sizeof(float));
  float *sin_host = mem_alloc((size_t)(rows * half), sizeof(float));
  for (int i = 0; i < t.n; i++) fill_set(&m->config, &t.set[i], cos_host, sin_host);
  rope_free(m);
  m->rope = t;
  m->rope.cos_Pr = table_upload(m, cos_host, rows, half);
  m->rope.sin_Pr = table_upload(m, sin_host, rows, half);
  free(cos_host);
  free(sin_host);
}

void rope_ensure(Model *m, int n, const int32_t *lengths, const int32_t *positions) {
  RopeTable wanted = {0};
  /* Built also when the first batch is empty: the kernels want a table to look at. */
  if (m->rope.n == 0) want(&wanted, 0, 1);
  for (int i = 0; i < n; i++) want(&wanted, rope_key(m, lengths[i]), positions[i]);
  if (holds(&m->rope, &wanted)) {
    free(wanted.set);
    return;
  }
  plan_rows(&m->config, &m->rope, &wanted);
  build(m, wanted);
}

int rope_first(const Model *m, int length) {
  const RopeSet *s = find_set(&m->rope, rope_key(m, length));
  require(s != NULL);
  return s->first;
}

void model_rope_fix(Model *m, int length) {
  require(length >= 0);
  m->rope_fixed = length < m->config.max_positions ? length : m->config.max_positions;
}

int model_rope_fixed(const Model *m) { return m->rope_fixed; }
