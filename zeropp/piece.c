/* piece: pieces of a unit between memory and a message, as one list of parts for one op.
 *
 * A piece has the scales of all its parameters first, then their payloads. What is at hand in
 * memory lies in a full buffer, in the shards, or dense.
 */
#include <stdlib.h>

#include "zeropp/internal.h"

Pieces pieces_own(const ZeroPP *z, const Unit *u) {
  return (Pieces){u, z->grid->local_rank * z->grid->nodes + z->grid->node, 1};
}

Pieces pieces_slice(const ZeroPP *z, const Unit *u) {
  return (Pieces){u, z->grid->local_rank * z->grid->nodes, z->grid->nodes};
}

Pieces pieces_all(const ZeroPP *z, const Unit *u) { return (Pieces){u, 0, z->grid->world}; }

int64_t pieces_numel(const ZeroPP *z, Pieces pieces) {
  const Unit *u = pieces.unit;
  int end = (pieces.first + pieces.n) * u->count;
  int64_t before = u->slots[pieces.first * u->count].dense;
  return (end < z->grid->world * u->count ? u->slots[end].dense : u->dense_numel) - before;
}

/* ---- lists of parts: slots that are not empty ---- */

typedef struct Parts {
  WirePart *part;
  int *slot; /* of each part */
  int n;
} Parts;

bool slot_travels(const ZeroPP *z, const Unit *u, const Message *m, int slot) {
  if (u->slots[slot].span.count == 0) return false;
  return !m->vectors_only || z->specs[u->first + slot % u->count].ndim == 1;
}

static Parts parts_of(const ZeroPP *z, Pieces pieces, const Message *m) {
  const Unit *u = pieces.unit;
  size_t most = (size_t)pieces.n * (size_t)u->count;
  Parts parts = {mem_zalloc(most, sizeof(WirePart)), mem_alloc(most, sizeof(int)), 0};
  for (int s = pieces.first * u->count; s < (pieces.first + pieces.n) * u->count; s++) {
    if (!slot_travels(z, u, m, s)) continue;
    parts.slot[parts.n] = s;
    parts.part[parts.n++].span = u->slots[s].span;
  }
  return parts;
}

static void parts_free(Parts parts) {
  free(parts.part);
  free(parts.slot);
}

/* Where a slot's elements are. */
static int64_t element_of(const ZeroPP *z, Pieces pieces, Lie lie, int slot) {
  const Unit *u = pieces.unit;
  const Slot *s = &u->slots[slot];
  const ParamPlace *w = &z->place[u->first + slot % u->count];
  if (lie == LIE_FULL) return w->full + s->span.first;
  if (lie == LIE_SHARD) return w->shard;
  return s->dense - u->slots[pieces.first * u->count].dense;
}

static void parts_memory(const ZeroPP *z, Pieces pieces, Memory m, Parts parts) {
  require(m.lie != LIE_SHARD || pieces.n == 1); /* shards hold this rank's piece alone */
  for (int i = 0; i < parts.n; i++) {
    int64_t at = element_of(z, pieces, m.lie, parts.slot[i]);
    parts.part[i].x =
        tensor_1d((char *)m.x + (size_t)at * dtype_size(m.type), m.type, parts.part[i].span.count);
  }
}

static void parts_error(const ZeroPP *z, Pieces pieces, uint16_t *error, Parts parts) {
  for (int i = 0; i < parts.n && error; i++) {
    int64_t at = element_of(z, pieces, LIE_DENSE, parts.slot[i]);
    parts.part[i].e = (WireFeedback){tensor_1d(error + at, DT_BF16, parts.part[i].span.count),
                                     (float)z->cfg.error_decay};
  }
}

/* first: where the first of the pieces is. */
static WireData slot_data(const Message *m, Pieces pieces, int slot, char *first, int n,
                          size_t stride) {
  size_t before = m->at[pieces.first];
  return (WireData){first + (m->scales[slot] - before), first + (m->payload[slot] - before), n,
                    stride};
}

/* ---- the three ways ---- */

void pieces_encode(const ZeroPP *z, Pieces pieces, MessageKind kind, Memory x, uint16_t *error,
                   char *to) {
  const Message *m = &pieces.unit->message[kind];
  Parts parts = parts_of(z, pieces, m);
  parts_memory(z, pieces, x, parts);
  parts_error(z, pieces, error, parts);
  for (int i = 0; i < parts.n; i++)
    parts.part[i].to = slot_data(m, pieces, parts.slot[i], to, 1, 0);
  z->ops->quantize(z->device, m->format, parts.n, parts.part);
  parts_free(parts);
}

void pieces_decode(const ZeroPP *z, Pieces pieces, MessageKind kind, char *from, int n,
                   size_t stride, bool add, Memory x) {
  const Message *m = &pieces.unit->message[kind];
  Parts parts = parts_of(z, pieces, m);
  parts_memory(z, pieces, x, parts);
  for (int i = 0; i < parts.n; i++)
    parts.part[i].from = slot_data(m, pieces, parts.slot[i], from, n, stride);
  z->ops->dequantize(z->device, m->format, parts.n, parts.part, add);
  parts_free(parts);
}

void pieces_recode(const ZeroPP *z, Pieces pieces, MessageKind kind, char *from, int n,
                   size_t stride, MessageKind kind_to, uint16_t *error, char *to) {
  const Message *m = &pieces.unit->message[kind], *m_to = &pieces.unit->message[kind_to];
  Parts parts = parts_of(z, pieces, m);
  parts_error(z, pieces, error, parts);
  for (int i = 0; i < parts.n; i++) {
    parts.part[i].from = slot_data(m, pieces, parts.slot[i], from, n, stride);
    parts.part[i].to = slot_data(m_to, pieces, parts.slot[i], to, 1, 0);
  }
  z->ops->requantize(z->device, m->format, m_to->format, parts.n, parts.part);
  parts_free(parts);
}

/* ---- vectors ---- */

static const WireFormat bf16 = {.kind = WIRE_BF16};

static WirePart vector_part(Tensor x, char *half) {
  int64_t n = tensor_numel(x);
  WireData data = {.payload = half, .n = 1};
  return (WirePart){.span = {n > 0 ? n : 1, 0, n}, .x = x, .from = data, .to = data};
}

void numbers_round(const ZeroPP *z, Tensor x, char *half) {
  WirePart part = vector_part(x, half);
  z->ops->quantize(z->device, bf16, tensor_numel(x) > 0, &part);
}

void numbers_widen(const ZeroPP *z, char *half, Tensor x) {
  WirePart part = vector_part(x, half);
  z->ops->dequantize(z->device, bf16, tensor_numel(x) > 0, &part, false);
}

void numbers_add(const ZeroPP *z, char *half, Tensor x) {
  WirePart part = vector_part(x, half);
  z->ops->dequantize(z->device, bf16, tensor_numel(x) > 0, &part, true);
}
