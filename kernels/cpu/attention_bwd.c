/* Gradient of attention, by tiles: the weights are computed again from the forward's log-sum-exp
 * (Dao et al. 2022). With p = exp(scale q.k - lse) and delta = dout.out: dv += p dout;  ds = p
 * (dout.v - delta);  dk += ds scale q;  dq += scale ds k. A task is one kv head of one sequence
 * with all query heads of its group, in a fixed order: tasks share nothing, so any number of
 * threads gives the same bits. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/attention.h"

typedef struct BwdHead {
  AttnHead a;
  const float *dout;
  float *dq;
} BwdHead;

/* A thread's buffers. Of the task: k, v, dk, dv [keys, dim_pad]. Of the query tile: q (scaled),
 * dout, dq [TILE_Q, dim_pad] and the transposes qt, dout_t [dim, TILE_Q]. Of the score tile: p, ds
 * [TILE_K, TILE_Q]. */
typedef struct Scratch {
  float *k, *v, *dk, *dv;
  float *q, *dout, *dq, *qt, *dout_t;
  float *p, *ds;
  float lse[TILE_Q], delta[TILE_Q];
} Scratch;

static Scratch scratch_create(int64_t longest, int64_t dim) {
  enum { PARTS = 11 };
  int64_t dp = round_up(dim, VEC), whole = round_up(longest, TILE_ROWS) * dp, total = 0;
  int64_t sizes[PARTS] = {whole,        whole,           whole,          whole,
                          TILE_Q * dp,  TILE_Q * dp,     TILE_Q * dp,    TILE_Q * dim,
                          TILE_Q * dim, TILE_K * TILE_Q, TILE_K * TILE_Q};
  float *at[PARTS];
  for (int i = 0; i < PARTS; i++) total += sizes[i];
  at[0] = scratch_alloc(total);
  for (int i = 1; i < PARTS; i++) at[i] = at[i - 1] + sizes[i - 1];
  return (Scratch){.k = at[0],
                   .v = at[1],
                   .dk = at[2],
                   .dv = at[3],
                   .q = at[4],
                   .dout = at[5],
                   .dq = at[6],
                   .qt = at[7],
                   .dout_t = at[8],
                   .p = at[9],
                   .ds = at[10]};
}

/* One key's row of a tile: scores to weights, and dout.v to ds. */
static void whole_row(float *restrict p, float *restrict ds, const float *restrict lse,
                      const float *restrict delta) {
#pragma omp simd
  for (int32_t i = 0; i < TILE_Q; i++) {
    p[i] = exp_f32(p[i] - lse[i]);
    ds[i] = p[i] * (ds[i] - delta[i]);
  }
}

/* The same where only the queries in lanes [from, to) see the key: the others get 0 by choice, not
 * by product. */
static void partial_row(float *restrict p, float *restrict ds, const float *restrict lse,
                        const float *restrict delta, int32_t from, int32_t to) {
#pragma omp simd
  for (int32_t i = 0; i < TILE_Q; i++) {
    float w = exp_f32(p[i] - lse[i]), g = w * (ds[i] - delta[i]);
    int32_t seen = -(int32_t)((i >= from) & (i < to));
    p[i] = seen ? w : 0;
    ds[i] = seen ? g : 0;
  }
}

static void weights_and_ds(const Scratch *x, const ScoreTile *t, AttnShape s) {
  bool whole = tile_is_whole(t, s);
  for (int64_t j = 0; j < t->keys; j++) {
    float *p = x->p + j * TILE_Q, *ds = x->ds + j * TILE_Q;
    int64_t from = t->key + j - t->t0,
            to = s.window > 0 ? min_i64(from + s.window, t->rows) : t->rows;
    if (whole)
      whole_row(p, ds, x->lse, x->delta);
    else
      partial_row(p, ds, x->lse, x->delta, (int32_t)from, (int32_t)to);
  }
  size_t rest = sizeof(float) * (size_t)((t->pad_keys - t->keys) * TILE_Q);
  memset(x->p + t->keys * TILE_Q, 0, rest);
  memset(x->ds + t->keys * TILE_Q, 0, rest);
}

static void pack_queries(Scratch *x, const BwdHead *h, int64_t t0, int64_t rows) {
  const AttnHead *a = &h->a;
  int64_t pad_rows = round_up(rows, TILE_ROWS);
  const float *q = a->q + t0 * a->qkv_stride, *dout = h->dout + t0 * a->out_stride;
  tile_pack(x->q, pad_rows, a->dim_pad, q, a->qkv_stride, rows, a->dim, a->s.scale);
  tile_pack(x->dout, pad_rows, a->dim_pad, dout, a->out_stride, rows, a->dim, 1);
  tile_pack_transposed(x->qt, q, a->qkv_stride, rows, a->dim, a->s.scale);
  tile_pack_transposed(x->dout_t, dout, a->out_stride, rows, a->dim, 1);
  memset(x->dq, 0, sizeof(float) * (size_t)(pad_rows * a->dim_pad));
  memset(x->lse, 0, sizeof x->lse);
  memset(x->delta, 0, sizeof x->delta);
  for (int64_t i = 0; i < rows; i++) {
    const float *out = a->out + (t0 + i) * a->out_stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < a->dim; j++) sum += out[j] * dout[i * a->out_stride + j];
    x->delta[i] = sum;
    x->lse[i] = a->lse[(t0 + i) * a->lse_stride];
  }
}

