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
  *m = (Marked){NULL, NULL, 0, 0};
}

static const char *piece_of(const ChatTemplate *c, Speaker by) {
  if (!strcmp(c->name, "plain")) return slot;
  return by == BY_SYSTEM ? c->system : by == BY_USER ? c->user : c->assistant;
}

/* The piece with the turn in its slot. */
static void put_piece(const char *piece, const Turn *turn, Marked *out) {
  const char *at = strstr(piece, slot);
  require(at);
  marked_put(out, piece, (size_t)(at - piece), false);
  marked_put(out, turn->text, turn->len, true);
  at += strlen(slot);
  marked_put(out, at, strlen(at), false);
}

int template_turns(const ChatTemplate *c, const Turn *turns, int n, const char *place, Marked *out,
                   Error *err) {
  for (int i = 0; i < n; i++) {
    const char *piece = piece_of(c, turns[i].by);
    if (!piece[0])
      return error_set(err, "%s: has a system turn, but data.chat.system is not given", place);
    put_piece(piece, &turns[i], out);
  }
  return 0;
}

void template_open(const ChatTemplate *c, Marked *out) {
  if (strcmp(c->name, "plain") != 0)
    marked_put(out, c->assistant_prefix, strlen(c->assistant_prefix), false);
}

void template_answer(const ChatTemplate *c, const Turn *answer, Marked *out) {
  const char *piece = piece_of(c, BY_ASSISTANT);
  size_t opened = strcmp(c->name, "plain") != 0 ? strlen(c->assistant_prefix) : 0;
  require(!strncmp(piece, c->assistant_prefix, opened));
  put_piece(piece + opened, answer, out);
}
