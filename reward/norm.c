/* The mean and deviation of a reward model's scores, as they are kept in its config.json. */
#include <math.h>
#include <stdlib.h>

#include "core/fs.h"
#include "reward/reward.h"

static int read_keys(const json_t *config, const char *file, ScoreNorm *out, Error *err) {
  bool mean = !!json_object_get(config, "rlhf_score_mean");
  bool std = !!json_object_get(config, "rlhf_score_std");
  *out = (ScoreNorm){.mean = 0, .std = 1};
  if (!mean && !std) return 0;
  if (mean != std)
    return error_set(err, "%s: has %s without %s", file,
                     mean ? "rlhf_score_mean" : "rlhf_score_std",
                     mean ? "rlhf_score_std" : "rlhf_score_mean");
  if (json_get_f64_or(config, "rlhf_score_mean", file, NAN, &out->mean, err)) return -1;
  if (json_get_f64_or(config, "rlhf_score_std", file, NAN, &out->std, err)) return -1;
  if (!isfinite(out->mean) || !isfinite(out->std) || out->std <= 0)
    return error_set(err,
                     "%s: rlhf_score_mean is %g and rlhf_score_std is %g, expected a number and a "
                     "number above 0",
                     file, out->mean, out->std);
  out->known = true;
  return 0;
}

int score_norm_read(const char *model_dir, ScoreNorm *out, Error *err) {
  char *file = fs_join(model_dir, "config.json");
  json_t *config = json_read(file, err);
  int rc = -1;
  if (config && !json_is_object(config))
    error_set(err, "%s: expected an object", file);
  else if (config)
    rc = read_keys(config, file, out, err);
  json_decref(config);
  free(file);
  return rc;
}
