/* Tickets of a device's communication streams, on a device that only keeps time: what waits for
 * what, what is exposed and what is hidden, and the ring. And the Comms over them: order, streams,
 * the way through the host.
 * ranks: 1 2 3 */
#include <stdio.h>

#include "kernels/cpu/comm.h"
#include "tests/sim_device.h"
#include "tests/test.h"

/* Sums of a few multiples of 1 ms in double. */
static const double CLOSE = 1e-9;

static Sim sim_create(void) { return (Sim){.own_clock = true}; }

static Tickets *tickets_of(Sim *s) { return tickets_create(&s->base, &sim_ops); }

static CommTicket start_on(Sim *s, Tickets *q, int track, double seconds) {
  CommTicket t = tickets_start(q, (TicketLabel){COLL_ALL_GATHER, NULL, 100, false}, track);
  sim_run(s, track ? STREAM_COMM2 : STREAM_COMM, seconds);
  tickets_end(q, t);
  return t;
}

static CommTicket start(Sim *s, Tickets *q, double seconds) { return start_on(s, q, 0, seconds); }

static TrafficCount gathers(void) { return traffic_now().of[COLL_ALL_GATHER]; }

/* What was counted since `before`. */
static void assert_counted(TrafficCount before, double exposed, double hidden) {
  TrafficCount now = gathers();
  assert_true(fabs(now.seconds - before.seconds - exposed) < CLOSE);
  assert_true(fabs(now.hidden_seconds - before.hidden_seconds - hidden) < CLOSE);
}

static void streams_wait_for_each_other(void **state) {
  (void)state;
  Sim s = sim_create();
  Tickets *q = tickets_of(&s);
  sim_run(&s, STREAM_COMPUTE, 0.004); /* what is sent is made */
  CommTicket a = start(&s, q, 0.010);
  assert_true(fabs(s.free_at[STREAM_COMM] - 0.014) < CLOSE);
  sim_run(&s, STREAM_COMPUTE, 0.001);
  CommTicket b = start(&s, q, 0.010); /* behind the first */
  assert_true(fabs(s.free_at[STREAM_COMM] - 0.024) < CLOSE);
  assert_true(fabs(s.free_at[STREAM_COMPUTE] - 0.005) < CLOSE); /* nobody has waited yet */
  tickets_wait(q, a);
  assert_true(fabs(s.free_at[STREAM_COMPUTE] - 0.014) < CLOSE);
  tickets_wait(q, b);
  assert_true(fabs(s.free_at[STREAM_COMPUTE] - 0.024) < CLOSE);
  tickets_wait(q, a); /* long done: nothing is queued */
  s.now = 1;
  tickets_drain(q);
  tickets_free(q);
  assert_int_equal(s.events, 0);
}

static void waiting_is_exposed_and_working_hides(void **state) {
  (void)state;
  Sim s = sim_create();
  Tickets *q = tickets_of(&s);
  TrafficCount before = gathers();
  CommTicket a = start(&s, q, 0.005);
  sim_run(&s, STREAM_COMPUTE, 0.003);
  tickets_wait(q, a);
  tickets_count(q); /* not done yet */
  assert_counted(before, 0, 0);
  s.now = 0.1;
  tickets_count(q);
  assert_counted(before, 0.002, 0.003);
  tickets_count(q); /* once */
  assert_counted(before, 0.002, 0.003);

  before = gathers(); /* done, but compute may still come to wait for it */
  a = start(&s, q, 0.005);
  s.now += 1;
  tickets_count(q);
  assert_counted(before, 0, 0);
  tickets_wait(q, a);
  tickets_count(q);
  assert_counted(before, 0, 0.005);

  before = gathers(); /* two, of which the second is waited for from 6 ms on: it takes 4 to 8 */
  double origin = s.now;
  start(&s, q, 0.004);
  CommTicket b = start(&s, q, 0.004);
  sim_run(&s, STREAM_COMPUTE, 0.006);
  tickets_wait(q, b);
  s.now = origin + 1;
  tickets_count(q);
  assert_counted(before, 0.002, 0.006);

  before = gathers(); /* from 1 ms on: 3 of the first, all of the second */
  origin = s.now;
  start(&s, q, 0.004);
  b = start(&s, q, 0.004);
  sim_run(&s, STREAM_COMPUTE, 0.001);
  tickets_wait(q, b);
  s.now = origin + 1;
  tickets_count(q);
  assert_counted(before, 0.007, 0.001);
  tickets_free(q);
}

