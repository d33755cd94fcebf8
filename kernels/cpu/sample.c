/* Sampling one token per row. The recorded log-probability is that of the distribution the token
 * was drawn from: after repetition penalty, banned ids, temperature, top-k, top-p and min-p.
 *
 * Nothing is sorted: what a filter keeps is a Cut, found by bisecting the weights' bit patterns
 * (which order positive floats), a few passes over the row whatever the distribution looks like. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/vecmath.h"

typedef struct Row {
  int64_t v;
  const float *logits;
  const uint8_t *banned; /* may be NULL */
  float inv_temp;
  float max;      /* of the scaled logits that are not banned */
  float heaviest; /* weight: of the id with that logit, 1 but for rounding */
  float *weight;  /* [v] exp(scaled logit - max); 0 where banned */
} Row;

/* Keeps every id whose weight is above the threshold, and the first `ties` of those that equal it.
 */
typedef struct Cut {
  float threshold;
  int64_t ties;
} Cut;

/* Highest logit that is not banned; ties, and rows of nothing but NaN, to the lowest id. */
static int32_t row_argmax(const Row *r) {
  float max = -INFINITY;
  int64_t first = -1;
  for (int64_t j = 0; j < r->v; j++) {
    if (r->banned && r->banned[j]) continue;
    if (first >= 0 && !(r->logits[j] > max)) continue;
    first = j;
    max = r->logits[j] > max ? r->logits[j] : max; /* NaN, if first of all, stays at -infinity */
  }
  if (first < 0) die("every token id is banned");
  return (int32_t)first;
}

static double log_sum_exp(const float *x, int64_t v) {
  float max = -INFINITY;
  double sum = 0;
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < v; j++) max = x[j] > max ? x[j] : max;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < v; j++) sum += (double)exp_f32(x[j] - max);
  return (double)max + log(sum);
}

static void fill_weights(Row *r) {
  const float *x = r->logits;
  int32_t best = row_argmax(r);
  float max = r->logits[best] * r->inv_temp, t = r->inv_temp, *w = r->weight;
  r->max = max;
#pragma omp simd
  for (int64_t j = 0; j < r->v; j++) w[j] = exp_f32(x[j] * t - max);
  for (int64_t j = 0; r->banned && j < r->v; j++) w[j] = r->banned[j] ? 0 : w[j];
  r->heaviest = w[best];
}

/* ---- cuts ---- */

static int64_t count_from(const Row *r, float threshold) {
  const float *w = r->weight;
  int64_t n = 0;
#pragma omp simd reduction(+ : n)
  for (int64_t j = 0; j < r->v; j++) n += w[j] >= threshold;
  return n;
}

static double mass_from(const Row *r, float threshold) {
  const float *w = r->weight;
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < r->v; j++) sum += w[j] >= threshold ? (double)w[j] : 0;
  return sum;
}

static double block_sum(const Row *r, int64_t first, int64_t end) {
  const float *w = r->weight;
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = first; j < end; j++) sum += (double)w[j];
  return sum;
}

static float next_above(float x) { return float_of_bits(bits_of_float(x) + 1); }

static double mass_of(const Row *r, Cut c) {
  return mass_from(r, next_above(c.threshold)) + (double)c.ties * (double)c.threshold;
}

/* What no weight is above. A logit times 1 / temperature is rounded only where it becomes the
 * maximum (a fused multiply-add rounds once), so the heaviest weight can be above 1. */
static uint32_t bits_of_heaviest(const Row *r) {
  return bits_of_float(r->heaviest > 1 ? r->heaviest : 1); /* it may be NaN */
}

/* The k heaviest ids. */
static Cut cut_by_count(const Row *r, int64_t k) {
  uint32_t low = 0, high = bits_of_heaviest(r);
  while (low < high) { /* the largest threshold that k ids reach */
    uint32_t mid = low + (high - low + 1) / 2;
    if (count_from(r, float_of_bits(mid)) >= k)
      low = mid;
    else
      high = mid - 1;
  }
  float threshold = float_of_bits(low);
  return (Cut){threshold, k - count_from(r, next_above(threshold))};
}

