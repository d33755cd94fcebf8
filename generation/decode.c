/* Prefill, decode and sampling; see decode.h.
 *
 * The random number of a token is a pure function of (seed, step, prompt id, sample id, position):
 * neither the batch nor the rank has a part in it. */
#include "generation/decode.h"

#include <math.h>
#include <stdlib.h>

#include "core/rng.h"

struct Decoder {
  Model *model;
  const Ops *ops;
  Device *device;
  AttnShape shape;
  const GenParams *params;
  Scheduler *sched;
  int vocab;

  /* The step being made, on the host. */
  int n_tokens, n_segments, n_copies;
  int32_t *tokens, *positions, *slots; /* [n_tokens] */
  int32_t *offsets;                    /* [n_segments + 1] */
  int32_t *last;                       /* [rows] token whose logits a row samples from */
  int32_t *lens;                       /* [rows] cached tokens, the newest included */
  int32_t *copy_from, *copy_slots;     /* [n_copies] prompt tokens that a follower also keeps */
  float *u, *logprobs;                 /* [rows] */
  int32_t *drawn;                      /* [rows] */

  /* The same on the device, with room for the largest step. */
  Tensor slots_N, offsets_S, copy_from_R, copy_slots_R, copy_RQ;
  Tensor tables_BP, lens_B, u_B, drawn_B, logprobs_B, logits_BV, banned_V;
};

static Tensor push(Model *m, DType t, int64_t rows, int64_t cols) {
  Tensor x = tensor_2d(NULL, t, rows, cols);
  x.data = arena_push(model_arena(m), tensor_bytes(x));
  return x;
}

static Tensor push_1d(Model *m, DType t, int64_t n) {
  Tensor x = tensor_1d(NULL, t, n);
  x.data = arena_push(model_arena(m), tensor_bytes(x));
  return x;
}

static int32_t *host_i32(int64_t n) { return mem_alloc((size_t)n, sizeof(int32_t)); }

/* The first n rows of a buffer. */
static Tensor head_of(Tensor t, int64_t n) {
  require(n <= t.dim[0]);
  t.dim[0] = n;
  return t;
}

static void upload(Decoder *d, Tensor dst, const void *src) {
  device_upload(d->device, dst.data, src, tensor_bytes(dst));
}

/* U8 per id, 1 for every EOS: what may not be drawn before min_new_tokens. */
static Tensor push_banned(Model *m, const GenParams *p, int vocab) {
  if (p->min_new_tokens <= 0 || p->n_eos == 0) return (Tensor){0};
  Tensor t = push_1d(m, DT_U8, vocab);
  uint8_t *host = mem_zalloc((size_t)vocab, 1);
  for (int i = 0; i < p->n_eos; i++) host[p->eos_ids[i]] = 1;
  device_upload(model_device(m), t.data, host, (size_t)vocab);
  free(host);
  return t;
}

