/* Pre-tokenization: text is cut into words, by regular expressions in turn, and no token reaches
 * over a cut. */
#ifndef GENERATION_PRETOKENIZE_H
#define GENERATION_PRETOKENIZE_H

#include "core/error.h"

/* GPT-2's pattern, which is that of the ByteLevel step too; and Qwen2's. */
extern const char pretokenize_gpt2[], pretokenize_qwen2[];

typedef enum SplitKind {
  SPLIT_REGEX,  /* a pattern in Oniguruma's (Ruby's) syntax, as tokenizer.json has them */
  SPLIT_LITERAL /* a text as it is */
} SplitKind;

/* How much of a pattern messages show: the reason comes behind it and must not be cut off. */
enum { PATTERN_SHOWN = 512 };

typedef struct Pretokenizer Pretokenizer;
Pretokenizer *pretokenizer_create(void); /* without a step: a text is one word */
void pretokenizer_free(Pretokenizer *p);
/* One more step: every match becomes a word of its own, and so does what lies between two matches;
 * with `covers`, text that lies between matches is refused. */
int pretokenizer_add(Pretokenizer *p, const char *pattern, size_t len, SplitKind kind, bool covers,
                     Error *err);
int pretokenizer_steps(const Pretokenizer *p);

/* Calls use for every word of the text (valid UTF-8, not empty), in order; words are parts of
 * text. -1 when use says so, or a pattern gives up. Errors name the byte, counted from `offset`. */
typedef int (*WordUse)(void *ctx, const char *word, size_t len, Error *err);
int pretokenize(const Pretokenizer *p, const char *text, size_t len, size_t offset, WordUse use,
                void *ctx, Error *err);

/* A pattern of Oniguruma in PCRE2's spelling, malloc'ed, *out_len bytes; NULL, naming the place,
 * for what the two do not read alike. */
char *pretokenize_regex(const char *pattern, size_t len, size_t *out_len, Error *err);

#endif
