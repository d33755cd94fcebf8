/* Conversations as text, by a chat template: the checkpoint's own, or one of the built-in formats.
 * The text says of each byte whether a user wrote it, so that tokenizer_encode_template lets only
 * the template spell special tokens, and which parts of it are answers to learn from. */
#ifndef GENERATION_CHAT_H
#define GENERATION_CHAT_H

#include "generation/generation.h"

typedef struct Chat Chat;
/* name: "auto" or the name of a built-in format (chat_builtin). auto: chat_template.jinja of the
 * folder `dir`, else the chat_template of its tokenizer_config.json; an error where it has none. A
 * built-in format is refused where the tokenizer lacks a special token of it. The tokenizer must
 * outlive the chat. */
Chat *chat_open(const char *name, const char *dir, const Tokenizer *t, Error *err);
/* From the text of a template; place: begins errors, "PLACE: line L: ...". */
Chat *chat_parse(const char *place, const char *text, size_t len, const Tokenizer *t, Error *err);
void chat_free(Chat *c);
/* The template of a built-in format; NULL: no such format. */
const char *chat_builtin(const char *name);

typedef struct ChatMessage {
  const char *role; /* system, user, assistant */
  const char *text;
  size_t len;
} ChatMessage;
typedef struct ChatSpan {
  size_t from, to; /* bytes */
} ChatSpan;
typedef struct ChatText {
  char *text, *content; /* content[i] is 1 where text[i] is part of a message */
  size_t len;
  ChatSpan *answers; /* of chat_render_answers */
  int n_answers;
  bool ended; /* the last answer ends with a special token: the template's end of a turn */
} ChatText;
/* open: with the words that open an answer (add_generation_prompt). */
int chat_render(const Chat *c, const ChatMessage *m, int n, bool open, ChatText *out, Error *err);
/* A conversation whose last message is an answer, up to the end of that answer. The answers are its
 * assistant messages with what ends the turn, or, where the template has {% generation %} blocks,
 * what is in those. An error where the template does not tell where an answer begins or ends: the
 * text of the messages before it must be the same with and without it. */
int chat_render_answers(const Chat *c, const ChatMessage *m, int n, ChatText *out, Error *err);
void chat_text_free(ChatText *t);
/* The special token that ends an answer's turn, as in a conversation of one question; -1: the
 * format has none. */
int chat_end_token(const Chat *c);

#endif
