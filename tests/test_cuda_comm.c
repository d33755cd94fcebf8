/* Collectives over GPU memory: over NCCL where each rank has a GPU, through the host where they
 * share one; the same results, checked byte for byte, and the order of streams. Prints speeds.
 * ranks: 1 2 */
#include <math.h>
#include <stdio.h>

#include "kernels/kernels.h"
#include "tests/test.h"

enum { RANKS = 8 };

/* A failing rank must go on with the collectives, so failures are counted. */
static struct {
  Device *d;
  const Ops *ops;
  Grid *grid[RANKS + 1]; /* by ranks of a node; made once, since that takes a second */
  bool captures;         /* calls to come are captured, and launched three times */
  int failures;
} gpu;

static void check(bool ok, const char *what, const char *group, int64_t at) {
  if (ok) return;
  if (gpu.failures++ < 20)
    fprintf(stderr, "FAILED rank %d: %s over %s, at %lld\n", launch_rank(), what, group,
            (long long)at);
}

/* Opens the GPU for the whole program, or skips. */
static void need_gpu(void) {
  if (gpu.d) return;
  Error err = {""};
  gpu.d = device_open(DEVICE_CUDA, 1, &err);
  if (!gpu.d) {
    print_message("%s\n", err.msg);
    skip();
  }
  gpu.ops = device_ops(gpu.d);
  comm_set_timeout(30);
  if (launch_rank() == 0) print_message("%s\n", device_describe(gpu.d));
}

static void done(void) {
  int n = gpu.failures;
  gpu.failures = 0;
  if (n) fail_msg("rank %d: %d checks failed", launch_rank(), n);
}

static Grid *grid_of(int ranks_per_node) {
  Error err = {""};
  if (gpu.grid[ranks_per_node]) return gpu.grid[ranks_per_node];
  Grid *g = grid_create(ranks_per_node, &err);
  if (!g) die("%s", err.msg);
  if (grid_attach(g, gpu.d, &err)) die("%s", err.msg);
  gpu.grid[ranks_per_node] = g;
  return g;
}

static void free_grids(void) {
  for (int i = 0; i <= RANKS; i++) {
    grid_free(gpu.grid[i]);
    gpu.grid[i] = NULL;
  }
}

/* A check over all layouts and both groups, with and without the queue. */
static void for_each_group(void (*test)(Comm *c, const char *name)) {
  for (int local = 1; local <= launch_world(); local++) {
    if (launch_world() % local) continue;
    Grid *g = grid_of(local);
    for (int queue = 0; queue < 2; queue++) {
      if (queue) comm_queue_start();
      test(g->dev_intra, "dev_intra");
      test(g->dev_inter, "dev_inter");
      comm_queue_stop();
    }
  }
}

static void *to_gpu(const void *host, size_t bytes) {
  void *p = device_alloc(gpu.d, bytes + 1);
  device_upload(gpu.d, p, host, bytes);
  return p;
}

/* ---- results ---- */

static unsigned char byte_of(int from, int to, size_t i) {
  return (unsigned char)((size_t)from * 31 + (size_t)to * 7 + i * 13 + (i >> 8) + 1);
}

/* Counts of a round: equal, unequal, some zero, all zero; a few bytes and some megabytes, odd too.
 */
enum { ROUNDS = 9, LARGE_ROUND = 9 };
static size_t count_of(int round, int from, int to) {
  static const size_t equal[] = {1, 4096, ((size_t)3 << 20) + 5, 0};
  if (round < 4) return equal[round];
  if (round == 4) return 1 + (size_t)from * 3 + (size_t)to;
  if (round == 5) return from == 0 ? 0 : 1000;
  if (round == 6) return to == 0 ? 0 : (size_t)(77 + from);
  if (round == 7) return from == to ? 0 : ((size_t)1 << 20) + (size_t)from;
  if (round == 8) return ((size_t)2 << 20) + (size_t)(from * 4096 + to);
  return ((size_t)85 << 20) + (size_t)(from + 3 * to); /* more pieces than a box has slots */
}

/* What is received, `gap` bytes into a guarded buffer, so that rows need not be aligned. */
static void *guarded(size_t bytes) {
  void *p = device_alloc(gpu.d, bytes + 64);
  unsigned char *host = mem_alloc(bytes + 64, 1);
  memset(host, 0xee, bytes + 64);
  device_upload(gpu.d, p, host, bytes + 64);
  free(host);
  return p;
}

