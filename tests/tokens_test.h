/* Ids of a text, a text of ids, and there and back: for every kind of tokenizer. */
#ifndef TOKENS_TEST_H
#define TOKENS_TEST_H

#include <stdio.h>

#include "generation/generation.h"
#include "tests/test.h"

static inline TokenList tokens_of(const Tokenizer *t, const char *s, size_t len, int flags) {
  Error err = {""};
  TokenList ids = {0};
  if (tokenizer_encode(t, s, len, flags, &ids, &err)) fail_msg("%s", err.msg);
  return ids;
}

/* Fails, showing both, unless the text has these ids. */
static inline void expect_ids(const Tokenizer *t, const char *s, int flags, int n,
                              const int32_t *want) {
  TokenList ids = tokens_of(t, s, strlen(s), flags);
  char found[2048] = "", *to = found;
  for (int i = 0; i < ids.n && i < 100; i++) to += sprintf(to, " %d", ids.v[i]);
  if (ids.n != n || (n && memcmp(ids.v, want, (size_t)n * sizeof *want) != 0))
    fail_msg("\"%s\" has the ids%s", s, found);
  token_list_free(&ids);
}
#define IDS(...) \
  (int)(sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t)), (int32_t[]) { __VA_ARGS__ }

static inline void expect_text(const Tokenizer *t, TokenList ids, const char *want,
                               size_t want_len) {
  Error err = {""};
  size_t len;
  char *s = tokenizer_decode(t, ids.v, ids.n, &len, &err);
  if (!s) die("%s", err.msg);
  if (len != want_len || memcmp(s, want, len) != 0)
    fail_msg("decoded \"%s\", expected \"%s\"", s, want);
  free(s);
}

static inline void expect_round_trip(const Tokenizer *t, const char *s, size_t len, int flags) {
  TokenList ids = tokens_of(t, s, len, flags);
  expect_text(t, ids, s, len);
  token_list_free(&ids);
}

#endif
