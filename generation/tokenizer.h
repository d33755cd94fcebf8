/* Inside of the tokenizer, shared by its three files: tokenizer.c (load), tokenizer_config.c (the
 * JSON files beside the model), tokenizer_text.c (encode, decode). */
#ifndef GENERATION_TOKENIZER_H
#define GENERATION_TOKENIZER_H

#include "generation/generation.h"
#include "generation/sentencepiece.h"
#include "generation/spm_file.h"

/* A token that is spelled in text and never cut: a control piece of the model, or a token that the
 * JSON files add. */
typedef struct Added {
  char *text;
  size_t len;
  int32_t id;
  bool special;        /* only TOK_SPECIAL finds it in text; decode leaves it out */
  bool lstrip, rstrip; /* eats the blanks before, behind it */
} Added;

struct Tokenizer {
  Spm *spm;
  SpmTraits traits;
  int vocab_size;
  int bos, eos;
  bool adds_bos;
  bool prefix;      /* a text starts with the space that decode takes away again */
  bool prefix_each; /* so does every piece of text behind a special token ("legacy") */
  Added *added;     /* longest first */
  int n_added;
  int32_t *added_of;    /* [vocab_size] index into added, or -1 */
  bool starts[256];     /* bytes that some added token starts with */
  int32_t byte_id[256]; /* byte-fallback tokens, -1: none */
};

/* Adds a token, or widens the one that is spelled so; an id of its own is the caller's care. */
Added *tokenizer_add(Tokenizer *t, const char *text, size_t len, int32_t id, bool special);
/* The id of any token spelled so, added or a piece of the model; -1: none. */
int tokenizer_find(const Tokenizer *t, const char *text, size_t len);
/* Reads tokenizer_config.json, special_tokens_map.json and added_tokens.json of a folder; each may
 * be absent. */
int tokenizer_read_config(Tokenizer *t, const char *dir, Error *err);

#endif
