/* Training state in a file. A file that one writer laid out with full tensors is the meeting point:
 * every number of ranks must write these very bytes and read them back, so what 4 ranks save, 1, 2
 * and 3 load bit for bit.
 * ranks: 1 2 3 4 */
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "core/fs.h"
#include "tests/test.h"
#include "tests/zeropp_test.h"
#include "zeropp/zeropp.h"

static const StateKind saved[] = {STATE_MASTER, STATE_MOMENT1, STATE_MOMENT2, STATE_EMA};
static const char *const saved_name[] = {"master", "moment1", "moment2", "ema"};

typedef struct Defect {
  int without;    /* parameter left out, or -1 */
  int reshaped;   /* parameter with one row more, or -1 */
  DType dtype;    /* of the tensors */
  int32_t format; /* of the counters */
  bool no_counters, extra;
} Defect;

static const Defect sound = {.without = -1, .reshaped = -1, .dtype = DT_F32, .format = 1};

static void put_tensor(StWriter *w, int index, int kind, int p, int64_t numel) {
  static float x[4096];
  for (int64_t i = 0; i < numel; i++) x[i] = test_value(kind, p, i);
  assert_int_equal(stw_write_f32(w, index, 0, numel, x, NULL), 0);
}

/* Rank 0 writes a whole state file by itself: kinds 0 .. n_kinds. */
static void write_reference(const char *path, int n_kinds, int32_t steps, Defect d) {
  static int index[4][TEST_PARAMS];
  StWriter *w = stw_begin(path);
  int counters = d.no_counters ? -1 : stw_add(w, "zeropp/counters", DT_I32, 1, (int64_t[]){2});
  for (int k = 0; k < n_kinds; k++)
    for (int p = 0; p < TEST_PARAMS; p++) {
      char name[128];
      int64_t dim[2] = {test_shapes[p].rows + (p == d.reshaped), test_shapes[p].width};
      snprintf(name, sizeof name, "%s/%s", saved_name[k], test_shapes[p].name);
      index[k][p] = p == d.without ? -1 : stw_add(w, name, d.dtype, test_shapes[p].ndim, dim);
    }
  if (d.extra) stw_add(w, "master/visitor", DT_F32, 1, (int64_t[]){1});
  assert_int_equal(stw_create(w, NULL), 0);
  assert_int_equal(stw_open(w, NULL), 0);
  if (counters >= 0)
    assert_int_equal(stw_write_i32(w, counters, 0, 2, (int32_t[]){d.format, steps}, NULL), 0);
  for (int k = 0; k < n_kinds; k++)
    for (int p = 0; p < TEST_PARAMS; p++)
      if (index[k][p] >= 0)
        put_tensor(w, index[k][p], (int)saved[k], p, test_shapes[p].rows * test_shapes[p].width);
  assert_int_equal(stw_close(w, NULL), 0);
}

static char *tmp_file(const char *name) { return fs_join(test_tmp(), name); }

static void reference_from_root(const TestModel *m, const char *path, int n_kinds, int32_t steps,
                                Defect d) {
  if (m->grid->rank == 0) write_reference(path, n_kinds, steps, d);
  comm_barrier(m->grid->all);
}

static void assert_state(ZeroPP *z, int n_kinds) {
  for (int k = 0; k < n_kinds; k++)
    for (int p = 0; p < TEST_PARAMS; p++) {
      int64_t start, count;
      const float *x = zeropp_shard(z, saved[k], p, &start, &count);
      for (int64_t i = 0; i < count; i++)
        assert_true(x[i] == test_value((int)saved[k], p, start + i));
    }
}

static void check_load(int local) {
  char *path = tmp_file("reference");
  TestModel m = test_model(local, true), frozen = test_model(local, false);
  Error err = {""};
  reference_from_root(&m, path, 3, 41, sound);
  if (zeropp_load_state(m.z, path, &err)) die("%s", err.msg);
  assert_state(m.z, 3);
  assert_int_equal(zeropp_steps(m.z), 41);
  assert_true(zeropp_version(m.z) > 0);
  zeropp_gather_all(m.z); /* the loaded weights are the ones that are gathered */
  assert_true(tensor_f32(zeropp_weight(m.z, 3))[17] == test_value(STATE_MASTER, 3, 17));
  zeropp_release_all(m.z);
  comm_barrier(m.grid->all);
  reference_from_root(&m, path, 4, 7, sound);
  zeropp_ema_enable(m.z);
  if (zeropp_load_state(m.z, path, &err)) die("%s", err.msg);
  assert_state(m.z, 4);
  assert_int_equal(zeropp_steps(m.z), 7);
  comm_barrier(m.grid->all);
  reference_from_root(&m, path, 1, 0, sound);
  if (zeropp_load_state(frozen.z, path, &err)) die("%s", err.msg);
  assert_state(frozen.z, 1);
  comm_barrier(m.grid->all);
  test_model_free(&m);
  test_model_free(&frozen);
  free(path);
}

