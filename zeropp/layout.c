/* layout: who owns which element, and where it lies: in full buffers, in shards, in messages. Pure
 * arithmetic; nothing is allocated on the device here.
 *
 * Parts of a cut differ by one at most, the larger ones first, so any size works: below the number
 * of ranks some ranks own nothing. Where anything is quantized, pieces are cut between the blocks
 * that share a scale. Blocks are counted from the start of a row (a vector is one row), so they are
 * the same for every grid, and no block has two owners.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/wire.h"
#include "zeropp/internal.h"

enum {
  ALIGN_BYTES = 128, /* of the first of every joined group */
  WIRE_ALIGN_BYTES = 16
};

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Part `i` of n things in `parts` parts. */
static void cut(int64_t n, int parts, int i, int64_t *start, int64_t *count) {
  int64_t whole = n / parts, rest = n % parts;
  *start = i * whole + (i < rest ? i : rest);
  *count = whole + (i < rest);
}

void layout_rows(int64_t rows, int local, int local_rank, int64_t *first, int64_t *count) {
  cut(rows, local, local_rank, first, count);
}

/* The first element of a block. */
static int64_t block_start(int64_t block, int64_t row_blocks, int64_t width, int64_t size) {
  return block / row_blocks * width + min_i64(block % row_blocks * size, width);
}

void layout_piece(const ParamSpec *s, int64_t size, int nodes, int local, int node, int local_rank,
                  int64_t *start, int64_t *count) {
  bool matrix = s->ndim == 2;
  /* A vector may be cut between any two blocks: each counts as a row here. */
  int64_t width = matrix ? s->dim[1] : size, row_blocks = (width + size - 1) / size;
  int64_t rows = matrix ? s->dim[0] : (s->dim[0] + size - 1) / size;
  int64_t numel = matrix ? rows * width : s->dim[0];
  int64_t slice, slice_rows, piece, blocks;
  cut(rows, local, local_rank, &slice, &slice_rows);
  cut(slice_rows * row_blocks, nodes, node, &piece, &blocks);
  piece += slice * row_blocks;
  *start = min_i64(numel, block_start(piece, row_blocks, width, size));
  *count = min_i64(numel, block_start(piece + blocks, row_blocks, width, size)) - *start;
}

