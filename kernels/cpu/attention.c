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

void tile_pack(float *dst, int64_t dim_pad, int64_t pad_rows, const float *src, int64_t stride,
               int64_t rows, int64_t dim, float scale) {
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < dim; j++) dst[i * dim_pad + j] = scale * src[i * stride + j];
    for (int64_t j = dim; j < dim_pad; j++) dst[i * dim_pad + j] = 0;
  }
  memset(dst + rows * dim_pad, 0, sizeof(float) * (size_t)((pad_rows - rows) * dim_pad));
}

void tile_pack_transposed(float *dst, int64_t pad_rows, const float *src, int64_t stride,
                          int64_t rows, int64_t dim) {
  for (int64_t i = 0; i < dim; i++) {
    for (int64_t j = 0; j < rows; j++) dst[i * TILE_K + j] = src[j * stride + i];
    for (int64_t j = rows; j < pad_rows; j++) dst[i * TILE_K + j] = 0;
  }
}

/* A thread's buffers. kt: per key tile [dim, TILE_K]; v: [keys, dim_pad]. */
typedef struct Scratch {
  float *kt, *v, *q, *score, *out;
  float max[TILE_Q], sum[TILE_Q];
} Scratch;

/* Row i of a score tile against keys [key, key + n): masks what token t does not see, moves the
 * row's running maximum, turns scores into weights, rescales what was summed before. */
static void softmax_row(Scratch *x, const AttnHead *a, int64_t i, int64_t t, int64_t key,
                        int64_t n) {
  float *score = x->score + i * TILE_K, *out = x->out + i * a->dim_pad;
  int64_t from = first_key(a->s, t) - key, to = t + 1 - key;
  for (int64_t j = 0; j < min_i64(from, n); j++) score[j] = -INFINITY;
  for (int64_t j = max_i64(to, 0); j < n; j++) score[j] = -INFINITY;
  float max = x->max[i], sum = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < n; j++) max = score[j] > max ? score[j] : max;
  float base = max == -INFINITY ? 0 : max; /* nothing seen yet: weights are exp(-inf) = 0 */
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; j++) {
    score[j] = exp_f32(score[j] - base);
    sum += score[j];
  }
  float keep = exp_f32(x->max[i] - base);
  x->sum[i] = x->sum[i] * keep + sum;
  x->max[i] = max;
  if (keep != 1.0f)
    for (int64_t j = 0; j < a->dim_pad; j++) out[j] *= keep;
}

/* Queries [t0, t0 + rows) of one head against the packed keys, which start at token `base`. */
static void attend_tile(Scratch *x, const AttnHead *a, int64_t t0, int64_t rows, int64_t base) {
  int64_t pad_rows = round_up(rows, TILE_ROWS), dp = a->dim_pad, end = t0 + rows;
  tile_pack(x->q, dp, pad_rows, a->q + t0 * a->qkv_stride, a->qkv_stride, rows, a->dim, a->s.scale);
  memset(x->out, 0, sizeof(float) * (size_t)(pad_rows * dp));
  for (int64_t i = 0; i < rows; i++) {
    x->max[i] = -INFINITY;
    x->sum[i] = 0;
  }
  int64_t first = base + (first_key(a->s, t0) - base) / TILE_K * TILE_K;
  for (int64_t key = first; key < end; key += TILE_K) {
    int64_t n = round_up(min_i64(TILE_K, end - key), VEC);
    const float *kt = x->kt + (key - base) * a->dim, *v = x->v + (key - base) * dp;
    tile_gemm(pad_rows, n, a->dim, (TileA){x->q, dp, 1}, kt, TILE_K, x->score, TILE_K, false);
    for (int64_t i = 0; i < rows; i++) softmax_row(x, a, i, t0 + i, key, n);
    tile_gemm(pad_rows, dp, min_i64(n, end - key), (TileA){x->score, TILE_K, 1}, v, dp, x->out, dp,
              true);
  }
  for (int64_t i = 0; i < rows; i++) {
    float inverse = 1.0f / x->sum[i], *out = a->out + (t0 + i) * a->out_stride;
    for (int64_t j = 0; j < a->dim; j++) out[j] = x->out[i * dp + j] * inverse;
    if (a->lse) a->lse[(t0 + i) * a->lse_stride] = x->max[i] + logf(x->sum[i]);
  }
}

/* Queries [t0, t1) of all heads of a group. */
static void attend_chunk(Scratch *x, const AttnHead *heads, int64_t n_heads, int64_t t0,
                         int64_t t1) {
  const AttnHead *a = heads;
  int64_t base = first_key(a->s, t0) / TILE_K * TILE_K;
  for (int64_t key = base; key < t1; key += TILE_K) {
    int64_t rows = min_i64(TILE_K, t1 - key);
    tile_pack_transposed(x->kt + (key - base) * a->dim, round_up(rows, VEC),
                         a->k + key * a->qkv_stride, a->qkv_stride, rows, a->dim);
    tile_pack(x->v + (key - base) * a->dim_pad, a->dim_pad, rows, a->v + key * a->qkv_stride,
              a->qkv_stride, rows, a->dim, 1);
  }
  for (int64_t h = 0; h < n_heads; h++)
    for (int64_t t = t0; t < t1; t += TILE_Q)
      attend_tile(x, heads + h, t, min_i64(TILE_Q, t1 - t), base);
}

static Scratch scratch_create(int64_t keys, int64_t dim) {
  int64_t dp = round_up(dim, VEC), padded = round_up(keys, TILE_K);
  int64_t sizes[] = {padded * dim, padded * dp, TILE_Q * dp, TILE_Q * TILE_K, TILE_Q * dp};
  int64_t total = 0;
  for (int i = 0; i < 5; i++) total += sizes[i];
  Scratch x = {.kt = scratch_alloc(total)};
  x.v = x.kt + sizes[0];
  x.q = x.v + sizes[1];
  x.score = x.q + sizes[2];
  x.out = x.score + sizes[3];
  return x;
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
    free(x.kt);
  }
  free(tasks);
}
