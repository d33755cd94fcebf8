/* Inside of generation/chat*.c. */
#ifndef GENERATION_CHAT_INTERNAL_H
#define GENERATION_CHAT_INTERNAL_H

#include "generation/chat.h"
#include "generation/jinja.h"
#include "generation/tokenizer.h"

typedef struct ChatFormat {
  const char *name, *text;
  const char *tokens[5]; /* special tokens that the tokenizer must have; ends with NULL */
  bool roles;            /* needs BOS and EOS as well */
} ChatFormat;
const ChatFormat *chat_format(const char *name); /* NULL: no such format */

struct Chat {
  JinjaTemplate *template;
  const Tokenizer *tokenizer;
  json_t *roles; /* bos_token, eos_token, ...: how the tokens are spelled */
};

/* Bytes of the longest special token at the start of the text; 0: none. */
size_t chat_special_at(const Tokenizer *t, const char *text, size_t len);
/* The special token that ends the text, none of it content; -1: none. */
int chat_special_end(const Tokenizer *t, const ChatText *text);

#endif