/* The collective is done, and the compute stream has not even come to the wait. */
static void compute_that_is_not_there_yet_does_not_wait(void **state) {
  (void)state;
  Sim s = sim_create();
  Tickets *q = tickets_of(&s);
  TrafficCount before = gathers();
  CommTicket a = start(&s, q, 0.005);
  sim_run(&s, STREAM_COMPUTE, 0.050);
  tickets_wait(q, a);
  s.now = 0.010;
  tickets_count(q);
  assert_counted(before, 0, 0.005);
  s.now = 0.1;
  tickets_count(q);
  assert_counted(before, 0, 0.005);
  tickets_free(q);
}

/* Two tracks: side by side, a wait is for both, and time that they share counts once. */
static void tracks_run_side_by_side(void **state) {
  (void)state;
  Sim s = sim_create();
  Tickets *q = tickets_of(&s);
  TrafficCount before = gathers();
  CommTicket a = start_on(&s, q, 0, 0.010);
  CommTicket b = start_on(&s, q, 1, 0.004);
  CommTicket c = start_on(&s, q, 1, 0.008); /* to 12 ms */
  CommTicket d = start_on(&s, q, 0, 0.007); /* to 17 ms */
  assert_true(a < b && b < c && c < d);
  sim_run(&s, STREAM_COMPUTE, 0.003);
  tickets_wait(q, b); /* and for a */
  assert_true(fabs(s.free_at[STREAM_COMPUTE] - 0.010) < CLOSE);
  tickets_wait(q, c); /* not for d */
  assert_true(fabs(s.free_at[STREAM_COMPUTE] - 0.012) < CLOSE);
  sim_run(&s, STREAM_COMPUTE, 0.001);
  tickets_wait(q, d);
  assert_true(fabs(s.free_at[STREAM_COMPUTE] - 0.017) < CLOSE);
  s.now = 1;
  tickets_drain(q);
  /* Exposed: 3 to 12 and 13 to 17. */
  assert_counted(before, 0.013, 0.004);
  tickets_free(q);
}

/* More than the ring holds, few of them waited for: the host waits for room only. */
static void the_ring_goes_round(void **state) {
  (void)state;
  enum { N = 3 * MAX_TICKETS + 7 };
  Sim s = sim_create();
  s.tick = 5e-4;
  Tickets *q = tickets_of(&s);
  TrafficCount before = gathers();
  for (CommTicket i = 1; i <= N; i++) {
    assert_int_equal(start(&s, q, 0.001), i);
    if (i % 50 == 0) tickets_wait(q, i - 20);
  }
  tickets_wait(q, 1); /* its slot has been used again twice */
  tickets_drain(q);
  TrafficCount now = gathers();
  double all = now.seconds - before.seconds + now.hidden_seconds - before.hidden_seconds;
  assert_true(fabs(all - 0.001 * N) < N * CLOSE);
  assert_true(now.seconds > before.seconds);
  assert_int_equal(s.events, 4 * MAX_TICKETS);
  tickets_free(q);
  assert_int_equal(s.events, 0);
}

static void the_oldest_is_known(void **state) {
  (void)state;
  Sim s = sim_create();
  Tickets *q = tickets_of(&s);
  CommTicket t;
  TicketLabel label;
  bool runs;
  assert_false(tickets_oldest(q, &t, &label, &runs));
  sim_run(&s, STREAM_COMPUTE, 0.004);
  start(&s, q, 0.002);
  start(&s, q, 0.002);
  assert_true(tickets_oldest(q, &t, &label, &runs));
  assert_true(t == 1 && !runs && label.bytes == 100);
  s.now = 0.005;
  assert_true(tickets_oldest(q, &t, &label, &runs) && t == 1 && runs);
  s.now = 0.007;
  assert_true(tickets_oldest(q, &t, &label, &runs) && t == 2 && runs);
  s.now = 0.009;
  assert_false(tickets_oldest(q, &t, &label, &runs));
  /* Started, and its host is still busy queueing it. */
  CommTicket open = tickets_start(q, (TicketLabel){COLL_ALL_TO_ALL, NULL, 7, false}, 0);
  s.now = 1;
  assert_true(tickets_oldest(q, &t, &label, &runs) && t == open && runs);
  tickets_end(q, open);
  tickets_free(q);
}

/* ---- Comms ---- */

static Grid *grid_of(void) {
  Error err = {""};
  Grid *g = grid_create(0, &err);
  if (!g) die("%s", err.msg);
  return g;
}

