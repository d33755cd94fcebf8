/* Rollout: what passes between generation, actor, critic and reward. Structure of arrays over
 * packed sequences: sequence b is tokens[offsets[b] .. offsets[b+1]), its first prompt_len[b]
 * tokens are the prompt, the rest is the response.
 *
 * Every per-token array is indexed like tokens and means "of this token": logprobs[t] = log p(token
 * t | tokens before it), values[t] = V(state before token t) = the value head at token t - 1,
 * rewards[t], advantages[t], returns[t] belong to the action of emitting token t. Only response
 * tokens have them; prompt positions are 0. So the first response token is trained, the score sits
 * on the last one, and V beyond the last token is 0 without anyone shifting an index.
 *
 * The whole (global) rollout is held by every rank, bit for bit the same: it is small beside the
 * models, and whitening, denominators and minibatches then need no care about ranks. Each rank
 * fills the fields of its own sequences and rollout_share (orchestrator) exchanges them.
 *
 * Each field has one writer; `have` tells whether it was written, and readers assert it. */
#ifndef CORE_ROLLOUT_H
#define CORE_ROLLOUT_H

#include <stdint.h>

#include "core/error.h"

typedef enum RolloutField {
  RO_SAMPLED_LOGPROBS =
      1 << 0, /* generation: log-prob of what was sampled from (after filters, at temperature) */
  RO_OLD_LOGPROBS =
      1 << 1, /* actor: the update's own forward before the first update, at temperature */
  RO_REF_LOGPROBS = 1 << 2, /* actor (reference model), at the same temperature */
  RO_VALUES = 1 << 3,       /* critic */
  RO_SCORES = 1 << 4,       /* reward: one per sequence, raw */
  RO_REWARDS = 1 << 5,      /* reward shaping: per token, KL included */
  RO_ADVANTAGES = 1 << 6,   /* critic: GAE, whitened if the recipe says so */
  RO_RETURNS = 1 << 7       /* critic: raw advantage + value */
} RolloutField;

typedef struct Rollout {
  int n_seqs;
  int n_tokens;        /* = offsets[n_seqs] */
  int32_t *offsets;    /* [n_seqs + 1] */
  int32_t *tokens;     /* [n_tokens] */
  int32_t *prompt_len; /* [n_seqs], >= 1 */
  int32_t *prompt_id;  /* [n_seqs] index of the prompt in its data set */
  int32_t *sample_id;  /* [n_seqs] 0.. among the samples of one prompt */
  uint8_t *ended;      /* [n_seqs] 1: the last token is an EOS; 0: cut by length */
  float *sampled_logprobs, *old_logprobs, *ref_logprobs, *values, *rewards, *advantages,
      *returns;  /* [n_tokens] */
  float *scores; /* [n_seqs] */
  uint8_t *kept; /* [n_tokens, (V + 7) / 8] bits of the ids that each token was drawn from, bit id %
                    8 of byte id / 8; NULL where log-probabilities are of the whole softmax */
  int kept_width; /* bytes */
  unsigned have;  /* RolloutField bits */
} Rollout;

/* Allocates for the given lengths; all per-token arrays zeroed, have = 0. */
Rollout *rollout_create(int n_seqs, const int32_t *lengths);
void rollout_free(Rollout *r);
void rollout_keep(Rollout *r, int width); /* makes room for kept, zeroed */
void rollout_need(const Rollout *r, unsigned fields,
                  const char *reader);                /* dies naming what is missing */
float *rollout_array(Rollout *r, RolloutField field); /* the array of one per-token field */
static inline int rollout_len(const Rollout *r, int b) { return r->offsets[b + 1] - r->offsets[b]; }
static inline int rollout_response_len(const Rollout *r, int b) {
  return rollout_len(r, b) - r->prompt_len[b];
}
static inline int rollout_first(const Rollout *r, int b) {
  return r->offsets[b] + r->prompt_len[b];
} /* first response token */
int64_t rollout_response_tokens(const Rollout *r);

/* Splits the sequences ids[0..n) (indices into r; NULL: all) over `world` ranks, balanced by tokens
 * (longest first, to the least loaded rank, ties to the lowest rank), then each rank's share into
 * micro-batches of at most max_tokens tokens (a longer sequence goes alone). Deterministic and
 * pure: every rank computes the same plan. All ranks get n_micro micro-batches (the most any rank
 * needs), some of them empty, so that collectives match. */
typedef struct MicroBatch {
  int n_seqs;
  int32_t *ids; /* indices of sequences, ascending */
} MicroBatch;
typedef struct BatchPlan {
  int n_micro;
  MicroBatch *micro; /* this rank's */
} BatchPlan;
BatchPlan plan_batches(const int32_t *lengths, const int32_t *ids, int n, int rank, int world,
                       int max_tokens);
void plan_free(BatchPlan *p);
/* As above with groups that must stay together in one micro-batch: sequences 2i and 2i+1 (pairs).
 */
BatchPlan plan_pairs(const int32_t *lengths, const int32_t *pair_ids, int n_pairs, int rank,
                     int world, int max_tokens);

/* A packed batch in host memory. Positions are 0.. within each sequence. n_seqs may be 0. */
typedef struct Batch {
  int n_seqs;
  const int32_t *offsets; /* [n_seqs + 1] */
  const int32_t *tokens;
} Batch;

/* The sequences of one micro-batch copied out of a packed set (tokens, offsets), and the rows a
 * loss looks at. For pack_targets, row i predicts targets[i], the token at index[i] of the source:
 * rows are the positions before tokens from[b] .. end of each sequence b (from: index within the
 * sequence, >= 1; prompt_len for responses). For pack_last, rows are the last tokens (targets and
 * index NULL). Owned; pack_free. */
typedef struct Pack {
  Batch batch;
  int n_rows;
  int32_t *rows, *targets, *index;
  int32_t *offsets, *tokens; /* what batch points to */
} Pack;
Pack pack_targets(const int32_t *offsets, const int32_t *tokens, const int32_t *from,
                  const MicroBatch *mb);
Pack pack_last(const int32_t *offsets, const int32_t *tokens, const MicroBatch *mb);
/* Of the rows of pack_targets, leaves those whose target is marked (mask: by index, of the source;
 * NULL: all). */
void pack_select(Pack *p, const uint8_t *mask);
/* Rows of bits of a pack's rows, for model_restrict; NULL where the rollout has none; the caller
 * frees. */
uint8_t *pack_kept(const Pack *p, const Rollout *r);
void pack_free(Pack *p);

/* Weight of each response token in a mean over the minibatch ids[0..n): token mean: 1 / (all its
 * response tokens); sequence mean: 1 / (sequences with a response * own response length). weight[b]
 * is indexed by sequence of r; an empty answer weighs 0. */
void rollout_weights(const Rollout *r, const int32_t *ids, int n, bool sequence_mean,
                     double *weight);

#endif
