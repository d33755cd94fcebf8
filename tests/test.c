/* The test harness: TAP from rank 0, skips where the shared fixtures are absent. */
#include "tests/test.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
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

const char *test_file(const char *name) {
  static char path[8][512];
  static int turn;
  char *p = path[turn++ % 8];
  snprintf(p, sizeof path[0], "%s/%s", test_tmp(), name);
  return p;
}

const char *test_write(const char *name, const void *data, size_t len) {
  const char *path = test_file(name);
  remove(path); /* truncating instead would make some file systems flush at close */
  FILE *f = fopen(path, "wb");
  if (!f || fwrite(data, 1, len, f) != len || fclose(f) != 0) die("cannot write %s", path);
  return path;
}

/* The child must not reach the other ranks, the parent's exit handlers or its core dumps. */
static _Noreturn void run_to_death(int err_fd, void (*fn)(void *), void *arg) {
  const struct rlimit none = {0, 0};
  setrlimit(RLIMIT_CORE, &none);
  signal(SIGABRT, SIG_DFL);
  dup2(err_fd, STDERR_FILENO);
  die_set_rank(0, NULL);
  fn(arg);
  _exit(0);
}

const char *test_death(void (*fn)(void *arg), void *arg) {
  static char said[8192];
  int fd[2], status;
  fflush(NULL);
  if (pipe(fd) != 0) die("pipe");
  pid_t pid = fork();
  if (pid < 0) die("fork");
  if (pid == 0) run_to_death(fd[1], fn, arg);
  close(fd[1]);
  size_t n = 0;
  for (ssize_t got; n < sizeof said - 1 && (got = read(fd[0], said + n, sizeof said - 1 - n)) > 0;)
    n += (size_t)got;
  said[n] = '\0';
  close(fd[0]);
  waitpid(pid, &status, 0);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
  return said;
}

bool test_is_watched(void) { return getenv("RLHF_NO_RATES") != NULL; }
bool test_is_watched_closely(void) {
  return test_is_watched() && atoi(getenv("RLHF_NO_RATES")) > 1;
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
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  /* A rank whose assertion failed would go on to the next test and leave the others waiting in this
   * one: it says what failed and ends them all. */
  if (launch_world() > 1) setenv("CMOCKA_TEST_ABORT", "1", 1);
  comm_set_timeout(120);
  int failed = _cmocka_run_group_tests(argv[0], tests, n, NULL, NULL);
  double f = failed;
  Grid *g = grid_create(0, &err);
  if (!g) die("%s", err.msg);
  comm_all_reduce_f64(g->all, &f, 1, false);
  grid_free(g);
  launch_finish();
  return f > 0;
}
