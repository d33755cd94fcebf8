/* Decode attention of heads that are a half or a quarter of a vector wide. Scores of VEC tokens are
 * a vector, as for wider heads; a vector of v holds the v of several tokens, so a weight is spread
 * over as many lanes as a head has. Queries stay in registers over all pages, weights on their way
 * from the softmax to the sum; two heads that read the same keys go side by side, since each waits
 * for itself most of the time. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/kv_cache.h"
#include "kernels/cpu/tile.h"

#define INLINE static inline __attribute__((always_inline))
enum { HALF = VEC / 2, QUARTER = VEC / 4 };
typedef int32_t Lanes __attribute__((vector_size(VEC * 4)));

INLINE Vec spread(float x) { return x - (Vec){0}; }
INLINE Vec select_lanes(Lanes mask, Vec yes, Vec no) {
  return (Vec)(((Lanes)yes & mask) | ((Lanes)no & ~mask));
}
INLINE Lanes lane_numbers(void) {
  Lanes l;
  for (int i = 0; i < VEC; i++) l[i] = i;
  return l;
}
/* Lane i gets lane i + by, around. */
INLINE Vec turn(Vec x, int by) { return __builtin_shuffle(x, (lane_numbers() + by) & (VEC - 1)); }

/* exp_f32 in every lane, for x of at most 0; from -87 on e^-87, which is nothing beside 1: numbers
 * below the smallest normal one would take a processor a hundred times as long. */
INLINE Vec vec_exp(Vec x) {
  const Vec magic = spread(12582912.0f);
  x = vec_larger(spread(-87.0f), x);
  Vec t = x * 1.44269504f + magic, n = t - magic;
  Vec r = x - n * 0.693145752f;
  r = r - n * 1.42860677e-06f;
  Vec p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Lanes i = (Lanes)t - (Lanes)magic, half = i >> 1;
  return p * (Vec)((half + 127) << 23) * (Vec)((i - half + 127) << 23);
}

/* What `heads` query heads of one kv head need. */
typedef struct Narrow {
  const DecodeArgs *a;
  int64_t b, kv_head, first, len;
  const float *q; /* of the first of them */
  float *score;   /* [heads, stride] */
  int64_t stride;
  float *out;
} Narrow;

/* Scores of all pages by whole vectors; those of no token are -infinity. Returns the largest in all
 * lanes. */
INLINE void narrow_scores(const Narrow *w, int64_t D, int heads, Vec *largest) {
  int64_t at = w->first / VEC * VEC, size = w->a->page_size;
  Vec query[2][HALF];
  for (int h = 0; h < heads; h++) {
    largest[h] = spread(-INFINITY);
    for (int64_t i = 0; i < D; i++) query[h][i] = spread(w->a->s.scale * w->q[h * D + i]);
  }
  for (int64_t page = at / size, place = at % size; at < w->len; page++, place = 0) {
    const float *k = block_at(w->a, w->a->k_pages, w->b, page, w->kv_head);
    for (; place < size && at < w->len; place += VEC, at += VEC) {
      Vec sum[2][2] = {{{0}}};
      for (int64_t i = 0; i < D; i++) {
        Vec key = vec_keep(vec_load(k + i * size + place));
        for (int h = 0; h < heads; h++) sum[h][i % 2] += query[h][i] * key;
      }
      Lanes token = lane_numbers() + (int32_t)at;
      bool whole = at >= w->first && at + VEC <= w->len;
      for (int h = 0; h < heads; h++) {
        Vec s = sum[h][0] + sum[h][1];
        if (!whole) {
          Lanes there = (token >= (int32_t)w->first) & (token < (int32_t)w->len);
          s = select_lanes(there, s, spread(-INFINITY));
        }
        largest[h] = vec_larger(s, largest[h]);
        vec_store(w->score + h * w->stride + at, s);
      }
    }
  }
  for (int by = VEC / 2; by > 0; by /= 2)
    for (int h = 0; h < heads; h++) largest[h] = vec_larger(turn(largest[h], by), largest[h]);
}

/* out = sum of exp(score - largest) v over the sum of those. What lies behind the last token may be
 * no number, and is not read as one. */
INLINE void narrow_sum(const Narrow *w, int64_t D, int heads, const Vec *largest) {
  const int32_t together = (int32_t)(VEC / D);
  const Lanes token = lane_numbers() / (int32_t)D;
  int64_t at = w->first / VEC * VEC, size = w->a->page_size;
  Vec total[2] = {{0}}, sum[2][2] = {{{0}}};
  for (int64_t page = at / size, place = at % size; at < w->len; page++, place = 0) {
    const float *v = block_at(w->a, w->a->v_pages, w->b, page, w->kv_head);
    for (; place < size && at < w->len; place += VEC, at += VEC) {
      Vec weight[2];
      for (int h = 0; h < heads; h++) {
        weight[h] = vec_exp(vec_load(w->score + h * w->stride + at) - largest[h]);
        total[h] += weight[h];
      }
      int32_t left = (int32_t)(w->len - at);
      for (int32_t t = 0; t < D; t++) {
        Lanes here = token + t * together;
        Vec value = vec_keep(vec_load(v + place * D + t * VEC));
        if (left < VEC) value = select_lanes(here < left, value, (Vec){0});
        for (int h = 0; h < heads; h++) sum[h][t % 2] += __builtin_shuffle(weight[h], here) * value;
      }
    }
  }
  for (int h = 0; h < heads; h++) {
    Vec all = sum[h][0] + sum[h][1], count = total[h];
    for (int by = VEC / 2; by >= D; by /= 2) all += turn(all, by);
    for (int by = VEC / 2; by > 0; by /= 2) count += turn(count, by);
    all /= count;
    memcpy(w->out + h * D, &all, sizeof(float) * (size_t)D);
  }
}

INLINE void narrow_heads(const Narrow *w, int64_t D, int heads) {
  Vec largest[2];
  narrow_scores(w, D, heads, largest);
  narrow_sum(w, D, heads, largest);
}

bool kv_is_narrow(const DecodeArgs *a) {
  int64_t D = a->s.head_dim;
  return (D == HALF || D == QUARTER) && a->page_size % VEC == 0;
}

void kv_decode_narrow(const DecodeArgs *a, int64_t b, int64_t kv_head, int64_t n, float *score,
                      int64_t stride) {
  int64_t group = a->s.n_heads / a->s.n_kv_heads, D = a->s.head_dim, len = a->len[b];
  int64_t first = a->s.window > 0 ? max_i64(0, len - a->s.window) : 0;
  for (int64_t h = kv_head * group, heads; h < (kv_head + n) * group; h += heads) {
    heads = min_i64(2, (h / group + 1) * group - h);
    Narrow w = {.a = a,
                .b = b,
                .kv_head = h / group,
                .first = first,
                .len = len,
                .q = a->q + b * a->q_stride + h * D,
                .score = score,
                .stride = stride,
                .out = a->out + (b * a->s.n_heads + h) * D};
    if (len == 0)
      memset(w.out, 0, sizeof(float) * (size_t)(heads * D));
    else if (D == HALF)
      heads == 2 ? narrow_heads(&w, HALF, 2) : narrow_heads(&w, HALF, 1);
    else
      heads == 2 ? narrow_heads(&w, QUARTER, 2) : narrow_heads(&w, QUARTER, 1);
  }
}