static void any_ranks_load_full_tensors(void **state) {
  (void)state;
  for_each_grid(check_load);
}

static void assert_same_file(const char *a, const char *b) {
  size_t a_len, b_len;
  char *x = fs_read(a, &a_len, NULL), *y = fs_read(b, &b_len, NULL);
  assert_non_null(x);
  assert_non_null(y);
  assert_int_equal(a_len, b_len);
  assert_memory_equal(x, y, a_len);
  free(x);
  free(y);
}

static void check_save(int local) {
  char *ours = tmp_file("ours"), *theirs = tmp_file("theirs");
  TestModel m = test_model(local, true);
  Error err = {""};
  for (int n_kinds = 3; n_kinds <= 4; n_kinds++) {
    if (n_kinds == 4) zeropp_ema_enable(m.z);
    for (int k = 0; k < n_kinds; k++) test_fill(m.z, saved[k]);
    reference_from_root(&m, theirs, n_kinds, 0, sound);
    if (zeropp_save_state(m.z, ours, &err)) die("%s", err.msg);
    assert_same_file(ours, theirs);
    comm_barrier(m.grid->all);
  }
  test_model_free(&m);
  free(ours);
  free(theirs);
}

static void any_ranks_write_the_same_bytes(void **state) {
  (void)state;
  for_each_grid(check_save);
}

static void train(ZeroPP *z, int from, int to) {
  const AdamW adam = {
      .lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f};
  for (int step = from; step < to; step++) {
    for (int p = 0; p < TEST_PARAMS; p++) {
      int64_t start, count;
      float *g = zeropp_shard(z, STATE_GRAD, p, &start, &count);
      for (int64_t i = 0; i < count; i++)
        g[i] = 0.01f * (float)((p + step * 7 + (int)(start + i)) % 13 - 6);
    }
    assert_false(zeropp_step(z, adam, 1).skipped);
    zeropp_ema_update(z, 0.9f);
  }
}

/* Five steps straight, and three steps, a new process's worth of everything, two steps. */
static void check_resume(int local) {
  char *path = tmp_file("resume");
  TestModel a = test_model(local, true), b = test_model(local, true);
  Error err = {""};
  zeropp_init_random(a.z, 5);
  zeropp_ema_enable(a.z);
  train(a.z, 0, 3);
  if (zeropp_save_state(a.z, path, &err)) die("%s", err.msg);
  train(a.z, 3, 5);
  zeropp_ema_enable(b.z);
  if (zeropp_load_state(b.z, path, &err)) die("%s", err.msg);
  train(b.z, 3, 5);
  assert_int_equal(zeropp_steps(a.z), zeropp_steps(b.z));
  for (int k = 0; k < 4; k++)
    for (int p = 0; p < TEST_PARAMS; p++) {
      int64_t start, count;
      const float *x = zeropp_shard(a.z, saved[k], p, &start, &count);
      const float *y = zeropp_shard(b.z, saved[k], p, &start, &count);
      if (count) assert_memory_equal(x, y, (size_t)count * 4);
    }
  test_model_free(&a);
  test_model_free(&b);
  free(path);
}

static void a_resumed_run_has_the_same_bits(void **state) {
  (void)state;
  for_each_grid(check_resume);
}

/* Error feedback: three steps of lossy gradients, a file, three more steps; and the file alone. */
static void train_lossy(TestModel *m, int from, int to) {
  for (int step = from; step < to; step++) {
    zeropp_zero_grad(m->z);
    for (int u = TEST_UNITS - 1; u >= 0; u--) {
      zeropp_open_grad(m->z, u);
      for (int p = 0; p < TEST_PARAMS; p++) {
        if (test_shapes[p].unit != u) continue;
        Tensor g = zeropp_grad(m->z, p);
        for (int64_t i = 0; i < tensor_numel(g); i++)
          tensor_f32(g)[i] =
              0.013f * (float)((p + step * 7 + (int)i * 5 + m->grid->rank) % 23 - 11);
      }
      zeropp_reduce(m->z, u);
    }
    assert_false(
        zeropp_step(m->z, (AdamW){.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f}, 1)
            .skipped);
  }
}

