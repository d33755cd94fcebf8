/* Causal attention over packed sequences, forward: tiles of scores and a running softmax (Milakov &
 * Gimelshein 2018; Dao et al. 2022). A task is one kv head of one sequence and CHUNK_Q queries, all
 * query heads of its group; tasks share nothing, so any number of threads gives the same bits. */
#include "kernels/cpu/attention.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK_Q = 512 }; /* queries of a task: packing their keys is then a hundredth of the work */

void attention_check(Tensor qkv_NQ, Tensor out_NHD, Segments seg, AttnShape s) {
  int64_t n = qkv_NQ.dim[0], D = s.head_dim;
  require(s.n_heads > 0 && s.n_kv_heads > 0 && s.n_heads % s.n_kv_heads == 0);
  require(D > 0 && s.window >= 0);
  require(is_f32(qkv_NQ, 2) && qkv_NQ.dim[1] == (s.n_heads + 2 * s.n_kv_heads) * D);
  require(is_f32_2d(out_NHD, n, s.n_heads * D) && seg.offsets[seg.n_seqs] == n);
}

AttnHead attention_head(const float *qkv, float *out, float *lse, Segments seg, AttnShape s, int b,
                        int64_t h) {
  int64_t D = s.head_dim, H = s.n_heads, K = s.n_kv_heads, start = seg.offsets[b];
  int64_t stride = (H + 2 * K) * D, kv_head = h / (H / K);
  const float *rows = qkv + start * stride;
  return (AttnHead){.s = s,
                    .len = seg.offsets[b + 1] - start,
                    .dim = D,
                    .dim_pad = round_up(D, VEC),
                    .qkv_stride = stride,
                    .out_stride = H * D,
                    .lse_stride = H,
                    .q = rows + h * D,
                    .k = rows + (H + kv_head) * D,
                    .v = rows + (H + K + kv_head) * D,
                    .out = out + start * H * D + h * D,
                    .lse = lse ? lse + start * H + h : NULL};
}

void tile_pack(float *dst, int64_t pad_rows, int64_t pad_dim, const float *src, int64_t stride,
               int64_t rows, int64_t dim, float scale) {
  for (int64_t i = 0; i < rows; i++) {
#pragma omp simd
    for (int64_t j = 0; j < dim; j++) dst[i * pad_dim + j] = scale * src[i * stride + j];
    for (int64_t j = dim; j < pad_dim; j++) dst[i * pad_dim + j] = 0;
  }
  memset(dst + rows * pad_dim, 0, sizeof(float) * (size_t)((pad_rows - rows) * pad_dim));
}

void tile_pack_transposed(float *dst, const float *src, int64_t stride, int64_t rows, int64_t dim,
                          float scale) {
  for (int64_t i = 0; i < dim; i++) {
    for (int64_t j = 0; j < rows; j++) dst[i * TILE_Q + j] = scale * src[j * stride + i];
    for (int64_t j = rows; j < TILE_Q; j++) dst[i * TILE_Q + j] = 0;
  }
}

/* A thread's buffers: k, v [keys, dim_pad] of the task; qt [dim, TILE_Q], weights [TILE_K, TILE_Q],
 * out [TILE_Q, dim_pad] of the query tile, with the running softmax of each query. */
typedef struct Scratch {
  float *k, *v, *qt, *weight, *out;
  float max[TILE_Q], sum[TILE_Q], keep[TILE_Q];
} Scratch;

static Scratch scratch_create(int64_t keys, int64_t dim) {
  int64_t dp = round_up(dim, VEC), padded = round_up(keys, TILE_ROWS);
  int64_t sizes[] = {padded * dp, padded * dp, dim * TILE_Q, TILE_K * TILE_Q, TILE_Q * dp};
  int64_t total = 0;
  for (int i = 0; i < 5; i++) total += sizes[i];
  Scratch x = {.k = scratch_alloc(total)};
  x.v = x.k + sizes[0];
  x.qt = x.v + sizes[1];
  x.weight = x.qt + sizes[2];
  x.out = x.weight + sizes[3];
  return x;
}

static void mask_scores(float *score, const ScoreTile *t, AttnShape s) {
  int32_t window = window_or_all(s), ahead = (int32_t)(t->t0 - t->key);
  for (int32_t j = 0; j < (int32_t)t->keys; j++)
#pragma omp simd
    for (int32_t i = 0; i < TILE_Q; i++)
      score[j * TILE_Q + i] = lane_sees(i, j, ahead, window) ? score[j * TILE_Q + i] : -INFINITY;
}

/* The running softmax of the tile's queries takes in the masked scores, which become weights. */
static void softmax_step(Scratch *x, const ScoreTile *t) {
  float base[TILE_Q];
  for (int i = 0; i < TILE_Q; i += VEC) {
    Vec max = vec_load(x->max + i);
    for (int64_t j = 0; j < t->keys; j++)
      max = vec_larger(vec_load(x->weight + j * TILE_Q + i), max);
    vec_store(base + i, max);
  }
  for (int i = 0; i < TILE_Q; i++) {
    float max = base[i];
    base[i] = max == -INFINITY ? 0 : max; /* nothing seen yet: weights are exp(-inf) = 0 */
    x->keep[i] = exp_f32(x->max[i] - base[i]);
    x->max[i] = max;
  }
  for (int64_t j = 0; j < t->keys; j++)
#pragma omp simd
    for (int i = 0; i < TILE_Q; i++)
      x->weight[j * TILE_Q + i] = exp_f32(x->weight[j * TILE_Q + i] - base[i]);
  for (int i = 0; i < TILE_Q; i += VEC) {
    Vec sum = vec_load(x->sum + i) * vec_load(x->keep + i);
    for (int64_t j = 0; j < t->keys; j++) sum += vec_load(x->weight + j * TILE_Q + i);
    vec_store(x->sum + i, sum);
  }
}

