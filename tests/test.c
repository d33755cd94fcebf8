/* The test harness: TAP from rank 0, skips where the shared fixtures are absent. */
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/fs.h"
#include "kernels/kernels.h"

const char *test_shared(void) {
  static char path[1024];
  const char *env = getenv("RLHF_SHARED");
  snprintf(path, sizeof path, "%s", env ? env : "../shared");
  struct stat st;
  return stat(path, &st) == 0 ? path : NULL;
}

const char *test_path(const char *below) {
  static char path[4][2048];
  static int turn;
  if (!test_shared()) skip();
  char *p = path[turn++ % 4];
  snprintf(p, sizeof path[0], "%s/%s", test_shared(), below);
  return p;
}

static char tmp_dir[256];

static void remove_tmp(void) {
  if (launch_rank() == 0) fs_remove_tree(tmp_dir, NULL);
}

const char *test_tmp(void) {
  if (tmp_dir[0]) return tmp_dir;
  const char *base = getenv("TMPDIR");
  /* All ranks of one run share the parent (mpirun or the shell), so they agree on the name. */
  snprintf(tmp_dir, sizeof tmp_dir, "%s/rlhf-test-%ld", base ? base : "/tmp", (long)getppid());
  if (fs_make_dirs(tmp_dir, NULL)) die("cannot make %s", tmp_dir);
  atexit(remove_tmp);
  return tmp_dir;
}

double test_rel_error(const float *a, const float *b, size_t n) {
  double diff = 0, mag = 1e-30;
  for (size_t i = 0; i < n; i++) {
    double d = fabs((double)a[i] - (double)b[i]);
    if (!(d <= diff)) diff = d; /* NaN sticks */
    if (fabs((double)b[i]) > mag) mag = fabs((double)b[i]);
  }
  return diff / mag;
}

int test_run(int argc, char **argv, const struct CMUnitTest *tests, size_t n) {
  Error err = {""};
  if (launch_init(&argc, &argv, &err)) die("%s", err.msg);
  if (launch_rank() > 0 && !freopen("/dev/null", "w", stdout))
    die("cannot silence rank %d", launch_rank());
  cmocka_set_message_output(CM_OUTPUT_TAP);
  int failed = _cmocka_run_group_tests(argv[0], tests, n, NULL, NULL);
  double f = failed;
  Grid *g = grid_create(0, &err);
  if (!g) die("%s", err.msg);
  comm_all_reduce_f64(g->all, &f, 1, false);
  grid_free(g);
  launch_finish();
  return f > 0;
}
