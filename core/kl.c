/* The three KL estimators and the clamp that keeps every exp of a log-ratio finite. */
#include "core/kl.h"

#include <math.h>
#include <string.h>

#include "core/error.h"

#define MAX_LOG_RATIO 20.0f

int kl_kind_parse(const char *name) {
  static const char *const names[] = {"k1", "k2", "k3"};
  for (int i = 0; i < 3; i++)
    if (strcmp(name, names[i]) == 0) return KL_K1 + i;
  return -1;
}

float log_ratio_clamp(float x) {
  if (x > MAX_LOG_RATIO) return MAX_LOG_RATIO;
  if (x < -MAX_LOG_RATIO) return -MAX_LOG_RATIO;
  return x;
}

float kl_estimate(KlKind kind, float logp, float logq) {
  float logr = logp - logq;
  switch (kind) {
    case KL_K1:
      return logr;
    case KL_K2:
      return 0.5f * logr * logr;
    case KL_K3:
      /* expm1 keeps the digits of small ratios, where exp(-logr) - 1 would cancel. */
      return expm1f(log_ratio_clamp(-logr)) + logr;
  }
  die("unknown KL estimator %d", (int)kind);
}

float kl_gradient(KlKind kind, float logp, float logq) {
  float logr = logp - logq;
  switch (kind) {
    case KL_K1:
      return 1.0f;
    case KL_K2:
      return logr;
    case KL_K3:
      return -expm1f(log_ratio_clamp(-logr));
  }
  die("unknown KL estimator %d", (int)kind);
}
