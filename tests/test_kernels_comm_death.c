/* A rank that dies, hangs or is stopped: the others end within the time limit and name it.
 *
 * The program is its own victim: `test_kernels_comm_death CASE` under mpirun, four ranks as two
 * nodes of two; rank 3 does the misdeed. Several sleeps are longer than the limit on purpose, so
 * that who gives up first is known.
 * alone: a busy machine changes that. */
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/cpu/comm.h"
#include "kernels/kernels.h"
#include "tests/sim_device.h"
#include "tests/test.h"

static const double LIMIT = 0.6;
enum { CULPRIT = 3 };

static void sleep_seconds(double s) { usleep((useconds_t)(s * 1e6)); }

/* Hierarchical, as the engine's: inside the node, then between nodes. */
static void gather_in_node(Grid *g, char *in) {
  char own = 1;
  comm_wait(comm_start_all_gather(g->intra, &own, in, (size_t[2]){1, 1}));
}

static void gather_between_nodes(Grid *g, char *in) {
  comm_wait(comm_start_all_gather(g->inter, in, in + 2, (size_t[2]){2, 2}));
}

static void gather_in_two_hops(Grid *g) {
  char in[8] = {0};
  gather_in_node(g, in);
  gather_between_nodes(g, in);
}

/* Lets the ranks work together for a while first: nobody is missing then. */
static void work_together(Grid *g) {
  for (int i = 0; i < 5; i++) gather_in_two_hops(g);
}

static void go_on_for_ever(Grid *g) {
  for (;;) gather_in_two_hops(g);
}

static void stop(Grid *g) {
  work_together(g);
  if (g->rank == CULPRIT) raise(SIGSTOP);
  go_on_for_ever(g);
}

static void hang(Grid *g) {
  work_together(g);
  for (volatile bool turning = g->rank == CULPRIT; turning;) sleep_seconds(0.01);
  go_on_for_ever(g);
}

static void be_killed(Grid *g) {
  work_together(g);
  if (g->rank == CULPRIT) raise(SIGKILL);
  go_on_for_ever(g);
}

static void hang_behind_compute(Grid *g) {
  comm_queue_start();
  hang(g);
}

/* Rank 0 waits for rank 2, and gives up first; but rank 2, which comes later, waits for rank 3, as
 * does rank 1, later too. */
static void keep_others_waiting(Grid *g) {
  char in[8] = {0};
  work_together(g);
  if (g->rank == CULPRIT) sleep_seconds(30);
  if (g->rank == 2) sleep_seconds(0.5 * LIMIT);
  gather_in_node(g, in);
  if (g->rank == 1) sleep_seconds(0.5 * LIMIT);
  gather_between_nodes(g, in);
}

/* Slower than the limit in all, but something arrives all the time: 20 messages, 50 ms apart. */
static void be_slow(Grid *g) {
  char x[2] = {0};
  for (int i = 0; i < 20; i++) {
    if (g->rank == CULPRIT) sleep_seconds(0.05);
    comm_broadcast(g->all, x, 1, CULPRIT);
  }
  if (g->rank == 0) printf("patience\n");
}

/* ---- on a device: the host is not in MPI, and its watch must notice ---- */

static Comm *dev_intra, *dev_inter;

static void open_device(Grid *g, Sim *s) {
  static int group;
  *s = (Sim){.exchange_seconds = 1e-3};
  comm_device_open(&s->base, &sim_ops, 1);
  dev_intra = comm_device_create(g->intra, "dev_intra", &group);
  dev_inter = comm_device_create(g->inter, "dev_inter", &group);
  comm_queue_start();
}

static CommTicket start_on_device(Comm *c) {
  size_t two[2] = {2, 2};
  static char x[4];
  return comm_start_all_gather(c, x, x, two);
}

static void work_on_device(Grid *g, Sim *s) {
  open_device(g, s);
  for (int i = 0; i < 5; i++) comm_wait(start_on_device(dev_inter));
  sleep_seconds(0.1);
  comm_barrier(g->all);
}

