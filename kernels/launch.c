/* launch: starts MPI, tells ranks apart, lays them out as nodes x local.
 *
 * A process that no launcher started is alone, and then MPI is not started at all: one rank needs
 * no daemon, no network and no permission to run as root. Ranks are renumbered so that those of one
 * host follow each other, whatever way the launcher placed them; rank 0 stays rank 0.
 */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/cpu/comm.h"

/* The process's one launch; MPI itself is such a state. */
static struct {
  bool mpi;          /* MPI runs */
  MPI_Comm world;    /* ranks by host */
  int rank, size;    /* in world */
  int host_rank;     /* this rank's number on its host */
  int host_ranks;    /* ranks on this host */
  int core_ranks;    /* of those, the ranks that may run on this rank's cores */
  int host_ranks_lo; /* fewest ranks on a host */
  int host_ranks_hi; /* most ranks on a host */
} launch = {.size = 1, .host_ranks = 1, .core_ranks = 1, .host_ranks_lo = 1, .host_ranks_hi = 1};

#ifdef __SANITIZE_ADDRESS__
/* MPI leaks in its plug-ins and unloads them before the end, and the leak checker can tell those
 * from ours by the name of the module only. Builds with the checker keep every module loaded. */
int dlclose(void *module) { return module ? 0 : -1; }
#endif

/* What launchers leave in the environment of the processes they start. */
static const char *const launcher_size[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", NULL};
static const char *const launcher_mark[] = {"PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_FD",
                                            NULL};

static const char *first_set(const char *const *names) {
  for (; *names; names++)
    if (getenv(*names)) return *names;
  return NULL;
}

static bool was_launched(void) { return first_set(launcher_size) || first_set(launcher_mark); }

/* Another thread may be inside MPI; should the abort not come back for that, the alarm ends us. */
static void abort_all(int code) {
  int up = 0, down = 1;
  alarm(10);
  comm_device_abort();
  MPI_Initialized(&up);
  MPI_Finalized(&down);
  if (up && !down) MPI_Abort(MPI_COMM_WORLD, code);
}

/* Open MPI copies large messages straight between processes where the kernel lets it, and takes for
 * granted that it does; containers often forbid the call. Asking here costs a microsecond. */
static void check_single_copy(void) {
  char from = 1, to = 0;
  struct iovec local = {&to, 1}, remote = {&from, 1};
  if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != 1)
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
}

static void count_core_ranks(MPI_Comm host) {
  size_t n = (size_t)launch.host_ranks;
  cpu_set_t own, both, *all = mem_alloc(n, sizeof *all);
  if (sched_getaffinity(0, sizeof own, &own)) die("sched_getaffinity: %s", strerror(errno));
  comm_check(MPI_Allgather(&own, sizeof own, MPI_BYTE, all, sizeof own, MPI_BYTE, host), "host",
             "MPI_Allgather");
  launch.core_ranks = 0;
  for (size_t i = 0; i < n; i++) {
    CPU_AND(&both, &own, &all[i]);
    launch.core_ranks += CPU_COUNT(&both) > 0;
  }
  free(all);
}

/* Open MPI emulates remote puts over TCP, and then a link that could carry both directions at once
 * carries one at a time; plain sends do not have that. */
static void prefer_tcp_sends(void) { setenv("OMPI_MCA_btl_tcp_flags", "1", 0); }

/* Orders the world by host: the ranks of the host with the lowest rank first. */
static void order_world(void) {
  MPI_Comm host;
  int rank, first, lo_hi[2];
  comm_check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "world", "MPI_Comm_rank");
  comm_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &host),
             "world", "MPI_Comm_split_type");
  comm_check(MPI_Comm_rank(host, &launch.host_rank), "host", "MPI_Comm_rank");
  comm_check(MPI_Comm_size(host, &launch.host_ranks), "host", "MPI_Comm_size");
  first = rank;
  comm_check(MPI_Bcast(&first, 1, MPI_INT, 0, host), "host", "MPI_Bcast");
  count_core_ranks(host);
  comm_check(MPI_Comm_split(MPI_COMM_WORLD, 0, first, &launch.world), "world", "MPI_Comm_split");
  lo_hi[0] = -launch.host_ranks;
  lo_hi[1] = launch.host_ranks;
  comm_check(MPI_Allreduce(MPI_IN_PLACE, lo_hi, 2, MPI_INT, MPI_MAX, launch.world), "world",
             "MPI_Allreduce");
  launch.host_ranks_lo = -lo_hi[0];
  launch.host_ranks_hi = lo_hi[1];
  MPI_Comm_free(&host);
  comm_check(MPI_Comm_rank(launch.world, &launch.rank), "world", "MPI_Comm_rank");
  comm_check(MPI_Comm_size(launch.world, &launch.size), "world", "MPI_Comm_size");
}

