/* A burst: several decode steps in a row without the host in between.
 *
 * The state of all rows lies on the device and moves on there (decode_advance). The host writes it
 * before the first step and reads the history of drawn tokens after the last one. What a row drew
 * behind an EOS is thrown away; a row that reaches its limit is inert from then on.
 *
 * A device with graphs queues a whole step at once. A graph has one number of rows, so rows are
 * filled up by inert ones to one of few numbers, a bucket; each bucket's first step runs as it is
 * (the graph needs what that prepares), the next is captured. With many rows a few run so: products
 * find their best algorithm in their first uses. */
#include <stdlib.h>
#include <string.h>

#include "generation/decode_internal.h"

typedef struct Bucket {
  int rows;
  int prepared;       /* steps that ran as they are */
  DeviceGraph *graph; /* NULL: not yet, or the device has none */
} Bucket;

/* State of b rows, I32 but for streams (I64) and u (F32): stream, token, position, len, slot, end,
 * u, each of b, and the count of steps; in one buffer, for one upload. */
enum { STATE_WORDS = 8 }; /* per row */

struct Burst {
  int steps; /* most of a burst */
  int first; /* place of position 0 */
  Bucket *buckets;
  int n_buckets;
  Tensor state, history;       /* history: tokens [steps, b], log-probabilities [steps, b] */
  int32_t *host_state, *drawn; /* the same on the host */
  int32_t *positions; /* [steps * rows] of tokens that were fed and whose successor counts */
};

/* ---- buckets ---- */

/* Where nothing is captured, nothing is. */
bool buckets_fill(const GenParams *p, DeviceKind kind) {
  return kind != DEVICE_CPU || gen_look(p, kind) > 1;
}

int bucket_rows(const GenParams *p, DeviceKind kind, int n) {
  static const int sizes[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256};
  enum { SIZES = sizeof sizes / sizeof *sizes, STEP = 64 };
  if (!buckets_fill(p, kind)) return n;
  for (int i = 0; i < SIZES; i++)
    if (n <= sizes[i]) return sizes[i];
  return (n + STEP - 1) / STEP * STEP;
}

static Bucket *bucket_of(Burst *b, int rows) {
  for (int i = 0; i < b->n_buckets; i++)
    if (b->buckets[i].rows == rows) return &b->buckets[i];
  b->buckets = mem_grow(b->buckets, (size_t)b->n_buckets + 1, sizeof *b->buckets);
  b->buckets[b->n_buckets] = (Bucket){.rows = rows};
  return &b->buckets[b->n_buckets++];
}

Burst *burst_create(Decoder *d, int longest, int steps) {
  Burst *b = mem_zalloc(1, sizeof *b);
  int64_t rows = d->logits_BV.dim[0], words = rows * STATE_WORDS + 1, cells = rows * steps;
  b->steps = steps;
  b->first = model_place_first(d->model, longest);
  b->state = push_1d(d->model, DT_I32, words);
  b->history = push_1d(d->model, DT_I32, 2 * cells);
  b->host_state = mem_alloc((size_t)words + 1, sizeof *b->host_state);
  b->drawn = mem_alloc((size_t)(2 * cells), sizeof *b->drawn);
  b->positions = mem_alloc((size_t)cells, sizeof *b->positions);
  return b;
}

void burst_destroy(Decoder *d) {
  Burst *b = d->burst;
  for (int i = 0; i < b->n_buckets; i++) device_graph_free(d->device, b->buckets[i].graph);
  free(b->buckets);
  free(b->host_state);
  free(b->drawn);
  free(b->positions);
  free(b);
}

/* ---- state ---- */

static DecodeRows device_rows(const Decoder *d, int rows) {
  const Burst *b = d->burst;
  int32_t *state = tensor_i32(b->state), *history = tensor_i32(b->history);
  int64_t n = rows;
  DecodeRows r = {.page_size = d->sched->kv->page_size, .first = b->first, .seed = d->params->seed};
  r.stream_B = tensor_1d(state, DT_I64, n);
  r.token_B = tensor_1d(state + 2 * n, DT_I32, n);
  r.position_B = tensor_1d(state + 3 * n, DT_I32, n);
  r.len_B = tensor_1d(state + 4 * n, DT_I32, n);
  r.slot_B = tensor_1d(state + 5 * n, DT_I32, n);
  r.end_B = tensor_1d(state + 6 * n, DT_I32, n);
  r.u_B = tensor_1d(state + 7 * n, DT_F32, n);
  r.step_1 = tensor_1d(state + STATE_WORDS * n, DT_I32, 1);
  r.table_BP = head_of(d->tables_BP, n);
  r.drawn_B = head_of(d->drawn_B, n);
  r.logprob_B = head_of(d->logprobs_B, n);
  r.history_token_TB = tensor_2d(history, DT_I32, b->steps, n);
  r.history_logprob_TB = tensor_2d(history + b->steps * n, DT_F32, b->steps, n);
  return r;
}