static bool same_masters(const TestModel *a, const TestModel *b) {
  double differ = 0;
  for (int p = 0; p < TEST_PARAMS; p++) {
    int64_t start, count;
    const float *x = zeropp_shard(a->z, STATE_MASTER, p, &start, &count);
    const float *y = zeropp_shard(b->z, STATE_MASTER, p, &start, &count);
    if (count && memcmp(x, y, (size_t)count * sizeof *x) != 0) differ = 1;
  }
  comm_all_reduce_f64(a->grid->all, &differ, 1, true);
  return differ == 0;
}

static void load(TestModel *m, const char *path) {
  Error err = {""};
  if (zeropp_load_state(m->z, path, &err)) die("%s", err.msg);
}

static void check_errors(int local) {
  char *path = tmp_file("errors");
  ZeroPPConfig cfg = {.stage = 3, .trainable = true, .block = 4, .qgz = WIRE_INT4};
  TestModel forgetful = test_model_of(local, cfg);
  cfg.error_feedback = true;
  cfg.error_decay = 0.5;
  TestModel a = test_model_of(local, cfg), b = test_model_of(local, cfg);
  cfg.block = 6;
  TestModel other = test_model_of(local, cfg);
  Error err = {""};
  zeropp_init_random(a.z, 5);
  train_lossy(&a, 0, 3);
  if (zeropp_save_state(a.z, path, &err)) die("%s", err.msg);
  train_lossy(&a, 3, 6);
  load(&b, path);
  train_lossy(&b, 3, 6);
  assert_true(same_masters(&a, &b));
  load(&b, path); /* errors of the steps since are gone */
  train_lossy(&b, 3, 6);
  assert_true(same_masters(&a, &b));
  load(&forgetful, path); /* without errors the steps are others: the file's errors matter */
  train_lossy(&forgetful, 3, 6);
  assert_false(same_masters(&a, &forgetful));
  load(&other, path); /* other blocks, as another grid: errors start at zero */
  train_lossy(&other, 3, 6);
  if (zeropp_save_state(forgetful.z, path, &err)) die("%s", err.msg);
  load(&b, path); /* a file without */
  train_lossy(&b, 3, 4);
  test_model_free(&a);
  test_model_free(&b);
  test_model_free(&forgetful);
  test_model_free(&other);
  free(path);
}

static void error_feedback_is_resumed(void **state) {
  (void)state;
  for_each_grid(check_errors);
}

/* What any mode writes, any other reads: stage 0 spreads what it read to all ranks. */
static void check_modes(int local) {
  char *path = tmp_file("modes");
  TestModel plain = test_model(local, true), m = test_model_of(local, mode->cfg);
  Error err = {""};
  zeropp_init_random(plain.z, 9);
  train_lossy(&plain, 0, 2);
  if (zeropp_save_state(plain.z, path, &err)) die("%s", err.msg);
  load(&m, path);
  check_true(zeropp_steps(m.z) == 2);
  if (zeropp_save_state(m.z, path, &err)) die("%s", err.msg);
  train_lossy(&m, 2, 3);
  train_lossy(&plain, 2, 3);
  bool lossless = !mode->cfg.qwz && !mode->cfg.qgz && mode->cfg.wire == WIRE_F32;
  check_true(lossless == same_masters(&plain, &m) || m.grid->world == 1);
  TestModel again = test_model(local, true);
  load(&again, path);
  train_lossy(&again, 2, 3);
  check_true(same_masters(&plain, &again));
  test_model_free(&plain);
  test_model_free(&again);
  test_model_free(&m);
  free(path);
}

static void any_mode_reads_what_any_other_wrote(void **state) {
  (void)state;
  for (int i = 0; i < TEST_MODES; i += 1 + launch_world() / 2) {
    mode = &test_modes[i];
    check_modes(1);
    check_modes(launch_world());
  }
}

