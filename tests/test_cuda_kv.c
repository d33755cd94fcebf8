/* The paged KV cache on the GPU against the CPU's: rows written into scattered pages and decoded.
 * Pages are laid out differently, so what is compared is what is read out of them. */
#include "tests/twin.h"

typedef struct Case {
  int n_seqs;
  int32_t len[24];
  AttnShape s;
} Case;

#define MANY 600, 1, 64, 512, 0, 513, 30, 17, 5, 128, 256, 33

static const Case cases[] = {
    {1, {1}, {1, 1, 8, 1, 0}},
    {3, {1, 2, 40}, {4, 2, 16, 0.25F, 0}},
    {5, {512, 513, 1, 700, 1025}, {8, 2, 64, 0.125F, 0}},
    {3, {511, 64, 1300}, {32, 4, 64, 0.125F, 0}},
    {4, {300, 17, 128, 600}, {4, 4, 128, 0.0884F, 0}},
    {2, {100, 530}, {40, 2, 128, 0.0884F, 0}}, /* more query heads than a block takes */
    {2, {90, 600}, {4, 2, 256, 0.0625F, 0}},
    {3, {33, 600, 95}, {6, 2, 80, 0.11F, 0}},
    {3, {33, 600, 95}, {6, 2, 96, 0.1F, 0}},
    {3, {1400, 30, 513}, {4, 2, 64, 0.125F, 100}},
    {2, {1400, 640}, {4, 2, 64, 0.125F, 600}},
    {2, {90, 640}, {4, 1, 20, 0.22F, 0}},
    {2, {70, 555}, {2, 1, 3, 0.5F, 33}},
    {2, {70, 555}, {2, 2, 131, 0.09F, 0}},
    {1, {520}, {1, 1, 64, 3.0F, 0}},       /* sharp softmax: scores of several tens */
    {12, {MANY}, {32, 16, 64, 0.125F, 0}}, /* more blocks than find room at once */
};
enum { N_CASES = sizeof cases / sizeof cases[0] };

/* A case's cache on both devices: every token of every sequence in pages of a scattered order. */
typedef struct Cached {
  const Case *c;
  int page_size;
  int64_t n, q, hd, width; /* rows in all, a row's numbers, of out; pages of a sequence */
  Pair rows, slots, table, len, query, k, v, out;
} Cached;

static Pair as_2d(Pair p, int64_t rows, int64_t columns) {
  p.cpu = tensor_2d(p.cpu.data, p.cpu.dtype, rows, columns);
  p.gpu = tensor_2d(p.gpu.data, p.gpu.dtype, rows, columns);
  return p;
}

static Cached cache(const Case *c, DType type, int page_size, uint64_t seed) {
  Cached x = {.c = c, .page_size = page_size, .width = 1};
  const AttnShape *s = &c->s;
  for (int b = 0; b < c->n_seqs; b++) {
    x.n += c->len[b];
    int64_t pages = (c->len[b] + page_size - 1) / page_size;
    if (pages > x.width) x.width = pages;
  }
  x.width += 2; /* a table with room for more, as the engine's */
  x.hd = (int64_t)s->n_heads * s->head_dim;
  x.q = x.hd + 2L * s->n_kv_heads * s->head_dim;
  int64_t n_pages = c->n_seqs * x.width;
  int32_t *table = mem_alloc((size_t)n_pages, sizeof *table);
  int32_t *slots = mem_alloc((size_t)x.n, sizeof *slots), at = 0;
  rng_permute(5, 1, table, (int32_t)n_pages);
  for (int b = 0; b < c->n_seqs; b++)
    for (int32_t t = 0; t < c->len[b]; t++)
      slots[at++] = table[b * x.width + t / page_size] * page_size + t % page_size;
  x.slots = twin_ints(slots, x.n);
  x.table = as_2d(twin_ints(table, n_pages), c->n_seqs, x.width);
  x.len = twin_ints(c->len, c->n_seqs);
  x.rows = twin_random(type, seed, 1, 2, x.n, x.q);
  x.query = twin_random(type, seed + 1, 1, 2, c->n_seqs, x.q);
  x.k = twin_unwritten(type, 4, n_pages, page_size, s->n_kv_heads, s->head_dim);
  x.v = twin_unwritten(type, 4, n_pages, page_size, s->n_kv_heads, s->head_dim);
  x.out = twin_unwritten(type, 2, c->n_seqs, x.hd);
  free(table);
  free(slots);
  return x;
}

static void write_gpu(Twins *t, const Cached *x) {
  t->gpu_ops->kv_write(t->gpu, x->rows.gpu, x->slots.gpu, x->c->s, x->k.gpu, x->v.gpu);
}
static void decode_gpu(Twins *t, const Cached *x) {
  t->gpu_ops->attention_decode(t->gpu, x->query.gpu, x->table.gpu, x->len.gpu, x->c->s, x->k.gpu,
                               x->v.gpu, x->out.gpu);
}

