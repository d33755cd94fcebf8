/* The conversation template: turns become marked text, in which the template's own words and those
 * of users are told apart, so that only the former can spell special tokens. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/data.h"

static const char slot[] = "{content}";

void marked_put(Marked *m, const char *text, size_t len, bool is_content) {
  if (m->len + len > m->cap) {
    m->cap = 2 * (m->len + len);
    m->text = mem_grow(m->text, m->cap, 1);
    m->content = mem_grow(m->content, m->cap, 1);
  }
  if (len == 0) return;
  memcpy(m->text + m->len, text, len);
  memset(m->content + m->len, is_content, len);
  m->len += len;
}

void marked_clear(Marked *m) { m->len = 0; }

void marked_free(Marked *m) {
  free(m->text);
  free(m->content);
  free(m->answers);
  *m = (Marked){.len = 0};
}

/* ---- pieces ---- */

static const char *piece_of(const ChatTemplate *c, Speaker by) {
  if (!strcmp(c->name, "plain")) return slot;
  return by == BY_SYSTEM ? c->system : by == BY_USER ? c->user : c->assistant;
}

/* The words that open an answer: the assistant's piece up to its slot. */
static const char *opening_of(const ChatTemplate *c) {
  return strcmp(c->name, "plain") != 0 ? c->assistant_prefix : "";
}

static void add_answer(Marked *m, size_t from, size_t to) {
  m->answers = mem_grow(m->answers, (size_t)m->n_answers + 1, sizeof *m->answers);
  m->answers[m->n_answers++] = (ChatSpan){from, to};
}

/* The piece with the turn in its slot. */
static void put_piece(const char *piece, const Turn *turn, Marked *out) {
  const char *at = strstr(piece, slot);
  require(at);
  marked_put(out, piece, (size_t)(at - piece), false);
  size_t from = out->len;
  marked_put(out, turn->text, turn->len, true);
  at += strlen(slot);
  marked_put(out, at, strlen(at), false);
  if (turn->by == BY_ASSISTANT) add_answer(out, from, out->len);
}

static int put_turns(const ChatTemplate *c, const Dialogue *d, const char *place, Marked *out,
                     Error *err) {
  for (int i = 0; i < d->n; i++) {
    const char *piece = piece_of(c, d->turns[i].by);
    if (!piece[0])
      return error_set(err, "%s: has a system turn, but data.chat.system is not given", place);
    put_piece(piece, &d->turns[i], out);
  }
  return 0;
}

/* ---- chat templates ---- */

int template_chat(const Recipe *r, const Tokenizer *t, Chat **out, Error *err) {
  const char *name = r->data.chat.name, *dir = r->tokenizer.path;
  *out = NULL;
  if (!strcmp(name, "plain") || !strcmp(name, "custom")) return 0;
  *out = chat_open(name, dir[0] ? dir : r->models.actor.path, t, err);
  return *out ? 0 : error_prefix(err, "data.chat.name");
}

int data_end_token(const Recipe *r, const Tokenizer *t) {
  Chat *chat;
  if (template_chat(r, t, &chat, NULL) || !chat) return -1;
  int id = chat_end_token(chat);
  chat_free(chat);
  return id;
}

static ChatMessage *messages_of(const Dialogue *d) {
  static const char *const roles[] = {
      [BY_SYSTEM] = "system", [BY_USER] = "user", [BY_ASSISTANT] = "assistant"};
  ChatMessage *m = mem_alloc((size_t)d->n, sizeof *m);
  for (int i = 0; i < d->n; i++)
    m[i] = (ChatMessage){roles[d->turns[i].by], d->turns[i].text, d->turns[i].len};
  return m;
}

static int by_chat(const Chat *chat, const Dialogue *d, bool answers, const char *place,
                   Marked *out, Error *err) {
  ChatText t;
  ChatMessage *m = messages_of(d);
  int rc = answers ? chat_render_answers(chat, m, d->n, &t, err)
                   : chat_render(chat, m, d->n, true, &t, err);
  free(m);
  if (rc) return error_prefix(err, "%s", place);
  *out = (Marked){t.text, t.content, t.len, t.len, t.answers, t.n_answers, t.ended};
  return 0;
}

/* ---- both ---- */

int template_prompt(const ChatTemplate *c, const Chat *chat, const Dialogue *d, const char *place,
                    Marked *out, size_t *opening, Error *err) {
  if (chat ? by_chat(chat, d, false, place, out, err) : put_turns(c, d, place, out, err)) return -1;
  *opening = out->len;
  if (!chat) marked_put(out, opening_of(c), strlen(opening_of(c)), false);
  return 0;
}

int template_answers(const ChatTemplate *c, const Chat *chat, const Dialogue *d, const char *place,
                     Marked *out, Error *err) {
  return chat ? by_chat(chat, d, true, place, out, err) : put_turns(c, d, place, out, err);
}
