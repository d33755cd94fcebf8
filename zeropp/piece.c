/* piece: one rank's part of a unit between memory and a message.
 *
 * A message has the scales of all parameters first, then their payloads. What is at hand in memory
 * lies in a full buffer, in the shards, or dense.
 */
#include "zeropp/internal.h"

/* One parameter of a piece: the elements, where they are, and where they are in the message. */
typedef struct Part {
  WireSpan span;
  size_t scales, payload; /* offsets in the message */
  int64_t dense;          /* elements of the piece before it */
  float *x;
} Part;

static WireSpan part_span(const ZeroPP *z, Piece piece, int p) {
  const Grid *g = z->grid;
  const ParamSpec *s = &z->specs[p];
  WireSpan span = {s->ndim == 2 ? s->dim[1] : s->dim[0], 0, 0};
  layout_piece(s, z->cut, g->nodes, g->local, piece.node, piece.local_rank, &span.first,
               &span.count);
  return span;
}

int64_t piece_numel(const ZeroPP *z, Piece piece) {
  int64_t n = 0;
  for (int p = piece.unit->first; p < piece.unit->first + piece.unit->count; p++)
    n += part_span(z, piece, p).count;
  return n;
}

static Part part_first(const ZeroPP *z, Piece piece, WireFormat f) {
  Part part = {.dense = 0};
  for (int p = piece.unit->first; p < piece.unit->first + piece.unit->count; p++)
    part.payload += wire_scale_bytes(f, part_span(z, piece, p));
  return part;
}

/* Fills in parameter p, given that all before it were passed. */
static void part_enter(const ZeroPP *z, Piece piece, int p, Lie lie, float *x, Part *part) {
  part->span = part_span(z, piece, p);
  if (lie == LIE_FULL) part->x = x + z->place[p].full + part->span.first;
  if (lie == LIE_SHARD) part->x = x + z->place[p].shard;
  if (lie == LIE_DENSE) part->x = x + part->dense;
}

static void part_leave(WireFormat f, Part *part) {
  part->scales += wire_scale_bytes(f, part->span);
  part->payload += wire_payload_bytes(f, part->span);
  part->dense += part->span.count;
}

static WireData part_data(const Part *part, char *message, int n, size_t stride) {
  return (WireData){message + part->scales, message + part->payload, n, stride};
}

static WireFeedback part_error(const ZeroPP *z, const Part *part, uint16_t *error) {
  if (!error) return (WireFeedback){0};
  return (WireFeedback){tensor_1d(error + part->dense, DT_BF16, part->span.count),
                        (float)z->cfg.error_decay};
}

void piece_encode(const ZeroPP *z, Piece piece, WireFormat f, Lie lie, float *x, uint16_t *error,
                  char *to) {
  Part part = part_first(z, piece, f);
  for (int p = piece.unit->first; p < piece.unit->first + piece.unit->count; p++) {
    part_enter(z, piece, p, lie, x, &part);
    WirePart w = {.span = part.span,
                  .x = tensor_1d(part.x, DT_F32, part.span.count),
                  .e = part_error(z, &part, error),
                  .to = part_data(&part, to, 1, 0)};
    if (part.span.count) z->ops->quantize(z->device, f, 1, &w);
    part_leave(f, &part);
  }
}

void piece_decode(const ZeroPP *z, Piece piece, WireFormat f, char *from, int n, size_t stride,
                  bool add, Lie lie, float *x) {
  Part part = part_first(z, piece, f);
  for (int p = piece.unit->first; p < piece.unit->first + piece.unit->count; p++) {
    part_enter(z, piece, p, lie, x, &part);
    WirePart w = {.span = part.span,
                  .x = tensor_1d(part.x, DT_F32, part.span.count),
                  .from = part_data(&part, from, n, stride)};
    if (part.span.count) z->ops->dequantize(z->device, f, 1, &w, add);
    part_leave(f, &part);
  }
}

void piece_recode(const ZeroPP *z, Piece piece, WireFormat f, char *from, int n, size_t stride,
                  WireFormat f_to, uint16_t *error, char *to) {
  Part in = part_first(z, piece, f), out = part_first(z, piece, f_to);
  for (int p = piece.unit->first; p < piece.unit->first + piece.unit->count; p++) {
    in.span = out.span = part_span(z, piece, p);
    WirePart w = {.span = in.span,
                  .e = part_error(z, &out, error),
                  .from = part_data(&in, from, n, stride),
                  .to = part_data(&out, to, 1, 0)};
    if (in.span.count) z->ops->requantize(z->device, f, f_to, 1, &w);
    part_leave(f, &in);
    part_leave(f_to, &out);
  }
}

/* ---- whole units ---- */

size_t unit_full_bytes(const Unit *u) { return (size_t)u->full_numel * sizeof(float); }

/* The gaps before aligned parameters and at the end are zero in every full buffer. */
static void zero_gaps(const ZeroPP *z, const Unit *u, float *full) {
  int64_t end = 0;
  for (int p = u->first; p < u->first + u->count; p++) {
    for (; end < z->place[p].full; end++) full[end] = 0;
    end += z->place[p].numel;
  }
  for (; end < u->full_numel; end++) full[end] = 0;
}

void unit_decode(const ZeroPP *z, const Unit *u, const Message *m, char *from, float *full) {
  zero_gaps(z, u, full);
  for (int i = 0; i < z->grid->world; i++) {
    Piece piece = {u, i % z->grid->nodes, i / z->grid->nodes};
    piece_decode(z, piece, m->format, from, 1, 0, false, LIE_FULL, full);
    from += m->piece[i];
  }
}

void unit_encode(const ZeroPP *z, const Unit *u, const Message *m, float *full, uint16_t *error,
                 char *to) {
  for (int i = 0; i < z->grid->world; i++) {
    Piece piece = {u, i % z->grid->nodes, i / z->grid->nodes};
    piece_encode(z, piece, m->format, LIE_FULL, full, error, to);
    to += m->piece[i];
    if (error) error += piece_numel(z, piece);
  }
}