/* Frees all pairs; returns what failed, which goes on counting. */
static int release(void) {
  int failures = twin_state.failures;
  twin_state.failures = 0;
  twin_done();
  return failures;
}

/* F32: scores of some tens are off by their size times 6e-8, sums of a thousand terms add as much.
 * BF16: weights are rounded to 2^-9 of themselves, and the result is. */
static void agrees(DType type) {
  Twins *t = twins();
  static const int page_sizes[] = {1, 7, 16, 64};
  double tolerance = type == DT_F32 ? 1e-5 : 1.0 / 128;
  int failures = 0;
  for (int i = 0; i < N_CASES; i++)
    for (int j = 0; j < 4; j++) {
      const Case *c = cases + i;
      if (test_is_watched() && j != i % 4) continue;
      if (test_is_watched_closely() && type == DT_F32 && i % 2 != 0) continue;
      Cached x = cache(c, type, page_sizes[j], 4 * (uint64_t)i + (uint64_t)j);
      write_gpu(t, &x);
      decode_gpu(t, &x);
      t->cpu_ops->kv_write(t->cpu, x.rows.cpu, x.slots.cpu, c->s, x.k.cpu, x.v.cpu);
      t->cpu_ops->attention_decode(t->cpu, x.query.cpu, x.table.cpu, x.len.cpu, c->s, x.k.cpu,
                                   x.v.cpu, x.out.cpu);
      char name[96];
      snprintf(name, sizeof name, "case %d %s H %d K %d D %d window %d, pages of %d", i,
               dtype_name(type), c->s.n_heads, c->s.n_kv_heads, c->s.head_dim, c->s.window,
               page_sizes[j]);
      twin_compare(name, x.out, tolerance);
      failures += release();
    }
  twin_state.failures = failures;
  twin_done();
}

static void f32_agrees(void **state) {
  (void)state;
  agrees(DT_F32);
}
static void bf16_agrees(void **state) {
  (void)state;
  agrees(DT_BF16);
}

/* Same bits when run again, and for a sequence whatever else is in the batch. */
static void same_bits(void **state) {
  (void)state;
  Twins *t = twins();
  static const Case both[] = {{4, {900, 1, 513, 300}, {8, 2, 64, 0.125F, 0}},
                              {12, {MANY}, {16, 16, 64, 0.125F, 0}}};
  for (int k = 0; k < 3; k++) {
    const Case c = both[k / 2];
    DType type = k ? DT_BF16 : DT_F32;
    Cached x = cache(&c, type, 16, 3);
    write_gpu(t, &x);
    decode_gpu(t, &x);
    float *all = twin_back(x.out);
    decode_gpu(t, &x);
    float *again = twin_back(x.out);
    size_t row = (size_t)x.hd * sizeof *all;
    twin_check("decoding twice gives other bits", memcmp(all, again, (size_t)c.n_seqs * row) == 0);
    for (int b = 0; b < (test_is_watched_closely() ? 1 : c.n_seqs); b++) {
      Cached one = x;
      int64_t pages = c.len[b] > 0 ? (c.len[b] + 15) / 16 : 1; /* no wider than it must be */
      one.table.gpu = tensor_2d(tensor_i32(x.table.gpu) + b * x.width, DT_I32, 1, pages);
      one.len.gpu = tensor_1d(tensor_i32(x.len.gpu) + b, DT_I32, 1);
      one.query.gpu =
          tensor_2d((char *)x.query.gpu.data + (size_t)(b * x.q) * dtype_size(type), type, 1, x.q);
      one.out = twin_unwritten(type, 2, 1, x.hd);
      decode_gpu(t, &one);
      float *alone = twin_back(one.out);
      twin_check("a sequence alone gives other bits", memcmp(all + b * x.hd, alone, row) == 0);
      free(alone);
    }
    free(all);
    free(again);
  }
  twin_done();
}

/* ---- time ---- */

/* Layers' caches in turn, so that none is still in the GPU's own cache. */
typedef struct Layers {
  Cached x;
  int n, next;
  Tensor k[16], v[16];
} Layers;

static void time_decode(void *arg) {
  Layers *l = arg;
  l->next = (l->next + 1) % l->n;
  l->x.k.gpu = l->k[l->next];
  l->x.v.gpu = l->v[l->next];
  decode_gpu(&twin_state, &l->x);
}
static void time_write(void *arg) {
  Layers *l = arg;
  l->next = (l->next + 1) % l->n;
  l->x.k.gpu = l->k[l->next];
  l->x.v.gpu = l->v[l->next];
  write_gpu(&twin_state, &l->x);
}

