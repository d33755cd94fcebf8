/* Collectives that are started and waited for: same results as those that are called, in the order
 * of the starts, with their time told apart into hidden and exposed.
 * ranks: 1 2 4 */
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "tests/test.h"

enum { MAX_RANKS = 8, BLOCK = 40 };

static Grid *grid_of(int ranks_per_node) {
  Error err = {""};
  Grid *g = grid_create(ranks_per_node, &err);
  if (!g) die("%s", err.msg);
  return g;
}

/* A check over every way to part the ranks into nodes; grids come and go while the queue runs. */
static void for_each_grid(void (*check)(Grid *g)) {
  comm_queue_start();
  for (int local = 1; local <= launch_world(); local++) {
    if (launch_world() % local) continue;
    Grid *g = grid_of(local);
    check(g);
    grid_free(g);
  }
  comm_queue_stop();
}

static int threads_of_process(void) {
  FILE *f = fopen("/proc/self/status", "r");
  char line[256];
  int n = 0;
  while (f && fgets(line, sizeof line, f))
    if (sscanf(line, "Threads: %d", &n) == 1) break;
  if (f) fclose(f);
  return n;
}

/* Who joins a thread may still find it counted for a moment. */
static bool threads_become(int n) {
  struct timespec pause = {0, 1000000};
  for (int i = 0; i < 2000 && threads_of_process() != n; i++) nanosleep(&pause, NULL);
  return threads_of_process() == n;
}

static void a_thread_only_when_asked_for(void **state) {
  (void)state;
  Grid *g = grid_of(1);
  int before = threads_of_process(), several = launch_world() > 1;
  float x = 1, y = 0;
  size_t one[MAX_RANKS] = {1};
  assert_true(comm_start_reduce_scatter_f32(g->intra, &x, &y, one) == 0);
  assert_true(y == 1); /* done at once */
  assert_false(comm_queue_runs());
  assert_int_equal(threads_of_process(), before);
  for (int i = 0; i < 2; i++) {
    comm_queue_start();
    assert_int_equal(comm_queue_runs(), several);
    assert_int_equal(threads_of_process(), before + several);
  }
  for (int i = 0; i < 2; i++) {
    comm_queue_stop();
    assert_false(comm_queue_runs());
    assert_true(threads_become(before));
  }
  comm_wait(0);
  grid_free(g);
}

/* ---- results ---- */

static unsigned char byte_of(int round, int from, int to, int i) {
  return (unsigned char)(round * 13 + from * 31 + to * 7 + i);
}

/* One round of buffers: an all-gather and an all-to-all of BLOCK bytes a rank, a sum of floats. */
typedef struct Round {
  unsigned char gather[MAX_RANKS * BLOCK], out[MAX_RANKS * BLOCK], in[MAX_RANKS * BLOCK];
  float terms[MAX_RANKS * 3], sum[3];
} Round;

static void round_fill(Round *x, int round, int n, int me) {
  memset(x, 0xee, sizeof *x);
  for (int r = 0; r < n; r++) {
    for (int i = 0; i < BLOCK; i++) x->out[r * BLOCK + i] = byte_of(round, me, r, i);
    for (int i = 0; i < 3; i++) x->terms[3 * r + i] = (float)(round + 100 * me + 10 * r + i);
  }
  for (int i = 0; i < BLOCK; i++) x->gather[me * BLOCK + i] = byte_of(round, me, 0, i);
}

static void round_check(const Round *x, int round, int n, int me) {
  for (int r = 0; r < n; r++)
    for (int i = 0; i < BLOCK; i++) {
      assert_int_equal(x->gather[r * BLOCK + i], byte_of(round, r, 0, i));
      assert_int_equal(x->in[r * BLOCK + i], byte_of(round, r, me, i));
    }
  for (int i = 0; i < 3; i++) { /* small integers: exact */
    int sum = n * (round + 10 * me + i) + 100 * n * (n - 1) / 2;
    assert_true(x->sum[i] == (float)sum);
  }
}

