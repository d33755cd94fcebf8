/* Prefill: the cache of sequences that enter, computed packed by the model's forward, and the first
 * token of each. Samples of one prompt that enter together are computed once. */
#include "generation/decode_internal.h"

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

int decoder_prefill_tokens(const Decoder *d, int first) {
  int n = 0;
  for (int r = first; r < d->sched->n_rows; r++)
    if (d->sched->rows[r].lead < 0) n += d->sched->rows[r].len;
  return n;
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
    seen_enter(d, r);
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
