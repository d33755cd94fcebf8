/* Prompts for PPO. A conversation or a prompt goes through the template and, when too long, loses
 * its beginning; a text (a field of that name, or a text file with a separator) is the opening of
 * what the model goes on with, and loses its end. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/data.h"

/* What one record asks. */
typedef struct Prompt {
  TokenList *tokens;
  Marked shown; /* as people read it */
  bool is_text;
} Prompt;

static int from_text(const Loader *l, const Record *r, const char *text, size_t len, Prompt *p,
                     Error *err) {
  p->is_text = true;
  marked_put(&p->shown, text, len, true);
  return loader_begin(l, r, &p->shown, p->tokens, err);
}

/* Answers at the end of a conversation are what the model is to write itself. */
static int from_dialogue(const Loader *l, const Record *r, Dialogue *d, Prompt *p, Error *err) {
  while (d->n > 0 && d->turns[d->n - 1].by == BY_ASSISTANT) dialogue_drop_last(d);
  if (d->n == 0) return 0;
  Marked all = {0};
  size_t opening = 0;
  int bad = template_prompt(&l->recipe->data.chat, l->chat, d, r->place, &all, &opening, err);
  if (!bad && d->n == 1)
    marked_put(&p->shown, d->turns[0].text, d->turns[0].len, true);
  else if (!bad)
    marked_put(&p->shown, all.text, opening, true);
  if (!bad) bad = loader_begin(l, r, &all, p->tokens, err);
  marked_free(&all);
  return bad;
}

static int from_json(const Loader *l, const Record *r, Prompt *p, Error *err) {
  const char *fields[] = {l->data->messages_field, l->data->prompt_field};
  for (int i = 0; i < 2; i++) {
    json_t *v = field_find(r, fields[i]);
    if (!v) continue;
    Dialogue d = {NULL, 0};
    int rc = field_turns(r, fields[i], v, BY_USER, &d, err);
    if (!rc) rc = from_dialogue(l, r, &d, p, err);
    dialogue_free(&d);
    return rc;
  }
  json_t *text = field_find(r, l->data->text_field);
  if (!text) return loader_missing(l, r, true, err);
  if (!json_is_string(text)) return field_wrong(r, l->data->text_field, text, "a text", err);
  return from_text(l, r, json_string_value(text), json_string_length(text), p, err);
}

static int from_line(const Loader *l, const Record *r, Prompt *p, Error *err) {
  Dialogue d = {NULL, 0};
  dialogue_push(&d, BY_USER, r->text, r->len);
  int rc = from_dialogue(l, r, &d, p, err);
  dialogue_free(&d);
  return rc;
}

/* The expected answer: a text, or a number as it is written. */
static int read_answer(const Loader *l, const Record *r, char **answer, Error *err) {
  const char *name = l->data->answer_field;
  *answer = NULL;
  if (!name[0] || r->kind != SOURCE_JSON) return 0;
  json_t *v = field_need(r, name, err);
  if (!v) return -1;
  if (json_is_string(v) && strlen(json_string_value(v)) < json_string_length(v))
    return error_set(err, "%s: field \"%s\" holds a NUL character", r->place, name);
  if (json_is_string(v))
    *answer = mem_strdup(json_string_value(v));
  else if (json_is_number(v))
    *answer = json_dumps(v, JSON_ENCODE_ANY);
  else
    return field_wrong(r, name, v, "a text or a number", err);
  return 0;
}

/* Cuts the tokens, and shows what is left of the prompt. */
static int cut_prompt(const Loader *l, Prompt *p, Error *err) {
  int limit = (int)l->limit, n = p->tokens->n;
  if (p->is_text)
    p->tokens->n = limit;
  else
    cut_sequence(p->tokens, NULL, n, limit, limit, tokenizer_bos(l->tokenizer));
  size_t len;
  char *left = tokenizer_decode(l->tokenizer, p->tokens->v, p->tokens->n, &len, err);
  if (!left) return -1;
  marked_clear(&p->shown);
  marked_put(&p->shown, left, len, true);
  free(left);
  return 0;
}

