/* What is checked of a device that only keeps time. */
#ifndef SIM_TEST_H
#define SIM_TEST_H

#include "tests/sim_device.h"
#include "tests/test.h"

/* Sums of a few multiples of 1 ms in double. */
static const double CLOSE = 1e-9;

static inline Sim sim_create(void) { return (Sim){.own_clock = true}; }

static inline void assert_free_at(const Sim *s, DeviceStream stream, double seconds) {
  assert_true(fabs(s->free_at[stream] - seconds) < CLOSE);
}

static inline TrafficCount gathers(void) { return traffic_now().of[COLL_ALL_GATHER]; }

/* What was counted of gathers since `before`. */
static inline void assert_counted(TrafficCount before, double exposed, double hidden) {
  TrafficCount now = gathers();
  assert_true(fabs(now.seconds - before.seconds - exposed) < CLOSE);
  assert_true(fabs(now.hidden_seconds - before.hidden_seconds - hidden) < CLOSE);
}

#endif