/* Pages of random numbers: a few million of them, again and again. */
static Tensor random_pages(DType type, int64_t n_pages, int64_t page, const AttnShape *s,
                           const Pair *block) {
  Tensor t = {NULL, type, 4, {n_pages, page, s->n_kv_heads, s->head_dim}};
  size_t bytes = tensor_bytes(t), step = tensor_bytes(block->gpu);
  t.data = device_alloc(twin_state.gpu, bytes);
  for (size_t at = 0; at < bytes; at += step)
    device_copy(twin_state.gpu, (char *)t.data + at, block->gpu.data,
                bytes - at < step ? bytes - at : step);
  return t;
}

/* len tokens in each sequence, in tables with room for more. */
static void time_shape(const char *name, DType type, int batch, int32_t len, int32_t room,
                       AttnShape s, int layers) {
  enum { PAGE = 16, ROWS = 8192 };
  int64_t width = (room + PAGE - 1) / PAGE, n_pages = batch * width, rows = (int64_t)batch * len;
  int64_t hd = (int64_t)s.n_heads * s.head_dim, q = hd + 2L * s.n_kv_heads * s.head_dim;
  int64_t written = rows < ROWS ? rows : ROWS;
  int32_t *table = mem_alloc((size_t)n_pages, sizeof *table);
  int32_t *slots = mem_alloc((size_t)written, sizeof *slots), *lens = mem_alloc((size_t)batch, 4);
  rng_permute(5, 1, table, (int32_t)n_pages);
  for (int64_t i = 0; i < written; i++)
    slots[i] = table[i / len * width + i % len / PAGE] * PAGE + (int32_t)(i % len % PAGE);
  for (int b = 0; b < batch; b++) lens[b] = len;
  Case c = {.n_seqs = batch, .s = s};
  Layers l = {.x = {.c = &c, .n = written, .q = q, .hd = hd, .width = width}, .n = layers};
  l.x.slots = twin_ints(slots, written);
  l.x.table = as_2d(twin_ints(table, n_pages), batch, width);
  l.x.len = twin_ints(lens, batch);
  l.x.rows = twin_filled(type, 0.5F, 2, written, q);
  l.x.query = twin_random(type, 2, 1, 2, batch, q);
  l.x.out = twin_unwritten(type, 2, batch, hd);
  Pair block = twin_random(type, 1, 1, 1, 1 << 20);
  for (int i = 0; i < layers; i++) {
    l.k[i] = random_pages(type, n_pages, PAGE, &s, &block);
    l.v[i] = random_pages(type, n_pages, PAGE, &s, &block);
  }
  double row = 2.0 * s.n_kv_heads * s.head_dim * (double)dtype_size(type);
  char line[128];
  snprintf(line, sizeof line, "decode %s", name);
  twin_time(line, time_decode, &l, row * (double)rows, 0);
  snprintf(line, sizeof line, "kv_write %s, %d rows", name, (int)written);
  twin_time(line, time_write, &l, 2 * row * (double)written, 0);
  for (int i = 0; i < layers; i++) {
    device_free(twin_state.gpu, l.k[i].data);
    device_free(twin_state.gpu, l.v[i].data);
  }
  free(table);
  free(slots);
  free(lens);
  twin_done();
}

static void rates(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  twins();
  const AttnShape small = {32, 4, 64, 0.125F, 0}, large = {32, 32, 128, 0.0884F, 0};
  const AttnShape grouped = {32, 8, 128, 0.0884F, 0};
  time_shape("bf16 64 x 512, H 32 K 4 D 64", DT_BF16, 64, 512, 512, small, 8);
  time_shape("bf16 64 x 500 of 1024, H 32 K 4 D 64", DT_BF16, 64, 500, 1024, small, 8);
  time_shape("bf16 64 x 1024, H 32 K 4 D 64", DT_BF16, 64, 1024, 1024, small, 4);
  time_shape("bf16 256 x 512, H 32 K 4 D 64", DT_BF16, 256, 512, 512, small, 4);
  time_shape("bf16 1 x 512, H 32 K 4 D 64", DT_BF16, 1, 512, 512, small, 16);
  time_shape("bf16 1 x 8192, H 32 K 4 D 64", DT_BF16, 1, 8192, 8192, small, 16);
  time_shape("bf16 64 x 512, H 32 K 32 D 128", DT_BF16, 64, 512, 512, large, 2);
  time_shape("bf16 64 x 512, H 32 K 8 D 128", DT_BF16, 64, 512, 512, grouped, 4);
  time_shape("f32 64 x 512, H 32 K 4 D 64", DT_F32, 64, 512, 512, small, 4);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(f32_agrees),
    cmocka_unit_test(bf16_agrees),
    cmocka_unit_test(same_bits),
    cmocka_unit_test(rates),
};
TEST_MAIN(tests)
