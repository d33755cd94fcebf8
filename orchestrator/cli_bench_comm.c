/* rlhf bench comm: what the collectives carry, over the host's memory and the device's, within a
 * node and between nodes, by size.
 *
 * All ranks make the same calls, so groups of one kind work at the same time, as they do in
 * training. A row is the time of one of many calls in a row, the slowest rank's. */
#include <stdio.h>
#include <stdlib.h>

#include "orchestrator/cli_bench.h"

static const size_t SMALLEST = 4096;
static const double SECONDS = 0.05; /* of a row, about */
enum { MOST_CALLS = 1000 };

typedef struct Lane {
  const char *memory, *group;
  Comm *comm;
  Device *device; /* NULL: the host's memory */
} Lane;

typedef struct Buffers {
  char *send, *recv; /* [ranks of the group] blocks each */
  size_t *bytes;
} Buffers;

static void call(const Lane *l, CollKind kind, const Buffers *b) {
  if (kind == COLL_ALL_GATHER)
    comm_all_gather(l->comm, b->send, b->recv, b->bytes);
  else
    comm_all_to_all(l->comm, b->send, b->bytes, b->recv, b->bytes);
}

static double time_calls(Grid *g, const Lane *l, CollKind kind, const Buffers *b, int calls) {
  comm_barrier(g->all);
  double start = clock_seconds();
  for (int i = 0; i < calls; i++) call(l, kind, b);
  if (l->device) device_sync(l->device);
  double seconds = (clock_seconds() - start) / calls;
  comm_all_reduce_f64(g->all, &seconds, 1, true);
  return seconds;
}

/* Connections come into being first; then a short row tells how many calls make a long one. */
static double measure(Grid *g, const Lane *l, CollKind kind, const Buffers *b) {
  time_calls(g, l, kind, b, 2);
  double calls = SECONDS / time_calls(g, l, kind, b, 3); /* same on all ranks */
  if (calls > MOST_CALLS) calls = MOST_CALLS;
  return time_calls(g, l, kind, b, calls < 3 ? 3 : (int)calls);
}

static void *block_alloc(const Lane *l, size_t bytes) {
  void *p = l->device ? device_alloc(l->device, bytes) : mem_zalloc(bytes, 1);
  if (l->device) device_zero(l->device, p, bytes);
  return p;
}

static void block_free(const Lane *l, void *p) {
  if (l->device)
    device_free(l->device, p);
  else
    free(p);
}

static void print_row(const Lane *l, CollKind kind, size_t block, double seconds, bool json) {
  double rate = 1e-9 * (double)block * (comm_size(l->comm) - 1) / seconds;
  if (json)
    printf(
        "{\"memory\":\"%s\",\"group\":\"%s\",\"ranks\":%d,\"collective\":\"%s\",\"block\":%zu,"
        "\"seconds\":%.9g,\"gigabytes_per_second\":%.9g}\n",
        l->memory, l->group, comm_size(l->comm), coll_name(kind), block, seconds, rate);
  else
    printf("%-8s %-6s %6d  %-11s %10zu %12.1f %9.2f\n", l->memory, l->group, comm_size(l->comm),
           coll_name(kind), block, 1e6 * seconds, rate);
  fflush(stdout);
}

static void run_lane(Grid *g, const Lane *l, size_t largest, bool json) {
  static const CollKind kinds[] = {COLL_ALL_GATHER, COLL_ALL_TO_ALL};
  size_t n = (size_t)comm_size(l->comm);
  Buffers b = {block_alloc(l, n * largest), block_alloc(l, n * largest),
               mem_alloc(n, sizeof *b.bytes)};
  for (int k = 0; k < 2; k++)
    for (size_t block = SMALLEST < largest ? SMALLEST : largest;; block *= 8) {
      if (block > largest) block = largest;
      for (size_t r = 0; r < n; r++) b.bytes[r] = block;
      double seconds = measure(g, l, kinds[k], &b);
      if (g->rank == 0) print_row(l, kinds[k], block, seconds, json);
      if (block == largest) break;
    }
  block_free(l, b.send);
  block_free(l, b.recv);
  free(b.bytes);
}

static void print_head(const BenchRig *r) {
  const Grid *g = r->grid;
  printf("%d rank%s: %d node%s of %d; %s\n\n", g->world, g->world == 1 ? "" : "s", g->nodes,
         g->nodes == 1 ? "" : "s", g->local, device_describe(r->device));
  printf("%-8s %-6s %6s  %-11s %10s %12s %9s\n", "memory", "group", "ranks", "collective", "block",
         "time us", "GB/s");
}

static void print_foot(const Grid *g) {
  puts(
      "\nblock: bytes from each rank to each other. GB/s: received by a rank. All groups of a kind "
      "at once.");
  if (g->world == 1) puts("One rank moves nothing: start it under mpirun.");
}

CliResult bench_comm(const Args *a, Error *err) {
  BenchRig r;
  CliResult rc = bench_rig_open(&r, a, err);
  if (rc == CLI_OK) {
    Grid *g = r.grid;
    bool json = args_given(a, "--json"), root = g->rank == 0;
    Device *d = device_kind(r.device) == DEVICE_CPU ? NULL : r.device;
    const Lane lanes[] = {{"host", "intra", g->intra, NULL},
                          {"host", "inter", g->inter, NULL},
                          {"device", "intra", g->dev_intra, d},
                          {"device", "inter", g->dev_inter, d}};
    if (root && !json) print_head(&r);
    for (int i = 0; i < (d ? 4 : 2); i++)
      if (comm_size(lanes[i].comm) > 1)
        run_lane(g, &lanes[i], (size_t)args_int(a, "--largest"), json);
    if (root && !json) print_foot(g);
    if (comm_agree(g->all, root ? out_flush(err) : 0, err)) rc = CLI_FAILED;
  }
  bench_rig_close(&r);
  return rc;
}
