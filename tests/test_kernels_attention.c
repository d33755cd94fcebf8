/* Attention over packed sequences: forward against a plain softmax in double precision, gradient
 * against finite differences of it, decoding from the paged cache against the same rows. */
#include "tests/attention_cases.h"
#include "tests/kernels_test.h"

static const Case cases[] = {
    {1, {1}, {1, 1, 8, 1, 0}},
    {1, {3}, {2, 1, 16, 0.25F, 0}},
    {2, {17, 5}, {4, 2, 8, 0.35F, 0}},
    {1, {33}, {1, 1, 128, 0.0884F, 0}},
    {2, {65, 1}, {2, 2, 64, 0.125F, 0}},
    {1, {129}, {3, 1, 32, 0.177F, 0}},
    {3, {64, 128, 63}, {2, 1, 16, 0.25F, 0}},
    {1, {200}, {5, 5, 24, 0.2F, 0}},
    {24, MANY_SHORT, {4, 1, 20, 0.22F, 0}},
    {0, {0}, {2, 2, 8, 1, 0}},
    {2, {0, 0}, {2, 2, 8, 1, 0}},
    {2, {50, 7}, {2, 1, 8, 0.35F, 1}},
    {1, {150}, {2, 1, 16, 0.25F, 40}},
    {1, {300}, {2, 2, 12, 0.3F, 100}},
    {2, {129, 70}, {6, 2, 80, 0.11F, 64}},
    {1, {70}, {8, 1, 48, 0.144F, 1000}},
    {1, {9}, {1, 1, 3, 0.5F, 0}},
    {3, {70, 16, 17}, {6, 2, 8, 0.35F, 0}}, /* narrow heads by twos and one */
    {2, {90, 33}, {5, 1, 4, 0.5F, 0}},
    {2, {100, 49}, {3, 3, 8, 0.4F, 37}},
    {1, {120}, {2, 1, 8, 6.0F, 0}},
    {1, {260}, {1, 1, 64, 3.0F, 0}}, /* sharp softmax: scores of several tens */
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

typedef struct Packed {
  const Case *c;
  int64_t n, q, hd;
  int32_t *offsets;
  float *qkv, *dout;
} Packed;

static Packed pack(const Case *c) {
  Packed p = {.c = c};
  p.offsets = mem_zalloc((size_t)c->n_seqs + 1, sizeof(int32_t));
  for (int b = 0; b < c->n_seqs; b++) p.offsets[b + 1] = p.offsets[b] + c->len[b];
  p.n = p.offsets[c->n_seqs];
  p.hd = (int64_t)c->s.n_heads * c->s.head_dim;
  p.q = p.hd + 2L * c->s.n_kv_heads * c->s.head_dim;
  p.qkv = random_floats(1, p.n * p.q, 1);
  p.dout = random_floats(2, p.n * p.hd, 1);
  return p;
}

static void unpack(Packed *p) {
  free(p->offsets);
  free(p->qkv);
  free(p->dout);
}

static Segments segments(const Packed *p) {
  return (Segments){.n_seqs = p->c->n_seqs, .offsets = p->offsets};
}

/* One head of one sequence's token t: out[D]; returns log sum exp. qkv is the sequence's rows. */
static double attend(const AttnShape *s, const double *qkv, int64_t q, int64_t t, int h,
                     double *out) {
  int64_t D = s->head_dim, kv = s->n_heads + h / (s->n_heads / s->n_kv_heads);
  int64_t first = s->window > 0 && t + 1 > s->window ? t + 1 - s->window : 0;
  double *p = zeros(t + 1), max = -INFINITY, sum = 0;
  for (int64_t j = first; j <= t; j++) {
    p[j] = (double)s->scale * weighted_sum(qkv + t * q + h * D, qkv + j * q + kv * D, D);
    max = fmax(max, p[j]);
  }
  for (int64_t i = 0; i < D; i++) out[i] = 0;
  for (int64_t j = first; j <= t; j++) {
    double e = exp(p[j] - max);
    sum += e;
    for (int64_t i = 0; i < D; i++) out[i] += e * qkv[j * q + (kv + s->n_kv_heads) * D + i];
  }
  for (int64_t i = 0; i < D; i++) out[i] /= sum;
  free(p);
  return max + log(sum);
}

static void reference(const Packed *p, const double *qkv, double *out, double *lse) {
  for (int b = 0; b < p->c->n_seqs; b++)
    for (int64_t i = p->offsets[b]; i < p->offsets[b + 1]; i++)
      for (int h = 0; h < p->c->s.n_heads; h++)
        lse[i * p->c->s.n_heads + h] =
            attend(&p->c->s, qkv + p->offsets[b] * p->q, p->q, i - p->offsets[b], h,
                   out + i * p->hd + (int64_t)h * p->c->s.head_dim);
}

static void forward(Device *d, const Packed *p, float *out, float *lse) {
  Tensor lse_NH = lse ? f32_2d(lse, p->n, p->c->s.n_heads) : absent();
  device_ops(d)->attention_fwd(d, f32_2d(p->qkv, p->n, p->q), segments(p), p->c->s,
                               f32_2d(out, p->n, p->hd), lse_NH);
}

static void backward_of(Device *d, const Packed *p, float *out, float *lse, Rotation rotation,
                        float *dqkv) {
  device_ops(d)->attention_bwd(d, f32_2d(p->dout, p->n, p->hd), f32_2d(p->qkv, p->n, p->q),
                               f32_2d(out, p->n, p->hd), f32_2d(lse, p->n, p->c->s.n_heads),
                               segments(p), p->c->s, rotation, f32_2d(dqkv, p->n, p->q));
}
static void backward(Device *d, const Packed *p, float *out, float *lse, float *dqkv) {
  backward_of(d, p, out, lse, (Rotation){0}, dqkv);
}

/* A float score near s is off by about s eps, and so, relatively, is its weight; the largest
 * log-sum-exp says how large scores get. The rest is sums of up to 300 terms. */
static double tolerance_of(const double *lse, int64_t n) {
  double most = 0;
  for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(lse[i]));
  return 3e-6 + 1.2e-7 * most;
}