typedef struct Place {
  Sim *sim;
  DeviceStream stream;
  double seconds;
} Place;
static void note_stream(void *arg) {
  Place *p = arg;
  p->stream = p->sim->current;
  sim_run(p->sim, p->sim->current, p->seconds);
}

/* And how many meetings there were before it. */
typedef struct TakingPlace {
  Place place;
  int met;
} TakingPlace;
static void note_meetings(void *arg) {
  TakingPlace *p = arg;
  p->met = p->place.sim->meetings;
  note_stream(&p->place);
}

/* Calls go to the communication stream, one after another, and a start that nobody may leave
 * behind (no queue runs) makes compute wait. */
static void calls_run_on_the_communication_stream(void **state) {
  (void)state;
  Grid *g = grid_of();
  Sim s = sim_create();
  int group;
  size_t bytes[3] = {10, 10, 10};
  char x[30] = {0};
  comm_device_open(&s.base, &sim_ops, 1);
  Comm *c = comm_device_create(g->all, "dev_all", &group);
  assert_int_equal(comm_size(c), g->world);
  s.exchange_seconds = 0.002;
  Place place = {&s, STREAM_COMPUTE, 0.003};
  Traffic before = traffic_now();
  for (int queue = 0; queue < 2; queue++) {
    if (queue) comm_queue_start();
    double origin = s.now + 1;
    s.now = origin;
    bool behind = comm_queue_runs();
    CommTicket a = comm_start_all_gather(c, x, x, bytes);
    CommTicket b = comm_start_work(c, COLL_ALL_TO_ALL, note_stream, &place);
    CommTicket e = comm_start_all_to_all(c, x, bytes, x, bytes);
    assert_true(behind ? 0 < a && a < b && b < e : a == 0 && b == 0 && e == 0);
    assert_int_equal(place.stream, STREAM_COMM);
    assert_int_equal(s.current, STREAM_COMPUTE);
    assert_true(fabs(s.free_at[STREAM_COMM] - origin - 0.007) < CLOSE);
    if (behind) assert_true(s.free_at[STREAM_COMPUTE] <= origin);
    comm_wait(e);
    assert_true(fabs(s.free_at[STREAM_COMPUTE] - origin - 0.007) < CLOSE);
    comm_all_gather(c, x, x, bytes);
    assert_true(fabs(s.free_at[STREAM_COMPUTE] - origin - 0.009) < CLOSE);
  }
  comm_queue_stop();
  assert_int_equal(s.exchanges, 6);
  s.now += 1;
  TrafficCount sum = {0};
  for (int k = 0; k < COLL_KINDS; k++) {
    TrafficCount now = traffic_now().of[k], old = before.of[k];
    sum.calls += now.calls - old.calls;
    sum.intra_bytes += now.intra_bytes - old.intra_bytes;
    sum.seconds += now.seconds - old.seconds + now.hidden_seconds - old.hidden_seconds;
  }
  assert_true(fabs(sum.seconds - 2 * 0.009) < CLOSE);
  assert_int_equal(sum.calls, g->world > 1 ? 6 : 0);
  assert_int_equal(sum.intra_bytes, 6 * 10 * (g->world - 1));
  comm_destroy(c);
  comm_device_close(&s.base);
  assert_int_equal(s.events, 0);
  grid_free(g);
}

static size_t thousand(Device *d, void *group) {
  (void)d, (void)group;
  return 1000;
}

static void launch_step(Device *d, void *graph) {
  (void)graph;
  sim_run(sim_of(d), sim_of(d)->current, 0.004);
}

/* What is called while a step is captured goes to compute and is counted at each launch, which is
 * one ticket of its own: its bytes, not its seconds. */
