/* Where the blocks of a span are. Internal to kernels/cpu. */
#ifndef KERNELS_CPU_QUANT_WALK_H
#define KERNELS_CPU_QUANT_WALK_H

#include "kernels/cpu/cpu.h"
#include "kernels/wire.h"

typedef struct Walk {
  int64_t width, block, row_blocks; /* of the blocks' geometry */
  int64_t blocks;                   /* of the span */
  int64_t start;                    /* block of its row that the span starts with */
  int64_t lead;                     /* elements of that row before the span */
} Walk;

/* One block: its number in the span, first element, size, column in its row, and first byte of an
 * int4 payload. */
typedef struct Place {
  int64_t i, at, n, column, half_bytes;
} Place;

static inline Walk walk_of(WireFormat f, WireSpan s) {
  Walk w = {0};
  if (!wire_has_blocks(f)) { /* one row, in blocks that suit the cache */
    w.width = max_i64(s.count, 1);
    w.block = WIRE_MAX_BLOCK / 4;
    w.row_blocks = w.blocks = (s.count + w.block - 1) / w.block;
    return w;
  }
  w.width = s.width;
  w.block = f.block;
  w.row_blocks = wire_row_blocks(f, s.width);
  w.blocks = wire_blocks(f, s);
  w.lead = s.first % s.width;
  w.start = w.lead / f.block;
  return w;
}

static inline Place walk_start(const Walk *w, int64_t i) {
  int64_t row = (w->start + i) / w->row_blocks, in_row = (w->start + i) % w->row_blocks;
  Place p = {.i = i, .column = in_row * w->block};
  p.at = row * w->width + p.column - w->lead;
  p.n = min_i64(w->block, w->width - p.column);
  p.half_bytes = row * ((w->width + 1) / 2) + p.column / 2 - w->lead / 2;
  return p;
}

static inline void walk_next(const Walk *w, Place *p) {
  p->i++;
  p->at += p->n;
  p->half_bytes += (p->n + 1) / 2;
  p->column += p->n;
  if (p->column == w->width) p->column = 0;
  p->n = min_i64(w->block, w->width - p->column);
}

static inline char *payload_of(WireKind kind, const WireData *data, const Place *p) {
  int64_t at = p->at;
  if (kind == WIRE_F32) at *= 4;
  if (kind == WIRE_BF16) at *= 2;
  if (kind == WIRE_INT4) at = p->half_bytes;
  return (char *)data->payload + at;
}

#endif
