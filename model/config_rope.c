/* The rotary part of config.json: rope_theta beside rope_scaling (older), or rope_parameters
 * (newer). Where both are there they must agree. */
#include <math.h>
#include <string.h>

#include "model/internal.h"

/* A number that must be there and be positive. */
static int need_positive(const json_t *obj, const char *key, const char *file, double *out,
                         Error *err) {
  if (json_get_f64_or(obj, key, file, NAN, out, err)) return -1;
  if (!(*out > 0)) return error_set(err, "%s: rope: %s: expected a number above 0", file, key);
  return 0;
}

static int need_integer(const json_t *obj, const char *key, const char *file, int *out,
                        Error *err) {
  double v;
  if (need_positive(obj, key, file, &v, err)) return -1;
  if (v != floor(v) || v > INT32_MAX)
    return error_set(err, "%s: rope: %s %g: expected an integer", file, key, v);
  *out = (int)v;
  return 0;
}

static int read_llama3(const json_t *rope, const char *file, ModelConfig *c, Error *err) {
  if (need_positive(rope, "factor", file, &c->rope_factor, err) ||
      need_positive(rope, "low_freq_factor", file, &c->rope_low_freq, err) ||
      need_positive(rope, "high_freq_factor", file, &c->rope_high_freq, err) ||
      need_integer(rope, "original_max_position_embeddings", file, &c->rope_original_positions,
                   err))
    return -1;
  if (!(c->rope_high_freq > c->rope_low_freq))
    return error_set(err, "%s: rope: high_freq_factor %g must be above low_freq_factor %g", file,
                     c->rope_high_freq, c->rope_low_freq);
  return 0;
}

/* max_position_embeddings is where the base starts to grow, and nothing says where it ends. Such
 * models are published for up to six times as much. */
static int read_dynamic(const json_t *rope, const char *file, ModelConfig *c, Error *err) {
  enum { SPAN = 8 };
  const char *original = "original_max_position_embeddings";
  if (need_positive(rope, "factor", file, &c->rope_factor, err)) return -1;
  c->rope_original_positions = c->max_positions;
  if (json_object_get(rope, original) &&
      need_integer(rope, original, file, &c->rope_original_positions, err))
    return -1;
  if (c->rope_original_positions != c->max_positions)
    return error_set(err, "%s: rope: %s %d differs from max_position_embeddings %d", file, original,
                     c->rope_original_positions, c->max_positions);
  if (c->rope_factor < 1)
    return error_set(err, "%s: rope: factor %g: expected at least 1", file, c->rope_factor);
  if (c->max_positions > INT32_MAX / SPAN)
    return error_set(err, "%s: max_position_embeddings %d: too large", file, c->max_positions);
  c->max_positions *= SPAN;
  return 0;
}

static int read_factors(const json_t *rope, const char *key, const char *file, int pairs,
                        float out[MODEL_MAX_ROPE_PAIRS], Error *err) {
  const json_t *list = json_object_get(rope, key);
  if (pairs > MODEL_MAX_ROPE_PAIRS)
    return error_set(err, "%s: rope: %d pairs of channels; at most %d are supported", file, pairs,
                     MODEL_MAX_ROPE_PAIRS);
  if (!json_is_array(list) || json_array_size(list) != (size_t)pairs)
    return error_set(err, "%s: rope: %s: expected a list of %d numbers", file, key, pairs);
  for (int i = 0; i < pairs; i++) {
    const json_t *v = json_array_get(list, (size_t)i);
    double factor = json_is_number(v) ? json_number_value(v) : 0;
    if (!(factor > 0))
      return error_set(err, "%s: rope: %s[%d]: expected a number above 0", file, key, i);
    out[i] = (float)factor;
  }
  return 0;
}

/* A number above 0, 0 where it is absent. */
static int maybe_positive(const json_t *obj, const char *key, const char *file, double *out,
                          Error *err) {
  const json_t *v = json_object_get(obj, key);
  *out = 0;
  return v && !json_is_null(v) ? need_positive(obj, key, file, out, err) : 0;
}

