/* The paged KV cache: writing rows into pages, and one query per sequence against its pages. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
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
  int64_t slots = k_pages.dim[0] * k_pages.dim[1];
  require(v_pages.dim[0] * v_pages.dim[1] == slots);
  const int32_t *slot = tensor_i32(slot_N);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (n * width >= PARALLEL_MIN)
  for (int64_t i = 0; i < n; i++) {
    if (slot[i] < 0 || slot[i] >= slots)
      die("KV slot %d is outside [0, %lld)", slot[i], (long long)slots);
    const float *k = tensor_f32(qkv_NQ) + i * q + (int64_t)s.n_heads * s.head_dim;
    memcpy(tensor_f32(k_pages) + slot[i] * width, k, sizeof(float) * (size_t)width);
    memcpy(tensor_f32(v_pages) + slot[i] * width, k + width, sizeof(float) * (size_t)width);
  }
}

/* score[j] = scale q.k_j for n keys that lie stride floats apart. */
static void score_keys(int64_t D, float scale, const float *q, int64_t n, const float *k,
                       int64_t stride, float *score) {
  for (int64_t j = 0; j < n; j++) {
    const float *kj = k + j * stride;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < D; i++) sum += q[i] * kj[i];
    score[j] = sum * scale;
  }
}

/* score becomes exp(score - max); returns their sum. */
static float softmax_scores(int64_t n, float *score) {
  float max = -INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < n; j++) max = score[j] > max ? score[j] : max;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; j++) {
    score[j] = exp_f32(score[j] - max);
    sum += score[j];
  }
  return sum;
}

/* out += sum of score[j] v_j. */
static void add_values(int64_t D, int64_t n, const float *score, const float *v, int64_t stride,
                       float *out) {
  for (int64_t j = 0; j < n; j++) {
    const float *vj = v + j * stride;
#pragma omp simd
    for (int64_t i = 0; i < D; i++) out[i] += score[j] * vj[i];
  }
}

typedef struct DecodeArgs {
  AttnShape s;
  int64_t page_size, n_pages, table_width;
  const float *q, *k_pages, *v_pages;
  const int32_t *table, *len;
  int64_t q_stride;
  float *out;
} DecodeArgs;

static const float *page_at(const DecodeArgs *a, const float *pages, int64_t b, int64_t page,
                            int64_t kv_head) {
  int32_t id = a->table[b * a->table_width + page];
  if (id < 0 || id >= a->n_pages) die("KV page %d is outside [0, %lld)", id, (long long)a->n_pages);
  return pages + ((int64_t)id * a->page_size * a->s.n_kv_heads + kv_head) * a->s.head_dim;
}

/* Query head h of sequence b. score is scratch of len[b]. */
static void decode_head(const DecodeArgs *a, int64_t b, int64_t h, float *score) {
  int64_t D = a->s.head_dim, kh = h / (a->s.n_heads / a->s.n_kv_heads), len = a->len[b];
  int64_t first = a->s.window > 0 ? max_i64(0, len - a->s.window) : 0;
  int64_t stride = a->s.n_kv_heads * D, size = a->page_size;
  const float *q = a->q + b * a->q_stride + h * D;
  float *out = a->out + (b * a->s.n_heads + h) * D;
  for (int64_t j = first; j < len;) {
    int64_t page = j / size, end = min_i64(len, (page + 1) * size);
    const float *k = page_at(a, a->k_pages, b, page, kh) + (j - page * size) * stride;
    score_keys(D, a->s.scale, q, end - j, k, stride, score + j);
    j = end;
  }
  float sum = softmax_scores(len - first, score + first);
  for (int64_t i = 0; i < D; i++) out[i] = 0;
  for (int64_t j = first; j < len;) {
    int64_t page = j / size, end = min_i64(len, (page + 1) * size);
    const float *v = page_at(a, a->v_pages, b, page, kh) + (j - page * size) * stride;
    add_values(D, end - j, score + j, v, stride, out);
    j = end;
  }
  for (int64_t i = 0; i < D; i++) out[i] /= sum;
}

void cpu_attention_decode(Device *d, Tensor qkv_BQ, Tensor page_table_BP, Tensor len_B, AttnShape s,
                          Tensor k_pages, Tensor v_pages, Tensor out_BHD) {
  int64_t batch = qkv_BQ.dim[0], H = s.n_heads, longest = 0;
  require(is_f32(qkv_BQ, 2) && qkv_BQ.dim[1] == (H + 2 * s.n_kv_heads) * s.head_dim);
  require(page_table_BP.dtype == DT_I32 && page_table_BP.ndim == 2 &&
          page_table_BP.dim[0] == batch && is_i32_1d(len_B, batch));
  require(is_f32_2d(out_BHD, batch, H * s.head_dim));
  check_pages(s, k_pages);
  check_pages(s, v_pages);
  DecodeArgs a = {.s = s,
                  .page_size = k_pages.dim[1],
                  .n_pages = min_i64(k_pages.dim[0], v_pages.dim[0]),
                  .table_width = page_table_BP.dim[1],
                  .q = tensor_f32(qkv_BQ),
                  .k_pages = tensor_f32(k_pages),
                  .v_pages = tensor_f32(v_pages),
                  .table = tensor_i32(page_table_BP),
                  .len = tensor_i32(len_B),
                  .q_stride = qkv_BQ.dim[1],
                  .out = tensor_f32(out_BHD)};
  for (int64_t b = 0; b < batch; b++) {
    if (a.len[b] < 1 || a.len[b] > a.table_width * a.page_size)
      die("sequence %lld has %d cached tokens, the page table holds 1 to %lld", (long long)b,
          a.len[b], (long long)(a.table_width * a.page_size));
    longest = max_i64(longest, a.len[b]);
  }
#pragma omp parallel num_threads(d->threads) if (batch * H * longest * s.head_dim >= PARALLEL_MIN)
  {
    float *score = mem_alloc((size_t)longest + 1, sizeof(float));
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; b++)
      for (int64_t h = 0; h < H; h++) decode_head(&a, b, h, score);
    free(score);
  }
}
