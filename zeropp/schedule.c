/* schedule: the learning rate as a pure function of the step, so that a resumed run needs nothing
 * but its step. */
#include <math.h>
#include <string.h>

#include "zeropp/zeropp.h"

/* 1 before the decay, falling to 0 exactly on the last step. */
static double remaining(int64_t step, int64_t first, int64_t last, bool cosine) {
  if (step >= last) return last > 0 ? 0 : 1;
  if (step <= first) return 1;
  double x = (double)(step - first) / (double)(last - first);
  return cosine ? 0.5 * (1 + cos(M_PI * x)) : 1 - x;
}

double optimizer_lr(const OptimizerConfig *o, int64_t step, int64_t total) {
  bool cosine = strcmp(o->schedule, "cosine") == 0, linear = strcmp(o->schedule, "linear") == 0;
  require(cosine || linear || strcmp(o->schedule, "constant") == 0);
  require(step >= 0);
  if (step < o->warmup_steps) return o->lr * (double)(step + 1) / (double)o->warmup_steps;
  if (!cosine && !linear) return o->lr;
  double share = remaining(step, o->warmup_steps, total - 1, cosine);
  return o->lr * (o->min_lr_ratio + (1 - o->min_lr_ratio) * share);
}

AdamW optimizer_adamw(const OptimizerConfig *o, double lr) {
  return (AdamW){.lr = (float)lr,
                 .beta1 = (float)o->beta1,
                 .beta2 = (float)o->beta2,
                 .eps = (float)o->eps,
                 .weight_decay = (float)o->weight_decay};
}