static void check_received(const char *what, const char *group, const void *p, int n,
                           const size_t *bytes, const int *to) {
  size_t total = 0, at = 0;
  for (int r = 0; r < n; r++) total += bytes[r];
  unsigned char *host = mem_alloc(total + 64, 1);
  device_download(gpu.d, host, p, total + 64);
  for (int r = 0; r < n; r++) {
    size_t i = 0;
    while (i < bytes[r] && host[at + i] == byte_of(r, to[r], i)) i++;
    check(i == bytes[r], what, group, (int64_t)(at + i));
    at += bytes[r];
  }
  for (int i = 0; i < 64; i++) check(host[total + (size_t)i] == 0xee, "a guard", group, i);
  free(host);
}

static bool capture_begins(void) { return gpu.captures && device_capture_begin(gpu.d); }

static void capture_ends(bool captured) {
  if (!captured) return;
  DeviceGraph *g = device_capture_end(gpu.d);
  for (int i = 0; i < 3; i++) device_graph_launch(gpu.d, g);
  device_sync(gpu.d);
  device_graph_free(gpu.d, g);
}

static void gather_round(Comm *c, const char *name, int round, bool in_place) {
  int n = comm_size(c), me = comm_rank(c), to[RANKS] = {0};
  size_t bytes[RANKS], before = 0, total = 0;
  for (int r = 0; r < n; r++) {
    bytes[r] = count_of(round, r, 1);
    if (r < me) before += bytes[r];
    total += bytes[r];
  }
  unsigned char *host = mem_alloc(bytes[me] + 1, 1);
  for (size_t i = 0; i < bytes[me]; i++) host[i] = byte_of(me, 0, i);
  char *all = guarded(total), *own = to_gpu(host, bytes[me]);
  if (in_place) device_copy(gpu.d, all + before, own, bytes[me]);
  bool captured = capture_begins();
  comm_wait(comm_start_all_gather(c, in_place ? all + before : own, all, bytes));
  capture_ends(captured);
  check_received(in_place ? "all-gather in place" : "all-gather", name, all, n, bytes, to);
  device_free(gpu.d, all);
  device_free(gpu.d, own);
  free(host);
}

static void all_to_all_round(Comm *c, const char *name, int round) {
  int n = comm_size(c), me = comm_rank(c), to[RANKS];
  size_t out[RANKS], in[RANKS], sent = 0, received = 0, at = 0;
  for (int r = 0; r < n; r++) {
    sent += out[r] = count_of(round, me, r);
    received += in[r] = count_of(round, r, me);
    to[r] = me;
  }
  unsigned char *host = mem_alloc(sent + 1, 1);
  for (int r = 0; r < n; r++)
    for (size_t i = 0; i < out[r]; i++) host[at++] = byte_of(me, r, i);
  char *send = to_gpu(host, sent), *recv = guarded(received);
  bool captured = capture_begins();
  comm_wait(comm_start_all_to_all(c, send, out, recv, in));
  capture_ends(captured);
  check_received("all-to-all", name, recv, n, in, to);
  device_free(gpu.d, send);
  device_free(gpu.d, recv);
  free(host);
}

static void check_results(Comm *c, const char *name) {
  for (int round = 0; round < ROUNDS; round++) {
    gather_round(c, name, round, false);
    gather_round(c, name, round, true);
    all_to_all_round(c, name, round);
  }
}

/* What a captured step exchanges, where one can. */
static void check_captured(Comm *c, const char *name) {
  if (comm_captured_bytes(c) < (size_t)4 << 20) return;
  gpu.captures = true;
  check_results(c, name);
  gpu.captures = false;
}

/* Twice, so that the ring goes on where it stopped. */
static void check_large(Comm *c, const char *name) {
  if (comm_size(c) == 1 || !comm_queue_runs()) return;
  for (int i = 0; i < 2; i++) {
    gather_round(c, name, LARGE_ROUND, true);
    all_to_all_round(c, name, LARGE_ROUND);
  }
}

static void large_blocks_too(void **state) {
  (void)state;
  need_gpu();
  for_each_group(check_large);
  done();
}

