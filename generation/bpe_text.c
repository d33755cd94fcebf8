/* Text to ids by byte-level BPE: cut into words, and each word merged on its own. Bytes that are
 * not UTF-8 go around the patterns, every run of them a word of its own; as every byte has a token,
 * any text comes back as it was (in normal form C where the tokenizer asks for that). */
#include <stdlib.h>
#include <string.h>

#include "generation/tokenizer.h"
#include "generation/unicode.h"

typedef struct Encoding {
  const Bpe *bpe;
  BpeWork work;
  TokenList *out;
  const char *text;
  size_t offset;
} Encoding;

static int encode_word(void *ctx, const char *word, size_t len, Error *err) {
  Encoding *e = ctx;
  size_t bad;
  if (bpe_encode_word(e->bpe, &e->work, word, len, e->out, &bad) == 0) return 0;
  return error_set(err, "byte %zu of the text is 0x%02X, and the vocabulary has no token for it",
                   e->offset + (size_t)(word - e->text) + bad, (uint8_t)word[bad]);
}

static size_t broken_run(const char *text, size_t len) {
  size_t at = 0;
  while (at < len && !utf8_char((const uint8_t *)text + at, len - at)) at++;
  return at;
}

static int encode_runs(const Tokenizer *t, Encoding *e, size_t len, Error *err) {
  for (size_t at = 0; at < len;) {
    size_t run = utf8_run(e->text + at, len - at);
    if (run > 0 && pretokenize(t->words, e->text + at, run, e->offset + at, encode_word, e, err))
      return -1;
    at += run;
    size_t broken = broken_run(e->text + at, len - at);
    if (broken > 0 && encode_word(e, e->text + at, broken, err)) return -1;
    at += broken;
  }
  return 0;
}

int tokenizer_encode_bytes(const Tokenizer *t, const char *text, size_t len, size_t offset,
                           bool prefix, TokenList *out, Error *err) {
  Encoding e = {.bpe = t->bpe, .out = out, .text = text, .offset = offset};
  char *spaced = prefix && len > 0 && *text != ' ' ? mem_alloc(len + 1, 1) : NULL;
  if (spaced) {
    *spaced = ' ';
    memcpy(spaced + 1, text, len++);
    e.text = spaced;
  }
  int rc = encode_runs(t, &e, len, err);
  bpe_work_free(&e.work);
  free(spaced);
  return rc;
}
