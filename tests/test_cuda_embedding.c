/* Embedding, gathered and scattered rows on the GPU against the CPU.
 *
 * Gathered rows are the same bits. Scattered sums are F32 in runs of token order: 1e-5 of the
 * largest; into BF16 rows half of the spacing, 2^-8, for the rounding, which happens once (the
 * CPU's rows are F32). */
#include <unistd.h>

#include "tests/bandwidth.h"

static const DType types[] = {DT_F32, DT_BF16};

typedef enum Choice { ANY, ONE, MOSTLY_ONE, ONCE, FEW } Choice;
typedef struct Case {
  int64_t n, v, c; /* tokens, rows, columns */
  Choice choice;
} Case;
/* Tokens at random; all the same; one in nine of ten places; each once; a handful, so that runs
 * begin and end in the middle of chunks. Sizes around a chunk (16), more numbers
 * than a block of the sort owns, odd widths. */
static const Case cases[] = {{1, 1, 8, ANY},
                             {15, 3, 64, ANY},
                             {16, 3, 64, ONE},
                             {17, 3, 64, ONE},
                             {33, 40, 7, MOSTLY_ONE},
                             {0, 5, 8, ANY},
                             {1000, 1000, 128, ONCE},
                             {5000, 32000, 96, ANY},
                             {5000, 700, 33, ANY},
                             {900, 5, 2048, FEW},
                             {1501, 50, 768, MOSTLY_ONE},
                             {16384, 32000, 40, ANY},
                             {20000, 2, 24, ONE},
                             {20000, 9, 1, FEW},
                             {700, 65537, 16, ANY},
                             {300, 1200000, 3, ANY}};
enum { N_CASES = sizeof cases / sizeof cases[0] };

static Pair tokens_of(Case k) {
  int32_t *x = mem_alloc((size_t)k.n + 1, sizeof *x);
  for (int64_t i = 0; i < k.n; i++) {
    double u = rng_uniform(3, 14, (uint64_t)i), w = rng_uniform(4, 14, (uint64_t)i);
    int32_t any = (int32_t)(u * (double)k.v), last = (int32_t)(k.v - 1);
    x[i] = k.choice == ONE                     ? last
           : k.choice == MOSTLY_ONE && w < 0.9 ? (int32_t)(k.v / 2)
           : k.choice == ONCE                  ? (int32_t)((i * 7) % k.v)
                                               : any;
  }
  Pair p = twin_ints(x, k.n);
  free(x);
  return p;
}

static void check_case(DType t, Case k, int64_t shift) {
  Twins *w = twins();
  print_message("%s %lld tokens of %lld, width %lld\n", dtype_name(t), (long long)k.n,
                (long long)k.v, (long long)k.c);
  Pair tokens = tokens_of(k), table = twin_random(t, 1, 1, 2, k.v, k.c);
  Pair y = twin_rows(twin_unwritten(t, 1, k.n * k.c + shift), shift, k.n, k.c);
  w->cpu_ops->embedding_fwd(w->cpu, tokens.cpu, table.cpu, y.cpu);
  w->gpu_ops->embedding_fwd(w->gpu, tokens.gpu, table.gpu, y.gpu);
  twin_compare("embedding", y, 0);

  Pair dy = twin_rows(twin_random(t, 2, 1, 1, k.n * k.c + shift), shift, k.n, k.c), dtable[2];
  for (int i = 0; i < 2; i++) {
    dtable[i] = twin_random(DT_F32, 3, 1, 2, k.v, k.c);
    w->gpu_ops->embedding_bwd(w->gpu, tokens.gpu, dy.gpu, dtable[i].gpu);
  }
  w->cpu_ops->embedding_bwd(w->cpu, tokens.cpu, dy.cpu, dtable[0].cpu);
  twin_compare("embedding_bwd", dtable[0], 1e-5);
  twin_same_bits("embedding_bwd", dtable[0], dtable[1]);

  w->cpu_ops->gather_rows(w->cpu, table.cpu, tokens.cpu, y.cpu);
  w->gpu_ops->gather_rows(w->gpu, table.gpu, tokens.gpu, y.gpu);
  twin_compare("gather_rows", y, 0);
  w->cpu_ops->scatter_add_rows(w->cpu, dy.cpu, tokens.cpu, table.cpu);
  w->gpu_ops->scatter_add_rows(w->gpu, dy.gpu, tokens.gpu, table.gpu);
  twin_compare("scatter_add_rows", table, t == DT_F32 ? 1e-5 : 1.0 / 256);
  twin_done();
}

