/* generation: the tokenizer and the rollout engine (scheduler, paged KV cache, decode, sampler).
 * Random numbers are keyed by (seed, step, prompt id, sample id, position), so that a sample does
 * not depend on its company in the batch or on the number of ranks. */
#ifndef GENERATION_H
#define GENERATION_H

#include "core/rollout.h"
#include "model/model.h"

/* ---- tokenizer: SentencePiece (tokenizer.model) or byte-level BPE (tokenizer.json, or vocab.json
 * and merges.txt) ---- */
typedef struct Tokenizer Tokenizer;
/* path: a folder with one of these, the first of them that is there, and tokenizer_config.json,
 * special_tokens_map.json (add_bos_token, added tokens); or a .model file. Another kind of
 * tokenizer is refused by name. */
Tokenizer *tokenizer_load(const char *path, Error *err);
void tokenizer_free(Tokenizer *t);
bool tokenizer_exists(const char *dir); /* the folder has one of these files */
const char *tokenizer_kind(const Tokenizer *t);
int tokenizer_vocab_size(const Tokenizer *t);
int tokenizer_bos(const Tokenizer *t); /* -1: none */
int tokenizer_eos(const Tokenizer *t);
bool tokenizer_adds_bos(const Tokenizer *t);
int tokenizer_special(const Tokenizer *t,
                      const char *text); /* id of a control/added token spelled so, or -1 */

enum {
  TOK_BOS = 1,
  TOK_SPECIAL = 2, /* spelled special tokens in text become their ids (templates only) */
  TOK_CONTINUE = 4 /* the text goes on where another ended: without the space that SentencePiece
                      puts before a text */
};
/* Appends to a growing array; text is bytes of any kind (those that are no UTF-8 become byte
 * tokens, or are an error naming the byte offset where the vocabulary has none). */
typedef struct TokenList {
  int32_t *v;
  int n, cap;
} TokenList;
int tokenizer_encode(const Tokenizer *t, const char *text, size_t len, int flags, TokenList *out,
                     Error *err);
/* As with TOK_SPECIAL, but a special token is only looked for where no byte of it is content
 * (content[i] != 0): the pieces of a template may spell them, what users wrote may not. */
int tokenizer_encode_template(const Tokenizer *t, const char *text, const char *content, size_t len,
                              int flags, TokenList *out, Error *err);
void token_list_push(TokenList *l, int32_t id);
void token_list_free(TokenList *l);
/* Decodes to a malloc'ed NUL-terminated string; control tokens are left out. Ids out of range:
 * error. */
char *tokenizer_decode(const Tokenizer *t, const int32_t *ids, int n, size_t *len, Error *err);

/* ---- generate ---- */
typedef struct GenParams {
  SampleParams sample;
  int max_new_tokens;
  const int32_t *max_new_of; /* [requests] each one's own, at most max_new_tokens; NULL: that */
  int min_new_tokens;        /* EOS cannot be drawn before */
  int n_eos;
  int eos_ids[MODEL_MAX_EOS]; /* none: only the length ends a sequence */
  bool keep;                  /* results say which ids each token was drawn from; not greedy */
  uint64_t seed, step;
  int max_batch;          /* sequences decoded together; 0: 64, or 256 with max_kv_tokens given */
  int page_size;          /* tokens per KV page; 0: 16 */
  int64_t max_kv_tokens;  /* page budget in tokens, at least the longest request; 0: what max_batch
                             sequences of the longest request need. With less, sequences wait, and
                             the youngest may have to give its pages back and be computed anew */
  int prefill_tokens;     /* prompt tokens computed together, a longer prompt alone; 0:
                             gen_prefill_tokens */
  RolloutWeights weights; /* what is held on this rank */
  WireKind format; /* of matrices: WIRE_F32 (as they are computed with), WIRE_INT8, WIRE_FP8 */
  int32_t *owner;  /* [requests] NULL: all are this rank's. Else all ranks of a node bring the same
                      requests, each with the local rank that it begins with; ranks with a replica
                      take requests that have not begun from those that have more to do. Becomes, on
                      all ranks of the node, who generated each: results are there alone */
  int look;        /* decode steps from one look of the host at what was drawn to the next; what
                      is drawn behind an EOS is thrown away. The tokens do not depend on it. 0:
                      gen_look */
} GenParams;

int gen_prefill_tokens(DeviceKind kind);           /* 4096 on the CPU, 16384 on a GPU */
int gen_look(const GenParams *p, DeviceKind kind); /* what p says, or 1 on the CPU, 8 on a GPU */

typedef struct GenRequest {
  const int32_t *prompt;
  int prompt_len;
  int prompt_id, sample_id;
} GenRequest;
typedef struct GenResult {
  int32_t *tokens;
  float *logprobs;
  uint8_t *kept; /* [n, (V + 7) / 8] with keep: bit id % 8 of byte id / 8, 1 where the id could have
                    been drawn, after bans and filters; else NULL */
  int n;
  bool ended; /* by an EOS, which is the last token */
} GenResult;

/* Generates for this rank's requests (n may differ between ranks, 0 included). A replica is
 * gathered once by all (or was: model_rollout_begin), and then no rank waits for another until the
 * end; the other kinds of weights take every step together, until all have ended. Results in
 * request order; gen_results_free. A prompt that is empty or leaves no room within max_positions is
 * an error before anything runs; logits that are not finite are one when they are drawn from. An
 * error on one rank is one on all, and no results are left. Samples of one prompt id that stand
 * next to each other share the prompt's computation and pages. Collective. */
typedef struct GenStats {
  int64_t prompt_tokens, generated_tokens, decode_steps;
  int64_t drawn_rows, step_rows; /* of all decode steps: rows whose token was kept, and all rows */
  int64_t cached_tokens;         /* that the drawn rows attended to */
  double prefill_seconds, decode_seconds, gather_seconds;
  double wait_seconds;  /* for other ranks, where requests are shared */
  uint64_t inter_bytes; /* that this rank received from other nodes, for weights and activations */
} GenStats;
int generate(Model *m, const GenParams *p, const GenRequest *req, int n, GenResult *out,
             GenStats *stats, Error *err);
void gen_results_free(GenResult *r, int n);

#endif
