/* Conversations through a template, and where in the text their answers are.
 *
 * An answer begins where the text ends that a model is given to write it: the render of the
 * messages before it, opened for an answer. That text must be how the whole render begins. It ends
 * with the first special token behind its content; where there is none, with what the template
 * prints behind the content of a last message. Both are the template's own and must be found in the
 * whole render, or the template is refused: then nothing says what the model should learn. */
#include <stdlib.h>
#include <string.h>

#include "generation/chat_internal.h"

/* ---- one render ---- */

typedef struct Rendered {
  Render r;
  Str text;
} Rendered;

static int put(Render *r, Dict *d, const char *key, Value v) {
  return dict_put(r, d, value_of_str(str_of(key)), v);
}

static int make_messages(Render *r, const ChatMessage *m, int n, Value *out) {
  List *l = list_new(r, LIST_PLAIN, n);
  if (!l) return -1;
  for (int i = 0; i < n; i++) {
    Dict *d = dict_new(r);
    Str content = {.text = m[i].text, .len = m[i].len, .mark = (uint32_t)i + 1};
    if (put(r, d, "role", value_of_str(str_of(m[i].role))) ||
        put(r, d, "content", value_of_str(content)))
      return -1;
    l->v[i] = (Value){.kind = V_DICT, .dict = d};
  }
  *out = value_of_list(l);
  return 0;
}

static int make_variables(const Chat *c, Render *r, const ChatMessage *m, int n, bool open,
                          Dict *d) {
  Value messages;
  const char *key;
  json_t *v;
  if (make_messages(r, m, n, &messages) || put(r, d, "messages", messages) ||
      put(r, d, "add_generation_prompt", value_of_bool(open)) || put(r, d, "tools", value_none()) ||
      put(r, d, "documents", value_none()))
    return -1;
  json_object_foreach(c->roles, key, v) {
    if (put(r, d, key, value_of_str(str_of(json_string_value(v))))) return -1;
  }
  return 0;
}

/* The text lives until rendered_close, which is called in any case. */
static int run(const Chat *c, const ChatMessage *m, int n, bool open, Rendered *out, Error *err) {
  render_open(&out->r, c->template, err);
  Dict *d = dict_new(&out->r);
  if (make_variables(c, &out->r, m, n, open, d)) return -1;
  return render_run(&out->r, c->template, d, &out->text);
}

static void rendered_close(Rendered *x) { render_close(&x->r); }

/* 0: the template's; else 1 + the number of the message. */
static uint32_t message_of(const Str *s, size_t i) { return str_mark(s, i) & ~MARK_GENERATION; }

static void take_text(const Str *s, size_t len, ChatText *out) {
  out->text = mem_alloc(len + 1, 1);
  out->content = mem_alloc(len + 1, 1);
  if (len) memcpy(out->text, s->text, len);
  for (size_t i = 0; i < len; i++) out->content[i] = message_of(s, i) != 0;
  out->text[len] = 0;
  out->len = len;
}

int chat_render(const Chat *c, const ChatMessage *m, int n, bool open, ChatText *out, Error *err) {
  Rendered x;
  *out = (ChatText){0};
  int rc = run(c, m, n, open, &x, err);
  if (!rc) take_text(&x.text, x.text.len, out);
  rendered_close(&x);
  return rc;
}

void chat_text_free(ChatText *t) {
  free(t->text);
  free(t->content);
  free(t->answers);
  *t = (ChatText){0};
}

/* ---- answers ---- */

static void add_answer(ChatText *out, size_t from, size_t to) {
  out->answers = mem_grow(out->answers, (size_t)out->n_answers + 1, sizeof *out->answers);
  out->answers[out->n_answers++] = (ChatSpan){from, to};
}

/* Length without the blanks at its end. */
static size_t trimmed(const Str *s, size_t len) {
  Str part = str_cut(s, 0, len);
  return str_strip(&part, NULL, false, true).len;
}

/* Where in the text the content of a message begins and ends; false: nowhere (out is as it was). */
static bool find_content(const Str *s, uint32_t message, ChatSpan *out) {
  size_t from = 0, to = s->len;
  while (from < s->len && message_of(s, from) != message) from++;
  while (to > from && message_of(s, to - 1) != message) to--;
  if (to > from) *out = (ChatSpan){from, to};
  return to > from;
}

/* End of the first special token in s[from..to) that the template spelled; 0: none. */
static size_t special_end(const Chat *c, const Str *s, size_t from, size_t to) {
  for (size_t at = from; at < to; at++) {
    size_t len = message_of(s, at) ? 0 : chat_special_at(c->tokenizer, s->text + at, to - at);
    size_t own = 0;
    while (own < len && !message_of(s, at + own)) own++;
    if (len && own == len) return at + len;
  }
  return 0;
}

/* One answer: message k of m[0..n), whole: the render of all. */
typedef struct AnswerAt {
  const Chat *c;
  const ChatMessage *m;
  int n, k;
  const Str *whole;
  size_t from;      /* it begins */
  ChatSpan content; /* empty at `from` where there is none */
  size_t most;      /* before the content of the next message */
} AnswerAt;

