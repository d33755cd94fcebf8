/* Which ids each token was drawn from, when the caller wants to know (GenParams.keep): sampling
 * writes a row of bits for every draw, on the device, and the host reads them with the tokens. */
#include <stdlib.h>
#include <string.h>

#include "generation/decode_internal.h"

static int64_t width_of(const Decoder *d) { return (d->vocab + 7) / 8; }

void kept_create(Decoder *d, int64_t rows, int steps) {
  if (!d->params->keep) return;
  Tensor t = tensor_3d(NULL, DT_U8, steps, rows, width_of(d));
  t.data = arena_push(model_arena(d->model), tensor_bytes(t));
  d->kept_TBW = t;
  d->kept = mem_alloc(tensor_bytes(t), 1);
}

void kept_destroy(Decoder *d) { free(d->kept); }

KeptTokens kept_alone(const Decoder *d, int from, int64_t n) {
  if (!d->kept) return (KeptTokens){0};
  uint8_t *at = (uint8_t *)d->kept_TBW.data + from * width_of(d);
  return (KeptTokens){.bits_TBW = tensor_3d(at, DT_U8, 1, n, width_of(d))};
}

KeptTokens kept_burst(const Decoder *d, const DecodeRows *r) {
  if (!d->kept) return (KeptTokens){0};
  int64_t steps = d->kept_TBW.dim[0], rows = r->token_B.dim[0];
  return (KeptTokens){tensor_3d(d->kept_TBW.data, DT_U8, steps, rows, width_of(d)), r->step_1};
}

void kept_download(Decoder *d, int64_t draws) {
  if (d->kept) device_download(d->device, d->kept, d->kept_TBW.data, (size_t)(draws * width_of(d)));
}

void kept_append(Decoder *d, int row, int64_t draw) {
  GenResult *out = &d->sched->results[d->sched->rows[row].request];
  size_t width = (size_t)width_of(d);
  if (d->kept) memcpy(out->kept + (size_t)out->n * width, d->kept + (size_t)draw * width, width);
}
