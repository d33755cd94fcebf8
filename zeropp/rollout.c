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

#include "zeropp/internal.h"

enum { ALIGN = 128 };

typedef struct RolloutPlace {
  bool coded;
  bool in_place;       /* read where training keeps it */
  int64_t first, rows; /* of the parameter that lie here; elements of a vector */
  size_t at, scales;   /* numbers or codes, and scales, in the unit's buffer */
  size_t open;         /* full numbers in the unit's opened buffer */
} RolloutPlace;

typedef struct RolloutUnit {
  char *buffer;
  size_t bytes, open_bytes;
} RolloutUnit;

typedef struct Rollout {
  ZeroPPRollout how;
  WireFormat format; /* of codes */
  int begins;
  bool serves;
  RolloutPlace *place; /* [n_params] */
  RolloutUnit *unit;   /* [n_units] */
} Rollout;

static size_t align_up(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

static bool has_buffers(ZeroPPRollout r) {
  if (r.weights == ROLLOUT_STREAM) return false;
  return r.weights == ROLLOUT_TENSOR_PARALLEL || r.format != WIRE_F32;
}

static int64_t width_of(const ParamSpec *s) { return s->ndim == 2 ? s->dim[1] : 1; }

/* Whole rows of a parameter, as the wire has them. */
static WireSpan rows_span(const ParamSpec *s, int64_t rows) {
  return (WireSpan){width_of(s), 0, rows * width_of(s)};
}

/* ---- places ---- */

static void place_rows(const ZeroPP *z, const Rollout *r, int param, RolloutPlace *w) {
  const ParamSpec *s = &z->specs[param];
  bool matrix = s->ndim == 2 && s->unit >= r->how.whole_units;
  w->first = 0;
  w->rows = s->dim[0];
  if (matrix && r->how.weights == ROLLOUT_TENSOR_PARALLEL)
    layout_rows(s->dim[0], z->grid->local, z->grid->local_rank, &w->first, &w->rows);
  w->coded = matrix && linear_codes_fit(r->format, s->dim[1]);
}

/* Slices of full numbers, where they lie. */
static bool lies_in_place(const ZeroPP *z, const Rollout *r, int param) {
  const ParamSpec *s = &z->specs[param];
  bool sliced = r->how.weights == ROLLOUT_TENSOR_PARALLEL && s->unit >= r->how.whole_units;
  if (!sliced || s->ndim != 2 || r->place[param].coded || z->grid->nodes > 1) return false;
  WireKind kept = z->units[s->unit].message[MSG_SECONDARY].format.kind;
  bool half = z->cfg.compute == DT_BF16;
  return z->keeps_rounded ? half
                          : z->cfg.hpz && !z->alias_full && kept == (half ? WIRE_BF16 : WIRE_F32);
}

/* Bytes of a parameter's slice before it in what training keeps. */
static size_t place_in_slice(const ZeroPP *z, int param) {
  const Unit *u = &z->units[z->specs[param].unit];
  const Message *m = &u->message[MSG_SECONDARY];
  int piece = z->grid->local_rank; /* one node: a slice is a piece */
  if (z->keeps_rounded) return (size_t)z->place[param].shard * dtype_size(z->cfg.compute);
  return m->payload[piece * u->count + param - u->first] - m->at[piece];
}

/* All of a group, one behind the other, by 16 bytes, which kernels read at a time; or none of it.
 */
static bool group_in_place(const ZeroPP *z, const Rollout *r, int p, int end) {
  for (int i = p; i < end; i++)
    if (!lies_in_place(z, r, i)) return false;
  size_t at = place_in_slice(z, p);
  if (at % 16 != 0) return false;
  for (int i = p; i < end; i++) {
    if (place_in_slice(z, i) != at) return false;
    at += (size_t)(r->place[i].rows * width_of(&z->specs[i])) * dtype_size(z->cfg.compute);
  }
  return true;
}

/* Parameters [p, end) are joined: numbers of all, then scales of all. */
static void place_group(const ZeroPP *z, const Rollout *r, int p, int end, RolloutUnit *u) {
  size_t full = dtype_size(z->cfg.compute);
  if (group_in_place(z, r, p, end)) {
    for (int i = p; i < end; i++) r->place[i].in_place = true;
    return;
  }
  u->bytes = align_up(u->bytes);
  u->open_bytes = align_up(u->open_bytes);
  for (int i = p; i < end; i++) {
    RolloutPlace *w = &r->place[i];
    size_t numbers = (size_t)(w->rows * width_of(&z->specs[i]));
    w->at = u->bytes;
    w->open = u->open_bytes;
    u->bytes += w->coded ? numbers : numbers * full;
    if (w->coded) u->open_bytes += numbers * full;
  }
  if (!r->place[p].coded) return;
  u->bytes = align_up(u->bytes);
  for (int i = p; i < end; i++) {
    r->place[i].scales = u->bytes;
    u->bytes += wire_scale_bytes(r->format, rows_span(&z->specs[i], r->place[i].rows));
  }
}

static Rollout *rollout_plan(const ZeroPP *z, ZeroPPRollout how) {
  Rollout *r = mem_zalloc(1, sizeof *r);
  r->how = how;
  r->format = (WireFormat){how.format, z->cfg.block, z->cfg.scale};
  r->place = mem_zalloc((size_t)z->n_params, sizeof *r->place);
  r->unit = mem_zalloc((size_t)z->n_units, sizeof *r->unit);
  for (int p = 0; p < z->n_params; p++) place_rows(z, r, p, &r->place[p]);
  for (int p = 0, end; p < z->n_params; p = end) {
    for (end = p + 1; end < z->n_params && z->specs[end].joined;) end++;
    place_group(z, r, p, end, &r->unit[z->specs[p].unit]);
  }
  return r;
}

static void plan_free(Rollout *r) {
  free(r->place);
  free(r->unit);
  free(r);
}

/* ---- filling ---- */

static char *buffer_of(const ZeroPP *z, int param) {
  return z->rollout->unit[z->specs[param].unit].buffer;
}

static WireData codes_of(const ZeroPP *z, int param) {
  const RolloutPlace *w = &z->rollout->place[param];
  char *buffer = buffer_of(z, param);
  return (WireData){buffer + w->scales, buffer + w->at, 1, 0};
}

/* Codes as training has them, in the messages that gathers bring? */
static bool codes_travel(const ZeroPPConfig *c, WireKind kind) {
  return c->stage == 3 && kind != WIRE_F32 && c->qwz == kind && c->hpz != HPZ_ON;
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
  if (!has_buffers(z->rollout->how) || !codes_travel(&z->cfg, z->rollout->how.format)) return;
  const Message *m = &u->message[z->cfg.hpz ? MSG_SECONDARY : kind];
  require(m->format.kind == z->rollout->format.kind);
  for (int s = 0; s < z->grid->world * u->count; s++) take_slot(z, u, m, s, message);
}

/* The unit is FULL: what of it is kept full is copied, and what came in no codes gets them. */
static void fill_unit(const ZeroPP *z, const Unit *u) {
  const Rollout *r = z->rollout;
  bool have_codes = codes_travel(&z->cfg, r->how.format);
  WirePart *parts = mem_zalloc((size_t)u->count, sizeof *parts);
  size_t size = dtype_size(z->cfg.compute);
  int n = 0;
  for (int p = u->first; p < u->first + u->count; p++) {
    const RolloutPlace *w = &r->place[p];
    int64_t width = width_of(&z->specs[p]), numel = w->rows * width;
    char *from = u->full + (size_t)(z->place[p].full + w->first * width) * size;
    if (numel == 0 || w->in_place) continue;
    if (!w->coded)
      device_copy(z->device, buffer_of(z, p) + w->at, from, (size_t)numel * size);
    else if (!have_codes)
      parts[n++] = (WirePart){.span = rows_span(&z->specs[p], w->rows),
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

void zeropp_rollout_begin(ZeroPP *z, ZeroPPRollout how) {
  if (z->rollout) {
    const ZeroPPRollout *a = &z->rollout->how;
    require(a->weights == how.weights && a->format == how.format);
    z->rollout->begins++;
    return;
  }
  z->rollout = rollout_plan(z, how);
  z->rollout->begins = 1;
  if (has_buffers(how)) {
    fill(z);
    z->rollout->serves = true;
  } else if (how.weights == ROLLOUT_REPLICA) {
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
  if (!r->serves && r->how.weights == ROLLOUT_REPLICA) zeropp_release_all(z);
  for (int i = 0; i < z->n_units; i++) device_free(z->device, r->unit[i].buffer);
  z->rollout = NULL;
  plan_free(r);
}

bool zeropp_in_rollout(const ZeroPP *z, RolloutWeights w) {
  return z->rollout && z->rollout->how.weights == w;
}

/* ---- reading ---- */

bool rollout_serves(const ZeroPP *z) { return z->rollout && z->rollout->serves; }

void rollout_open(ZeroPP *z, Unit *u) {
  const Rollout *r = z->rollout;
  const RolloutUnit *ru = &r->unit[u - z->units];
  if (u->holds++ > 0 || ru->open_bytes == 0) return;
  WirePart *parts = mem_zalloc((size_t)u->count, sizeof *parts);
  int n = 0;
  u->full = pool_take(&z->pool, POOL_FULL, ru->open_bytes);
  for (int p = u->first; p < u->first + u->count; p++) {
    const RolloutPlace *w = &r->place[p];
    WireSpan s = rows_span(&z->specs[p], w->rows);
    if (!w->coded || s.count == 0) continue;
    parts[n++] = (WirePart){.span = s,
                            .x = tensor_1d(u->full + w->open, z->cfg.compute, s.count),
                            .from = codes_of(z, p)};
  }
  z->ops->dequantize(z->device, r->format, n, parts, false);
  free(parts);
}

void rollout_close(ZeroPP *z, Unit *u) {
  if (u->full) pool_give(&z->pool, u->full);
  u->full = NULL;
}

static char *kept_slice(const ZeroPP *z, int param) {
  const Unit *u = &z->units[z->specs[param].unit];
  return (z->keeps_rounded ? z->rounded : u->secondary) + place_in_slice(z, param);
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
  char *x = w->coded      ? u->full + w->open
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

/* ---- what may be asked for, and what it takes ---- */

WireKind zeropp_rollout_format(const ZeroPPConfig *c) {
  return codes_travel(c, c->qwz) ? c->qwz : WIRE_F32;
}

int zeropp_rollout_coded(const ZeroPPConfig *given, const ParamSpec *specs, int n_params,
                         ZeroPPRollout r, int *matrices) {
  ZeroPPConfig c = engine_config(given);
  int coded = 0;
  *matrices = 0;
  for (int p = 0; p < n_params; p++) {
    if (specs[p].ndim != 2 || specs[p].unit < r.whole_units) continue;
    ++*matrices;
    coded += linear_codes_fit((WireFormat){r.format, c.block, c.scale}, specs[p].dim[1]);
  }
  return coded;
}

int zeropp_rollout_check(const Device *d, const ZeroPPConfig *given, const ParamSpec *specs,
                         int n_params, ZeroPPRollout r, Error *err) {
  ZeroPPConfig c = engine_config(given);
  int matrices;
  const char *name = r.format == WIRE_INT8 ? "int8" : "fp8";
  if (r.format == WIRE_F32) return 0;
  require(r.format == WIRE_INT8 || r.format == WIRE_FP8);
  if (c.block % 64 != 0)
    return error_set(err,
                     "rollout.format: found %s with zeropp.block %d; expected a multiple of 64",
                     name, c.block);
  if (!device_takes_codes(d, c.compute))
    return error_set(
        err,
        "rollout.format: found %s; weights in codes want the CPU, or bfloat16 on a GPU "
        "of compute capability 9.0; expected training",
        name);
  if (zeropp_rollout_coded(given, specs, n_params, r, &matrices) == 0)
    return error_set(err,
                     "rollout.format: found %s; none of the %d matrices outside the embedding has "
                     "rows of a multiple of 16 numbers, and at most %d; expected training",
                     name, matrices, LINEAR_CODES_MOST);
  if (r.weights == ROLLOUT_STREAM && !codes_travel(&c, r.format))
    return error_set(err,
                     "rollout.format: found %s with rollout.weights stream, where weights are as "
                     "they are gathered; expected training, or zeropp.qwz %s and hpz quantized",
                     name, name);
  return 0;
}

uint64_t zeropp_rollout_memory(const ZeroPPConfig *cfg, const ParamSpec *specs, int n_params,
                               int nodes, int local, ZeroPPRollout how) {
  Grid g = {.world = nodes * local, .nodes = nodes, .local = local};
  ZeroPP z = {.grid = &g, .cfg = engine_config(cfg), .n_params = n_params};
  z.specs = mem_alloc((size_t)n_params, sizeof *specs);
  memcpy(z.specs, specs, (size_t)n_params * sizeof *specs);
  layout_build(&z);
  uint64_t bytes = 0;
  if (has_buffers(how)) {
    Rollout *r = rollout_plan(&z, how);
    for (int i = 0; i < z.n_units; i++) bytes += r->unit[i].bytes;
    plan_free(r);
  } else if (how.weights == ROLLOUT_REPLICA && !z.alias_full && !z.keeps_full) {
    for (int i = 0; i < z.n_units; i++) bytes += unit_weight_bytes(&z, &z.units[i]);
  }
  layout_free(&z);
  free(z.specs);
  return bytes;
}
