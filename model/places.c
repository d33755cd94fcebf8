/* Where parameters lie in a checkpoint's tensors. Some families store q, k and v (gate and up) one
 * below the other in one tensor; GPT-2 stores the matrices of its blocks transposed. A parameter is
 * split off on load and put back on save without any rank holding the whole tensor. */
#include <stdio.h>
#include <string.h>

#include "model/internal.h"

void block_prefix(const FamilyNames *names, int layer, char out[48]) {
  const char *number = strstr(names->block, "%d");
  require(number != NULL);
  snprintf(out, 48, "%.*s%d%s", (int)(number - names->block), names->block, layer, number + 2);
}

/* If `name` has ".PART." behind the fused tensor's name, takes PART out of it. */
static bool take_part(char *name, const char *fused, const char *part) {
  char text[64];
  if (!fused) return false;
  int len = snprintf(text, sizeof text, "%s.%s.", fused, part);
  char *at = strstr(name, text);
  if (!at) return false;
  char *end = at + len;
  memmove(at + strlen(fused) + 1, end, strlen(end) + 1);
  return true;
}

TensorPlace model_place(const ModelConfig *c, const ParamSpec *s) {
  const FamilyNames *t = family_of(c)->names;
  int64_t q = attn_width(c), kv = (int64_t)c->n_kv_heads * c->head_dim, up = c->ffn;
  const struct {
    const char *fused, *part;
    int64_t first, rows;
  } parts[] = {{t->qkv, "q", 0, q + 2 * kv},
               {t->qkv, "k", q, q + 2 * kv},
               {t->qkv, "v", q + kv, q + 2 * kv},
               {t->gate_up, "gate", 0, 2 * up},
               {t->gate_up, "up", up, 2 * up}};
  TensorPlace p = {.rows = s->dim[0]};
  snprintf(p.name, sizeof p.name, "%s", s->name);
  p.in_out = t->in_out && s->ndim == 2 && s->unit >= 1 && s->unit <= c->n_layers;
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    if (!take_part(p.name, parts[i].fused, parts[i].part)) continue;
    p.first = parts[i].first;
    p.rows = parts[i].rows;
    break;
  }
  return p;
}

/* Rows r of column c with start <= r * in + c < end. */
static int64_t first_row(int64_t flat, int64_t in, int64_t c) {
  return flat <= c ? 0 : (flat - c + in - 1) / in;
}

/* Column by column: the rows that this range has of a column are a run of the tensor. */
static int transposed_runs(const TensorPlace *p, const ParamSpec *s, int64_t start, int64_t count,
                           float *to, const float *from, TensorRun run, void *ctx) {
  int64_t in = s->dim[1];
  float *column = mem_alloc((size_t)s->dim[0], sizeof(float));
  int rc = 0;
  for (int64_t c = 0; c < in && !rc; c++) {
    int64_t r0 = first_row(start, in, c), r1 = first_row(start + count, in, c);
    for (int64_t r = r0; from && r < r1; r++) column[r - r0] = from[r * in + c - start];
    if (r1 > r0) rc = run(ctx, c * p->rows + p->first + r0, r1 - r0, column);
    for (int64_t r = r0; to && !rc && r < r1; r++) to[r * in + c - start] = column[r - r0];
  }
  free(column);
  return rc;
}

int place_read(const TensorPlace *p, const ParamSpec *s, int64_t start, int64_t count, float *w,
               TensorRun run, void *ctx) {
  if (count == 0) return 0;
  if (p->in_out) return transposed_runs(p, s, start, count, w, NULL, run, ctx);
  return run(ctx, p->first * s->dim[1] + start, count, w);
}

int place_write(const TensorPlace *p, const ParamSpec *s, int64_t start, int64_t count,
                const float *w, TensorRun run, void *ctx) {
  if (count == 0) return 0;
  if (p->in_out) return transposed_runs(p, s, start, count, NULL, w, run, ctx);
  return run(ctx, p->first * s->dim[1] + start, count, (float *)w);
}