static void attention_forward(void **state) {
  (void)state;
  for (int i = 0; i < N_CASES; i++) {
    Packed p = pack(cases + i);
    int64_t nh = p.n * p.c->s.n_heads;
    double *qkv = widen(p.qkv, p.n * p.q), *out = zeros(p.n * p.hd), *lse = zeros(nh);
    reference(&p, qkv, out, lse);
    for (int threads = 1; threads <= 3; threads++) {
      Device *d = open_cpu(threads);
      float *got = filled_floats(p.n * p.hd, NAN), *got_lse = filled_floats(nh, NAN);
      float *no_lse = filled_floats(p.n * p.hd, NAN);
      forward(d, &p, got, got_lse);
      forward(d, &p, no_lse, NULL);
      assert_close("out", got, out, p.n * p.hd, tolerance_of(lse, nh), 1);
      assert_close("lse", got_lse, lse, nh, 2e-6, 1);
      assert_same_bits("out with and without lse", got, no_lse, p.n * p.hd);
      free(got);
      free(got_lse);
      free(no_lse);
      device_close(d);
    }
    free(qkv);
    free(out);
    free(lse);
    unpack(&p);
  }
}

/* The gradient by the formula, in double: checked by finite differences below, then used for the
 * cases that are too large for them. */
static void reference_gradient(const Packed *p, const double *qkv, const double *dout,
                               double *dqkv) {
  const AttnShape *s = &p->c->s;
  int64_t D = s->head_dim, q = p->q;
  double *o = zeros(D);
  for (int b = 0; b < p->c->n_seqs; b++) {
    const double *x = qkv + p->offsets[b] * q;
    double *dx = dqkv + p->offsets[b] * q;
    for (int64_t t = 0; t < p->c->len[b]; t++)
      for (int h = 0; h < s->n_heads; h++) {
        int64_t k = (s->n_heads + h / (s->n_heads / s->n_kv_heads)) * D, v = k + s->n_kv_heads * D;
        const double *g = dout + (p->offsets[b] + t) * p->hd + h * D;
        double lse = attend(s, x, q, t, h, o), mean = weighted_sum(g, o, D);
        for (int64_t j = s->window > 0 && t + 1 > s->window ? t + 1 - s->window : 0; j <= t; j++) {
          double w =
              exp((double)s->scale * weighted_sum(x + t * q + h * D, x + j * q + k, D) - lse);
          double ds = (double)s->scale * w * (weighted_sum(g, x + j * q + v, D) - mean);
          for (int64_t i = 0; i < D; i++) {
            dx[t * q + h * D + i] += ds * x[j * q + k + i];
            dx[j * q + k + i] += ds * x[t * q + h * D + i];
            dx[j * q + v + i] += w * g[i];
          }
        }
      }
  }
  free(o);
}

typedef struct LossArgs {
  const Packed *p;
  double *qkv, *dout, *out, *lse;
} LossArgs;

static double loss(void *ctx) {
  LossArgs *a = ctx;
  reference(a->p, a->qkv, a->out, a->lse);
  return weighted_sum(a->dout, a->out, a->p->n * a->p->hd);
}

