/* What the zeropp tests share: a small model of awkward sizes, and values that tell where they
 * belong. */
#ifndef ZEROPP_TEST_H
#define ZEROPP_TEST_H

#include <stdio.h>

#include "tests/test.h"
#include "zeropp/zeropp.h"

enum { TEST_PARAMS = 17, TEST_UNITS = 4 };

/* Fewer rows than ranks, rows that do not divide, vectors of one element, joined groups. */
static const struct {
  const char *name;
  int unit, ndim;
  int64_t rows, width;
  bool joined;
} test_shapes[TEST_PARAMS] = {
    {"embed.weight", 0, 2, 7, 6, false},   {"0.norm.weight", 1, 1, 6, 1, false},
    {"0.q.weight", 1, 2, 5, 6, false},     {"0.k.weight", 1, 2, 3, 6, true},
    {"0.v.weight", 1, 2, 3, 6, true},      {"0.q.bias", 1, 1, 5, 1, false},
    {"0.k.bias", 1, 1, 3, 1, true},        {"0.v.bias", 1, 1, 3, 1, true},
    {"0.o.weight", 1, 2, 6, 5, false},     {"0.gate.weight", 1, 2, 9, 6, false},
    {"0.up.weight", 1, 2, 9, 6, true},     {"0.down.weight", 1, 2, 6, 9, false},
    {"1.norm.weight", 2, 1, 37, 1, false}, {"1.o.weight", 2, 2, 64, 24, false},
    {"norm.weight", 3, 1, 6, 1, false},    {"score.weight", 3, 2, 1, 6, false},
    {"score.bias", 3, 1, 1, 1, false},
};

typedef struct TestModel {
  Device *device;
  Grid *grid;
  ZeroPP *z;
} TestModel;

static inline void test_specs(ParamSpec *specs) {
  for (int p = 0; p < TEST_PARAMS; p++) {
    specs[p] = (ParamSpec){.unit = test_shapes[p].unit,
                           .ndim = test_shapes[p].ndim,
                           .dim = {test_shapes[p].rows, test_shapes[p].width},
                           .decay = test_shapes[p].ndim == 2,
                           .joined = test_shapes[p].joined,
                           .init = test_shapes[p].ndim == 2 ? INIT_NORMAL : INIT_ONES,
                           .init_std = 0.5f};
    snprintf(specs[p].name, sizeof specs[p].name, "%s", test_shapes[p].name);
  }
}

static inline TestModel test_model_of(int ranks_per_node, ZeroPPConfig cfg) {
  Error err = {""};
  ParamSpec specs[TEST_PARAMS];
  TestModel m;
  test_specs(specs);
  m.device = device_open(DEVICE_CPU, 1, &err);
  if (!m.device) die("%s", err.msg);
  m.grid = grid_create(ranks_per_node, &err);
  if (!m.grid) die("%s", err.msg);
  m.z = zeropp_create(m.device, m.grid, &cfg, specs, TEST_PARAMS);
  return m;
}

static inline TestModel test_model(int ranks_per_node, bool trainable) {
  return test_model_of(ranks_per_node, (ZeroPPConfig){.stage = 3, .trainable = trainable});
}

static inline void test_model_free(TestModel *m) {
  zeropp_destroy(m->z);
  if (device_bytes(m->device)) die("%zu bytes were not given back", device_bytes(m->device));
  grid_free(m->grid);
  device_close(m->device);
}

/* Every switch alone and together. Blocks are small, so that the test model's rows have several. */
typedef struct TestMode {
  const char *name;
  ZeroPPConfig cfg;
} TestMode;
#define MODE(...)                                                \
  {                                                              \
#__VA_ARGS__, { .trainable = true, .block = 4, __VA_ARGS__ } \
  }
