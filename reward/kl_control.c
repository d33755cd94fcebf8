/* The controller of the KL coefficient (Ziegler et al. 2019, "Fine-Tuning Language Models from
 * Human Preferences", section 2.2). */
#include <math.h>

#include "reward/reward.h"

#define ERROR_CLIP 0.2

void kl_controller_update(KlController *c, double kl, int64_t n) {
  if (!c->adaptive || !isfinite(kl)) return;
  double error = kl / c->target - 1.0;
  error = fmin(fmax(error, -ERROR_CLIP), ERROR_CLIP);
  double factor = 1.0 + error * (double)n / c->horizon;
  require(factor > 0);
  c->coef *= factor;
}