static int unclear(const AnswerAt *a, const char *what, Error *err) {
  return error_set(err, "the chat template does not say where the answer in message %d %s: %s",
                   a->k + 1, what,
                   "its text changes with the messages behind it, so that there is no mask");
}

/* Is no other message part of the answer? */
static bool is_own(const AnswerAt *a) {
  for (size_t i = a->from; i < a->content.to; i++) {
    uint32_t message = message_of(a->whole, i);
    if (message && message != (uint32_t)a->k + 1) return false;
  }
  return true;
}

static int find_begin(AnswerAt *a, Error *err) {
  Rendered before;
  int rc = run(a->c, a->m, a->k, true, &before, err);
  a->from = rc ? 0 : before.text.len;
  bool starts = !rc && a->from <= a->whole->len &&
                (a->from == 0 || memcmp(before.text.text, a->whole->text, a->from) == 0);
  rendered_close(&before);
  if (rc) return -1;
  bool there = find_content(a->whole, (uint32_t)a->k + 1, &a->content);
  if (!there) a->content = (ChatSpan){a->from, a->from};
  if (!starts || a->content.from < a->from || !is_own(a)) return unclear(a, "begins", err);
  a->most = a->content.to;
  while (a->most < a->whole->len && !message_of(a->whole, a->most)) a->most++;
  return 0;
}

/* From what the template prints behind the content of a last message. */
static int find_end(const AnswerAt *a, const Str *last, size_t *to, Error *err) {
  ChatSpan content = {a->from, a->from};
  const Str *whole = a->whole;
  if (!find_content(last, (uint32_t)a->k + 1, &content) && last->len < a->from)
    return unclear(a, "ends", err);
  size_t tail = last->len - content.to, same = 0, begin = a->content.to;
  while (same < tail && begin + same < a->most &&
         last->text[content.to + same] == whole->text[begin + same])
    same++;
  *to = special_end(a->c, whole, begin, begin + same);
  if (*to) return 0;
  if (same < tail) return unclear(a, "ends", err);
  size_t shorter = trimmed(whole, begin + tail);
  *to = shorter > begin ? shorter : begin + tail;
  return 0;
}

static int find_answer(AnswerAt *a, ChatText *out, Error *err) {
  size_t to = 0;
  if (find_begin(a, err)) return -1;
  Rendered last;
  bool is_last = a->k == a->n - 1;
  int rc = is_last ? 0 : run(a->c, a->m, a->k + 1, false, &last, err);
  if (!rc) rc = find_end(a, is_last ? a->whole : &last.text, &to, err);
  if (!is_last) rendered_close(&last);
  if (!rc) add_answer(out, a->from, to);
  return rc;
}

static int by_messages(const Chat *c, const ChatMessage *m, int n, const Str *whole, ChatText *out,
                       Error *err) {
  for (int k = 0; k < n; k++) {
    AnswerAt a = {.c = c, .m = m, .n = n, .k = k, .whole = whole};
    if (strcmp(m[k].role, "assistant") == 0 && find_answer(&a, out, err)) return -1;
  }
  return 0;
}

/* The template marks its answers itself. */
static int by_marks(const Str *whole, ChatText *out, Error *err) {
  for (size_t from = 0, to; from < whole->len; from = to) {
    bool marked = str_mark(whole, from) & MARK_GENERATION;
    for (to = from; to < whole->len && !(str_mark(whole, to) & MARK_GENERATION) == !marked; to++) {
    }
    if (marked) add_answer(out, from, to);
  }
  if (out->n_answers > 0) return 0;
  error_set(err, "the chat template has {%% generation %%} blocks, but printed none");
  return -1;
}

int chat_render_answers(const Chat *c, const ChatMessage *m, int n, ChatText *out, Error *err) {
  Rendered x;
  *out = (ChatText){0};
  require(n > 0 && strcmp(m[n - 1].role, "assistant") == 0);
  bool marks = jinja_has_generation(c->template);
  int rc = run(c, m, n, false, &x, err);
  if (!rc) rc = marks ? by_marks(&x.text, out, err) : by_messages(c, m, n, &x.text, out, err);
  if (!rc) {
    size_t end = out->answers[out->n_answers - 1].to, all = trimmed(&x.text, x.text.len);
    take_text(&x.text, marks && all > end ? all : end, out);
    out->ended = chat_special_end(c->tokenizer, out) >= 0;
  } else {
    chat_text_free(out);
  }
  rendered_close(&x);
  return rc;
}

int chat_end_token(const Chat *c) {
  const ChatMessage m[] = {{"user", "a", 1}, {"assistant", "b", 1}};
  ChatText text;
  Error err = {""};
  if (chat_render_answers(c, m, 2, &text, &err)) return -1;
  int id = chat_special_end(c->tokenizer, &text);
  chat_text_free(&text);
  return id;
}
