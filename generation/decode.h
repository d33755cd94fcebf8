/* The two kinds of model step of a rollout, prefill and decode, and sampling. All buffers are made
 * once; a step allocates nothing here. */
#ifndef GENERATION_DECODE_H
#define GENERATION_DECODE_H

#include "generation/scheduler.h"

typedef struct Decoder Decoder;

/* longest: most tokens of a sequence in the cache; max_tokens: of one prefill. Device buffers come
 * from the model's arena, whose weights are FULL as long as the decoder lives. Counts in stats. */
Decoder *decoder_create(Model *m, const GenParams *p, Scheduler *s, int longest, int max_tokens,
                        GenStats *stats);
void decoder_destroy(Decoder *d);
/* Computes the cache of the rows from `first` on, packed, and draws the next token of each. -1 when
 * the model's logits are not finite, naming the request. */
int decoder_prefill(Decoder *d, int first, Error *err);
/* Makes room (sched_make_room), feeds the newest token of every row and draws the next, as often as
 * GenParams.look says: fewer times when pages are short or all rows end, once while a row may not
 * draw an EOS. */
int decoder_decode(Decoder *d, Error *err);

#endif
