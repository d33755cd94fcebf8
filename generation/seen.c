/* The ids that each running sequence has had, for the repetition penalty: one row of bits per seat,
 * on the device. A prefill writes the bits of what enters; from then on sampling adds the token
 * that a step is fed (SeenTokens), so the host has no part in a burst. Nothing is there without a
 * penalty. */
#include <stdlib.h>
#include <string.h>

#include "generation/decode_internal.h"

void seen_create(Decoder *d, int64_t rows) {
  d->seats = mem_alloc((size_t)rows, sizeof *d->seats);
  d->newest = mem_alloc((size_t)rows, sizeof *d->newest);
  if (!sample_penalizes(d->params->sample)) return;
  int64_t width = (d->vocab + 7) / 8;
  d->seen.bits_SW = push_2d(d->model, DT_U8, d->sched->max_rows, width);
  d->seen.slot_B = push_1d(d->model, DT_I32, rows);
  d->seen.newest_B = push_1d(d->model, DT_I32, rows);
  d->seen_bits = mem_alloc((size_t)width, 1);
}

void seen_destroy(Decoder *d) {
  free(d->seats);
  free(d->newest);
  free(d->seen_bits);
}

void seen_enter(Decoder *d, int r) {
  const Row *row = &d->sched->rows[r];
  size_t width = (size_t)d->seen.bits_SW.dim[1];
  if (!d->seen_bits) return;
  memset(d->seen_bits, 0, width);
  for (int p = 0; p < row->len; p++) {
    int32_t id = sched_token(d->sched, row, p);
    d->seen_bits[id / 8] |= (uint8_t)(1 << id % 8);
  }
  device_upload(d->device, (uint8_t *)d->seen.bits_SW.data + (size_t)row->seat * width,
                d->seen_bits, width);
}

void seen_seats(Decoder *d, int first, int n, int rows) {
  if (!d->seen_bits) return;
  for (int i = 0; i < rows; i++) d->seats[i] = i < n ? d->sched->rows[first + i].seat : -1;
  upload(d, head_of(d->seen.slot_B, rows), d->seats);
}

void seen_newest(Decoder *d, int first, int n) {
  if (!d->seen_bits) return;
  for (int i = 0; i < n; i++) {
    const Row *row = &d->sched->rows[first + i];
    d->newest[i] = sched_token(d->sched, row, row->len - 1);
  }
  upload(d, head_of(d->seen.newest_B, n), d->newest);
}

SeenTokens seen_of(const Decoder *d, int from, int64_t n, Tensor newest_B) {
  if (!d->seen_bits) return (SeenTokens){0};
  return (SeenTokens){d->seen.bits_SW, tensor_1d(tensor_i32(d->seen.slot_B) + from, DT_I32, n),
                      tensor_1d(tensor_i32(newest_B) + from, DT_I32, n)};
}