#define QWZ .qwz = WIRE_INT8
#define QGZ .qgz = WIRE_INT4
#define NODE .accumulate_node = true
#define BF16 .wire = WIRE_BF16
#define DELTA .refresh = REFRESH_DELTA, .refresh_check = 1
#define AUTO .refresh = REFRESH_AUTO, .refresh_check = 1, .scale = DT_BF16
#define FEEDBACK .error_feedback = true, .error_decay = 0.5
static const TestMode test_modes[] = {
    MODE(.stage = 3),
    MODE(.stage = 3, BF16),
    MODE(.stage = 3, QWZ),
    MODE(.stage = 3, .qwz = WIRE_FP8, .scale = DT_BF16, BF16),
    MODE(.stage = 3, .hpz = HPZ_ON),
    MODE(.stage = 3, .hpz = HPZ_ON, BF16),
    MODE(.stage = 3, .hpz = HPZ_ON, QWZ),
    MODE(.stage = 3, .hpz = HPZ_ON, QWZ, BF16),
    MODE(.stage = 3, .hpz = HPZ_QUANTIZED, QWZ),
    MODE(.stage = 3, QGZ),
    MODE(.stage = 3, .qgz = WIRE_INT8, .scale = DT_BF16),
    MODE(.stage = 3, NODE),
    MODE(.stage = 3, QGZ, NODE),
    MODE(.stage = 3, .hpz = HPZ_ON, QGZ),
    MODE(.stage = 3, .hpz = HPZ_ON, QWZ, QGZ, BF16),
    MODE(.stage = 3, .hpz = HPZ_QUANTIZED, QWZ, QGZ, BF16, NODE),
    MODE(.stage = 3, .hpz = HPZ_ON, QWZ, QGZ, BF16, NODE, FEEDBACK),
    MODE(.stage = 3, .hpz = HPZ_ON, QWZ, QGZ, BF16, FEEDBACK, .error_reset = 3),
    MODE(.stage = 3, .hpz = HPZ_ON, BF16, DELTA),
    MODE(.stage = 3, .hpz = HPZ_ON, BF16, DELTA, QGZ, NODE),
    MODE(.stage = 3, .hpz = HPZ_ON, QWZ, BF16, AUTO),
    MODE(.stage = 0),
    MODE(.stage = 0, BF16),
    MODE(.stage = 1),
    MODE(.stage = 1, BF16),
    MODE(.stage = 1, QWZ, QGZ),
    MODE(.stage = 2),
    MODE(.stage = 2, QWZ, QGZ, NODE),
};
enum { TEST_MODES = sizeof test_modes / sizeof *test_modes };

/* Runs a check over every way to part the ranks into nodes. */
static inline void for_each_grid(void (*check)(int ranks_per_node)) {
  for (int local = 1; local <= launch_world(); local++)
    if (launch_world() % local == 0) check(local);
}

static const TestMode *mode; /* of the running check */

static inline void for_each_mode(void (*check)(int ranks_per_node)) {
  for (int i = 0; i < TEST_MODES; i++) {
    mode = &test_modes[i];
    for_each_grid(check);
  }
}

#define check_true(what)                                              \
  do {                                                                \
    if (!(what)) die("mode %s: %s does not hold", mode->name, #what); \
  } while (0)

/* A value of its own for each kind, parameter and element; exact in fp32. */
static inline float test_value(int kind, int param, int64_t i) {
  return (float)(kind * 1000000 + param * 10000 + (int)i) / 64.0f;
}

static inline void test_fill(ZeroPP *z, StateKind kind) {
  for (int p = 0; p < zeropp_n_params(z); p++) {
    int64_t start, count;
    float *x = zeropp_shard(z, kind, p, &start, &count);
    for (int64_t i = 0; i < count; i++) x[i] = test_value((int)kind, p, start + i);
  }
  if (kind == STATE_MASTER) zeropp_weights_written(z);
}

/* Bytes that entered this rank from other nodes. */
static inline uint64_t test_crossed(void) {
  uint64_t bytes = 0;
  Traffic t = traffic_now();
  for (int k = 0; k < COLL_KINDS; k++) bytes += t.of[k].inter_bytes;
  return bytes;
}

#endif
