/* Launcher and collectives on several ranks: every value exact, every byte counted.
 * ranks: 1 2 3 4 */
#include <math.h>
#include <stdio.h>

#include "kernels/cpu/comm.h"
#include "kernels/kernels.h"
#include "tests/test.h"

enum { MAX_RANKS = 8 };

static Grid *grid_of(int ranks_per_node) {
  Error err = {""};
  Grid *g = grid_create(ranks_per_node, &err);
  if (!g) die("%s", err.msg);
  return g;
}

/* Runs a check over every way to part the ranks into nodes, and over each of the three groups. */
static void for_each_comm(void (*check)(Comm *c)) {
  for (int local = 1; local <= launch_world(); local++) {
    if (launch_world() % local) continue;
    Grid *g = grid_of(local);
    check(g->all);
    check(g->intra);
    check(g->inter);
    grid_free(g);
  }
}

static void grid_is_nodes_by_local(void **state) {
  (void)state;
  Error err = {""};
  int world = launch_world();
  for (int local = 1; local <= world + 1; local++) {
    Grid *g = grid_create(local, &err);
    if (world % local) {
      assert_null(g);
      assert_non_null(strstr(err.msg, "do not divide"));
      continue;
    }
    assert_non_null(g);
    assert_int_equal(g->world, world);
    assert_int_equal(g->rank, launch_rank());
    assert_int_equal(g->nodes * g->local, world);
    assert_int_equal(g->rank, g->node * g->local + g->local_rank);
    assert_int_equal(comm_size(g->all), world);
    assert_int_equal(comm_rank(g->all), g->rank);
    assert_int_equal(comm_size(g->intra), g->local);
    assert_int_equal(comm_rank(g->intra), g->local_rank);
    assert_int_equal(comm_size(g->inter), g->nodes);
    assert_int_equal(comm_rank(g->inter), g->node);
    grid_free(g);
  }
  assert_null(grid_create(-1, &err));
  Grid *g = grid_of(0); /* the test's ranks all run on one host */
  assert_int_equal(g->nodes, 1);
  assert_int_equal(launch_host_ranks(), world);
  assert_in_range(launch_core_ranks(), 1, world);
  grid_free(g);
}

/* Bytes of block `b` of rank r: every byte tells who it came from. */
static unsigned char byte_of(int from, int to, size_t i) {
  return (unsigned char)(31 * from + 7 * to + (int)(i % 97));
}

static size_t block_bytes(int from, int to) { /* zero for some pairs, odd for others */
  return (size_t)((from * 5 + to * 3) % 4) * 13;
}

static void check_all_gather(Comm *c) {
  int n = comm_size(c), me = comm_rank(c);
  size_t bytes[MAX_RANKS], total = 0, before = 0;
  unsigned char send[256], recv[2048], in_place[2048];
  for (int r = 0; r < n; r++) {
    bytes[r] = block_bytes(r, 1);
    if (r < me) before += bytes[r];
    total += bytes[r];
  }
  for (size_t i = 0; i < bytes[me]; i++) send[i] = byte_of(me, 0, i);
  memset(recv, 0xee, sizeof recv);
  memset(in_place, 0xee, sizeof in_place);
  memcpy(in_place + before, send, bytes[me]);
  comm_all_gather(c, send, recv, bytes);
  comm_all_gather(c, in_place + before, in_place, bytes);
  size_t at = 0;
  for (int r = 0; r < n; r++)
    for (size_t i = 0; i < bytes[r]; i++) assert_int_equal(recv[at++], byte_of(r, 0, i));
  assert_memory_equal(recv, in_place, total);
  assert_int_equal(recv[total], 0xee);
  assert_int_equal(in_place[total], 0xee);
}

static void all_gather_concatenates(void **state) {
  (void)state;
  for_each_comm(check_all_gather);
}

static void check_all_to_all(Comm *c) {
  int n = comm_size(c), me = comm_rank(c);
  size_t out[MAX_RANKS], in[MAX_RANKS], at = 0;
  unsigned char send[2048], recv[2048];
  memset(recv, 0xee, sizeof recv);
  for (int r = 0; r < n; r++) {
    out[r] = block_bytes(me, r);
    in[r] = block_bytes(r, me);
    for (size_t i = 0; i < out[r]; i++) send[at++] = byte_of(me, r, i);
  }
  comm_all_to_all(c, send, out, recv, in);
  at = 0;
  for (int r = 0; r < n; r++)
    for (size_t i = 0; i < in[r]; i++) assert_int_equal(recv[at++], byte_of(r, me, i));
  assert_int_equal(recv[at], 0xee);
}

