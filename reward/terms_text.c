/* Terms that look at the answer's text or length. */
#include <stdlib.h>
#include <string.h>

#include "reward/terms.h"

/* ---- length: -|n - target| / target ---- */

int term_length_setup(Term *t, const RewardTerm *row, Error *err) {
  if (row->target <= 0)
    return error_set(err, "target is %lld, expected a number of tokens above 0",
                     (long long)row->target);
  t->target = row->target;
  return 0;
}

int term_length_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err) {
  (void)err;
  for (int i = 0; i < n; i++) {
    int64_t off = in[i].response_tokens - t->target;
    value[i] = -(double)(off < 0 ? -off : off) / (double)t->target;
  }
  return 0;
}

/* ---- words: how many of them occur, each counted once ---- */

static int add_pattern(Term *t, const char *text, PatternKind kind, bool ignore_case, Error *err) {
  Pattern *p = pattern_create(text, kind, ignore_case, err);
  if (!p) return -1;
  t->patterns = mem_grow(t->patterns, (size_t)t->n_patterns + 1, sizeof(Pattern *));
  t->patterns[t->n_patterns++] = p;
  return 0;
}

int term_words_setup(Term *t, const RewardTerm *row, Error *err) {
  if (row->n_words <= 0) return error_set(err, "words is empty, expected at least one word");
  for (int i = 0; i < row->n_words; i++) {
    if (!row->words[i][0]) return error_set(err, "words[%d] is empty, expected a word", i);
    if (add_pattern(t, row->words[i], PATTERN_WORD, row->ignore_case, err)) return -1;
  }
  t->absent = row->absent;
  return 0;
}

int term_words_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err) {
  for (int i = 0; i < n; i++) {
    int present = 0;
    for (int k = 0; k < t->n_patterns; k++) {
      int rc = pattern_match(t->patterns[k], in[i].response_text, in[i].response_len, err);
      if (rc < 0) return -1;
      present += rc;
    }
    value[i] = t->absent ? -present : present;
  }
  return 0;
}

/* ---- regex: 1 where the pattern is found ---- */

int term_regex_setup(Term *t, const RewardTerm *row, Error *err) {
  if (!row->pattern || !row->pattern[0])
    return error_set(err, "pattern is empty, expected a regular expression");
  return add_pattern(t, row->pattern, PATTERN_REGEX, row->ignore_case, err);
}

int term_regex_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err) {
  for (int i = 0; i < n; i++) {
    int rc = pattern_match(t->patterns[0], in[i].response_text, in[i].response_len, err);
    if (rc < 0) return -1;
    value[i] = rc;
  }
  return 0;
}

/* ---- exact: 1 where the response is the expected answer, blanks around both left out ---- */

int term_exact_setup(Term *t, const RewardTerm *row, Error *err) {
  (void)err;
  t->ignore_case = row->ignore_case;
  return 0;
}

static const char *trim(const char *s, size_t *len) {
  static const char blanks[] = " \t\r\n\v\f";
  while (*len > 0 && memchr(blanks, s[*len - 1], sizeof blanks - 1)) --*len;
  while (*len > 0 && memchr(blanks, *s, sizeof blanks - 1)) s++, --*len;
  return s;
}

static int same_ignoring_case(const char *got, size_t got_len, const char *want, size_t want_len,
                              Error *err) {
  char *text = mem_alloc(want_len + 1, 1);
  memcpy(text, want, want_len);
  text[want_len] = 0;
  Pattern *p = pattern_create(text, PATTERN_WHOLE, true, err);
  free(text);
  int rc = p ? pattern_match(p, got, got_len, err) : -1;
  pattern_free(p);
  return rc;
}

int term_exact_eval(const Term *t, const RewardInput *in, int n, double *value, Error *err) {
  for (int i = 0; i < n; i++) {
    if (!in[i].answer)
      return error_set(err, "no answer to compare with for the prompt \"%.60s\"",
                       in[i].prompt_text);
    size_t got_len = in[i].response_len, want_len = strlen(in[i].answer);
    const char *got = trim(in[i].response_text, &got_len), *want = trim(in[i].answer, &want_len);
    int same = got_len == want_len && memcmp(got, want, got_len) == 0;
    if (!same && t->ignore_case) same = same_ignoring_case(got, got_len, want, want_len, err);
    if (same < 0) return -1;
    value[i] = same;
  }
  return 0;
}
