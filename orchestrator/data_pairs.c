/* Preference pairs. A record has the turns before the answers (messages or a prompt) and two
 * answers; or two whole conversations as lists of messages; or two whole dialogues as plain text,
 * which is taken for granted only where the record has nothing else (or both fields of the turns
 * before are switched off by an empty name), so that a misspelt field is not passed over. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/data.h"

/* 1: before holds the turns before the answers; 0: the record has none; -1: error. */
static int read_before(const Loader *l, const Record *r, Dialogue *before, Error *err) {
  const char *fields[] = {l->data->messages_field, l->data->prompt_field};
  for (int i = 0; i < 2; i++) {
    json_t *v = field_find(r, fields[i]);
    if (v) return field_turns(r, fields[i], v, BY_USER, before, err) ? -1 : 1;
  }
  return 0;
}

static bool may_be_whole(const Loader *l, const Record *r) {
  const DataSource *d = l->data;
  size_t known = field_find(r, d->margin_field) ? 3 : 2;
  return (!d->messages_field[0] && !d->prompt_field[0]) || json_object_size(r->json) == known;
}

static int answer_turns(const Loader *l, const Record *r, const char *name, const json_t *v,
                        const Dialogue *before, int has_before, Dialogue *d, Error *err) {
  Dialogue answer = {NULL, 0};
  int rc = field_turns(r, name, v, BY_ASSISTANT, &answer, err);
  bool whole = answer.n > 0 && answer.turns[0].by != BY_ASSISTANT;
  if (!rc && !whole && !has_before) rc = loader_missing(l, r, false, err);
  for (int i = 0; !rc && !whole && i < before->n; i++)
    dialogue_push(d, before->turns[i].by, before->turns[i].text, before->turns[i].len);
  for (int i = 0; !rc && i < answer.n; i++)
    dialogue_push(d, answer.turns[i].by, answer.turns[i].text, answer.turns[i].len);
  dialogue_free(&answer);
  return rc;
}

/* One side of the pair. 1: done; 0: its answer is empty. */
static int make_side(const Loader *l, const Record *r, const char *name, const Dialogue *before,
                     int has_before, TokenList *out, Error *err) {
  json_t *v = field_need(r, name, err);
  if (!v) return -1;
  if (json_is_string(v) && !has_before) {
    if (!may_be_whole(l, r)) return loader_missing(l, r, false, err);
    return loader_text(l, r, json_string_value(v), json_string_length(v), out, err);
  }
  Dialogue d = {NULL, 0};
  int prompt, got = answer_turns(l, r, name, v, before, has_before, &d, err);
  if (got == 0) got = loader_dialogue(l, r, &d, out, NULL, &prompt, err);
  dialogue_free(&d);
  return got;
}

static int read_margin(const Loader *l, const Record *r, float *margin, Error *err) {
  const char *name = l->data->margin_field;
  *margin = 0;
  if (!name[0]) return 0;
  json_t *v = field_need(r, name, err);
  if (!v) return -1;
  if (!json_is_number(v)) return field_wrong(r, name, v, "a number", err);
  *margin = (float)json_number_value(v);
  return 0;
}

static int common_prefix(const TokenList *a, const TokenList *b) {
  int n = a->n < b->n ? a->n : b->n, i = 0;
  while (i < n && a->v[i] == b->v[i]) i++;
  return i;
}

static bool equal(const TokenList *a, const TokenList *b) {
  return a->n == b->n && common_prefix(a, b) == a->n;
}

/* Both sides lose the same tokens of what they have in common. */
static void cut_pair(const Loader *l, TokenList *a, TokenList *b) {
  int prompt = common_prefix(a, b), longer = a->n > b->n ? a->n : b->n, limit = (int)l->limit;
  int keep = cut_keep(prompt, longer - prompt, limit), bos = tokenizer_bos(l->tokenizer);
  cut_sequence(a, NULL, prompt, keep, limit, bos);
  cut_sequence(b, NULL, prompt, keep, limit, bos);
}

static int add_pair(Loader *l, const Record *r, DataPool *pool, TokenList *chosen,
                    TokenList *rejected, float margin, Error *err) {
  int longer = chosen->n > rejected->n ? chosen->n : rejected->n;
  int keep = loader_length(l, r, longer, err);
  if (keep <= 0) return keep;
  if (keep == 2) cut_pair(l, chosen, rejected);
  if (equal(chosen, rejected)) { /* which says nothing */
    l->same++;
    l->report->dropped++;
    return 0;
  }
  pool->margins = mem_grow(pool->margins, (size_t)pool->n + 1, sizeof *pool->margins);
  pool->margins[pool->n++] = margin;
  return data_pool_add(pool, chosen, r->place, err) || data_pool_add(pool, rejected, r->place, err)
             ? -1
             : 0;
}

static int add_record(Loader *l, const Record *r, DataPool *pool, TokenList *chosen, Error *err) {
  Dialogue before = {NULL, 0};
  TokenList rejected = {0};
  float margin;
  int has = read_before(l, r, &before, err), got = has;
  if (got >= 0) got = make_side(l, r, l->data->chosen_field, &before, has, chosen, err);
  bool empty = got == 0;
  if (got >= 0) got = make_side(l, r, l->data->rejected_field, &before, has, &rejected, err);
  empty |= got == 0;
  if (got >= 0) got = read_margin(l, r, &margin, err);
  if (got >= 0 && empty)
    got = loader_drop_empty(l, r, "an answer", err);
  else if (got >= 0)
    got = add_pair(l, r, pool, chosen, &rejected, margin, err);
  dialogue_free(&before);
  token_list_free(&rejected);
  return got;
}

static PairSet take(const DataPool *pool, const bool *held, bool want) {
  PairSet s = {0};
  int32_t *ids;
  s.n = data_pool_take(pool, held, want, &s.tokens, &s.offsets, &ids);
  s.margins = mem_alloc((size_t)s.n, sizeof *s.margins);
  for (int i = 0; i < s.n; i++) s.margins[i] = pool->margins[ids[i]];
  free(ids);
  return s;
}

int data_load_pairs(const Recipe *r, const Tokenizer *t, int64_t room, PairSet *train,
                    PairSet *held_out, DataReport *rep, Error *err) {
  Loader l;
  DataPool pool = {.width = 2};
  *train = *held_out = (PairSet){0};
  if (loader_init(&l, r, t, &r->data.preference, "data.preference", rep, err)) return -1;
  loader_limit(&l, "max_tokens", r->data.preference.max_tokens, room);
  int rc = loader_run(&l, &pool, add_record, err);
  if (rc == 0) {
    bool *held =
        data_pool_held(&pool, (uint64_t)r->run.seed, "preference", r->data.preference.held_out);
    *train = take(&pool, held, false);
    *held_out = take(&pool, held, true);
    free(held);
  }
  data_pool_free(&pool);
  loader_close(&l);
  return rc;
}

void pair_set_free(PairSet *s) {
  token_list_free(&s->tokens);
  free(s->offsets);
  free(s->margins);
  *s = (PairSet){0};
}
