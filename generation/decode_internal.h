/* Inside of generation/decode.c, prefill.c and burst.c: what the kinds of step share. */
#ifndef GENERATION_DECODE_INTERNAL_H
#define GENERATION_DECODE_INTERNAL_H

#include "generation/decode.h"

typedef struct Burst Burst;

struct Decoder {
  Model *model;
  const Ops *ops;
  Device *device;
  AttnShape shape;
  const GenParams *params;
  Scheduler *sched;
  GenStats *stats;
  Burst *burst;
  int vocab;

  /* The step being made, on the host. */
  int n_tokens, n_segments, n_copies;
  int32_t *tokens, *positions, *slots; /* [n_tokens] */
  int32_t *offsets;                    /* [n_segments + 1] */
  int32_t *last;                       /* [rows] token whose logits a row samples from */
  int32_t *lens;                       /* [rows] cached tokens, the newest included */
  int32_t *copy_from, *copy_slots;     /* [n_copies] prompt tokens that a follower also keeps */
  float *u, *logprobs;                 /* [rows] */
  int32_t *seats, *newest;             /* [rows] */
  uint8_t *seen_bits;                  /* of one sequence; NULL: no repetition penalty */
  uint8_t *kept;                       /* as kept_TBW; NULL: nobody asks */
  int32_t *drawn;                      /* [rows] */

  /* The same on the device, with room for the largest step; rows of the largest bucket. */
  Tensor slots_N, offsets_S, copy_from_R, copy_slots_R, copy_RQ;
  Tensor tables_BP, lens_B, u_B, drawn_B, logprobs_B, logits_BV, banned_V;
  SeenTokens seen;
  Tensor kept_TBW; /* of each draw of a step or burst, densely */
};

/* ---- buffers of the model's arena ---- */
static inline Tensor push_2d(Model *m, DType t, int64_t rows, int64_t cols) {
  Tensor x = tensor_2d(NULL, t, rows, cols);
  x.data = arena_push(model_arena(m), tensor_bytes(x));
  return x;
}
static inline Tensor push_1d(Model *m, DType t, int64_t n) {
  Tensor x = tensor_1d(NULL, t, n);
  x.data = arena_push(model_arena(m), tensor_bytes(x));
  return x;
}
/* The first n rows of a buffer. */
static inline Tensor head_of(Tensor t, int64_t n) {
  require(n <= t.dim[0]);
  t.dim[0] = n;
  return t;
}
static inline void upload(Decoder *d, Tensor dst, const void *src) {
  device_upload(d->device, dst.data, src, tensor_bytes(dst));
}

/* ---- shared by the kinds of step (decode.c) ---- */
/* Tokens that the newest of so many attends to. */
static inline int attended(const Decoder *d, int tokens) {
  return d->shape.window > 0 && tokens > d->shape.window ? d->shape.window : tokens;
}
/* Where a request's random numbers come from; a token's index is its place in the sequence. */
uint64_t request_stream(const GenParams *p, const GenRequest *q);
float random_number(const GenParams *p, const GenRequest *q, int position);
/* Draws for the rows from `first` on, from the logits of as many rows, and appends. */
int draw_and_append(Decoder *d, int first, Error *err);
/* Adds what was drawn: 1 when the sequence is thereby over (see sched_append), else 0; -1 when the
 * log-probability is not finite. draw: its number among the draws of the step or burst. */
int append_token(Decoder *d, int row, int64_t draw, int32_t token, float logprob, Error *err);
/* Sends the pages that the device's tables lack. */
void upload_tables(Decoder *d);

/* ---- what the repetition penalty looks at (seen.c); all do nothing without one ---- */
void seen_create(Decoder *d, int64_t rows);
void seen_destroy(Decoder *d);
/* Writes the bits of a row that enters. */
void seen_enter(Decoder *d, int r);
/* Says which bits belong to the rows from `first` on, filled up to `rows` by rows without. */
void seen_seats(Decoder *d, int first, int n, int rows);
/* Sends the newest tokens of the same rows. */
void seen_newest(Decoder *d, int first, int n);
/* For the op, n of these rows; newest_B holds all. */
SeenTokens seen_of(const Decoder *d, int from, int64_t n, Tensor newest_B);

/* ---- which ids tokens were drawn from (kept.c); all do nothing unless GenParams.keep ---- */
void kept_create(Decoder *d, int64_t rows, int steps);
void kept_destroy(Decoder *d);
/* Where sample writes: for n rows from the one on; for all rows of a step of a burst. */
KeptTokens kept_alone(const Decoder *d, int from, int64_t n);
KeptTokens kept_burst(const Decoder *d, const DecodeRows *r);
/* Reads the first of what was written. */
void kept_download(Decoder *d, int64_t draws);
/* Adds a draw's to a row's result, before its token. */
void kept_append(Decoder *d, int row, int64_t draw);

/* ---- steps without the host (burst.c) ---- */
/* longest: tokens of a sequence in the cache; steps: the most of a burst. */
Burst *burst_create(Decoder *d, int longest, int steps);
void burst_destroy(Decoder *d);
/* Every row goes on by so many steps, or until it is over. The rows have their pages; none of them
 * has a ban on EOS. */
int burst_run(Decoder *d, StepPlan plan, Error *err);

#endif