static void captured_calls_are_launched_as_one(void **state) {
  (void)state;
  Grid *g = grid_of();
  Sim s = sim_create();
  CommDeviceOps with_steps = sim_ops;
  int group;
  size_t bytes[3] = {10, 10, 10};
  char x[30] = {0};
  with_steps.captured_bytes = thousand;
  comm_device_open(&s.base, &with_steps, 1);
  Comm *c = comm_device_create(g->all, "dev_all", &group);
  s.exchange_seconds = 0.002;
  assert_true(comm_captured_bytes(c) == (g->world > 1 ? 1000 : SIZE_MAX));
  TrafficCount before = gathers();
  s.base.capturing = true;
  for (int i = 0; i < 2; i++) assert_int_equal(comm_start_all_gather(c, x, x, bytes), 0);
  s.base.capturing = false;
  CommCaptured step = comm_device_captured();
  assert_int_equal(s.exchanges, 2);
  assert_true(s.free_at[STREAM_COMM] <= 0);
  assert_int_equal(gathers().calls, before.calls);
  assert_null(comm_device_captured().comm);
  assert_ptr_equal(step.comm, g->world > 1 ? c : NULL);
  for (int i = 0; i < 3 && step.comm; i++) {
    s.now = s.free_at[STREAM_COMPUTE] + 1;
    comm_device_launch(&step, launch_step, NULL);
    assert_int_equal(s.current, STREAM_COMPUTE);
    assert_true(fabs(s.free_at[STREAM_COMM] - s.now - 0.004) < CLOSE);
    assert_true(fabs(s.free_at[STREAM_COMPUTE] - s.now - 0.004) < CLOSE);
  }
  s.now += 1;
  int launches = step.comm ? 3 : 0;
  assert_int_equal(gathers().calls - before.calls, 2 * launches);
  assert_int_equal(gathers().intra_bytes - before.intra_bytes, 20 * launches * (g->world - 1));
  assert_counted(before, 0, 0);
  comm_destroy(c);
  comm_device_close(&s.base);
  grid_free(g);
}

/* All meet, the work is done, all meet again, as one ticket; where the transport has meetings. */
static void taking_is_between_two_meetings(void **state) {
  (void)state;
  Grid *g = grid_of();
  Sim s = sim_create();
  int group;
  comm_device_open(&s.base, &sim_ops, 1);
  Comm *c = comm_device_create(g->all, "dev_all", &group);
  comm_queue_start();
  assert_false(comm_can_take(c));
  assert_false(comm_can_take(g->all));
  s.can_meet = true;
  assert_true(comm_can_take(c));
  s.meet_seconds = 0.001;
  sim_run(&s, STREAM_COMPUTE, 0.002);
  TrafficCount before = gathers();
  TakingPlace place = {{&s, STREAM_COMPUTE, 0.004}, 0};
  CommTicket t = comm_start_take(c, COLL_ALL_GATHER, note_meetings, &place);
  assert_int_equal(place.place.stream, STREAM_COMM);
  assert_int_equal(place.met, 1);
  assert_int_equal(s.meetings, 2);
  assert_true(fabs(s.free_at[STREAM_COMM] - 0.008) < CLOSE);
  comm_wait(t);
  if (!comm_queue_runs()) assert_int_equal(t, 0); /* one rank: it was waited for */
  assert_true(fabs(s.free_at[STREAM_COMPUTE] - 0.008) < CLOSE);
  s.now = 1;
  assert_counted(before, 0.006, 0);
  comm_queue_stop();
  comm_destroy(c);
  comm_device_close(&s.base);
  grid_free(g);
}

/* Chains take the tracks by turns; what is started in one stays on its track. */
static void chains_take_turns(void **state) {
  (void)state;
  Grid *g = grid_of();
  Sim s = sim_create();
  int group;
  size_t bytes[3] = {10, 10, 10};
  char x[30] = {0};
  for (int tracks = 1; tracks <= MAX_TRACKS; tracks++) {
    comm_device_open(&s.base, &sim_ops, tracks);
    Comm *c = comm_device_create(g->all, "dev_all", &group);
    comm_queue_start();
    Place place = {&s, STREAM_COMPUTE, 0};
    int used[1 + MAX_TRACKS] = {0};
    for (int chain = 0; chain < 4; chain++) {
      comm_new_chain();
      comm_start_work(c, COLL_ALL_TO_ALL, note_stream, &place);
      DeviceStream first = place.stream;
      comm_start_all_gather(c, x, x, bytes);
      comm_wait(comm_start_work(c, COLL_ALL_TO_ALL, note_stream, &place));
      assert_int_equal(place.stream, first);
      used[first]++;
    }
    for (int k = 0; k < tracks; k++) assert_int_equal(used[STREAM_COMM + k], 4 / tracks);
    comm_queue_stop();
    comm_destroy(c);
    s.now += 1;
    comm_device_close(&s.base);
  }
  grid_free(g);
}

static void a_device_may_go_first(void **state) {
  (void)state;
  Grid *g = grid_of();
  Sim s = sim_create();
  int group;
  size_t bytes[3] = {0};
  for (int round = 0; round < 2; round++) {
    s.tick = 1e-3;
    comm_device_open(&s.base, &sim_ops, 1);
    Comm *c = comm_device_create(g->all, "dev_all", &group);
    s.exchange_seconds = 0.002;
    comm_start_all_gather(c, NULL, NULL, bytes);
    comm_device_close(&s.base); /* waits for what is under way */
    assert_int_equal(s.events, 0);
    comm_destroy(c);
  }
  grid_free(g);
}

