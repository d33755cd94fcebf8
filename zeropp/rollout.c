/* rollout: weights as generation wants them, between two writes of the masters.
 *
 * A replica of full weights is what zeropp_gather_all holds, a stream nothing but secondaries of
 * this version. The other kinds have a buffer for each unit: its vectors whole, its matrices whole
 * or (tensor parallel) this rank's rows, full or in codes. Joined parameters follow each other in
 * it, their codes apart from their scales, so that they stay one matrix.
 *
 * On a node that has all ranks a slice lies in one piece, rounded or in the secondary, as it is
 * computed with: matrices are then read there, and the buffer has no place for them.
 *
 * Where training's weights are codes already, those are copied out of the message that brings a
 * unit: a rollout computes with exactly the numbers that training does.
 */
#include <stdlib.h>
#include <string.h>

#include "zeropp/rollout_plan.h"

/* ---- filling ---- */

static char *buffer_of(const ZeroPP *z, int param) {
  return z->rollout->unit[z->specs[param].unit].buffer;
}

static WireData codes_of(const ZeroPP *z, int param) {
  const RolloutPlace *w = &z->rollout->place[param];
  char *buffer = buffer_of(z, param);
  return (WireData){buffer + w->scales, buffer + w->at, 1, 0};
}

/* A slot's codes, as far as they are of rows that lie here. Slices are of whole rows, so all of a
 * slot is or nothing. */
static void take_slot(const ZeroPP *z, const Unit *u, const Message *m, int slot, char *message) {
  int param = u->first + slot % u->count;
  const Rollout *r = z->rollout;
  const RolloutPlace *w = &r->place[param];
  WireSpan s = u->slots[slot].span;
  int64_t begin = s.first - w->first * s.width;
  if (!w->coded || s.count == 0 || begin < 0 || begin >= w->rows * s.width) return;
  WireData to = codes_of(z, param);
  WireSpan before = {s.width, 0, begin};
  device_copy(z->device, (char *)to.payload + begin, message + m->payload[slot],
              wire_payload_bytes(r->format, s));
  device_copy(z->device, (char *)to.scales + wire_scale_bytes(r->format, before),
              message + m->scales[slot], wire_scale_bytes(r->format, s));
}

void rollout_take(ZeroPP *z, Unit *u, MessageKind kind, char *message) {
  if (!rollout_has_buffers(z->rollout->how) ||
      !rollout_codes_travel(&z->cfg, z->rollout->how.format))
    return;
  const Message *m = &u->message[kind];
  require(m->format.kind == z->rollout->format.kind);
  for (int s = 0; s < z->grid->world * u->count; s++) take_slot(z, u, m, s, message);
}

/* The unit is FULL: what of it is kept full is copied, and what came in no codes gets them. */
static void fill_unit(const ZeroPP *z, const Unit *u) {
  const Rollout *r = z->rollout;
  bool have_codes = rollout_codes_travel(&z->cfg, r->how.format);
  WirePart *parts = mem_zalloc((size_t)u->count, sizeof *parts);
  size_t size = dtype_size(z->cfg.compute);
  int n = 0;
  for (int p = u->first; p < u->first + u->count; p++) {
    const RolloutPlace *w = &r->place[p];
    int64_t width = rollout_width(&z->specs[p]), numel = w->rows * width;
    char *from = u->full + (size_t)(z->place[p].full + w->first * width) * size;
    if (numel == 0 || w->in_place) continue;
    if (!w->coded)
      device_copy(z->device, buffer_of(z, p) + w->at, from, (size_t)numel * size);
    else if (!have_codes)
      parts[n++] = (WirePart){.span = rollout_span(&z->specs[p], w->rows),
                              .x = tensor_1d(from, z->cfg.compute, numel),
                              .to = codes_of(z, p)};
  }
  z->ops->quantize(z->device, r->format, n, parts);
  free(parts);
}

static void fill(ZeroPP *z) {
  Rollout *r = z->rollout;
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    if (u->holds) die("a rollout begins while unit %d is held by a gather", i);
    r->unit[i].buffer = device_alloc(z->device, r->unit[i].bytes);
    zeropp_gather(z, i);
    fill_unit(z, u);
    zeropp_release(z, i);
  }
}

/* ---- begin and end ---- */

/* Below stage 3 weights that were gathered stay, so that a stream reads them like a replica: all
 * ranks gather them now, since one that has nothing to generate would not. */
static bool holds_all(const ZeroPP *z, ZeroPPRollout how) {
  return !rollout_has_buffers(how) && (how.weights == ROLLOUT_REPLICA || z->cfg.stage < 3);
}

