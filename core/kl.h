/* Estimators of the KL divergence from samples (Schulman 2020, "Approximating KL Divergence"). One
 * copy of the formulas: reward shaping, the KL controller, the policy loss and the statistics all
 * use it, so that the KL that is logged is the KL that was used.
 *
 * logr = logp - logq of a token drawn from p: k1 = logr, k2 = logr^2 / 2,
 * k3 = exp(-logr) - 1 + logr. */
#ifndef CORE_KL_H
#define CORE_KL_H

/* The values are those of the names: KL_K3 == 3. */
typedef enum KlKind { KL_K1 = 1, KL_K2 = 2, KL_K3 = 3 } KlKind;

int kl_kind_parse(const char *name); /* "k1" | "k2" | "k3"; -1 unknown */
/* The exponent of k3 is clamped to +-20. */
float kl_estimate(KlKind kind, float logp, float logq);
/* d kl / d logp. Beyond the clamp k3's slope stays at its value there: it neither overflows nor
 * changes its sign, so a token that has become very unlikely is still pulled back. */
float kl_gradient(KlKind kind, float logp, float logq);

/* x limited to +-20, so that exp(x) is finite and sums of it are too. NaN stays NaN: what is broken
 * must reach the gradient check, not disappear in a clamp. */
float log_ratio_clamp(float x);

#endif
