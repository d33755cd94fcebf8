/* What every test program includes: cmocka, and where the shared fixtures lie. */
#ifndef TEST_H
#define TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Folder of fixtures and data ($RLHF_SHARED, default ../shared), or NULL when absent: the test then
 * calls skip(), which is counted, never failed. */
const char *test_shared(void);
/* test_path("fixtures/llama") = "<shared>/fixtures/llama"; skips the running test when shared is
 * absent. */
const char *test_path(const char *below);
/* A fresh folder for this test program under the build folder, removed at exit. */
const char *test_tmp(void);
/* "<test_tmp>/name"; a few names stay valid at a time. */
const char *test_file(const char *name);
/* Writes a file of that name in test_tmp (without waiting for the disk); returns its path. */
const char *test_write(const char *name, const void *data, size_t len);
/* Runs fn(arg) in a child process that must die(); returns what it said (valid until the next
 * call). The running test fails when the child lives. */
const char *test_death(void (*fn)(void *arg), void *arg);
/* Whether a checker looks on that makes all of it ten to a hundred times slower (RLHF_NO_RATES=1):
 * timings are left out, and of many cases and large shapes some. Closely, a thousand times slower
 * (=2): as few and as small as run every kind of kernel. */
bool test_is_watched(void);
bool test_is_watched_closely(void);
/* Relative difference |a - b| / max(1e-30, largest |b|) over n; the largest of them. */
double test_rel_error(const float *a, const float *b, size_t n);

/* Runs the group with TAP output; with an argument, the tests whose names match it (* and ?). Under
 * mpirun only rank 0 prints; the exit status is the failures of all ranks. */
#define TEST_MAIN(tests)                                                    \
  int main(int argc, char **argv) {                                         \
    return test_run(argc, argv, tests, sizeof(tests) / sizeof((tests)[0])); \
  }
int test_run(int argc, char **argv, const struct CMUnitTest *tests, size_t n);

#endif
