/* What the tests of the data loaders share: recipes in two lines, files in one, the tokenizer of
 * stories260K. */
#ifndef DATA_TEST_H
#define DATA_TEST_H

#include <stdio.h>

#include "core/fs.h"
#include "orchestrator/orchestrator.h"
#include "tests/test.h"

static inline Tokenizer *data_tokenizer(void) {
  Error err = {""};
  Tokenizer *t = tokenizer_load(test_path("data/stories260K"), &err);
  if (!t) fail_msg("%s", err.msg);
  return t;
}

/* A recipe of one stage (its data under `data`), with more top-level lines behind. */
static inline Recipe *data_recipe(const char *stage, const char *data, const char *more) {
  Error err = {""};
  char *text = mem_printf(
      "run: {directory: out, seed: 5}\nstages: [%s]\n%s"
      "models: {actor: {init: {hidden_size: 8, layers: 1, heads: 1, ffn: 8,"
      " max_positions: 8192}}}\n"
      "tokenizer: {path: %s}\ndata:\n  %s\n%s\n",
      stage, strcmp(stage, "ppo") ? "" : "rewards: [{kind: length, target: 5}]\n",
      test_path("data/stories260K"), data, more);
  Recipe *r = recipe_parse(text, strlen(text), "recipe.yaml", NULL, 0, &err);
  if (!r) fail_msg("%s\n%s", err.msg, text);
  free(text);
  return r;
}

static inline const char *data_file(const char *name, const char *text) {
  return test_write(name, text, strlen(text));
}

/* Fails unless sequence b is these pieces one after another: BOS, EOS, or text that is encoded as
 * the start of a sequence or as its continuation. */
typedef struct Piece {
  enum { BOS, EOS, START, GO_ON } kind;
  const char *text;
} Piece;

static inline int data_expect(const Tokenizer *t, const TokenList *all, const int32_t *offsets,
                              int b, const Piece *pieces, int n) {
  Error err = {""};
  TokenList want = {0};
  int last = 0; /* length up to the last text */
  for (int i = 0; i < n; i++) {
    last = want.n;
    if (pieces[i].kind == BOS) token_list_push(&want, tokenizer_bos(t));
    if (pieces[i].kind == EOS) token_list_push(&want, tokenizer_eos(t));
    if (!pieces[i].text) continue;
    int flags = pieces[i].kind == START ? 0 : TOK_CONTINUE;
    if (tokenizer_encode(t, pieces[i].text, strlen(pieces[i].text), flags, &want, &err))
      fail_msg("%s", err.msg);
  }
  assert_int_equal(offsets[b + 1] - offsets[b], want.n);
  assert_memory_equal(all->v + offsets[b], want.v, (size_t)want.n * sizeof *want.v);
  token_list_free(&want);
  return last;
}
#define PIECES(...) \
  (const Piece[]){__VA_ARGS__}, sizeof((const Piece[]){__VA_ARGS__}) / sizeof(Piece)

#endif
