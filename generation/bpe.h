/* Byte-level byte-pair encoding: tokens are byte strings, and a word is spelled by merging its
 * bytes pair by pair, always the pair that comes first in the list of merges (Sennrich et al.,
 * arXiv 1508.07909, over bytes as in GPT-2).
 *
 * Files write the 256 bytes as 256 printable characters (a space is U+0120): a key is a token in
 * that spelling. A key with another character in it is taken as it is; no text is ever merged to
 * such a token.
 *
 * Build: add tokens, then merges (their order is their rank), forbid what text may not become,
 * finish. From then on a Bpe never changes. */
#ifndef GENERATION_BPE_H
#define GENERATION_BPE_H

#include "core/error.h"
#include "generation/generation.h"

enum { BPE_MAX_ID = (1 << 24) - 1 };

typedef struct Bpe Bpe;

Bpe *bpe_create(void);
void bpe_free(Bpe *b);

/* The errors name the token, the merge; the caller prefixes file and place. */
int bpe_add_token(Bpe *b, const char *key, size_t len, int64_t id, Error *err);
int bpe_add_merge(Bpe *b, const char *left, size_t left_len, const char *right, size_t right_len,
                  Error *err);
/* Words do not become this token: neither as a whole nor by a merge. */
void bpe_forbid(Bpe *b, int id);
/* whole_words: a word that is a token is that token, whatever the merges say (ignore_merges). */
void bpe_finish(Bpe *b, bool whole_words);

int bpe_size(const Bpe *b); /* largest id + 1 */
const char *bpe_token(const Bpe *b, int id,
                      size_t *len);                      /* its bytes, borrowed; NULL: no such id */
int bpe_find(const Bpe *b, const char *key, size_t len); /* -1: no such token */
bool bpe_is_byte(const Bpe *b, int id);                  /* a single byte's token */
bool bpe_is_merged(const Bpe *b, int id);                /* some merge makes it */

/* Memory that words of one text use in turn; starts as {0}. */
typedef struct BpeWork {
  struct Symbol *symbols;
  uint64_t *heap;
  size_t cap;
} BpeWork;
void bpe_work_free(BpeWork *w);

/* Appends the ids of a word (any bytes). -1, with *bad the place, at a byte that has no token. */
int bpe_encode_word(const Bpe *b, BpeWork *w, const char *word, size_t len, TokenList *out,
                    size_t *bad);

#endif
