/* rollout_plan: which weights of a rollout are whole, sliced, in codes or read in place; what may
 * be asked for, and what it takes. */
#include <stdlib.h>
#include <string.h>

#include "zeropp/rollout_plan.h"

enum { ALIGN = 128 };

static size_t align_up(size_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

bool rollout_has_buffers(ZeroPPRollout r) {
  if (r.weights == ROLLOUT_STREAM) return false;
  return r.weights == ROLLOUT_TENSOR_PARALLEL || r.format != WIRE_F32;
}

bool rollout_codes_travel(const ZeroPPConfig *c, WireKind kind) {
  return c->stage == 3 && kind != WIRE_F32 && c->qwz == kind && c->hpz != HPZ_ON;
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

size_t rollout_place_in_slice(const ZeroPP *z, int param) {
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
  size_t at = rollout_place_in_slice(z, p);
  if (at % 16 != 0) return false;
  for (int i = p; i < end; i++) {
    if (rollout_place_in_slice(z, i) != at) return false;
    at += (size_t)(r->place[i].rows * rollout_width(&z->specs[i])) * dtype_size(z->cfg.compute);
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
    size_t numbers = (size_t)(w->rows * rollout_width(&z->specs[i]));
    w->at = u->bytes;
    w->open = u->open_bytes;
    u->bytes += w->coded ? numbers : numbers * full;
    if (w->coded) u->open_bytes += numbers * full;
  }
  if (!r->place[p].coded) return;
  u->bytes = align_up(u->bytes);
  for (int i = p; i < end; i++) {
    r->place[i].scales = u->bytes;
    u->bytes += wire_scale_bytes(r->format, rollout_span(&z->specs[i], r->place[i].rows));
  }
}

Rollout *rollout_plan(const ZeroPP *z, ZeroPPRollout how) {
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

void rollout_plan_free(Rollout *r) {
  free(r->place);
  free(r->unit);
  free(r);
}

/* ---- what may be asked for, and what it takes ---- */

WireKind zeropp_rollout_format(const ZeroPPConfig *c) {
  return rollout_codes_travel(c, c->qwz) ? c->qwz : WIRE_F32;
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
    return error_set(err, "found %s in blocks of %d (zeropp.block); expected a multiple of 64",
                     name, c.block);
  if (!device_takes_codes(d, c.compute))
    return error_set(err,
                     "found %s; weights in codes want the CPU, or bfloat16 on a GPU "
                     "of compute capability 9.0; expected training",
                     name);
  if (zeropp_rollout_coded(given, specs, n_params, r, &matrices) == 0)
    return error_set(err,
                     "found %s; none of the %d matrices outside the embedding has "
                     "rows of a multiple of 16 numbers, and at most %d; expected training",
                     name, matrices, LINEAR_CODES_MOST);
  if (r.weights == ROLLOUT_STREAM && !rollout_codes_travel(&c, r.format))
    return error_set(err,
                     "found %s with weights that stream, which are as they are gathered; expected "
                     "training, or, in a recipe, zeropp.qwz %s and hpz quantized",
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
  if (rollout_has_buffers(how)) {
    Rollout *r = rollout_plan(&z, how);
    for (int i = 0; i < z.n_units; i++) bytes += r->unit[i].bytes;
    rollout_plan_free(r);
  } else if (how.weights == ROLLOUT_REPLICA && !z.alias_full && !z.keeps_full) {
    for (int i = 0; i < z.n_units; i++) bytes += unit_weight_bytes(&z, &z.units[i]);
  }
  layout_free(&z);
  free(z.specs);
  return bytes;
}
