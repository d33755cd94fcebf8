/* engine: making and ending a sharded model, and what is asked of it.
 *
 * Weights (gather.c) and gradients (reduce.c) of a unit are independent: a gradient may be open
 * while the unit is SHARDED.
 */
#include <stdlib.h>
#include <string.h>

#include "zeropp/internal.h"

enum { DEFAULT_BLOCK = 256 };

/* What contradicts itself; the recipe is checked before, with the place. */
static void check_config(const ZeroPPConfig *c) {
  bool coded = c->qwz || c->qgz || c->hpz;
  require(c->stage >= 0 && c->stage <= 3);
  require(c->wire == WIRE_F32 || c->wire == WIRE_BF16);
  require(c->qwz == WIRE_F32 || c->qwz == WIRE_INT8 || c->qwz == WIRE_FP8);
  require(c->qgz == WIRE_F32 || c->qgz == WIRE_INT8 || c->qgz == WIRE_INT4);
  require(c->stage > 0 || !coded);
  require(c->stage == 3 || !c->hpz);
  require(c->hpz != HPZ_QUANTIZED || c->qwz);
  require(!c->error_feedback || c->qgz);
  require(c->refresh == REFRESH_DENSE || c->hpz == HPZ_ON);
  require(c->refresh != REFRESH_DELTA || !c->qwz);
  require(!c->accumulate_node || c->stage >= 2);
  require(c->compute == DT_F32 || c->compute == DT_BF16);
  require(c->gradients == DT_F32 || c->gradients == DT_BF16);
}

ZeroPPConfig engine_config(const ZeroPPConfig *given) {
  ZeroPPConfig c = *given;
  if (c.block == 0) c.block = DEFAULT_BLOCK;
  check_config(&c);
  return c;
}

/* The secondary of all units, each on a cache line of its own. */
static void add_secondary(ZeroPP *z) {
  size_t bytes = 0;
  for (int pass = 0; pass < 2; pass++) {
    if (pass == 1) z->secondary = device_alloc(z->device, bytes);
    bytes = 0;
    for (int i = 0; i < z->n_units; i++) {
      Unit *u = &z->units[i];
      if (pass == 1) u->secondary = z->secondary + bytes;
      bytes += memory_secondary_bytes(z, u);
    }
  }
}

static void add_gradients(ZeroPP *z) {
  engine_add_kind(z, STATE_MOMENT1);
  engine_add_kind(z, STATE_MOMENT2);
  engine_add_kind(z, STATE_GRAD);
  if (z->cfg.accumulate_node && !z->alias_grad) {
    size_t bytes = (size_t)z->slice_numel * sizeof *z->node_sum;
    z->node_sum = device_alloc(z->device, bytes);
    for (int i = 0; i < z->n_units; i++) z->units[i].node_fresh = true;
  }
  if (!z->cfg.error_feedback) return;
  z->error[0] = device_alloc(z->device, (size_t)z->numel * sizeof *z->error[0]);
  z->error[1] = device_alloc(z->device, (size_t)z->slice_numel * sizeof *z->error[1]);
  reduce_forget_errors(z);
}

ZeroPP *zeropp_create(Device *d, Grid *g, const ZeroPPConfig *cfg, const ParamSpec *specs,
                      int n_params) {
  Error err = {""};
  if (zeropp_check(cfg, device_kind(d), g->world, &err)) die("%s", err.msg);
  ZeroPP *z = mem_zalloc(1, sizeof *z);
  z->device = d;
  z->ops = device_ops(d);
  z->grid = g;
  z->cfg = engine_config(cfg);
  z->n_params = n_params;
  z->specs = mem_alloc((size_t)n_params, sizeof *specs);
  if (n_params) memcpy(z->specs, specs, (size_t)n_params * sizeof *specs);
  layout_build(z);
  z->one_hop = z->one_hop && device_kind(d) != DEVICE_CPU;
  for (int i = 0; i < z->n_units; i++) z->units[i].work = (UnitWork){z, &z->units[i]};
  z->pool = (Pool){.device = d, .limit = memory_working_bytes(z)};
  shared_open(z, &z->full, memory_shared_full(z));
  engine_add_kind(z, STATE_MASTER);
  if (z->cfg.trainable) add_gradients(z);
  if (z->cfg.hpz && !z->alias_full) add_secondary(z);
  if (delta_is_on(z)) delta_open(z);
  if (z->keeps_rounded) z->rounded = device_alloc(d, memory_rounded_bytes(z));
  return z;
}

void zeropp_destroy(ZeroPP *z) {
  if (!z) return;
  gather_close(z);
  reduce_close(z);
  pool_close(&z->pool);
  state_drop_views(z);
  peers_close(z);
  shared_close(z, &z->full);
  for (StateKind k = 0; k < STATE_KINDS; k++) engine_drop_kind(z, k);
  device_free(z->device, z->rounded);
  delta_close(z);
  device_free(z->device, z->secondary);
  device_free(z->device, z->node_sum);
  for (int hop = 0; hop < 2; hop++) device_free(z->device, z->error[hop]);
  layout_free(z);
  free(z->specs);
  free(z);
}