/* The original length stands beside the rotary part (Phi-3), or in it. */
static int read_longrope(const json_t *root, const json_t *rope, const char *file, ModelConfig *c,
                         Error *err) {
  const char *original = "original_max_position_embeddings";
  const json_t *at = json_object_get(root, original) ? root : rope;
  int pairs = rotary_width(c) / 2;
  c->rope_original_positions = c->max_positions;
  if (json_object_get(at, original) &&
      need_integer(at, original, file, &c->rope_original_positions, err))
    return -1;
  if (c->rope_original_positions < 2)
    return error_set(err, "%s: rope: %s: expected at least 2", file, original);
  if (maybe_positive(rope, "factor", file, &c->rope_factor, err) ||
      maybe_positive(rope, "attention_factor", file, &c->rope_attention_factor, err) ||
      read_factors(rope, "short_factor", file, pairs, c->rope_short, err))
    return -1;
  return read_factors(rope, "long_factor", file, pairs, c->rope_long, err);
}

static int read_rope_kind(const json_t *root, const json_t *rope, const char *file, ModelConfig *c,
                          Error *err) {
  const char *type;
  if (json_get_str_or(rope, "rope_type", file, NULL, &type, err)) return -1;
  if (!type && json_get_str_or(rope, "type", file, "default", &type, err)) return -1;
  if (!strcmp(type, "default")) return 0;
  if (!strcmp(type, "linear")) {
    c->rope = ROPE_LINEAR;
    return need_positive(rope, "factor", file, &c->rope_factor, err);
  }
  if (!strcmp(type, "dynamic")) {
    c->rope = ROPE_DYNAMIC;
    return read_dynamic(rope, file, c, err);
  }
  if (!strcmp(type, "llama3")) {
    c->rope = ROPE_LLAMA3;
    return read_llama3(rope, file, c, err);
  }
  if (!strcmp(type, "longrope") || !strcmp(type, "su")) { /* its name in early Phi-3 configs */
    c->rope = ROPE_LONGROPE;
    return read_longrope(root, rope, file, c, err);
  }
  return error_set(err,
                   "%s: rope_type \"%s\" is not supported; expected \"default\", \"linear\", "
                   "\"dynamic\", \"llama3\" or \"longrope\"",
                   file, type);
}

static const json_t *object_or_null(const json_t *root, const char *key) {
  const json_t *v = json_object_get(root, key);
  return json_is_null(v) ? NULL : v;
}

/* partial_rotary_factor of one of the places where it may stand. */
static int read_partial(const json_t *obj, const char *file, const Family *f, ModelConfig *c,
                        Error *err) {
  double part;
  if (json_get_f64_or(obj, "partial_rotary_factor", file, 1, &part, err)) return -1;
  if (part == 1) return 0;
  if (!f->partial_rotary)
    return error_set(err, "%s: partial_rotary_factor %g is not supported; expected 1", file, part);
  int width = part > 0 && part < 1 ? (int)(c->head_dim * part) : 0;
  if (width < 2 || (c->rotary_dim && c->rotary_dim != width))
    return error_set(err, "%s: partial_rotary_factor %g: expected a part of head_dim %d", file,
                     part, c->head_dim);
  c->rotary_dim = width;
  return 0;
}

int config_read_rope(const json_t *root, const char *file, const Family *f, ModelConfig *c,
                     Error *err) {
  c->rope = f->learned_positions ? ROPE_NONE : ROPE_DEFAULT;
  if (f->learned_positions) return 0;
  const json_t *newer = object_or_null(root, "rope_parameters");
  const json_t *older = object_or_null(root, "rope_scaling");
  if ((newer && !json_is_object(newer)) || (older && !json_is_object(older)))
    return error_set(err, "%s: %s: expected an object", file,
                     older && !json_is_object(older) ? "rope_scaling" : "rope_parameters");
  if (newer && older && !json_equal(newer, older))
    return error_set(err, "%s: rope_parameters and rope_scaling are both there and differ", file);
  double top;
  if (json_get_f64_or(root, "rope_theta", file, NAN, &top, err) ||
      read_partial(root, file, f, c, err))
    return -1;
  const json_t *rope = newer ? newer : older;
  c->rope_theta = isnan(top) ? f->rope_theta : top;
  if (!rope) return 0;
  double theta;
  if (json_get_f64_or(rope, "rope_theta", file, c->rope_theta, &theta, err)) return -1;
  if (!isnan(top) && theta != top)
    return error_set(err, "%s: rope_theta is %g and, in the rope parameters, %g", file, top, theta);
  c->rope_theta = theta;
  if (read_partial(rope, file, f, c, err)) return -1;
  return read_rope_kind(root, rope, file, c, err);
}
