/* Devices: what is opened and refused, the memory accounts, threads, measured rates. */
#include "tests/kernels_test.h"

static void opens_and_describes(void **state) {
  (void)state;
  Device *d = open_cpu(3);
  assert_int_equal(device_kind(d), DEVICE_CPU);
  assert_int_equal(device_threads(d), 3);
  assert_non_null(strstr(device_describe(d), "3 threads"));
  assert_non_null(strstr(device_describe(d), "oneDNN"));
  device_close(d);
  d = open_cpu(1);
  assert_non_null(strstr(device_describe(d), "1 thread,"));
  device_close(d);
}

static void refuses(void **state) {
  (void)state;
  Error err = {""};
  assert_null(device_open(DEVICE_CPU, -1, &err));
  assert_non_null(strstr(err.msg, "-1"));
  assert_null(device_open(DEVICE_CUDA, -2, &err));
  assert_non_null(strstr(err.msg, "-2"));
  /* Without a GPU, a driver or CUDA in this build there is a reason; with all three a device. */
  err.msg[0] = 0;
  Device *d = device_open(DEVICE_CUDA, 0, &err);
  assert_true(d ? device_kind(d) == DEVICE_CUDA : strncmp(err.msg, "device cuda", 11) == 0);
  device_close(d);
}

static void threads_follow_the_environment(void **state) {
  (void)state;
  const char *was = getenv("OMP_NUM_THREADS");
  char *keep = was ? mem_strdup(was) : NULL;
  setenv("OMP_NUM_THREADS", "5,2", 1);
  Device *d = open_cpu(0);
  assert_int_equal(device_threads(d), 5);
  device_close(d);
  d = open_cpu(2); /* what is asked for wins */
  assert_int_equal(device_threads(d), 2);
  device_close(d);
  unsetenv("OMP_NUM_THREADS");
  d = open_cpu(0);
  assert_true(device_threads(d) >= 1);
  device_close(d);
  if (keep) setenv("OMP_NUM_THREADS", keep, 1);
  free(keep);
}

static void memory_is_counted(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  assert_int_equal(device_bytes(d), 0);
  char *a = device_alloc(d, 1000), *b = device_alloc(d, 1), *none = device_alloc(d, 0);
  assert_true((uintptr_t)a % 64 == 0 && (uintptr_t)b % 64 == 0 && (uintptr_t)none % 64 == 0);
  assert_int_equal(device_bytes(d), 1001);
  device_free(d, a);
  device_free(d, none);
  device_free(d, NULL);
  assert_int_equal(device_bytes(d), 1);
  assert_int_equal(device_peak_bytes(d), 1001);
  device_reset_peak(d);
  assert_int_equal(device_peak_bytes(d), 1);
  device_free(d, b);
  assert_int_equal(device_bytes(d), 0);
  size_t whole = device_total_memory(d);
  assert_true(whole > 64UL << 20 && whole < 1UL << 50);
  device_close(d);
}

static void data_goes_there_and_back(void **state) {
  (void)state;
  Device *d = open_cpu(2);
  size_t n = 1000003; /* more than one piece of a parallel copy, and a rest */
  unsigned char *host = mem_alloc(n, 1), *back = mem_zalloc(n, 1), *p = device_alloc(d, n);
  for (size_t i = 0; i < n; i++) host[i] = (unsigned char)(i * 7 + i / 251);
  device_upload(d, p, host, n);
  device_download(d, back, p, n);
  device_sync(d);
  assert_memory_equal(host, back, n);
  device_zero(d, p + 1, n - 2);
  device_download(d, back, p, n);
  for (size_t i = 0; i < n; i++) assert_true(back[i] == (i == 0 || i == n - 1 ? host[i] : 0));
  device_upload(d, NULL, NULL, 0);
  device_zero(d, NULL, 0);
  device_free(d, p);
  free(host);
  free(back);
  device_close(d);
}

static void the_cpu_has_no_graphs(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  assert_false(device_capture_begin(d)); /* and goes on as ever */
  float x[2] = {1, 2}, y[2] = {0, 0};
  device_ops(d)->axpy(d, 2, f32_1d(x, 2), f32_1d(y, 2));
  assert_true(y[0] == 2 && y[1] == 4);
  device_graph_free(d, NULL);
  device_close(d);
}

static void rates_are_measured(void **state) {
  (void)state;
  Device *d = open_cpu(1);
  double start = clock_seconds();
  DeviceRates r = device_measure(d);
  assert_true(r.gemm_flops > 1e7 && r.gemm_flops < 1e15); /* a machine of any decade */
  assert_true(r.copy_bytes > 1e7 && r.copy_bytes < 1e14);
  assert_true(clock_seconds() - start < 60); /* half a second, unless the machine is very busy */
  assert_true(device_bytes(d) == 0 && device_peak_bytes(d) == 0); /* leaves no trace */
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(opens_and_describes),
    cmocka_unit_test(refuses),
    cmocka_unit_test(threads_follow_the_environment),
    cmocka_unit_test(memory_is_counted),
    cmocka_unit_test(data_goes_there_and_back),
    cmocka_unit_test(the_cpu_has_no_graphs),
    cmocka_unit_test(rates_are_measured),
};
TEST_MAIN(tests)
