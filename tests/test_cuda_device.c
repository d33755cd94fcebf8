/* A GPU as a device: what it is called, the memory accounts, copies of every size in both
 * directions and in order with compute, and the rates measured on it. Skips without a GPU. */
#include "tests/twin.h"

static void opens_and_describes(void **state) {
  (void)state;
  Twins *t = twins();
  assert_int_equal(device_kind(t->gpu), DEVICE_CUDA);
  assert_true(device_threads(t->gpu) >= 1);
  assert_non_null(strstr(device_describe(t->gpu), "cuBLASLt"));
  assert_non_null(strstr(device_describe(t->gpu), "CUDA"));
  size_t memory = device_total_memory(t->gpu);
  print_message("%.1f GiB for this rank\n", (double)memory / (1 << 30));
  assert_true(memory > 1UL << 30 && memory < 1UL << 42);
}

static void memory_is_counted(void **state) {
  (void)state;
  Device *d = twins()->gpu;
  size_t before = device_bytes(d);
  device_reset_peak(d);
  char *a = device_alloc(d, 1000), *b = device_alloc(d, 1), *none = device_alloc(d, 0);
  assert_true((uintptr_t)a % 64 == 0 && (uintptr_t)b % 64 == 0 && (uintptr_t)none % 64 == 0);
  assert_int_equal(device_bytes(d), before + 1001);
  device_free(d, a);
  device_free(d, none);
  device_free(d, NULL);
  assert_int_equal(device_bytes(d), before + 1);
  assert_int_equal(device_peak_bytes(d), before + 1001);
  device_free(d, b);
  assert_int_equal(device_bytes(d), before);
}

static void asks_for_too_much(void *d) { device_alloc(d, 1UL << 46); }
static void frees_what_is_not_its_own(void *d) { device_free(d, d); }
/* A process that has opened a GPU cannot fork and use it: each child opens its own. */
static void opens_and_asks(void *unused) {
  (void)unused;
  Error err = {""};
  Device *d = device_open(DEVICE_CUDA, 0, &err);
  if (d) asks_for_too_much(d);
}
static void opens_and_frees(void *unused) {
  (void)unused;
  Error err = {""};
  Device *d = device_open(DEVICE_CUDA, 0, &err);
  if (d) frees_what_is_not_its_own(d);
}

static void uploads_while_capturing(void *unused) {
  (void)unused;
  Error err = {""};
  Device *d = device_open(DEVICE_CUDA, 1, &err);
  void *p = d ? device_alloc(d, 64) : NULL;
  if (p && device_capture_begin(d)) device_upload(d, p, "x", 1);
}

/* First of all, before this process has opened the GPU. The child's death is its message; without a
 * GPU the child lives, which test_death would fail: so ask in a child of its own first. */
static bool gpu_is_there(void) {
  int status = system("test -e /dev/nvidiactl || test -e /dev/dxg");
  return status == 0;
}
static void deaths_name_their_cause(void **state) {
  (void)state;
  if (test_is_watched() || !gpu_is_there()) skip();
  const char *said = test_death(opens_and_asks, NULL);
  assert_non_null(strstr(said, "out of memory: 70368744177664 bytes asked"));
  said = test_death(opens_and_frees, NULL);
  assert_non_null(strstr(said, "device_free of"));
  said = test_death(uploads_while_capturing, NULL);
  assert_non_null(strstr(said, "an upload while a step is captured"));
}

static unsigned char pattern(size_t i, unsigned seed) {
  return (unsigned char)(i * 7 + i / 251 + i / 65537 * 13 + seed);
}

