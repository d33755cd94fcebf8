/* Tickets of a device's communication streams, on a device that only keeps time: what waits for
 * what, what is exposed and what is hidden, and the ring. */
#include "kernels/cpu/comm.h"
#include "tests/sim_test.h"

static Tickets *tickets_of(Sim *s) { return tickets_create(&s->base, &sim_ops); }

static CommTicket start_on(Sim *s, Tickets *q, int track, double seconds) {
  CommTicket t = tickets_start(q, (TicketLabel){COLL_ALL_GATHER, NULL, 100, false}, track);
  sim_run(s, track ? STREAM_COMM2 : STREAM_COMM, seconds);
  tickets_end(q, t);
  return t;
}

static CommTicket start(Sim *s, Tickets *q, double seconds) { return start_on(s, q, 0, seconds); }

static void streams_wait_for_each_other(void **state) {
  (void)state;
  Sim s = sim_create();
  Tickets *q = tickets_of(&s);
  sim_run(&s, STREAM_COMPUTE, 0.004); /* what is sent is made */
  CommTicket a = start(&s, q, 0.010);
  assert_free_at(&s, STREAM_COMM, 0.014);
  sim_run(&s, STREAM_COMPUTE, 0.001);
  CommTicket b = start(&s, q, 0.010); /* behind the first */
  assert_free_at(&s, STREAM_COMM, 0.024);
  assert_free_at(&s, STREAM_COMPUTE, 0.005); /* nobody has waited yet */
  tickets_wait(q, a);
  assert_free_at(&s, STREAM_COMPUTE, 0.014);
  tickets_wait(q, b);
  assert_free_at(&s, STREAM_COMPUTE, 0.024);
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
  assert_free_at(&s, STREAM_COMPUTE, 0.010);
  tickets_wait(q, c); /* not for d */
  assert_free_at(&s, STREAM_COMPUTE, 0.012);
  sim_run(&s, STREAM_COMPUTE, 0.001);
  tickets_wait(q, d);
  assert_free_at(&s, STREAM_COMPUTE, 0.017);
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

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(streams_wait_for_each_other),
    cmocka_unit_test(waiting_is_exposed_and_working_hides),
    cmocka_unit_test(compute_that_is_not_there_yet_does_not_wait),
    cmocka_unit_test(tracks_run_side_by_side),
    cmocka_unit_test(the_ring_goes_round),
    cmocka_unit_test(the_oldest_is_known),
};
TEST_MAIN(tests)