/* ---- through the host: the CPU is the device ---- */

enum { MOST = 5 };
static unsigned char byte_of(int from, int to, int i) {
  return (unsigned char)(from * 31 + to * 7 + i + 1);
}
static size_t block_bytes(int from, int to) { return (size_t)((from * 3 + to * 5) % MOST); }

static void check_gather(Comm *c, bool in_place) {
  unsigned char all[3 * MOST], own[MOST];
  size_t bytes[3], before = 0, total = 0;
  int n = comm_size(c), me = comm_rank(c);
  for (int r = 0; r < n; r++) {
    if (r == me) before = total;
    total += bytes[r] = block_bytes(r, 1);
  }
  memset(all, 0xee, sizeof all);
  unsigned char *send = in_place ? all + before : own;
  for (int i = 0; i < (int)bytes[me]; i++) send[i] = byte_of(me, 0, i);
  comm_wait(comm_start_all_gather(c, send, all, bytes));
  size_t at = 0;
  for (int r = 0; r < n; r++)
    for (int i = 0; i < (int)bytes[r]; i++) assert_int_equal(all[at++], byte_of(r, 0, i));
  assert_true(total == sizeof all || all[total] == 0xee);
}

static void check_all_to_all(Comm *c) {
  unsigned char out[3 * MOST], in[3 * MOST];
  size_t to[3], from[3], at = 0;
  int n = comm_size(c), me = comm_rank(c);
  for (int r = 0; r < n; r++) {
    to[r] = block_bytes(me, r);
    from[r] = block_bytes(r, me);
    for (int i = 0; i < (int)to[r]; i++) out[at++] = byte_of(me, r, i);
  }
  comm_all_to_all(c, out, to, in, from);
  at = 0;
  for (int r = 0; r < n; r++)
    for (int i = 0; i < (int)from[r]; i++) assert_int_equal(in[at++], byte_of(r, me, i));
}

static void without_a_transport_blocks_go_through_the_host(void **state) {
  (void)state;
  Grid *g = grid_of();
  Error err = {""};
  Device *d = device_open(DEVICE_CPU, 1, &err);
  assert_non_null(d);
  comm_device_open(d, &sim_ops, 0);
  Comm *c = comm_device_create(g->all, "dev_all", NULL);
  TrafficCount before = gathers();
  for (int queue = 0; queue < 2; queue++) {
    if (queue) comm_queue_start();
    check_gather(c, false);
    check_gather(c, true);
    check_all_to_all(c);
  }
  comm_queue_stop();
  TrafficCount now = gathers();
  size_t received = 0;
  for (int r = 0; r < g->world; r++) received += r == g->rank ? 0 : block_bytes(r, 1);
  assert_int_equal(now.intra_bytes - before.intra_bytes, 4 * received);
  comm_device_close(d);
  comm_destroy(c);
  device_close(d);
  grid_free(g);
}

static void reduce_over_device_memory(void *arg) {
  float x = 1, y;
  size_t one[3] = {1, 1, 1};
  comm_reduce_scatter_f32(arg, &x, &y, one);
}

static void other_collectives_are_refused(void **state) {
  (void)state;
  if (launch_world() > 1) skip(); /* the child that dies would end them all */
  Grid *g = grid_of();
  Sim s = sim_create();
  comm_device_open(&s.base, &sim_ops, 0);
  Comm *c = comm_device_create(g->all, "dev_all", NULL);
  const char *said = test_death(reduce_over_device_memory, c);
  assert_non_null(strstr(said, "reduce-scatter over group 'dev_all'"));
  comm_destroy(c);
  comm_device_close(&s.base);
  grid_free(g);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(streams_wait_for_each_other),
    cmocka_unit_test(waiting_is_exposed_and_working_hides),
    cmocka_unit_test(compute_that_is_not_there_yet_does_not_wait),
    cmocka_unit_test(tracks_run_side_by_side),
    cmocka_unit_test(the_ring_goes_round),
    cmocka_unit_test(the_oldest_is_known),
    cmocka_unit_test(calls_run_on_the_communication_stream),
    cmocka_unit_test(captured_calls_are_launched_as_one),
    cmocka_unit_test(taking_is_between_two_meetings),
    cmocka_unit_test(chains_take_turns),
    cmocka_unit_test(a_device_may_go_first),
    cmocka_unit_test(without_a_transport_blocks_go_through_the_host),
    cmocka_unit_test(other_collectives_are_refused),
};
TEST_MAIN(tests)
