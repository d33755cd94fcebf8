/* SFT examples: raw texts, prompts with completions, or conversations, whose answers are learnt. */
#include <stdlib.h>
#include <string.h>

#include "orchestrator/data.h"

/* The turns of a record, the answer last. */
static int read_dialogue(const Loader *l, const Record *r, Dialogue *d, Error *err) {
  const DataSource *data = l->data;
  json_t *messages = field_find(r, data->messages_field),
         *prompt = field_find(r, data->prompt_field);
  if (json_is_string(messages)) /* has no answer to learn */
    return field_wrong(r, data->messages_field, messages, "a list of messages", err);
  if (messages) return field_turns(r, data->messages_field, messages, BY_USER, d, err);
  json_t *completion = field_need(r, data->completion_field, err);
  if (!completion || field_turns(r, data->prompt_field, prompt, BY_USER, d, err)) return -1;
  return field_turns(r, data->completion_field, completion, BY_ASSISTANT, d, err);
}

/* 1: an example, whose first `prompt` tokens are before the last answer; 0: it is empty. loss stays
 * empty where all of it is to be learnt. */
static int make_example(const Loader *l, const Record *r, TokenList *out, TokenList *loss,
                        int *prompt, Error *err) {
  const DataSource *data = l->data;
  *prompt = 0;
  if (r->kind != SOURCE_JSON) return loader_text(l, r, r->text, r->len, out, err);
  if (field_find(r, data->messages_field) || field_find(r, data->prompt_field)) {
    Dialogue d = {NULL, 0};
    int got = read_dialogue(l, r, &d, err) ? -1 : loader_dialogue(l, r, &d, out, loss, prompt, err);
    dialogue_free(&d);
    return got;
  }
  json_t *text = field_find(r, data->text_field);
  if (!text) return loader_missing(l, r, true, err);
  if (!json_is_string(text)) return field_wrong(r, data->text_field, text, "a text", err);
  return loader_text(l, r, json_string_value(text), json_string_length(text), out, err);
}

static int pool_example(Loader *l, const Record *r, DataPool *pool, TokenList *seq, TokenList *loss,
                        int prompt, Error *err) {
  int keep = loader_length(l, r, seq->n, err), limit = (int)l->limit;
  if (keep <= 0) return keep;
  bool all = loss->n == 0 || !strcmp(l->recipe->sft.loss_on, "all");
  if (keep == 2)
    cut_sequence(seq, loss->n ? loss : NULL, prompt, cut_keep(prompt, seq->n - prompt, limit),
                 limit, tokenizer_bos(l->tokenizer));
  for (int i = 0; i < seq->n; i++) token_list_push(&pool->loss, all ? 1 : loss->v[i]);
  pool->n++;
  return data_pool_add(pool, seq, r->place, err);
}

static int add_record(Loader *l, const Record *r, DataPool *pool, TokenList *seq, Error *err) {
  TokenList loss = {0};
  int prompt, got = make_example(l, r, seq, &loss, &prompt, err);
  if (got == 0 || (got > 0 && seq->n < 2))
    got = loader_drop_empty(l, r, "the answer", err);
  else if (got > 0)
    got = pool_example(l, r, pool, seq, &loss, prompt, err);
  token_list_free(&loss);
  return got;
}

static SftSet take(const DataPool *pool, const bool *held, bool want) {
  SftSet s = {0};
  int32_t *ids;
  s.n = data_pool_take(pool, held, want, &s.tokens, &s.offsets, &ids);
  s.loss = mem_alloc((size_t)s.tokens.n, sizeof *s.loss);
  for (int i = 0; i < s.n; i++)
    for (int t = s.offsets[i]; t < s.offsets[i + 1]; t++)
      s.loss[t] = (uint8_t)pool->loss.v[pool->offsets.v[ids[i]] + t - s.offsets[i]];
  free(ids);
  return s;
}

int data_load_sft(const Recipe *r, const Tokenizer *t, int64_t room, SftSet *train,
                  SftSet *held_out, DataReport *rep, Error *err) {
  Loader l;
  DataPool pool = {.width = 1};
  *train = *held_out = (SftSet){0};
  if (loader_init(&l, r, t, &r->data.sft, "data.sft", rep, err)) return -1;
  loader_limit(&l, "max_tokens", r->data.sft.max_tokens, room);
  int rc = loader_run(&l, &pool, add_record, err);
  if (rc == 0) {
    bool *held = data_pool_held(&pool, (uint64_t)r->run.seed, "sft", r->data.sft.held_out);
    *train = take(&pool, held, false);
    *held_out = take(&pool, held, true);
    free(held);
  }
  data_pool_free(&pool);
  loader_close(&l);
  return rc;
}

void sft_set_free(SftSet *s) {
  token_list_free(&s->tokens);
  free(s->offsets);
  free(s->loss);
  *s = (SftSet){0};
}