static int pool_prompt(DataPool *pool, const Record *r, const Prompt *p, char *answer, Error *err) {
  size_t n = (size_t)pool->n + 1;
  pool->text = mem_grow((void *)pool->text, n, sizeof *pool->text);
  pool->answer = mem_grow((void *)pool->answer, n, sizeof *pool->answer);
  pool->text[pool->n] = mem_printf("%.*s", (int)p->shown.len, p->shown.text);
  pool->answer[pool->n++] = answer;
  return data_pool_add(pool, p->tokens, r->place, err);
}

static int add_prompt(Loader *l, const Record *r, DataPool *pool, Prompt *p, Error *err) {
  if (text_is_blank(p->shown.text, p->shown.len) || p->tokens->n == 0)
    return loader_drop_empty(l, r, "the prompt", err);
  if (memchr(p->shown.text, '\0', p->shown.len)) /* where rewards would see it end */
    return error_set(err, "%s: the prompt holds a NUL character", r->place);
  char *answer;
  if (read_answer(l, r, &answer, err)) return -1;
  int keep = loader_length(l, r, p->tokens->n, err);
  if (keep == 2 && cut_prompt(l, p, err)) keep = -1;
  if (keep > 0) return pool_prompt(pool, r, p, answer, err);
  free(answer);
  return keep;
}

static int add_record(Loader *l, const Record *r, DataPool *pool, TokenList *seq, Error *err) {
  Prompt p = {.tokens = seq};
  int rc;
  if (r->kind == SOURCE_JSON)
    rc = from_json(l, r, &p, err);
  else
    rc = r->kind == SOURCE_LINES ? from_line(l, r, &p, err)
                                 : from_text(l, r, r->text, r->len, &p, err);
  if (rc == 0) rc = add_prompt(l, r, pool, &p, err);
  marked_free(&p.shown);
  return rc;
}

static PromptSet take(DataPool *pool, const bool *held, bool want, bool answers) {
  PromptSet s = {0};
  int32_t *ids;
  s.n = data_pool_take(pool, held, want, &s.tokens, &s.offsets, &ids);
  s.text = mem_alloc((size_t)s.n, sizeof *s.text);
  if (answers) s.answer = mem_alloc((size_t)s.n, sizeof *s.answer);
  for (int i = 0; i < s.n; i++) {
    s.text[i] = pool->text[ids[i]];
    pool->text[ids[i]] = NULL;
    if (!answers) continue;
    s.answer[i] = pool->answer[ids[i]];
    pool->answer[ids[i]] = NULL;
  }
  free(ids);
  return s;
}

int data_load_prompts(const Recipe *r, const Tokenizer *t, int64_t room, PromptSet *train,
                      PromptSet *held_out, DataReport *rep, Error *err) {
  Loader l;
  DataPool pool = {.width = 1};
  const DataSource *data = &r->data.prompts;
  *train = *held_out = (PromptSet){0};
  if (loader_init(&l, r, t, data, "data.prompts", rep, err)) return -1;
  loader_limit(&l, "rollout.max_prompt_tokens", r->rollout.max_prompt_tokens, room);
  int rc = loader_run(&l, &pool, add_record, err);
  if (rc == 0) {
    bool *held = data_pool_held(&pool, (uint64_t)r->run.seed, "prompts", data->held_out);
    *train = take(&pool, held, false, data->answer_field[0]);
    *held_out = take(&pool, held, true, data->answer_field[0]);
    free(held);
  }
  data_pool_free(&pool);
  loader_close(&l);
  return rc;
}

void prompt_set_free(PromptSet *s) {
  for (int i = 0; i < s->n; i++) {
    free(s->text[i]);
    if (s->answer) free(s->answer[i]);
  }
  token_list_free(&s->tokens);
  free(s->offsets);
  free((void *)s->text);
  free((void *)s->answer);
  *s = (PromptSet){0};
}