static void gradient_reference_is_right(void **state) {
  (void)state;
  static const Case small[] = {{2, {5, 3}, {4, 2, 3, 0.6F, 0}}, {1, {7}, {2, 1, 4, 0.5F, 3}}};
  for (int i = 0; i < 2; i++) {
    Packed p = pack(small + i);
    LossArgs a = {&p, widen(p.qkv, p.n * p.q), widen(p.dout, p.n * p.hd), zeros(p.n * p.hd),
                  zeros(p.n * p.c->s.n_heads)};
    double *by_formula = zeros(p.n * p.q);
    reference_gradient(&p, a.qkv, a.dout, by_formula);
    double *by_steps = finite_differences(loss, &a, a.qkv, p.n * p.q);
    for (int64_t j = 0; j < p.n * p.q; j++)
      assert_true(fabs(by_formula[j] - by_steps[j]) < 1e-7); /* h^2 = 1e-10 times derivatives */
    free(by_formula);
    free(by_steps);
    free(a.qkv);
    free(a.dout);
    free(a.out);
    free(a.lse);
    unpack(&p);
  }
}

static void attention_backward(void **state) {
  (void)state;
  for (int i = 0; i < N_CASES; i++) {
    Packed p = pack(cases + i);
    double *qkv = widen(p.qkv, p.n * p.q), *dout = widen(p.dout, p.n * p.hd);
    double *want = zeros(p.n * p.q);
    int64_t nh = p.n * p.c->s.n_heads;
    double *out_ref = zeros(p.n * p.hd), *lse_ref = zeros(nh);
    reference(&p, qkv, out_ref, lse_ref);
    reference_gradient(&p, qkv, dout, want);
    float *first = NULL;
    for (int threads = 1; threads <= 3; threads++) {
      Device *d = open_cpu(threads);
      float *out = filled_floats(p.n * p.hd, NAN), *lse = filled_floats(nh, NAN);
      float *got = filled_floats(p.n * p.q, NAN);
      forward(d, &p, out, lse);
      backward(d, &p, out, lse, got);
      /* Two products with weights behind each other. */
      assert_close("dqkv", got, want, p.n * p.q, 2 * tolerance_of(lse_ref, nh), 1);
      if (first) assert_same_bits("dqkv by number of threads", got, first, p.n * p.q);
      free(out);
      free(lse);
      if (first)
        free(got);
      else
        first = got;
      device_close(d);
    }
    free(first);
    free(qkv);
    free(dout);
    free(want);
    free(out_ref);
    free(lse_ref);
    unpack(&p);
  }
}

/* dq and dk in front of a rotation are rope's transpose of those behind it. */
static void gradients_turn_back(void **state) {
  (void)state;
  enum { PLACES = 4, PAIRS = 3 };
  static const Case c = {2, {17, 5}, {4, 2, 8, 0.35F, 0}};
  Device *d = open_cpu(2);
  Packed p = pack(&c);
  float *out = filled_floats(p.n * p.hd, 0), *lse = filled_floats(p.n * c.s.n_heads, 0);
  float *want = filled_floats(p.n * p.q, NAN), *got = filled_floats(p.n * p.q, NAN);
  float cs[PLACES * PAIRS], sn[PLACES * PAIRS];
  int32_t places[22];
  for (int i = 0; i < PLACES * PAIRS; i++) cs[i] = cosf((float)i), sn[i] = sinf((float)i);
  for (int i = 0; i < 22; i++) places[i] = 3 * i % PLACES;
  Rotation r = {i32_1d(places, p.n), f32_2d(cs, PLACES, PAIRS), f32_2d(sn, PLACES, PAIRS)};
  forward(d, &p, out, lse);
  backward(d, &p, out, lse, want);
  device_ops(d)->rope(d, f32_2d(want, p.n, p.q), r.positions_N, r.cos_Pr, r.sin_Pr, c.s, true);
  backward_of(d, &p, out, lse, r, got);
  assert_same_bits("dqkv", got, want, p.n * p.q);
  free(out);
  free(lse);
  free(want);
  free(got);
  unpack(&p);
  device_close(d);
}

/* NaN in one sequence must not leak into another, and must show in its own. */
static void nan_stays_in_its_sequence(void **state) {
  (void)state;
  static const Case c = {3, {70, 90, 66}, {2, 1, 16, 0.25F, 0}};
  Device *d = open_cpu(2);
  Packed p = pack(&c);
  int64_t bad = p.offsets[1] + 40;
  float *out = filled_floats(p.n * p.hd, 0), *lse = filled_floats(p.n * 2, 0);
  float *dqkv = filled_floats(p.n * p.q, 0);
  for (int64_t j = 0; j < p.q; j++) p.qkv[bad * p.q + j] = NAN;
  forward(d, &p, out, lse);
  backward(d, &p, out, lse, dqkv);
  for (int64_t i = 0; i < p.n; i++) {
    bool other = i < p.offsets[1] || i >= p.offsets[2];
    if (other) assert_true(!isnan(out[i * p.hd]) && !isnan(dqkv[i * p.q]));
    if (!other && i >= bad) assert_true(isnan(out[i * p.hd]) && isnan(dqkv[i * p.q]));
  }
  free(out);
  free(lse);
  free(dqkv);
  unpack(&p);
  device_close(d);
}