static CommTicket round_start(Comm *c, Round *x) {
  size_t bytes[MAX_RANKS], counts[MAX_RANKS];
  int n = comm_size(c), me = comm_rank(c);
  for (int r = 0; r < n; r++) bytes[r] = BLOCK, counts[r] = 3;
  CommTicket a = comm_start_all_gather(c, x->gather + me * BLOCK, x->gather, bytes);
  CommTicket b = comm_start_all_to_all(c, x->out, bytes, x->in, bytes);
  CommTicket t = comm_start_reduce_scatter_f32(c, x->terms, x->sum, counts);
  memset(bytes, 0xff, sizeof bytes); /* the counts were copied */
  memset(counts, 0xff, sizeof counts);
  assert_true(t == 0 || (a < b && b < t));
  return t;
}

static void sleep_seconds(double s) { usleep((useconds_t)(s * 1e6)); }

/* More calls under way than the queue holds (72 of 64), of three groups by turns, since the last
 * rank comes late; in the end only the last is waited for. Synchronous ones in between keep their
 * place. */
static void check_results(Grid *g) {
  enum { ROUNDS = 26 };
  Comm *comm[3] = {g->all, g->intra, g->inter};
  Round *x = mem_alloc(ROUNDS, sizeof *x);
  CommTicket t[ROUNDS];
  double sum = 1;
  for (int i = 0; i < ROUNDS; i++) {
    Comm *c = comm[i % 3];
    round_fill(&x[i], i, comm_size(c), comm_rank(c));
    t[i] = round_start(c, &x[i]);
    if (i == 0) comm_all_reduce_f64(g->all, &sum, 1, false);
    if (i == 1) {
      comm_wait(t[1]);
      comm_wait(t[0]); /* long done */
      if (g->rank == g->world - 1) sleep_seconds(0.02);
    }
  }
  comm_wait(t[ROUNDS - 1]);
  assert_true(sum == g->world);
  for (int i = 0; i < ROUNDS; i++)
    round_check(&x[i], i, comm_size(comm[i % 3]), comm_rank(comm[i % 3]));
  free(x);
}

static void started_is_as_called(void **state) {
  (void)state;
  for_each_grid(check_results);
}

/* Without the queue the same code gives the same. */
static void without_a_thread_as_well(void **state) {
  (void)state;
  Grid *g = grid_of(1);
  check_results(g);
  grid_free(g);
}

static void freed_while_under_way(void **state) {
  (void)state;
  comm_queue_start();
  Grid *g = grid_of(1);
  Round x;
  round_fill(&x, 1, g->world, g->rank);
  round_start(g->all, &x);
  grid_free(g); /* waits */
  round_check(&x, 1, launch_world(), launch_rank());
  comm_queue_stop();
}

/* Between two hops: what the first brought is doubled and sent on. */
typedef struct Doubling {
  const float *in;
  float *out;
  int n;
} Doubling;
static void work_double(void *arg) {
  const Doubling *d = arg;
  for (int i = 0; i < d->n; i++) d->out[i] = 2 * d->in[i];
}

static void check_work(Grid *g) {
  size_t counts[MAX_RANKS], bytes[MAX_RANKS];
  float terms[MAX_RANKS], sum[1], twice[1], all[MAX_RANKS];
  for (int r = 0; r < g->world; r++) {
    counts[r] = 1;
    bytes[r] = sizeof(float);
    terms[r] = (float)(r + 1);
  }
  Doubling d = {sum, twice, 1};
  for (int repeat = 0; repeat < 10; repeat++) {
    sum[0] = twice[0] = -1;
    comm_start_reduce_scatter_f32(g->all, terms, sum, counts);
    comm_start_work(g->all, COLL_REDUCE_SCATTER, work_double, &d);
    comm_wait(comm_start_all_gather(g->all, twice, all, bytes));
    for (int r = 0; r < g->world; r++) assert_true(all[r] == (float)(2 * g->world * (r + 1)));
  }
}

static void work_keeps_its_place(void **state) {
  (void)state;
  for_each_grid(check_work);
}

/* ---- time ---- */