/* Queries [t0, t0 + rows) of one head against every key tile they see. */
static void backward_tile(Scratch *x, const BwdHead *h, int64_t t0, int64_t rows) {
  const AttnHead *a = &h->a;
  int64_t dp = a->dim_pad, first = first_key(a->s, t0) / TILE_K * TILE_K;
  pack_queries(x, h, t0, rows);
  for (int64_t key = first; key < t0 + rows; key += TILE_K) {
    ScoreTile t = score_tile(t0, rows, key);
    int64_t at = key * dp;
    tile_gemm(t.pad_keys, TILE_Q, a->dim, (TileA){x->k + at, dp, 1}, x->qt, TILE_Q, x->p, TILE_Q,
              false);
    tile_gemm(t.pad_keys, TILE_Q, a->dim, (TileA){x->v + at, dp, 1}, x->dout_t, TILE_Q, x->ds,
              TILE_Q, false);
    weights_and_ds(x, &t, a->s);
    tile_gemm(t.pad_keys, dp, rows, (TileA){x->p, TILE_Q, 1}, x->dout, dp, x->dv + at, dp, true);
    tile_gemm(t.pad_keys, dp, rows, (TileA){x->ds, TILE_Q, 1}, x->q, dp, x->dk + at, dp, true);
    tile_gemm(round_up(rows, TILE_ROWS), dp, t.keys, (TileA){x->ds, 1, TILE_Q}, x->k + at, dp,
              x->dq, dp, true);
  }
  for (int64_t i = 0; i < rows; i++) {
    float *dq = h->dq + (t0 + i) * a->qkv_stride;
#pragma omp simd
    for (int64_t j = 0; j < a->dim; j++) dq[j] = a->s.scale * x->dq[i * dp + j];
  }
}

static void backward_group(Scratch *x, const BwdHead *heads, int64_t n_heads, float *dk,
                           float *dv) {
  const AttnHead *a = &heads->a;
  int64_t dp = a->dim_pad, pad = round_up(a->len, TILE_ROWS), stride = a->qkv_stride;
  tile_pack(x->k, pad, dp, a->k, stride, a->len, a->dim, 1);
  tile_pack(x->v, pad, dp, a->v, stride, a->len, a->dim, 1);
  memset(x->dk, 0, sizeof(float) * (size_t)(pad * dp));
  memset(x->dv, 0, sizeof(float) * (size_t)(pad * dp));
  for (int64_t h = 0; h < n_heads; h++)
    for (int64_t t = 0; t < a->len; t += TILE_Q)
      backward_tile(x, heads + h, t, min_i64(TILE_Q, a->len - t));
  for (int64_t j = 0; j < a->len; j++) {
    memcpy(dk + j * stride, x->dk + j * dp, sizeof(float) * (size_t)a->dim);
    memcpy(dv + j * stride, x->dv + j * dp, sizeof(float) * (size_t)a->dim);
  }
}

void cpu_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                       Segments seg, AttnShape s, Rotation rotation, Tensor dqkv_NQ) {
  attention_check(qkv_NQ, out_NHD, seg, s);
  int64_t n = qkv_NQ.dim[0], group = s.n_heads / s.n_kv_heads, longest = 0;
  require(is_f32_2d(dout_NHD, n, out_NHD.dim[1]) && is_f32_2d(lse_NH, n, s.n_heads));
  require(is_f32_2d(dqkv_NQ, n, qkv_NQ.dim[1]));
  for (int b = 0; b < seg.n_seqs; b++)
    longest = max_i64(longest, seg.offsets[b + 1] - seg.offsets[b]);
#pragma omp parallel num_threads(d->threads) if (tensor_numel(qkv_NQ) >= PARALLEL_MIN)
  {
    Scratch x = scratch_create(longest, s.head_dim);
    BwdHead *heads = mem_alloc((size_t)group, sizeof *heads);
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < seg.n_seqs; b++)
      for (int kv = 0; kv < s.n_kv_heads; kv++) {
        int64_t start = seg.offsets[b], stride = qkv_NQ.dim[1];
        float *drow = tensor_f32(dqkv_NQ) + start * stride;
        for (int64_t h = 0; h < group; h++) {
          int64_t head = kv * group + h;
          heads[h].a =
              attention_head(tensor_f32(qkv_NQ), tensor_f32(out_NHD), lse_NH.data, seg, s, b, head);
          heads[h].dout = tensor_f32(dout_NHD) + start * out_NHD.dim[1] + head * s.head_dim;
          heads[h].dq = drow + head * s.head_dim;
        }
        float *dk = drow + (int64_t)(s.n_heads + kv) * s.head_dim;
        backward_group(&x, heads, group, dk, dk + (int64_t)s.n_kv_heads * s.head_dim);
      }
    free(heads);
    free(x.k);
  }
  if (rotation.cos_Pr.data)
    cpu_rope(d, dqkv_NQ, rotation.positions_N, rotation.cos_Pr, rotation.sin_Pr, s, true);
}