static void captured_calls_too(void **state) {
  (void)state;
  need_gpu();
  for_each_group(check_captured);
  done();
}

static void results_are_the_bytes_that_were_sent(void **state) {
  (void)state;
  need_gpu();
  for_each_group(check_results);
  done();
}

/* ---- order ---- */

enum { FLOATS = 1 << 16 };

static Tensor floats(void *p, int64_t n) { return tensor_1d(p, DT_F32, n); }

static void fill(void *p, int64_t n, float value) {
  float *host = mem_alloc((size_t)n, sizeof *host);
  for (int64_t i = 0; i < n; i++) host[i] = value;
  device_upload(gpu.d, p, host, (size_t)n * sizeof *host);
  free(host);
}

static void check_all(const char *what, const char *group, const void *p, int64_t n, float value) {
  float *host = mem_alloc((size_t)n, sizeof *host);
  device_download(gpu.d, host, p, (size_t)n * sizeof *host);
  int64_t i = 0;
  while (i < n && host[i] == value) i++;
  check(i == n, what, group, i);
  free(host);
}

/* Many in flight, more than the ring of tickets holds, on a few buffers in turn; each is made just
 * before its start and changed just after its wait. */
static void check_flights(Comm *c, const char *name) {
  enum { BUFFERS = 3, FLIGHTS = 300 };
  int n = comm_size(c), me = comm_rank(c);
  size_t bytes[RANKS] = {0};
  char *own[BUFFERS], *all[BUFFERS];
  CommTicket t[BUFFERS] = {0};
  for (int r = 0; r < n; r++) bytes[r] = FLOATS * sizeof(float);
  for (int b = 0; b < BUFFERS; b++) {
    own[b] = device_alloc(gpu.d, bytes[0]);
    all[b] = device_alloc(gpu.d, bytes[0] * (size_t)n);
    fill(own[b], FLOATS, (float)(me + 1));
  }
  char *sum = device_alloc(gpu.d, bytes[0]);
  fill(sum, FLOATS, 0);
  for (int i = 0; i < FLIGHTS + BUFFERS; i++) {
    int b = i % BUFFERS;
    if (i >= BUFFERS) {
      comm_wait(t[b]);
      for (int r = 0; r < n; r++)
        gpu.ops->axpy(gpu.d, 1, floats(all[b] + (size_t)r * bytes[0], FLOATS), floats(sum, FLOATS));
      device_zero(gpu.d, all[b], bytes[0] * (size_t)n);
    }
    if (i >= FLIGHTS) continue;
    t[b] = comm_start_all_gather(c, own[b], all[b], bytes);
  }
  /* Whole numbers below 2^24: exact. */
  check_all("the sum of many all-gathers", name, sum, FLOATS,
            (float)FLIGHTS * (float)(n * (n + 1)) / 2);
  for (int b = 0; b < BUFFERS; b++) {
    device_free(gpu.d, own[b]);
    device_free(gpu.d, all[b]);
  }
  /* Nobody waits for these; the ring goes round. */
  for (int i = 0; i < 300; i++) comm_start_all_gather(c, sum, sum, (size_t[RANKS]){0});
  device_free(gpu.d, sum);
}

static void many_in_flight(void **state) {
  (void)state;
  need_gpu();
  for_each_group(check_flights);
  done();
}

/* In the queue, between two all-to-alls: doubles what the first brought. */
typedef struct Doubling {
  Tensor in;
} Doubling;
static void work_double(void *arg) {
  Doubling *w = arg;
  gpu.ops->scale(gpu.d, 2, w->in);
}

