/* Comms over a device's memory, on a device that only keeps time: order, streams, the way through
 * the host.
 * ranks: 1 2 3 */
#include "kernels/cpu/comm.h"
#include "tests/sim_test.h"

static Grid *grid_of(void) {
  Error err = {""};
  Grid *g = grid_create(0, &err);
  if (!g) die("%s", err.msg);
  return g;
}

/* A Comm of all ranks over such a device. */
typedef struct Rig {
  Grid *grid;
  Sim sim;
  Comm *comm;
} Rig;

static void rig_open(Rig *r, const CommDeviceOps *ops, int tracks) {
  static int group;
  *r = (Rig){.grid = grid_of(), .sim = sim_create()};
  comm_device_open(&r->sim.base, ops, tracks);
  r->comm = comm_device_create(r->grid->all, "dev_all", &group);
  r->sim.exchange_seconds = 0.002;
}

static void rig_close(Rig *r) {
  comm_destroy(r->comm);
  comm_device_close(&r->sim.base);
  assert_int_equal(r->sim.events, 0);
  grid_free(r->grid);
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
  Rig r;
  rig_open(&r, &sim_ops, 1);
  Sim *s = &r.sim;
  Comm *c = r.comm;
  const int world = r.grid->world;
  size_t bytes[3] = {10, 10, 10};
  char x[30] = {0};
  assert_int_equal(comm_size(c), world);
  Place place = {s, STREAM_COMPUTE, 0.003};
  Traffic before = traffic_now();
  for (int queue = 0; queue < 2; queue++) {
    if (queue) comm_queue_start();
    double origin = s->now + 1;
    s->now = origin;
    bool behind = comm_queue_runs();
    CommTicket a = comm_start_all_gather(c, x, x, bytes);
    CommTicket b = comm_start_work(c, COLL_ALL_TO_ALL, note_stream, &place);
    CommTicket e = comm_start_all_to_all(c, x, bytes, x, bytes);
    assert_true(behind ? 0 < a && a < b && b < e : a == 0 && b == 0 && e == 0);
    assert_int_equal(place.stream, STREAM_COMM);
    assert_int_equal(s->current, STREAM_COMPUTE);
    assert_free_at(s, STREAM_COMM, origin + 0.007);
    if (behind) assert_true(s->free_at[STREAM_COMPUTE] <= origin);
    comm_wait(e);
    assert_free_at(s, STREAM_COMPUTE, origin + 0.007);
    comm_all_gather(c, x, x, bytes);
    assert_free_at(s, STREAM_COMPUTE, origin + 0.009);
  }
  comm_queue_stop();
  assert_int_equal(s->exchanges, 6);
  s->now += 1;
  TrafficCount sum = {0};
  for (int k = 0; k < COLL_KINDS; k++) {
    TrafficCount now = traffic_now().of[k], old = before.of[k];
    sum.calls += now.calls - old.calls;
    sum.intra_bytes += now.intra_bytes - old.intra_bytes;
    sum.seconds += now.seconds - old.seconds + now.hidden_seconds - old.hidden_seconds;
  }
  assert_true(fabs(sum.seconds - 2 * 0.009) < CLOSE);
  assert_int_equal(sum.calls, world > 1 ? 6 : 0);
  assert_int_equal(sum.intra_bytes, 6 * 10 * (world - 1));
  rig_close(&r);
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
  CommDeviceOps with_steps = sim_ops;
  with_steps.captured_bytes = thousand;
  Rig r;
  rig_open(&r, &with_steps, 1);
  Sim *s = &r.sim;
  Comm *c = r.comm;
  const int world = r.grid->world;
  size_t bytes[3] = {10, 10, 10};
  char x[30] = {0};
  assert_true(comm_captured_bytes(c) == (world > 1 ? 1000 : SIZE_MAX));
  TrafficCount before = gathers();
  s->base.capturing = true;
  for (int i = 0; i < 2; i++) assert_int_equal(comm_start_all_gather(c, x, x, bytes), 0);
  s->base.capturing = false;
  CommCaptured step = comm_device_captured();
  assert_int_equal(s->exchanges, 2);
  assert_true(s->free_at[STREAM_COMM] <= 0);
  assert_int_equal(gathers().calls, before.calls);
  assert_null(comm_device_captured().comm);
  assert_ptr_equal(step.comm, world > 1 ? c : NULL);
  for (int i = 0; i < 3 && step.comm; i++) {
    s->now = s->free_at[STREAM_COMPUTE] + 1;
    comm_device_launch(&step, launch_step, NULL);
    assert_int_equal(s->current, STREAM_COMPUTE);
    assert_free_at(s, STREAM_COMM, s->now + 0.004);
    assert_free_at(s, STREAM_COMPUTE, s->now + 0.004);
  }
  s->now += 1;
  int launches = step.comm ? 3 : 0;
  assert_int_equal(gathers().calls - before.calls, 2 * launches);
  assert_int_equal(gathers().intra_bytes - before.intra_bytes, 20 * launches * (world - 1));
  assert_counted(before, 0, 0);
  rig_close(&r);
}

/* All meet, the work is done, all meet again, as one ticket; where the transport has meetings. */
static void taking_is_between_two_meetings(void **state) {
  (void)state;
  Rig r;
  rig_open(&r, &sim_ops, 1);
  Sim *s = &r.sim;
  Comm *c = r.comm;
  comm_queue_start();
  assert_false(comm_can_take(c));
  assert_false(comm_can_take(r.grid->all));
  s->can_meet = true;
  assert_true(comm_can_take(c));
  s->meet_seconds = 0.001;
  sim_run(s, STREAM_COMPUTE, 0.002);
  TrafficCount before = gathers();
  TakingPlace place = {{s, STREAM_COMPUTE, 0.004}, 0};
  CommTicket t = comm_start_take(c, COLL_ALL_GATHER, note_meetings, &place);
  assert_int_equal(place.place.stream, STREAM_COMM);
  assert_int_equal(place.met, 1);
  assert_int_equal(s->meetings, 2);
  assert_free_at(s, STREAM_COMM, 0.008);
  comm_wait(t);
  if (!comm_queue_runs()) assert_int_equal(t, 0); /* one rank: it was waited for */
  assert_free_at(s, STREAM_COMPUTE, 0.008);
  s->now = 1;
  assert_counted(before, 0.006, 0);
  comm_queue_stop();
  rig_close(&r);
}

/* Chains take the tracks by turns; what is started in one stays on its track. */
static void chains_take_turns(void **state) {
  (void)state;
  size_t bytes[3] = {10, 10, 10};
  char x[30] = {0};
  for (int tracks = 1; tracks <= MAX_TRACKS; tracks++) {
    Rig r;
    rig_open(&r, &sim_ops, tracks);
    Comm *c = r.comm;
    comm_queue_start();
    Place place = {&r.sim, STREAM_COMPUTE, 0};
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
    r.sim.now += 1;
    rig_close(&r);
  }
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
    cmocka_unit_test(calls_run_on_the_communication_stream),
    cmocka_unit_test(captured_calls_are_launched_as_one),
    cmocka_unit_test(taking_is_between_two_meetings),
    cmocka_unit_test(chains_take_turns),
    cmocka_unit_test(a_device_may_go_first),
    cmocka_unit_test(without_a_transport_blocks_go_through_the_host),
    cmocka_unit_test(other_collectives_are_refused),
};
TEST_MAIN(tests)