/* ---- the paged cache ---- */

typedef struct Cache {
  int page_size, pages_per_seq;
  float *k, *v;
  int32_t *table; /* [n_seqs, pages_per_seq], pages handed out in a scattered order */
  int64_t n_pages;
} Cache;

static Cache cache_create(const Packed *p, int page_size) {
  Cache c = {.page_size = page_size, .pages_per_seq = 1};
  for (int b = 0; b < p->c->n_seqs; b++)
    if (p->c->len[b] > c.pages_per_seq * page_size)
      c.pages_per_seq = (p->c->len[b] + page_size - 1) / page_size;
  c.n_pages = (int64_t)p->c->n_seqs * c.pages_per_seq;
  int64_t floats = c.n_pages * page_size * p->c->s.n_kv_heads * p->c->s.head_dim;
  c.k = filled_floats(floats, NAN); /* what was not written must not be read */
  c.v = filled_floats(floats, NAN);
  c.table = mem_alloc((size_t)c.n_pages, sizeof(int32_t));
  rng_permute(5, 1, c.table, (int32_t)c.n_pages);
  return c;
}

static void cache_free(Cache *c) {
  free(c->k);
  free(c->v);
  free(c->table);
}

static void cache_fill(Device *d, const Packed *p, const Cache *c, Tensor k, Tensor v) {
  int32_t *slot = mem_alloc((size_t)p->n, sizeof(int32_t));
  for (int b = 0; b < p->c->n_seqs; b++)
    for (int32_t t = 0; t < p->c->len[b]; t++)
      slot[p->offsets[b] + t] =
          c->table[b * c->pages_per_seq + t / c->page_size] * c->page_size + t % c->page_size;
  device_ops(d)->kv_write(d, f32_2d(p->qkv, p->n, p->q), i32_1d(slot, p->n), p->c->s, k, v);
  free(slot);
}

/* Every sequence's last token, decoded from the cache, equals the packed forward's last row. */
static void check_decode(Device *d, const Packed *p, int page_size) {
  const AttnShape *s = &p->c->s;
  Cache c = cache_create(p, page_size);
  Tensor k = {c.k, DT_F32, 4, {c.n_pages, page_size, s->n_kv_heads, s->head_dim}}, v = k;
  v.data = c.v;
  cache_fill(d, p, &c, k, v);
  int64_t n = p->c->n_seqs;
  float *rows = mem_alloc((size_t)(n * p->q), sizeof(float));
  float *got = filled_floats(n * p->hd, NAN);
  double *qkv = widen(p->qkv, p->n * p->q), *want = zeros(n * p->hd);
  double *lse = zeros(n * s->n_heads);
  int32_t *len = mem_alloc((size_t)n, sizeof(int32_t));
  for (int b = 0; b < n; b++) {
    len[b] = p->c->len[b];
    memcpy(rows + b * p->q, p->qkv + (p->offsets[b + 1] - 1) * p->q, sizeof(float) * (size_t)p->q);
    for (int h = 0; h < s->n_heads; h++)
      lse[b * s->n_heads + h] = attend(s, qkv + p->offsets[b] * p->q, p->q, len[b] - 1, h,
                                       want + b * p->hd + (int64_t)h * s->head_dim);
  }
  device_ops(d)->attention_decode(d, f32_2d(rows, n, p->q),
                                  tensor_2d(c.table, DT_I32, n, c.pages_per_seq), i32_1d(len, n),
                                  *s, k, v, f32_2d(got, n, p->hd));
  assert_close("decoded", got, want, n * p->hd, tolerance_of(lse, n * s->n_heads), 1);
  free(rows);
  free(got);
  free(qkv);
  free(want);
  free(lse);
  free(len);
  cache_free(&c);
}

static void decode_equals_forward(void **state) {
  (void)state;
  static const int page_sizes[] = {1, 7, 16, 64};
  Device *d = open_cpu(2);
  for (int i = 0; i < N_CASES; i++) {
    bool empty = false;
    for (int b = 0; b < cases[i].n_seqs; b++) empty |= cases[i].len[b] == 0;
    if (empty) continue; /* decoding needs a token in each sequence */
    Packed p = pack(cases + i);
    for (int j = 0; j < 4; j++) check_decode(d, &p, page_sizes[j]);
    unpack(&p);
  }
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(gradient_reference_is_right), cmocka_unit_test(attention_forward),
    cmocka_unit_test(attention_backward),          cmocka_unit_test(gradients_turn_back),
    cmocka_unit_test(nan_stays_in_its_sequence),   cmocka_unit_test(decode_equals_forward),
};
TEST_MAIN(tests)