static void check_work(Comm *c, const char *name) {
  int n = comm_size(c), me = comm_rank(c);
  size_t bytes[RANKS], block = FLOATS * sizeof(float);
  for (int r = 0; r < n; r++) bytes[r] = block;
  char *a = device_alloc(gpu.d, block * (size_t)n), *b = device_alloc(gpu.d, block * (size_t)n);
  for (int r = 0; r < n; r++) fill(a + (size_t)r * block, FLOATS, (float)(me + 10 * r + 1));
  Doubling w = {floats(b, (int64_t)FLOATS * n)};
  const int hops = 8;
  for (int i = 0; i < hops; i++) { /* there and back: every block returns, four times as large */
    gpu.ops->scale(gpu.d, 1, floats(a, (int64_t)FLOATS * n));
    comm_start_all_to_all(c, a, bytes, b, bytes);
    comm_start_work(c, COLL_ALL_TO_ALL, work_double, &w);
    comm_start_all_to_all(c, b, bytes, a, bytes);
    Doubling back = {floats(a, (int64_t)FLOATS * n)};
    comm_wait(comm_start_work(c, COLL_ALL_TO_ALL, work_double, &back));
  }
  for (int r = 0; r < n; r++)
    check_all("work between hops", name, a + (size_t)r * block, FLOATS,
              (float)(me + 10 * r + 1) * ldexpf(1, 2 * hops));
  device_free(gpu.d, a);
  device_free(gpu.d, b);
}

static void work_keeps_its_place(void **state) {
  (void)state;
  need_gpu();
  for_each_group(check_work);
  done();
}

/* ---- out of each other's memory ---- */

typedef struct Taking {
  char *of_rank[RANKS], *taken; /* [ranks] blocks */
  int ranks, me;
  size_t block;
} Taking;

static void take_all(void *arg) {
  const Taking *t = arg;
  for (int r = 0; r < t->ranks; r++)
    if (r != t->me) device_copy(gpu.d, t->taken + (size_t)r * t->block, t->of_rank[r], t->block);
}

/* Drivers map whole blocks of 2 MiB. */
static bool map_all(Taking *t, Comm *host) {
  char handle[DEVICE_HANDLE_BYTES] = {0}, all[RANKS * DEVICE_HANDLE_BYTES];
  size_t bytes[RANKS];
  double missing = 0;
  for (int r = 0; r < t->ranks; r++) bytes[r] = DEVICE_HANDLE_BYTES;
  t->of_rank[t->me] = device_alloc(gpu.d, (size_t)2 << 20);
  missing += !device_export(gpu.d, t->of_rank[t->me], handle);
  comm_all_gather(host, handle, all, bytes);
  comm_all_reduce_f64(host, &missing, 1, true);
  for (int r = 0; r < t->ranks && missing == 0; r++) {
    if (r == t->me) continue;
    t->of_rank[r] = device_import(gpu.d, all + r * DEVICE_HANDLE_BYTES);
    if (!t->of_rank[r]) die("memory of rank %d is exported, and cannot be imported", r);
  }
  return missing == 0;
}

static void unmap_all(Taking *t, Comm *host) {
  device_sync(gpu.d);
  comm_barrier(host);
  for (int r = 0; r < t->ranks; r++)
    if (r != t->me) device_unimport(gpu.d, t->of_rank[r]);
  comm_barrier(host);
  device_free(gpu.d, t->of_rank[t->me]);
}

static void compute(char *m);

/* What is taken is what lay there when its rank came, and a rank may change it once the ticket is
 * waited for: each is late by turns, and all count on at once. */
static void check_taking(Comm *c, const char *name) {
  enum { TURNS = 120, LATE = 8 };
  if (!comm_can_take(c)) return;
  Comm *host = grid_of(comm_size(c))->intra;
  Taking t = {.ranks = comm_size(c), .me = comm_rank(c), .block = FLOATS * sizeof(float)};
  size_t all = t.block * (size_t)t.ranks;
  char *one = device_alloc(gpu.d, t.block), *sum = device_alloc(gpu.d, all),
       *m = device_alloc(gpu.d, (size_t)4096 * 4096 * 12);
  t.taken = device_alloc(gpu.d, all);
  device_zero(gpu.d, sum, all);
  device_zero(gpu.d, t.taken, all);
  device_zero(gpu.d, m, (size_t)4096 * 4096 * 12);
  fill(one, FLOATS, 1);
  bool mapped = map_all(&t, host);
  fill(t.of_rank[t.me], FLOATS, (float)(1000 * t.me));
  for (int i = 0; i < TURNS && mapped; i++) {
    if (i / LATE % t.ranks == t.me && i % LATE < 2) compute(m);
    gpu.ops->axpy(gpu.d, 1, floats(one, FLOATS), floats(t.of_rank[t.me], FLOATS));
    comm_wait(comm_start_take(c, COLL_ALL_GATHER, take_all, &t));
    gpu.ops->axpy(gpu.d, 1, floats(t.taken, (int64_t)FLOATS * t.ranks),
                  floats(sum, (int64_t)FLOATS * t.ranks));
  }
  for (int r = 0; r < t.ranks && mapped; r++)
    if (r != t.me) /* whole numbers below 2^24: exact */
      check_all("what was taken", name, sum + (size_t)r * t.block, FLOATS,
                (float)(1000 * TURNS * r) + 0.5F * TURNS * (TURNS + 1));
  unmap_all(&t, host);
  for (char **p = (char *[]){one, sum, m, t.taken, NULL}; *p; p++) device_free(gpu.d, *p);
}