/* Queries [t0, t0 + rows) of one head against the packed keys, which start at token `base`. */
static void attend_tile(Scratch *x, const AttnHead *a, int64_t t0, int64_t rows, int64_t base) {
  int64_t dp = a->dim_pad, pad_rows = round_up(rows, TILE_ROWS);
  tile_pack_transposed(x->qt, a->q + t0 * a->qkv_stride, a->qkv_stride, rows, a->dim, a->s.scale);
  memset(x->out, 0, sizeof(float) * (size_t)(pad_rows * dp));
  for (int i = 0; i < TILE_Q; i++) {
    x->max[i] = -INFINITY;
    x->sum[i] = 0;
  }
  int64_t first = base + (first_key(a->s, t0) - base) / TILE_K * TILE_K;
  for (int64_t key = first; key < t0 + rows; key += TILE_K) {
    ScoreTile t = score_tile(t0, rows, key);
    const float *k = x->k + (key - base) * dp, *v = x->v + (key - base) * dp;
    tile_gemm(t.pad_keys, TILE_Q, a->dim, (TileA){k, dp, 1}, x->qt, TILE_Q, x->weight, TILE_Q,
              false);
    if (!tile_is_whole(&t, a->s)) mask_scores(x->weight, &t, a->s);
    softmax_step(x, &t);
    for (int64_t i = 0; i < rows; i++)
      if (x->keep[i] != 1.0f)
        for (int64_t j = i * dp; j < (i + 1) * dp; j += VEC)
          vec_store(x->out + j, x->keep[i] * vec_load(x->out + j));
    tile_gemm(pad_rows, dp, t.keys, (TileA){x->weight, 1, TILE_Q}, v, dp, x->out, dp, true);
  }
  for (int64_t i = 0; i < rows; i++) {
    float inverse = 1.0f / x->sum[i], *out = a->out + (t0 + i) * a->out_stride;
#pragma omp simd
    for (int64_t j = 0; j < a->dim; j++) out[j] = x->out[i * dp + j] * inverse;
    if (a->lse) a->lse[(t0 + i) * a->lse_stride] = x->max[i] + logf(x->sum[i]);
  }
}

/* Queries [t0, t1) of all heads of a group. */
static void attend_chunk(Scratch *x, const AttnHead *heads, int64_t n_heads, int64_t t0,
                         int64_t t1) {
  const AttnHead *a = heads;
  int64_t base = first_key(a->s, t0) / TILE_K * TILE_K, keys = t1 - base;
  int64_t pad = round_up(keys, TILE_ROWS), from = base * a->qkv_stride;
  tile_pack(x->k, pad, a->dim_pad, a->k + from, a->qkv_stride, keys, a->dim, 1);
  tile_pack(x->v, pad, a->dim_pad, a->v + from, a->qkv_stride, keys, a->dim, 1);
  for (int64_t h = 0; h < n_heads; h++)
    for (int64_t t = t0; t < t1; t += TILE_Q)
      attend_tile(x, heads + h, t, min_i64(TILE_Q, t1 - t), base);
}

typedef struct Task {
  int32_t seq, kv_head;
  int64_t t0;
} Task;

static Task *list_tasks(Segments seg, AttnShape s, int64_t *n, int64_t *longest) {
  *n = *longest = 0;
  for (int b = 0; b < seg.n_seqs; b++) {
    int64_t len = seg.offsets[b + 1] - seg.offsets[b];
    *longest = max_i64(*longest, len);
    *n += (len + CHUNK_Q - 1) / CHUNK_Q * s.n_kv_heads;
  }
  Task *tasks = mem_alloc((size_t)*n, sizeof *tasks), *at = tasks;
  for (int b = 0; b < seg.n_seqs; b++)
    for (int64_t t = 0; t < seg.offsets[b + 1] - seg.offsets[b]; t += CHUNK_Q)
      for (int h = 0; h < s.n_kv_heads; h++) *at++ = (Task){b, h, t};
  return tasks;
}

void cpu_attention_fwd(Device *d, Tensor qkv_NQ, Segments seg, AttnShape s, Tensor out_NHD,
                       Tensor lse_NH) {
  attention_check(qkv_NQ, out_NHD, seg, s);
  require(!lse_NH.data || is_f32_2d(lse_NH, qkv_NQ.dim[0], s.n_heads));
  int64_t n_tasks, longest, group = s.n_heads / s.n_kv_heads;
  Task *tasks = list_tasks(seg, s, &n_tasks, &longest);
#pragma omp parallel num_threads(d->threads) if (tensor_numel(qkv_NQ) >= PARALLEL_MIN)
  {
    Scratch x = scratch_create(longest, s.head_dim);
    AttnHead *heads = mem_alloc((size_t)group, sizeof *heads);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < n_tasks; i++) {
      Task t = tasks[i];
      for (int64_t h = 0; h < group; h++)
        heads[h] = attention_head(tensor_f32(qkv_NQ), tensor_f32(out_NHD), lse_NH.data, seg, s,
                                  t.seq, t.kv_head * group + h);
      attend_chunk(&x, heads, group, t.t0, min_i64(t.t0 + CHUNK_Q, heads->len));
    }
    free(heads);
    free(x.k);
  }
  free(tasks);
}
