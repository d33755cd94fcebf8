/* Inside of the data loaders. A file gives records (data_source.c); a record gives turns or raw
 * text (data_fields.c); the template makes marked text of them (data_template.c), which the
 * tokenizer turns into a sequence; sequences too long are cut or dropped (data_length.c) and
 * collected in a pool (data_pool.c), which is split at the end into what is trained on and what is
 * held out. */
#ifndef ORCHESTRATOR_DATA_H
#define ORCHESTRATOR_DATA_H

#include "core/json.h"
#include "generation/chat.h"
#include "orchestrator/orchestrator.h"

/* ---- source: records of a file ---- */
/* JSON: objects. LINES (a .txt file): each line that is not blank. TEXTS (a separator is given):
 * what lies between lines that equal the separator, without blank lines around it; empty ones are
 * passed over. */
typedef enum SourceKind { SOURCE_JSON, SOURCE_LINES, SOURCE_TEXTS } SourceKind;
typedef struct Source Source;
typedef struct Record {
  const char *place; /* "FILE:LINE", for errors */
  SourceKind kind;
  json_t *json;     /* SOURCE_JSON */
  const char *text; /* else */
  size_t len;
} Record; /* all borrowed until the next call */
Source *source_open(const DataSource *data, Error *err);
int source_next(Source *s, Record *out, Error *err); /* 1: a record; 0: end; -1: error */
void source_close(Source *s);

bool text_is_blank(const char *s, size_t len); /* spaces, tabs, CR and LF only */

/* ---- turns ---- */
typedef enum Speaker { BY_SYSTEM, BY_USER, BY_ASSISTANT } Speaker;
typedef struct Turn {
  Speaker by;
  char *text; /* owned */
  size_t len;
} Turn;
typedef struct Dialogue {
  Turn *turns;
  int n;
} Dialogue;
void dialogue_push(Dialogue *d, Speaker by, const char *text, size_t len);
void dialogue_drop_last(Dialogue *d);
void dialogue_free(Dialogue *d);

/* ---- fields of a record ---- */
/* The member of that name; NULL when absent or null, or when the name is "" (switched off). */
json_t *field_find(const Record *r, const char *name);
/* As above, but absence is an error: FILE:LINE: no field "x"; the record has: a, b. */
json_t *field_need(const Record *r, const char *name, Error *err);
/* `names`: what was looked for, quoted, as it should stand in the message. */
int field_missing(const Record *r, const char *names, Error *err);
int field_wrong(const Record *r, const char *name, const json_t *v, const char *expected,
                Error *err);
/* Adds the turns of a value: a string is one turn by `by`; an object is one message {role, content}
 * or {from, value}; a list holds such messages. The content of a message is a string or a list of
 * {type: text, text or value}. */
int field_turns(const Record *r, const char *name, const json_t *v, Speaker by, Dialogue *out,
                Error *err);

/* ---- marked text ---- */
/* content[i] is 1 where text[i] was written by a user and may not become a special token. */
typedef struct Marked {
  char *text, *content;
  size_t len, cap;
  ChatSpan *answers; /* of template_answers: what is to be learnt */
  int n_answers;
  bool ended; /* the last answer has its end of turn */
} Marked;
void marked_put(Marked *m, const char *text, size_t len, bool is_content);
void marked_clear(Marked *m);
void marked_free(Marked *m);
/* The chat template of the recipe; NULL where it is plain or has pieces. */
int template_chat(const Recipe *r, const Tokenizer *t, Chat **out, Error *err);
/* A conversation up to where the answer begins that it asks for; *opening: bytes before the words
 * that open the answer (all of them, where a chat template does not tell). place: for errors. */
int template_prompt(const ChatTemplate *c, const Chat *chat, const Dialogue *d, const char *place,
                    Marked *out, size_t *opening, Error *err);
/* A conversation whose last turn is an answer, up to the end of that turn. */
int template_answers(const ChatTemplate *c, const Chat *chat, const Dialogue *d, const char *place,
                     Marked *out, Error *err);

