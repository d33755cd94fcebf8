/* Patterns through PCRE2. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "reward/pattern.h"

#include <ctype.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* Steps of one match: a few tenths of a second, thousands of times what a sound pattern needs. */
#define MATCH_LIMIT 10000000
#define HEAP_LIMIT_KIB (64 * 1024)

struct Pattern {
  char *text; /* as given, for messages */
  bool whole;
  pcre2_code *code;
  pcre2_match_data *data;
  pcre2_match_context *limits;
};

/* text with everything quoted that could be an operator, between two "no word character here". */
static char *word_regex(const char *text) {
  static const char before[] = "(?<!\\w)", after[] = "(?!\\w)";
  char *regex = mem_alloc(2 * strlen(text) + sizeof before + sizeof after, 1), *to = regex;
  to = stpcpy(to, before);
  for (const char *c = text; *c; c++) {
    if (isascii((unsigned char)*c) && !isalnum((unsigned char)*c)) *to++ = '\\';
    *to++ = *c;
  }
  strcpy(to, after);
  return regex;
}

Pattern *pattern_create(const char *text, PatternKind kind, bool ignore_case, Error *err) {
  uint32_t options = PCRE2_UTF | PCRE2_MATCH_INVALID_UTF | (ignore_case ? PCRE2_CASELESS : 0u);
  if (kind == PATTERN_WHOLE)
    options |= PCRE2_LITERAL | PCRE2_ANCHORED;
  else
    options |= PCRE2_UCP;
  char *regex = kind == PATTERN_WORD ? word_regex(text) : mem_strdup(text);
  int code;
  PCRE2_SIZE place;
  Pattern *p = mem_zalloc(1, sizeof *p);
  p->code = pcre2_compile((PCRE2_SPTR)regex, PCRE2_ZERO_TERMINATED, options, &code, &place, NULL);
  free(regex);
  if (!p->code) {
    PCRE2_UCHAR why[256];
    pcre2_get_error_message(code, why, sizeof why);
    error_set(err, "pattern \"%s\": %s at byte %zu", text, (const char *)why, (size_t)place);
    pattern_free(p);
    return NULL;
  }
  p->text = mem_strdup(text);
  p->whole = kind == PATTERN_WHOLE;
  p->data = pcre2_match_data_create_from_pattern(p->code, NULL);
  p->limits = pcre2_match_context_create(NULL);
  if (!p->data || !p->limits) die("out of memory for pattern \"%s\"", text);
  pcre2_set_match_limit(p->limits, MATCH_LIMIT);
  pcre2_set_heap_limit(p->limits, HEAP_LIMIT_KIB);
  return p;
}

int pattern_match(const Pattern *p, const char *subject, size_t len, Error *err) {
  int rc = pcre2_match(p->code, (PCRE2_SPTR)subject, len, 0, 0, p->data, p->limits);
  /* PCRE2 also takes the place before an invalid byte for an end, so the extent is looked at. */
  if (rc >= 0) return !p->whole || pcre2_get_ovector_pointer(p->data)[1] == len;
  if (rc == PCRE2_ERROR_NOMATCH) return 0;
  PCRE2_UCHAR why[256];
  pcre2_get_error_message(rc, why, sizeof why);
  return error_set(err, "pattern \"%s\" on a text of %zu bytes: %s", p->text, len,
                   (const char *)why);
}

void pattern_free(Pattern *p) {
  if (!p) return;
  pcre2_match_context_free(p->limits);
  pcre2_match_data_free(p->data);
  pcre2_code_free(p->code);
  free(p->text);
  free(p);
}
