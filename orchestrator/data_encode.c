/* Tokens of marked text: sequences with one BOS, and an EOS where the recipe wants it. Text is cut
 * where an answer begins, as it is when a model writes one. */
#include <string.h>

#include "orchestrator/data.h"

static int encode(const Loader *l, const Record *r, const Marked *m, ChatSpan part, int flags,
                  TokenList *out, Error *err) {
  const char *text = m->text ? m->text + part.from : "";
  const char *content = m->content ? m->content + part.from : NULL;
  if (tokenizer_encode_template(l->tokenizer, text, content, part.to - part.from, flags, out, err))
    return error_prefix(err, "%s", r->place);
  return 0;
}

static int begin(const Loader *l, const Record *r, const Marked *m, size_t len, TokenList *out,
                 Error *err) {
  int flags = l->bos ? TOK_BOS : 0;
  return encode(l, r, m, (ChatSpan){0, len}, flags, out, err);
}

int loader_begin(const Loader *l, const Record *r, const Marked *m, TokenList *out, Error *err) {
  return begin(l, r, m, m->len, out, err);
}

static void mark_loss(TokenList *loss, int n, int32_t learnt) {
  while (loss && loss->n < n) token_list_push(loss, learnt);
}

static bool starts_with(const TokenList *all, const int32_t *v, int n) {
  return n <= all->n && (n == 0 || !memcmp(all->v, v, (size_t)n * sizeof *v));
}

/* The answer and, up to `next`, what follows it. Both are one text, so they are encoded as one
 * where that leaves the answer's tokens as they are by themselves. */
static int put_answer(const Loader *l, const Record *r, const Marked *m, ChatSpan answer,
                      size_t next, TokenList *out, TokenList *loss, Error *err) {
  /* A space is put before a text, not in the middle of one. */
  bool first = out->n == 0 || (out->n == 1 && out->v[0] == tokenizer_bos(l->tokenizer));
  int flags = first ? 0 : TOK_CONTINUE, from = out->n;
  TokenList whole = {0};
  if (encode(l, r, m, answer, flags, out, err)) return -1;
  mark_loss(loss, out->n, 1);
  if (next == answer.to) return 0;
  int rc = encode(l, r, m, (ChatSpan){answer.from, next}, flags, &whole, err), n = out->n - from;
  if (!rc && starts_with(&whole, out->v + from, n))
    for (int i = n; i < whole.n; i++) token_list_push(out, whole.v[i]);
  else if (!rc)
    rc = encode(l, r, m, (ChatSpan){answer.to, next}, TOK_CONTINUE, out, err);
  mark_loss(loss, out->n, 0);
  token_list_free(&whole);
  return rc;
}

static void put_eos(const Loader *l, bool ended, TokenList *out, TokenList *loss) {
  int eos = tokenizer_eos(l->tokenizer);
  if (l->recipe->tokenizer.add_eos && !ended && (out->n == 0 || out->v[out->n - 1] != eos))
    token_list_push(out, eos);
  mark_loss(loss, out->n, 1);
}

static int put_answers(const Loader *l, const Record *r, const Marked *m, TokenList *out,
                       TokenList *loss, int *prompt_len, Error *err) {
  int n = m->n_answers, i = loss ? 0 : n - 1;
  if (begin(l, r, m, m->answers[i].from, out, err)) return -1;
  mark_loss(loss, out->n, 0);
  for (; i < n; i++) {
    size_t next = i + 1 < n ? m->answers[i + 1].from : m->len;
    *prompt_len = out->n;
    if (put_answer(l, r, m, m->answers[i], next, out, loss, err)) return -1;
  }
  put_eos(l, m->ended, out, loss);
  return 0;
}

int loader_dialogue(const Loader *l, const Record *r, const Dialogue *d, TokenList *out,
                    TokenList *loss, int *prompt_len, Error *err) {
  if (d->n == 0 || d->turns[d->n - 1].by != BY_ASSISTANT) return 0;
  const Turn *answer = &d->turns[d->n - 1];
  if (text_is_blank(answer->text, answer->len)) return 0;
  Marked m = {0};
  int bad = template_answers(&l->recipe->data.chat, l->chat, d, r->place, &m, err);
  if (!bad) bad = put_answers(l, r, &m, out, loss, prompt_len, err);
  marked_free(&m);
  return bad ? -1 : 1;
}

int loader_text(const Loader *l, const Record *r, const char *text, size_t len, TokenList *out,
                Error *err) {
  if (text_is_blank(text, len)) return 0;
  Marked all = {0};
  marked_put(&all, text, len, true);
  int bad = begin(l, r, &all, 0, out, err);
  if (!bad) bad = put_answer(l, r, &all, (ChatSpan){0, len}, len, out, NULL, err);
  if (!bad) put_eos(l, false, out, NULL);
  marked_free(&all);
  return bad ? -1 : 1;
}