static void all_to_all_delivers(void **state) {
  (void)state;
  for_each_comm(check_all_to_all);
}

/* Terms whose fp32 sum depends on the order: 1e8 swallows a 3, and later goes away. */
static float term(int rank, int64_t i) {
  static const float large[] = {3.0f, 1e8f, -1e8f, 0.7f, 1e8f, 5.0f, -1e8f, 0.1f};
  return large[(rank + (int)(i % 3)) % 8] + 0.25f * (float)(i % 5);
}

static void check_reduce_scatter(Comm *c) {
  int n = comm_size(c), me = comm_rank(c);
  size_t count[MAX_RANKS], total = 0, before = 0;
  float send[256], sent[256], recv[128];
  for (int r = 0; r < n; r++) {
    count[r] = (size_t)((r * 2 + 1) % 4) * 7 * (r != 1); /* rank 1 owns nothing */
    if (r < me) before += count[r];
    total += count[r];
  }
  for (size_t i = 0; i < total; i++) send[i] = term(me, (int64_t)i);
  memcpy(sent, send, sizeof send);
  recv[count[me]] = 42;
  comm_reduce_scatter_f32(c, send, recv, count);
  for (size_t i = 0; i < count[me]; i++) {
    volatile float sum = term(0, (int64_t)(before + i)); /* volatile: rounded to fp32 each time */
    for (int r = 1; r < n; r++) sum = sum + term(r, (int64_t)(before + i));
    assert_memory_equal(&recv[i], (const void *)&sum, sizeof sum);
  }
  assert_true(recv[count[me]] == 42);
  assert_memory_equal(send, sent, sizeof send);
}

static void reduce_scatter_sums_in_rank_order(void **state) {
  (void)state;
  for_each_comm(check_reduce_scatter);
}

static void check_all_reduce(Comm *c) {
  int n = comm_size(c), me = comm_rank(c);
  static const double terms[] = {1e16, 3, -1e16, 0.7};
  double x[3] = {terms[me % 4], me, -me}, sum = terms[0];
  for (int r = 1; r < n; r++) sum += terms[r % 4];
  comm_all_reduce_f64(c, x, 3, false);
  assert_true(x[0] == sum);
  assert_true(2 * x[1] == n * (n - 1));
  assert_true(2 * x[2] == -n * (n - 1));
  double y[2] = {me == n / 2 ? 9 : -me, -1 - me};
  comm_all_reduce_f64(c, y, 2, true);
  assert_true(y[0] == 9 && y[1] == -1);
  for (int bad = 0; bad < n; bad++) { /* one rank's NaN or Inf is everybody's */
    double z[2] = {me == bad ? NAN : 1e300, me == bad ? INFINITY : 0};
    double m = me == bad ? NAN : 5.0 + me;
    comm_all_reduce_f64(c, z, 2, false);
    comm_all_reduce_f64(c, &m, 1, true);
    assert_true(isnan(z[0]) && isinf(z[1]) && isnan(m));
  }
  comm_all_reduce_f64(c, NULL, 0, false);
}

static void all_reduce_sums_and_maximises(void **state) {
  (void)state;
  for_each_comm(check_all_reduce);
}

static void check_broadcast(Comm *c) {
  for (int root = 0; root < comm_size(c); root++) {
    char text[24] = "";
    if (comm_rank(c) == root) snprintf(text, sizeof text, "from rank %d", root);
    comm_broadcast(c, text, sizeof text, root);
    char expected[24];
    snprintf(expected, sizeof expected, "from rank %d", root);
    assert_string_equal(text, expected);
    comm_broadcast(c, NULL, 0, root);
  }
}

static void broadcast_from_every_root(void **state) {
  (void)state;
  for_each_comm(check_broadcast);
}

static void check_long(Comm *c) { /* as a block beyond 2^31 bytes does with the real limit */
  for (size_t limit = 1; limit <= 16; limit += 5) {
    c->message_bytes = limit;
    check_all_gather(c);
    check_all_to_all(c);
    check_reduce_scatter(c);
    check_all_reduce(c);
  }
}

static void long_blocks_go_in_several_messages(void **state) {
  (void)state;
  for_each_comm(check_long);
}

static TrafficCount difference(Traffic a, Traffic b, CollKind k) {
  return (TrafficCount){b.of[k].calls - a.of[k].calls, b.of[k].intra_bytes - a.of[k].intra_bytes,
                        b.of[k].inter_bytes - a.of[k].inter_bytes,
                        b.of[k].seconds - a.of[k].seconds,
                        b.of[k].hidden_seconds - a.of[k].hidden_seconds};
}

