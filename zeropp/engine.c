/* engine: units between SHARDED and FULL, gradients between open and reduced.
 *
 * Gathers and reductions are collectives over all ranks: every rank makes the same calls in the
 * same order. A unit travels as one message per pair of ranks, its parameters packed by owner.
 * Weights and gradients of a unit are independent: a gradient may be open while the unit is
 * SHARDED.
 */
#include <stdlib.h>
#include <string.h>

#include "zeropp/internal.h"

ZeroPP *zeropp_create(Device *d, Grid *g, const ZeroPPConfig *cfg, const ParamSpec *specs,
                      int n_params) {
  require(cfg->stage == 3);
  require(device_kind(d) == DEVICE_CPU); /* packing touches the memory directly */
  ZeroPP *z = mem_zalloc(1, sizeof *z);
  z->device = d;
  z->ops = device_ops(d);
  z->grid = g;
  z->trainable = cfg->trainable;
  z->n_params = n_params;
  z->specs = mem_alloc((size_t)n_params, sizeof *specs);
  if (n_params) memcpy(z->specs, specs, (size_t)n_params * sizeof *specs);
  layout_build(z);
  z->pool = (Pool){.device = d, .limit = layout_full_bytes(z)};
  engine_add_kind(z, STATE_MASTER);
  if (z->trainable) {
    engine_add_kind(z, STATE_MOMENT1);
    engine_add_kind(z, STATE_MOMENT2);
    engine_add_kind(z, STATE_GRAD);
  }
  if (g->world == 1) return z;
  int64_t dense = 0, owned = 0;
  for (int i = 0; i < z->n_units; i++) {
    if (z->units[i].dense_numel > dense) dense = z->units[i].dense_numel;
    if (z->units[i].owned > owned) owned = z->units[i].owned;
  }
  z->pack = device_alloc(d, (size_t)dense * sizeof(float));
  if (z->trainable) z->summed = device_alloc(d, (size_t)owned * sizeof(float));
  return z;
}

void zeropp_destroy(ZeroPP *z) {
  if (!z) return;
  for (int i = 0; i < z->n_units && z->grid->world > 1; i++) {
    if (z->units[i].full) device_free(z->device, z->units[i].full);
    if (z->units[i].grad) device_free(z->device, z->units[i].grad);
  }
  pool_close(&z->pool);
  for (int k = 0; k < STATE_KINDS; k++)
    if (z->shard[k]) device_free(z->device, z->shard[k]);
  if (z->pack) device_free(z->device, z->pack);
  if (z->summed) device_free(z->device, z->summed);
  layout_free(z);
  free(z->specs);
  free(z);
}

int zeropp_n_params(const ZeroPP *z) { return z->n_params; }
int zeropp_n_units(const ZeroPP *z) { return z->n_units; }
int64_t zeropp_numel(const ZeroPP *z) { return z->numel; }
Grid *zeropp_grid(const ZeroPP *z) { return z->grid; }
Device *zeropp_device(const ZeroPP *z) { return z->device; }

const ParamSpec *zeropp_spec(const ZeroPP *z, int param) {
  require(param >= 0 && param < z->n_params);
  return &z->specs[param];
}

int zeropp_find(const ZeroPP *z, const char *name) {
  for (int p = 0; p < z->n_params; p++)
    if (strcmp(z->specs[p].name, name) == 0) return p;
  return -1;
}

void engine_add_kind(ZeroPP *z, StateKind kind) {
  size_t bytes = (size_t)z->shard_numel * sizeof(float);
  z->shard[kind] = device_alloc(z->device, bytes);
  device_zero(z->device, z->shard[kind], bytes);
}

Tensor engine_shard(const ZeroPP *z, StateKind kind) {
  return tensor_1d(z->shard[kind], DT_F32, z->shard_numel);
}

/* For messages: a unit is known by its first parameter. */
static const char *unit_name(const ZeroPP *z, int unit) {
  return z->specs[z->units[unit].first].name;
}

static Unit *unit_at(const ZeroPP *z, int unit) {
  require(unit >= 0 && unit < z->n_units);
  return &z->units[unit];
}

void engine_require_closed(const ZeroPP *z, const char *what) {
  for (int i = 0; i < z->n_units; i++)
    if (z->units[i].grad_open)
      die("%s: the gradient of unit %d (%s...) is open and was not reduced", what, i,
          unit_name(z, i));
}

void engine_require_sharded(const ZeroPP *z, const char *what) {
  for (int i = 0; i < z->n_units; i++)
    if (z->units[i].holds)
      die("%s: unit %d (%s...) is still held by %d gather(s): its full copy would be stale", what,
          i, unit_name(z, i), z->units[i].holds);
}

/* ---- weights ---- */

/* Calls for each piece of the packed unit, in the order it travels. */
static void copy_pieces(const ZeroPP *z, const Unit *u, float *full, float *packed, bool pack) {
  const Grid *g = z->grid;
  for (int r = 0; r < g->world; r++) {
    for (int p = u->first; p < u->first + u->count; p++) {
      int64_t start, count;
      layout_owned(&z->specs[p], g->nodes, g->local, r / g->local, r % g->local, &start, &count);
      float *place = full + z->place[p].full + start;
      size_t bytes = (size_t)count * sizeof(float);
      if (bytes) memcpy(pack ? packed : place, pack ? place : packed, bytes);
      packed += count;
    }
  }
}

