/* pattern: PCRE2 with the options that rewards want. Subjects may hold any bytes: what is not valid
 * UTF-8 in them matches nothing. A match that backtracks without end is stopped by PCRE2's limits
 * and is an error. */
#ifndef REWARD_PATTERN_H
#define REWARD_PATTERN_H

#include "core/error.h"

typedef struct Pattern Pattern;
typedef enum PatternKind {
  PATTERN_REGEX, /* found anywhere */
  PATTERN_WORD,  /* these characters as they are, no word character on either side */
  PATTERN_WHOLE  /* these characters as they are, and nothing else */
} PatternKind;

/* NULL on error: the message quotes the pattern and points at the place. */
Pattern *pattern_create(const char *text, PatternKind kind, bool ignore_case, Error *err);
/* 1: matches, 0: does not, -1: error. */
int pattern_match(const Pattern *p, const char *subject, size_t len, Error *err);
void pattern_free(Pattern *p);

#endif
