/* orchestrator: the loop, the stages, the run directory, the report and the command line. */
#ifndef ORCHESTRATOR_H
#define ORCHESTRATOR_H

#include "actor/actor.h"
#include "critic/critic.h"
#include "generation/generation.h"
#include "reward/reward.h"

/* ---- devices (devices.c) ---- */
/* name: cpu, cuda, or auto, which is cuda where every rank finds a GPU, else cpu (say: logs which,
 * and why). Attached to the grid. Collective. */
Device *device_choose(Grid *g, const char *name, int threads, bool say, Error *err);
/* name: float32 (or fp32), bfloat16, or auto: bfloat16 on cuda, float32 on cpu. */
int precision_choose(const char *name, const Device *d, DType *out, Error *err);
/* How much the backward pass computes again: none, selective, full; auto: as little as memory
 * allows, which the memory plan finds (memory_choose_recompute). */
typedef struct RecomputeChoice {
  Recompute how;
  int blocks; /* ModelOptions.recompute_blocks */
  bool by_memory;
} RecomputeChoice;
RecomputeChoice recompute_parse(const char *name);

/* ---- data ---- */
/* Examples of one data set as tokens, packed: example i is tokens.v[offsets[i] .. offsets[i + 1]).
 * Every rank reads the same files and holds the same sets; held-out examples are drawn by the seed.
 *
 * What a record may look like (field names are the recipe's): a conversation, a prompt with its
 * completion, or a plain text; a pair's answers are texts, messages, or whole conversations.
 * Conversations and prompts go through data.chat, texts do not. Prompt and answer are encoded
 * apart, so that training sees the tokens that generation starts from. One BOS begins a sequence
 * and an EOS ends an answer, as the recipe says. Of a conversation all answers are learnt.
 *
 * Overlong examples that are to be cut: an SFT example or a pair loses the beginning of its prompt,
 * down to half of the room at most, then the end of its answers; a prompt for PPO loses its
 * beginning, a text its end. Empty answers and prompts and pairs of two equal answers are dropped.
 */
typedef struct SftSet {
  int n;
  TokenList tokens;
  int32_t *offsets;
  uint8_t *loss; /* [tokens.n] 1: learnt */
} SftSet;
typedef struct PairSet {
  int n;
  TokenList tokens;
  int32_t *offsets; /* [2n+1] chosen, rejected */
  float *margins;
} PairSet;
typedef struct PromptSet {
  int n;
  TokenList tokens;
  int32_t *offsets;
  char **text;   /* the prompt without the template; what is left of it when it was cut */
  char **answer; /* expected answers; NULL without data.prompts.answer_field */
} PromptSet;
typedef struct DataReport {
  int64_t records, dropped, truncated;
} DataReport;
/* room: tokens that the models have positions for (prompts: less what is generated); the longest
 * example where the recipe says 0. */
int data_load_sft(const Recipe *r, const Tokenizer *t, int64_t room, SftSet *train,
                  SftSet *held_out, DataReport *rep, Error *err);
int data_load_pairs(const Recipe *r, const Tokenizer *t, int64_t room, PairSet *train,
                    PairSet *held_out, DataReport *rep, Error *err);
int data_load_prompts(const Recipe *r, const Tokenizer *t, int64_t room, PromptSet *train,
                      PromptSet *held_out, DataReport *rep, Error *err);
/* The token that ends an answer in the format of data.chat; -1: it has none of its own. */
int data_end_token(const Recipe *r, const Tokenizer *t);
void sft_set_free(SftSet *s);
void pair_set_free(PairSet *s);
void prompt_set_free(PromptSet *s);
/* The i-th index of an endless shuffled walk over n items: epoch i / n is permuted by (seed,
 * epoch). Pure, so that a resumed run needs only the position. */
int32_t data_order(uint64_t seed, const char *what, int64_t i, int32_t n);

/* ---- what a rollout's weights are called (rollout_words.c) ---- */
/* replica, tensor_parallel, stream; training, int8, fp8. -1: another word; *out is then the first.
 */
int rollout_weights_parse(const char *word, RolloutWeights *out);
const char *rollout_weights_name(RolloutWeights w);
int rollout_format_parse(const char *word, WireKind *out);

/* ---- sharing a rollout between ranks ---- */
/* Who generated each of n requests, and what came of this rank's own. */
typedef struct RolloutShare {
  int32_t *owner;    /* [n] ranks, the same everywhere */
  GenResult *result; /* [n] */
  int n;
  GenStats stats; /* of this rank */
} RolloutShare;
/* Generates n requests, the same on every rank: request g begins with rank g % world, and goes to
 * another of its node where that has less to do (GenParams.owner). Rows are at most those of an
 * equal share. Nothing is left after an error. Collective. */
int rollout_generate(Model *m, const GenParams *p, const GenRequest *all, int n, RolloutShare *out,
                     Error *err);
void rollout_share_free(RolloutShare *s);
/* Of the rank that had least to do: how long it ran steps, as a share of how long the last rank was
 * at it. Collective. */
double rollout_busy(const RolloutShare *s, Comm *c);
/* Every rank leaves with the same rollout, in request order. result[g] counts where owner[g] is
 * this rank. Writes tokens, ended and the sampled log-probs. Collective. */
Rollout *rollout_share(Comm *c, const GenRequest *req, int n, const int32_t *owner,
                       const GenResult *result);
/* The same of what results kept, rows of `width` bytes. */
void rollout_share_kept(Comm *c, Rollout *ro, const int32_t *owner, const GenResult *result,
                        int width);
/* Each rank has filled the sequences that plan_batches(lengths, NULL, n, rank, world, max_tokens)
 * gives it; afterwards all ranks hold all of them. The field's have bit is set. Collective. */
void rollout_share_field(Comm *c, Rollout *ro, RolloutField field, int max_tokens);
/* The same for one number per sequence. */
void rollout_share_scores(Comm *c, const Rollout *ro, float *scores, int max_tokens);

/* ---- report: orchestrator/report.h ---- */
typedef enum Phase {
  PH_ROLLOUT,
  PH_ACTOR_LOGPROBS,
  PH_REFERENCE,
  PH_VALUES,
  PH_REWARDS,
  PH_ADVANTAGES,
  PH_ACTOR_UPDATE,
  PH_CRITIC_UPDATE,
  PH_REFRESH,
  PH_CHECKPOINT,
  PH_SFT,
  PH_REWARD_TRAIN,
  PH_EVAL,
  PH_OTHER,
  PH_COUNT
} Phase;
/* What one phase took. Seconds of communication are those that compute waited for it, and part of
 * the seconds; hidden ones ran beside compute. Sequences and tokens are those of the whole batch,
 * not of one rank; generated tokens are only those after a prompt. */
typedef struct PhaseTotals {
  double seconds, flops, comm_seconds, hidden_seconds;
  int64_t sequences, prompt_tokens, generated_tokens;
  Traffic traffic;
  size_t peak_bytes;
  int64_t calls;
} PhaseTotals;

#endif
