/* Matrix products on the GPU against the CPU's: every kind and pair of types, shapes from one
 * element on, odd ones and rows that no vector access fits; same bits twice; and their speed at the
 * shapes of a Llama of 1.1B and 7B parameters.
 *
 * Bounds, relative to the largest element: F32 products round each of k terms on both sides, in
 * different orders: about sqrt(k) 6e-8, below 4e-6 for the k of this file. BF16 operands are the
 * same numbers on both and their products are exact in F32, so an F32 result is held to the same
 * bound; a BF16 result adds its rounding, at most 2^-8 of itself, and where C is added to it (beta)
 * cuBLASLt may round the product first: two roundings. */
#include "tests/twin.h"

static const double F32_BOUND = 1e-5, BF16_BOUND = 1.0 / 256 + 1e-5;

typedef struct Types {
  DType in, out;
  const char *name;
} Types;
static const Types types[] = {
    {DT_F32, DT_F32, "F32"}, {DT_BF16, DT_BF16, "BF16"}, {DT_BF16, DT_F32, "BF16 to F32"}};
static const char *const kinds[] = {"NT", "NN", "TN"};
enum { N_TYPES = 3, N_KINDS = 3 };
static double bound_of(Types t) { return t.out == DT_F32 ? F32_BOUND : BF16_BOUND; }

/* The dims of A and B for C[m, n] with inner dimension k. */
static void operand_dims(GemmKind kind, int64_t m, int64_t n, int64_t k, int64_t *a, int64_t *b) {
  a[0] = kind == GEMM_TN ? k : m;
  a[1] = kind == GEMM_TN ? m : k;
  b[0] = kind == GEMM_NT ? n : k;
  b[1] = kind == GEMM_NT ? k : n;
}

static void check_product(Twins *t, GemmKind kind, Types ty, const int64_t *mnk, float alpha,
                          float beta) {
  if (twin_leaves_out(11, 33)) return;
  int64_t a_dim[2], b_dim[2], c_dim[2] = {mnk[0], mnk[1]};
  operand_dims(kind, mnk[0], mnk[1], mnk[2], a_dim, b_dim);
  Pair a = twin_random_at(ty.in, 1, 1, 2, a_dim), b = twin_random_at(ty.in, 2, 1, 2, b_dim);
  Pair c = beta != 0 ? twin_random_at(ty.out, 3, 1, 2, c_dim)
                     : twin_filled_at(ty.out, NAN, 2, c_dim); /* beta = 0 never reads C */
  t->cpu_ops->gemm(t->cpu, kind, alpha, a.cpu, b.cpu, beta, c.cpu);
  t->gpu_ops->gemm(t->gpu, kind, alpha, a.gpu, b.gpu, beta, c.gpu);
  char what[160];
  snprintf(what, sizeof what, "%s %s m %lld n %lld k %lld alpha %g beta %g", kinds[kind], ty.name,
           (long long)mnk[0], (long long)mnk[1], (long long)mnk[2], (double)alpha, (double)beta);
  twin_compare(what, c, beta != 0 && ty.out == DT_BF16 ? 2 * bound_of(ty) : bound_of(ty));
}