static void embeddings(void **state) {
  (void)state;
  for (int k = 0; k < 2; k++)
    for (int i = 0; i < N_CASES; i++) {
      for (int shift = 0; shift < 2; shift++)
        if (!twin_leaves_out(2, 5)) check_case(types[k], cases[i], shift);
    }
}

/* A token id outside the table ends the process. In a child, and before this process opens the
 * GPU, which a child could not use then. */
static void embeds_outside(void *unused) {
  (void)unused;
  Error err = {""};
  Device *d = device_open(DEVICE_CUDA, 0, &err);
  if (!d) return;
  const int32_t ids[2] = {1, 8};
  float *p = device_alloc(d, 1 << 16);
  int32_t *tokens = device_alloc(d, sizeof ids);
  device_zero(d, p, 1 << 16);
  device_upload(d, tokens, ids, sizeof ids);
  device_ops(d)->embedding_fwd(d, tensor_1d(tokens, DT_I32, 2), tensor_2d(p, DT_F32, 8, 4),
                               tensor_2d(p + 100, DT_F32, 2, 4));
  device_sync(d);
}
static void ids_outside_die(void **state) {
  (void)state;
  if (test_is_watched() || access("/dev/nvidiactl", F_OK) != 0) skip();
  assert_non_null(strstr(test_death(embeds_outside, NULL), "assert"));
}

typedef struct Big {
  Tensor tokens, table, dtable, y;
} Big;
static void run_embedding(void *p) {
  Big *b = p;
  twin_state.gpu_ops->embedding_fwd(twin_state.gpu, b->tokens, b->table, b->y);
}
static void run_embedding_bwd(void *p) {
  Big *b = p;
  twin_state.gpu_ops->embedding_bwd(twin_state.gpu, b->tokens, b->y, b->dtable);
}
static void run_scatter(void *p) {
  Big *b = p;
  twin_state.gpu_ops->scatter_add_rows(twin_state.gpu, b->y, b->tokens, b->table);
}

/* Bytes: each row of y once; rows of the table that occur, once (read), or read and written. */
static void time_embedding(int64_t n, int64_t v, int64_t c, Choice choice) {
  Pair tokens = tokens_of((Case){n, v, c, choice});
  char *seen = mem_zalloc((size_t)v, 1);
  double rows = 0;
  for (int64_t i = 0; i < n; i++) {
    rows += !seen[tensor_i32(tokens.cpu)[i]];
    seen[tensor_i32(tokens.cpu)[i]] = 1;
  }
  free(seen);
  Big b = {.tokens = tokens.gpu,
           .table = big_random(DT_BF16, 1, 2, v, c),
           .dtable = big_random(DT_F32, 1, 2, v, c),
           .y = big_random(DT_BF16, 1, 2, n, c)};
  double y = 2 * (double)(n * c), table = rows * (double)c;
  print_message("%lld tokens of %lld, %.0f of them different, width %lld\n", (long long)n,
                (long long)v, rows, (long long)c);
  bandwidth("embedding", run_embedding, &b, y + 2 * table);
  bandwidth("embedding_bwd", run_embedding_bwd, &b, y + 8 * table);
  bandwidth("scatter_add_rows", run_scatter, &b, y + 4 * table);
  big_free();
}

static void speed(void **state) {
  (void)state;
  twins();
  if (test_is_watched()) skip();
  time_embedding(16384, 32000, 2048, ANY);
  time_embedding(16384, 32000, 4096, ANY);
  time_embedding(65536, 128256, 4096, ANY);
  time_embedding(16384, 32000, 2048, MOSTLY_ONE);
  time_embedding(16384, 32000, 2048, ONCE);
  twin_done();
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(ids_outside_die),
                                          cmocka_unit_test(embeddings), cmocka_unit_test(speed)};
TEST_MAIN(tests)
