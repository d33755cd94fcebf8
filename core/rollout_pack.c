/* Packs: the sequences of one micro-batch copied side by side, and the rows a loss looks at. */
#include <stdlib.h>
#include <string.h>

#include "core/rollout.h"

static Pack copy_sequences(const int32_t *offsets, const int32_t *tokens, const MicroBatch *mb) {
  Pack p = {.offsets = mem_zalloc((size_t)mb->n_seqs + 1, sizeof *p.offsets)};
  for (int i = 0; i < mb->n_seqs; i++) {
    int b = mb->ids[i];
    p.offsets[i + 1] = p.offsets[i] + offsets[b + 1] - offsets[b];
  }
  p.tokens = mem_alloc((size_t)p.offsets[mb->n_seqs], sizeof *p.tokens);
  for (int i = 0; i < mb->n_seqs; i++) {
    int b = mb->ids[i];
    size_t n = (size_t)(offsets[b + 1] - offsets[b]);
    memcpy(p.tokens + p.offsets[i], tokens + offsets[b], n * sizeof *tokens);
  }
  p.batch = (Batch){mb->n_seqs, p.offsets, p.tokens};
  return p;
}

Pack pack_targets(const int32_t *offsets, const int32_t *tokens, const int32_t *from,
                  const MicroBatch *mb) {
  Pack p = copy_sequences(offsets, tokens, mb);
  size_t most = (size_t)p.offsets[mb->n_seqs];
  p.rows = mem_alloc(most, sizeof *p.rows);
  p.targets = mem_alloc(most, sizeof *p.targets);
  p.index = mem_alloc(most, sizeof *p.index);
  for (int i = 0; i < mb->n_seqs; i++) {
    int b = mb->ids[i], len = offsets[b + 1] - offsets[b];
    require(from[b] >= 1);
    for (int t = from[b]; t < len; t++) {
      int row = p.n_rows++;
      p.rows[row] = p.offsets[i] + t - 1;
      p.targets[row] = p.tokens[p.offsets[i] + t];
      p.index[row] = offsets[b] + t;
    }
  }
  return p;
}

Pack pack_last(const int32_t *offsets, const int32_t *tokens, const MicroBatch *mb) {
  Pack p = copy_sequences(offsets, tokens, mb);
  p.n_rows = mb->n_seqs;
  p.rows = mem_alloc((size_t)mb->n_seqs, sizeof *p.rows);
  for (int i = 0; i < mb->n_seqs; i++) {
    require(p.offsets[i + 1] > p.offsets[i]);
    p.rows[i] = p.offsets[i + 1] - 1;
  }
  return p;
}

void pack_select(Pack *p, const uint8_t *mask) {
  int kept = 0;
  if (!mask) return;
  for (int i = 0; i < p->n_rows; i++) {
    if (!mask[p->index[i]]) continue;
    p->rows[kept] = p->rows[i];
    p->targets[kept] = p->targets[i];
    p->index[kept++] = p->index[i];
  }
  p->n_rows = kept;
}

uint8_t *pack_kept(const Pack *p, const Rollout *r) {
  size_t width = (size_t)r->kept_width;
  if (!r->kept) return NULL;
  uint8_t *bits = mem_alloc((size_t)p->n_rows, width);
  for (int i = 0; i < p->n_rows; i++)
    memcpy(bits + (size_t)i * width, r->kept + (size_t)p->index[i] * width, width);
  return bits;
}

void pack_free(Pack *p) {
  free(p->offsets);
  free(p->tokens);
  free(p->rows);
  free(p->targets);
  free(p->index);
  *p = (Pack){.n_rows = 0};
}
