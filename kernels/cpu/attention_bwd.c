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

/* A thread's buffers. Of the key tile: k, kt, vt, dk, dv; of the query tile: q (scaled), dout,
 * weights p and ds, and the tile's share of dq. */
typedef struct Scratch {
  float *k, *kt, *vt, *dk, *dv;
  float *q, *dout, *p, *ds, *dq;
  float *delta; /* [heads of the group, longest sequence] */
} Scratch;

static Scratch scratch_create(int64_t longest, int64_t group, int64_t dim) {
  int64_t dp = round_up(dim, VEC);
  int64_t sizes[] = {TILE_K * dp,     TILE_K * dp,     TILE_K * dp,    TILE_K * dp,
                     TILE_K * dp,     TILE_Q * dp,     TILE_Q * dp,    TILE_Q * dp,
                     TILE_Q * TILE_K, TILE_Q * TILE_K, group * longest};
  float *at[11], *next;
  int64_t total = 0;
  for (int i = 0; i < 11; i++) total += sizes[i];
  next = scratch_alloc(total);
  for (int i = 0; i < 11; next += sizes[i++]) at[i] = next;
  return (Scratch){.k = at[0],
                   .kt = at[1],
                   .vt = at[2],
                   .dk = at[3],
                   .dv = at[4],
                   .q = at[5],
                   .dout = at[6],
                   .dq = at[7],
                   .p = at[8],
                   .ds = at[9],
                   .delta = at[10]};
}

/* Row i of the tiles, query t against keys [key, key + n): scores to weights, and from dp = dout.v
 * to ds. What t does not see gets weight 0 by choice, not by product. */
static void weights_row(const Scratch *x, const AttnHead *a, int64_t i, int64_t t, int64_t key,
                        int64_t n, float delta) {
  float *p = x->p + i * TILE_K, *ds = x->ds + i * TILE_K, lse = a->lse[t * a->lse_stride];
  int32_t from = (int32_t)max_i64(first_key(a->s, t) - key, 0);
  int32_t to = (int32_t)min_i64(t + 1 - key, n);
#pragma omp simd
  for (int32_t j = 0; j < (int32_t)n; j++) {
    float w = exp_f32(p[j] - lse);
    bool seen = j >= from && j < to;
    p[j] = seen ? w : 0;
    ds[j] = seen ? w * (ds[j] - delta) : 0;
  }
}

/* Queries [t0, t0 + rows) of one head against the packed keys [key, key + keys). */
static void backward_tile(const Scratch *x, const BwdHead *h, const float *delta, int64_t t0,
                          int64_t rows, int64_t key, int64_t keys) {
  const AttnHead *a = &h->a;
  int64_t pad_rows = round_up(rows, TILE_ROWS), n = round_up(keys, VEC), dp = a->dim_pad;
  tile_pack(x->q, dp, pad_rows, a->q + t0 * a->qkv_stride, a->qkv_stride, rows, a->dim, a->s.scale);
  tile_pack(x->dout, dp, pad_rows, h->dout + t0 * a->out_stride, a->out_stride, rows, a->dim, 1);
  tile_gemm(pad_rows, n, a->dim, (TileA){x->q, dp, 1}, x->kt, TILE_K, x->p, TILE_K, false);
  tile_gemm(pad_rows, n, a->dim, (TileA){x->dout, dp, 1}, x->vt, TILE_K, x->ds, TILE_K, false);
  for (int64_t i = 0; i < rows; i++) weights_row(x, a, i, t0 + i, key, n, delta[t0 + i]);
  tile_gemm(n, dp, rows, (TileA){x->p, 1, TILE_K}, x->dout, dp, x->dv, dp, true);
  tile_gemm(n, dp, rows, (TileA){x->ds, 1, TILE_K}, x->q, dp, x->dk, dp, true);
  tile_gemm(pad_rows, dp, keys, (TileA){x->ds, TILE_K, 1}, x->k, dp, x->dq, dp, false);
  for (int64_t i = 0; i < rows; i++) {
    float *dq = h->dq + (t0 + i) * a->qkv_stride;
    const float *part = x->dq + i * dp;
    for (int64_t j = 0; j < a->dim; j++) dq[j] += a->s.scale * part[j];
  }
}

/* One key tile against every query that sees any of it. */
static void backward_keys(const Scratch *x, const BwdHead *heads, int64_t n_heads, int64_t key,
                          float *dk, float *dv) {
  const AttnHead *a = &heads->a;
  int64_t keys = min_i64(TILE_K, a->len - key), pad = round_up(keys, VEC), dp = a->dim_pad;
  int64_t stride = a->qkv_stride, last = a->len;
  if (a->s.window > 0) last = min_i64(last, key + keys - 1 + a->s.window);
  tile_pack(x->k, dp, keys, a->k + key * stride, stride, keys, a->dim, 1);
  tile_pack_transposed(x->kt, pad, a->k + key * stride, stride, keys, a->dim);
  tile_pack_transposed(x->vt, pad, a->v + key * stride, stride, keys, a->dim);
  memset(x->dk, 0, sizeof(float) * (size_t)(TILE_K * dp));
  memset(x->dv, 0, sizeof(float) * (size_t)(TILE_K * dp));
  for (int64_t h = 0; h < n_heads; h++)
    for (int64_t t = key; t < last; t += TILE_Q) {
      int64_t rows = min_i64(TILE_Q, last - t);
      /* The first tiles lie on the diagonal: keys behind their last query are left out. */
      backward_tile(x, heads + h, x->delta + h * a->len, t, rows, key,
                    min_i64(keys, t + rows - key));
    }
  for (int64_t j = 0; j < keys; j++) {
    memcpy(dk + (key + j) * stride, x->dk + j * dp, sizeof(float) * (size_t)a->dim);
    memcpy(dv + (key + j) * stride, x->dv + j * dp, sizeof(float) * (size_t)a->dim);
  }
}

static void backward_group(const Scratch *x, const BwdHead *heads, int64_t n_heads, float *dk,
                           float *dv) {
  const AttnHead *a = &heads->a;
  for (int64_t h = 0; h < n_heads; h++)
    for (int64_t t = 0; t < a->len; t++) {
      const float *out = heads[h].a.out + t * a->out_stride;
      const float *dout = heads[h].dout + t * a->out_stride;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < a->dim; j++) sum += out[j] * dout[j];
      x->delta[h * a->len + t] = sum;
      memset(heads[h].dq + t * a->qkv_stride, 0, sizeof(float) * (size_t)a->dim);
    }
  for (int64_t key = 0; key < a->len; key += TILE_K) backward_keys(x, heads, n_heads, key, dk, dv);
}

void cpu_attention_bwd(Device *d, Tensor dout_NHD, Tensor qkv_NQ, Tensor out_NHD, Tensor lse_NH,
                       Segments seg, AttnShape s, Tensor dqkv_NQ) {
  attention_check(qkv_NQ, out_NHD, seg, s);
  int64_t n = qkv_NQ.dim[0], group = s.n_heads / s.n_kv_heads, longest = 0;
  require(is_f32_2d(dout_NHD, n, out_NHD.dim[1]) && is_f32_2d(lse_NH, n, s.n_heads));
  require(is_f32_2d(dqkv_NQ, n, qkv_NQ.dim[1]));
  for (int b = 0; b < seg.n_seqs; b++)
    longest = max_i64(longest, seg.offsets[b + 1] - seg.offsets[b]);
#pragma omp parallel num_threads(d->threads) if (tensor_numel(qkv_NQ) >= PARALLEL_MIN)
  {
    Scratch x = scratch_create(longest, group, s.head_dim);
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
}
