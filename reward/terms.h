/* Inside of reward/: one compiled term of the reward, and what the kinds of terms offer. */
#ifndef REWARD_TERMS_H
#define REWARD_TERMS_H

#include "reward/pattern.h"
#include "reward/reward.h"

typedef struct TermKind TermKind;

typedef struct Term {
  const TermKind *kind;
  double weight;
  int64_t target; /* length */
  Pattern **patterns;
  int n_patterns;         /* words: one each; regex: one */
  bool absent;            /* words */
  bool ignore_case;       /* exact */
  char *command;          /* command */
  double timeout_seconds; /* command */
} Term;

struct TermKind {
  const char *name;
  /* Checks the recipe's row and compiles it into t. */
  int (*setup)(Term *t, const RewardTerm *row, Error *err);
  /* value[i] of n inputs; NULL for the reward model, which is not ours to run. */
  int (*eval)(const Term *t, const RewardInput *in, int n, double *value, Error *err);
};

/* terms_text.c */
int term_length_setup(Term *t, const RewardTerm *row, Error *err);
int term_length_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err);
int term_words_setup(Term *t, const RewardTerm *row, Error *err);
int term_words_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err);
int term_regex_setup(Term *t, const RewardTerm *row, Error *err);
int term_regex_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err);
int term_exact_setup(Term *t, const RewardTerm *row, Error *err);
int term_exact_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err);
/* terms_command.c */
int term_command_setup(Term *t, const RewardTerm *row, Error *err);
int term_command_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err);

#endif