void zeropp_rollout_begin(ZeroPP *z, ZeroPPRollout how) {
  if (z->rollout) {
    const ZeroPPRollout *a = &z->rollout->how;
    require(a->weights == how.weights && a->format == how.format);
    z->rollout->begins++;
    return;
  }
  z->rollout = rollout_plan(z, how);
  z->rollout->begins = 1;
  if (rollout_has_buffers(how)) {
    fill(z);
    z->rollout->serves = true;
  } else if (holds_all(z, how)) {
    zeropp_gather_all(z);
  } else {
    gather_refresh(z);
  }
}

void zeropp_rollout_end(ZeroPP *z) {
  Rollout *r = z->rollout;
  require(r && r->begins > 0);
  if (--r->begins > 0) return;
  if (r->serves) engine_require_sharded(z, "the end of a rollout");
  if (holds_all(z, r->how)) zeropp_release_all(z);
  for (int i = 0; i < z->n_units; i++) device_free(z->device, r->unit[i].buffer);
  z->rollout = NULL;
  rollout_plan_free(r);
}

bool zeropp_in_rollout(const ZeroPP *z, RolloutWeights w) {
  return z->rollout && z->rollout->how.weights == w;
}

/* ---- reading ---- */

bool rollout_serves(const ZeroPP *z) { return z->rollout && z->rollout->serves; }

void rollout_open(ZeroPP *z, Unit *u) {
  const Rollout *r = z->rollout;
  RolloutUnit *ru = &r->unit[u - z->units];
  if (u->holds++ > 0 || ru->open_bytes == 0) return;
  WirePart *parts = mem_zalloc((size_t)u->count, sizeof *parts);
  int n = 0;
  ru->open = pool_take(&z->pool, POOL_FULL, ru->open_bytes);
  for (int p = u->first; p < u->first + u->count; p++) {
    const RolloutPlace *w = &r->place[p];
    WireSpan s = rollout_span(&z->specs[p], w->rows);
    if (!w->coded || s.count == 0) continue;
    parts[n++] = (WirePart){.span = s,
                            .x = tensor_1d(ru->open + w->open, z->cfg.compute, s.count),
                            .from = codes_of(z, p)};
  }
  z->ops->dequantize(z->device, r->format, n, parts, false);
  free(parts);
}

void rollout_close(ZeroPP *z, Unit *u) {
  RolloutUnit *ru = &z->rollout->unit[u - z->units];
  if (ru->open) pool_give(&z->pool, ru->open);
  ru->open = NULL;
}

static char *kept_slice(const ZeroPP *z, int param) {
  const Unit *u = &z->units[z->specs[param].unit];
  return (z->keeps_rounded ? z->rounded : u->secondary) + rollout_place_in_slice(z, param);
}

/* Rows of n joined parameters that lie here. */
static int64_t rows_here(const ZeroPP *z, int param, int n) {
  int64_t rows = 0;
  for (int p = param; p < param + n; p++) {
    require(p == param || z->specs[p].joined);
    rows += z->rollout->place[p].rows;
  }
  return rows;
}

Tensor rollout_weight(const ZeroPP *z, int param, int n) {
  const ParamSpec *s = zeropp_spec(z, param);
  const RolloutPlace *w = &z->rollout->place[param];
  const Unit *u = &z->units[s->unit];
  int64_t rows = rows_here(z, param, n);
  if (w->coded && !u->holds)
    die("weight %s is read in full, but no gather made it so out of its codes", s->name);
  char *x = w->coded      ? z->rollout->unit[s->unit].open + w->open
            : w->in_place ? kept_slice(z, param)
                          : buffer_of(z, param) + w->at;
  return s->ndim == 2 ? tensor_2d(x, z->cfg.compute, rows, s->dim[1])
                      : tensor_1d(x, z->cfg.compute, rows);
}

Linear zeropp_linear(const ZeroPP *z, int param, int n) {
  const Rollout *r = z->rollout;
  const ParamSpec *s = zeropp_spec(z, param);
  bool codes = rollout_serves(z) && r->place[param].coded && !z->units[s->unit].holds;
  if (!codes) return (Linear){.w_OK = zeropp_weight_joined(z, param, n)};
  return (Linear){.w_OK = tensor_2d(NULL, z->cfg.compute, rows_here(z, param, n), s->dim[1]),
                  .format = r->format,
                  .codes = codes_of(z, param)};
}

void zeropp_slice_rows(const ZeroPP *z, int param, int local_rank, int64_t *first, int64_t *count) {
  layout_rows(zeropp_spec(z, param)->dim[0], z->grid->local, local_rank, first, count);
}