/* A launcher of another MPI starts N processes that each believe to be alone. */
static int check_world(Error *err) {
  const char *name = first_set(launcher_size);
  const char *value = name ? getenv(name) : NULL;
  if (!value || launch.size > 1 || strtol(value, NULL, 10) <= 1) return 0;
  return error_set(err,
                   "%s says that this is one of %s processes, but MPI sees only this one: the "
                   "launcher belongs to another MPI than the one rlhf was built with",
                   name, value);
}

int launch_init(int *argc, char ***argv, Error *err) {
  require(!launch.mpi);
  die_set_rank(0, NULL);
  if (!was_launched()) return 0;
  check_single_copy();
  prefer_tcp_sends();
  int level;
  if (MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS)
    return error_set(err, "MPI does not start");
  launch.mpi = true;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  order_world();
  die_set_rank(launch.rank, abort_all);
  stall_open(launch.world);
  return check_world(err);
}

int launch_rank(void) { return launch.rank; }
int launch_world(void) { return launch.size; }
int launch_host_rank(void) { return launch.host_rank; }
int launch_host_ranks(void) { return launch.host_ranks; }
int launch_core_ranks(void) { return launch.core_ranks; }

void launch_finish(void) {
  if (!launch.mpi) return;
  comm_queue_stop();
  stall_close();
  MPI_Comm_free(&launch.world);
  MPI_Finalize();
  launch.mpi = false;
  launch.rank = launch.host_rank = 0;
  launch.size = launch.host_ranks = launch.core_ranks = launch.host_ranks_lo =
      launch.host_ranks_hi = 1;
  die_set_rank(0, NULL);
}

/* The ranks of the world with the same color, by rank: first, first + step... */
static Comm *group_create(const Grid *g, int color, int size, int rank, const char *name, int first,
                          int step) {
  MPI_Comm mpi = MPI_COMM_NULL;
  int *node = mem_alloc((size_t)size, sizeof *node),
      *world = mem_alloc((size_t)size, sizeof *world);
  for (int r = 0; r < size; r++) {
    world[r] = first + r * step;
    node[r] = world[r] / g->local;
  }
  comm_drain();
  if (launch.mpi) {
    mpi_enter();
    comm_check(MPI_Comm_split(launch.world, color, g->rank, &mpi), name, "MPI_Comm_split");
    comm_check(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN), name, "MPI_Comm_set_errhandler");
    mpi_leave();
  }
  Comm *c = comm_create(mpi, size, rank, name, node, world);
  free(node);
  free(world);
  return c;
}

/* Ranks of a node, or -1. */
static int ranks_of_node(int asked, Error *err) {
  if (asked < 0) return error_set(err, "ranks per node: %d is below 0", asked);
  if (asked > 0 && launch.size % asked)
    return error_set(err, "ranks per node: %d ranks do not divide into nodes of %d", launch.size,
                     asked);
  if (asked == 0 && launch.host_ranks_lo != launch.host_ranks_hi)
    return error_set(err,
                     "hosts hold %d to %d ranks: start the same number on each, or say "
                     "zeropp.ranks_per_node",
                     launch.host_ranks_lo, launch.host_ranks_hi);
  return asked ? asked : launch.host_ranks;
}

Grid *grid_create(int ranks_per_node, Error *err) {
  int local = ranks_of_node(ranks_per_node, err);
  if (local < 0) return NULL;
  Grid *g = mem_zalloc(1, sizeof *g);
  g->rank = launch.rank;
  g->world = launch.size;
  g->local = local;
  g->nodes = g->world / local;
  g->node = g->rank / local;
  g->local_rank = g->rank % local;
  g->all = group_create(g, 0, g->world, g->rank, "all", 0, 1);
  g->intra = group_create(g, g->node, g->local, g->local_rank, "intra", g->node * local, 1);
  g->inter = group_create(g, g->local_rank, g->nodes, g->node, "inter", g->local_rank, local);
  g->dev_intra = g->intra;
  g->dev_inter = g->inter;
  return g;
}

int grid_attach(Grid *g, Device *d, Error *err) {
  require(g->dev_intra == g->intra && g->dev_inter == g->inter); /* once */
  return d->backend->attach ? d->backend->attach(g, d, err) : 0;
}

void grid_free(Grid *g) {
  if (!g) return;
  if (g->dev_intra != g->intra) comm_destroy(g->dev_intra);
  if (g->dev_inter != g->inter) comm_destroy(g->dev_inter);
  comm_destroy(g->all);
  comm_destroy(g->intra);
  comm_destroy(g->inter);
  free(g);
}
