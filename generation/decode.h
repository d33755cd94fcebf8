/* The two kinds of model step of a rollout, prefill and decode, and sampling. All buffers are made
 * once; a step allocates nothing here. */
#ifndef GENERATION_DECODE_H
#define GENERATION_DECODE_H

#include "generation/scheduler.h"

typedef struct Decoder Decoder;

/* max_tokens: most tokens of one prefill. Device buffers come from the model's arena. */
Decoder *decoder_create(Model *m, const GenParams *p, Scheduler *s, int max_tokens);
void decoder_destroy(Decoder *d);
/* Computes the cache of the rows from `first` on, packed, and draws the next token of each. -1 when
 * the model's logits are not finite, naming the request. */
int decoder_prefill(Decoder *d, int first, Error *err);
/* Feeds the newest token of every row and draws the next. */
int decoder_step(Decoder *d, Error *err);

#endif