/* The gaps before aligned parameters and at the end are zero in every full buffer. */
static void zero_gaps(const ZeroPP *z, const Unit *u, float *full) {
  int64_t end = 0;
  for (int p = u->first; p < u->first + u->count; p++) {
    for (; end < z->place[p].full; end++) full[end] = 0;
    end += z->place[p].numel;
  }
  for (; end < u->full_numel; end++) full[end] = 0;
}

static size_t full_bytes(const Unit *u) { return (size_t)u->full_numel * sizeof(float); }

void zeropp_gather(ZeroPP *z, int unit) {
  Unit *u = unit_at(z, unit);
  if (z->version == 0)
    die("gather of unit %d (%s...): no weights were written yet", unit, unit_name(z, unit));
  if (u->holds++ > 0) return;
  float *own = z->shard[STATE_MASTER] + u->shard;
  if (z->grid->world == 1) {
    u->full = own;
    return;
  }
  comm_all_gather(z->grid->all, own, z->pack, u->rank_bytes);
  u->full = pool_take(&z->pool, full_bytes(u));
  zero_gaps(z, u, u->full);
  copy_pieces(z, u, u->full, z->pack, false);
}

void zeropp_release(ZeroPP *z, int unit) {
  Unit *u = unit_at(z, unit);
  if (u->holds == 0)
    die("release of unit %d (%s...), which no gather holds", unit, unit_name(z, unit));
  if (--u->holds > 0) return;
  if (z->grid->world > 1) pool_give(&z->pool, u->full, full_bytes(u));
  u->full = NULL;
}

void zeropp_gather_all(ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++) zeropp_gather(z, i);
}

void zeropp_release_all(ZeroPP *z) {
  for (int i = z->n_units - 1; i >= 0; i--) zeropp_release(z, i);
}

static Tensor param_tensor(const ZeroPP *z, int param, int n, float *unit_buffer) {
  const ParamSpec *s = zeropp_spec(z, param);
  int64_t rows = s->dim[0];
  require(n >= 1 && param + n <= z->n_params);
  for (int p = param + 1; p < param + n; p++) {
    if (!z->specs[p].joined) die("%s is not joined to %s", z->specs[p].name, s->name);
    rows += z->specs[p].dim[0];
  }
  float *data = unit_buffer + z->place[param].full;
  return s->ndim == 2 ? tensor_2d(data, DT_F32, rows, s->dim[1]) : tensor_1d(data, DT_F32, rows);
}

Tensor zeropp_weight_joined(const ZeroPP *z, int param, int n) {
  const Unit *u = unit_at(z, zeropp_spec(z, param)->unit);
  if (!u->holds) die("weight %s is read, but no gather holds its unit", z->specs[param].name);
  return param_tensor(z, param, n, u->full);
}

Tensor zeropp_weight(const ZeroPP *z, int param) { return zeropp_weight_joined(z, param, 1); }

/* ---- gradients ---- */

void zeropp_open_grad(ZeroPP *z, int unit) {
  Unit *u = unit_at(z, unit);
  require(z->trainable);
  if (u->grad_open) return;
  u->grad_open = true;
  if (z->grid->world == 1) {
    u->grad = z->shard[STATE_GRAD] + u->shard;
    return;
  }
  u->grad = pool_take(&z->pool, full_bytes(u));
  device_zero(z->device, u->grad, full_bytes(u));
}

Tensor zeropp_grad_joined(const ZeroPP *z, int param, int n) {
  const Unit *u = unit_at(z, zeropp_spec(z, param)->unit);
  if (!u->grad_open)
    die("gradient of %s is asked for, but its unit's is not open", z->specs[param].name);
  return param_tensor(z, param, n, u->grad);
}

Tensor zeropp_grad(const ZeroPP *z, int param) { return zeropp_grad_joined(z, param, 1); }

void zeropp_reduce(ZeroPP *z, int unit) {
  Unit *u = unit_at(z, unit);
  if (!u->grad_open)
    die("reduction of unit %d (%s...), whose gradient is not open", unit, unit_name(z, unit));
  u->grad_open = false;
  if (z->grid->world > 1) {
    copy_pieces(z, u, u->grad, z->pack, true);
    pool_give(&z->pool, u->grad, full_bytes(u));
    comm_reduce_scatter_f32(z->grid->all, z->pack, z->summed, u->rank_count);
    float *shard = z->shard[STATE_GRAD] + u->shard;
    z->ops->axpy(z->device, 1, tensor_1d(z->summed, DT_F32, u->owned),
                 tensor_1d(shard, DT_F32, u->owned));
  }
  u->grad = NULL;
}

void zeropp_zero_grad(ZeroPP *z) {
  require(z->trainable);
  engine_require_closed(z, "zero_grad");
  device_zero(z->device, z->shard[STATE_GRAD], (size_t)z->shard_numel * sizeof(float));
}

void zeropp_scale_grad(ZeroPP *z, float alpha) {
  require(z->trainable);
  engine_require_closed(z, "scale_grad");
  z->ops->scale(z->device, alpha, engine_shard(z, STATE_GRAD));
}
