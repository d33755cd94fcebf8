/* The paged KV cache: writing rows into pages, and one query per sequence against its pages.
 *
 * Inside a page each kv head has its own block: of k [D, page_size], so that scores of consecutive
 * tokens lie in the lanes of a vector and nothing is summed across lanes, and of v [page_size, D].
 * A page that holds whole vectors of tokens is read by vectors, any other by plain loops. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/kv_cache.h"
#include "kernels/cpu/tile.h"
#include "kernels/cpu/vecmath.h"

static void check_pages(AttnShape s, Tensor pages) {
  require(pages.dtype == DT_F32 && pages.ndim == 4);
  require(pages.dim[2] == s.n_kv_heads && pages.dim[3] == s.head_dim);
}

void cpu_kv_write(Device *d, Tensor qkv_NQ, Tensor slot_N, AttnShape s, Tensor k_pages,
                  Tensor v_pages) {
  int64_t n = qkv_NQ.dim[0], q = qkv_NQ.dim[1], width = (int64_t)s.n_kv_heads * s.head_dim;
  require(is_f32(qkv_NQ, 2) && q == (int64_t)s.n_heads * s.head_dim + 2 * width);
  require(is_i32_1d(slot_N, n));
  check_pages(s, k_pages);
  check_pages(s, v_pages);
  require(v_pages.dim[0] == k_pages.dim[0] && v_pages.dim[1] == k_pages.dim[1]);
  int64_t slots = k_pages.dim[0] * k_pages.dim[1];
  const int32_t *slot = tensor_i32(slot_N);
  int64_t size = k_pages.dim[1], D = s.head_dim;
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * width >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    if (slot[i] == -1) continue;
    if (slot[i] < 0 || slot[i] >= slots)
      die("KV slot %d is outside [0, %lld)", slot[i], (long long)slots);
    const float *k = tensor_f32(qkv_NQ) + i * q + s.n_heads * D, *v = k + width;
    int64_t page = slot[i] / size * size * width, place = slot[i] % size;
    for (int64_t h = 0; h < s.n_kv_heads; h++) {
      float *k_block = tensor_f32(k_pages) + page + h * D * size;
      float *v_block = tensor_f32(v_pages) + page + h * D * size;
      for (int64_t j = 0; j < D; j++) k_block[j * size + place] = k[h * D + j];
      memcpy(v_block + place * D, v + h * D, sizeof(float) * (size_t)D);
    }
  }
}

/* score[j] = q.k_j for the tokens of a block; q is scaled. */
static void score_block(int64_t D, const float *q, int64_t size, const float *k, float *score) {
  enum { CHAINS = 4 }; /* sums that do not wait for each other */
  if (size % VEC != 0) {
    for (int64_t j = 0; j < size; j++) score[j] = 0;
    for (int64_t i = 0; i < D; i++)
#pragma omp simd
      for (int64_t j = 0; j < size; j++) score[j] += q[i] * k[i * size + j];
    return;
  }
  for (int64_t j = 0; j < size; j += VEC) {
    Vec sum[CHAINS] = {{0}};
    int64_t i = 0;
    for (; i + CHAINS <= D; i += CHAINS)
      for (int c = 0; c < CHAINS; c++) sum[c] += q[i + c] * vec_load(k + (i + c) * size + j);
    for (; i < D; i++) sum[0] += q[i] * vec_load(k + i * size + j);
    vec_store(score + j, (sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

/* Vectors [0, vecs) of out += sum of weight[j] v_j, even and odd tokens in sums of their own. */
static inline __attribute__((always_inline)) void add_vectors(int vecs, int64_t D, int64_t n,
                                                              const float *weight, const float *v,
                                                              float *out) {
  Vec even[4], odd[4];
  for (int c = 0; c < vecs; c++) {
    even[c] = vec_load(out + c * VEC);
    odd[c] = (Vec){0};
  }
  int64_t j = 0;
  for (; j + 2 <= n; j += 2)
    for (int c = 0; c < vecs; c++) {
      even[c] += weight[j] * vec_load(v + j * D + c * VEC);
      odd[c] += weight[j + 1] * vec_load(v + (j + 1) * D + c * VEC);
    }
  for (int c = 0; j < n && c < vecs; c++) even[c] += weight[j] * vec_load(v + j * D + c * VEC);
  for (int c = 0; c < vecs; c++) vec_store(out + c * VEC, even[c] + odd[c]);
}

/* out += sum of weight[j] v_j over n tokens of a block. */
static void add_block(int64_t D, int64_t n, const float *weight, const float *v, float *out) {
  int64_t i = 0;
  for (; i + 4 * VEC <= D; i += 4 * VEC) add_vectors(4, D, n, weight, v + i, out + i);
  for (; i + VEC <= D; i += VEC) add_vectors(1, D, n, weight, v + i, out + i);
  if (i == D) return;
  for (int64_t j = 0; j < n; j++)
    for (int64_t c = i; c < D; c++) out[c] += weight[j] * v[j * D + c];
}

/* score becomes exp(score - max); returns their sum. Behind the last one there is room for a vector
 * of them, so that all are whole. */
static float softmax_scores(int64_t n, float *score) {
  int64_t whole = round_up(n, VEC);
  float largest = -INFINITY;
  for (int64_t j = n; j < whole; j++) score[j] = -INFINITY; /* e^-87 of the largest */
  Vec max = vec_load(score), sum = {0};
  for (int64_t j = 0; j < whole; j += VEC) max = vec_larger(vec_load(score + j), max);
  for (int c = 0; c < VEC; c++) largest = max[c] > largest ? max[c] : largest;
  for (int64_t j = 0; j < whole; j += VEC) {
#pragma omp simd
    for (int c = 0; c < VEC; c++) {
      float x = score[j + c] - largest;
      score[j + c] = exp_f32(x < -87.0f ? -87.0f : x); /* nothing; no slow denormal number */
    }
    sum += vec_load(score + j);
  }
  return vec_sum(sum);
}

/* Query heads of n kv heads of sequence b, which lie next to each other in a page. scratch, for
 * each query head: q [D], score [stride]. */
static void decode_heads(const DecodeArgs *a, int64_t b, int64_t kv_head, int64_t n, float *scratch,
                         int64_t stride) {
  int64_t D = a->s.head_dim, size = a->page_size, group = a->s.n_heads / a->s.n_kv_heads;
  int64_t heads = n * group, block = size * D;
  float *q = scratch, *score = q + heads * D;
  int64_t len = a->len[b], first = a->s.window > 0 ? max_i64(0, len - a->s.window) : 0;
  const float *q_row = a->q + b * a->q_stride + kv_head * group * D;
  float *out = a->out + (b * a->s.n_heads + kv_head * group) * D;
  for (int64_t i = 0; i < heads * D; i++) {
    q[i] = a->s.scale * q_row[i];
    out[i] = 0;
  }
  if (len == 0) return;
  for (int64_t p = first / size; p * size < len; p++) {
    const float *k = block_at(a, a->k_pages, b, p, kv_head);
    for (int64_t h = 0; h < heads; h++)
      score_block(D, q + h * D, size, k + h / group * block, score + h * stride + p * size);
  }
  for (int64_t h = 0; h < heads; h++) /* q is read no more */
    q[h] = 1.0f / softmax_scores(len - first, score + h * stride + first);
  for (int64_t p = first / size; p * size < len; p++) {
    int64_t from = max_i64(first, p * size), tokens = min_i64(len, (p + 1) * size) - from;
    const float *v = block_at(a, a->v_pages, b, p, kv_head) + (from - p * size) * D;
    for (int64_t h = 0; h < heads; h++) {
      const float *weight = score + h * stride + from;
      add_block(D, tokens, weight, v + h / group * block, out + h * D);
    }
  }
  for (int64_t i = 0; i < heads * D; i++) out[i] *= q[i / D];
}

/* KV heads that are read together: as many as have their scores in a first-level cache, since what
 * lies together comes faster; fewer where threads would have nothing to do. */
static int64_t heads_together(AttnShape s, int64_t batch, int64_t stride, int threads) {
  enum { SCORES = 4096, TASKS = 4 /* for each thread */ };
  int64_t n = min_i64(s.n_kv_heads, SCORES / (stride * (s.n_heads / s.n_kv_heads)));
  while (n > 1 && threads > 1 && batch * ((s.n_kv_heads + n - 1) / n) < TASKS * threads) n /= 2;
  return max_i64(n, 1);
}

void cpu_attention_decode(Device *d, Tensor qkv_BQ, Tensor page_table_BP, Tensor len_B, AttnShape s,
                          Tensor k_pages, Tensor v_pages, Tensor out_BHD) {
  int64_t batch = qkv_BQ.dim[0], H = s.n_heads, longest = 0, group = H / s.n_kv_heads;
  require(is_f32(qkv_BQ, 2) && qkv_BQ.dim[1] == (H + 2 * s.n_kv_heads) * s.head_dim);
  require(page_table_BP.dtype == DT_I32 && page_table_BP.ndim == 2 &&
          page_table_BP.dim[0] == batch && is_i32_1d(len_B, batch));
  require(is_f32_2d(out_BHD, batch, H * s.head_dim));
  check_pages(s, k_pages);
  check_pages(s, v_pages);
  require(v_pages.dim[0] == k_pages.dim[0] && v_pages.dim[1] == k_pages.dim[1]);
  DecodeArgs a = {.s = s,
                  .page_size = k_pages.dim[1],
                  .n_pages = k_pages.dim[0],
                  .table_width = page_table_BP.dim[1],
                  .q = tensor_f32(qkv_BQ),
                  .k_pages = tensor_f32(k_pages),
                  .v_pages = tensor_f32(v_pages),
                  .table = tensor_i32(page_table_BP),
                  .len = tensor_i32(len_B),
                  .q_stride = qkv_BQ.dim[1],
                  .out = tensor_f32(out_BHD)};
  for (int64_t b = 0; b < batch; b++) {
    if (a.len[b] < 0 || a.len[b] > a.table_width * a.page_size)
      die("sequence %lld has %d cached tokens, the page table holds 0 to %lld", (long long)b,
          a.len[b], (long long)(a.table_width * a.page_size));
    longest = max_i64(longest, a.len[b]);
  }
  int64_t stride = round_up(longest, a.page_size) + VEC; /* scores are made by whole pages */
  int64_t together = heads_together(s, batch, stride, d->threads);
  int64_t tasks = (s.n_kv_heads + together - 1) / together;
#pragma omp parallel num_threads(d->threads) if (batch * H * longest * s.head_dim >= PARALLEL_MIN)
  {
    float *scratch = scratch_alloc(together * group * (s.head_dim + stride) + stride);
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; b++)
      for (int64_t t = 0; t < tasks; t++) {
        int64_t head = t * together, n = min_i64(together, s.n_kv_heads - head);
        if (kv_is_narrow(&a))
          kv_decode_narrow(&a, b, head, n, scratch, stride);
        else
          decode_heads(&a, b, head, n, scratch, stride);
      }
    free(scratch);
  }
}
