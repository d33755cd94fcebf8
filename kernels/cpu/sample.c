/* Sampling one token per row. The recorded log-probability is that of the distribution the token
 * was drawn from: after temperature, banned ids, top-k and top-p. */
#include <stdlib.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vecmath.h"

typedef struct Row {
  int64_t v;
  const float *logits;
  const uint8_t *banned; /* may be NULL */
  float inv_temp;
  float max;     /* of the scaled logits that are not banned */
  float *weight; /* [v] exp(scaled logit - max); 0 where banned */
  int32_t *heap; /* [v] ids */
} Row;

static bool is_banned(const Row *r, int64_t id) { return r->banned && r->banned[id]; }

/* Highest logit that is not banned, ties and NaN to the lowest id. */
static int32_t row_argmax(const Row *r) {
  int64_t best = -1;
  for (int64_t j = 0; j < r->v; j++)
    if (!is_banned(r, j) && (best < 0 || r->logits[j] > r->logits[best])) best = j;
  if (best < 0) die("every token id is banned");
  return (int32_t)best;
}

static double log_sum_exp(const float *x, int64_t v) {
  float max = -INFINITY;
  double sum = 0;
  for (int64_t j = 0; j < v; j++) max = x[j] > max ? x[j] : max;
  for (int64_t j = 0; j < v; j++) sum += (double)exp_f32(x[j] - max);
  return (double)max + log(sum);
}

static double fill_weights(Row *r) {
  r->max = r->logits[row_argmax(r)] * r->inv_temp;
  double sum = 0;
  for (int64_t j = 0; j < r->v; j++) {
    float w = exp_f32(r->logits[j] * r->inv_temp - r->max);
    r->weight[j] = is_banned(r, j) ? 0 : w;
    sum += (double)r->weight[j];
  }
  return sum;
}

/* ---- a max-heap of ids by weight, ties to the lower id ---- */

static bool heap_before(const Row *r, int32_t a, int32_t b) {
  return r->weight[a] > r->weight[b] || (!(r->weight[a] < r->weight[b]) && a < b);
}

static void heap_sift(const Row *r, int64_t n, int64_t i) {
  int32_t *h = r->heap, id = h[i];
  for (int64_t child; (child = 2 * i + 1) < n; i = child) {
    if (child + 1 < n && heap_before(r, h[child + 1], h[child])) child++;
    if (!heap_before(r, h[child], id)) break;
    h[i] = h[child];
  }
  h[i] = id;
}

/* Moves the ids that the filters keep, heaviest first, to the end of the heap array: the i-th lies
 * at heap[n - 1 - i]. Returns how many; *sum becomes their weight. */
static int64_t keep_filtered(Row *r, SampleParams p, double *sum, int64_t *n_out) {
  int64_t n = 0, kept = 0;
  for (int64_t j = 0; j < r->v; j++)
    if (r->weight[j] > 0) r->heap[n++] = (int32_t)j;
  for (int64_t i = n / 2 - 1; i >= 0; i--) heap_sift(r, n, i);
  int64_t most = p.top_k > 0 ? min_i64(p.top_k, n) : n;
  double mass = 0, all = *sum;
  bool by_mass_alone = p.top_k <= 0;
  while (kept < most && !(by_mass_alone && kept > 0 && mass >= (double)p.top_p * all)) {
    int32_t top = r->heap[0];
    int64_t left = n - kept - 1;
    r->heap[0] = r->heap[left];
    heap_sift(r, left, 0);
    r->heap[left] = top;
    mass += (double)r->weight[top];
    kept++;
  }
  if (!by_mass_alone && p.top_p < 1) { /* top_p of what top_k left */
    double all_k = mass;
    int64_t k = kept;
    for (mass = 0, kept = 0; kept < k && (kept == 0 || mass < (double)p.top_p * all_k); kept++)
      mass += (double)r->weight[r->heap[n - 1 - kept]];
  }
  *sum = mass;
  *n_out = n;
  return kept;
}

static int32_t draw_filtered(Row *r, SampleParams p, double u, double *sum) {
  int64_t n, kept = keep_filtered(r, p, sum, &n);
  double point = u * *sum, run = 0;
  for (int64_t i = 0; i < kept; i++) {
    run += (double)r->weight[r->heap[n - 1 - i]];
    if (run > point) return r->heap[n - 1 - i];
  }
  return kept > 0 ? r->heap[n - kept] : row_argmax(r);
}

static int32_t draw_whole(const Row *r, double u, double sum) {
  double point = u * sum, run = 0;
  int64_t last = -1;
  for (int64_t j = 0; j < r->v; j++) {
    if (!(r->weight[j] > 0)) continue;
    run += (double)r->weight[j];
    last = j;
    if (run > point) break;
  }
  return last >= 0 ? (int32_t)last : row_argmax(r);
}

static void sample_row(Row *r, SampleParams p, double u, int32_t *token, float *logprob) {
  if (p.greedy) {
    *token = row_argmax(r);
    *logprob = (float)((double)r->logits[*token] - log_sum_exp(r->logits, r->v));
    return;
  }
  double sum = fill_weights(r);
  bool filtered = (p.top_k > 0 && p.top_k < r->v) || p.top_p < 1;
  *token = filtered ? draw_filtered(r, p, u, &sum) : draw_whole(r, u, sum);
  float z = r->logits[*token] * r->inv_temp - r->max;
  *logprob = (float)((double)z - log(sum));
}

void cpu_sample(Device *d, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                Tensor token_B, Tensor logprob_B) {
  int64_t batch = logits_BV.dim[0], v = logits_BV.dim[1];
  require(is_f32(logits_BV, 2) && is_i32_1d(token_B, batch) && is_f32_1d(logprob_B, batch));
  require(p.greedy || (is_f32_1d(u_B, batch) && p.temperature > 0 && p.top_p > 0));
  require(!banned_V.data || (banned_V.dtype == DT_U8 && tensor_numel(banned_V) == v));
  require(v > 0);
#pragma omp parallel num_threads(d->threads) if (batch * v >= PARALLEL_MIN)
  {
    Row r = {.v = v, .banned = banned_V.data, .inv_temp = p.greedy ? 1 : 1 / p.temperature};
    r.weight = mem_alloc((size_t)v, sizeof *r.weight);
    r.heap = mem_alloc((size_t)v, sizeof *r.heap);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < batch; b++) {
      r.logits = tensor_f32(logits_BV) + b * v;
      double u = p.greedy ? 0 : (double)tensor_f32(u_B)[b];
      sample_row(&r, p, u, tensor_i32(token_B) + b, tensor_f32(logprob_B) + b);
    }
    free(r.weight);
    free(r.heap);
  }
}