static void assert_refused(TestModel *m, const char *path, const char *word) {
  Error err = {""};
  uint64_t version = zeropp_version(m->z);
  assert_int_equal(zeropp_load_state(m->z, path, &err), -1);
  if (!strstr(err.msg, word) || !strstr(err.msg, path)) /* on every rank, not just the first */
    die("expected '%s' and the path in: %s", word, err.msg);
  assert_state(m->z, 3); /* nothing was overwritten */
  assert_int_equal(zeropp_version(m->z), version);
  assert_int_equal(zeropp_steps(m->z), 0);
  comm_barrier(m->grid->all);
}

static void check_bad_files(int local) {
  static const struct {
    const char *word;
    int n_kinds;
    Defect defect;
  } cases[] = {
      {"no tensor master/norm.weight", 3, {14, -1, DT_F32, 1, false, false}},
      {"no tensor moment1/embed.weight", 1, {-1, -1, DT_F32, 1, false, false}},
      {"master/1.o.weight", 3, {-1, 13, DT_F32, 1, false, false}},
      {"expected F32", 3, {-1, -1, DT_BF16, 1, false, false}},
      {"state format 2", 3, {-1, -1, DT_F32, 2, false, false}},
      {"zeropp/counters", 3, {-1, -1, DT_F32, 1, true, false}},
      {"tensors", 3, {-1, -1, DT_F32, 1, false, true}},
      {"no moving average", 4, {-1, -1, DT_F32, 1, false, false}},
  };
  char *path = tmp_file("bad");
  TestModel m = test_model(local, true);
  for (int k = 0; k < 3; k++) test_fill(m.z, saved[k]);
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    reference_from_root(&m, path, cases[c].n_kinds, 5, cases[c].defect);
    assert_refused(&m, path, cases[c].word);
  }
  reference_from_root(&m, path, 3, -1, sound);
  assert_refused(&m, path, "-1 steps");
  if (m.grid->rank == 0) assert_int_equal(truncate(path, 4000), 0);
  comm_barrier(m.grid->all);
  assert_refused(&m, path, "");
  if (m.grid->rank == 0) assert_int_equal(remove(path), 0);
  comm_barrier(m.grid->all);
  assert_refused(&m, path, "");
  test_model_free(&m);
  free(path);
}

static void bad_files_are_refused_by_all(void **state) {
  (void)state;
  for_each_grid(check_bad_files);
}

/* Files may grow to `bytes` only (0: as before); what goes beyond fails with "File too large". */
static void limit_files(rlim_t bytes) {
  struct rlimit limit;
  signal(SIGXFSZ, SIG_IGN);
  if (getrlimit(RLIMIT_FSIZE, &limit)) die("getrlimit");
  limit.rlim_cur = bytes ? bytes : limit.rlim_max;
  if (setrlimit(RLIMIT_FSIZE, &limit)) die("setrlimit");
}

static void assert_unsaved(TestModel *m, const char *path) {
  Error err = {""};
  assert_int_equal(zeropp_save_state(m->z, path, &err), -1);
  if (!strstr(err.msg, path)) die("expected the path in: %s", err.msg);
  comm_barrier(m->grid->all);
}

static void a_failed_save_leaves_nothing(void **state) {
  (void)state;
  char *path = tmp_file("unsaved"), *below = tmp_file("no/such/folder");
  TestModel m = test_model(0, true);
  test_fill(m.z, STATE_MASTER);
  assert_unsaved(&m, below);
  for (int r = 0; r < m.grid->world; r++) { /* 0: fails to create; others: to write their pieces */
    if (m.grid->rank == r) limit_files(5000);
    assert_unsaved(&m, path);
    if (m.grid->rank == r) limit_files(0);
    assert_false(fs_exists(path));
    comm_barrier(m.grid->all);
  }
  if (m.grid->rank == 0) assert_int_equal(fs_make_dirs(path, NULL), 0);
  comm_barrier(m.grid->all);
  assert_unsaved(&m, path);
  assert_true(fs_is_dir(path)); /* what was there before is left alone */
  test_model_free(&m);
  free(path);
  free(below);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(any_ranks_load_full_tensors),
    cmocka_unit_test(any_ranks_write_the_same_bytes),
    cmocka_unit_test(a_resumed_run_has_the_same_bits),
    cmocka_unit_test(error_feedback_is_resumed),
    cmocka_unit_test(any_mode_reads_what_any_other_wrote),
    cmocka_unit_test(bad_files_are_refused_by_all),
    cmocka_unit_test(a_failed_save_leaves_nothing),
};
TEST_MAIN(tests)
