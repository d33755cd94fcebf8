/* What all data sets share: sequences with one BOS and an EOS where the recipe wants it, and what
 * happens to records that are empty or too long. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/data.h"

int loader_init(Loader *l, const Recipe *r, const Tokenizer *t, const DataSource *data,
                const char *name, DataReport *report, Error *err) {
  *report = (DataReport){0, 0, 0};
  *l = (Loader){.recipe = r, .tokenizer = t, .data = data, .name = name, .report = report};
  if (r->tokenizer.add_bos && tokenizer_bos(t) < 0)
    return error_set(err, "tokenizer.add_bos: the tokenizer has no BOS token; expected false");
  if (r->tokenizer.add_eos && tokenizer_eos(t) < 0)
    return error_set(err, "tokenizer.add_eos: the tokenizer has no EOS token; expected false");
  return 0;
}

void loader_limit(Loader *l, const char *key, int64_t tokens, int64_t room) {
  l->limit = tokens > 0 ? tokens : room;
  l->limit_name = tokens > 0 ? key : "what the model has positions for";
}

static int encode(const Loader *l, const Record *r, const Marked *m, int flags, TokenList *out,
                  Error *err) {
  if (tokenizer_encode_template(l->tokenizer, m->text ? m->text : "", m->content, m->len, flags,
                                out, err))
    return error_prefix(err, "%s", r->place);
  return 0;
}

int loader_begin(const Loader *l, const Record *r, const Marked *m, TokenList *out, Error *err) {
  return encode(l, r, m, l->recipe->tokenizer.add_bos ? TOK_BOS : 0, out, err);
}

int loader_answer(const Loader *l, const Record *r, const Marked *m, TokenList *out, Error *err) {
  /* A space is put before a text, not in the middle of one. */
  bool first = out->n == 0 || (out->n == 1 && out->v[0] == tokenizer_bos(l->tokenizer));
  if (encode(l, r, m, first ? 0 : TOK_CONTINUE, out, err)) return -1;
  int eos = tokenizer_eos(l->tokenizer);
  if (l->recipe->tokenizer.add_eos && (out->n == 0 || out->v[out->n - 1] != eos))
    token_list_push(out, eos);
  return 0;
}

int loader_dialogue(const Loader *l, const Record *r, const Dialogue *d, TokenList *out,
                    int *prompt_len, Error *err) {
  const ChatTemplate *chat = &l->recipe->data.chat;
  if (d->n == 0 || d->turns[d->n - 1].by != BY_ASSISTANT) return 0;
  const Turn *answer = &d->turns[d->n - 1];
  if (text_is_blank(answer->text, answer->len)) return 0;
  Marked prompt = {0}, rest = {0};
  int bad = template_turns(chat, d->turns, d->n - 1, r->place, &prompt, err);
  if (!bad) {
    template_open(chat, &prompt);
    template_answer(chat, answer, &rest);
    bad = loader_begin(l, r, &prompt, out, err);
  }
  *prompt_len = out->n;
  if (!bad) bad = loader_answer(l, r, &rest, out, err);
  marked_free(&prompt);
  marked_free(&rest);
  return bad ? -1 : 1;
}

int loader_text(const Loader *l, const Record *r, const char *text, size_t len, TokenList *out,
                Error *err) {
  if (text_is_blank(text, len)) return 0;
  Marked all = {0}, nothing = {0};
  marked_put(&all, text, len, true);
  int bad = loader_begin(l, r, &nothing, out, err);
  if (!bad) bad = loader_answer(l, r, &all, out, err);
  marked_free(&all);
  return bad ? -1 : 1;
}

int loader_missing(const Loader *l, const Record *r, bool with_text, Error *err) {
  const DataSource *d = l->data;
  char *names = with_text ? mem_printf("\"%s\", \"%s\" or \"%s\"", d->messages_field,
                                       d->prompt_field, d->text_field)
                          : mem_printf("\"%s\" or \"%s\"", d->messages_field, d->prompt_field);
  int bad = field_missing(r, names, err);
  free(names);
  return bad;
}

static bool refuses(const Loader *l) { return !strcmp(l->data->overlong, "error"); }

int loader_drop_empty(Loader *l, const Record *r, const char *what, Error *err) {
  if (refuses(l)) return error_set(err, "%s: %s is empty", r->place, what);
  l->empty++;
  l->report->dropped++;
  return 0;
}

int loader_length(Loader *l, const Record *r, int64_t tokens, Error *err) {
  if (tokens <= l->limit) return 1;
  if (refuses(l))
    return error_set(err, "%s: %lld tokens; expected at most %s, %lld", r->place, (long long)tokens,
                     l->limit_name, (long long)l->limit);
  if (!strcmp(l->data->overlong, "truncate")) {
    l->report->truncated++;
    return 2;
  }
  l->overlong++;
  l->report->dropped++;
  return 0;
}

static void add_cause(char *text, size_t size, int64_t n, const char *what) {
  size_t used = strlen(text);
  if (n > 0) snprintf(text + used, size - used, "%s%lld %s", used ? ", " : "", (long long)n, what);
}

static int nothing_left(const Loader *l, Error *err) {
  if (l->report->records == 0) return error_set(err, "%s: holds no records", l->data->path);
  char causes[512] = "", longer[128];
  snprintf(longer, sizeof longer, "longer than %s, %lld tokens", l->limit_name,
           (long long)l->limit);
  add_cause(causes, sizeof causes, l->overlong, longer);
  add_cause(causes, sizeof causes, l->empty, "empty");
  add_cause(causes, sizeof causes, l->same, "with two equal answers");
  return error_set(err, "%s: none of %lld records is left: %s", l->data->path,
                   (long long)l->report->records, causes);
}

int loader_run(Loader *l, DataPool *pool, AddRecord add, Error *err) {
  Source *source = source_open(l->data, err);
  if (!source) return -1;
  Record r;
  TokenList seq = {0};
  int got;
  while ((got = source_next(source, &r, err)) == 1) {
    l->report->records++;
    seq.n = 0;
    if (add(l, &r, pool, &seq, err)) {
      got = -1;
      break;
    }
  }
  token_list_free(&seq);
  source_close(source);
  if (got == 0 && pool->n == 0) return nothing_left(l, err);
  return got;
}

int cut_keep(int prompt, int answer, int limit) {
  int room = limit - answer > limit / 2 ? limit - answer : limit / 2;
  return prompt < room ? prompt : room;
}

void cut_sequence(TokenList *seq, int prompt, int keep, int limit, int bos) {
  require(keep >= 0 && keep <= prompt && prompt <= seq->n);
  int first = keep > 0 && seq->v[0] == bos; /* 1: the BOS stays */
  int from = prompt - keep + first;
  if (from > first) {
    memmove(seq->v + first, seq->v + from, (size_t)(seq->n - from) * sizeof *seq->v);
    seq->n -= from - first;
  }
  if (seq->n > limit) seq->n = limit;
}