int zeropp_n_params(const ZeroPP *z) { return z->n_params; }
int zeropp_n_units(const ZeroPP *z) { return z->n_units; }
int zeropp_prefetch_depth(const ZeroPP *z) { return z->ahead; }
int64_t zeropp_numel(const ZeroPP *z) { return z->numel; }
Grid *zeropp_grid(const ZeroPP *z) { return z->grid; }
Device *zeropp_device(const ZeroPP *z) { return z->device; }
const ZeroPPConfig *zeropp_config_of(const ZeroPP *z) { return &z->cfg; }

const ParamSpec *zeropp_spec(const ZeroPP *z, int param) {
  require(param >= 0 && param < z->n_params);
  return &z->specs[param];
}

int zeropp_find(const ZeroPP *z, const char *name) {
  for (int p = 0; p < z->n_params; p++)
    if (strcmp(z->specs[p].name, name) == 0) return p;
  return -1;
}

static DType kind_type(const ZeroPP *z, StateKind kind) {
  return kind == STATE_GRAD ? z->cfg.gradients : DT_F32;
}

bool engine_offloads(const ZeroPP *z, StateKind kind) {
  if (!z->cfg.offload || !z->cfg.trainable) return false;
  bool moment = kind == STATE_MOMENT1 || kind == STATE_MOMENT2;
  return moment || (kind == STATE_MASTER && z->keeps_rounded);
}

void engine_add_kind(ZeroPP *z, StateKind kind) {
  size_t bytes = (size_t)z->shard_numel * dtype_size(kind_type(z, kind));
  if (engine_offloads(z, kind)) {
    z->shard[kind] = device_alloc_host(z->device, bytes);
    memset(z->shard[kind], 0, bytes);
  } else {
    z->shard[kind] = device_alloc(z->device, bytes);
    device_zero(z->device, z->shard[kind], bytes);
  }
}

void engine_drop_kind(ZeroPP *z, StateKind kind) {
  if (engine_offloads(z, kind))
    device_free_host(z->device, z->shard[kind]);
  else
    device_free(z->device, z->shard[kind]);
  z->shard[kind] = NULL;
}

Tensor engine_part(const ZeroPP *z, StateKind kind, int64_t at, int64_t n) {
  DType type = kind_type(z, kind);
  return tensor_1d(z->shard[kind] + (size_t)at * dtype_size(type), type, n);
}

Tensor engine_shard(const ZeroPP *z, StateKind kind) {
  return engine_part(z, kind, 0, z->shard_numel);
}

size_t unit_weight_bytes(const ZeroPP *z, const Unit *u) {
  return (size_t)u->full_numel * dtype_size(z->cfg.compute);
}

size_t unit_grad_bytes(const Unit *u) { return (size_t)u->full_numel * sizeof(float); }

const char *engine_unit_name(const ZeroPP *z, const Unit *u) { return z->specs[u->first].name; }

Unit *engine_unit(const ZeroPP *z, int unit) {
  require(unit >= 0 && unit < z->n_units);
  return &z->units[unit];
}

void engine_require_closed(const ZeroPP *z, const char *what) {
  for (int i = 0; i < z->n_units; i++)
    if (z->units[i].grad_open)
      die("%s: the gradient of unit %d (%s...) is open and was not reduced", what, i,
          engine_unit_name(z, &z->units[i]));
}

void engine_require_sharded(const ZeroPP *z, const char *what) {
  for (int i = 0; i < z->n_units; i++)
    if (z->units[i].holds)
      die("%s: unit %d (%s...) is still held by %d gather(s): its full copy would be stale", what,
          i, engine_unit_name(z, &z->units[i]), z->units[i].holds);
}

Tensor engine_joined(const ZeroPP *z, int param, int n, void *unit_buffer, DType type) {
  const ParamSpec *s = zeropp_spec(z, param);
  int64_t rows = s->dim[0];
  require(n >= 1 && param + n <= z->n_params);
  for (int p = param + 1; p < param + n; p++) {
    if (!z->specs[p].joined) die("%s is not joined to %s", z->specs[p].name, s->name);
    rows += z->specs[p].dim[0];
  }
  char *data = (char *)unit_buffer + (size_t)z->place[param].full * dtype_size(type);
  return s->ndim == 2 ? tensor_2d(data, type, rows, s->dim[1]) : tensor_1d(data, type, rows);
}

Tensor zeropp_weight_joined(const ZeroPP *z, int param, int n) {
  if (rollout_serves(z)) return rollout_weight(z, param, n);
  const Unit *u = engine_unit(z, zeropp_spec(z, param)->unit);
  if (!u->holds) die("weight %s is read, but no gather holds its unit", z->specs[param].name);
  return engine_joined(z, param, n, u->full, z->cfg.compute);
}

Tensor zeropp_weight(const ZeroPP *z, int param) { return zeropp_weight_joined(z, param, 1); }