Decoder *decoder_create(Model *m, const GenParams *p, Scheduler *s, int max_tokens) {
  Decoder *d = mem_zalloc(1, sizeof *d);
  AttnShape shape = model_attn_shape(m);
  int64_t rows = s->max_rows, vocab = model_config(m)->vocab_size;
  int64_t n = max_tokens > rows ? max_tokens : rows;
  int64_t copies = rows * (s->kv->page_size - 1);
  int64_t width = (int64_t)(shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim;
  d->model = m;
  d->device = model_device(m);
  d->ops = device_ops(d->device);
  d->shape = shape;
  d->params = p;
  d->sched = s;
  d->vocab = (int)vocab;
  d->tokens = host_i32(n);
  d->positions = host_i32(n);
  d->slots = host_i32(n);
  d->offsets = host_i32(rows + 1);
  d->last = host_i32(rows);
  d->lens = host_i32(rows);
  d->copy_from = host_i32(copies);
  d->copy_slots = host_i32(copies);
  d->drawn = host_i32(rows);
  d->u = mem_alloc((size_t)rows, sizeof *d->u);
  d->logprobs = mem_alloc((size_t)rows, sizeof *d->logprobs);
  d->slots_N = push_1d(m, DT_I32, n);
  d->offsets_S = push_1d(m, DT_I32, rows + 1);
  d->copy_from_R = push_1d(m, DT_I32, copies);
  d->copy_slots_R = push_1d(m, DT_I32, copies);
  d->copy_RQ = push(m, model_compute(m), copies, width);
  d->tables_BP = push(m, DT_I32, rows, s->table_width);
  d->lens_B = push_1d(m, DT_I32, rows);
  d->u_B = push_1d(m, DT_F32, rows);
  d->drawn_B = push_1d(m, DT_I32, rows);
  d->logprobs_B = push_1d(m, DT_F32, rows);
  d->logits_BV = push(m, DT_F32, rows, vocab);
  d->banned_V = push_banned(m, p, d->vocab);
  return d;
}

void decoder_destroy(Decoder *d) {
  if (!d) return;
  free(d->tokens);
  free(d->positions);
  free(d->slots);
  free(d->offsets);
  free(d->last);
  free(d->lens);
  free(d->copy_from);
  free(d->copy_slots);
  free(d->drawn);
  free(d->u);
  free(d->logprobs);
  free(d);
}

/* ---- sampling ---- */

static bool is_eos(const GenParams *p, int32_t token) {
  for (int i = 0; i < p->n_eos; i++)
    if (p->eos_ids[i] == token) return true;
  return false;
}

static bool eos_is_banned(const Decoder *d, const Row *row) {
  const GenRequest *q = &d->sched->requests[row->request];
  return d->banned_V.data && row->len - q->prompt_len < d->params->min_new_tokens;
}

/* In (0, 1) also as a float: rounding must not make it 1. */
static float random_number(const GenParams *p, const GenRequest *q, int position) {
  uint64_t stream = rng_mix(rng_mix(p->step, (uint32_t)q->prompt_id), (uint32_t)q->sample_id);
  float u = (float)rng_uniform(p->seed, stream, (uint64_t)position);
  return u < 1 ? u : nextafterf(1, 0);
}

/* Draws for n rows from `first` on; logits row i is row first + i. Rows with and without the ban on
 * EOS go in runs, since the ban holds for a whole call. */
static void draw(Decoder *d, int first, int n) {
  const Row *rows = d->sched->rows + first;
  for (int i = 0; i < n; i++)
    d->u[i] = random_number(d->params, &d->sched->requests[rows[i].request], rows[i].len);
  upload(d, head_of(d->u_B, n), d->u);
  for (int from = 0, to; from < n; from = to) {
    bool banned = eos_is_banned(d, &rows[from]);
    for (to = from + 1; to < n && eos_is_banned(d, &rows[to]) == banned;) to++;
    int64_t len = to - from;
    d->ops->sample(
        d->device,
        tensor_2d(tensor_f32(d->logits_BV) + (int64_t)from * d->vocab, DT_F32, len, d->vocab),
        d->params->sample, tensor_1d(tensor_f32(d->u_B) + from, DT_F32, len),
        banned ? d->banned_V : (Tensor){0}, tensor_1d(tensor_i32(d->drawn_B) + from, DT_I32, len),
        tensor_1d(tensor_f32(d->logprobs_B) + from, DT_F32, len));
  }
  device_download(d->device, d->drawn, d->drawn_B.data, (size_t)n * sizeof *d->drawn);
  device_download(d->device, d->logprobs, d->logprobs_B.data, (size_t)n * sizeof *d->logprobs);
}

static int draw_and_append(Decoder *d, int first, Error *err) {
  Scheduler *s = d->sched;
  int n = s->n_rows - first;
  draw(d, first, n);
  for (int i = n; i-- > 0;) { /* from the last: see sched_append */
    const Row *row = &s->rows[first + i];
    if (!isfinite(d->logprobs[i]))
      return error_set(err,
                       "generation: token %d of request %d has log-probability %g; the model's "
                       "weights or activations hold NaN or infinity",
                       row->len, row->request, (double)d->logprobs[i]);
    sched_append(s, first + i, d->drawn[i], d->logprobs[i], is_eos(d->params, d->drawn[i]));
  }
  return 0;
}

/* ---- prefill ---- */

static void stage_sequence(Decoder *d, int r) {
  Scheduler *s = d->sched;
  const Row *row = &s->rows[r];
  const int32_t *table = sched_table(s, r);
  d->offsets[d->n_segments++] = d->n_tokens;
  for (int p = 0; p < row->len; p++, d->n_tokens++) {
    d->tokens[d->n_tokens] = sched_token(s, row, p);
    d->positions[d->n_tokens] = p;
    d->slots[d->n_tokens] = kv_slot(s->kv, table, p);
  }
}

/* A follower holds its lead's full pages; only what lies on the last, partial page is written again
 * for it. lead_end: where the lead's tokens end in the packed batch. */
static void stage_follower(Decoder *d, int r, int lead_end) {
  Scheduler *s = d->sched;
  const Row *row = &s->rows[r];
  for (int p = row->len - row->len % s->kv->page_size; p < row->len; p++) {
    d->copy_from[d->n_copies] = lead_end - row->len + p;
    d->copy_slots[d->n_copies++] = kv_slot(s->kv, sched_table(s, r), p);
  }
}

static void attend_prefill(void *ctx, int layer, Tensor qkv_NQ, Tensor out_NHD) {
  Decoder *d = ctx;
  Tensor k = d->sched->kv->k[layer], v = d->sched->kv->v[layer];
  d->ops->kv_write(d->device, qkv_NQ, head_of(d->slots_N, d->n_tokens), d->shape, k, v);
  if (d->n_copies > 0) {
    Tensor copy_RQ = head_of(d->copy_RQ, d->n_copies);
    d->ops->gather_rows(d->device, qkv_NQ, head_of(d->copy_from_R, d->n_copies), copy_RQ);
    d->ops->kv_write(d->device, copy_RQ, head_of(d->copy_slots_R, d->n_copies), d->shape, k, v);
  }
  Segments seg = {.n_seqs = d->n_segments,
                  .offsets = d->offsets,
                  .device_offsets = head_of(d->offsets_S, d->n_segments + 1)};
  d->ops->attention_fwd(d->device, qkv_NQ, seg, d->shape, out_NHD, (Tensor){0});
}

int decoder_prefill(Decoder *d, int first, Error *err) {
  Scheduler *s = d->sched;
  d->n_tokens = d->n_segments = d->n_copies = 0;
  for (int r = first; r < s->n_rows; r++) {
    Row *row = &s->rows[r];
    if (row->lead < 0)
      stage_sequence(d, r);
    else
      stage_follower(d, r, d->n_tokens); /* followers come right behind their lead */
    d->last[r - first] = d->n_tokens - 1;
    row->lead = -1;
  }
  d->offsets[d->n_segments] = d->n_tokens;
  upload(d, head_of(d->offsets_S, d->n_segments + 1), d->offsets);
  upload(d, head_of(d->slots_N, d->n_tokens), d->slots);
  upload(d, head_of(d->copy_from_R, d->n_copies), d->copy_from);
  upload(d, head_of(d->copy_slots_R, d->n_copies), d->copy_slots);
  int n = s->n_rows - first;
  model_step(d->model, d->n_tokens, d->tokens, d->positions, attend_prefill, d, n, d->last,
             head_of(d->logits_BV, n));
  return draw_and_append(d, first, err);
}

/* ---- decode ---- */

static void attend_decode(void *ctx, int layer, Tensor qkv_BQ, Tensor out_BHD) {
  Decoder *d = ctx;
  Tensor k = d->sched->kv->k[layer], v = d->sched->kv->v[layer];
  int64_t n = d->n_tokens;
  d->ops->kv_write(d->device, qkv_BQ, head_of(d->slots_N, n), d->shape, k, v);
  d->ops->attention_decode(d->device, qkv_BQ, head_of(d->tables_BP, n), head_of(d->lens_B, n),
                           d->shape, k, v, out_BHD);
}

/* Sends the pages that the device's tables lack: all at once, from the first row with one to the
 * last, since rows of equal length begin a page in the same step. */
static void upload_tables(Decoder *d) {
  Scheduler *s = d->sched;
  int first = -1, last = -1;
  for (int r = 0; r < s->n_rows; r++) {
    Row *row = &s->rows[r];
    if (row->uploaded == row->n_pages) continue;
    row->uploaded = row->n_pages;
    if (first < 0) first = r;
    last = r;
  }
  if (first < 0) return;
  int64_t at = (int64_t)first * s->table_width, n = (int64_t)(last + 1 - first) * s->table_width;
  device_upload(d->device, tensor_i32(d->tables_BP) + at, s->tables + at,
                (size_t)n * sizeof(int32_t));
}

int decoder_step(Decoder *d, Error *err) {
  Scheduler *s = d->sched;
  int n = s->n_rows;
  d->n_tokens = n;
  for (int r = 0; r < n; r++) {
    const Row *row = &s->rows[r];
    d->tokens[r] = sched_token(s, row, row->len - 1);
    d->positions[r] = row->len - 1;
    d->slots[r] = kv_slot(s->kv, sched_table(s, r), row->len - 1);
    d->lens[r] = row->len;
    d->last[r] = r;
  }
  upload_tables(d);
  upload(d, head_of(d->slots_N, n), d->slots);
  upload(d, head_of(d->lens_B, n), d->lens);
  model_step(d->model, n, d->tokens, d->positions, attend_decode, d, n, d->last,
             head_of(d->logits_BV, n));
  return draw_and_append(d, 0, err);
}
