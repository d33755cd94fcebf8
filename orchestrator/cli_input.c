/* Sequences from JSON Lines. Every record is checked whole before it is used: errors name
 * FILE:LINE.
 */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/cli.h"

struct Input {
  RecordReader *records;
  bool as_text;
  const Tokenizer *tokenizer;
  const Chat *chat;
  InputLimits limits;
};

int text_flags(const Tokenizer *t) { return tokenizer_adds_bos(t) ? TOK_BOS : 0; }

int tokens_from_json(const json_t *record, const char *place, int vocab_size, TokenList *out,
                     Error *err) {
  const json_t *list = json_object_get(record, "tokens"), *id;
  size_t i;
  if (!json_is_array(list))
    return error_set(err, "%s: %s; expected {\"tokens\": [1, 2, ...]}", place,
                     list ? "\"tokens\" is no list" : "no \"tokens\"");
  json_array_foreach(list, i, id) {
    if (!json_is_integer(id))
      return error_set(err, "%s: token %zu is no whole number; expected an id from 0 to %d", place,
                       i + 1, vocab_size - 1);
    json_int_t v = json_integer_value(id);
    if (v < 0 || v >= vocab_size)
      return error_set(err, "%s: token %zu is %lld; expected an id from 0 to %d", place, i + 1,
                       (long long)v, vocab_size - 1);
    token_list_push(out, (int32_t)v);
  }
  return 0;
}

const char *text_from_json(const json_t *record, const char *place, size_t *len, Error *err) {
  const json_t *text = json_object_get(record, "text");
  if (!json_is_string(text)) {
    error_set(err, "%s: %s; expected {\"text\": \"...\"}", place,
              text ? "\"text\" is no string" : "no \"text\"");
    return NULL;
  }
  *len = json_string_length(text);
  return json_string_value(text);
}

/* ---- sequences ---- */

void sequences_clear(Sequences *s) {
  for (int i = 0; i < s->n; i++) free(s->text[i]);
  s->n = s->tokens.n = 0;
  s->end = false;
}

void sequences_free(Sequences *s) {
  sequences_clear(s);
  token_list_free(&s->tokens);
  free(s->offsets);
  free(s->text);
  free(s->text_len);
  *s = (Sequences){0};
}

static void sequences_room(Sequences *s, int n) {
  if (n <= s->cap && s->offsets) return;
  s->cap = n > 2 * s->cap ? n : 2 * s->cap;
  s->offsets = mem_grow(s->offsets, (size_t)s->cap + 1, sizeof *s->offsets);
  s->text = mem_grow(s->text, (size_t)s->cap, sizeof *s->text);
  s->text_len = mem_grow(s->text_len, (size_t)s->cap, sizeof *s->text_len);
  if (s->n == 0) s->offsets[0] = 0;
}

/* Takes the tokens behind the last sequence as one more. */
static int push_sequence(Sequences *s, const char *text, size_t len, const char *place,
                         InputLimits limits, Error *err) {
  sequences_room(s, s->n + 1);
  int from = s->offsets[s->n], n = s->tokens.n - from;
  if (n < 1 || n > limits.max_tokens) {
    s->tokens.n = from;
    if (n < 1) return error_set(err, "%s: an empty sequence; expected at least one token", place);
    return error_set(err, "%s: %d tokens; expected at most %d, %s", place, n, limits.max_tokens,
                     limits.why);
  }
  s->text[s->n] = NULL;
  s->text_len[s->n] = len;
  if (text) {
    s->text[s->n] = mem_alloc(len + 1, 1);
    memcpy(s->text[s->n], text, len);
    s->text[s->n][len] = 0;
  }
  s->offsets[++s->n] = s->tokens.n;
  return 0;
}

static int encode_user(const Chat *chat, const char *text, size_t len, const Tokenizer *t,
                       TokenList *out, Error *err) {
  ChatText said;
  if (chat_render(chat, &(ChatMessage){"user", text, len}, 1, true, &said, err)) return -1;
  int rc = tokenizer_encode_template(t, said.text, said.content, said.len, text_flags(t), out, err);
  chat_text_free(&said);
  return rc;
}

static int push_text(Sequences *s, const char *text, size_t len, const char *place,
                     const Tokenizer *t, const Chat *chat, InputLimits limits, Error *err) {
  int from = s->tokens.n;
  int rc = chat ? encode_user(chat, text, len, t, &s->tokens, err)
                : tokenizer_encode(t, text, len, text_flags(t), &s->tokens, err);
  if (rc) return error_prefix(err, "%s", place);
  for (int i = from; i < s->tokens.n; i++)
    if (s->tokens.v[i] >= limits.vocab_size) {
      error_set(err, "%s: the tokenizer gives token %d; the model has %d", place, s->tokens.v[i],
                limits.vocab_size);
      s->tokens.n = from;
      return -1;
    }
  return push_sequence(s, text, len, place, limits, err);
}

int sequences_from_text(const char *text, const Tokenizer *t, const Chat *chat, InputLimits limits,
                        Sequences *s, Error *err) {
  sequences_clear(s);
  s->end = true;
  return push_text(s, text, strlen(text), "--prompt", t, chat, limits, err);
}

/* ---- files ---- */

Input *input_open(const char *path, bool as_text, const Tokenizer *t, const Chat *chat,
                  InputLimits limits, Error *err) {
  RecordReader *records = records_open(path, err);
  if (!records) return NULL;
  Input *in = mem_alloc(1, sizeof *in);
  *in = (Input){records, as_text, t, chat, limits};
  return in;
}

void input_close(Input *in) {
  if (!in) return;
  records_close(in->records);
  free(in);
}

static int push_record(Input *in, const json_t *record, Sequences *s, Error *err) {
  const char *place = records_place(in->records);
  if (in->as_text) {
    size_t len;
    const char *text = text_from_json(record, place, &len, err);
    if (!text) return -1;
    return push_text(s, text, len, place, in->tokenizer, in->chat, in->limits, err);
  }
  int from = s->tokens.n;
  if (tokens_from_json(record, place, in->limits.vocab_size, &s->tokens, err)) {
    s->tokens.n = from;
    return -1;
  }
  return push_sequence(s, NULL, 0, place, in->limits, err);
}

int input_next(Input *in, int max_n, int64_t max_tokens, Sequences *s, Error *err) {
  sequences_clear(s);
  while (s->n < max_n && s->tokens.n < max_tokens) {
    json_t *record;
    int got = records_next(in->records, &record, err);
    if (got < 0) return -1;
    s->end = got == 0;
    if (s->end) return 0;
    if (push_record(in, record, s, err)) return -1;
  }
  return 0;
}

void sequences_share(Comm *c, Sequences *s, int *rc) {
  bool root = comm_rank(c) == 0;
  int32_t head[4] = {s->n, s->tokens.n, s->end, *rc};
  comm_broadcast(c, head, sizeof head, 0);
  *rc = head[3];
  if (!root) {
    sequences_clear(s);
    sequences_room(s, head[0]);
    if (head[1] > s->tokens.cap) {
      s->tokens.cap = head[1];
      s->tokens.v = mem_grow(s->tokens.v, (size_t)head[1], sizeof *s->tokens.v);
    }
    s->tokens.n = head[1];
    s->end = head[2] != 0;
    for (s->n = 0; s->n < head[0]; s->n++) s->text[s->n] = NULL;
  }
  if (s->n == 0) return;
  comm_broadcast(c, s->offsets, ((size_t)s->n + 1) * sizeof *s->offsets, 0);
  comm_broadcast(c, s->tokens.v, (size_t)s->tokens.n * sizeof *s->tokens.v, 0);
}