/* ---- loader: what all three data sets share ---- */
typedef struct Loader {
  const Recipe *recipe;
  const Tokenizer *tokenizer;
  const DataSource *data;
  Chat *chat;       /* NULL: plain, or the recipe's pieces */
  const char *name; /* "data.sft" */
  const char *limit_name;
  int64_t limit; /* tokens of an example: loader_limit */
  bool bos;      /* sequences begin with it: tokenizer.add_bos */
  DataReport *report;
  int64_t overlong, empty, same; /* why records were dropped */
} Loader;
int loader_init(Loader *l, const Recipe *r, const Tokenizer *t, const DataSource *data,
                const char *name, DataReport *report, Error *err);
/* The longest example: the key's so many tokens or, where it says 0, as many as there is room for.
 */
void loader_limit(Loader *l, const char *key, int64_t tokens, int64_t room);
void loader_close(Loader *l);
/* Begins a sequence: BOS as the recipe says, then the text. */
int loader_begin(const Loader *l, const Record *r, const Marked *m, TokenList *out, Error *err);
/* Prompt and answer of a dialogue whose last turn is the answer; *prompt_len tokens are before it.
 * Behind the answer is EOS as the recipe says, unless the template ended the turn itself. loss:
 * gets a 1 for each token of an answer, earlier ones too, a 0 for the others; NULL: nobody asks,
 * and the tokens before the last answer are those of a prompt. 0: the answer is empty (blank); 1:
 * done. */
int loader_dialogue(const Loader *l, const Record *r, const Dialogue *d, TokenList *out,
                    TokenList *loss, int *prompt_len, Error *err);
/* A sequence of plain text without a template. 0: it is blank; 1: done. */
int loader_text(const Loader *l, const Record *r, const char *text, size_t len, TokenList *out,
                Error *err);
/* The error of a record with neither messages, nor a prompt, nor (with_text) a text. */
int loader_missing(const Loader *l, const Record *r, bool with_text, Error *err);
/* A record that is left out as empty: counted, or an error if the recipe says so. */
int loader_drop_empty(Loader *l, const Record *r, const char *what, Error *err);
/* A record of `tokens` tokens. 1: keep it as it is; 2: cut it (counted); 0: it is dropped
 * (counted). */
int loader_length(Loader *l, const Record *r, int64_t tokens, Error *err);
/* Of a prompt of `prompt` tokens before answers of at most `answer`: how many to keep so that both
 * fit into limit. The answer goes first, but the prompt loses no more than half of the room. */
int cut_keep(int prompt, int answer, int limit);
/* Leaves the last `keep` tokens of the prompt (a BOS at its start stays) and cuts behind limit.
 * loss: cut alike, or NULL. */
void cut_sequence(TokenList *seq, TokenList *loss, int prompt, int keep, int limit, int bos);

/* ---- pool: all examples of a file, before the split ---- */
typedef struct DataPool {
  int n, width;          /* examples, of so many sequences each */
  TokenList tokens;      /* packed */
  TokenList offsets;     /* [n * width + 1] */
  TokenList loss;        /* sft: 1 for each token that is learnt [tokens.n] */
  float *margins;        /* pairs [n] */
  char **text, **answer; /* prompts [n], owned until taken; answer[i] may be NULL */
} DataPool;
int data_pool_add(DataPool *p, const TokenList *seq, const char *place,
                  Error *err); /* one sequence */
/* Which examples are held out: round(n * fraction) of them by a seeded shuffle; at least one and
 * not all where fraction > 0 and n > 1. The caller frees. */
bool *data_pool_held(const DataPool *p, uint64_t seed, const char *name, double fraction);
/* Copies the examples with held[i] == want, in their order; ids gets their indices. */
int data_pool_take(const DataPool *p, const bool *held, bool want, TokenList *tokens,
                   int32_t **offsets, int32_t **ids);
void data_pool_free(DataPool *p);

/* Reads the loader's file: `add` gets every record and an empty sequence to use, and adds to the
 * pool what it makes of it. An error when nothing is left in the end. */
typedef int (*AddRecord)(Loader *l, const Record *r, DataPool *pool, TokenList *seq, Error *err);
int loader_run(Loader *l, DataPool *pool, AddRecord add, Error *err);

#endif
