/* memory: bytes that a rank needs, from the layout alone. What the plan says is the pool's limit.
 */
#include <stdlib.h>
#include <string.h>

#include "zeropp/internal.h"

size_t memory_secondary_bytes(const ZeroPP *z, const Unit *u) {
  return (u->message[MSG_SECONDARY].slice[z->grid->local_rank] + 63) / 64 * 64;
}

size_t memory_rounded_bytes(const ZeroPP *z) {
  size_t bytes = 2 * (size_t)z->shard_numel;
  return z->direct ? shared_bytes(bytes) : bytes; /* others map it */
}

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t largest_bytes(const ZeroPP *z, DType type) {
  int64_t most = 0;
  for (int i = 0; i < z->n_units; i++)
    if (z->units[i].full_numel > most) most = z->units[i].full_numel;
  return (uint64_t)most * dtype_size(type);
}

/* Full buffers of one kind that training holds at the same time: two units, since a tied
 * embedding's stays while the blocks' come and go (in buffers of up to twice their size, pool.c);
 * or all. */
static uint64_t full_bytes(const ZeroPP *z, DType type, bool all) {
  uint64_t first = 0, second = 0, sum = 0;
  for (int i = 0; i < z->n_units; i++) {
    uint64_t n = (uint64_t)z->units[i].full_numel * dtype_size(type);
    sum += n;
    second = max_u64(second, min_u64(n, first));
    first = max_u64(first, n);
  }
  return all ? sum : first + min_u64(first, 2 * second);
}

/* One gather: all slices, and one slice on its way into the secondary. */
static uint64_t gather_bytes(const ZeroPP *z) {
  uint64_t whole = 0, slice = 0;
  for (int i = 0; i < z->n_units; i++) {
    const Message *m = z->units[i].message;
    uint64_t n = m[z->cfg.hpz ? MSG_SECONDARY : MSG_WEIGHTS].total;
    if (z->cfg.hpz) slice = max_u64(slice, m[MSG_WEIGHTS].slice[z->grid->local_rank]);
    if (delta_is_on(z)) slice = max_u64(slice, z->units[i].delta_most);
    if (z->cfg.stage == 0) n = m[MSG_EXACT].total; /* a load spreads the state in full precision */
    whole = max_u64(whole, n);
  }
  return whole + slice;
}

/* One reduction: what is sent, and what arrives at either hop. */
static uint64_t reduce_bytes(const ZeroPP *z) {
  const Grid *g = z->grid;
  uint64_t out = 0, in = 0;
  for (int i = 0; i < z->n_units; i++) {
    const Message *m = &z->units[i].message[MSG_GRADS];
    uint64_t slice = m->slice[g->local_rank] * (uint64_t)g->local;
    uint64_t piece = message_pieces(z, m, g->local_rank)[g->node] * (uint64_t)g->nodes;
    out = max_u64(out, m->total);
    in = max_u64(in, max_u64(slice, piece));
  }
  return out + in;
}

/* A tied embedding's stays while the blocks' come and go. */
SharedSize memory_shared_full(const ZeroPP *z) {
  if (!z->direct || z->keeps_rounded) return (SharedSize){0};
  return (SharedSize){2 + z->ahead, shared_bytes(largest_bytes(z, z->cfg.compute))};
}

uint64_t memory_working_bytes(const ZeroPP *z) {
  const ZeroPPConfig *c = &z->cfg;
  const SharedSize full = memory_shared_full(z);
  uint64_t bytes = 0, travel = 0;
  if (full.most)
    bytes += (uint64_t)full.most * full.bytes;
  else if (!z->alias_full)
    bytes += full_bytes(z, c->compute, z->keeps_full);
  if (z->direct && !full.most) bytes += largest_bytes(z, c->compute) * (uint64_t)z->ahead;
  if (!z->alias_full || c->stage == 0) travel = gather_bytes(z) * (uint64_t)(1 + z->ahead);
  if (z->grid->world == 1 && z->alias_full) travel = 0;
  if (z->half_grad) bytes += full_bytes(z, DT_F32, false);
  if (c->trainable && !z->alias_grad) {
    if (c->stage > 0) bytes += full_bytes(z, DT_F32, c->stage < 2);
    travel += (uint64_t)z->flights * reduce_bytes(z);
  }
  return bytes + travel;
}

static ZeroPPMemory memory_of(const ZeroPP *z, bool ema) {
  const ZeroPPConfig *c = &z->cfg;
  uint64_t shard = (uint64_t)z->shard_numel * sizeof(float);
  ZeroPPMemory m = {.master = shard, .ema = ema ? shard : 0};
  if (c->trainable) {
    m.moments = 2 * shard;
    m.gradients = (uint64_t)z->shard_numel * dtype_size(c->gradients);
    if (c->accumulate_node && !z->alias_grad)
      m.gradients += (uint64_t)z->slice_numel * sizeof(float);
    if (c->error_feedback) m.errors = 2 * (uint64_t)(z->numel + z->slice_numel);
  }
  for (int i = 0; i < z->n_units && c->hpz && !z->alias_full; i++)
    m.secondary += memory_secondary_bytes(z, &z->units[i]);
  if (engine_offloads(z, STATE_MOMENT1)) {
    m.host = m.moments + (engine_offloads(z, STATE_MASTER) ? m.master : 0);
    m.moments = 0;
    if (engine_offloads(z, STATE_MASTER)) m.master = 0;
  }
  if (delta_is_on(z)) m.secondary += delta_bytes(z);
  m.full_units = memory_working_bytes(z);
  if (z->keeps_rounded) m.full_units += memory_rounded_bytes(z);
  if (!c->trainable && (m.secondary || z->keeps_rounded)) m.master = 0;
  return m;
}

ZeroPPMemory zeropp_memory(const ZeroPPConfig *cfg, const ParamSpec *specs, int n_params, int nodes,
                           int local, bool ema) {
  /* Rank 0 owns as much as any other: larger parts come first. */
  Grid g = {.world = nodes * local, .nodes = nodes, .local = local};
  ZeroPP z = {.grid = &g, .cfg = engine_config(cfg), .n_params = n_params};
  z.specs = mem_alloc((size_t)n_params, sizeof *specs);
  memcpy(z.specs, specs, (size_t)n_params * sizeof *specs);
  layout_build(&z);
  ZeroPPMemory m = memory_of(&z, ema);
  layout_free(&z);
  free(z.specs);
  return m;
}