/* The fewest of the heaviest ids of `from` whose share of it reaches p. */
static Cut cut_by_mass(const Row *r, Cut from, double p) {
  double wanted = p * mass_of(r, from);
  uint32_t low = bits_of_float(from.threshold), high = bits_of_heaviest(r);
  while (low < high) { /* the largest threshold whose ids weigh enough; `from` whole does */
    uint32_t mid = low + (high - low + 1) / 2;
    if (mass_from(r, float_of_bits(mid)) >= wanted)
      low = mid;
    else
      high = mid - 1;
  }
  Cut c = {.threshold = float_of_bits(low)};
  float above = next_above(c.threshold);
  bool cut_tie = low == bits_of_float(from.threshold);
  int64_t ties = cut_tie ? from.ties : count_from(r, c.threshold) - count_from(r, above);
  double missing = (wanted - mass_from(r, above)) / (double)c.threshold;
  c.ties = missing < (double)ties ? (int64_t)ceil(missing) : ties;
  if (c.ties < 0) c.ties = 0;
  return c;
}

/* ---- drawing ---- */

/* Weights become 0 where the filters cut; NaN stays. Of what top-k and top-p leave, the likeliest
 * id is always one, so min-p's bound does not depend on them. */
static void filter_weights(Row *r, SampleParams p) {
  Cut c = {.threshold = 0, .ties = 0}; /* ids of weight 0 cannot be drawn anyway */
  if (p.top_k > 0 && p.top_k < count_from(r, next_above(0))) c = cut_by_count(r, p.top_k);
  if (p.top_p < 1) c = cut_by_mass(r, c, (double)p.top_p);
  float least = p.min_p > 0 ? p.min_p * r->heaviest : 0;
  for (int64_t j = 0; j < r->v; j++) {
    bool tie = r->weight[j] == c.threshold;
    if (r->weight[j] < c.threshold || (tie && c.ties <= 0) || r->weight[j] < least)
      r->weight[j] = 0;
    c.ties -= tie;
  }
}

/* The id at which the weights, added in order of id, pass u of their sum. Blocks are added as a
 * whole and only the one that holds the point is walked through. */
static int32_t draw(const Row *r, double u, double *sum) {
  enum { BLOCK = 256 };
  *sum = 0;
  for (int64_t j = 0; j < r->v; j += BLOCK) *sum += block_sum(r, j, min_i64(j + BLOCK, r->v));
  double point = u * *sum, run = 0;
  for (int64_t j = 0; j < r->v; j += BLOCK) {
    int64_t end = min_i64(j + BLOCK, r->v), last = -1;
    double next = run + block_sum(r, j, end);
    for (int64_t i = j; next > point && i < end; i++) {
      if (!(r->weight[i] > 0)) continue;
      run += (double)r->weight[i];
      last = i; /* taken if rounding puts the point behind the block's end */
      if (run > point) break;
    }
    if (last >= 0) return (int32_t)last;
    run = next;
  }
  return row_argmax(r); /* only where weights are NaN */
}

static void write_bits(const Row *r, uint8_t *bits) {
  memset(bits, 0, (size_t)(r->v + 7) / 8);
  for (int64_t j = 0; j < r->v; j++) bits[j / 8] |= (uint8_t)((r->weight[j] > 0) << j % 8);
}

/* bits may be NULL. */
static void sample_row(Row *r, SampleParams p, double u, uint8_t *bits, int32_t *token,
                       float *logprob) {
  if (p.greedy) {
    *token = row_argmax(r);
    *logprob = (float)((double)r->logits[*token] - log_sum_exp(r->logits, r->v));
    return;
  }
  double sum;
  fill_weights(r);
  if (p.top_k > 0 || p.top_p < 1 || p.min_p > 0) filter_weights(r, p);
  if (bits) write_bits(r, bits);
  *token = draw(r, u, &sum);
  float z = r->logits[*token] * r->inv_temp - r->max;
  *logprob = (float)((double)z - log(sum));
}

/* ---- repetition penalty ---- */

