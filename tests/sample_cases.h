/* What draws must look like, for the samplers of both devices: cases for each filter and for
 * filters together, the distribution by its definition in double precision, and a chi-square test.
 */
#ifndef SAMPLE_CASES_H
#define SAMPLE_CASES_H

#include <math.h>
#include <string.h>

#include "core/rng.h"
#include "kernels/kernels.h"

enum { SAMPLE_V = 37, SAMPLE_W = (SAMPLE_V + 7) / 8, SAMPLE_NEWEST = 20 };

typedef struct SampleCase {
  SampleParams p;
  bool ban;
} SampleCase;

static const SampleCase sample_cases[] = {
    {{1, 0, 1, false, 0, 1}, false},
    {{0.7F, 0, 1, false, 0, 1}, false},
    {{2, 0, 1, false, 0, 1}, true},
    {{1, 5, 1, false, 0, 1}, false},
    {{1, 1, 1, false, 0, 1}, false},
    {{1, 37, 1, false, 0, 1}, false},
    {{1, 0, 0.8F, false, 0, 1}, false},
    {{1, 0, 0.05F, false, 0, 1}, false},
    {{1, 0, 1, false, 0.1F, 1}, false},
    {{1.5F, 0, 1, false, 0.02F, 1}, true},
    {{1, 0, 1, false, 1, 1}, false},
    {{1, 0, 1, false, 0, 1.3F}, false},
    {{1, 0, 1, false, 0, 0.8F}, false},
    {{1.2F, 0, 1, false, 0, 2}, true},
    {{0.9F, 12, 0.7F, false, 0, 1}, true},
    {{1, 100, 0.95F, false, 0, 1}, true},
    {{1.4F, 9, 1, false, 0.15F, 1}, false},
    {{1.4F, 0, 0.9F, false, 0.05F, 1}, false},
    {{1, 6, 1, false, 0, 1.5F}, false},
    {{1, 0, 0.85F, false, 0, 1.2F}, true},
    {{1, 0, 1, false, 0.08F, 1.4F}, false},
    {{0.8F, 20, 0.9F, false, 0.03F, 1.25F}, true},
    {{2, 15, 0.97F, false, 0.2F, 0.9F}, false},
};
enum { SAMPLE_CASES = sizeof sample_cases / sizeof sample_cases[0] };

/* Both signs; ids 10 and 20 weigh the same but for the penalty, then the lower id comes first. */
static inline void sample_logits(float *x) {
  for (int j = 0; j < SAMPLE_V; j++) x[j] = 1.5F * rng_normal(9, 1, (uint64_t)j);
  x[20] = x[10];
}

static inline bool sample_banned(int id) { return id % 5 == 2; }
/* What a sequence has had: every third id, and the newest, which is none of them. */
static inline bool sample_had(int id) { return id % 3 == 1; }

static inline void sample_bits(uint8_t *bits) {
  memset(bits, 0, SAMPLE_W);
  for (int j = 0; j < SAMPLE_V; j++) bits[j / 8] |= (uint8_t)(sample_had(j) << j % 8);
}

/* Penalty, bans, temperature; then sort, cut to top_k, renormalise, keep the smallest head whose
 * mass reaches top_p, then what is likely enough beside the likeliest; renormalise. */
static inline void sample_distribution(const float *logits, const SampleCase *c, double *prob) {
  bool taken[SAMPLE_V] = {false};
  int order[SAMPLE_V], n = 0;
  double x[SAMPLE_V], sum = 0, mass = 0, kept = 0, penalty = (double)c->p.repetition_penalty;
  for (int j = 0; j < SAMPLE_V; j++) {
    x[j] = (double)logits[j];
    if (sample_had(j) || j == SAMPLE_NEWEST) x[j] = x[j] < 0 ? x[j] * penalty : x[j] / penalty;
    x[j] /= (double)c->p.temperature;
  }
  for (;; n++) {
    int best = -1;
    for (int j = 0; j < SAMPLE_V; j++)
      if (!taken[j] && !(c->ban && sample_banned(j)) && (best < 0 || x[j] > x[best])) best = j;
    if (best < 0 || (c->p.top_k > 0 && n >= c->p.top_k)) break;
    taken[best] = true;
    order[n] = best;
  }
  for (int j = 0; j < SAMPLE_V; j++) prob[j] = 0;
  for (int i = 0; i < n; i++) sum += prob[order[i]] = exp(x[order[i]] - x[order[0]]);
  for (int i = 0; i < n; i++) {
    double p = prob[order[i]];
    bool keep =
        i == 0 || ((c->p.top_p >= 1 || mass < (double)c->p.top_p * sum) && p >= (double)c->p.min_p);
    mass += p;
    if (keep) kept += p;
    if (!keep) prob[order[i]] = 0;
  }
  for (int j = 0; j < SAMPLE_V; j++) prob[j] /= kept;
}

/* Upper bound of chi-square with n degrees of freedom at a probability of about 1e-6
 * (Wilson-Hilferty with 4.75 standard deviations); seeds are fixed, so this either holds or not. */
static inline double sample_chi_bound(int n) {
  double a = 2.0 / (9.0 * n), c = 1 - a + 4.75 * sqrt(a);
  return n * c * c * c;
}

/* Whether counts of draws follow the distribution; ids that are rarely expected are one cell. Chi
 * and its bound are infinity and 0 where one was drawn that has no chance. */
static inline bool sample_follows(const int *count, const double *prob, double *chi,
                                  double *bound) {
  enum { RARE = 5 };
  int cells = 0;
  double draws = 0, rare = 0, rare_drawn = 0;
  *chi = *bound = 0;
  for (int j = 0; j < SAMPLE_V; j++) draws += count[j];
  for (int j = 0; j < SAMPLE_V; j++) {
    double expected = prob[j] * draws, off = count[j] - expected;
    if (expected <= 0 && count[j] > 0) *chi = INFINITY;
    if (expected < RARE) {
      rare += expected;
      rare_drawn += count[j];
      continue;
    }
    *chi += off * off / expected;
    cells++;
  }
  if (rare > 0) *chi += (rare_drawn - rare) * (rare_drawn - rare) / rare;
  cells += rare > 0;
  if (cells > 1 && *chi < INFINITY) *bound = sample_chi_bound(cells - 1);
  return cells > 1 ? *chi <= *bound : *chi <= 0;
}

#endif
