/* Deltas whose streams are damaged: they die, or change values inside their vector, never memory
 * outside it, and nothing beyond the stream is read. Vectors and streams end where a page that may
 * not be touched begins. */
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/rng.h"
#include "kernels/delta.h"
#include "tests/test.h"

enum { PAGE = 4096, MOST = 2 * DELTA_BLOCK + 500 };

/* Memory of `bytes` up to the end of its last page. */
static char *fenced(size_t bytes) {
  size_t pages = (bytes + PAGE - 1) / PAGE;
  char *p = mmap(NULL, (pages + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(p != MAP_FAILED);
  assert_int_equal(mprotect(p + PAGE, pages * PAGE, PROT_READ | PROT_WRITE), 0);
  return p + PAGE + pages * PAGE - bytes;
}

static void unfence(char *p, size_t bytes) {
  size_t pages = (bytes + PAGE - 1) / PAGE;
  munmap(p + bytes - pages * PAGE - PAGE, (pages + 2) * PAGE);
}

/* Random bits with some of them others in what is sent. */
static void make(uint16_t *last, uint16_t *now, int64_t n, double share, uint64_t seed) {
  for (int64_t i = 0; i < n; i++) {
    last[i] = now[i] = (uint16_t)(rng_uniform(seed, 0, (uint64_t)i) * 65536);
    if (rng_uniform(seed, 1, (uint64_t)i) >= share) continue;
    double u = rng_uniform(seed, 2, (uint64_t)i);
    now[i] = (uint16_t)(u < 0.8 ? now[i] + (u < 0.4 ? 1 : -1) : u * 65536);
  }
}

/* In a child: 0 when it lives, or dies of its own will; a signal otherwise. */
static int apply_in_child(Device *d, DeltaPart *part) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    if (!freopen("/dev/null", "w", stderr)) _exit(9);
    device_ops(d)->delta_apply(d, 1, part);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGABRT ? 0 : WTERMSIG(status);
  return WEXITSTATUS(status);
}

static void damage(char *wire, size_t bytes, int64_t n, uint64_t seed) {
  int blows = 1 + (int)(rng_uniform(seed, 5, 0) * 4);
  for (int k = 0; k < blows; k++) {
    uint64_t draw = (uint64_t)k;
    bool head = rng_uniform(seed, 6, draw) < 0.5;
    size_t range = head ? (size_t)delta_blocks(n) * sizeof(DeltaHead) : bytes;
    wire[(size_t)(rng_uniform(seed, 7, draw) * (double)range)] =
        (char)(rng_uniform(seed, 8, draw) * 256);
  }
}

static void check(Device *d, int64_t n, double share, uint64_t seed) {
  uint16_t *now = mem_alloc((size_t)n, sizeof *now);
  size_t vector = (size_t)n * sizeof *now, room = 8 * MOST;
  uint16_t *last = (uint16_t *)(void *)fenced(vector);
  char *wire = mem_alloc(room, 1), *cut;
  make(last, now, n, share, seed);
  DeltaSize size;
  DeltaPart part = {tensor_1d(now, DT_BF16, n), tensor_1d(last, DT_BF16, n), wire, room};
  device_ops(d)->delta_encode(d, 1, &part, &size);
  assert_true(size.bytes <= room);
  cut = fenced(size.bytes); /* a multiple of 16 bytes: aligned */
  memcpy(cut, wire, size.bytes);
  damage(cut, size.bytes, n, seed);
  part.wire = cut;
  part.room = size.bytes;
  int signal = apply_in_child(d, &part);
  if (signal)
    fail_msg("signal %d: n %lld, share %g, seed %d", signal, (long long)n, share, (int)seed);
  unfence(cut, size.bytes);
  unfence((char *)last, vector);
  free(wire);
  free(now);
}

static void damaged_streams_touch_nothing_else(void **state) {
  (void)state;
  static const double shares[] = {0.001, 0.03, 0.3, 1};
  static const int64_t sizes[] = {5, 4096, 4100, MOST};
  Device *d = device_open(DEVICE_CPU, 1, NULL);
  for (int s = 0; s < 4; s++)
    for (int k = 0; k < 4; k++)
      for (uint64_t seed = 1; seed <= 30; seed++) check(d, sizes[k], shares[s], seed);
  device_close(d);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(damaged_streams_touch_nothing_else),
};
TEST_MAIN(tests)