static void memory_of_others_is_taken(void **state) {
  (void)state;
  need_gpu();
  for_each_group(check_taking);
  done();
}

/* ---- bytes and seconds ---- */

static TrafficCount gathers(void) { return traffic_now().of[COLL_ALL_GATHER]; }

static TrafficCount since(TrafficCount b) {
  TrafficCount n = gathers();
  return (TrafficCount){n.calls - b.calls, n.intra_bytes - b.intra_bytes,
                        n.inter_bytes - b.inter_bytes, n.seconds - b.seconds,
                        n.hidden_seconds - b.hidden_seconds};
}

/* A product of 4096^3 in F32. */
static void compute(char *m) {
  enum { SIDE = 4096 };
  const size_t each = (size_t)SIDE * SIDE * sizeof(float);
  Tensor a = tensor_2d(m, DT_F32, SIDE, SIDE), b = tensor_2d(m + each, DT_F32, SIDE, SIDE),
         y = tensor_2d(m + 2 * each, DT_F32, SIDE, SIDE);
  gpu.ops->gemm(gpu.d, GEMM_NT, 1, a, b, 0, y);
}

/* Gathers behind products, and the same waited for at once. */
static void overlap_on(Comm *c, const char *name, bool other_nodes) {
  enum { GATHERS = 8 };
  int n = comm_size(c);
  size_t bytes[RANKS], block = (size_t)64 << 20;
  for (int r = 0; r < n; r++) bytes[r] = block;
  char *m = device_alloc(gpu.d, (size_t)4096 * 4096 * 12), *own = device_alloc(gpu.d, block),
       *all = device_alloc(gpu.d, block * (size_t)n);
  device_zero(gpu.d, m, (size_t)4096 * 4096 * 12);
  device_zero(gpu.d, own, block);
  double wall[3];
  TrafficCount count[3];
  CommTicket ticket = 0;
  for (int mode = -1; mode < 3; mode++) { /* warm up; products; gathers; both */
    device_sync(gpu.d);
    TrafficCount before = gathers();
    double start = clock_seconds();
    for (int i = 0; i < GATHERS; i++) {
      if (mode != 0) ticket = comm_start_all_gather(c, own, all, bytes);
      if (mode != 1) compute(m);
      if (mode != 0) comm_wait(ticket);
    }
    device_sync(gpu.d);
    if (mode < 0) continue;
    wall[mode] = clock_seconds() - start;
    count[mode] = since(before);
  }
  uint64_t received = (uint64_t)GATHERS * (uint64_t)(n - 1) * block;
  for (int mode = 1; mode < 3; mode++) {
    TrafficCount k = count[mode];
    check(k.calls == (n > 1 ? GATHERS : 0), "calls are counted", name, (int64_t)k.calls);
    check((other_nodes ? k.inter_bytes : k.intra_bytes) == received, "bytes are counted", name,
          (int64_t)(k.inter_bytes + k.intra_bytes));
    check((other_nodes ? k.intra_bytes : k.inter_bytes) == 0, "by link", name, mode);
    check(k.seconds + k.hidden_seconds < 1.05 * wall[mode] + 1e-3, "not more than the time", name,
          mode);
  }
  if (launch_rank() == 0 && n > 1)
    print_message(
        "       %s of %d: products %.3f ms, gathers %.3f ms (exposed %.3f, hidden %.3f), "
        "both %.3f ms (exposed %.3f, hidden %.3f); %.1f GB/s received\n",
        name, n, 1e3 * wall[0], 1e3 * wall[1], 1e3 * count[1].seconds,
        1e3 * count[1].hidden_seconds, 1e3 * wall[2], 1e3 * count[2].seconds,
        1e3 * count[2].hidden_seconds, 1e-9 * (double)received / wall[1]);
  if (n > 1) {
    /* The host queues a wait some 50 us after the start, so a little of each may hide. */
    check(count[1].hidden_seconds < 0.5 * count[1].seconds + GATHERS * 200e-6, "waiting is exposed",
          name, 0);
    /* Staged collectives hide nothing. Over NCCL at least half of the gathers' time must hide:
     * a product is far longer than a gather over NVLink, and over sockets as long at most. */
    if (count[2].hidden_seconds > 0 && wall[0] > wall[1])
      check(count[2].hidden_seconds > count[2].seconds, "compute hides", name, 0);
  }
  device_free(gpu.d, m);
  device_free(gpu.d, own);
  device_free(gpu.d, all);
}

