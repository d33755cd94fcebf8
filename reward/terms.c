/* The reward's terms: the table of kinds, and the weighted sum. */
#include "reward/terms.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct RewardTerms {
  int n;
  Term *term;
};

static int term_model_setup(Term *t, const RewardTerm *row, Error *err) {
  (void)t, (void)row, (void)err;
  return 0;
}

static const TermKind kinds[] = {
    {"model", term_model_setup, NULL},
    {"length", term_length_setup, term_length_eval},
    {"words", term_words_setup, term_words_eval},
    {"regex", term_regex_setup, term_regex_eval},
    {"exact", term_exact_setup, term_exact_eval},
    {"command", term_command_setup, term_command_eval},
};

static int term_create(Term *t, const RewardTerm *row, Error *err) {
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
    if (strcmp(row->kind, kinds[k].name) == 0) t->kind = &kinds[k];
  if (!t->kind)
    return error_set(err,
                     "unknown kind \"%s\", expected model, length, words, regex, exact or command",
                     row->kind);
  if (!isfinite(row->weight))
    return error_set(err, "weight is %g, expected a finite number", row->weight);
  t->weight = row->weight;
  return t->kind->setup(t, row, err);
}

RewardTerms *reward_terms_create(const RewardTerm *terms, int n, Error *err) {
  RewardTerms *t = mem_zalloc(1, sizeof *t);
  t->term = mem_zalloc((size_t)n, sizeof *t->term);
  t->n = n;
  for (int i = 0; i < n; i++) {
    if (term_create(&t->term[i], &terms[i], err) == 0) continue;
    error_prefix(err, "rewards[%d] (%s)", i, terms[i].kind);
    reward_terms_free(t);
    return NULL;
  }
  return t;
}

void reward_terms_free(RewardTerms *t) {
  if (!t) return;
  for (int i = 0; i < t->n; i++) {
    for (int k = 0; k < t->term[i].n_patterns; k++) pattern_free(t->term[i].patterns[k]);
    free(t->term[i].patterns);
    free(t->term[i].command);
  }
  free(t->term);
  free(t);
}

static int add_term(const Term *t, const RewardInput *in, int n, double *value, double *sum,
                    Error *err) {
  if (t->kind->eval(t, in, n, value, err)) return -1;
  for (int i = 0; i < n; i++) {
    sum[i] += t->weight * value[i];
    if (!isfinite((float)sum[i]))
      return error_set(err, "value %g at weight %g is out of range", value[i], t->weight);
  }
  return 0;
}

int reward_terms_eval(RewardTerms *t, const RewardInput *in, int n, float *out, Error *err) {
  double *value = mem_zalloc((size_t)n, sizeof *value), *sum = mem_zalloc((size_t)n, sizeof *sum);
  int rc = 0;
  for (int i = 0; i < t->n && rc == 0 && n > 0; i++) {
    const Term *term = &t->term[i];
    if (!term->kind->eval) continue;
    rc = add_term(term, in, n, value, sum, err);
    if (rc) error_prefix(err, "rewards[%d] (%s)", i, term->kind->name);
  }
  for (int i = 0; i < n && rc == 0; i++) out[i] = (float)sum[i];
  free(value);
  free(sum);
  return rc;
}