/* Sizes around the staging slots (2 MiB) and the whole ring. */
static void data_goes_there_and_back(void **state) {
  (void)state;
  Twins *t = twins();
  Device *d = t->gpu;
  const size_t slot = 2u << 20;
  const size_t sizes[] = {1, 63, 4096, slot - 1, slot, slot + 1, 3 * slot + 17, 41 * slot + 5};
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    size_t n = sizes[s], wrong = 0;
    unsigned char *host = mem_alloc(n, 1), *back = mem_zalloc(n, 1), *p = device_alloc(d, n);
    for (size_t i = 0; i < n; i++) host[i] = pattern(i, (unsigned)s);
    device_upload(d, p, host, n);
    memset(host, 0xee, n); /* the caller's again as soon as the call returns */
    device_download(d, back, p, n);
    for (size_t i = 0; i < n; i++) wrong += back[i] != pattern(i, (unsigned)s);
    twin_check("bytes there and back", wrong == 0);
    device_zero(d, p + n / 3, n - n / 3);
    device_download(d, back, p, n);
    for (size_t i = 0; i < n; i++) wrong += back[i] != (i < n / 3 ? pattern(i, (unsigned)s) : 0);
    twin_check("zeros behind bytes", wrong == 0);
    device_free(d, p);
    free(host);
    free(back);
  }
  device_upload(d, NULL, NULL, 0);
  device_download(d, NULL, NULL, 0);
  device_copy(d, NULL, NULL, 0);
  device_zero(d, NULL, 0);
  twin_done();
}

/* Thousands of small uploads without a wait between them, each followed by a copy on the device:
 * what a step does with its tokens. A ring that is reused too early loses some. */
static void small_uploads_stay_in_order(void **state) {
  (void)state;
  Device *d = twins()->gpu;
  enum { N = 5000, INTS = 4099 };
  int32_t *host = mem_alloc(INTS, sizeof *host), *back = mem_alloc((size_t)N, sizeof *back);
  int32_t *p = device_alloc(d, INTS * sizeof *p), *kept = device_alloc(d, N * sizeof *kept);
  for (int32_t i = 0; i < N; i++) {
    size_t n = (size_t)(i * 37 % INTS) + 1;
    host[n - 1] = i;
    device_upload(d, p, host, n * sizeof *p);
    host[n - 1] = -1;
    device_copy(d, kept + i, p + n - 1, sizeof *p);
  }
  device_download(d, back, kept, N * sizeof *back);
  int wrong = 0;
  for (int32_t i = 0; i < N; i++) wrong += back[i] != i;
  twin_check("each upload arrived before the next took its place", wrong == 0);
  device_free(d, p);
  device_free(d, kept);
  free(host);
  free(back);
  twin_done();
}

typedef struct Move {
  Device *d;
  void *device, *host;
  size_t bytes;
} Move;
static void run_upload(void *arg) {
  Move *m = arg;
  device_upload(m->d, m->device, m->host, m->bytes);
}
static void run_download(void *arg) {
  Move *m = arg;
  device_download(m->d, m->host, m->device, m->bytes);
}

static void copies_are_timed(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  Device *d = twins()->gpu;
  Move m = {d, NULL, NULL, 256u << 20};
  m.host = mem_zalloc(m.bytes, 1);
  m.device = device_alloc(d, m.bytes);
  twin_time("upload of 256 MiB", run_upload, &m, (double)m.bytes, 0);
  twin_time("download of 256 MiB", run_download, &m, (double)m.bytes, 0);
  m.bytes = 4096;
  twin_time("upload of 4 KiB", run_upload, &m, 0, 0);
  twin_time("download of 4 KiB", run_download, &m, 0, 0);
  device_free(d, m.device);
  free(m.host);
  twin_done();
}

static void rates_are_measured(void **state) {
  (void)state;
  if (test_is_watched()) skip();
  Device *d = twins()->gpu;
  size_t before = device_bytes(d), peak = device_peak_bytes(d);
  double start = clock_seconds();
  DeviceRates r = device_measure(d);
  print_message("%.1f TFLOP/s, %.0f GB/s, measured in %.2f s\n", 1e-12 * r.gemm_flops,
                1e-9 * r.copy_bytes, clock_seconds() - start);
  /* No GPU of compute capability 8 or more is below the first, none of today above the second. */
  assert_true(r.gemm_flops > 1e13 && r.gemm_flops < 1e16);
  assert_true(r.copy_bytes > 1e11 && r.copy_bytes < 1e14);
  assert_true(device_bytes(d) == before && device_peak_bytes(d) == peak);
}