static void seconds_are_told_apart(void **state) {
  (void)state;
  need_gpu();
  for (int local = 1; local <= launch_world(); local++) {
    if (launch_world() % local) continue;
    Grid *g = grid_of(local);
    comm_queue_start();
    overlap_on(g->dev_intra, "dev_intra", false);
    overlap_on(g->dev_inter, "dev_inter", true);
    comm_queue_stop();
  }
  done();
}

/* ---- speed of small calls ---- */

static void speed_of(Comm *c, const char *name) {
  if (comm_size(c) == 1) return;
  size_t bytes[RANKS];
  for (int r = 0; r < comm_size(c); r++) bytes[r] = 4096;
  char *own = device_alloc(gpu.d, 4096), *all = device_alloc(gpu.d, 4096 * RANKS),
       *out = device_alloc(gpu.d, 4096 * RANKS);
  enum { CALLS = 200 };
  for (int i = 0; i < 5; i++) comm_wait(comm_start_all_gather(c, own, all, bytes));
  device_sync(gpu.d);
  double start = clock_seconds();
  for (int i = 0; i < CALLS; i++) comm_wait(comm_start_all_gather(c, own, all, bytes));
  double host = clock_seconds() - start;
  device_sync(gpu.d);
  double whole = clock_seconds() - start;
  start = clock_seconds();
  for (int i = 0; i < CALLS; i++) comm_wait(comm_start_all_to_all(c, out, bytes, all, bytes));
  device_sync(gpu.d);
  double other = clock_seconds() - start;
  if (launch_rank() == 0)
    print_message(
        "       %s, 4 KiB: %.1f us a gather, %.1f us of it the host's; %.1f us an "
        "all-to-all\n",
        name, 1e6 * whole / CALLS, 1e6 * host / CALLS, 1e6 * other / CALLS);
  device_free(gpu.d, own);
  device_free(gpu.d, all);
  device_free(gpu.d, out);
}

static void small_calls_are_timed(void **state) {
  (void)state;
  need_gpu();
  for_each_group(speed_of);
  done();
}

/* ---- ends ---- */

static void device_and_grid_close_in_either_order(void **state) {
  (void)state;
  need_gpu();
  size_t one[RANKS];
  for (int r = 0; r < RANKS; r++) one[r] = 1;
  for (int first = 0; first < 2; first++) {
    Grid *g = grid_of(launch_world());
    char *x = device_alloc(gpu.d, RANKS);
    comm_queue_start();
    comm_start_all_gather(g->dev_intra, x, x + 1, one); /* nobody waits for it */
    comm_queue_stop();
    device_free(gpu.d, x);
    if (first) free_grids();
    device_close(gpu.d);
    if (!first) free_grids();
    gpu.d = NULL;
    need_gpu();
  }
  device_close(gpu.d);
  gpu.d = NULL;
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(results_are_the_bytes_that_were_sent),
    cmocka_unit_test(captured_calls_too),
    cmocka_unit_test(large_blocks_too),
    cmocka_unit_test(many_in_flight),
    cmocka_unit_test(work_keeps_its_place),
    cmocka_unit_test(memory_of_others_is_taken),
    cmocka_unit_test(seconds_are_told_apart),
    cmocka_unit_test(small_calls_are_timed),
    cmocka_unit_test(device_and_grid_close_in_either_order),
};
TEST_MAIN(tests)