/* Rank 3 does not come; of its node rank 2, and of its group rank 1, wait for it. Rank 0 waits for
 * rank 2 first of all. */
static void hang_on_device(Grid *g) {
  static Sim s;
  work_on_device(g, &s);
  s.exchange_seconds = (double)INFINITY;
  if (g->rank == CULPRIT) sleep_seconds(30);
  if (g->rank > 0) sleep_seconds(0.5 * LIMIT);
  comm_wait(start_on_device(g->rank == 2 ? dev_intra : dev_inter));
  sleep_seconds(30); /* the host waits for its device */
}

/* The same when one waits in MPI for the one that hangs, and the other for that one by its GPU. */
static void hang_in_mpi(Grid *g) {
  static Sim s;
  work_on_device(g, &s);
  s.exchange_seconds = (double)INFINITY;
  if (g->rank == CULPRIT) sleep_seconds(30);
  if (g->rank == 2) sleep_seconds(0.5 * LIMIT);
  if (g->rank == 2) comm_barrier(g->intra);
  if (g->rank == 1) sleep_seconds(30);
  comm_wait(start_on_device(dev_inter));
  sleep_seconds(30);
}

static void break_down(Grid *g) {
  static Sim s;
  comm_set_timeout(0); /* noticed without one */
  work_on_device(g, &s);
  s.exchange_seconds = (double)INFINITY;
  start_on_device(dev_intra);
  sleep_seconds(0.1);
  if (g->rank == CULPRIT) s.trouble = "the link is down";
  sleep_seconds(30);
}

/* Compute takes longer than the limit, the collectives behind it do not. */
static void compute_for_long(Grid *g) {
  static Sim s;
  work_on_device(g, &s);
  sim_run(&s, STREAM_COMPUTE, 1.5 * LIMIT);
  CommTicket t = start_on_device(dev_inter);
  for (int i = 0; i < 20; i++) t = start_on_device(dev_intra);
  comm_wait(t);
  comm_device_close(&s.base);
  comm_destroy(dev_intra);
  comm_destroy(dev_inter);
  comm_barrier(g->all);
  if (g->rank == 0) printf("patience\n");
}

/* A test of which only one rank fails. */
static void fail_alone(void **state) {
  (void)state;
  Error err = {""};
  Grid *g = grid_create(0, &err);
  assert_int_not_equal(g->rank, CULPRIT);
  comm_barrier(g->all);
  grid_free(g);
}

static void silent(Grid *g) { (void)g; }

typedef enum Ending { WELL, BADLY, EITHER } Ending; /* by mpirun's exit status */
typedef struct Case {
  const char *name;
  void (*act)(Grid *g);
  Ending ending;
  bool beside;        /* others may run beside it: who gives up first does not matter */
  const char *mpirun; /* more options */
  const char *says;   /* # is a digit: a pause may end a little later */
} Case;

static const Case cases[] = {
    {"stop", stop, BADLY, true, "", "nothing came from rank 3"},
    {"hang", hang, BADLY, true, "", "nothing came from rank 3"},
    {"hang_behind_compute", hang_behind_compute, BADLY, true, "", "nothing came from rank 3"},
    {"be_killed", be_killed, BADLY, true, "", "signal 9"},
    /* A launcher that looks away, and whose own exit status then says nothing. */
    {"be_killed", be_killed, EITHER, true, "--enable-recovery", "nothing came from rank 3"},
    {"break_down", break_down, BADLY, true, "",
     "all-gather over group 'dev_intra' (ticket 6, 2 bytes to receive): the link is down"},
    {"fail_alone", silent, BADLY, true, "", "tests/test_kernels_comm_death.c:"},
    {"keep_others_waiting", keep_others_waiting, BADLY, false, "",
     "all-gather over group 'inter': for 0.# s nothing came from rank 2 (which waits for rank 3)"},
    {"be_slow", be_slow, WELL, false, "", "patience"},
    {"hang_on_device", hang_on_device, BADLY, false, "",
     "all-gather over group 'dev_inter' (ticket 6, 2 bytes to receive): not done after 0.# s; "
     "waits for rank 2 (which waits for rank 3)"},
    {"hang_in_mpi", hang_in_mpi, BADLY, false, "", "waits for rank 2 (which waits for rank 3)"},
    {"compute_for_long", compute_for_long, WELL, false, "", "patience"},
};
enum { N_CASES = sizeof cases / sizeof *cases, MOST_BESIDE = 3 };

