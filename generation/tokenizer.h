/* Inside of the tokenizer, shared by its files: tokenizer.c (load), tokenizer_config.c (the JSON
 * files beside any model), tokenizer_json*.c and bpe_*.c (byte-level BPE), tokenizer_text.c
 * (encode, decode). A tokenizer has one of two engines, SentencePiece or byte-level BPE; added
 * tokens, roles and BOS are the same for both. */
#ifndef GENERATION_TOKENIZER_H
#define GENERATION_TOKENIZER_H

#include "core/json.h"
#include "generation/bpe.h"
#include "generation/generation.h"
#include "generation/pretokenize.h"
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
  bool single_word;    /* only where no word character touches it */
  bool normalized;     /* looked for in what the others leave, in its normal form (BPE) */
} Added;

/* Text is looked through for added tokens once, or twice where some of them are `normalized`. */
enum { ADDED_PASSES = 2 };

struct Tokenizer {
  Spm *spm; /* NULL: byte-level BPE */
  SpmTraits traits;
  Bpe *bpe;             /* NULL: SentencePiece */
  Pretokenizer *words;  /* with bpe */
  bool nfc;             /* with bpe: text is brought to normal form C */
  bool whole_words;     /* with bpe: ignore_merges */
  int32_t template_bos; /* with bpe: the token that the post_processor puts first, -1: none */
  int vocab_size;
  int bos, eos;
  bool adds_bos;
  bool prefix;      /* a text starts with a space, which SentencePiece takes away again */
  bool prefix_each; /* so does every piece of text behind a special token ("legacy") */
  Added *added;     /* longest first */
  int n_added;
  int32_t *added_of;              /* [vocab_size] index into added, or -1 */
  bool starts[ADDED_PASSES][256]; /* bytes that some added token of that pass starts with */
  bool looks[ADDED_PASSES];       /* there are such tokens */
  int32_t byte_id[256];           /* byte-fallback tokens, -1: none */
};

/* ---- tokenizer.c ---- */

/* Adds a token, or widens the one that is spelled so; an id of its own is the caller's care. */
Added *tokenizer_add(Tokenizer *t, const char *text, size_t len, int32_t id, bool special);
/* The id of any token spelled so, added or a piece of the model; -1: none. */
int tokenizer_find(const Tokenizer *t, const char *text, size_t len);
/* A token with a role (BOS, EOS, ..) becomes special. Where text itself may come to be this token,
 * as when a byte or a merged word has the role, it stays what it is. */
void tokenizer_make_special(Tokenizer *t, const char *text, int32_t id);
/* Which look through the text finds the token. */
int tokenizer_pass(const Tokenizer *t, const Added *a);

/* ---- tokenizer_config.c ---- */

/* Reads tokenizer_config.json, special_tokens_map.json and added_tokens.json of a folder; each may
 * be absent. */
int tokenizer_read_config(Tokenizer *t, const char *dir, Error *err);
/* Each added token is compared with all others: more than this many are refused. */
enum { MOST_ADDED = 16384 };
int tokenizer_check_added(size_t n, const char *file, Error *err);
/* Adds {"content": "..", "special": true, ..}. */
int tokenizer_read_added(Tokenizer *t, const json_t *token, json_int_t id, const char *file,
                         Error *err);

/* ---- byte-level BPE: bpe_files.c, bpe_class.c, bpe_text.c, tokenizer_json*.c ---- */

/* Each fills an empty tokenizer from the file of that name. */
int tokenizer_load_json(Tokenizer *t, const char *file, Error *err);
int tokenizer_load_vocab(Tokenizer *t, const char *file, Error *err);
/* What the tokenizer_class means (NULL: none is given). */
int tokenizer_apply_class(Tokenizer *t, const char *name, const char *file, Error *err);
/* Text in which no added token is to be found; offset: of it in the caller's text, for messages. */
int tokenizer_encode_bytes(const Tokenizer *t, const char *text, size_t len, size_t offset,
                           bool prefix, TokenList *out, Error *err);

/* normalizer, pre_tokenizer and decoder; then, when the vocabulary is known, post_processor. */
int tokenizer_read_steps(Tokenizer *t, const json_t *root, const char *file, Error *err);
int tokenizer_read_template(Tokenizer *t, const json_t *root, const char *file, Error *err);

/* A JSON file in which no name comes twice; the caller json_decref()s. */
json_t *bpe_read_json(const char *file, Error *err);
/* {key: id}; errors start with `place`. */
int bpe_read_vocab(Bpe *b, json_t *vocab, const char *place, Error *err);
/* "a b" */
int bpe_read_merge(Bpe *b, const char *merge, size_t len, Error *err);

#endif
