/* A template as tokens. Inside of generation/jinja_*.c. */
#ifndef GENERATION_JINJA_LEXER_H
#define GENERATION_JINJA_LEXER_H

#include "generation/jinja_value.h"

typedef enum TokenKind {
  T_END,
  T_DATA, /* text outside of tags */
  T_PRINT_BEGIN,
  T_PRINT_END,
  T_TAG_BEGIN,
  T_TAG_END,
  T_NAME,
  T_STR,
  T_NUMBER,
  T_OPERATOR
} TokenKind;

typedef struct Token {
  TokenKind kind;
  int line;
  Str text;    /* DATA, STR (escapes resolved); NAME and OPERATOR as spelled */
  Value value; /* NUMBER */
} Token;

typedef struct Tokens {
  Token *v; /* ends with END */
  int n;
} Tokens;

enum {
  TEMPLATE_BYTES = 1 << 18 /* longest template */
};

/* Whitespace control as transformers sets it: trim_blocks and lstrip_blocks, no newline at the end
 * of the template. Everything lives in the slab. -1: an error "NAME: line L: ...". */
int jinja_lex(Slab *slab, const char *name, const char *text, size_t len, Tokens *out, Error *err);

/* Literals (jinja_literals.c): NULL, or what is wrong with it. */
/* Resolves the escapes of what stands between quotes; a backslash is never its last byte. */
const char *literal_str(Slab *slab, const char *s, size_t len, Str *out);
/* A number at the start of s, of *taken bytes; whole: without a fraction. */
const char *literal_number(const char *s, size_t len, bool whole, size_t *taken, Value *out);

#endif