/* The logits of row b with the penalty, in x; then the newest token is one of the seen. */
static void penalize_row(const float *logits, int64_t v, SeenTokens seen, int64_t b, float penalty,
                         float *x) {
  int32_t slot = tensor_i32(seen.slot_B)[b], newest = tensor_i32(seen.newest_B)[b];
  memcpy(x, logits, (size_t)v * sizeof *x);
  if (slot < 0) return;
  if (slot >= seen.bits_SW.dim[0] || newest < 0 || newest >= v)
    die("row %lld: slot %d of %lld, newest token %d of %lld", (long long)b, slot,
        (long long)seen.bits_SW.dim[0], newest, (long long)v);
  uint8_t *bits = (uint8_t *)seen.bits_SW.data + slot * seen.bits_SW.dim[1];
  bits[newest / 8] |= (uint8_t)(1 << newest % 8);
  for (int64_t j = 0; j < v; j++)
    if (bits[j / 8] >> j % 8 & 1) x[j] = x[j] < 0 ? x[j] * penalty : x[j] / penalty;
}

static bool seen_fits(SeenTokens s, int64_t batch, int64_t v) {
  return s.bits_SW.dtype == DT_U8 && s.bits_SW.ndim == 2 && s.bits_SW.dim[1] == (v + 7) / 8 &&
         is_i32_1d(s.slot_B, batch) && is_i32_1d(s.newest_B, batch);
}

/* ---- which ids were kept ---- */

/* The bits of row 0; NULL: nobody asks. */
static uint8_t *kept_bits(KeptTokens k, int64_t batch, int64_t v) {
  Tensor t = k.bits_TBW;
  if (!t.data) return NULL;
  require(t.dtype == DT_U8 && t.ndim == 3 && t.dim[1] == batch && t.dim[2] == (v + 7) / 8);
  int32_t step = k.step_1.data ? *tensor_i32(k.step_1) : 0;
  if (step < 0 || step >= t.dim[0]) die("step %d of %lld", step, (long long)t.dim[0]);
  return (uint8_t *)t.data + step * t.dim[1] * t.dim[2];
}

void cpu_keep_only(Device *d, Tensor bits_RW, Tensor logits_RV) {
  int64_t r = logits_RV.dim[0], v = logits_RV.dim[1], w = (v + 7) / 8;
  require(is_f32(logits_RV, 2) && bits_RW.dtype == DT_U8 && bits_RW.ndim == 2);
  require(bits_RW.dim[0] == r && bits_RW.dim[1] == w);
#pragma omp parallel for num_threads(d->threads) schedule(static) if (r * v >= PARALLEL_MIN)
  for (int64_t i = 0; i < r; i++) {
    const uint8_t *bits = (const uint8_t *)bits_RW.data + i * w;
    float *x = tensor_f32(logits_RV) + i * v;
    for (int64_t j = 0; j < v; j++)
      if (!(bits[j / 8] >> j % 8 & 1)) x[j] = -INFINITY;
  }
}

void cpu_sample(Device *d, Tensor logits_BV, SampleParams p, Tensor u_B, Tensor banned_V,
                SeenTokens seen, KeptTokens kept, Tensor token_B, Tensor logprob_B) {
  int64_t batch = logits_BV.dim[0], v = logits_BV.dim[1];
  require(is_f32(logits_BV, 2) && is_i32_1d(token_B, batch) && is_f32_1d(logprob_B, batch));
  require(p.greedy || (is_f32_1d(u_B, batch) && p.temperature > 0 && p.top_p > 0));
  require(p.min_p >= 0 && p.min_p <= 1 && p.repetition_penalty >= 0);
  require(!banned_V.data || (banned_V.dtype == DT_U8 && tensor_numel(banned_V) == v));
  uint8_t *bits = kept_bits(kept, batch, v);
  require(!(bits && p.greedy));
  require(v > 0 && (!sample_penalizes(p) || seen_fits(seen, batch, v)));
#pragma omp parallel num_threads(d->threads) if (batch * v >= PARALLEL_MIN)
  {
    Row r = {.v = v, .banned = banned_V.data, .inv_temp = p.greedy ? 1 : 1 / p.temperature};
    r.weight = scratch_alloc(v);
    float *penalized = sample_penalizes(p) ? scratch_alloc(v) : NULL;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < batch; b++) {
      r.logits = tensor_f32(logits_BV) + b * v;
      if (penalized) {
        penalize_row(r.logits, v, seen, b, p.repetition_penalty, penalized);
        r.logits = penalized;
      }
      double u = p.greedy ? 0 : (double)tensor_f32(u_B)[b];
      sample_row(&r, p, u, bits ? bits + b * ((v + 7) / 8) : NULL, tensor_i32(token_B) + b,
                 tensor_f32(logprob_B) + b);
    }
    free(r.weight);
    free(penalized);
  }
}