static const int64_t shapes[][3] = {
    {1, 1, 1},       {1, 7, 3},       {3, 1, 2},       {5, 3, 1},       {17, 33, 65},
    {64, 64, 64},    {127, 129, 131}, {5, 1000, 64},   {300, 2, 257},   {256, 384, 512},
    {1, 4096, 512},  {64, 1001, 333}, {2, 96, 1024},   {33, 2048, 256}, {1000, 72, 40},
    {8, 8, 4096},    {13, 77, 520},   {31, 515, 2056}, {7, 1, 4096},    {24, 40, 8},
    {16, 333, 1000},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void products_agree(void **state) {
  (void)state;
  Twins *t = twins();
  for (int s = 0; s < N_SHAPES; s++)
    for (int kind = 0; kind < N_KINDS; kind++)
      for (int ty = 0; ty < N_TYPES; ty++) {
        check_product(t, (GemmKind)kind, types[ty], shapes[s], 1, 0);
        check_product(t, (GemmKind)kind, types[ty], shapes[s], 1, 1);
        if (s % 4 == 0) check_product(t, (GemmKind)kind, types[ty], shapes[s], 0.5f, -2);
        twin_release();
      }
  twin_done();
}

/* Operands that start in the middle of a buffer, on no boundary but their own element's. */
static void any_address_will_do(void **state) {
  (void)state;
  Twins *t = twins();
  enum { M = 48, N = 80, K = 64, OFF = 3 };
  for (int kind = 0; kind < N_KINDS; kind++)
    for (int ty = 0; ty < N_TYPES; ty++) {
      Types x = types[ty];
      int64_t ad[2], bd[2];
      operand_dims((GemmKind)kind, M, N, K, ad, bd);
      Pair whole[3] = {twin_random(x.in, 1, 1, 1, M * K + OFF),
                       twin_random(x.in, 2, 1, 1, N * K + 1),
                       twin_filled(x.out, 7, 1, M * N + OFF)};
      Pair a = twin_view(whole[0], OFF, 2, ad), b = twin_view(whole[1], 1, 2, bd);
      Pair c = twin_view(whole[2], OFF, 2, (const int64_t[]){M, N});
      t->cpu_ops->gemm(t->cpu, (GemmKind)kind, 1, a.cpu, b.cpu, 0, c.cpu);
      t->gpu_ops->gemm(t->gpu, (GemmKind)kind, 1, a.gpu, b.gpu, 0, c.gpu);
      char what[64];
      snprintf(what, sizeof what, "%s %s, odd addresses", kinds[kind], x.name);
      twin_compare(what, whole[2], bound_of(x)); /* what lies in front stays */
    }
  twin_done();
}

static void sizes_of_zero(void **state) {
  (void)state;
  Twins *t = twins();
  for (int ty = 0; ty < N_TYPES; ty++) {
    Types x = types[ty];
    Pair c = twin_random(x.out, 1, 1, 2, 5, 9), none = twin_random(x.in, 1, 1, 2, 5, 0);
    Pair b = twin_random(x.in, 1, 1, 2, 9, 0), nothing = twin_random(x.out, 1, 1, 2, 0, 9);
    t->gpu_ops->gemm(t->gpu, GEMM_NT, 1, none.gpu, b.gpu, 1, c.gpu); /* k = 0: C = beta C */
    twin_compare("k = 0, beta = 1", c, 0);
    t->gpu_ops->gemm(t->gpu, GEMM_NT, 1, none.gpu, b.gpu, 0, c.gpu);
    t->cpu_ops->gemm(t->cpu, GEMM_NT, 1, none.cpu, b.cpu, 0, c.cpu);
    twin_compare("k = 0, beta = 0", c, 0);
    Pair rows = twin_random(x.in, 1, 1, 2, 0, 4), w = twin_random(x.in, 1, 1, 2, 9, 4);
    t->gpu_ops->gemm(t->gpu, GEMM_NT, 1, rows.gpu, w.gpu, 0, nothing.gpu);
  }
  twin_done();
}

static void bias_comes_with_the_product(void **state) {
  (void)state;
  Twins *t = twins();
  for (int s = 0; s < N_SHAPES; s++)
    for (int ty = 0; ty < 2; ty++) {
      const int64_t *z = shapes[s];
      if (test_is_watched_closely() && s % 4 != 1) continue;
      Pair x = twin_random(types[ty].in, 1, 1, 2, z[0], z[2]);
      Pair w = twin_random(types[ty].in, 2, 1, 2, z[1], z[2]);
      Pair b = twin_random(types[ty].in, 3, 10, 1, z[1]);
      Pair y = twin_unwritten(types[ty].out, 2, z[0], z[1]);
      t->cpu_ops->linear_bias(t->cpu, x.cpu, w.cpu, b.cpu, y.cpu);
      t->gpu_ops->linear_bias(t->gpu, x.gpu, w.gpu, b.gpu, y.gpu);
      char what[96];
      snprintf(what, sizeof what, "bias %s m %lld n %lld k %lld", types[ty].name, (long long)z[0],
               (long long)z[1], (long long)z[2]);
      /* without an epilogue for the shape, a BF16 sum is rounded before the bias is added too */
      twin_compare(what, y, 2 * bound_of(types[ty]));
      twin_release();
    }
  twin_done();
}

/* Numbers of a normal distribution, a million of them over and over: the GPU's power, and with it
 * its clock, depends on them. */
static Tensor gpu_numbers(Device *d, DType type, int64_t rows, int64_t cols) {
  enum { CHUNK = 1 << 20 };
  static float x[CHUNK];
  static uint16_t half[CHUNK];
  if (x[0] == 0) {
    for (int i = 0; i < CHUNK; i++) x[i] = rng_normal(5, 0, (uint64_t)i);
    convert_from_f32(x, half, DT_BF16, CHUNK);
  }
  Tensor t = tensor_2d(NULL, type, rows, cols);
  size_t bytes = tensor_bytes(t), at = CHUNK * dtype_size(type);
  char *p = t.data = device_alloc(d, bytes);
  device_upload(d, p, type == DT_F32 ? (void *)x : (void *)half, at < bytes ? at : bytes);
  for (; at < bytes; at += at) device_copy(d, p + at, p, at < bytes - at ? at : bytes - at);
  return t;
}

/* One product on a device, as bytes on the host; the caller frees them. */
static void *product_on(Device *d, GemmKind kind, Tensor a, Tensor b, Tensor c, int times) {
  void *got = mem_alloc(tensor_bytes(c), 1);
  for (int i = 0; i < times; i++) device_ops(d)->gemm(d, kind, 1, a, b, 0, c);
  device_download(d, got, c.data, tensor_bytes(c));
  return got;
}

static void check_same_bits(Twins *t, Device *other, GemmKind kind, Types ty, const int64_t *mnk) {
  if (twin_leaves_out(7, 19)) return;
  int64_t ad[2], bd[2];
  operand_dims(kind, mnk[0], mnk[1], mnk[2], ad, bd);
  Tensor a = gpu_numbers(t->gpu, ty.in, ad[0], ad[1]), b = gpu_numbers(t->gpu, ty.in, bd[0], bd[1]);
  Tensor c = gpu_numbers(t->gpu, ty.out, mnk[0], mnk[1]);
  device_sync(t->gpu);
  void *once = product_on(t->gpu, kind, a, b, c, 1),
       *often = product_on(t->gpu, kind, a, b, c, test_is_watched_closely() ? 2 : 70);
  void *elsewhere = product_on(other, kind, a, b, c, 1);
  char what[128];
  snprintf(what, sizeof what, "the same bits twice, and on another device: %s %s m %lld n %lld",
           kinds[kind], ty.name, (long long)mnk[0], (long long)mnk[1]);
  twin_check(what, memcmp(once, often, tensor_bytes(c)) == 0 &&
                       memcmp(once, elsewhere, tensor_bytes(c)) == 0);
  free(once);
  free(often);
  free(elsewhere);
  device_free(t->gpu, a.data);
  device_free(t->gpu, b.data);
  device_free(t->gpu, c.data);
}

/* Again and again on one device, past the tuning of a shape that comes often, and on another device
 * of the process, whose plans are made anew. */
static void same_bits_twice(void **state) {
  (void)state;
  Twins *t = twins();
  Error err = {""};
  Device *other = device_open(DEVICE_CUDA, 1, &err);
  if (!other) fail_msg("%s", err.msg);
  const int64_t big[][3] = {
      {2048, 2560, 2048}, {513, 2048, 5632}, {8, 11264, 2048}, {37, 130, 9000}};
  for (int s = 0; s < 4; s++)
    for (int kind = 0; kind < N_KINDS; kind++)
      for (int ty = 0; ty < N_TYPES; ty++)
        check_same_bits(t, other, (GemmKind)kind, types[ty], big[s]);
  device_close(other);
  twin_done();
}

/* Few rows, as decoding has them: a row's result does not depend on the rows beside it. */
static void rows_do_not_depend_on_each_other(void **state) {
  (void)state;
  Twins *t = twins();
  enum { M = 16, N = 1030, K = 2056 };
  Pair x = twin_random(DT_BF16, 1, 1, 2, M, K), w = twin_random(DT_BF16, 2, 1, 2, N, K);
  Pair whole = twin_unwritten(DT_F32, 2, M, N);
  t->gpu_ops->gemm(t->gpu, GEMM_NT, 1, x.gpu, w.gpu, 0, whole.gpu);
  float *want = twin_back(whole);
  for (int64_t m = 1; m <= M; m += test_is_watched_closely() ? 5 : 1) {
    int64_t first = M - m;
    Pair some = twin_view(x, first * K, 2, (const int64_t[]){m, K});
    Pair y = twin_unwritten(DT_F32, 2, m, N);
    t->gpu_ops->gemm(t->gpu, GEMM_NT, 1, some.gpu, w.gpu, 0, y.gpu);
    float *got = twin_back(y);
    twin_check("the same bits in other company",
               memcmp(got, want + first * N, (size_t)(m * N) * sizeof *got) == 0);
    free(got);
  }
  free(want);
  twin_done();
}

/* ---- speed ---- */

typedef struct Run {
  Twins *t;
  GemmKind kind;
  float beta;
  Tensor a, b, c;
  int copies, turn; /* of b, one after another in memory: more than the cache holds */
} Run;
static void run_product(void *arg) {
  Run *r = arg;
  Tensor b = r->b;
  r->turn = (r->turn + 1) % r->copies;
  b.data = (char *)b.data + (size_t)r->turn * tensor_bytes(b);
  r->t->gpu_ops->gemm(r->t->gpu, r->kind, 1, r->a, b, r->beta, r->c);
}

/* What products of decoding take on the GPU, without the host's part: many in a captured step. */
enum { CAPTURED = 50 };
static void launch_graph(void *arg) { device_graph_launch(twin_state.gpu, arg); }
static void time_captured(const char *what, Run *r, double bytes, double flops) {
  Device *d = r->t->gpu;
  for (int i = 0; i < 5; i++) run_product(r); /* plans are made and tuned */
  if (!device_capture_begin(d)) fail_msg("CUDA has graphs");
  for (int i = 0; i < CAPTURED; i++) run_product(r);
  DeviceGraph *g = device_capture_end(d);
  char title[160];
  snprintf(title, sizeof title, "%d of %s", CAPTURED, what);
  double each = twin_time(title, launch_graph, g, bytes * CAPTURED, flops * CAPTURED) / CAPTURED;
  print_message("         each %.2f us\n", 1e6 * each);
  device_graph_free(d, g);
}

static void time_product(Twins *t, GemmKind kind, Types ty, float beta, int64_t m, int64_t n,
                         int64_t k, bool decode) {
  int64_t ad[2], bd[2];
  operand_dims(kind, m, n, k, ad, bd);
  Run r = {t, kind, beta, gpu_numbers(t->gpu, ty.in, ad[0], ad[1]), {0}, {0}, 1, 0};
  size_t b_bytes = (size_t)(bd[0] * bd[1]) * dtype_size(ty.in);
  if (decode) r.copies = (int)((400u << 20) / b_bytes) + 1;
  r.b = gpu_numbers(t->gpu, ty.in, bd[0] * r.copies, bd[1]);
  r.b.dim[0] = bd[0];
  r.c = gpu_numbers(t->gpu, ty.out, m, n);
  char what[128];
  snprintf(what, sizeof what, "%s %s m %lld n %lld k %lld beta %g", kinds[kind], ty.name,
           (long long)m, (long long)n, (long long)k, (double)beta);
  double bytes = (double)(tensor_bytes(r.a) + b_bytes + tensor_bytes(r.c));
  double flops = 2.0 * (double)m * (double)n * (double)k;
  if (decode)
    time_captured(what, &r, bytes, flops);
  else
    twin_time(what, run_product, &r, 0, flops);
  device_free(t->gpu, r.a.data);
  device_free(t->gpu, r.b.data);
  device_free(t->gpu, r.c.data);
}

static const int64_t llama_1b[][2] = {{2560, 2048}, {2048, 2048}, {11264, 2048}, {2048, 5632}};
static const int64_t llama_7b[][2] = {{12288, 4096}, {4096, 4096}, {22016, 4096}, {4096, 11008}};

static void time_model(Twins *t, int64_t tokens, const int64_t (*w)[2]) {
  for (int i = 0; i < 4; i++) {
    time_product(t, GEMM_NT, types[1], 0, tokens, w[i][0], w[i][1], false);
    time_product(t, GEMM_NN, types[1], 0, tokens, w[i][1], w[i][0], false);
    time_product(t, GEMM_TN, types[2], 1, w[i][0], w[i][1], tokens, false);
  }
}

static void speed_of_training(void **state) {
  (void)state;
  Twins *t = twins();
  if (test_is_watched()) skip();
  time_model(t, 16384, llama_1b);
  time_model(t, 8192, llama_7b);
  const int64_t rows = 4096; /* of the head's chunks: logits are F32 */
  time_product(t, GEMM_NT, types[2], 0, rows, 32000, 2048, false);
  time_product(t, GEMM_NN, types[1], 0, rows, 2048, 32000, false);
  time_product(t, GEMM_TN, types[2], 1, 32000, 2048, rows, false);
  twin_done();
}

static void speed_of_decoding(void **state) {
  (void)state;
  Twins *t = twins();
  if (test_is_watched()) skip();
  const int64_t rows[] = {1, 8, 16, 32, 64, 256};
  time_product(t, GEMM_NT, types[1], 0, 16, 16, 16, false); /* what a launch costs the host */
  for (int r = 0; r < 6; r++) {
    for (int i = 0; i < 4; i++)
      time_product(t, GEMM_NT, types[1], 0, rows[r], llama_1b[i][0], llama_1b[i][1], true);
    time_product(t, GEMM_NT, types[2], 0, rows[r], 32000, 2048, true);
    time_product(t, GEMM_NT, types[1], 0, rows[r], 22016, 4096, true);
  }
  twin_done();
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(products_agree),    cmocka_unit_test(any_address_will_do),
    cmocka_unit_test(sizes_of_zero),     cmocka_unit_test(bias_comes_with_the_product),
    cmocka_unit_test(same_bits_twice),   cmocka_unit_test(rows_do_not_depend_on_each_other),
    cmocka_unit_test(speed_of_training), cmocka_unit_test(speed_of_decoding),
};
TEST_MAIN(tests)
