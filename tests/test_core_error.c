/* core/error.h: messages, checked allocation, and how a process dies. */
#include "core/error.h"

#include "tests/test.h"

static void message_is_set(void **state) {
  (void)state;
  Error err = {"old"};
  assert_int_equal(error_set(&err, "%s:%d: found %s", "a.yaml", 7, "x"), -1);
  assert_string_equal(err.msg, "a.yaml:7: found x");
  assert_int_equal(error_set(NULL, "nobody asked"), -1);
}

static void messages_steer_no_terminal(void **state) {
  (void)state;
  Error err = {""};
  error_set(&err, "%s", "a\x1b[31mb\r\x7f\tc\nd");
  assert_string_equal(err.msg, "a?[31mb??\tc\nd");
  error_prefix(&err, "x\x1b");
  assert_string_equal(err.msg, "x?: a?[31mb??\tc\nd");
}

static void message_may_hold_itself(void **state) {
  (void)state;
  Error err = {"inner"};
  error_set(&err, "outer (%s)", err.msg);
  assert_string_equal(err.msg, "outer (inner)");
}

static void prefix_goes_before(void **state) {
  (void)state;
  Error err = {"inner"};
  assert_int_equal(error_prefix(&err, "file %d", 3), -1);
  assert_string_equal(err.msg, "file 3: inner");
  assert_int_equal(error_prefix(NULL, "x"), -1);
}

static void long_messages_are_cut(void **state) {
  (void)state;
  struct {
    Error err;
    char guard;
  } s = {{""}, 42};
  char *text = mem_alloc(10001, 1);
  memset(text, 'a', 10000);
  text[10000] = '\0';
  error_set(&s.err, "%s", text);
  assert_int_equal(strlen(s.err.msg), sizeof s.err.msg - 1);
  error_prefix(&s.err, "p");
  assert_int_equal(strlen(s.err.msg), sizeof s.err.msg - 1);
  assert_memory_equal(s.err.msg, "p: aaa", 6);
  for (size_t n = 4090; n < 4100; n++) { /* prefixes around the very end */
    text[n] = '\0';
    error_set(&s.err, "old");
    error_prefix(&s.err, "%s", text);
    assert_true(strlen(s.err.msg) < sizeof s.err.msg);
    text[n] = 'a';
  }
  assert_int_equal(s.guard, 42);
  free(text);
}

static void do_die(void *arg) { die("cause %d", *(int *)arg); }
static void do_require(void *arg) { require(*(int *)arg == 5); }
static void do_overflow(void *arg) {
  (void)arg;
  mem_alloc(SIZE_MAX / 2, 3);
}
#ifndef __SANITIZE_ADDRESS__ /* which stops at once by itself */
static void do_huge(void *arg) {
  (void)arg;
  mem_zalloc(SIZE_MAX / 2 - 1, 1);
}
#endif

static void dying_says_why(void **state) {
  (void)state;
  int cause = 4;
  const char *said = test_death(do_die, &cause);
  assert_non_null(strstr(said, "rlhf: rank 0: tests/test_core_error.c:"));
  assert_non_null(strstr(said, ": cause 4\n"));
  assert_non_null(strstr(test_death(do_require, &cause), "broken contract: *(int *)arg == 5"));
}

static void allocation_is_checked(void **state) {
  (void)state;
  assert_non_null(strstr(test_death(do_overflow, NULL), "overflows"));
#ifndef __SANITIZE_ADDRESS__
  assert_non_null(strstr(test_death(do_huge, NULL), "out of memory"));
#endif
  int *v = mem_zalloc(3, sizeof *v);
  assert_true(v[0] == 0 && v[2] == 0);
  v[2] = 9;
  v = mem_grow(v, 1000, sizeof *v);
  assert_int_equal(v[2], 9);
  free(v);
  free(mem_alloc(0, 8)); /* never NULL */
  char *s = mem_printf("%d-%s", 1, "b"), *t = mem_strdup(s);
  assert_string_equal(t, "1-b");
  free(s);
  free(t);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(message_is_set),
    cmocka_unit_test(message_may_hold_itself),
    cmocka_unit_test(messages_steer_no_terminal),
    cmocka_unit_test(prefix_goes_before),
    cmocka_unit_test(long_messages_are_cut),
    cmocka_unit_test(dying_says_why),
    cmocka_unit_test(allocation_is_checked),
};
TEST_MAIN(tests)
