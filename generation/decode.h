/* The two kinds of model step of a rollout, prefill and decode, and sampling. All buffers are made
 * once; a step allocates nothing here. */
#ifndef GENERATION_DECODE_H
#define GENERATION_DECODE_H

#include "generation/scheduler.h"

typedef struct Decoder Decoder;

/* Rows of a step of n sequences, those that fill it up included; whether there are any such. */
bool buckets_fill(const GenParams *p, DeviceKind kind);
int bucket_rows(const GenParams *p, DeviceKind kind, int n);
/* longest: most tokens of a sequence in the cache; max_tokens: of one prefill; most_rows: of a
 * step, those that fill it up included. Device buffers come from the model's arena, whose weights
 * are FULL as long as the decoder lives. Counts in stats. */
Decoder *decoder_create(Model *m, const GenParams *p, Scheduler *s, int longest, int max_tokens,
                        int most_rows, GenStats *stats);
void decoder_destroy(Decoder *d);
/* Computes the cache of the rows from `first` on, packed, and draws the next token of each. -1 when
 * the model's logits are not finite, naming the request. */
int decoder_prefill(Decoder *d, int first, Error *err);
/* Tokens that decoder_prefill will compute. */
int decoder_prefill_tokens(const Decoder *d, int first);
/* Makes room (sched_make_room) for steps that feed the newest token of every row and draw the next.
 * Returns how many: as GenParams.look says, or fewer, when pages are short or all rows end; one
 * while a row may not draw an EOS. */
int decoder_plan(Decoder *d);
/* Rows of such a step, those that fill it up included. */
int decoder_step_rows(const Decoder *d);
/* Whether a row may not draw an EOS in such a step: the host then has a part in it. */
bool decoder_bans(const Decoder *d);
/* steps: at most as many as were planned. rows: of each, 0: as decoder_step_rows says. mixed: other
 * ranks that take part queue something else, so none of the steps can be a captured one. */
typedef struct StepPlan {
  int steps, rows;
  bool mixed;
} StepPlan;
int decoder_decode(Decoder *d, StepPlan plan, Error *err);

/* generate's loop where the ranks of a group take every step together (together.c). */
typedef struct Stepping {
  Model *model;
  Comm *group;
  Decoder *decoder;
  Scheduler *sched;
  int prefill_tokens; /* of this rank, computed together */
  int entering;       /* rows that must be free before others enter */
  bool fills;         /* steps are filled up to a bucket's rows */
} Stepping;
bool is_time_to_enter(const Scheduler *s, int entering);
/* -1: an error of this rank. 1: of another one, which says why. */
int step_together(const Stepping *t, GenStats *stats, Error *err);

#endif
