/* A rank that hangs, dies or never comes, while the other waits for its GPU: that one ends within
 * the time limit and names it.
 *
 * The program is its own victim: `test_cuda_comm_death CASE` under mpirun, two ranks; rank 1 does
 * the misdeed. With one GPU the ranks share it, and blocks go through the host. */
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "tests/test.h"

static const double LIMIT = 1.5;
enum { CULPRIT = 1, BLOCK = 1 << 20 };

static void sleep_seconds(double s) { usleep((useconds_t)(s * 1e6)); }

typedef struct Rig {
  Device *d;
  Grid *g;
  Comm *c; /* of two */
  char *own, *all;
} Rig;

static void gather(Rig *r) {
  size_t bytes[2] = {BLOCK, BLOCK};
  comm_wait(comm_start_all_gather(r->c, r->own, r->all, bytes));
}

/* Nobody is missing then. */
static void work_together(Rig *r) {
  for (int i = 0; i < 20; i++) gather(r);
  device_sync(r->d);
  comm_barrier(r->g->all);
  comm_set_timeout(LIMIT);
}

static void attach(Rig *r) {
  Error err = {""};
  if (grid_attach(r->g, r->d, &err)) die("%s", err.msg);
  r->c = r->g->local == 2 ? r->g->dev_intra : r->g->dev_inter;
  r->own = device_alloc(r->d, BLOCK);
  r->all = device_alloc(r->d, 2 * BLOCK);
  comm_queue_start();
}

/* The host waits for its GPU, which waits for the other's. */
static void go_on(Rig *r) {
  for (;;) {
    gather(r);
    device_sync(r->d);
  }
}

static void hang(Rig *r) {
  attach(r);
  work_together(r);
  if (r->g->rank == CULPRIT) sleep_seconds(60);
  go_on(r);
}

static void be_killed(Rig *r) {
  attach(r);
  work_together(r);
  if (r->g->rank == CULPRIT) raise(SIGKILL);
  go_on(r);
}

static void never_come(Rig *r) {
  comm_set_timeout(LIMIT);
  if (r->g->rank == CULPRIT) sleep_seconds(60);
  attach(r);
}

typedef struct Case {
  const char *name;
  void (*act)(Rig *r);
  int ranks_per_node;
  const char *mpirun;  /* more options */
  const char *says[3]; /* one of these */
} Case;

/* Two nodes: over sockets, of which NCCL may notice that the other end is gone. */
#define SOCKETS \
  "-x NCCL_P2P_DISABLE=1 -x NCCL_SHM_DISABLE=1 -x NCCL_IB_DISABLE=1 -x NCCL_SOCKET_IFNAME=lo"
static const Case cases[] = {
    {"hang", hang, 2, "", {"waits for rank 1", "nothing came from rank 1"}},
    {"be_killed",
     be_killed,
     1,
     "--enable-recovery " SOCKETS,
     {"waits for rank 1", "nothing came from rank 1", "NCCL"}},
    {"never_come", never_come, 2, "", {"nothing came from rank 1"}},
};
enum { N_CASES = sizeof cases / sizeof *cases };

static int commit(int argc, char **argv) {
  const char *name = argv[1];
  struct rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  Error err = {""};
  if (launch_init(&argc, &argv, &err)) die("%s", err.msg);
  for (int i = 0; i < N_CASES; i++) {
    if (strcmp(cases[i].name, name) != 0) continue;
    char host[16];
    snprintf(host, sizeof host, "host%d", launch_rank());
    if (cases[i].ranks_per_node == 1) setenv("NCCL_HOSTID", host, 1);
    Rig r = {.d = device_open(DEVICE_CUDA, 1, &err)};
    if (r.d) r.g = grid_create(cases[i].ranks_per_node, &err);
    if (!r.g) die("%s", err.msg);
    comm_barrier(r.g->all);
    comm_set_timeout(30);
    double start = clock_seconds();
    cases[i].act(&r);
    die("case %s ends well after %.1f s", name, clock_seconds() - start);
  }
  return 2;
}

static char self[1024];

/* Started under mpirun, what it starts is another job all the same. */
static void forget_launcher(void) {
  if (launch_world() == 1 && !getenv("OMPI_COMM_WORLD_SIZE")) return;
  for (char **at = environ; *at;) {
    char name[256];
    size_t n = strcspn(*at, "=");
    bool of_launcher = !strncmp(*at, "OMPI_COMM", 9) || !strncmp(*at, "OMPI_MCA_o", 10) ||
                       !strncmp(*at, "OMPI_MCA_e", 10) || !strncmp(*at, "PMIX_", 5) ||
                       !strncmp(*at, "OMPI_UNIVERSE", 13) || !strncmp(*at, "PMI_", 4) ||
                       !strncmp(*at, "PRTE_", 5);
    at++;
    if (!of_launcher || n >= sizeof name) continue;
    memcpy(name, at[-1], n);
    name[n] = 0;
    unsetenv(name);
    at = environ;
  }
}

/* What the case said, and how long it took in all. */
static void witness(const Case *c, char *text, size_t size, double *seconds) {
  char command[2048];
  snprintf(command, sizeof command,
           "timeout -s KILL 60 mpirun --allow-run-as-root --oversubscribe -n 2 --bind-to none %s "
           "%s %s 2>&1 </dev/null",
           c->mpirun, self, c->name);
  *seconds = clock_seconds();
  FILE *f = popen(command, "r");  // NOLINT(cert-env33-c): the test's own program
  assert_non_null(f);
  size_t n = fread(text, 1, size - 1, f);
  text[n] = 0;
  while (fgetc(f) != EOF) continue;
  pclose(f);
  *seconds = clock_seconds() - *seconds;
}

static void the_other_ends_and_names_it(void **state) {
  (void)state;
  static char text[1 << 16];
  Error err = {""};
  Device *d = device_open(DEVICE_CUDA, 1, &err);
  if (!d) {
    print_message("%s\n", err.msg);
    skip();
  }
  device_close(d);
  forget_launcher();
  int failures = 0;
  for (int i = 0; i < N_CASES; i++) {
    double seconds;
    witness(&cases[i], text, sizeof text, &seconds);
    bool well = false;
    for (int k = 0; k < 3 && cases[i].says[k]; k++)
      well = well || strstr(text, cases[i].says[k]) != NULL;
    well = well && strstr(text, "rlhf: rank 0: ") && !strstr(text, "ends well");
    const char *line = strstr(text, "rlhf: rank 0: ");
    if (!line) line = text + strspn(text, "- \n");
    print_message("%s %s: %.1f s in all; %.*s\n", well ? "      " : "FAILED", cases[i].name,
                  seconds, (int)strcspn(line, "\n"), line);
    if (!well) print_message("said: %s\n", text);
    /* Start and end of two processes with a GPU each take seconds, the limit 1.5. */
    failures += !well || seconds > 40;
  }
  if (failures) fail_msg("%d cases failed", failures);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(the_other_ends_and_names_it),
};

int main(int argc, char **argv) {
  if (argc > 1) return commit(argc, argv);
  ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
  if (n <= 0) return 1;
  return test_run(argc, argv, tests, sizeof tests / sizeof *tests);
}
