/* Decoding and sampling; see decode.h. Prefill is in prefill.c, steps without the host in burst.c.
 *
 * The random number of a token is a pure function of (seed, step, prompt id, sample id, position):
 * neither the batch nor the rank has a part in it. */
#include <math.h>
#include <stdlib.h>

#include "core/rng.h"
#include "generation/decode_internal.h"

enum { LOOK_GPU = 8, LOOK_CPU = 1 };

static int32_t *host_i32(int64_t n) { return mem_alloc((size_t)n, sizeof(int32_t)); }

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

int gen_look(const GenParams *p, DeviceKind kind) {
  if (p->look > 0) return p->look;
  return kind == DEVICE_CPU ? LOOK_CPU : LOOK_GPU;
}

Decoder *decoder_create(Model *m, const GenParams *p, Scheduler *s, int longest, int max_tokens,
                        int most_rows, GenStats *stats) {
  Decoder *d = mem_zalloc(1, sizeof *d);
  AttnShape shape = model_attn_shape(m);
  DeviceKind kind = device_kind(model_device(m));
  int64_t rows = most_rows, vocab = model_config(m)->vocab_size;
  int64_t n = max_tokens > rows ? max_tokens : rows;
  int64_t copies = rows * (s->kv->page_size - 1);
  int64_t width = (int64_t)(shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim;
  d->model = m;
  d->device = model_device(m);
  d->ops = device_ops(d->device);
  d->shape = shape;
  d->params = p;
  d->sched = s;
  d->stats = stats;
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
  d->copy_RQ = push_2d(m, model_compute(m), copies, width);
  d->tables_BP = push_2d(m, DT_I32, rows, s->table_width);
  d->lens_B = push_1d(m, DT_I32, rows);
  d->u_B = push_1d(m, DT_F32, rows);
  d->drawn_B = push_1d(m, DT_I32, rows);
  d->logprobs_B = push_1d(m, DT_F32, rows);
  d->logits_BV = push_2d(m, DT_F32, rows, vocab);
  d->banned_V = push_banned(m, p, d->vocab);
  seen_create(d, rows);
  kept_create(d, rows, gen_look(p, kind));
  device_zero(d->device, d->tables_BP.data, tensor_bytes(d->tables_BP)); /* ids in range */
  d->burst = burst_create(d, longest, gen_look(p, kind));
  return d;
}

void decoder_destroy(Decoder *d) {
  if (!d) return;
  burst_destroy(d);
  seen_destroy(d);
  kept_destroy(d);
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

uint64_t request_stream(const GenParams *p, const GenRequest *q) {
  return rng_mix(rng_mix(p->step, (uint32_t)q->prompt_id), (uint32_t)q->sample_id);
}

float random_number(const GenParams *p, const GenRequest *q, int position) {
  return rng_uniform_f32(p->seed, request_stream(p, q), (uint64_t)position);
}

/* Draws for n rows from `first` on; logits row i is row first + i. Rows with and without the ban on
 * EOS go in runs, since the ban holds for a whole call. */
static void draw(Decoder *d, int first, int n) {
  const Row *rows = d->sched->rows + first;
  for (int i = 0; i < n; i++)
    d->u[i] = random_number(d->params, &d->sched->requests[rows[i].request], rows[i].len);
  upload(d, head_of(d->u_B, n), d->u);
  seen_seats(d, first, n, n);
  seen_newest(d, first, n);
  for (int from = 0, to; from < n; from = to) {
    bool banned = eos_is_banned(d, &rows[from]);
    for (to = from + 1; to < n && eos_is_banned(d, &rows[to]) == banned;) to++;
    int64_t len = to - from;
    d->ops->sample(
        d->device,
        tensor_2d(tensor_f32(d->logits_BV) + (int64_t)from * d->vocab, DT_F32, len, d->vocab),
        d->params->sample, tensor_1d(tensor_f32(d->u_B) + from, DT_F32, len),
        banned ? d->banned_V : (Tensor){0}, seen_of(d, from, len, d->seen.newest_B),
        kept_alone(d, from, len), tensor_1d(tensor_i32(d->drawn_B) + from, DT_I32, len),
        tensor_1d(tensor_f32(d->logprobs_B) + from, DT_F32, len));
  }
  device_download(d->device, d->drawn, d->drawn_B.data, (size_t)n * sizeof *d->drawn);
  device_download(d->device, d->logprobs, d->logprobs_B.data, (size_t)n * sizeof *d->logprobs);
  kept_download(d, n);
}

int append_token(Decoder *d, int row, int64_t draw, int32_t token, float logprob, Error *err) {
  Scheduler *s = d->sched;
  const Row *w = &s->rows[row];
  int rows = s->n_rows;
  if (!isfinite(logprob))
    return error_set(err,
                     "generation: token %d of request %d has log-probability %g; the model's "
                     "weights or activations hold NaN or infinity",
                     w->len, w->request, (double)logprob);
  kept_append(d, row, draw);
  sched_append(s, row, token, logprob, is_eos(d->params, token));
  return s->n_rows < rows;
}

int draw_and_append(Decoder *d, int first, Error *err) {
  int n = d->sched->n_rows - first;
  draw(d, first, n);
  for (int i = n; i-- > 0;) /* from the last: see sched_append */
    if (append_token(d, first + i, i, d->drawn[i], d->logprobs[i], err) < 0) return -1;
  return 0;
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

/* All at once, from the first row with a new page to the last, since rows of equal length begin one
 * in the same step. */
void upload_tables(Decoder *d) {
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

/* One step in which the host has a part: some row may not draw an EOS yet. */
static int step_alone(Decoder *d, Error *err) {
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
    d->stats->cached_tokens += attended(d, row->len);
  }
  d->stats->decode_steps++;
  d->stats->drawn_rows += n;
  d->stats->step_rows += n;
  upload_tables(d);
  upload(d, head_of(d->slots_N, n), d->slots);
  upload(d, head_of(d->lens_B, n), d->lens);
  model_step(d->model, n, d->tokens, d->positions, attend_decode, d, n, d->last,
             head_of(d->logits_BV, n));
  return draw_and_append(d, 0, err);
}

/* Nothing is gained by steps behind the end of all rows. */
static int steps_left(const Scheduler *s, int most) {
  int left = 1;
  for (int r = 0; r < s->n_rows && left < most; r++) {
    int row_left = s->limits[s->rows[r].request] - s->rows[r].len;
    if (row_left > left) left = row_left;
  }
  return left < most ? left : most;
}

bool decoder_bans(const Decoder *d) {
  const Scheduler *s = d->sched;
  bool banned = false;
  for (int r = 0; r < s->n_rows && !banned; r++) banned = eos_is_banned(d, &s->rows[r]);
  return banned;
}

int decoder_plan(Decoder *d) {
  Scheduler *s = d->sched;
  int look = gen_look(d->params, device_kind(d->device));
  return sched_make_room(s, decoder_bans(d) ? 1 : steps_left(s, look));
}

int decoder_step_rows(const Decoder *d) {
  int n = d->sched->n_rows;
  return decoder_bans(d) ? n : bucket_rows(d->params, device_kind(d->device), n);
}

int decoder_decode(Decoder *d, StepPlan plan, Error *err) {
  return decoder_bans(d) ? step_alone(d, err) : burst_run(d, plan, err);
}