void layout_owned(const ParamSpec *s, int nodes, int local, int node, int local_rank,
                  int64_t *start, int64_t *count) {
  layout_piece(s, 1, nodes, local, node, local_rank, start, count);
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

/* The full buffer of a unit: offsets of its parameters. */
static void place_full(Unit *u, const ParamSpec *s, ParamPlace *place, int64_t align) {
  int64_t at = 0;
  for (int p = u->first; p < u->first + u->count; p++) {
    if (!s[p].joined) at = round_up(at, align);
    place[p].numel = spec_numel(&s[p]);
    place[p].full = at;
    at += place[p].numel;
    u->dense_numel += place[p].numel;
  }
  u->full_numel = round_up(at, align);
}

/* This rank's pieces. Returns where the next unit's start. */
static int64_t place_shard(ZeroPP *z, Unit *u, int64_t at) {
  const Grid *g = z->grid;
  u->shard = at;
  for (int p = u->first; p < u->first + u->count; p++) {
    ParamPlace *w = &z->place[p];
    layout_piece(&z->specs[p], z->cut, g->nodes, g->local, g->node, g->local_rank, &w->start,
                 &w->count);
    w->shard = z->whole ? u->shard + w->full + w->start : at;
    at += w->count;
    u->owned += w->count;
  }
  return z->whole ? u->shard + u->full_numel : at;
}

/* ---- messages ---- */

static void place_slots(const ZeroPP *z, Unit *u) {
  const Grid *g = z->grid;
  int64_t dense = 0;
  u->slots = mem_zalloc((size_t)g->world * (size_t)u->count, sizeof *u->slots);
  for (int i = 0; i < g->world * u->count; i++) {
    const ParamSpec *p = &z->specs[u->first + i % u->count];
    int piece = i / u->count;
    WireSpan *s = &u->slots[i].span;
    s->width = p->ndim == 2 ? p->dim[1] : p->dim[0];
    layout_piece(p, z->cut, g->nodes, g->local, piece % g->nodes, piece / g->nodes, &s->first,
                 &s->count);
    u->slots[i].dense = dense;
    dense += s->count;
  }
}

/* Formats with blocks have payloads at WIRE_ALIGN_BYTES, where kernels are fastest. */
static size_t wire_aligned(WireFormat f, size_t at) {
  if (!wire_has_blocks(f)) return at;
  return (at + WIRE_ALIGN_BYTES - 1) / WIRE_ALIGN_BYTES * WIRE_ALIGN_BYTES;
}

/* Scales of all parameters, then their payloads. Returns the piece's bytes. */
static size_t place_piece(const ZeroPP *z, const Unit *u, Message *m, int piece) {
  size_t at = m->at[piece];
  int first = piece * u->count, end = first + u->count;
  for (int i = first; i < end; i++) {
    m->scales[i] = at;
    if (slot_travels(z, u, m, i)) at += wire_scale_bytes(m->format, u->slots[i].span);
  }
  for (int i = first; i < end; i++) {
    m->payload[i] = at = wire_aligned(m->format, at);
    if (slot_travels(z, u, m, i)) at += wire_payload_bytes(m->format, u->slots[i].span);
  }
  return wire_aligned(m->format, at) - m->at[piece];
}

static void message_build(const ZeroPP *z, const Unit *u, Message *m, WireFormat f) {
  size_t pieces = (size_t)z->grid->world, slots = pieces * (size_t)u->count;
  m->format = f;
  m->piece = mem_alloc(pieces, sizeof *m->piece);
  m->at = mem_zalloc(pieces + 1, sizeof *m->at);
  m->slice = mem_zalloc((size_t)z->grid->local, sizeof *m->slice);
  m->scales = mem_alloc(slots, sizeof *m->scales);
  m->payload = mem_alloc(slots, sizeof *m->payload);
  for (int i = 0; i < z->grid->world; i++) {
    m->piece[i] = place_piece(z, u, m, i);
    m->at[i + 1] = m->at[i] + m->piece[i];
    m->slice[i / z->grid->nodes] += m->piece[i];
  }
  m->total = m->at[pieces];
}

static void message_free(Message *m) {
  free(m->piece);
  free(m->at);
  free(m->slice);
  free(m->scales);
  free(m->payload);
}

size_t message_slice_at(const ZeroPP *z, const Message *m, int local_rank) {
  return m->at[local_rank * z->grid->nodes];
}

const size_t *message_pieces(const ZeroPP *z, const Message *m, int local_rank) {
  return m->piece + local_rank * z->grid->nodes;
}

/* How numbers travel that are not quantized. What is computed with in BF16 need not travel in F32.
 */
static WireKind weight_wire(const ZeroPPConfig *c) {
  return c->compute == DT_BF16 ? WIRE_BF16 : c->wire;
}

static WireFormat format_of(const ZeroPPConfig *c, WireKind coded, WireKind otherwise) {
  return (WireFormat){coded == WIRE_F32 ? otherwise : coded, c->block, c->scale};
}

static void build_messages(const ZeroPP *z, Unit *u) {
  const ZeroPPConfig *c = &z->cfg;
  WireFormat weights = format_of(c, c->qwz, weight_wire(c));
  u->message[MSG_WEIGHTS].vectors_only = z->direct;
  message_build(z, u, &u->message[MSG_WEIGHTS], weights);
  message_build(z, u, &u->message[MSG_SECONDARY],
                c->hpz == HPZ_QUANTIZED ? weights : format_of(c, WIRE_F32, weight_wire(c)));
  message_build(z, u, &u->message[MSG_GRADS], format_of(c, c->qgz, c->wire));
  message_build(z, u, &u->message[MSG_EXACT], format_of(c, WIRE_F32, WIRE_F32));
}

/* ---- all of it ---- */

static void place_units(ZeroPP *z) {
  int64_t dense = 0, align = ALIGN_BYTES / (int64_t)dtype_size(z->cfg.compute);
  for (int i = 0; i < z->n_units; i++) {
    Unit *u = &z->units[i];
    place_full(u, z->specs, z->place, align);
    z->shard_numel = place_shard(z, u, z->shard_numel);
    z->numel += u->dense_numel;
    u->dense = dense;
    dense += u->dense_numel;
    u->slice = z->slice_numel;
    place_slots(z, u);
    u->slice_numel = pieces_numel(z, pieces_slice(z, u));
    z->slice_numel += u->slice_numel;
    build_messages(z, u);
  }
}

/* What the switches come to on this grid. */
static void choose_ways(ZeroPP *z) {
  const ZeroPPConfig *c = &z->cfg;
  const bool one = z->grid->world == 1, half = c->compute == DT_BF16;
  z->keeps_full = c->stage < 3;
  z->cut = c->qwz || c->qgz ? c->block : 1; /* the same for models that train and that do not */
  /* One refresh, or one that crosses no network, need not be short. */
  if (c->refresh == REFRESH_AUTO && (!c->trainable || z->grid->nodes == 1)) z->cfg.qwz = WIRE_F32;
  /* The secondary of a node of one rank is all of its weights: kept as they are computed with, they
   * need not be copied for each use. */
  if (c->hpz == HPZ_ON && z->grid->local == 1 && c->trainable && half && !c->refresh) {
    z->keeps_full = true;
    z->cfg.hpz = HPZ_OFF;
  }
  /* On a node of all ranks it is this rank's masters, rounded. */
  bool on_node = c->hpz == HPZ_ON && z->grid->nodes == 1 && !one && c->trainable && half && !c->qwz;
  if (on_node) z->cfg.hpz = HPZ_OFF;
  z->whole = one || c->stage == 0;
  z->alias_full = z->whole && !c->qwz && (half || c->wire == WIRE_F32);
  /* The CPU rounds alike for any number of ranks; a GPU only what travels. */
  z->alias_grad = one && !c->qgz && (half || c->wire == WIRE_F32);
  z->half_grad = z->alias_grad && c->trainable && c->gradients == DT_BF16;
  z->one_hop = z->grid->nodes == 1 && !c->qgz && !c->accumulate_node;
  z->direct = half && c->stage == 3 && !c->qwz && !c->hpz && z->grid->nodes == 1 && !one;
  z->keeps_rounded = (z->alias_full && half) || on_node;
  if (c->offload && c->trainable && !z->alias_full && !c->qwz && weight_wire(c) == WIRE_BF16)
    z->keeps_rounded = true;
  /* Two: a message is written while the last one travels. A GPU writes it in no time, but between
   * nodes it has two chains of collectives under way (comm_new_chain), and one more unit ahead for
   * when the network hangs. */
  bool two = half && z->grid->nodes > 1;
  z->flights = half && !two ? 1 : 2;
  z->ahead = c->prefetch > 0 ? c->prefetch + 2 * two : 0;
}

void layout_build(ZeroPP *z) {
  check_specs(z->specs, z->n_params);
  choose_ways(z);
  z->n_units = z->n_params ? z->specs[z->n_params - 1].unit + 1 : 0;
  z->units = mem_zalloc((size_t)z->n_units, sizeof *z->units);
  z->place = mem_zalloc((size_t)z->n_params, sizeof *z->place);
  for (int p = 0; p < z->n_params; p++) {
    Unit *u = &z->units[z->specs[p].unit];
    if (u->count++ == 0) u->first = p;
  }
  place_units(z);
  if (delta_is_on(z)) delta_layout(z);
}

void layout_free(ZeroPP *z) {
  for (int i = 0; i < z->n_units; i++) {
    for (int k = 0; k < MSG_KINDS; k++) message_free(&z->units[i].message[k]);
    free(z->units[i].slots);
  }
  free(z->units);
  free(z->place);
}
