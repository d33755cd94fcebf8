/* layout: who owns which element, and where it lies. Pure arithmetic; nothing is allocated on the
 * device here.
 *
 * Parts of a cut differ by one at most, the larger ones first, so any size works: below the number
 * of ranks some ranks own nothing.
 */
#include <stdlib.h>
#include <string.h>

#include "zeropp/internal.h"

enum { ALIGN_FLOATS = 64 / sizeof(float) };

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Part `i` of n things in `parts` parts. */
static void cut(int64_t n, int parts, int i, int64_t *start, int64_t *count) {
  int64_t whole = n / parts, rest = n % parts;
  *start = i * whole + (i < rest ? i : rest);
  *count = whole + (i < rest);
}

void layout_owned(const ParamSpec *s, int nodes, int local, int node, int local_rank,
                  int64_t *start, int64_t *count) {
  int64_t rows = s->dim[0], width = s->ndim == 2 ? s->dim[1] : 1;
  int64_t slice, slice_rows, piece;
  cut(rows, local, local_rank, &slice, &slice_rows);
  cut(slice_rows * width, nodes, node, &piece, count);
  *start = slice * width + piece;
}

static int64_t spec_numel(const ParamSpec *s) {
  return s->ndim == 2 ? s->dim[0] * s->dim[1] : s->dim[0];
}

static void check_specs(const ParamSpec *s, int n) {
  for (int i = 0; i < n; i++) {
    bool first = i == 0 || s[i].unit != s[i - 1].unit;
    if (s[i].ndim < 1 || s[i].ndim > 2 || s[i].dim[0] < 1 || (s[i].ndim == 2 && s[i].dim[1] < 1))
      die("parameter %s: its shape is not one of a vector or a matrix", s[i].name);
    if (i == 0 ? s[i].unit != 0 : s[i].unit != s[i - 1].unit && s[i].unit != s[i - 1].unit + 1)
      die("parameter %s: units must ascend from 0 by 1, found %d", s[i].name, s[i].unit);
    if (s[i].joined &&
        (first || s[i].ndim != s[i - 1].ndim || (s[i].ndim == 2 && s[i].dim[1] != s[i - 1].dim[1])))
      die("parameter %s: nothing of its width is before it to be joined to", s[i].name);
  }
}

static int64_t rank_owned(const ParamSpec *s, const Grid *g, int rank, int64_t *start) {
  int64_t count;
  layout_owned(s, g->nodes, g->local, rank / g->local, rank % g->local, start, &count);
  return count;
}

/* The full buffer of a unit: offsets of its parameters. */
static void place_full(Unit *u, const ParamSpec *s, ParamPlace *place) {
  int64_t at = 0;
  for (int p = u->first; p < u->first + u->count; p++) {
    if (!s[p].joined) at = round_up(at, ALIGN_FLOATS);
    place[p].numel = spec_numel(&s[p]);
    place[p].full = at;
    at += place[p].numel;
    u->dense_numel += place[p].numel;
  }
  u->full_numel = round_up(at, ALIGN_FLOATS);
}

/* Returns where the next unit's piece starts. */
static int64_t place_shard(ZeroPP *z, Unit *u, int64_t at) {
  const Grid *g = z->grid;
  u->shard = at;
  for (int p = u->first; p < u->first + u->count; p++) {
    ParamPlace *w = &z->place[p];
    w->count = rank_owned(&z->specs[p], g, g->rank, &w->start);
    w->shard = g->world == 1 ? u->shard + w->full : at;
    at += w->count;
    for (int r = 0; r < g->world; r++) {
      int64_t start;
      u->rank_count[r] += (size_t)rank_owned(&z->specs[p], g, r, &start);
    }
  }
  for (int r = 0; r < g->world; r++) u->rank_bytes[r] = u->rank_count[r] * sizeof(float);
  u->owned = (int64_t)u->rank_count[g->rank];
  return g->world == 1 ? u->shard + u->full_numel : at;
}

void layout_build(ZeroPP *z) {
  check_specs(z->specs, z->n_params);
  z->n_units = z->n_params ? z->specs[z->n_params - 1].unit + 1 : 0;
  z->units = mem_zalloc((size_t)z->n_units, sizeof *z->units);
  z->place = mem_zalloc((size_t)z->n_params, sizeof *z->place);
  size_t world = (size_t)z->grid->world;
  for (int p = 0; p < z->n_params; p++) {
    Unit *u = &z->units[z->specs[p].unit];
    if (u->count++ == 0) u->first = p;
  }
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    u->rank_count = mem_zalloc(world, sizeof *u->rank_count);
    u->rank_bytes = mem_zalloc(world, sizeof *u->rank_bytes);
    place_full(u, z->specs, z->place);
    z->shard_numel = place_shard(z, u, z->shard_numel);
    z->numel += u->dense_numel;
  }
}

void layout_free(ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++) {
    free(z->units[i].rank_count);
    free(z->units[i].rank_bytes);
  }
  free(z->units);
  free(z->place);
}

uint64_t layout_full_bytes(const ZeroPP *z) {
  int64_t first = 0, second = 0;
  if (z->grid->world == 1) return 0;
  for (int i = 0; i < z->n_units; i++) {
    int64_t n = z->units[i].full_numel;
    if (n > first) {
      second = first;
      first = n;
    } else if (n > second) {
      second = n;
    }
  }
  return (uint64_t)(first + second) * sizeof(float) * (z->trainable ? 2 : 1);
}

ZeroPPMemory zeropp_memory(const ZeroPPConfig *cfg, const ParamSpec *specs, int n_params, int nodes,
                           int local, bool ema) {
  /* Rank 0 owns as much as any other: larger parts come first. */
  Grid g = {.world = nodes * local, .nodes = nodes, .local = local};
  ZeroPP z = {.grid = &g, .trainable = cfg->trainable, .n_params = n_params};
  z.specs = mem_alloc((size_t)n_params, sizeof *specs);
  memcpy(z.specs, specs, (size_t)n_params * sizeof *specs);
  layout_build(&z);
  uint64_t shard = (uint64_t)z.shard_numel * sizeof(float), travel = 0;
  for (int i = 0; i < z.n_units && g.world > 1; i++) {
    uint64_t dense = (uint64_t)z.units[i].dense_numel * sizeof(float);
    uint64_t owned = (uint64_t)z.units[i].owned * sizeof(float);
    uint64_t reduce = cfg->trainable ? owned * (uint64_t)(g.world + 1) : 0;
    if (dense + reduce > travel) travel = dense + reduce;
  }
  ZeroPPMemory m = {.master = shard, .ema = ema ? shard : 0};
  m.moments = cfg->trainable ? 2 * shard : 0;
  m.gradients = cfg->trainable ? shard : 0;
  m.full_units = layout_full_bytes(&z) + travel;
  layout_free(&z);
  free(z.specs);
  return m;
}