/* A step of products, an op and a copy, captured once and launched many times: what it computes,
 * that nothing runs while it is captured, and that scratch which grows later does not pull away
 * what the captured step uses. */
static void captured_steps_run(void **state) {
  (void)state;
  Twins *t = twins();
  enum { M = 48, C = 256, BIG = 12000000, LAUNCHES = 5 };
  const Ops *op = t->gpu_ops;
  Pair x = twin_random(DT_BF16, 1, 1, 2, M, C), w = twin_random(DT_BF16, 2, 0.05f, 2, C, C);
  Pair y = twin_unwritten(DT_BF16, 2, M, C), sum = twin_filled(DT_F32, 0, 2, M, C);
  Pair step = twin_filled(DT_F32, 1, 1, M * C);
  op->gemm(t->gpu, GEMM_NT, 1, x.gpu, w.gpu, 0, y.gpu); /* once uncaptured */
  if (!device_capture_begin(t->gpu)) fail_msg("CUDA has graphs");
  op->gemm(t->gpu, GEMM_NT, 1, x.gpu, w.gpu, 0, y.gpu);
  device_copy(t->gpu, x.gpu.data, y.gpu.data, tensor_bytes(x.gpu));
  op->axpy(t->gpu, 1, step.gpu, sum.gpu);
  DeviceGraph *g = device_capture_end(t->gpu);
  twin_compare("nothing ran while it was captured", sum, 0);
  Pair many = twin_filled(DT_F32, 1, 1, BIG), ids = twin_filled(DT_BF16, 1, 2, 4096, 4096);
  (void)op->sum_squares(t->gpu, many.gpu); /* ops with scratch of their own */
  Pair dw = twin_filled(DT_F32, 0, 1, 4096);
  op->bias_grad(t->gpu, ids.gpu, dw.gpu);
  for (int i = 0; i < LAUNCHES; i++) device_graph_launch(t->gpu, g);
  for (int i = 0; i < LAUNCHES; i++) {
    t->cpu_ops->gemm(t->cpu, GEMM_NT, 1, x.cpu, w.cpu, 0, y.cpu);
    twin_round(DT_BF16, y);
    device_copy(t->cpu, x.cpu.data, y.cpu.data, tensor_bytes(x.cpu));
    t->cpu_ops->axpy(t->cpu, 1, step.cpu, sum.cpu);
  }
  twin_compare("sums of the launches", sum, 0);
  twin_compare("products of the launches", y,
               0.03); /* five roundings to BF16, and what they move */
  device_graph_free(t->gpu, g);
  device_graph_free(t->gpu, NULL);
  twin_done();
}

static void closes_and_opens_again(void **state) {
  (void)state;
  (void)twins();
  Error err = {""};
  for (int i = 0; i < 2; i++) {
    Device *d = device_open(DEVICE_CUDA, 3, &err);
    assert_non_null(d);
    assert_int_equal(device_threads(d), 3);
    void *p = device_alloc(d, 100);
    device_zero(d, p, 100);
    device_free(d, p);
    device_close(d);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(deaths_name_their_cause), /* before this process opens the GPU */
    cmocka_unit_test(opens_and_describes),      cmocka_unit_test(memory_is_counted),
    cmocka_unit_test(data_goes_there_and_back), cmocka_unit_test(small_uploads_stay_in_order),
    cmocka_unit_test(copies_are_timed),         cmocka_unit_test(rates_are_measured),
    cmocka_unit_test(captured_steps_run),       cmocka_unit_test(closes_and_opens_again),
};
TEST_MAIN(tests)
