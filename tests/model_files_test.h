/* What the tests of saved folders share. */
#ifndef MODEL_FILES_TEST_H
#define MODEL_FILES_TEST_H

#include "tests/model_test.h"

/* A name below the test program's folder; in rotation, so that one call may hold several. */
static inline const char *place(const char *name) {
  static char path[4][512];
  static int turn;
  char *p = path[turn++ % 4];
  snprintf(p, sizeof path[0], "%s/files-%s", test_tmp(), name);
  return p;
}

static const SaveOptions as_f32 = {.dtype = DT_F32, .kind = STATE_MASTER};

static inline void save(Model *m, const char *dir, const SaveOptions *o) {
  Error err = {""};
  if (model_save(m, dir, o, &err)) fail_msg("%s", err.msg);
}

static inline Model *load(Bench *b, const char *dir, HeadKind head) {
  Error err = {""};
  ModelOptions o = tiny_options(head);
  Model *m = model_load(b->device, b->grid, b->arena, dir, &o, &err);
  if (!m) fail_msg("%s", err.msg);
  return m;
}

/* Same grid, same table: shards are the same ranges. */
static inline void assert_same_weights(Model *a, Model *b, DType through) {
  assert_int_equal(zeropp_n_params(model_zero(a)), zeropp_n_params(model_zero(b)));
  for (int p = 0; p < zeropp_n_params(model_zero(a)); p++) {
    int64_t start, count, start_b, count_b;
    const float *x = zeropp_shard(model_zero(a), STATE_MASTER, p, &start, &count);
    const float *y = zeropp_shard(model_zero(b), STATE_MASTER, p, &start_b, &count_b);
    assert_true(start == start_b && count == count_b);
    for (int64_t i = 0; i < count; i++) {
      float rounded = 0;
      uint64_t raw = 0;
      convert_from_f32(&x[i], &raw, through, 1);
      convert_to_f32(&raw, through, &rounded, 1);
      assert_true(y[i] == rounded);
    }
  }
}

#endif