static const struct CMUnitTest lone_failure[] = {cmocka_unit_test(fail_alone)};

static bool starts_with(const char *text, const char *what) {
  for (; *what; text++, what++)
    if (*what == '#' ? *text < '0' || *text > '9' : *text != *what) return false;
  return true;
}

static bool holds(const char *text, const char *what) {
  while (*text && !starts_with(text, what)) text++;
  return *text != '\0';
}

/* On a busy machine a rank that waits for one that waits may give up first: it says for whom. */
static bool names(const char *text, const char *says) {
  bool missing = strcmp(says, "nothing came from rank 3") == 0;
  return holds(text, says) || (missing && strstr(text, "(which waits for rank 3)"));
}

static int commit(int argc, char **argv) {
  const char *name = argv[1];
  struct rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  Error err = {""};
  if (strcmp(name, "fail_alone") == 0) return test_run(argc, argv, lone_failure, 1);
  if (launch_init(&argc, &argv, &err)) die("%s", err.msg);
  Grid *g = grid_create(2, &err);
  if (!g) die("%s", err.msg);
  comm_barrier(g->all);
  comm_set_timeout(LIMIT);
  for (int i = 0; i < N_CASES; i++)
    if (strcmp(cases[i].name, name) == 0) {
      cases[i].act(g);
      break;
    }
  grid_free(g);
  launch_finish();
  return 0;
}

static char self[1024];

/* A case under way, and then what it said, its exit status, and how long it took. */
typedef struct Run {
  FILE *output;
  char text[1 << 16];
  int status;
  double seconds;
} Run;

static void run_start(Run *r, const Case *c) {
  char command[2048];
  snprintf(command, sizeof command,
           "timeout -s KILL 60 mpirun -n 4 --bind-to none %s %s %s 2>&1 </dev/null", c->mpirun,
           self, c->name);
  r->seconds = clock_seconds();
  r->output = popen(command, "r");  // NOLINT(cert-env33-c): the test's own program
  assert_non_null(r->output);
}

static void run_end(Run *r) {
  size_t n = fread(r->text, 1, sizeof r->text - 1, r->output);
  r->text[n] = 0;
  while (fgetc(r->output) != EOF) continue;
  r->status = pclose(r->output);
  r->seconds = clock_seconds() - r->seconds;
}

static void check_run(const Run *r, const Case *c) {
  Ending ending = c->ending == EITHER ? EITHER : r->status == 0 ? WELL : BADLY;
  bool well = ending == c->ending && names(r->text, c->says);
  print_message("# %s: %.1f s\n", c->name, r->seconds);
  if (!well)
    print_error("%s: status %d after %.1f s, expected '%s', said: %s\n", c->name, r->status,
                r->seconds, c->says, r->text);
  assert_true(well);
  /* Start and end of mpirun, the work together, the limit: a busy machine needs its time. */
  assert_true(r->seconds < 20);
}

static void the_others_end_and_name_it(void **state) {
  (void)state;
  static Run run[MOST_BESIDE];
  for (int i = 0, n; i < N_CASES; i += n) {
    n = 1;
    while (cases[i].beside && n < MOST_BESIDE && i + n < N_CASES && cases[i + n].beside) n++;
    for (int k = 0; k < n; k++) run_start(&run[k], &cases[i + k]);
    for (int k = 0; k < n; k++) run_end(&run[k]);
    for (int k = 0; k < n; k++) check_run(&run[k], &cases[i + k]);
  }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(the_others_end_and_name_it),
};

int main(int argc, char **argv) {
  if (argc > 1) return commit(argc, argv);
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n <= 0) return 1;
  return test_run(argc, argv, tests, sizeof tests / sizeof *tests);
}