static TrafficCount spent(Traffic before) {
  Traffic now = traffic_now();
  TrafficCount a = before.of[COLL_ALL_GATHER], b = now.of[COLL_ALL_GATHER];
  return (TrafficCount){.calls = b.calls - a.calls,
                        .intra_bytes = b.intra_bytes - a.intra_bytes,
                        .seconds = b.seconds - a.seconds,
                        .hidden_seconds = b.hidden_seconds - a.hidden_seconds};
}

/* Rank 0 comes late. Meanwhile the others either wait or do something else. A sleep is never
 * shorter than asked, but on a busy machine it may be longer, and the end of a barrier reaches the
 * ranks at different times: so there are lower bounds only, below LATE, and comparisons of what
 * must be large with what must be small. */
static const double LATE = 0.3, LEAST = 0.25;
static TrafficCount gather_late(Grid *g, bool wait_at_once) {
  char all[MAX_RANKS] = {0}, own = 1;
  size_t one[MAX_RANKS];
  for (int r = 0; r < g->world; r++) one[r] = 1;
  comm_barrier(g->all);
  Traffic before = traffic_now();
  if (g->rank == 0) sleep_seconds(LATE);
  CommTicket t = comm_start_all_gather(g->all, &own, all, one);
  if (!wait_at_once) sleep_seconds(LATE + 0.14);
  comm_wait(t);
  return spent(before);
}

static void waiting_is_exposed_and_working_hides(void **state) {
  (void)state;
  Grid *g = grid_of(0);
  comm_queue_start();
  TrafficCount waited = gather_late(g, true), worked = gather_late(g, false);
  if (g->rank > 0) {
    assert_true(waited.seconds >= LEAST && waited.hidden_seconds < 0.25 * waited.seconds);
    assert_true(worked.hidden_seconds >= LEAST && worked.seconds < 0.25 * worked.hidden_seconds);
    assert_int_equal(worked.calls, 1);
    assert_int_equal(worked.intra_bytes, g->world - 1);
  }
  comm_queue_stop();
  waited = gather_late(g, true);
  assert_true(waited.hidden_seconds == 0); /* without a thread nothing hides */
  if (g->rank > 0) assert_true(waited.seconds >= LEAST);
  grid_free(g);
}

static double cpu_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A poll costs some microseconds, and after the first 100 us there are fewer than 1000 a second:
 * 1 % of a core. 10 % leaves room for sanitizers; polling without pause would take all of it. */
static void waiting_leaves_the_core(void **state) {
  (void)state;
  Grid *g = grid_of(0);
  for (int queue = 0; queue < 2; queue++) {
    if (queue) comm_queue_start();
    comm_barrier(g->all);
    double cpu = cpu_seconds(), wall = clock_seconds();
    if (g->rank == 0) sleep_seconds(0.4);
    comm_barrier(g->all);
    cpu = cpu_seconds() - cpu;
    wall = clock_seconds() - wall;
    if (g->rank > 0) assert_true(wall > 0.3 && cpu < 0.1 * wall);
    comm_queue_stop();
  }
  grid_free(g);
}

/* Small messages on one host take microseconds, also when the queue's thread is there. The best of
 * many short rounds counts, since others use the machine; two ranks, so that each has its core. */
static void small_messages_are_quick(void **state) {
  (void)state;
  if (launch_world() != 2) skip();
  Grid *g = grid_of(0);
  for (int queue = 0; queue < 2; queue++) {
    if (queue) comm_queue_start();
    double best = 1, x = 1;
    for (int i = 0; i < 200; i++) {
      double start = clock_seconds();
      for (int k = 0; k < 10; k++) comm_all_reduce_f64(g->all, &x, 1, true);
      double each = (clock_seconds() - start) / 10;
      if (each < best) best = each;
    }
    assert_true(best < 50e-6);
    comm_queue_stop();
  }
  grid_free(g);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(a_thread_only_when_asked_for),
    cmocka_unit_test(started_is_as_called),
    cmocka_unit_test(without_a_thread_as_well),
    cmocka_unit_test(freed_while_under_way),
    cmocka_unit_test(work_keeps_its_place),
    cmocka_unit_test(waiting_is_exposed_and_working_hides),
    cmocka_unit_test(waiting_leaves_the_core),
    cmocka_unit_test(small_messages_are_quick),
};
TEST_MAIN(tests)
