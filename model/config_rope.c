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

static int read_rope_kind(const json_t *rope, const char *file, ModelConfig *c, Error *err) {
  const char *type;
  if (json_get_str_or(rope, "rope_type", file, NULL, &type, err)) return -1;
  if (!type && json_get_str_or(rope, "type", file, "default", &type, err)) return -1;
  if (!strcmp(type, "default")) return 0;
  if (!strcmp(type, "linear")) {
    c->rope = ROPE_LINEAR;
    return need_positive(rope, "factor", file, &c->rope_factor, err);
  }
  if (strcmp(type, "llama3") != 0)
    return error_set(err,
                     "%s: rope_type \"%s\" is not supported; expected \"default\", \"linear\" or "
                     "\"llama3\"",
                     file, type);
  c->rope = ROPE_LLAMA3;
  double original;
  if (need_positive(rope, "factor", file, &c->rope_factor, err) ||
      need_positive(rope, "low_freq_factor", file, &c->rope_low_freq, err) ||
      need_positive(rope, "high_freq_factor", file, &c->rope_high_freq, err) ||
      need_positive(rope, "original_max_position_embeddings", file, &original, err))
    return -1;
  if (!(c->rope_high_freq > c->rope_low_freq))
    return error_set(err, "%s: rope: high_freq_factor %g must be above low_freq_factor %g", file,
                     c->rope_high_freq, c->rope_low_freq);
  if (original != floor(original) || original > INT32_MAX)
    return error_set(err, "%s: rope: original_max_position_embeddings %g: expected an integer",
                     file, original);
  c->rope_original_positions = (int)original;
  return 0;
}

static const json_t *object_or_null(const json_t *root, const char *key) {
  const json_t *v = json_object_get(root, key);
  return json_is_null(v) ? NULL : v;
}

int config_read_rope(const json_t *root, const char *file, double default_theta, ModelConfig *c,
                     Error *err) {
  const json_t *newer = object_or_null(root, "rope_parameters");
  const json_t *older = object_or_null(root, "rope_scaling");
  if ((newer && !json_is_object(newer)) || (older && !json_is_object(older)))
    return error_set(err, "%s: %s: expected an object", file,
                     older && !json_is_object(older) ? "rope_scaling" : "rope_parameters");
  if (newer && older && !json_equal(newer, older))
    return error_set(err, "%s: rope_parameters and rope_scaling are both there and differ", file);
  c->rope = ROPE_DEFAULT;
  double top;
  if (json_get_f64_or(root, "rope_theta", file, NAN, &top, err)) return -1;
  const json_t *rope = newer ? newer : older;
  c->rope_theta = isnan(top) ? default_theta : top;
  if (!rope) return 0;
  double theta;
  if (json_get_f64_or(rope, "rope_theta", file, c->rope_theta, &theta, err)) return -1;
  if (!isnan(top) && theta != top)
    return error_set(err, "%s: rope_theta is %g and, in the rope parameters, %g", file, top, theta);
  c->rope_theta = theta;
  double rotary;
  if (json_get_f64_or(rope, "partial_rotary_factor", file, 1, &rotary, err)) return -1;
  if (rotary != 1)
    return error_set(err, "%s: rope: partial_rotary_factor %g is not supported; expected 1", file,
                     rotary);
  return read_rope_kind(rope, file, c, err);
}