static void assert_count(TrafficCount t, uint64_t calls, uint64_t intra, uint64_t inter) {
  assert_int_equal(t.calls, calls);
  assert_int_equal(t.intra_bytes, intra);
  assert_int_equal(t.inter_bytes, inter);
  assert_true(calls ? t.seconds > 0 && t.seconds < 60 : t.seconds == 0);
}

static void check_traffic(Grid *g) {
  uint64_t near = (uint64_t)g->local - 1, far = (uint64_t)(g->world - g->local);
  uint64_t some = g->world > 1;
  size_t bytes[MAX_RANKS], counts[MAX_RANKS];
  char buffer[MAX_RANKS * 40] = {0};
  float send[MAX_RANKS * 10] = {0}, recv[10];
  double x[5] = {0};
  for (int r = 0; r < g->world; r++) bytes[r] = 40, counts[r] = 10;
  Traffic t0 = traffic_now();
  comm_all_gather(g->all, buffer + 40 * g->rank, buffer, bytes);
  comm_reduce_scatter_f32(g->all, send, recv, counts);
  comm_all_to_all(g->all, send, bytes, buffer, bytes);
  comm_all_reduce_f64(g->all, x, 5, false);
  comm_broadcast(g->all, buffer, 17, 0);
  comm_barrier(g->all);
  comm_barrier(g->all);
  Traffic t1 = traffic_now();
  assert_count(difference(t0, t1, COLL_ALL_GATHER), some, 40 * near, 40 * far);
  assert_count(difference(t0, t1, COLL_REDUCE_SCATTER), some, 40 * near, 40 * far);
  assert_count(difference(t0, t1, COLL_ALL_TO_ALL), some, 40 * near, 40 * far);
  assert_count(difference(t0, t1, COLL_ALL_REDUCE), some, 40 * near, 40 * far);
  assert_count(difference(t0, t1, COLL_BROADCAST), some, g->rank && g->node == 0 ? 17 : 0,
               g->node > 0 ? 17 : 0);
  assert_count(difference(t0, t1, COLL_BARRIER), 2 * some, 0, 0);
  comm_all_gather(g->intra, buffer + 40 * g->local_rank, buffer, bytes);
  Traffic t2 = traffic_now();
  assert_count(difference(t1, t2, COLL_ALL_GATHER), g->local > 1, 40 * near, 0);
  comm_all_gather(g->inter, buffer + 40 * g->node, buffer, bytes);
  Traffic t3 = traffic_now();
  assert_count(difference(t2, t3, COLL_ALL_GATHER), g->nodes > 1, 0, 40 * ((uint64_t)g->nodes - 1));
}

static void traffic_counts_what_was_received(void **state) {
  (void)state;
  for (int local = 1; local <= launch_world(); local++) {
    if (launch_world() % local) continue;
    Grid *g = grid_of(local);
    check_traffic(g);
    grid_free(g);
  }
  for (int k = 0; k < COLL_KINDS; k++) assert_true(strlen(coll_name((CollKind)k)) > 0);
}

static void check_agree(Comm *c) {
  int n = comm_size(c), me = comm_rank(c);
  for (int first = 0; first <= n; first++) { /* ranks >= first fail; first == n: none does */
    Error err = {"before"};
    bool fails = me >= first;
    if (fails) error_set(&err, "rank %d: no such file", me);
    int rc = comm_agree(c, fails ? -1 : 0, &err);
    char expected[64];
    snprintf(expected, sizeof expected, "rank %d: no such file", first);
    assert_int_equal(rc, first < n ? -1 : 0);
    assert_string_equal(err.msg, first < n ? expected : "before");
    assert_int_equal(comm_agree(c, fails ? -1 : 3, NULL), first < n ? -1 : 0);
  }
}

static void agreement_takes_the_lowest_rank(void **state) {
  (void)state;
  for_each_comm(check_agree);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(grid_is_nodes_by_local),
    cmocka_unit_test(all_gather_concatenates),
    cmocka_unit_test(all_to_all_delivers),
    cmocka_unit_test(reduce_scatter_sums_in_rank_order),
    cmocka_unit_test(all_reduce_sums_and_maximises),
    cmocka_unit_test(broadcast_from_every_root),
    cmocka_unit_test(long_blocks_go_in_several_messages),
    cmocka_unit_test(traffic_counts_what_was_received),
    cmocka_unit_test(agreement_takes_the_lowest_rank),
};
TEST_MAIN(tests)