static void fill_row(Decoder *d, int r, int rows) {
  const Scheduler *s = d->sched;
  const Row *row = &s->rows[r];
  const GenRequest *q = &s->requests[row->request];
  int32_t *at = d->burst->host_state + 2 * rows + r;
  uint64_t stream = request_stream(d->params, q);
  float u = random_number(d->params, q, row->len);
  memcpy(d->burst->host_state + 2 * r, &stream, sizeof stream);
  at[0 * rows] = sched_token(s, row, row->len - 1);
  at[1 * rows] = d->burst->first + row->len - 1;
  at[2 * rows] = row->len;
  at[3 * rows] = kv_slot(s->kv, sched_table(s, r), row->len - 1);
  at[4 * rows] = s->limits[row->request];
  memcpy(&at[5 * rows], &u, sizeof u);
}

static void fill_inert(Decoder *d, int r, int rows) {
  int32_t *at = d->burst->host_state + 2 * rows + r;
  const float u = 0.5F;
  memset(d->burst->host_state + 2 * r, 0, sizeof(int64_t));
  for (int i = 0; i < 5; i++) at[i * rows] = 0;
  at[1 * rows] = d->burst->first;
  at[3 * rows] = -1;
  memcpy(&at[5 * rows], &u, sizeof u);
}

static void upload_state(Decoder *d, int rows) {
  int n = d->sched->n_rows;
  for (int r = 0; r < n; r++) fill_row(d, r, rows);
  for (int r = n; r < rows; r++) fill_inert(d, r, rows);
  d->burst->host_state[STATE_WORDS * rows] = 0; /* steps */
  upload_tables(d);
  seen_seats(d, 0, n, rows);
  upload(d, head_of(d->burst->state, STATE_WORDS * rows + 1), d->burst->host_state);
}

/* ---- steps ---- */

typedef struct Step {
  Decoder *d;
  DecodeRows rows;
} Step;

static void attend_step(void *ctx, int layer, Tensor qkv_BQ, Tensor cos_Pr, Tensor sin_Pr,
                        Tensor out_BHD) {
  const Step *s = ctx;
  const Decoder *d = s->d;
  Tensor k = d->sched->kv->k[layer], v = d->sched->kv->v[layer];
  d->ops->decode_attend(d->device, s->rows, qkv_BQ, cos_Pr, sin_Pr, d->shape, k, v, out_BHD);
}

static void queue_step(Step *s) {
  Decoder *d = s->d;
  const DecodeRows *r = &s->rows;
  Tensor logits_BV = head_of(d->logits_BV, r->token_B.dim[0]);
  model_decode(d->model, r->token_B, r->position_B, attend_step, s, logits_BV);
  d->ops->sample(d->device, logits_BV, d->params->sample, r->u_B, (Tensor){0},
                 seen_of(d, 0, r->token_B.dim[0], r->token_B), kept_burst(d, r), r->drawn_B,
                 r->logprob_B);
  d->ops->decode_advance(d->device, *r);
}

/* In tensor parallel products have the rows of all ranks. */
static int steps_before_capture(const Decoder *d, int rows) {
  const Comm *group = model_rollout_group(d->model, d->params->weights);
  return rows * (group ? comm_size(group) : 1) > 64 ? 4 : 1;
}

/* Ranks that exchange something in every step do here the same at the same time. */
static void run_steps(Decoder *d, int rows, StepPlan plan) {
  Bucket *b = bucket_of(d->burst, rows);
  Step s = {d, device_rows(d, rows)};
  bool captures = !plan.mixed && model_decode_captures(d->model, rows);
  for (int i = 0; i < plan.steps; i++) {
    bool ready = captures && b->prepared >= steps_before_capture(d, rows);
    if (ready && !b->graph && device_capture_begin(d->device)) {
      queue_step(&s);
      b->graph = device_capture_end(d->device);
    }
    if (ready && b->graph) {
      device_graph_launch(d->device, b->graph);
    } else {
      queue_step(&s);
      b->prepared += captures;
    }
  }
}

/* ---- what came of it ---- */

static int append_row(Decoder *d, int r, int rows, int steps, int *kept, Error *err) {
  const Burst *b = d->burst;
  int len = d->sched->rows[r].len;
  for (int i = 0, over = 0; i < steps && !over; i++) {
    float logprob;
    memcpy(&logprob, &b->drawn[(b->steps + i) * rows + r], sizeof logprob);
    int32_t token = b->drawn[i * rows + r];
    require(token >= 0);
    d->stats->cached_tokens += attended(d, len + i);
    b->positions[(*kept)++] = len + i - 1;
    over = append_token(d, r, (int64_t)i * rows + r, token, logprob, err);
    if (over < 0) return -1;
  }
  return 0;
}

int burst_run(Decoder *d, StepPlan plan, Error *err) {
  Burst *b = d->burst;
  int n = d->sched->n_rows, steps = plan.steps, kept = 0;
  int rows = plan.rows ? plan.rows : decoder_step_rows(d);
  require(steps <= b->steps && rows >= n);
  upload_state(d, rows);
  run_steps(d, rows, plan);
  device_download(d->device, b->drawn, b->history.data,
                  (size_t)(2 * b->steps * rows) * sizeof *b->drawn);
  kept_download(d, (int64_t)steps * rows);
  for (int r = n; r-- > 0;) /* from the last: see sched_append */
    if (append_row(d, r, rows, steps, &kept, err)) return -1;
  model_count_decode(d->model, kept, b->positions);
  d->stats->decode_steps += steps;
  d->stats->drawn_rows += kept;
  d->stats->step_rows += (int64_t)steps * rows;
  return 0;
}
