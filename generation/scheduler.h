/* The scheduler: which sequences run, and on which pages. Continuous batching: a sequence that ends
 * leaves at once, its pages are free for the next, and those waiting enter in request order.
 *
 * Running sequences are rows 0 .. n_rows of the decode batch; row r's page table is tables[r]. A
 * row takes pages as it grows, a few steps ahead. When none are left, the running sequence that
 * came last gives its pages back and waits at the front of the queue; it keeps its tokens, and its
 * cache is computed anew when it returns. The budget holds the longest request alone, so the oldest
 * always goes on.
 *
 * Samples of one prompt that enter together share the full pages of the prompt (`lead`). */
#ifndef GENERATION_SCHEDULER_H
#define GENERATION_SCHEDULER_H

#include "generation/generation.h"
#include "generation/kv_cache.h"

typedef struct Row {
  int request;
  int len;      /* tokens known: prompt and response so far */
  int n_pages;  /* in the row's page table */
  int uploaded; /* how many of them the device's copy of the table has */
  int seat;     /* below max_rows, its own while it runs, wherever the row moves */
  int lead;     /* from admission to prefill: the row whose prompt this one repeats, else -1 */
} Row;

typedef struct Scheduler {
  KvCache *kv;
  const GenRequest *requests;
  GenResult *results;    /* [requests] tokens and logprobs have room up to the limit */
  const int32_t *limits; /* [requests] tokens at which a sequence is cut, prompt included */
  int *waiting;          /* [requests] a stack of them: the next one is on top */
  int n_waiting;
  Row *rows;
  int n_rows, max_rows;
  int *seats;      /* [max_rows]; those of no row are from n_rows on */
  int32_t *tables; /* [max_rows, table_width] */
  int table_width;
} Scheduler;

/* owner: only requests of this rank wait, NULL: all do. */
Scheduler sched_create(KvCache *kv, const GenRequest *requests, GenResult *results,
                       const int32_t *limits, int n_requests, const int32_t *owner, int rank,
                       int max_rows, int table_width);
void sched_destroy(Scheduler *s);
/* A request that waits, and has not begun, goes to another rank; or comes from one, to wait behind
 * those with lower numbers. */
void sched_give(Scheduler *s, int request);
void sched_take(Scheduler *s, int request);

static inline int32_t *sched_table(const Scheduler *s, int row) {
  return s->tables + (int64_t)row * s->table_width;
}
/* Token p of a row's sequence, from its prompt or its response. */
static inline int32_t sched_token(const Scheduler *s, const Row *row, int p) {
  const GenRequest *q = &s->requests[row->request];
  return p < q->prompt_len ? q->prompt[p] : s->results[row->request].tokens[p - q->prompt_len];
}

/* Lets waiting sequences in, up to prefill_tokens to compute (a longer one alone), with pages for
 * all their known tokens. Returns how many: they are the last rows. */
int sched_admit(Scheduler *s, int prefill_tokens);
/* Before decode steps: pages for what every row puts into the cache in the next `ahead` steps, or
 * in half as many, and so on, where there are not enough; returns in how many. For one step at the
 * cost of the youngest rows. */
int sched_make_room(Scheduler *s, int ahead);
/* Adds a token to a row. When the sequence is thereby over, the row is gone, and the last row has
 * taken its place: so go through rows from the last to the first. */
void sched_append(Scheduler *s, int row, int32_t token, float logprob, bool is_eos);

#endif
